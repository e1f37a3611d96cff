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
from support.refusal import refusal
from support.strategies import make
from treepack.columns import BY_PACKED
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.pack import files
from treepack.pack.files import write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.row_group import RowGroup, row_schema
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie


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
