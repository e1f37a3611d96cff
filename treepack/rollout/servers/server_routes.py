"""Experts in the answers of servers that run a mixture: the routers' choices for each token of a request.

    vLLM      --enable-return-routed-experts                                   base64 of a .npy file
    SGLang    --enable-return-routed-experts, and return_routed_experts        base64 of int32, without a shape

Row i has the experts of token i of prompt and continuation, [layers, k]. The last sampled token has no row,
because no forward pass has computed it yet. The fields belong to vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.ingest.readers.tokens.route_fields import npy_array
from treepack.rollout.engine import EngineError
from treepack.rollout.servers.dialects import ServerDialect, read_answer_part

_START = "start the server with --enable-return-routed-experts, or sample without --keep-routes"


def routes_of_answer(
    dialect: ServerDialect, answer: Any, *, sizes: list[int], layers: int | None, url: str
) -> list[NDArray[np.integer[Any]]]:
    """Return the experts of each continuation in an `answer`, [sizes[i], layers, k], in the smallest unsigned type.

    Args:
        dialect: the API.
        answer: its answer.
        sizes: rows that each continuation has.
        layers: layers of the model, which SGLang does not send.
        url: of the server, in errors.

    Raises:
        EngineError: the answer has no experts, or another number of rows; or `layers` is missing or does not fit.
    """
    texts = read_answer_part(dialect.routes, dialect, answer, "experts", url=url)
    if len(texts) != len(sizes) or any(not isinstance(text, str) for text in texts):
        raise EngineError(f"{url}: {dialect.path} answered without routed_experts; {_START}")
    return [_read_one(dialect, text, size, layers, url) for text, size in zip(texts, sizes, strict=True)]


def _read_one(dialect: ServerDialect, text: str, size: int, layers: int | None, url: str) -> NDArray[np.integer[Any]]:
    try:
        data = base64.b64decode(text, validate=True)
        rows = np.frombuffer(data, "<i4") if dialect.name == "SGLang" else npy_array(data)
    except ValueError as error:
        raise EngineError(
            f"{url}: {dialect.path} answered routed_experts in another form ({error}); {_START}"
        ) from None
    if dialect.name == "SGLang":
        if layers is None:
            raise EngineError(
                f"{url}: SGLang sends experts without the number of layers; give it with --route-layers, "
                "num_hidden_layers of the model's config"
            )
        if size < 1 or rows.size % (size * layers):
            raise EngineError(
                f"{url}: {rows.size} experts do not fit {size} tokens in {layers} layers; correct --route-layers"
            )
        rows = rows.reshape(size, layers, -1)
    is_regular = rows.ndim == 3 and 0 not in rows.shape[1:] and rows.dtype.kind in "iu"
    if not is_regular or len(rows) != size or (rows.size and rows.min() < 0):
        raise EngineError(
            f"{url}: {dialect.path} answered routed_experts {list(rows.shape)} of {rows.dtype}; expected integers of "
            f"at least 0, [tokens, layers, k], for {size} tokens"
        )
    return rows.astype(np.min_scalar_type(int(rows.max(initial=0))))
