"""Plans: valid whatever the method, never below the bound, also at the extremes of size and order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle, strategies
from support.paths import TESTS
from support.refusal import refusal
from support.strategies import make, random_sequences
from treepack.errors import TreepackError
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import FOREST_METHODS, METHODS, plan_rows
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, shapes_of_trees
from treepack.pack.plan.unions import row_sizes
from treepack.pack.plan.workers import Method, plan_trees
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


ALL = sorted([*METHODS, *FOREST_METHODS])


every_method = pytest.mark.parametrize("method", ALL)


many_branches = pytest.mark.parametrize("method", sorted({*ALL} - {"exact"}))


def stars(count: int) -> Trie:
    """`count` prompts, each with answers of some lengths; prompts share nothing."""
    rng = np.random.default_rng(0)
    return built([[i, i, i, j, *[7] * int(rng.integers(1, 6))] for i in range(count) for j in range(6)])


@pytest.fixture(scope="module")
def branches() -> Trie:
    return built([[1, 2, 3, 4, 5, i] for i in range(20_000)])


@many_branches
def test_20000_one_token_branches_fill_their_rows(branches: Trie, method: str) -> None:
    tokens = check_plan(branches, plan_rows(branches, capacity=1005, method=method)).row_tokens
    # A row of 1005 has the prompt of 5 tokens once and 1000 branches, or 167 times 6 tokens if nothing is shared.
    per_row = 1005 // 6 if method in ("sequence", "single-path") else 1000
    assert len(tokens) == -(-20_000 // per_row)


@every_method
def test_a_trajectory_of_exactly_the_capacity_has_a_row(method: str) -> None:
    trie = built([list(range(8)), [90, 1], [90, 2, 3], [90, 2, 4]])
    assert check_plan(trie, plan_rows(trie, capacity=8, method=method)).row_tokens.tolist() == [8, 5]


@every_method
def test_a_node_that_fills_a_row_carries_all_that_end_in_it(method: str) -> None:
    trie = built([list(range(n)) for n in (8, 8, 3, 5)])
    totals = check_plan(trie, plan_rows(trie, capacity=8, method=method))
    assert totals.num_rows == (3 if method == "sequence" else 1)


@every_method
@settings(max_examples=12)  # of each method
@given(trajectories=strategies.trajectories(max_count=6))
def test_a_capacity_of_the_longest_trajectory_suffices(method: str, trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    check_plan(trie, plan_rows(trie, capacity=int(trie.lengths.max()), method=method))


@every_method
def test_equal_trajectories_share_one_row(method: str) -> None:
    trie = built([[1, 2, 3]] * 40)
    totals = check_plan(trie, plan_rows(trie, capacity=5, method=method))
    assert totals.num_rows == (40 if method == "sequence" else 1)


@pytest.fixture(scope="module")
def nested() -> Trie:
    chain = list(range(5001))
    return built([chain[: n + 1] for n in range(1, 5001)])


@every_method
def test_5000_nested_prefixes_fit_one_row(nested: Trie, method: str) -> None:
    totals = check_plan(nested, plan_rows(nested, capacity=5001, method=method))
    assert method == "sequence" or totals.num_rows == 1


@every_method
@settings(max_examples=12)  # of each method
@given(trajectories=strategies.trajectories(max_count=6), data=st.data())
def test_the_order_of_the_input_does_not_matter(
    method: str, trajectories: list[Trajectory], data: st.DataObject
) -> None:
    shuffled: list[Trajectory] = data.draw(st.permutations(trajectories))
    one, other = (plan_rows(build_trie(ones), capacity=12, method=method) for ones in (trajectories, shuffled))
    assert np.array_equal(one.row_of, other.row_of)


def test_several_workers_give_the_plan_of_one() -> None:
    trie = stars(60)
    one, two = (plan_rows(trie, capacity=24, method="heuristic", workers=workers) for workers in (1, 2))
    assert np.array_equal(one.row_of, two.row_of)
    assert one.lower_bound == two.lower_bound


def test_one_tree_needs_no_workers() -> None:
    trie = stars(1)
    assert np.array_equal(plan_rows(trie, capacity=24, workers=3).row_of, plan_rows(trie, capacity=24).row_of)


def refuse(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    raise TreepackError("no plan for this tree")


def die(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    os._exit(1)


def interrupt(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    if tree.num_leaves == 2:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
    raise AssertionError("nobody ended this worker")


@pytest.mark.parametrize(
    ("method", "error", "sentence"),
    [
        pytest.param(refuse, TreepackError, "no plan for this tree", marks=pytest.mark.slow),
        (die, TreepackError, "a worker process died"),
    ],
)
def test_what_happens_in_a_worker_is_raised_and_no_worker_stays(
    method: Method, error: type[BaseException], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        plan_trees(
            shapes_of_trees(built([[0, 1], [0, 2], [9, 1], [9, 2], [9, 3]])),
            RowLimits(24),
            method,
            SearchOptions(),
            workers=2,
        )
    assert not multiprocessing.active_children()


INTERRUPTED = """
import multiprocessing
from pack.plan import test_planning as here
if __name__ == "__main__":
    forest = here.shapes_of_trees(here.built([[0, 1], [0, 2], [9, 1], [9, 2], [9, 3]]))
    try:
        here.plan_trees(forest, here.RowLimits(24), here.interrupt, here.SearchOptions(), workers=2)
    except KeyboardInterrupt:
        print("interrupted", len(multiprocessing.active_children()))
"""


@pytest.mark.slow
def test_an_interrupt_ends_all_workers(tmp_path: Path) -> None:
    # In a new process, because a solver of another test may have left its handler for this signal.
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "interrupted.py")],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "interrupted 0\n"
