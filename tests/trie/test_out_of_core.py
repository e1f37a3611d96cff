"""Tries out of memory: the bytes of a trie in memory, and merging in ranges gives the same order."""

from __future__ import annotations

import os
import resource
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle, strategies
from support.refusal import refusal
from support.strategies import make
from treepack.ingest.options import SHARES
from treepack.sequences import Sequences, as_columns, unique_ids
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.builders.out_of_core import build_large_trie
from treepack.trie.builders.run_merge import MergedOrder, SortedRun, merge, split
from treepack.trie.builders.spool import token_offsets
from treepack.trie.check import check_trie
from treepack.trie.nodes import common_prefix
from treepack.trie.trie import Trie

ARRAYS = ("tokens", "node_start", "node_end", "parent", "depth", "num_passing", "end_node")


def same(a: Trie, b: Trie) -> bool:
    arrays = all(
        getattr(a, name).dtype == getattr(b, name).dtype and np.array_equal(getattr(a, name), getattr(b, name))
        for name in ARRAYS
    )
    return arrays and a.trajectories.equals(b.trajectories, check_metadata=True) and a.share == b.share


def in_batches(rollouts: list[Trajectory], size: int) -> list[list[Trajectory]]:
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


@st.composite
def repeated(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories with equal tokens, equal ids and equal sources among them."""
    originals = draw(strategies.trajectories(max_count=12))
    names = st.sampled_from(["t", "t@made:t", "t#2", "u", "t@made:t#2", "v\u00e4\U0001f600"])
    return [
        replace(one, trajectory_id=draw(names), source=draw(st.sampled_from(["made:t", "made:u"])), reward=float(i))
        for i, one in enumerate(originals)
    ]


@given(repeated(), st.sampled_from(SHARES), st.integers(1, 4), st.sampled_from([1, 400, 1000]))
def test_runs_on_disk_give_the_trie_that_memory_gives(
    rollouts: list[Trajectory], share: str, size: int, run_bytes: int
) -> None:
    batches = map(as_columns, in_batches(rollouts, size))
    assert same(build_large_trie(batches, share=share, run_bytes=run_bytes), build_trie(rollouts, share=share))


@pytest.mark.parametrize("share", ["all", "group"])
def test_more_than_256_partitions_are_in_order_in_memory_and_on_disk(share: str) -> None:
    # Each step has a group of two, whose members come in two batches.
    rollouts = [
        make(f"t{i}-{k}", [i % 7, k, 3], group=f"g{i:03}", step=i if share == "all" else None)
        for k in range(2)
        for i in range(300)
    ]
    trie = build_trie(rollouts, share=share)
    check_trie(trie)
    assert np.bincount(trie.tree_id[trie.end_node]).tolist() == [2] * 300
    assert trie.trajectories["group_id"].to_pylist()[::2] == [f"g{i:03}" for i in range(300)]
    assert same(build_large_trie(map(as_columns, in_batches(rollouts, 50)), share=share, run_bytes=1000), trie)
    names = trie.trajectories.schema.get_field_index("group_id"), trie.trajectories.schema.get_field_index("step")
    column = trie.trajectories[names[share == "all"]]
    swapped = column.take(pa.array([2, 3, 0, 1, *range(4, 600)]))
    field = trie.trajectories.schema.field(names[share == "all"])
    wrong = replace(trie, trajectories=trie.trajectories.set_column(names[share == "all"], field, swapped))
    assert "not in the order of steps and groups" in refusal(check_trie, wrong)
    merged = column.take(pa.array([0, 1, *[0, 1] * 7, *range(16, 600)]))
    wrong = replace(trie, trajectories=trie.trajectories.set_column(names[share == "all"], field, merged))
    assert "two trees of one group begin with the same token" in refusal(check_trie, wrong)


@given(repeated())
def test_names_are_those_of_the_plain_loop(rollouts: list[Trajectory]) -> None:
    names, sources = [one.trajectory_id for one in rollouts], [one.source for one in rollouts]
    result, _ = unique_ids(pa.chunked_array([pa.array(names)]), pa.chunked_array([pa.array(sources)]))
    assert result.to_pylist() == oracle.unique_names(names, sources)


def peak_memory(num_batches: int, run_bytes: int) -> int:
    """Bytes that numpy and Python ask for at most, while groups of 8 rollouts of 4,096 tokens are read and merged."""
    trained = np.array([1], np.int32), np.array([4096], np.int32), np.ones(1)

    def batches() -> Iterator[Sequences]:
        rng = np.random.default_rng(0)
        for number in range(num_batches):
            ids = rng.integers(0, 1000, (8, 4096), dtype=np.int32)
            ids[:, :1000] = ids[0, :1000]
            yield as_columns([Trajectory(f"{number}-{i}", "made", Tokens(ids[i], *trained)) for i in range(8)])

    tracemalloc.start()
    large = build_large_trie(batches(), run_bytes=run_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert large.tokens_flat == num_batches * 8 * 4096
    return peak


def test_memory_does_not_grow_with_the_tokens() -> None:
    grown = peak_memory(100, 1 << 20) - peak_memory(20, 1 << 20)
    assert grown < 2 << 20
    assert peak_memory(100, 1 << 30) - peak_memory(20, 1 << 30) > 20 << 20


def test_what_is_released_comes_back() -> None:
    rollouts = [make(f"t{i}", [1, 2, i]) for i in range(50)]
    large = build_large_trie(map(as_columns, in_batches(rollouts, 5)), run_bytes=1)
    large.storage.release()
    assert same(large, build_trie(rollouts))


def test_what_fits_memory_is_not_spooled(tmp_path: Path) -> None:
    batches = [as_columns([make("a", [1, 2]), make("b", [1, 3])])]
    assert build_large_trie(batches, folder=tmp_path / "missing").storage.maps == ()


def test_no_trajectory_is_an_error() -> None:
    assert "no trajectory with a trained token was found" in refusal(build_large_trie, [])


def test_a_folder_that_cannot_hold_the_runs_is_named(tmp_path: Path) -> None:
    batches = [as_columns([make("a", [1, 2])])]
    assert "missing: sorted runs cannot be spooled there (No such file" in refusal(
        build_large_trie, batches, folder=tmp_path / "missing", run_bytes=1
    )


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path) -> None:
    batches = [as_columns([make(f"t{i}", [i] * 1000)]) for i in range(100)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        assert "sorted runs cannot be spooled there (File too large)" in refusal(
            build_large_trie, batches, folder=tmp_path, run_bytes=1
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_spool_has_no_name(tmp_path: Path) -> None:
    rollouts = [make(f"t{i}", [1, 2, i]) for i in range(20)]
    seen: list[list[str]] = []

    def batches() -> Iterator[Sequences]:
        for batch in in_batches(rollouts, 5):
            yield as_columns(batch)
            seen.append(os.listdir(tmp_path))  # noqa: PTH208

    large = build_large_trie(batches(), folder=tmp_path, run_bytes=1)
    assert seen == [[]] * 4
    assert large.num_trajectories == 20
    assert list(tmp_path.iterdir()) == []


Numbered = list[tuple[int, list[int]]]  # partition and tokens


@contextmanager
def stored(contents: list[Numbered], *, whole: bool = False) -> Iterator[list[SortedRun]]:
    """Runs of `contents`, each sorted, one after the other in a file."""
    with tempfile.TemporaryFile() as file:
        runs = []
        for content in map(sorted, contents):
            arrays = [np.array(tokens, np.int32) for _, tokens in content]
            partition = np.array([part for part, _ in content], np.int32)
            shared = np.zeros(len(content), np.int32)
            for i in range(1, len(content)):
                if partition[i] == partition[i - 1]:
                    shared[i] = common_prefix(arrays[i - 1], arrays[i])
            skipped = np.zeros_like(shared) if whole else shared
            lengths = np.array([len(tokens) for tokens in arrays], np.int32)
            offsets = token_offsets(file.tell(), lengths, skipped)
            for tokens, skip in zip(arrays, skipped, strict=True):
                file.write(tokens[skip:].tobytes())
            runs.append(SortedRun(file.fileno(), offsets, partition, skipped, shared, lengths))
        file.flush()
        yield runs


runs_of = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=8),
    min_size=1,
    max_size=4,
).filter(any)


@given(runs_of, st.integers(1, 5), st.booleans(), st.booleans())
def test_ranges_together_are_the_whole_order(contents: list[Numbered], count: int, whole: bool, sharing: bool) -> None:
    with stored(contents, whole=whole) as runs:
        expected = merge(runs, sharing=sharing)
        order = MergedOrder()
        for limits in split(runs, count):
            order.extend(merge(runs, limits, sharing=sharing))
    assert order == expected
    flat = [sorted(contents[run])[row] for run, row in zip(order.run, order.row, strict=True)]
    assert flat == sorted(item for content in contents for item in content)


@given(runs_of)
def test_a_sequence_is_read_from_the_tokens_of_those_before_it(contents: list[Numbered]) -> None:
    with stored(contents) as runs:
        for run, content in zip(runs, contents, strict=True):
            assert [run.path(row).tolist() for row in range(len(content))] == [
                [partition, *tokens] for partition, tokens in sorted(content)
            ]


def test_ranges_are_about_even() -> None:
    rng = np.random.default_rng(0)
    contents = [[(0, rng.integers(0, 50, 100).tolist()) for _ in range(200)] for _ in range(5)]
    with stored(contents) as runs:
        sizes = [len(merge(runs, limits).run) for limits in split(runs, 4)]
    assert sum(sizes) == 1000
    assert len(sizes) == 4
    assert min(sizes) > 200
