"""Kept sets of a rollout: the ids that top-p, top-k or min-p left for each token, in every form that programs store.

    "sampling_mask": [[187, 326], [42], ..]                          a list of ids for each token (vLLM from 0.28 on)
    "sampling_mask": {"ids": [187, 326, 42], "counts": [2, 1]}       verifiers, prime-rl; the older name is kept_tokens
    "sampling_mask": {"token_ids": [187, 326, 42], "offsets": [0, 2, 3]}
    "rollout_top_p_token_ids": [187, 326, 42], "rollout_top_p_token_offsets": [0, 2, 3]                 slime
    "sampling_mask_token_ids": [[187, 326, 0], [42, 0, 0]], "sampling_mask_sizes": [2, 1]               NeMo RL

`kept_ids` is a name for any of the first three. Numbers may also be bytes, or base64, of little-endian int32. There is
one set for each token of the rollout, of the response, or of the trained tokens; an empty one is the whole vocabulary.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.rollout_facts import SAMPLING_DICTS
from treepack.ingest.readers.fields.token_fields import KEPT_SETS, SIZES_OF_SETS
from treepack.ingest.readers.fields.values import JsonObject, shown
from treepack.kept_sets import joined_ids
from treepack.ragged import RaggedArray

_USUAL = {"top_p": 1, "top_k": 0, "min_p": 0}  # a top-k of -1 is none, too
CUT_NOTE = "sampled with top_p, top_k or min_p without kept sets, so ratios are biased"
_FORMS = "expected a list of ids for each token, or an object with ids and counts, or with token_ids and offsets"


def set_fields(value: JsonObject) -> JsonObject:
    """Return the fields of a record that contain kept sets, with their sizes."""
    # `kept_tokens` is also a usual name of a number of tokens.
    found = {name: value[name] for name in KEPT_SETS if isinstance(value.get(name), list | dict | np.ndarray)}
    found = {name: each for name, each in found.items() if len(each)}
    return found | {size: value[size] for name, size in SIZES_OF_SETS.items() if name in found and size in value}


def cut_note(value: JsonObject) -> tuple[str, ...]:
    """Return a note about a record without kept sets if its settings have top-p, top-k or min-p."""
    holders = [value, *(value[name] for name in SAMPLING_DICTS if isinstance(value.get(name), dict))]
    for settings in holders:
        top_p, top_k, min_p = (
            number if isinstance(number := settings.get(name), int | float) else usual for name, usual in _USUAL.items()
        )
        if top_p < 1 or top_k > 0 or min_p > 0:
            return (CUT_NOTE,)
    return ()


def read_sets(fields: JsonObject, source: str) -> tuple[str, RaggedArray] | None:
    """Return the name of the first of the `set_fields` of a record, and its sets in their order; None without fields.

    Raises:
        TreepackError: another form, or sizes that do not fit the ids.
    """
    name = next((name for name in KEPT_SETS if name in fields), None)
    if name is None:
        return None
    value = fields[name]
    if name in SIZES_OF_SETS:
        return name, _sized(value, fields.get(SIZES_OF_SETS[name]), source, name)
    if isinstance(value, dict):
        ids = value.get("ids", value.get("token_ids"))
        if "counts" not in value and "offsets" not in value and isinstance(ids, list | np.ndarray):
            return name, joined_ids([*ids], source=source, name=name)
        return name, _sized(ids, value.get("counts", value.get("offsets")), source, name, is_counts="counts" in value)
    return name, joined_ids([*value], source=source, name=name)


def _sized(ids: Any, sizes: Any, source: str, name: str, *, is_counts: bool = False) -> RaggedArray:
    """Return the sets of flat `ids` with their counts or offsets, or of rows of ids that are filled up."""
    values, numbers = _integers(ids, source, name), _integers(sizes, source, f"the sizes of {name}")
    if values.ndim == 2 and numbers.shape == values.shape[:1]:
        if ((numbers < 0) | (numbers > values.shape[1])).any():
            raise TreepackError(
                f"{source}: {name} has sizes that are not 0 to {values.shape[1]}, the width of its rows"
            )
        # rows [[187 326 0] [42 0 0]], sizes [2 1] -> [187 326] [42]
        inside = np.arange(values.shape[1]) < numbers[:, None]
        return RaggedArray(values[inside], np.concatenate([[0], np.cumsum(numbers)]).astype(np.int64))
    offsets = np.concatenate([[0], np.cumsum(numbers)]) if is_counts else numbers
    fits = values.ndim == offsets.ndim == 1 and len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(values)
    if not fits or (np.diff(offsets) < 0).any():
        raise TreepackError(f"{source}: {name} has {values.size} ids, which do not fit its counts or offsets")
    return RaggedArray(values, offsets.astype(np.int64))


def _integers(values: Any, source: str, name: str) -> NDArray[Any]:
    if isinstance(values, str):
        try:
            values = base64.b64decode(values, validate=True)
        except (binascii.Error, ValueError):
            raise TreepackError(f"{source}: {name} is text that is not base64; {_FORMS}") from None
    if isinstance(values, bytes | bytearray | memoryview) and len(values) % 4 == 0:
        return np.frombuffer(values, "<i4")
    try:
        # Parquet gives arrays of arrays, whose type is object.
        found = np.asarray([*values]) if isinstance(values, list | np.ndarray) else np.zeros(0, np.object_)
    except (ValueError, OverflowError):
        found = np.zeros(0, np.object_)
    if not found.size and isinstance(values, list | np.ndarray):
        return np.zeros(0, np.int64)
    if found.dtype.kind not in "iu":
        raise TreepackError(f"{source}: {name} is {shown(values)}; {_FORMS}")
    return found
