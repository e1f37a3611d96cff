"""Slices of a trie directory are the trie wherever it is cut, and packing by slices gives it back."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.markov_law import MarkovLaw
from support.pickled_scheduler import PickledScheduler
from support.refusal import refusal
from support.sampled_trees import rollouts_of_tree, sample_trees, three_tokens
from support.strategies import make, trajectories
from support.trie_files import saved
from treepack import PackOptions, Progress, TreepackError, check, pack_trie
from treepack.cluster.pack import pack_trie_on
from treepack.cluster.scheduler import LocalScheduler
from treepack.cluster.trie_slices import TrieSlice, read_slice, trie_slices
from treepack.files import parts
from treepack.pack.files import read_rows
from treepack.pack.options import METHODS, NORMALIZE, SEMANTICS
from treepack.rollout.options import TreeOptions
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.store import trie_files as files
from treepack.trie.store.trie_files import read_trie, write_trie
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
    assert [part.repeated_tokens for part in trie_slices(directory, count=3)] == [0, 50, 50]
    assert len(trie_slices(directory, count=3, whole_trees=True)) == 1


def test_no_slice_is_empty_for_any_count(tmp_path: Path) -> None:
    directory = saved(build_trie([make(f"t{i}", [i, 1, 2]) for i in range(3)]), tmp_path / "trie")
    for count in range(1, 40):
        slices = trie_slices(directory, count=count)
        assert all(part.trajectories[0] < part.trajectories[1] for part in slices)
        assert slices[-1].trajectories[1] == 3


def test_a_trie_has_at_most_one_slice_for_each_trajectory(tmp_path: Path) -> None:
    directory = saved(build_trie([make(f"t{i}", [i, *range(2000)]) for i in range(32)]), tmp_path / "trie")
    slices = trie_slices(directory, count=10**12)
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


def trie_directory(made: list[Trajectory], folder: Path, share: str = "all") -> Path:
    (folder / "trie").mkdir()
    write_trie(build_trie(made, share=share), folder / "trie")
    return folder / "trie"


def with_rewards(made: list[Trajectory]) -> list[Trajectory]:
    """Every third trajectory gets a reward, and every fifth an advantage."""
    rewards = [0.5 if i % 3 == 0 else None for i in range(len(made))]
    advantages = [-1.5 if i % 5 == 0 else None for i in range(len(made))]
    return [
        replace(each, reward=reward, advantage=advantage)
        for each, reward, advantage in zip(made, rewards, advantages, strict=True)
    ]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@settings(max_examples=8)
@given(
    made=trajectories(max_count=20, max_length=12),
    num_slices=st.integers(1, 6),
    room=st.integers(0, 12),
    method=st.sampled_from([method for method in METHODS if method not in ("groups", "exact")]),
    semantics=st.sampled_from(SEMANTICS),
    normalize=st.sampled_from(NORMALIZE),
    rewards=st.booleans(),
)
def test_slices_give_back_the_whole_trie(
    made: list[Trajectory],
    num_slices: int,
    room: int,
    method: str,
    semantics: str,
    normalize: str,
    rewards: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("slices")
    trie = trie_directory(with_rewards(made) if rewards else made, folder)
    semantics = "branch" if method == "sequence" else semantics
    capacity = longest_of(trie) + room
    options = PackOptions(capacity=capacity, method=method, semantics=semantics, normalize=normalize, effort="low")
    one = pack_trie(trie, folder / "one", options)
    several = pack_trie_on(PickledScheduler(), trie, folder / "several", options, num_slices=num_slices)
    # All rows, totals, weights and terms are compared with the whole trie.
    assert check(folder / "several")["against_trie"] is True
    for name in ("num_trajectories", "num_groups", "num_trees", "num_nodes", "tokens_flat", "tokens_tree", "por"):
        assert several.totals[name] == one.totals[name], name
    assert one.totals["tokens_tree"] <= several.totals["lower_bound"] <= one.totals["tokens_packed"]
    steps = [-1 if row.step is None else row.step for row in read_rows(folder / "several")]
    assert steps == sorted(steps)
    if "partitions" not in several.manifest["options"]:
        assert contents(folder / "one") == contents(folder / "several")


def longest_of(trie: Path) -> int:
    return int(read_trie(trie).lengths.max())


def branches(num_steps: int, *, size: int = 10) -> list[Trajectory]:
    """In each training step a trunk of 20 tokens with 30 branches of about `size` tokens, in groups of ten."""
    return [
        make(
            f"t{step}-{i}",
            [*range(20), *range(100 * i, 100 * i + size + i % 4)],
            step=step,
            group=f"g{i // 10}",
            reward=1.0 if i == 3 else None,
        )
        for step in range(num_steps)
        for i in range(30)
    ]


@pytest.mark.parametrize("share", ["all", "group", "none"])
def test_one_slice_is_the_directory_of_one_process(share: str, tmp_path: Path) -> None:
    trie = trie_directory(branches(2), tmp_path, share)
    options = PackOptions(method="contiguous", semantics="once", normalize="group")
    pack_trie(trie, tmp_path / "one", options)
    pack_trie_on(PickledScheduler(), trie, tmp_path / "same", options, num_slices=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "same")


def test_open_rows_of_a_step_are_joined_across_slices(tmp_path: Path) -> None:
    # Rows of 4 trajectories without a common token; 5 slices have 6 of them each, which fill one row and a half.
    trie = trie_directory([make(f"t{i}", [i, *range(9)], group=f"g{i}") for i in range(30)], tmp_path)
    options = PackOptions(capacity=40, method="contiguous")
    summary = pack_trie_on(PickledScheduler(), trie, tmp_path / "packed", options, num_slices=5)
    assert check(tmp_path / "packed")["against_trie"] is True
    assert sorted(row.num_tokens for row in read_rows(tmp_path / "packed")) == [20, *[40] * 7]
    assert summary.totals["num_rows"] == -(-300 // 40)
    names = [entry["name"] for entry in summary.manifest["files"]]
    assert names == [f"part-{number:05d}.parquet" for number in range(6)]


def test_repeated_tokens_are_counted_and_bound_by_the_trie(tmp_path: Path) -> None:
    trie = trie_directory(branches(1), tmp_path)
    options = PackOptions(capacity=400, method="contiguous")
    one = pack_trie(trie, tmp_path / "one", options)
    summary = pack_trie_on(LocalScheduler(), trie, tmp_path / "packed", options, num_slices=3)
    assert summary.totals["repeated_tokens"] == 2 * 20
    assert summary.totals["lower_bound"] <= one.totals["tokens_packed"] < summary.totals["tokens_packed"]
    assert summary.manifest["options"]["partitions"] == 3
    assert "repeated_tokens" not in one.totals


def test_cuts_repeat_no_token_of_rows_that_share_none(tmp_path: Path) -> None:
    trie = trie_directory(branches(1), tmp_path)
    options = PackOptions(method="sequence")
    summary = pack_trie_on(LocalScheduler(), trie, tmp_path / "packed", options, num_slices=3)
    assert summary.totals["repeated_tokens"] == 0
    assert summary.totals["tokens_packed"] == summary.totals["tokens_flat"]


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_trajectories_that_are_too_long_are_counted_over_all_slices(too_long: str, tmp_path: Path) -> None:
    made = [make(f"t{i}", [i, *range(3 + i % 7)], reward=1.0 if i % 7 == 6 else None) for i in range(40)]
    trie = trie_directory(made, tmp_path)
    options = PackOptions(capacity=7, too_long=too_long, semantics="once", normalize="group", method="contiguous")
    one = pack_trie(trie, tmp_path / "one", options)
    several = pack_trie_on(PickledScheduler(), trie, tmp_path / "several", options, num_slices=4)
    assert several.counts == one.counts
    assert several.manifest["options"]["partitions"] == 4
    names = ("num_trajectories", "num_trees", "num_nodes", "tokens_flat", "tokens_tree", "tokens_trained")
    assert [several.totals[name] for name in names] == [one.totals[name] for name in names]
    assert check(tmp_path / "several")["against_trie"] is True
    columns = [pq.read_schema(tmp_path / name / "part-00000.parquet") for name in ("one", "several")]
    assert columns[0].equals(columns[1])


def test_a_slice_may_lose_all_its_trajectories_but_not_all_slices(tmp_path: Path) -> None:
    made = [make(f"t{i}", [i, *range(2 if i < 10 else 9)]) for i in range(20)]
    trie = trie_directory(made, tmp_path)
    options = PackOptions(capacity=5, too_long="drop")
    summary = pack_trie_on(LocalScheduler(), trie, tmp_path / "packed", options, num_slices=4)
    assert summary.counts == {"dropped: longer than the capacity": 10}
    assert check(tmp_path / "packed")["against_trie"] is True
    assert "no trajectory fits the capacity of 2; raise the capacity" in refusal(
        pack_trie_on, LocalScheduler(), trie, tmp_path / "none", replace(options, capacity=2), num_slices=4
    )
    assert not (tmp_path / "none").exists()


def test_a_refusal_names_the_longest_trajectory_of_all_slices(tmp_path: Path) -> None:
    trie = trie_directory(branches(2), tmp_path)
    for options in (PackOptions(capacity=31), PackOptions(terms_budget=30), PackOptions(pairs_budget=500)):
        sentences = []
        for pack in (pack_trie, lambda *given: pack_trie_on(LocalScheduler(), *given, num_slices=5)):
            with pytest.raises(TreepackError) as error:
                pack(trie, tmp_path / "packed", options)
            sentences.append(str(error.value))
        assert sentences[0] == sentences[1]
        assert "such in total" in sentences[0]
    assert not (tmp_path / "packed").exists()


def test_rows_of_each_step_are_a_multiple_for_balance(tmp_path: Path) -> None:
    trie = trie_directory(branches(3), tmp_path)
    options = PackOptions(capacity=100, balance=4, method="contiguous")
    summary = pack_trie_on(LocalScheduler(), trie, tmp_path / "packed", options, num_slices=5)
    assert check(tmp_path / "packed")["against_trie"] is True
    rows = Counter(row.step for row in read_rows(tmp_path / "packed"))
    assert all(number % 4 == 0 for number in rows.values())
    assert summary.totals["group_pairs_max_over_mean"] < 1.5
    assert "give --balance a smaller number, or fewer --partitions" in refusal(
        pack_trie_on, LocalScheduler(), trie, tmp_path / "more", replace(options, balance=20), num_slices=9
    )


def test_whole_groups_need_trees_of_one_group(tmp_path: Path) -> None:
    options = PackOptions(capacity=400, method="groups")
    trie = trie_directory(branches(2), tmp_path, "group")
    summary = pack_trie_on(LocalScheduler(), trie, tmp_path / "packed", options, num_slices=4)
    assert summary.manifest["options"]["partitions"] == 4
    for row in read_rows(tmp_path / "packed"):
        assert all(number == 10 for number in Counter(row.trajectory_groups).values())
    (tmp_path / "other").mkdir()
    mixed = trie_directory(branches(2), tmp_path / "other")
    assert "its trees mix groups, so it cannot be cut between groups" in refusal(
        pack_trie_on, LocalScheduler(), mixed, tmp_path / "more", options, num_slices=4
    )


def test_leaf_weights_do_not_depend_on_slices(tmp_path: Path) -> None:
    options = TreeOptions(width=8, max_tokens=20, segment=2, depth=8, first_forks=2)
    trees = sample_trees(MarkovLaw(three_tokens(), stop=0), options, [[1], [2], [1], [2]], seed=8)
    trie = trie_directory([rollout for tree in trees for rollout in rollouts_of_tree(tree)], tmp_path, "group")
    for fallback_leaves in (False, True):
        packing = PackOptions(capacity=64, leaf_weights=True, fallback_leaves=fallback_leaves, effort="low")
        one = pack_trie(trie, tmp_path / "one", packing, overwrite=True)
        several = pack_trie_on(PickledScheduler(), trie, tmp_path / "several", packing, num_slices=3, overwrite=True)
        assert several.manifest["options"]["partitions"] > 1
        assert several.counts == one.counts
        assert check(tmp_path / "several")["against_trie"] is True


def test_the_default_slices_of_a_small_trie_are_one(tmp_path: Path) -> None:
    trie = trie_directory(branches(1), tmp_path)
    states: list[Progress] = []
    summary = pack_trie_on(LocalScheduler(), trie, tmp_path / "packed", progress=states.append)
    assert "partitions" not in summary.manifest["options"]
    assert [(state.stage, state.done, state.total) for state in states] == [("planning", 1, 1), ("packing", 1, 1)]
