"""Loss weight of a turn from its marks: one function for the messages of every format.

    {"loss": true, "weight": 2}       2         flags and weights multiply
    {"train": "false"}                0         values of a different type that mean the same: 0, 0.0, "0", "false"
    {"train_detail": [one with train false]}    a turn of which only parts are trained: 0, and a note

A flag is `loss` (ms-swift), `trainable` (ART, rLLM), `train` and `training` (Axolotl), or `mask`, which is 1 for a
trained turn as every other mask is. `masked` (torchtune) is its opposite.
"""

from __future__ import annotations

from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject, as_number, shown
from treepack.trajectory import WEIGHTS, is_weight

_FLAGS = ("loss", "trainable", "train", "training", "mask")
_OPPOSITE = "masked"
_NUMBERS = ("weight", "loss_scale", "loss_weight")
_DETAIL = "train_detail"
WEIGHT_FIELDS = (*_FLAGS, _OPPOSITE, *_NUMBERS, _DETAIL)
_DETAIL_NOTE = f"turn with a {_DETAIL} that trains a part of it, not trained"
_TEXTS = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}


def as_flag(value: Any) -> bool | None:
    """Return true, false, 0 and 1 in any type as a boolean; None for any other value."""
    if isinstance(value, str):
        return _TEXTS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def weight_of(turn: JsonObject, where: str) -> tuple[float, tuple[str, ...]]:
    """Return the loss weight of a turn of the assistant, and notes to be counted; `where` begins an error.

    Raises:
        TreepackError: a mark has a value that is neither a flag nor a weight.
    """
    weight = 1.0
    # Several fields multiply: {"trainable": true, "loss_scale": 0.5} -> 0.5, {"loss": false, "weight": 2} -> 0.
    for name in (*_FLAGS, _OPPOSITE):
        if (value := turn.get(name)) is not None:
            flag = as_flag(value)
            if flag is None:
                raise TreepackError(f"{where} has {name} {shown(value)}; expected true or false")
            weight *= flag != (name == _OPPOSITE)
    for name in _NUMBERS:
        if (value := turn.get(name)) is not None:
            number = _number(value, where, name)
            if not is_weight(number):
                raise TreepackError(f"{where} has {name} {shown(value)}; expected {WEIGHTS}")
            weight *= number
    is_whole, is_partial = _parts(turn, where)
    return (weight, ()) if is_whole else (0.0, (_DETAIL_NOTE,) if is_partial and weight else ())


def _number(value: Any, where: str, name: str) -> float:
    if (flag := as_flag(value)) is not None:
        return float(flag)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass  # as_number names the value
    return as_number(value, source=where, name=name)


def _parts(turn: JsonObject, where: str) -> tuple[bool, bool]:
    """Return whether the details of a turn train all of it, and whether they train any of it."""
    detail, content = turn.get(_DETAIL), turn.get("content")
    if detail is None or detail == []:
        return True, True
    entries = detail if isinstance(detail, list) and all(isinstance(part, dict) for part in detail) else [{}]
    flags = [as_flag(part.get("train")) for part in entries]
    if None in flags:
        raise TreepackError(
            f"{where} has {_DETAIL} {shown(detail)}; expected a list of objects with train true or false"
        )
    # Text that no part covers is not trained. Parts 0 to 4 and 5 to 9 of 10 characters cover all of it.
    last = len(content) - 1 if isinstance(content, str) else 0
    size = sum(part.get("end_offset", -1) - part.get("begin_offset", 0) + 1 for part in entries)
    return all(flags) and size > last, any(flags)
