"""Row groups, and rows that several tasks make: fixed columns, encodings of every reader of Parquet, joined parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import strategies
from support.manifests import manifest_of
from support.refusal import refusal
from support.strategies import make, trajectories
from treepack.columns import BY_PACKED, COLUMNS, Lists
from treepack.errors import TreepackError
from treepack.files import parts, schema
from treepack.files.directory import finished_directory
from treepack.files.task_output import TaskOutput
from treepack.pack import files
from treepack.pack.check import check_packed, check_row
from treepack.pack.files import num_parts, read_rows, write_packed, write_packed_manifest, write_rows
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row, concatenate_rows
from treepack.pack.row_group import RowGroup, packed_columns, row_schema
from treepack.pack.rows import pack_rows
from treepack.pack.weights import WholeTrie
from treepack.ragged import RaggedArray
from treepack.sequences import PER_TOKEN
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie


def rows_of(trajectories: list[Trajectory], capacity: int = 20) -> list[Row]:
    trie = build_trie(trajectories)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity)))


def rows_with_terms(count: int) -> list[Row]:
    """Rows of two trajectories; the second one of each pair has no reward and no log-probabilities."""
    pairs = [
        [make(f"{i}a", [i, 2, 3], reward=i / 3, old_logprobs=np.array([-1, -i], np.float32)), make(f"{i}b", [i, 5])]
        for i in range(count)
    ]
    return rows_of([each for pair in pairs for each in pair], capacity=4)


def plain_table(rows: list[Row], columns: pa.Schema) -> pa.Table:
    """The slow twin of `RowGroup.table`: one Python object for each value."""

    def cell(row: Row, field: pa.Field) -> Any:
        name = BY_PACKED[field.name].name if field.name in BY_PACKED else field.name.removeprefix("term_")
        value = getattr(row.terms if field.name in schema.TERMS.names else row, name)
        if not isinstance(value, np.ndarray):
            return value
        return [None if field.nullable and np.isnan(number) else number for number in value.tolist()]

    return pa.Table.from_arrays(
        [pa.array([cell(row, field) for row in rows], field.type) for field in columns], schema=columns
    )


@settings(max_examples=25)
@given(trajectories=strategies.trajectories(), cuts=st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_groups_have_the_columns_of_their_rows(trajectories: list[Trajectory], cuts: list[int]) -> None:
    rows = rows_of(trajectories)
    group = RowGroup(row_schema(rows[0]))
    while rows:  # the arrays of a group are used again, for fewer or for more values
        part, rows = rows[: cuts[0]], rows[cuts[0] :]
        cuts = cuts[1:] + cuts[:1]
        for row in part:
            group.append(row)
        assert group.table().equals(plain_table(part, group.columns))
        assert (group.num_rows, group.num_tokens) == (len(part), sum(row.num_tokens for row in part))
        group.clear()


def test_missing_values_of_terms_are_null() -> None:
    rows = rows_with_terms(5)
    group = RowGroup(row_schema(rows[0]))
    for row in rows:
        group.append(row)
    table = group.table()
    assert table.equals(plain_table(rows, group.columns))
    assert table["term_old_logprob"].combine_chunks().values.null_count == len(rows)


def test_a_group_stays_valid_while_the_next_one_is_filled() -> None:
    counted: Counter[str] = Counter()
    rows = rows_with_terms(6)
    groups = files._row_groups(each_alone(rows), counted)
    first = next(groups).table()
    copy = pa.table(first.to_pydict(), first.schema)
    next(groups)
    assert first.equals(copy)
    next(groups)
    assert not first.equals(copy)  # the arrays were used again, so the line above could have failed


def each_alone(rows: list[Row]) -> Iterator[Row]:
    """Rows that are so large that each is a group of its own."""
    for row in rows:
        width = files.GROUP_TOKENS
        columns: dict[str, Any] = {
            name: np.resize(getattr(row, name), width)
            for name in ("input_ids", "position_ids", "parent", "subtree_end", "scale", "loss_weight")
        }
        yield replace(row, **columns)


def test_many_terms_end_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_with_terms(6)
    assert rows[0].terms is not None
    monkeypatch.setattr(files, "GROUP_TERMS", 2 * len(rows[0].terms.token))
    write_packed(rows, tmp_path, capacity=4)
    assert pq.ParquetFile(tmp_path / "part-00000.parquet").num_row_groups == 3


def test_other_readers_know_every_encoding(tmp_path: Path) -> None:
    rows = rows_with_terms(50)
    write_packed(rows, tmp_path, capacity=4)
    path = tmp_path / "part-00000.parquet"
    metadata = pq.ParquetFile(path).metadata
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    # DELTA_BINARY_PACKED is of 2013; BYTE_STREAM_SPLIT of integers is of 2024, so older readers do not know it.
    assert {name for chunk in chunks for name in chunk.encodings} <= {
        *("PLAIN", "RLE", "RLE_DICTIONARY", "DELTA_BINARY_PACKED")
    }
    assert {chunk.compression for chunk in chunks} == {"ZSTD"}
    frame = pl.read_parquet(path, use_pyarrow=False)
    for name in ("input_ids", "parent", "subtree_end", "loss_weight", "trajectory_ids"):
        assert frame[name].to_list() == [list(getattr(row, name)) for row in rows]
    assert [weights for row in rows if row.terms is not None for weights in row.terms.weight.tolist()] == (
        frame["term_weight"].explode().to_list()
    )


def test_the_error_of_a_row_ends_the_writing(tmp_path: Path) -> None:
    def rows() -> Iterator[Row]:
        yield from each_alone(rows_with_terms(3))
        raise TreepackError("the third row is bad")

    assert "the third row is bad" in refusal(write_packed, rows(), tmp_path, capacity=4)
    assert not (tmp_path / "manifest.json").exists()


def test_the_error_of_a_full_disk_ends_the_writing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_packed(each_alone(rows_with_terms(3)), tmp_path / "missing", capacity=4)


VALUES = ("reward", "advantage", "temperature", *PER_TOKEN)


def rows_by_slices(trie: Trie, capacity: int, **options: Any) -> list[Row]:
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity, method="contiguous"), **options))


@given(made=trajectories(), data=st.data())
def test_joined_rows_are_rows_of_the_same_trajectories(made: list[Trajectory], data: st.DataObject) -> None:
    trie = build_trie(made)
    rows = rows_by_slices(trie, 9)
    step = data.draw(st.sampled_from(rows)).step
    own = [row for row in rows if row.step == step]
    several = data.draw(st.lists(st.sampled_from(own), min_size=1, unique_by=lambda row: row.row_id))
    joined = concatenate_rows(several)
    check_row(joined, capacity=sum(row.num_tokens for row in several))
    others = [row for row in rows if row not in several]
    numbered = [Row(**{**fields_of(row), "row_id": i}) for i, row in enumerate([joined, *others])]
    check_packed(numbered, manifest_of(numbered, 9 * len(rows)), trie)


def fields_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def with_values(i: int, names: set[str]) -> Trajectory:
    """A trajectory of three trained tokens with a value of each of `names`, which is not the usual one."""
    values: dict[str, Any] = {name: [0.5, 0.25, 1.0] if name in PER_TOKEN else 0.5 for name in names}
    lists = {column.stored: column.kind.dtype for column in COLUMNS if isinstance(column.kind, Lists)}
    values |= {name: RaggedArray.of([[1, 7], [], [3]], lists[name]) for name in names & {*lists}}
    return make(f"t{i}", [i, 1, 2, 3], **values)


@given(names=st.sets(st.sampled_from((*VALUES, "weight"))))
def test_the_columns_follow_from_the_values_that_are_known(names: set[str]) -> None:
    trie = build_trie([with_values(0, names), with_values(1, set())])
    (row,) = rows_by_slices(trie, 99)
    assert packed_columns(names) == row_schema(row)


def test_a_slice_without_values_writes_nulls_in_the_columns_of_the_others(tmp_path: Path) -> None:
    known = frozenset({*VALUES, "weight"})
    full, empty = build_trie([with_values(0, {*known})]), build_trie([with_values(1, set())])
    columns = packed_columns(known)
    with finished_directory(tmp_path / "packed") as temporary:
        output = TaskOutput.of(temporary)
        written = [
            write_rows(rows_by_slices(each, 9, whole=WholeTrie(known)), output, columns, first_row=i, first_part=i)
            for i, each in enumerate((full, empty))
        ]
        write_packed_manifest(temporary, written, capacity=9)
    tables = [pq.read_table(tmp_path / "packed" / f"part-0000{i}.parquet") for i in range(2)]
    assert tables[0].schema.equals(tables[1].schema)
    assert [table["row_id"].to_pylist() for table in tables] == [[0], [1]]
    assert tables[1]["term_advantage"].to_pylist() == [[None] * 3]
    assert tables[1]["trajectory_rewards"].to_pylist() == [[None]]
    assert [table["trajectory_weights"].to_pylist() for table in tables] == [[[0.5]], [[1.0]]]
    check_packed(
        read_rows(tmp_path / "packed"),
        manifest_of([*read_rows(tmp_path / "packed")], 9),
        build_trie([with_values(0, {*known}), with_values(1, set())]),
    )


@settings(max_examples=20)
@given(made=trajectories(), limit=st.integers(1, 40), group=st.integers(1, 20))
def test_parts_are_counted_before_they_are_written(
    made: list[Trajectory], limit: int, group: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = rows_by_slices(build_trie([*made, with_values(99, {"reward"})]), 9)
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in ((parts, "PART_TOKENS", limit), (files, "PART_TOKENS", limit)):
            patch.setattr(module, name, value)
        patch.setattr(files, "GROUP_TOKENS", group)
        patch.setattr(files, "GROUP_TERMS", group)
        manifest = write_packed(rows, folder, capacity=9)
        terms = [len(row.terms.token) for row in rows if row.terms is not None]
        counted = num_parts(np.array([row.num_tokens for row in rows]), np.array(terms))
    assert counted == len(manifest["files"])


def test_parts_of_no_row_are_refused(tmp_path: Path) -> None:
    empty = write_rows([], TaskOutput(str(tmp_path), None), pa.schema([]))
    assert empty.entries == ()
    assert "there is no row to write" in refusal(write_packed_manifest, tmp_path, [empty], capacity=9)
