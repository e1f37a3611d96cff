"""Directories that another program could have written: right hashes, and one column or one value that is wrong.

write_directories(folder)        folder/trie and folder/packed, with every column that treepack writes
part_cases() -> PartCase, ...    one column of one kind of part with another type, length or value
rewritten(case, folder, out)     a copy of the directory with the case; its manifest has the new size and hash
manifest_cases(folder)           one value of a manifest replaced or removed; its own hash fits
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from support.critic_values import with_values
from support.damage import ODD_VALUES, RAW
from support.manifests import seal
from support.recorded_routes import with_routes
from support.strategies import make
from support.trie_files import saved
from treepack.files import schema
from treepack.pack.directory import pack_trie
from treepack.pack.options import PackOptions
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

SPAN_WEIGHTS = (1.0, 0.5)
KINDS = {"nodes": ("trie", schema.TRIE["nodes"]), "trajectories": ("trie", schema.TRIE["trajectories"])}
KINDS |= {"part": ("packed", schema.PACKED)}


def rollouts() -> list[Trajectory]:
    """Eight trajectories of two groups and steps with all columns; two of them are parts of one rollout."""
    made = []
    for i in range(8):
        ids = [5, 6, 7, 8, 10 + i // 4, 20 + i, 30 + i % 2, 9]
        fields: dict[str, Any] = dict.fromkeys(("sampling_logprobs", "old_logprobs", "ref_logprobs"), [-0.5] * 5)
        fields |= {"advantages": [0.5] * 5, "temperatures": [0.7] * 5, "returns": [1.0] * 5}
        fields |= {"old_values": [0.25] * 5, "edge_factors": [0.5] * 5}
        fields |= {"rollout_id": "whole", "rollout_part": i} if i < 2 else {}
        metadata = {"segments": [3, 5], "segment_ids": [i // 4, i + 2], "leaf_weight": 0.5, "leaf_weights_before": 1.0}
        trajectory = make(
            f"r{i}",
            ids,
            spans=[(3, 6, SPAN_WEIGHTS[0]), (6, 8, SPAN_WEIGHTS[1])],
            group=f"g{i // 4}",
            step=i // 4,
            reward=float(i % 2),
            advantage=0.5,
            temperature=0.7,
            metadata=metadata,
            **fields,
        )
        made.append(with_routes(trajectory, np.tile(np.array([0, 1], np.uint8), (8, 2, 1))))
    return made


def write_directories(folder: Path) -> None:
    """Write `folder`/trie and `folder`/packed with routes, and `folder`/plain without: slices need that."""
    made = rollouts()
    saved(with_values(build_trie(made)), folder / "trie")
    saved(build_trie([with_routes(each, None) for each in made]), folder / "plain")
    pack_trie(folder / "trie", folder / "packed", PackOptions(capacity=24), overwrite=True)


@dataclass(frozen=True)
class PartCase:
    """Column `column` of the parts called `kind` after the change `change`."""

    kind: str
    column: str
    change: str

    @property
    def directory(self) -> str:
        return KINDS[self.kind][0]


NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint32(), pa.uint64(), pa.float16(), pa.float32()]
NUMBERS += [pa.float64(), pa.bool_(), pa.decimal128(20, 2), pa.timestamp("us"), pa.date32()]
TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary(4), pa.null()]


def _types(own: pa.DataType) -> dict[str, pa.DataType]:
    """Other types for a column of the type `own`, by their names."""
    inner = own.value_type if pa.types.is_list(own) else own
    plain = [*NUMBERS, *TEXTS, pa.dictionary(pa.int32(), pa.string()), pa.struct([("a", pa.int32())]), inner]
    lists = [pa.list_(kind) for kind in [*NUMBERS, *TEXTS[:5], inner, pa.list_(inner)]]
    others = [pa.large_list(inner), pa.list_(inner, 2), pa.large_list(pa.int64()), pa.large_list(pa.large_string())]
    return {f"type {kind}": kind for kind in [*plain, *lists, *others] if kind != own}


def _each(change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda rows: [None if row is None else change(row) for row in rows]


def _first(change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda rows: [change(rows[0]), *rows[1:]]


def _inside(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change of a number inside of a list, a span or a column."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(each) for each in value]
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        return change(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    return changed


LENGTHS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "one shorter": _each(lambda row: row[:-1]),
    "one longer": _each(lambda row: [*row, *row[-1:]]),
    "first shorter": _first(lambda row: row[1:]),
    "first longer": _first(lambda row: [*row, *row[:1]]),
    "empty": _each(lambda row: []),
    "first empty": _first(lambda row: []),
    "null inside": _each(lambda row: [None, *row[1:]]),
    "first null inside": _first(lambda row: [*row[:-1], None]),
    "reversed": _each(lambda row: row[::-1]),
    "doubled": _each(lambda row: [each for each in row for _ in range(2)]),
    "of another row": lambda rows: [*rows[1:], rows[0]],
}
VALUES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "null": lambda rows: [None] * len(rows),
    "first null": _first(lambda row: None),
    "rows reversed": lambda rows: rows[::-1],
    "all like the first": lambda rows: [rows[0]] * len(rows),
    "negative": _each(_inside(lambda value: -1)),
    "first negative": _first(_inside(lambda value: -1)),
    "zero": _each(_inside(lambda value: 0)),
    "one more": _each(_inside(lambda value: value + 1)),
    "one less": _each(_inside(lambda value: value - 1)),
    "first more": _first(_inside(lambda value: value + 1)),
    "largest": _each(_inside(lambda value: 2**31 - 1)),
    "smallest": _first(_inside(lambda value: -(2**31))),
    "NaN": _each(_inside(lambda value: float("nan"))),
    "infinite": _first(_inside(lambda value: float("inf"))),
    "enormous": _each(_inside(lambda value: 1e300)),
}
WORDS: dict[str, Callable[[str], str]] = {
    "empty text": lambda text: "",
    "same text": lambda text: "x",
    "long text": lambda text: text + "y" * 5000,
    "control text": lambda text: text + "\x1b]0;x\x07",
    "JSON text": lambda text: "[1, {}]",
    "half JSON": lambda text: '{"a": ',
    "JSON null": lambda text: "null",
    "JSON object": lambda text: '{"segments": "x", "segment_ids": {}, "leaf_weight": null}',
    "JSON numbers": lambda text: '{"segments": [-1, 1e999], "segment_ids": [[]], "leaf_weight": -1}',
}
COLUMNS = ("missing", "twice", "renamed", "last", "no rows")


def _texts(change: Callable[[str], str]) -> Callable[[list[Any]], list[Any]]:
    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(each) for each in value]
        return change(value) if isinstance(value, str) else value

    return lambda rows: [changed(row) for row in rows]


CHANGES = LENGTHS | VALUES | {name: _texts(change) for name, change in WORDS.items()}


def part_cases() -> list[PartCase]:
    """Every change of every column to which it can be made."""
    cases = []
    for kind, (_, columns) in KINDS.items():
        for field in columns:
            text = pa.types.is_string(field.type) or (
                pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type)
            )
            changes = [*_types(field.type), *COLUMNS, "null", "first null", "rows reversed", "all like the first"]
            changes += LENGTHS if pa.types.is_list(field.type) else ()
            changes += WORDS if text else [name for name in VALUES if name not in changes]
            cases += [PartCase(kind, field.name, change) for change in changes]
    return cases


@cache
def _original(path: Path) -> pa.Table:
    return pq.read_table(path)


def rewritten(case: PartCase, folder: Path, out: Path, *, routes: bool = True) -> Path | None:
    """Write a copy of the directory of `case` to `out`; None if it has no such column, or the values do not convert.

    Without `routes`, the trie is the one without these columns.
    """
    source = folder / (case.directory if routes or case.directory == "packed" else "plain")
    manifest = json.loads((source / "manifest.json").read_text())
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    for entry in manifest["files"]:
        if not entry["name"].startswith(case.kind):
            continue
        try:
            table = _changed(_original(source / entry["name"]), case)
            pq.write_table(table, out / entry["name"])
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            return None
        content = (out / entry["name"]).read_bytes()
        entry |= {"rows": table.num_rows, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal(out / "manifest.json", manifest)
    return out


def _changed(table: pa.Table, case: PartCase) -> pa.Table:
    place = table.schema.get_field_index(case.column)
    if place < 0:
        raise ValueError(f"no column {case.column}")
    own = table.column(place)
    if case.change == "missing":
        return table.remove_column(place)
    if case.change == "twice":
        return table.append_column(case.column, own)
    if case.change == "renamed":
        return table.rename_columns([f"{name}_" if name == case.column else name for name in table.column_names])
    if case.change == "last":
        return table.remove_column(place).append_column(case.column, own)
    if case.change == "no rows":
        return table.slice(0, 0)
    if case.change.startswith("type "):
        kind = _types(schema_type(case))[case.change]
        return table.set_column(place, case.column, _converted(own, kind))
    values = CHANGES[case.change](own.to_pylist())
    return table.set_column(place, case.column, pa.array(values, own.type))


def schema_type(case: PartCase) -> pa.DataType:
    return KINDS[case.kind][1].field(case.column).type


def _converted(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """The values of `column` as the type `kind`, or made-up ones if they do not convert."""
    try:
        return pa.chunked_array([column.combine_chunks().cast(kind, safe=False)])
    except (pa.ArrowException, ValueError, TypeError):
        pass
    return pa.array([_made_up(kind) for _ in range(len(column))], kind)


def _made_up(kind: pa.DataType) -> Any:
    if pa.types.is_fixed_size_list(kind):
        return [_made_up(kind.value_type)] * 2
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_made_up(kind.value_type)]
    if pa.types.is_struct(kind):
        return {"a": 1} if kind.get_field_index("a") >= 0 else {"start": 1, "end": 2, "weight": 1.0}
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return b"abcd"
    if pa.types.is_null(kind):
        return None
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return "1" if is_text or pa.types.is_dictionary(kind) else 1


@dataclass(frozen=True)
class ManifestCase:
    """The value at `path` of the manifest of `directory` is replaced by `value`, or removed if it is `...`."""

    directory: str
    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        return f"{self.directory} {'.'.join(map(str, self.path))} = {str(self.value)[:80]!r}"


def manifest_values() -> list[Any]:
    plain = [value for value in ODD_VALUES if not (isinstance(value, str) and value.startswith(RAW))]
    return [*plain, ..., float("nan"), float("inf"), -1.5, 2**31 - 1, 2**63 - 1, "z" * 100_000, {"z" * 5000: 1}]


def manifest_cases(folder: Path) -> Iterator[ManifestCase]:
    """Every odd value at every place of both manifests."""
    for directory in ("trie", "packed"):
        manifest = json.loads((folder / directory / "manifest.json").read_text())
        for path in _paths(manifest):
            for value in manifest_values():
                yield ManifestCase(directory, path, value)


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path and path != ("sha256",):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _paths(each, (*path, key))


def with_value(case: ManifestCase, folder: Path, out: Path) -> Path:
    """Write a copy of the directory of `case` to `out`; its parts are links to the original ones."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / case.directory, out)
    manifest = copy.deepcopy(json.loads((out / "manifest.json").read_text()))
    holder: Any = manifest
    for key in case.path[:-1]:
        holder = holder[key]
    if case.value is ...:
        del holder[case.path[-1]]
    else:
        holder[case.path[-1]] = case.value
    seal(out / "manifest.json", manifest)
    return out
