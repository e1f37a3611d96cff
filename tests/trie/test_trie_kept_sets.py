"""Kept sets in tries: they come back from every way to build one, and exist only where the data has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kept import as_lists, kept, token_sets
from support.strategies import make
from treepack.errors import TreepackError
from treepack.files.part_columns import check_part_columns, with_types
from treepack.files.schema import TRIE
from treepack.ingest.array_rollouts import trajectories_from_arrays
from treepack.ragged import RaggedArray, join_lists
from treepack.sequences import as_columns
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.builders.out_of_core import build_large_trie
from treepack.trie.check import check_trie
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.trie import Trie, trajectories_of


def by_name(trie: Trie) -> dict[str, list[list[int]]]:
    return {item.trajectory_id: token_sets(item) for item in trajectories_of(trie)}


def sets(*lists: list[int]) -> RaggedArray:
    return RaggedArray.of(lists, np.int32)


@given(kept())
def test_a_trie_gives_the_sets_back(rollouts: list[Trajectory]) -> None:
    trie = build_trie(rollouts)
    check_trie(trie)
    assert by_name(trie) == {item.trajectory_id: token_sets(item) for item in rollouts}
    has_sets = any(isinstance(item.content, Tokens) and item.content.kept_ids is not None for item in rollouts)
    assert ("kept_ids" in trie.trajectories.column_names) == has_sets


@given(kept(max_count=6), st.integers(1, 4), st.sampled_from([1, 400]))
def test_runs_on_disk_give_the_table_that_memory_gives(rollouts: list[Trajectory], size: int, run_bytes: int) -> None:
    batches = [as_columns(rollouts[i : i + size]) for i in range(0, len(rollouts), size)]
    table = build_large_trie(batches, run_bytes=run_bytes).trajectories
    assert table.schema.equals(build_trie(rollouts).trajectories.schema, check_metadata=True)
    assert repr(table.to_pylist()) == repr(build_trie(rollouts).trajectories.to_pylist())


@given(kept())
def test_a_directory_gives_the_sets_back(tmp_path_factory: pytest.TempPathFactory, rollouts: list[Trajectory]) -> None:
    trie, folder = build_trie(rollouts), tmp_path_factory.mktemp("trie")
    write_trie(trie, folder)
    assert by_name(read_trie(folder)) == by_name(trie)


@pytest.mark.parametrize("bad", [[[2, 3]], [[3, 2, 2], [3]], [[2, 3], [2, 4]], [[-1, 2], [3]], [[3, 2], [3]]])
def test_wrong_sets_are_noticed(bad: list[list[int]]) -> None:
    with pytest.raises(TreepackError, match=r"trajectory a: (kept_ids has 1 values|has impossible kept_ids)"):
        check_trie(build_trie([make("a", [1, 2, 3], kept_ids=sets(*bad))]))


def test_arrays_may_have_a_set_for_each_token() -> None:
    ids, mask = [[1, 2, 3], [1, 4]], [[0, 0, 1], [0, 1]]
    one, other = trajectories_from_arrays(ids, mask, kept_ids=[[None, [7], np.array([9, 3])], None])
    assert [token_sets(one), token_sets(other)] == [[[3, 9]], [[]]]
    (none,) = trajectories_from_arrays([[1, 2]], [[0, 1]], kept_ids=[[[], []]])
    assert isinstance(none.content, Tokens)
    assert none.content.kept_ids is None


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ([[], [4]], "lack the sampled id 2"),
        ([[], [2, 2]], "repeat the id 2"),
        ([[2]], "1 lists for 2 tokens"),
        ([[], [2, -1]], "hold the id -1"),
        ([[], [2, 1 << 31]], "hold the id 2147483648"),
        ([[], [2.0]], "not a list of token ids"),
        ([[], [[2]]], "not a list of token ids"),
        ([[], 2], "not a list of token ids"),
        ({"a": 1}, "has dict for 2 tokens"),
    ],
)
def test_arrays_with_impossible_sets_are_refused(bad: list[list[int]], fault: str) -> None:
    with pytest.raises(TreepackError, match=f"trajectory 0: kept_ids .*{fault}"):
        trajectories_from_arrays([[1, 2]], [[0, 1]], kept_ids=[bad])


def test_files_of_other_programs_may_have_short_offsets_but_no_nulls() -> None:
    import pyarrow as pa

    kind = pa.list_(pa.list_(pa.int32()))
    good, bad = (pa.table({"kept_ids": pa.array([[[1, 2], []], None], kind)}) for _ in range(2))
    check_part_columns(good.schema, TRIE["trajectories"], "part", "build it again")
    assert with_types(good, TRIE["trajectories"])["kept_ids"].to_pylist() == [[[1, 2], []], None]
    for cells in ([[[1, None]]], [[None]]):
        bad = pa.table({"kept_ids": pa.array(cells, kind)})
        with pytest.raises(ValueError, match="a null in kept_ids"):
            with_types(bad, TRIE["trajectories"])


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5), st.data())
def test_lists_are_cut_and_joined_as_lists_of_python_are(lists: list[list[int]], data: st.DataObject) -> None:
    ragged, num = RaggedArray.of(lists, np.int32), len(lists)
    begin, end = data.draw(st.integers(0, num)), data.draw(st.integers(0, num))
    assert as_lists(ragged[begin:end]) == lists[begin:end]
    rows = data.draw(st.lists(st.integers(0, max(num - 1, 0)), max_size=4 if num else 0))
    assert as_lists(ragged[begin:][np.array([], np.int64)]) == []
    assert as_lists(ragged[np.array(rows, np.int64)]) == [lists[i] for i in rows]
    joined = join_lists([ragged[begin:], ragged[:end]])
    assert as_lists(joined) == lists[begin:] + lists[:end]
    assert joined.equals(RaggedArray.of(lists[begin:] + lists[:end], np.int32))
