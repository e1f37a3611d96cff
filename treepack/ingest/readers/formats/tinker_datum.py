"""Tinker's datums: sequences ready for training, shifted already.

    {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
     "loss_fn_inputs": {"target_tokens": {"data": [6, 7]}, "mask": {"data": [0.0, 1.0]}, "logprobs": .., ..}}

Target i is token i + 1 of the sequence 5 6 7, and so is what belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import ReadOptions, shown
from treepack.ingest.readers.format import ANY, LOGPROBS, MASKS, OBJECT, TOKEN_IDS, Format
from treepack.ingest.readers.formats import tokens
from treepack.ingest.readers.formats.tinker import ids_of
from treepack.ingest.readers.messages import MEDIA_REASON
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.token_fields import number_values
from treepack.ingest.readers.trajectories import without
from treepack.trajectory import Float64, Skipped, Trajectory, as_token_ids

WEIGHTS = ("mask", "weights")
VALUES = {"logprobs": "rollout_log_probs", "advantages": "advantages"}


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The one trajectory of `record`.

    Raises:
        TreepackError: targets that are not the input one place later, or what the `tokens` reader refuses.
    """
    source, inputs = record.source, record.value["loss_fn_inputs"]
    ids = ids_of(record.value["model_input"], source)
    if ids is None:
        yield Skipped(source, MEDIA_REASON)
        return
    targets = as_token_ids(_data(inputs.get("target_tokens"), "target_tokens", source), source=source, name="targets")
    if len(targets) != len(ids) or len(ids) == 0 or not np.array_equal(targets[:-1], ids[1:]):
        raise TreepackError(
            f"{source}: target_tokens are not the tokens of model_input one place later; expected those of one sequence"
        )
    name = next((name for name in WEIGHTS if name in inputs), None)
    if name is None:
        weights = np.ones(len(ids))
    else:
        weights = _numbers(inputs[name], name, len(ids), source)
    fields: dict[str, Any] = {"input_ids": np.append(ids, targets[-1]), "loss_mask": np.append(0.0, weights)}
    for given, canonical in VALUES.items():
        if given in inputs:
            fields[canonical] = np.append(np.nan, _numbers(inputs[given], given, len(ids), source))
    rest = without(record.value, ("model_input", "loss_fn_inputs"))
    yield from tokens.read(replace(record, value=rest | fields), options)


def _data(held: Any, name: str, source: str) -> list[Any]:
    """The values of a tensor as Tinker writes it, or of a plain list."""
    values = held.get("data") if isinstance(held, dict) else held
    if not isinstance(values, list) or (isinstance(held, dict) and held.get("sparse_crow_indices") is not None):
        raise TreepackError(f"{source}: {name} is {shown(held)}; expected one value per token")
    return values


def _numbers(held: Any, name: str, num_tokens: int, source: str) -> Float64:
    numbers = number_values(_data(held, name, source), source=source, name=name)
    if len(numbers) != num_tokens:
        raise TreepackError(f"{source}: {name} has {len(numbers)} values; expected {num_tokens}, one per target")
    return numbers


FORMAT = Format(
    name="tinker-datum",
    program="Tinker (Datum)",
    recognised_by="`model_input` and `loss_fn_inputs`",
    requires=[{"model_input": ANY, "loss_fn_inputs": OBJECT}],
    used="""
        model_input.chunks loss_fn_inputs.target_tokens loss_fn_inputs.mask loss_fn_inputs.weights
        loss_fn_inputs.logprobs loss_fn_inputs.advantages
    """.split(),
    dropped=(
        "clip thresholds",
        "chunks that are not text (datums that have some are skipped)",
    ),
    keeps={TOKEN_IDS, MASKS, LOGPROBS},
    read=read,
)
