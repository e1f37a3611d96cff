"""Rows that several tasks make: joined rows, fixed columns, and parts written elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.manifests import manifest_of
from support.refusal import refusal
from support.strategies import make, trajectories
from treepack.columns import COLUMNS, Lists
from treepack.files import parts
from treepack.files.directory import finished_directory
from treepack.files.task_output import TaskOutput
from treepack.pack import files
from treepack.pack.check import check_packed, check_row
from treepack.pack.files import num_parts, read_rows, write_packed, write_packed_manifest, write_rows
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row, concatenate_rows
from treepack.pack.row_group import packed_columns, row_schema
from treepack.pack.rows import pack_rows
from treepack.pack.weights import WholeTrie
from treepack.ragged import RaggedArray
from treepack.sequences import PER_TOKEN
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

VALUES = ("reward", "advantage", "temperature", *PER_TOKEN)


def rows_of(trie: Trie, capacity: int, **options: Any) -> list[Row]:
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity, method="contiguous"), **options))


@given(made=trajectories(), data=st.data())
def test_joined_rows_are_rows_of_the_same_trajectories(made: list[Trajectory], data: st.DataObject) -> None:
    trie = build_trie(made)
    rows = rows_of(trie, 9)
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
    (row,) = rows_of(trie, 99)
    assert packed_columns(names) == row_schema(row)


def test_a_slice_without_values_writes_nulls_in_the_columns_of_the_others(tmp_path: Path) -> None:
    known = frozenset({*VALUES, "weight"})
    full, empty = build_trie([with_values(0, {*known})]), build_trie([with_values(1, set())])
    columns = packed_columns(known)
    with finished_directory(tmp_path / "packed") as temporary:
        output = TaskOutput.of(temporary)
        written = [
            write_rows(rows_of(each, 9, whole=WholeTrie(known)), output, columns, first_row=i, first_part=i)
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
    rows = rows_of(build_trie([*made, with_values(99, {"reward"})]), 9)
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
