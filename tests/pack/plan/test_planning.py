"""Plans: valid whatever the method, never below the bound, and the contiguous cut is the best of its kind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle, strategies
from support.refusal import refusal
from support.strategies import make, random_sequences
from treepack.errors import TreepackError
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import METHODS, plan_rows
from treepack.pack.plan.problem import RowLimits, SearchOptions, shapes_of_trees
from treepack.pack.plan.unions import row_sizes
from treepack.pack.plan.workers import plan_trees
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie, sequences_of

methods = pytest.mark.parametrize("method", sorted(METHODS))


def built(sequences: list[list[int]]) -> Trie:
    return build_trie([make(f"t{i}", tokens) for i, tokens in enumerate(sequences)])


@methods
@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 24))
def test_any_plan_is_valid_and_counts_unions(method: str, trajectories: list[Trajectory], capacity: int) -> None:
    trie = build_trie(trajectories)
    plan = plan_rows(trie, capacity=capacity, method=method)
    totals = check_plan(trie, plan)
    sequences = [tokens.tolist() for tokens in sequences_of(trie)]
    trees = trie.tree_id[trie.end_node].tolist()
    for row, members in enumerate(plan.members()):
        # The tree in front keeps equal tokens of different trees apart; it is no token, so one per tree is subtracted.
        marked = [[trees[i], *sequences[i]] for i in members.tolist()]
        union = oracle.union_tokens(marked) - len({path[0] for path in marked})
        assert totals.row_tokens[row] == union <= capacity


@methods
@given(sequences=strategies.sequences(max_count=6, max_length=7), capacity=st.integers(7, 16))
def test_bound_below_best_plan_below_any_plan(method: str, sequences: list[list[int]], capacity: int) -> None:
    trie = built(sequences)
    plan = plan_rows(trie, capacity=capacity, method=method)
    best = oracle.best_plan(sequences, capacity)
    assert plan.lower_bound <= best[0] <= check_plan(trie, plan).tokens_packed


@given(sequences=strategies.sequences(max_count=8, max_length=7), capacity=st.integers(7, 16))
def test_contiguous_is_the_best_of_all_contiguous_cuts(sequences: list[list[int]], capacity: int) -> None:
    # Only sequences that are no prefix of another one are leaves; after sorting, a prefix comes right before them.
    unique = sorted({tuple(tokens) for tokens in sequences})
    leaves = [a for a, b in itertools.zip_longest(unique, unique[1:], fillvalue=()) if b[: len(a)] != a]
    best = min(
        sum(oracle.union_tokens(item) for item in items)
        for cuts in itertools.product([False, True], repeat=len(leaves) - 1)
        for items in [split(leaves, cuts)]
        if all(oracle.union_tokens(item) <= capacity for item in items)
    )
    trie = built(sequences)
    forest = shapes_of_trees(trie)
    rows, _ = plan_trees(forest, RowLimits(capacity), METHODS["contiguous"], SearchOptions())
    # Without merging, which may save more tokens if it merges items of one tree.
    assert row_sizes(trie, rows[forest.leaf_of], int(rows.max()) + 1).tokens.sum() == best


def split(leaves: list[tuple[int, ...]], cuts: tuple[bool, ...]) -> list[list[tuple[int, ...]]]:
    items = [[leaves[0]]]
    for leaf, cut in zip(leaves[1:], cuts, strict=True):
        if cut:
            items.append([])
        items[-1].append(leaf)
    return items


def test_heuristic_visits_the_deepest_leaf_first_and_similar_depths_together() -> None:
    sequences = [[0, 1, 1], [0, 2, 2, 2, 2, 2], [0, 3, 3, 3, 3], [0, 4, 4]]
    trie = built(sequences)
    plan = plan_rows(trie, capacity=10, method="heuristic")
    rows = dict(zip(trie.trajectories["trajectory_id"].to_pylist(), plan.row_of.tolist(), strict=True))
    assert rows["t1"] == rows["t2"] != rows["t0"] == rows["t3"]


@methods
def test_small_trees_share_rows(method: str) -> None:
    trie = built([[i, i, i] for i in range(12)])
    assert plan_rows(trie, capacity=9, method=method).num_rows == 4


@methods
def test_steps_never_share_a_row(method: str) -> None:
    trie = build_trie([make(f"t{i}", [7, i], step=i % 3) for i in range(9)])
    plan = plan_rows(trie, capacity=100, method=method)
    assert plan.num_rows == 3
    check_plan(trie, plan)


@pytest.mark.parametrize(("capacity", "most"), [(8192, 1.36), (32768, 1.06)])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_sequences_repeat_little(capacity: int, most: float, seed: int) -> None:
    trie = built([ids.tolist() for ids in random_sequences(seed=seed)])
    totals = check_plan(trie, plan_rows(trie, capacity=capacity))
    assert totals.tokens_packed / trie.tokens_tree <= most


def test_too_long_names_the_trajectory_and_its_length() -> None:
    trie = built([[1, 2], [1, 2, 3, 4]])
    assert "trajectory t1 has 4 tokens, capacity is 3 (1 such in total)" in refusal(plan_rows, trie, capacity=3)


@pytest.mark.parametrize(
    ("row_of", "sentence"),
    [
        ([0, 0], "row 0 of the plan has 5 tokens, over the capacity of 4"),
        ([0, 2], "row 1 of the plan is empty"),
        ([0, -1], "does not give each of the 2 trajectories a row"),
        ([0], "does not give each of the 2 trajectories a row"),
    ],
)
def test_checker_refuses_wrong_plans(row_of: list[int], sentence: str) -> None:
    trie = built([[1, 2, 3], [1, 4, 5]])
    with pytest.raises(TreepackError, match=sentence):
        check_plan(trie, Plan("mine", RowLimits(4), np.array(row_of)))


def test_checker_refuses_mixed_steps() -> None:
    trie = build_trie([make("a", [1, 2], step=0), make("b", [1, 3], step=1)])
    assert "row 0 of the plan mixes training steps" in refusal(
        check_plan, trie, Plan("mine", RowLimits(10), np.array([0, 0]))
    )
