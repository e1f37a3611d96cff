"""The default method against the quick ones: never more tokens, nor more rows at equal tokens, for whole forests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support import strategies
from support.strategies import make
from treepack.errors import TreepackError
from treepack.pack.plan.alternatives import best_final_rows
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.fill import merge_rows
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import METHODS, plan_rows
from treepack.pack.plan.problem import RowLimits, SearchOptions, shapes_of_trees
from treepack.pack.plan.unions import row_sizes
from treepack.pack.plan.workers import plan_trees
from treepack.trajectory import Int64, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie


def cost(trie: Trie, plan: Plan) -> tuple[int, int]:
    totals = check_plan(trie, plan)
    return totals.tokens_packed, totals.num_rows


def stars(seed: int, *, steps: int = 1) -> Trie:
    """Twelve prompts with 6 answers each; some prompts have one token, so that many plans have equal tokens."""
    rng = np.random.default_rng(seed)
    return build_trie(
        [
            make(f"t{i}-{j}", [*[i] * int(1 + i % 3), 50 + j, *[7] * int(rng.integers(0, 9))], step=i % steps)
            for i in range(12)
            for j in range(6)
        ]
    )


@given(
    trajectories=strategies.trajectories(max_count=10),
    capacity=st.integers(9, 24),
    budgets=st.tuples(st.none() | st.integers(45, 90), st.none() | st.integers(8, 20)),
    multiple_of=st.sampled_from([1, 1, 2, 3]),
)
def test_auto_is_never_worse_than_a_quick_method(
    trajectories: list[Trajectory], capacity: int, budgets: tuple[int | None, int | None], multiple_of: int
) -> None:
    trie, limits = build_trie(trajectories), RowLimits(capacity, *budgets)
    costs = {}
    for method in ("auto", "contiguous", "heuristic", "greedy-online"):
        try:
            costs[method] = cost(trie, plan_rows(trie, capacity=limits, method=method, multiple_of=multiple_of))
        except TreepackError as error:
            assert "too few for" in str(error)  # noqa: PT017
    # A step may have too few trajectories for the rows of one method and enough for those of another.
    assume("auto" in costs)
    # With as few tokens as the bound, it may have more rows than greedy-online.
    online = costs.pop("greedy-online", costs["auto"])
    assert costs["auto"] == min(costs.values())
    assert costs["auto"][0] <= online[0]


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_items_that_merge_badly_are_exchanged(steps: int) -> None:
    exchanged = 0  # seeds for which the items of auto merge into more rows than the final plan
    for seed in range(40):
        trie, limits = stars(seed, steps=steps), RowLimits(20)
        auto = plan_rows(trie, capacity=limits)
        quick = [plan_rows(trie, capacity=limits, method=method) for method in ("contiguous", "heuristic")]
        assert cost(trie, auto) <= min(cost(trie, plan) for plan in quick)
        forest = shapes_of_trees(trie)
        rows, _ = plan_trees(forest, limits, METHODS["auto"], SearchOptions())
        exchanged += merged(trie, rows[forest.leaf_of], limits).max() + 1 > auto.num_rows
    assert exchanged


def merged(trie: Trie, items: Int64, limits: RowLimits) -> Int64:
    steps = np.zeros(int(items.max()) + 1, np.int64)
    steps[items] = trie.step_rank
    return merge_rows(row_sizes(trie, items, len(steps)), steps, limits)[items]


def test_nothing_is_tried_where_nothing_can_be_better() -> None:
    trie = stars(0)
    limits, calls = RowLimits(1000), []

    def finish(items: Int64) -> Int64:
        calls.append(items)
        return merged(trie, items, limits)

    alone = trie.tree_id[trie.end_node].astype(np.int64)
    options = {"lower_bound": trie.tokens_tree, "multiple_of": 1}
    row_of = best_final_rows(trie, shapes_of_trees(trie), limits, alone, finish, **options)
    assert (len(calls), int(row_of.max())) == (1, 0)
