"""Plans at the extremes: rows filled by one trajectory, equal, very many, nested, any order, several processes."""

from __future__ import annotations

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

from support import strategies
from support.paths import TESTS
from support.strategies import make
from treepack.errors import TreepackError
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.planning import FOREST_METHODS, METHODS, plan_rows
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, shapes_of_trees
from treepack.pack.plan.workers import Method, plan_trees
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

ALL = sorted([*METHODS, *FOREST_METHODS])
every_method = pytest.mark.parametrize("method", ALL)
many_branches = pytest.mark.parametrize("method", sorted({*ALL} - {"exact"}))


def built(sequences: list[list[int]]) -> Trie:
    return build_trie([make(f"t{i}", tokens) for i, tokens in enumerate(sequences)])


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
from pack.plan import test_scale as here
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
