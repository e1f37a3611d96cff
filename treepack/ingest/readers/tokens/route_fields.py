"""Recorded routes of a rollout: the experts that the sampler's routers chose, in every form that programs store.

    [[[3, 7], [0, 2]], ...]                                    lists or an array, [n, layers, k]
    {"data": bytes or base64, "shape": [n, 2, 2], "dtype": "uint8"}     an object (prime-rl, verifiers); with "start",
                                                               its first row belongs to that token
    "k05VTVBZ..."                                              base64 of a .npy file (vLLM)
    "nrlre1:int16:9x2x2:AAEA..."                               base64 with its type and shape (NeMo Gym)

Row i belongs to token i of prompt and response. The last token is never computed by a sampler, and tokens of a tool
after the last call are not either, so rows may be missing at the end. A negative entry is not recorded, and neither are
k experts of which two are equal: samplers write zeros at padding and in layers without experts. Rows that end before
the first trained token are refused, because they may belong to the response alone.
"""

from __future__ import annotations

import base64
import binascii
import io
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.values import JsonObject, shown
from treepack.trajectory import Routes, as_routes, check_experts

NAMES = ("routed_experts", "rollout_routed_experts", "rollout_expert_indices")
_MAGIC = "nrlre1:"
_FORMS = (
    "expected experts of [tokens, layers, k]: lists, an object with data, shape and dtype, base64 of a .npy file, or "
    "text nrlre1:dtype:shape:base64"
)


def kept_routes(value: JsonObject, options: ReadOptions) -> JsonObject:
    """Return the fields of a record that contain routes, none if the caller does not keep them."""
    return {name: value[name] for name in NAMES if options.keep_routes and has_routes(value.get(name))}


def has_routes(value: Any) -> bool:
    """Return True if a field has routes: it is neither null nor an empty list or text."""
    return value is not None and not (isinstance(value, str | list | np.ndarray) and len(value) == 0)


def rows_of_all(value: Any, *, source: str, name: str, num_tokens: int) -> NDArray[Any]:
    """Return the field `value` of a row of `num_tokens` tokens as an array; tokens without routes have rows of -1.

    Raises:
        TreepackError: another form, or more rows than tokens.
    """
    rows = _rows(value, source, name, num_tokens)
    if len(rows) > num_tokens:
        raise TreepackError(f"{source}: {name} has {len(rows)} rows for {num_tokens} tokens; {_FORMS}")
    check_experts(rows, source=source, name=name)
    return np.concatenate([rows, np.full((num_tokens - len(rows), *rows.shape[1:]), -1, np.int32)]).astype(np.int32)


def read_routes(
    value: Any, *, source: str, name: str, num_tokens: int, start: int, stored: int, first_trained: int = 0
) -> Routes:
    """Return the routes of the tokens of a rollout, [num_tokens, layers, k], see `trajectory.missing_route`.

    Args:
        value: the field.
        source: the record, in errors.
        name: the field, in errors.
        num_tokens: tokens of the rollout, without padding.
        start: tokens of padding left of them.
        stored: tokens with padding; `value` has rows for all of them, or for the first tokens of the rollout.
        first_trained: first trained token of the rollout; the token before it needs a row.

    Raises:
        TreepackError: another form, another number of rows, or an entry that is not an expert.
    """
    rows = _rows(value, source, name, stored)
    if len(rows) == stored and stored > num_tokens:
        rows = rows[start : start + num_tokens]
    if len(rows) < first_trained:
        raise TreepackError(
            f"{source}: {name} has {len(rows)} rows, and the first trained token is token {first_trained + 1}; record "
            'a row for each token from the first one on, or give an object with "start"'
        )
    return as_routes(rows, num_tokens, source=source, name=name)


def _rows(value: Any, source: str, name: str, stored: int) -> NDArray[Any]:
    rows = _decoded(value, source, name, stored)
    if rows.ndim == 4 and len(rows) == 1:
        rows = rows[0]
    if rows.dtype.kind == "O":
        raise TreepackError(
            f"{source}: {name} has lists of different lengths, or an entry that is not an integer; {_FORMS}"
        )
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or 0 in rows.shape[1:]:
        raise TreepackError(f"{source}: {name} has the shape {list(rows.shape)} of {rows.dtype}; {_FORMS}")
    return rows


def _decoded(value: Any, source: str, name: str, stored: int) -> NDArray[Any]:
    """Return the entries of a field; an array of objects, or of a different shape, if they are not regular.

    Raises:
        TreepackError: text or bytes that are in none of the forms, or a start beyond the `stored` tokens.
    """
    if isinstance(value, dict) and "data" in value and "shape" in value:
        kind = str(value.get("dtype") or "int32").removeprefix("torch.").removeprefix("numpy.")
        rows = _of_bytes(_bytes(value["data"], source, name), kind, value["shape"], source, name)
        start = 0 if value.get("start") is None else value["start"]
        if type(start) is not int or not 0 <= start <= stored:
            raise TreepackError(
                f"{source}: {name} has the start {shown(start)} for {stored} tokens; expected the number of tokens "
                "before its first row"
            )
        return _shifted(rows, start)
    if isinstance(value, str) and value.startswith(_MAGIC):
        # "nrlre1:int16:9x2x2:AAEA" -> int16, [9, 2, 2]
        _, kind, shape, text = (*value.split(":", 3), "", "", "")[:4]
        sizes = [int(part) for part in shape.split("x") if part.isdecimal()]
        return _of_bytes(_bytes(text, source, name), kind, sizes, source, name)
    if isinstance(value, str | bytes):
        try:
            return npy_array(_bytes(value, source, name))
        except ValueError:
            raise TreepackError(f"{source}: {name} is text that is not a .npy file; {_FORMS}") from None
    try:
        return np.asarray(_plain(value))
    except (ValueError, OverflowError):
        return np.zeros(0, np.object_)


def npy_array(data: bytes) -> NDArray[Any]:
    """Return the array in the bytes of a .npy file.

    Raises:
        ValueError: they are not such a file.
    """
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (EOFError, MemoryError, OSError, SyntaxError, TokenError) as error:  # of damaged headers
        raise ValueError(str(error)) from None


def _shifted(rows: NDArray[Any], start: int) -> NDArray[Any]:
    # The first row belongs to token `start`: 2 -> two rows of -1, then the rows.
    if start == 0 or rows.ndim != 3:
        return rows
    return np.concatenate([np.full((start, *rows.shape[1:]), -1, np.int32), rows])


def _plain(value: Any) -> Any:
    # Parquet gives arrays of arrays, whose type is object.
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        return [_plain(part) for part in value]
    return value


def _bytes(value: Any, source: str, name: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise TreepackError(f"{source}: {name} is not base64; {_FORMS}") from None


def _of_bytes(data: bytes, kind: str, shape: Any, source: str, name: str) -> NDArray[Any]:
    try:
        entries = np.dtype(kind).newbyteorder("<")
    except TypeError:
        raise TreepackError(f"{source}: {name} has the dtype {shown(kind)}; {_FORMS}") from None
    sizes: Any = shape
    try:
        sizes = [int(size) for size in shape] if isinstance(shape, list | tuple | np.ndarray) else []
        return np.frombuffer(data, entries).reshape(sizes)
    except (TypeError, ValueError):
        raise TreepackError(
            f"{source}: {name} has {len(data)} bytes of {kind}, which do not fit the shape {sizes}; {_FORMS}"
        ) from None
