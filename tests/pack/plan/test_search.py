"""Search and bounds: plans are valid, no bound exceeds the best plan, and the default method is the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from support import strategies
from support.plan_costs import Cost, alone, cost_of, limited, proven_cost
from support.strategies import Nested, tree_of
from treepack.pack.plan.auto import TOKENS_TO_STOP, auto
from treepack.pack.plan.bounds import lower_bound as bounds
from treepack.pack.plan.bounds.column_generation import WorkBudget
from treepack.pack.plan.bounds.counting import count, passes
from treepack.pack.plan.bounds.knapsack import best_profits
from treepack.pack.plan.bounds.lower_bound import ProofEffort, lower_bound, recursive_bound
from treepack.pack.plan.methods import anneal as search
from treepack.pack.plan.methods.contiguous import contiguous
from treepack.pack.plan.methods.exact import exact
from treepack.pack.plan.methods.subsets import fewest, subsets
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, shapes_of_trees
from treepack.trajectory import Int64, Trajectory
from treepack.trie.builders.in_memory import build_trie

Problem = tuple[PlanTree, int]

PROGRAMS = ProofEffort(sets=0, exact=0, programs=(1000,), entries=1e8)
"""Column generation alone."""
PROOFS = [
    PROGRAMS,
    replace(PROGRAMS, programs=(1000, 1000)),
    replace(PROGRAMS, programs=(3, 1000)),
    ProofEffort(sets=3, exact=5, programs=(7, 1000), entries=1e8),
    ProofEffort(sets=12, exact=0, programs=(1000,), entries=1e8),
]
# Every best plan has four rows; three rows are enough for all leaves, but they need more tokens.
MORE_ROWS_THAN_NEEDED = tree_of((2, [(3, [(1, []), (3, [])]), (9, []), (3, [(5, []), (11, [])])])), 16


def deep(num_leaves: int, size: int) -> Nested:
    """A chain of nodes with one leaf each, whose sizes count up."""
    node: Nested = (size, [])
    for i in range(num_leaves - 1):
        node = (size, [(1 + i, []), node] if i % 2 else [node, (1 + i, [])])
    return node


edges = [
    (tree_of((5, [])), 5),
    (tree_of((0, [])), 1),
    (tree_of((3, [(0, []), (0, []), (0, [])])), 3),
    (tree_of((4, [(6, []), (3, []), (3, []), (2, [])])), 10),
    (tree_of((1, [(1, []) for _ in range(12)])), 4),
    (tree_of((2, [(7, []) for _ in range(9)])), 17),
    (tree_of(deep(11, 3)), 33 + 9),
    (tree_of(deep(12, 1)), 40),
    MORE_ROWS_THAN_NEEDED,
]
some_trees = strategies.trees_and_capacities(max_leaves=10) | strategies.trees_and_capacities(
    max_leaves=8, max_size=300
)
larger_trees = strategies.trees_and_capacities(max_leaves=22, max_size=60).filter(lambda made: made[0].num_leaves > 12)


def best_of(problem: Problem) -> Cost:
    tree, limits = problem[0], RowLimits(problem[1])
    return proven_cost(tree, subsets(tree, limits, SearchOptions()), limits)


def plans_of(problem: Problem) -> list[Int64]:
    """A poor plan and a good one."""
    tree, limits = problem[0], RowLimits(problem[1])
    return [alone(tree), contiguous(tree, limits, SearchOptions()).row_of_leaf]


def unknown(tree: PlanTree) -> bounds.NodeBounds:
    return bounds.NodeBounds(np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64))


def counted(problem: Problem) -> bounds.NodeBounds:
    return bounds._count(problem[0], problem[1], unknown(problem[0]))


def least_of_every_node(problem: Problem) -> tuple[Int64, Int64]:
    """Return the minimum tokens of each subtree and the minimum rows through each node, by the program over subsets."""
    tree, capacity = problem
    minima = [
        fewest(bounds.subtree(tree, node), RowLimits(capacity - int(tree.depth[node])))
        for node in range(tree.num_nodes)
    ]
    return np.array([tokens[0] for tokens, _ in minima]), np.array([times[0] for _, times in minima])


@pytest.mark.parametrize("problem", edges)
@pytest.mark.parametrize("proof", PROOFS)
def test_bounds_of_extreme_trees_are_valid(problem: Problem, proof: ProofEffort) -> None:
    tree, capacity = problem
    for rows in plans_of(problem):
        assert recursive_bound(tree, capacity) <= lower_bound(tree, capacity, rows, proof) <= best_of(problem)[0]


@given(some_trees, st.sampled_from(PROOFS))
@settings(max_examples=40)
def test_no_bound_exceeds_the_best_plan_whatever_plan_it_is_given(problem: Problem, proof: ProofEffort) -> None:
    tree, capacity = problem
    for rows in plans_of(problem):
        assert recursive_bound(tree, capacity) <= lower_bound(tree, capacity, rows, proof) <= best_of(problem)[0]


def test_column_generation_proves_what_counting_cannot() -> None:
    tree, capacity = tree_of((10, [(size, []) for size in (20, 24, 24, 24, 34, 36, 53, 54)])), 100
    best = best_of((tree, capacity))[0]
    assert recursive_bound(tree, capacity) < best == lower_bound(tree, capacity, alone(tree), PROGRAMS)


@given(some_trees)
def test_counting_stays_below_what_every_node_needs(problem: Problem) -> None:
    tokens, times = least_of_every_node(problem)
    known = counted(problem)
    assert (known.tokens <= tokens).all()
    assert (known.times <= times).all()


@given(some_trees)
def test_counting_from_the_truth_below_stays_below_the_truth(problem: Problem) -> None:
    tree, capacity = problem
    tokens, times = least_of_every_node(problem)
    # The true bounds of subtrees of up to 3 nodes, and none (0 tokens, 1 row) for larger ones.
    inner = tree.end - np.arange(tree.num_nodes) > 3
    at_most = count(
        tree.end,
        tree.size,
        tree.depth + tree.size,
        capacity,
        np.where(inner, 0, tokens),
        np.where(inner, 1, times),
    )
    assert (at_most[0] <= tokens).all()
    assert (at_most[1] <= times).all()


@given(some_trees, st.integers(0, 12))
def test_small_subtrees_are_exact(problem: Problem, most_leaves: int) -> None:
    tree, capacity = problem
    known = bounds._small_subtrees(tree, capacity, most_leaves=most_leaves)
    tokens, times = least_of_every_node(problem)
    leaves = bounds._subtree_sums(tree, np.bincount(tree.leaf, minlength=tree.num_nodes))
    solved = (leaves <= most_leaves) & (known.tokens > 0)
    assert (known.tokens[solved] == tokens[solved]).all()
    assert (known.tokens <= tokens).all()
    assert (known.times[solved] == times[solved]).all()
    assert (known.times <= times).all()


@given(some_trees)
@settings(max_examples=15)
def test_programs_for_rows_and_for_tokens_stay_below_what_the_nodes_need(problem: Problem) -> None:
    tree, capacity = problem
    tokens, times = least_of_every_node(problem)
    for rows in plans_of(problem):
        known = counted(problem)
        used = passes(tree.parent, tree.leaf, rows)
        assume(known.tokens[0] < tree.size @ used)
        better = bounds._by_programs(tree, 0, capacity, rows, known, PROGRAMS)
        assert (better.tokens <= tokens).all()
        assert (better.times <= times).all()
        for node in np.flatnonzero(used > known.times).tolist():
            assert bounds._min_rows(tree, node, capacity, rows, known, WorkBudget(1e7)) <= times[node]


@given(some_trees)
@example(MORE_ROWS_THAN_NEEDED)
def test_some_best_plan_has_at_most_the_rows_that_programs_count_with(problem: Problem) -> None:
    tree, capacity = problem
    tokens, times = least_of_every_node(problem)
    for known in (counted(problem), bounds.NodeBounds(tokens, times)):
        for rows in plans_of(problem):
            upper = int(tree.size @ passes(tree.parent, tree.leaf, rows))
            assert best_of(problem)[1] <= bounds._max_rows(tree, capacity, upper, known)


@given(strategies.trees_and_capacities(max_leaves=7), st.data())
def test_the_most_profitable_row_is_the_best_of_all_sets_of_leaves(problem: Problem, data: st.DataObject) -> None:
    tree, capacity = problem
    profit = np.array(data.draw(st.lists(st.integers(-5, 9), min_size=tree.num_nodes, max_size=tree.num_nodes)))
    assume(tree.num_nodes <= 13)
    # Sets of nodes as bit masks, in which every node comes with its parent: these are the rows.
    closed = [
        chosen
        for chosen in range(1 << tree.num_nodes)
        if all(
            node == 0 or not chosen >> node & 1 or chosen >> int(tree.parent[node]) & 1
            for node in range(tree.num_nodes)
        )
    ]
    nodes = [[node for node in range(tree.num_nodes) if chosen >> node & 1] for chosen in closed]
    best = best_profits(tree, profit, capacity)
    for room in (0, capacity // 2, capacity):
        assert best[room] == max(int(profit[some].sum()) for some in nodes if tree.size[some].sum() <= room)


def test_prices_in_large_rooms_do_not_overflow() -> None:
    tree, capacity = tree_of((100_000, [(100 + i % 7, []) for i in range(300)])), 131_072
    bound = lower_bound(tree, capacity, alone(tree), PROGRAMS)
    assert recursive_bound(tree, capacity) == tree.tokens == bound


@given(larger_trees, st.sampled_from(PROOFS))
@settings(max_examples=12)
def test_bounds_of_larger_trees_are_below_the_proven_best(problem: Problem, proof: ProofEffort) -> None:
    tree, limits = problem[0], RowLimits(problem[1])
    exact_solution = exact(tree, limits, SearchOptions(effort="low"))
    tokens = cost_of(tree, exact_solution.row_of_leaf, limits)[0]
    assume(exact_solution.lower_bound == tokens)
    assert max(lower_bound(tree, problem[1], rows, proof) for rows in plans_of(problem)) <= tokens


@st.composite
def searches(draw: st.DrawFn) -> tuple[PlanTree, RowLimits, Int64]:
    """A tree of up to 200 leaves, limits of which some are tight, and a plan within them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parents, leaves = [-1], draw(st.integers(2, 200))
    below: list[list[int]] = [[]]
    spread = draw(st.sampled_from([1, 4, 1000]))
    while sum(not children for children in below) < leaves:
        up = int(rng.integers(max(0, len(parents) - spread), len(parents)))
        for _ in range(1 if below[up] else 2):
            below[up].append(len(parents))
            parents.append(up)
            below.append([])
    least = draw(st.sampled_from([0, 1]))

    def nested(node: int) -> Nested:
        return int(rng.integers(1 if below[node] else least, 60)), [nested(child) for child in below[node]]

    tree = tree_of(nested(0), rng.integers(0, 5, leaves + 1).tolist()[: sum(not some for some in below)])
    capacity = int(tree.length.max()) + draw(st.integers(0, 200))
    most_pairs = int((tree.length * (tree.length + 1) // 2).max())
    limits = RowLimits(
        capacity,
        draw(st.none() | st.integers(most_pairs, 3 * most_pairs)),
        draw(st.none() | st.integers(int(tree.terms.max()), 20)),
    )
    return tree, limits, contiguous(tree, limits, SearchOptions()).row_of_leaf


@given(searches(), st.sampled_from([2, 7, 48]), st.integers(1, 4))
@settings(max_examples=40)
def test_a_search_returns_a_plan_no_worse_than_its_start(
    given_one: tuple[PlanTree, RowLimits, Int64], window: int, passes: int
) -> None:
    tree, limits, start = given_one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "WINDOW_ROWS", window)
        plan, again = (search.anneal(tree, limits, start, steps_per_leaf=5, passes=passes) for _ in range(2))
    assert cost_of(tree, plan, limits) <= cost_of(tree, start, limits)
    assert np.array_equal(plan, again)


@given(strategies.trajectories(max_count=8), st.integers(9, 16), st.integers(8, 16))
@settings(max_examples=30)
def test_a_search_places_trajectories_that_end_inside_others(ones: list[Trajectory], room: int, terms: int) -> None:
    for tree in shapes_of_trees(build_trie(ones), split_ends=True).trees():
        limits = RowLimits(room, terms=terms)
        plan = search.anneal(tree, limits, alone(tree), steps_per_leaf=20)
        assert cost_of(tree, plan, limits) <= cost_of(tree, alone(tree), limits)


def test_a_search_finds_the_best_plan_from_the_worst() -> None:
    # The best plan is three times the root and one leaf of each size: 3 * (10 + 30 + 40 + 50) = 390 tokens.
    tree, limits = tree_of((10, [(size, []) for size in (30, 40, 50) * 3])), RowLimits(130)
    assert cost_of(tree, search.anneal(tree, limits, alone(tree), steps_per_leaf=100), limits) == (390, 3)


@given(some_trees)
@example(MORE_ROWS_THAN_NEEDED)
def test_auto_is_the_best_of_small_trees(problem: Problem) -> None:
    tree, limits = problem[0], RowLimits(problem[1])
    assert proven_cost(tree, auto(tree, limits, SearchOptions()), limits) == best_of(problem)


@given(limited(max_leaves=8))
@settings(max_examples=30)
def test_auto_is_the_best_of_small_trees_within_all_limits(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    best = cost_of(tree, subsets(tree, limits, SearchOptions()).row_of_leaf, limits)
    solution = auto(tree, limits, SearchOptions())
    assert cost_of(tree, solution.row_of_leaf, limits) == best
    assert solution.lower_bound <= best[0]


@given(larger_trees)
@settings(max_examples=15)
def test_auto_needs_nearly_the_tokens_that_the_exact_method_proves(problem: Problem) -> None:
    tree, limits = problem[0], RowLimits(problem[1])
    exact_solution = exact(tree, limits, SearchOptions())
    tokens = cost_of(tree, exact_solution.row_of_leaf, limits)[0]
    assume(exact_solution.lower_bound == tokens)
    solution = auto(tree, limits, SearchOptions())
    assert solution.lower_bound <= tokens <= cost_of(tree, solution.row_of_leaf, limits)[0] <= tokens * TOKENS_TO_STOP


@given(some_trees, st.integers(1, 30))
def test_a_larger_capacity_never_costs_tokens(problem: Problem, more: int) -> None:
    tree, capacity = problem
    assert best_of((tree, capacity + more))[0] <= best_of(problem)[0]
    tight, loose = (auto(tree, RowLimits(room), SearchOptions()).lower_bound for room in (capacity, capacity + more))
    assert loose <= tight
