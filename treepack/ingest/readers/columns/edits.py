"""Fields that `--columns` ignores or calls a mask, in records of any format: the record is edited before it is read.

    {"messages": [{"role": "assistant", "content": "No.", "learnable": false}, ..]}
    mask=learnable    --edited-->  {"messages": [{"role": "assistant", "content": "No.", "trainable": false}, ..]}
    ignore=learnable  --edited-->  {"messages": [{"role": "assistant", "content": "No."}, ..]}

A path that the record does not have is one of the objects in its lists. A mask of the record itself is a list with one
value for each message, or for each token, or a flag of all that the record adds. Messages are marked; other turns get
their weights after they are read (`TurnWeights`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import ColumnMap, ColumnPath
from treepack.ingest.readers.fields.field_paths import GONE, MISSING, value_at, without_paths
from treepack.ingest.readers.fields.values import JsonObject, is_messages, shown
from treepack.ingest.readers.messages.containers import with_containers
from treepack.ingest.readers.messages.turn_weights import as_flag
from treepack.ingest.readers.turn_flags import TurnWeights, is_other
from treepack.trajectory import WEIGHTS, is_weight

_Object = JsonObject


def edited(record: Record, columns: ColumnMap, weights: TurnWeights) -> tuple[Record, list[str]]:
    """Return `record` after the edits of `columns`, which have no other keys, and a note on each ignored field.

    `weights` get the turns with a mask of their own.

    Raises:
        TreepackError: the record has no such mask.
    """
    record, notes = without_ignored(with_containers(record), columns)
    for path in columns.paths.get("mask", ()):
        value = _with_mask(record.value, path, record.source, weights)
        record = replace(record.with_lists(), value=value)
    return record, notes


def without_ignored(record: Record, columns: ColumnMap) -> tuple[Record, list[str]]:
    """Return `record` without the ignored fields, and a note on each that it had."""
    value: Any = record.value
    for path in columns.ignore:
        is_outer = value_at(value, path.steps) is not MISSING
        value = without_paths(value, [path.steps]) if is_outer else _in_elements(value, path, _without(path))
        value = {} if value is GONE else value
    notes = [f"field '{path.text}' ignored" for path in columns.ignore if _has(record.value, path)]
    return (replace(record, value=value, line=None) if notes else record), notes


def _with_mask(value: _Object, path: ColumnPath, source: str, weights: TurnWeights) -> _Object:
    mask = value_at(value, path.steps)

    def edit(turn: _Object) -> _Object:
        flag, rest = value_at(turn, path.steps), _without(path)(turn)
        if flag is None or is_other(rest):
            return rest
        number = as_flag(flag) if isinstance(flag, str) else flag
        if not isinstance(number, int | float) or not is_weight(float(number)):
            raise TreepackError(f"{source}: the column mask is {shown(flag)}; expected true, false, or {WEIGHTS}")
        is_message = any(isinstance(rest.get(name), str) for name in ("role", "from"))
        weights.add(rest, float(number), is_marked=is_message)
        return _marked(rest, number) if is_message else rest

    if isinstance(mask, list | np.ndarray):
        weights.is_used = True
        rest = without_paths(value, [path.steps])
        name = next((name for name in ("messages", "conversations") if is_messages(rest.get(name))), None)
        return {**rest, "loss_mask": mask} if name is None else {**rest, name: masked(rest[name], mask, source)}
    if mask is not MISSING:
        return edit(value)
    if weights.is_required and not path.is_optional and not _has(value, path):
        raise TreepackError(
            f"{source}: has no {path.text} (column mask); correct the path, or write mask={path.text}? if records may "
            "lack it"
        )
    marked: _Object = _in_elements(value, path, edit)
    return marked


def masked(messages: list[_Object], mask: Any, source: str) -> list[_Object]:
    """Return `messages` with the values of `mask`, a list with one for each.

    Raises:
        TreepackError: it is something else.
    """
    mask = mask.tolist() if isinstance(mask, np.ndarray) else mask
    if not isinstance(mask, list) or len(mask) != len(messages):
        expected = f"a list of {len(messages)} values, one for each message"
        raise TreepackError(f"{source}: the column mask is {shown(mask)}; expected {expected}")
    return [_marked(message, flag) for message, flag in zip(messages, mask, strict=True)]


def _marked(message: _Object, flag: Any) -> _Object:
    return message if flag is None else {**message, "trainable" if isinstance(flag, bool) else "weight": flag}


def _without(path: ColumnPath) -> Callable[[_Object], _Object]:
    def edit(value: _Object) -> _Object:
        kept = without_paths(value, [path.steps])
        return {} if kept is GONE else kept

    return edit


def _has(value: Any, path: ColumnPath) -> bool:
    """Return whether `value`, or an object in a list inside of it, has a value at `path`."""
    if value_at(value, path.steps) is not MISSING:
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has(each, path) for each in inner if isinstance(each, dict | list))


def _in_elements(value: Any, path: ColumnPath, edit: Callable[[_Object], _Object]) -> Any:
    """Return `value` with each object in its lists that has a value at `path` edited."""
    if isinstance(value, dict):
        return {name: _in_elements(field, path, edit) for name, field in value.items()}
    if not isinstance(value, list):
        return value
    elements = [_in_elements(each, path, edit) for each in value]
    return [
        edit(each) if isinstance(each, dict) and value_at(each, path.steps) is not MISSING else each
        for each in elements
    ]
