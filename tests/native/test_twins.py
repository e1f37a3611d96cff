"""Every loop in C of the planner and of TRACE gives exactly the result of its slow twin in Python."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import strategies
from support.plan_costs import alone
from support.strategies import Nested, tree_of
from treepack.native.library import is_compiled
from treepack.pack.plan.bounds import column_generation, counting, knapsack
from treepack.pack.plan.bounds.lower_bound import ProofEffort, lower_bound
from treepack.pack.plan.methods import anneal, dominance, first_fit, jump_tree, online, subsets
from treepack.pack.plan.methods.contiguous import contiguous
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, path_pairs
from treepack.research.trace import greedy

STAR: Nested = (5, [(size, []) for size in (7, 7, 1, 0, 9, 3, 7, 0, 2, 2, 8, 8, 1)])
EQUAL: Nested = (0, [(4, []) for _ in range(40)])
EMPTY: Nested = (0, [(0, []), (0, [(0, []), (0, [])])])
ONE: Nested = (3, [])


def comb(num_leaves: int) -> Nested:
    """A chain of nodes with one leaf each."""
    node: Nested = (2, [(1, []), (1, [])])
    for i in range(num_leaves - 2):
        node = (1 + i % 3, [(i % 5, []), node] if i % 2 else [node, (i % 5, [])])
    return node


def random_tree(num_leaves: int, seed: int) -> PlanTree:
    """Forks are anywhere, and terms of the leaves are random."""
    rng = np.random.default_rng(seed)

    def nested(leaves: int) -> Nested:
        if leaves == 1:
            return int(rng.integers(0, 30)), []
        first = int(rng.integers(1, leaves))
        return int(rng.integers(1, 12)), [nested(first), nested(leaves - first)]

    return tree_of(nested(num_leaves), rng.integers(0, 5, num_leaves).tolist())


SHAPES = [tree_of(nested) for nested in (STAR, EQUAL, EMPTY, ONE, comb(60))]
shapes = st.sampled_from(SHAPES) | strategies.trees(max_leaves=12)
larger = st.builds(random_tree, st.integers(2, 120), st.integers(0, 10**6)) | shapes


@st.composite
def problems(draw: st.DrawFn, trees: st.SearchStrategy[PlanTree]) -> tuple[PlanTree, RowLimits]:
    """A tree, a capacity that is often tight, and sometimes limits on pairs and terms."""
    tree = draw(trees)
    longest = max(1, int(tree.length.max()))
    pairs = int(path_pairs(tree.length).max()) + draw(st.integers(0, 300))
    terms = int(tree.terms.max()) + draw(st.integers(0, 9))
    return tree, RowLimits(
        longest + draw(st.just(0) | st.integers(0, 3 * longest)),
        draw(st.none() | st.just(pairs)),
        draw(st.none() | st.just(terms)),
    )


def assert_twins_agree(run: Callable[[], Any], module: ModuleType, *names: str) -> None:
    """Compare the result of `run` with the functions of these names in C, and with their twins."""
    compiled = run()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(module, name, getattr(module, name).twin)
        slow = run()
    np.testing.assert_equal(compiled, slow)


def test_the_loops_are_compiled_here() -> None:
    assert is_compiled(), "install a C compiler, then pip install --no-deps -e ."


@given(problems(larger))
@settings(max_examples=60)
def test_counting(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    known = np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64)

    def counted() -> Any:
        # The second time from bounds that are already proven.
        first = counting.count(tree.end, tree.size, tree.depth + tree.size, limits.capacity, *known)
        again = counting.count(tree.end, tree.size, tree.depth + tree.size, limits.capacity, first[0] + 1, first[1])
        rows = contiguous(tree, limits, SearchOptions()).row_of_leaf
        plans = rows, alone(tree), np.random.default_rng(1).permutation(tree.num_leaves) % 5
        return first, again, [counting.passes(tree.parent, tree.leaf, plan) for plan in plans]

    assert_twins_agree(counted, counting, "count_up", "count_rows")


@given(problems(shapes.filter(lambda tree: tree.num_leaves <= 9)))
@settings(max_examples=40)
def test_subsets(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    tokens, fits = subsets._tokens_of_sets(tree, limits)
    assert_twins_agree(lambda: subsets._best_of_sets(tokens, fits), subsets, "best_of_sets")


@given(problems(larger), st.integers(0, 10**6))
@settings(max_examples=40)
def test_knapsack(problem: tuple[PlanTree, RowLimits], seed: int) -> None:
    tree, limits = problem
    profits = np.random.default_rng(seed).integers(-50, 50, tree.num_nodes).astype(np.int32)

    def table_and_row() -> Any:
        table = np.full((tree.num_nodes + 1, limits.capacity + 1), -1, np.int32)
        knapsack.fill_table(tree.size, profits, tree.end, table)
        return table, knapsack.best_row(tree.size, tree.end, table)

    assert_twins_agree(table_and_row, knapsack, "fill_table", "mark_best_row")
    best = knapsack.best_profits(tree, profits.astype(np.int64), limits.capacity)
    np.testing.assert_array_equal(best, table_and_row()[0][0])


@given(problems(larger.filter(lambda tree: tree.num_leaves <= 30)))
@settings(max_examples=8, deadline=None)
def test_column_generation(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    rows = contiguous(tree, RowLimits(limits.capacity), SearchOptions()).row_of_leaf
    proof = ProofEffort(sets=2, exact=0, programs=(1000,), entries=3e4)
    assert_twins_agree(lambda: lower_bound(tree, limits.capacity, rows, proof), column_generation, "add_outer_products")


@given(problems(larger), st.integers(0, 10**6), st.sampled_from([1, 3, 1024]))
@settings(max_examples=80)
@example((tree_of(comb(300)), RowLimits(700)), 0, 1)
def test_first_fit(problem: tuple[PlanTree, RowLimits], seed: int, blocks: int) -> None:
    tree, limits = problem
    order = np.random.default_rng(seed).permutation(tree.num_leaves)
    pairs, steps = path_pairs(tree.depth + tree.size), np.zeros(tree.num_leaves, np.int64)
    plan = online.fill_rows(tree, pairs, order, steps, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_fit, "FIRST_BLOCKS", blocks)  # so that blocks are doubled again and again
        np.testing.assert_array_equal(plan, online.fill_rows(tree, pairs, order, steps, limits))
        assert_twins_agree(lambda: online.fill_rows(tree, pairs, order, steps, limits), first_fit, "place_leaves")


@given(problems(larger), st.sampled_from([2, 7, 48]), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_annealing(problem: tuple[PlanTree, RowLimits], window: int, passes: int) -> None:
    tree, limits = problem
    rows = contiguous(tree, limits, SearchOptions()).row_of_leaf
    steps = 1 + 150 // tree.num_leaves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anneal, "WINDOW_ROWS", window)
        for module, names in ((anneal, ["anneal_rows"]), (jump_tree, ["split_paths", "set_jumps"])):
            assert_twins_agree(
                lambda: anneal.anneal(tree, limits, rows, steps_per_leaf=steps, passes=passes), module, *names
            )


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=60)
def test_dominance(num: int, width: int, seed: int, compared: int) -> None:
    rooms = np.random.default_rng(seed).integers(0, 4, (num, width))

    def best() -> Any:
        out = np.zeros(num, np.bool_)
        dominance.best_of(rooms, compared, np.zeros(num, np.int64), out)
        return out

    assert_twins_agree(best, dominance, "best_of")


@given(st.integers(1, 40), st.integers(0, 10**6), st.integers(0, 200), st.booleans())
@settings(max_examples=100)
def test_greedy_allocation(num: int, seed: int, budget: int, is_rounded: bool) -> None:
    rng = np.random.default_rng(seed)
    value = np.round(rng.random(num), 1) if is_rounded else rng.random(num)  # rounded values give ties, and 0 and 1
    maximum = rng.integers(0, 30, num)
    assert_twins_agree(lambda: greedy.fill_roots(value, maximum, budget), greedy, "spend_on_roots")
    start = np.sort(np.concatenate([[0, num], rng.integers(0, num + 1, 3)]))
    budgets = np.where(np.diff(start) > 0, rng.integers(0, 1 + budget, 4), 0)
    assert_twins_agree(lambda: greedy.fill_prefixes(value, start, budgets), greedy, "spend_on_prefixes")
