"""First fit in order of arrival, and sequences that share nothing: as the obvious loop does it, and trainable."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support import strategies
from support.manifests import manifest_of
from support.strategies import make
from treepack.data.dataset import PackedDataset
from treepack.files.directory import finished_directory
from treepack.pack.check import check_packed
from treepack.pack.files import write_packed
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.methods.online import arrival_order
from treepack.pack.plan.planning import plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.trie import Trie, sequences_of, unshared

Prefix = tuple[int, ...]


def loads(prefixes: Iterable[Prefix], trained: int) -> tuple[int, int, int]:
    """Return the tokens, score pairs and loss terms of a row of `prefixes`, one for each of its tokens."""
    # The token at position p is a prefix of p + 1 tokens, and has p + 1 score pairs.
    tokens = set(prefixes)
    return len(tokens), sum(map(len, tokens)), trained


def naive_first_fit(trie: Trie, order: list[int], limits: RowLimits, *, share: bool) -> list[int]:
    """Return the row of each trajectory, numbered as rows open; every row is a set of prefixes."""
    steps, row_of = trie.step_rank.tolist(), [-1] * trie.num_trajectories
    prefixes = [{tuple(ids[: n + 1].tolist()) for n in range(len(ids))} for ids in sequences_of(trie)]
    trained = [sum(span["end"] - span["start"] for span in spans) for spans in trie.trajectories["trained"].to_pylist()]
    rows: list[tuple[int, set[Prefix], int]] = []
    for i in order:
        # Without sharing, the number of the trajectory in front makes equal prefixes different; it is no token, so it
        # adds one pair too many for each token.
        added = prefixes[i] if share else {(i, *prefix) for prefix in prefixes[i]}
        for row, (step, union, terms) in enumerate(rows):
            tokens, pairs, row_terms = loads(union | added, terms + trained[i])
            row_loads = (tokens, pairs - (0 if share else tokens), row_terms)
            most = (limits.capacity, limits.pairs, limits.terms)
            if step == steps[i] and all(
                limit is None or load <= limit for load, limit in zip(row_loads, most, strict=True)
            ):
                rows[row] = (step, union | added, terms + trained[i])
                row_of[i] = row
                break
        else:
            row_of[i] = len(rows)
            rows.append((steps[i], added, trained[i]))
    return row_of


def grouped(row_of: Iterable[int]) -> set[tuple[int, ...]]:
    """Return the trajectories of each row, without the numbers of the rows."""
    rows: dict[int, list[int]] = {}
    for i, row in enumerate(row_of):
        rows.setdefault(row, []).append(i)
    return {tuple(members) for members in rows.values()}


some_limits = st.builds(RowLimits, st.integers(9, 30), st.none() | st.integers(45, 120), st.none() | st.integers(8, 20))


@given(trajectories=strategies.trajectories(max_count=12), limits=some_limits)
def test_greedy_online_is_first_fit_of_unions_in_order_of_arrival(
    trajectories: list[Trajectory], limits: RowLimits
) -> None:
    trie = build_trie(trajectories)
    plan = plan_rows(trie, capacity=limits, method="greedy-online")
    naive = naive_first_fit(trie, arrival_order(trie).tolist(), limits, share=True)
    assert grouped(plan.row_of.tolist()) == grouped(naive)


@given(trajectories=strategies.trajectories(max_count=12), limits=some_limits)
def test_sequence_is_first_fit_decreasing_of_whole_lengths(trajectories: list[Trajectory], limits: RowLimits) -> None:
    trie = build_trie(trajectories)
    lengths = trie.lengths.tolist()
    order = sorted(arrival_order(trie).tolist(), key=lambda i: -lengths[i])
    naive = naive_first_fit(trie, order, limits, share=False)
    plan = plan_rows(trie, capacity=limits, method="sequence")
    assert grouped(plan.row_of.tolist()) == grouped(naive)
    check_plan(trie, plan)


@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 24))
def test_rows_of_the_unshared_trie_hold_every_token_of_every_trajectory(
    trajectories: list[Trajectory], capacity: int
) -> None:
    trie = unshared(build_trie(trajectories))
    check_trie(trie)
    plan = plan_rows(trie, capacity=capacity, method="sequence")
    totals = check_plan(trie, plan)
    assert plan.lower_bound == totals.tokens_packed == trie.tokens_flat == trie.tokens_tree
    rows = list(pack_rows(trie, plan))
    check_packed(rows, manifest_of(rows, capacity), trie)
    assert all((row.scale == 1).all() for row in rows)


@given(trajectories=strategies.trajectories())
def test_a_trie_that_shares_nothing_can_be_built_or_taken_apart(trajectories: list[Trajectory]) -> None:
    built, apart = build_trie(trajectories, share="none"), unshared(build_trie(trajectories))
    assert built.trajectories.equals(apart.trajectories)
    for name in ("tokens", "node_start", "node_end", "parent", "depth", "num_passing", "end_node", "share"):
        assert np.array_equal(getattr(built, name), getattr(apart, name))


def test_numbers_in_sources_count_as_numbers() -> None:
    sources = ["b.jsonl:1", "a-10.jsonl:2", "a-9.jsonl:10", "a-9.jsonl:9", "a-9.jsonl:9"]
    ones = [make(f"t{i}", [i, 1]) for i in range(5)]
    named = [Trajectory(t.trajectory_id, s, t.content, "g", None, 1.0) for t, s in zip(ones, sources, strict=True)]
    trie = build_trie(named)
    assert trie.trajectories.take(arrival_order(trie))["trajectory_id"].to_pylist() == ["t3", "t4", "t2", "t1", "t0"]


def test_arrival_decides_and_not_the_order_of_the_trie() -> None:
    trie = build_trie([make("t0", [9, 9, 9]), make("t1", [5, 5, 5, 5]), make("t2", [1, 1, 1])])
    plan = plan_rows(trie, capacity=7, method="greedy-online")
    rows = dict(zip(trie.trajectories["trajectory_id"].to_pylist(), plan.row_of.tolist(), strict=True))
    assert rows["t0"] == rows["t1"] != rows["t2"]


def test_flat_rows_are_a_dataset(tmp_path: Path) -> None:
    ones = [make(f"t{i}", [1, 2, 3, i]) for i in range(10)]
    trie = unshared(build_trie(ones))
    with finished_directory(tmp_path / "packed", overwrite=False) as path:
        rows = pack_rows(trie, plan_rows(trie, capacity=12, method="sequence"))
        write_packed(rows, path, capacity=12)
    batches = list(PackedDataset(tmp_path / "packed"))
    assert [batch.num_tokens for batch in batches] == [12, 12, 12, 4]
    # The last token of trajectory i is i.
    last_tokens = [batch.input_ids[batch.trajectory_ends].tolist() for batch in batches]
    assert sorted(token for row in last_tokens for token in row) == list(range(10))
