"""Columns of a part have the types of the format, or are in another container of the same values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.command_line import Run
from support.directory_damage import write_directories
from support.manifests import seal
from support.refusal import refusal
from treepack import PackedDataset
from treepack.files import schema
from treepack.files.part_columns import check_part_columns, shown_type, with_types
from treepack.pack.files import read_rows
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import trajectories_of

LISTS = [pa.large_list, lambda kind: pa.list_(kind, 2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_directories(tmp_path)
    return tmp_path


def replace_part(directory: Path, name: str, table: pa.Table) -> None:
    """Write `table` as the part `name`, as another program would, with its size and hash in the manifest."""
    pq.write_table(table, directory / name)
    content = (directory / name).read_bytes()
    manifest = json.loads((directory / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == name:
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal(directory / "manifest.json", manifest)


def retyped(table: pa.Table, column: str, kind: pa.DataType) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, table[column].cast(kind))


@pytest.mark.parametrize("make_list", LISTS, ids=["large", "fixed"])
def test_other_containers_of_the_same_values_become_those_of_the_schema(make_list: Any) -> None:
    columns = pa.schema([schema.ROWS.field("input_ids"), schema.ROWS.field("trajectory_ids")])
    values = {"input_ids": [[1, 2], [3, 4]], "trajectory_ids": [["a", "b"], ["b", "c"]]}
    table = pa.table(values, columns)
    kinds = [make_list(pa.int32()), make_list(pa.large_string())]
    other = pa.table([pa.array(each, kind) for each, kind in zip(values.values(), kinds, strict=True)], [*values])
    check_part_columns(other.schema, columns, "part", "pack again")
    assert with_types(other, columns).equals(table)


def test_a_directory_written_again_by_polars_is_read_if_its_integers_keep_their_width(folder: Path) -> None:
    before = [*read_rows(folder / "packed")], [*trajectories_of(read_trie(folder / "trie"))]
    for directory in (folder / "packed", folder / "trie"):
        for part in directory.glob("*.parquet"):
            replace_part(directory, part.name, pl.read_parquet(part).to_arrow())
    after = [*read_rows(folder / "packed")], [*trajectories_of(read_trie(folder / "trie"))]
    assert str(before) == str(after)
    assert len([*PackedDataset(folder / "packed", terms=True, routes=True)]) == len(before[0])


@pytest.mark.parametrize(
    ("directory", "part", "column", "kind", "found", "expected"),
    [
        ("packed", "part-00000.parquet", "input_ids", pa.large_list(pa.int64()), "large_list<int64>", "list<int32>"),
        ("packed", "part-00000.parquet", "num_tokens", pa.int64(), "int64", "int32"),
        ("packed", "part-00000.parquet", "term_weight", pa.list_(pa.float32()), "list<float>", "list<double>"),
        ("trie", "nodes-00000.parquet", "tokens", pa.list_(pa.int64()), "list<int64>", "list<int32>"),
        ("trie", "trajectories-00000.parquet", "weight", pa.float32(), "float", "double"),
        ("trie", "trajectories-00000.parquet", "step", pa.string(), "string", "int64"),
    ],
)
def test_another_type_is_refused_by_every_command_before_anything_is_computed(
    treepack: Run, folder: Path, directory: str, part: str, column: str, kind: pa.DataType, found: str, expected: str
) -> None:
    path = folder / directory
    replace_part(path, part, retyped(pq.read_table(path / part), column, kind))
    sentence = f"treepack: {path / part}: the column {column} has the type {found}, expected {expected}; write it with "
    commands: list[tuple[object, ...]] = [("stats", path), ("stats", path, "--check"), ("show", path)]
    commands += [("report", path, "--out", folder / "page.html")]
    if directory == "trie":
        commands += [("pack", path, "--capacity", 24, "--out", folder / "out")]
        commands += [("advantages", path, "--estimator", "grpo", "--out", folder / "out")]
    for command in commands:
        result = treepack(*command)
        assert (result.status, result.out) == (1, ""), command
        assert result.err.splitlines()[-1].startswith(sentence), command
    if directory == "packed":
        assert f"the column {column} has the type" in refusal(PackedDataset, path)


def test_a_column_that_is_there_twice_is_refused() -> None:
    found = pa.schema([("step", pa.int64()), ("step", pa.int64())])
    assert (
        refusal(check_part_columns, found, schema.PACKED, "part", "pack again")
        == "part: has the column step 2 times; pack again"
    )


def test_a_column_of_nulls_is_read_where_a_value_may_be_missing(folder: Path) -> None:
    table = pq.read_table(folder / "packed" / "part-00000.parquet")
    columns = pa.schema([schema.ROWS.field("step")])
    assert with_types(pa.table({"step": pa.nulls(2)}), columns)["step"].type == pa.int64()
    replace_part(folder / "packed", "part-00000.parquet", retyped(table, "row_id", pa.int64()))
    assert "the column row_id has the type null, expected int64" in refusal(
        check_part_columns, pa.schema([("row_id", pa.null())]), schema.PACKED, "part", "pack again"
    )


def test_a_list_of_another_length_is_refused_before_statistics_see_it(treepack: Run, folder: Path) -> None:
    path = folder / "packed"
    table = pq.read_table(path / "part-00000.parquet")
    lists = [row[:-1] for row in table["subtree_end"].to_pylist()]
    at = table.column_names.index("subtree_end")
    table = table.set_column(at, "subtree_end", pa.array(lists, table.schema.field(at).type))
    replace_part(path, "part-00000.parquet", table)
    for options in ((), ("--check",)):
        result = treepack("stats", path, *options)
        num = len(table["input_ids"][0])
        assert result.err.splitlines()[-1] == (
            f"treepack: row 0: subtree_end has {num - 1} values for {num} tokens; pack the trie again"
        )


def test_a_long_type_is_cut() -> None:
    kind = pa.struct([(f"field_{i}", pa.int32()) for i in range(1000)])
    assert len(shown_type(kind)) < 100
