"""Slices of a trie directory together are the trie, wherever it is cut."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusal import refusal
from support.strategies import make, trajectories
from support.trie_files import saved
from treepack import TreepackError
from treepack.cluster.trie_slices import TrieSlice, read_slice, trie_slices
from treepack.files import parts
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.store import trie_files as files
from treepack.trie.trie import sequences_of


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of about 8 tokens, and parts of about 32."""
    for module in (parts, files):
        monkeypatch.setattr(module, "PART_TOKENS", 32)
    monkeypatch.setattr(files, "SLICES", 4)


@given(
    made=trajectories(max_count=30, max_length=12),
    count=st.integers(1, 8),
    share=st.sampled_from(["all", "group", "none"]),
)
@pytest.mark.usefixtures("small_row_groups")
def test_slices_have_each_trajectory_and_each_node_once(
    made: list[Trajectory], count: int, share: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trie = build_trie(made, share=share)
    directory = saved(trie, tmp_path_factory.getbasetemp() / "trie")
    slices = trie_slices(directory, count=count)
    tries = [read_slice(directory, pickle.loads(pickle.dumps(each))) for each in slices]
    for each in tries:
        check_trie(each)
    assert [t for each in tries for t in each.trajectories["trajectory_id"].to_pylist()] == trie.trajectories[
        "trajectory_id"
    ].to_pylist()
    assert [s.tolist() for each in tries for s in sequences_of(each)] == [s.tolist() for s in sequences_of(trie)]
    own = [each.tokens_tree - part.repeated_tokens for each, part in zip(tries, slices, strict=True)]
    assert sum(own) == trie.tokens_tree
    assert all(a.nodes[1] == b.nodes[0] and a.trajectories[1] == b.trajectories[0] for a, b in pairwise(slices))


@settings(max_examples=15)
@given(made=trajectories(max_count=20, max_length=12), count=st.integers(1, 5))
def test_plans_need_no_tokens_of_a_slice(
    made: list[Trajectory], count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = saved(build_trie(made), tmp_path_factory.getbasetemp() / "trie")
    for part in trie_slices(directory, count=count):
        whole, shape = read_slice(directory, part), read_slice(directory, part, tokens=False)
        for name in ("node_start", "node_end", "parent", "depth", "num_passing", "end_node"):
            assert np.array_equal(getattr(whole, name), getattr(shape, name)), name
        assert shape.tokens_tree == whole.tokens_tree
        assert shape.trajectories.equals(whole.trajectories.select(shape.trajectories.column_names))


def chains(num_steps: int) -> list[Trajectory]:
    """In each training step a trunk of 50 tokens with 20 branches of 10 tokens."""
    return [
        make(f"t{step}-{i}", [*range(50), *range(100 + i, 110 + i)], step=step, group=f"g{i // 10}")
        for step in range(num_steps)
        for i in range(20)
    ]


def test_a_cut_is_at_the_start_of_a_step_if_one_is_near(tmp_path: Path) -> None:
    directory = saved(build_trie(chains(9)), tmp_path / "trie")
    slices = trie_slices(directory, count=3)
    assert [part.repeated_tokens for part in slices] == [0, 0, 0]
    steps = [set(read_slice(directory, part).trajectories["step"].to_pylist()) for part in slices]
    assert steps == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]


def test_a_single_tree_is_cut_inside_and_its_trunk_counted_as_repeated(tmp_path: Path) -> None:
    directory = saved(build_trie(chains(1)), tmp_path / "trie")
    assert [part.repeated_tokens for part in trie_slices(directory, max_tokens=90)] == [0, 50, 50]
    assert len(trie_slices(directory, max_tokens=90, whole_trees=True)) == 1


def test_no_slice_is_empty_for_any_count(tmp_path: Path) -> None:
    directory = saved(build_trie([make(f"t{i}", [i, 1, 2]) for i in range(3)]), tmp_path / "trie")
    for count in range(1, 40):
        slices = trie_slices(directory, count=count)
        assert all(part.trajectories[0] < part.trajectories[1] for part in slices)
        assert slices[-1].trajectories[1] == 3


def test_a_trie_has_at_most_one_slice_for_each_trajectory(tmp_path: Path) -> None:
    directory = saved(build_trie([make(f"t{i}", [i, *range(2000)]) for i in range(32)]), tmp_path / "trie")
    for slices in (trie_slices(directory, count=10**12), trie_slices(directory, max_tokens=1)):
        assert len(slices) in (31, 32)  # the place of a cut is estimated, so the last one may be missed
        assert [i for part in slices for i in range(*part.trajectories)] == [*range(32)]


def test_groups_stay_whole_if_their_trees_do(tmp_path: Path) -> None:
    directory = saved(build_trie(chains(2), share="group"), tmp_path / "trie")
    slices = [read_slice(directory, part) for part in trie_slices(directory, count=4, whole_groups=True)]
    assert [set(part.trajectories["group_id"].to_pylist()) for part in slices] == [{"g0"}, {"g1"}, {"g0"}, {"g1"}]
    mixed = saved(build_trie(chains(2)), tmp_path / "trie")
    assert "its trees mix groups, so it cannot be cut between groups" in refusal(
        trie_slices, mixed, count=4, whole_groups=True
    )


def test_a_slice_reads_only_its_row_groups(small_row_groups: None, tmp_path: Path) -> None:
    directory = saved(build_trie([make(f"t{i}", [i, 1, 2, 3]) for i in range(64)]), tmp_path / "trie")
    slices = trie_slices(directory, count=4)
    # 256 tokens in row groups of 8.
    assert [sum(len(groups.numbers) for groups in part.node_groups) for part in slices] == [8, 8, 8, 8]
    assert len({groups.file for part in slices for groups in part.node_groups}) == 8


def damage(part: TrieSlice, directory: Path) -> str:
    with pytest.raises(TreepackError) as error:
        read_slice(directory, part)
    return str(error.value).removeprefix(f"{directory}/")


def test_a_damaged_or_truncated_part_is_refused(tmp_path: Path) -> None:
    directory = saved(build_trie(chains(1)), tmp_path / "trie")
    part = trie_slices(directory, count=2)[1]
    path = directory / "nodes-00000.parquet"
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(2)
    content[column.data_page_offset + column.total_compressed_size - 2] ^= 255
    path.write_bytes(content)
    assert damage(part, directory).startswith("nodes-00000.parquet: row group 0 cannot be read (")
    path.write_bytes(content[:-1])
    assert damage(part, directory).startswith(f"nodes-00000.parquet: has {len(content) - 1} bytes, its manifest lists")


def test_slices_of_no_token_are_refused(tmp_path: Path) -> None:
    directory = saved(build_trie(chains(1)), tmp_path / "trie")
    assert "count is 0; expected at least 1" in refusal(trie_slices, directory, count=0)


def test_slices_of_a_trie_in_a_store_are_read_by_range(tmp_path: Path) -> None:
    directory = saved(build_trie(chains(3)), tmp_path / "trie")
    store = fsspec.filesystem("memory")
    store.put(str(directory), "/bucket/slices", recursive=True)
    try:
        for part in trie_slices("memory://bucket/slices", count=4):
            remote, local = read_slice("memory://bucket/slices", part), read_slice(directory, part)
            assert remote.tokens.tolist() == local.tokens.tolist()
            assert remote.trajectories.equals(local.trajectories)
    finally:
        store.rm("/bucket/slices", recursive=True)
