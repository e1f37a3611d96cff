"""Exact methods: the same best plan as by trying everything, with a bound that proves it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import oracle, strategies
from support.plan_costs import alone, cost_of, fits, limited, nodes_of, paths_of, proven_cost, rows_of
from support.strategies import tree_of
from treepack.pack.plan.methods.completion import Rooms, State
from treepack.pack.plan.methods.direct import direct
from treepack.pack.plan.methods.dominance import drop_dominated
from treepack.pack.plan.methods.exact import exact
from treepack.pack.plan.methods.packing import PlanTarget, pack
from treepack.pack.plan.methods.single_path import choose_shared_nodes, single_path
from treepack.pack.plan.methods.subsets import subsets
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions


def sequences_of(tree: PlanTree) -> list[list[int]]:
    """Each leaf's tokens, all different from node to node."""
    start = np.cumsum(tree.size) - tree.size
    return [[int(start[node]) + i for node in path for i in range(int(tree.size[node]))] for path in paths_of(tree)]


# A trap: each of the two subtrees was once rounded by the true sums of the other one, not by its rounded sums.
ROUNDED_TWICE = tree_of((1, [(1, [(1, []), (4, [])]), (1, [(1, []), (4, [])])])), 6
TIGHT_STAR = tree_of((2, [(size, []) for size in (6, 6, 5, 4, 4, 3, 3, 2)])), 13


@given(strategies.trees_and_capacities(max_leaves=7))
@example(ROUNDED_TWICE)
@example(TIGHT_STAR)
def test_subsets_are_the_best_of_all_partitions(problem: tuple[PlanTree, int]) -> None:
    tree, limits = problem[0], RowLimits(problem[1])
    best = oracle.best_plan(sequences_of(tree), problem[1])
    assert proven_cost(tree, subsets(tree, limits, SearchOptions()), limits) == best


@given(strategies.trees_and_capacities(max_leaves=12) | strategies.trees_and_capacities(max_leaves=12, max_size=400))
@settings(max_examples=100)
@example(ROUNDED_TWICE)
@example(TIGHT_STAR)
def test_the_exact_program_finds_and_proves_the_best(problem: tuple[PlanTree, int]) -> None:
    tree, limits = problem[0], RowLimits(problem[1])
    best = proven_cost(tree, subsets(tree, limits, SearchOptions()), limits)
    assert proven_cost(tree, exact(tree, limits, SearchOptions()), limits) == best


@given(strategies.trees_and_capacities(max_leaves=10))
@settings(max_examples=40)
@example(ROUNDED_TWICE)
def test_the_integer_program_finds_and_proves_the_best(problem: tuple[PlanTree, int]) -> None:
    tree, limits = problem[0], RowLimits(problem[1])
    best = proven_cost(tree, subsets(tree, limits, SearchOptions()), limits)
    assert proven_cost(tree, direct(tree, limits, SearchOptions(), incumbent=alone(tree)), limits) == best


def partitions(count: int) -> Iterator[list[list[int]]]:
    # 2 -> [[0, 1]], [[0], [1]]; 3 items have 5 partitions, 6 items have 203.
    if count == 0:
        yield []
        return
    for rows in partitions(count - 1):
        for k in range(len(rows)):
            yield [*rows[:k], [*rows[k], count - 1], *rows[k + 1 :]]
        yield [*rows, [count - 1]]


@given(limited(max_leaves=6))
@settings(max_examples=30)
def test_exact_methods_honour_limits_of_pairs_and_terms(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    best = min(
        (sum(int(tree.size[nodes_of(tree, leaves)].sum()) for leaves in rows), len(rows))
        for rows in partitions(tree.num_leaves)
        if all(fits(tree, leaves, limits) for leaves in rows)
    )
    assert proven_cost(tree, subsets(tree, limits, SearchOptions()), limits) == best
    assert proven_cost(tree, exact(tree, limits, SearchOptions()), limits) == best


def test_the_exact_program_proves_trees_of_40_leaves() -> None:
    rng = np.random.default_rng(0)
    turns: list[strategies.Nested] = [
        (int(a), [(int(b), []) for b in rng.integers(1, 900, 4)]) for a in rng.integers(1, 900, 10)
    ]
    tree, limits = tree_of((500, turns)), RowLimits(4000)
    solution = exact(tree, limits, SearchOptions())
    proven_cost(tree, solution, limits)
    assert solution.lower_bound < cost_of(tree, single_path(tree, limits, SearchOptions()).row_of_leaf, limits)[0]


@pytest.mark.parametrize(
    "search", [SearchOptions(time_limit=0), SearchOptions(effort="low"), SearchOptions(effort="low", time_limit=0.1)]
)
def test_a_search_that_ends_early_returns_a_plan_and_a_bound(search: SearchOptions) -> None:
    rng = np.random.default_rng(1)
    tree, limits = tree_of((300, [(int(size), []) for size in rng.integers(2000, 3500, 60)])), RowLimits(9000)
    solution = exact(tree, limits, search)
    tokens, _ = cost_of(tree, solution.row_of_leaf, limits)
    assert tree.tokens < solution.lower_bound < tokens


def test_a_search_without_a_time_limit_always_gives_the_same_plan() -> None:
    rng = np.random.default_rng(2)
    tree = tree_of((300, [(int(size), []) for size in rng.integers(2000, 3500, 45)]))
    first, second = (exact(tree, RowLimits(9000), SearchOptions(effort="low")) for _ in range(2))
    np.testing.assert_array_equal(first.row_of_leaf, second.row_of_leaf)
    assert first.lower_bound == second.lower_bound


def test_a_large_tree_gets_the_best_of_the_cheap_plans() -> None:
    tree = tree_of((5, [(1 + i % 7, []) for i in range(3000)]))
    solution = exact(tree, RowLimits(40), SearchOptions())
    assert int(np.bincount(solution.row_of_leaf, tree.size[tree.leaf]).max()) <= 35


def selections(tree: PlanTree, limits: RowLimits, node: int = 0) -> Iterator[list[int]]:
    """Yield every cover of the leaves below `node` by disjoint feasible nodes, eq. 3; a leaf is always feasible."""
    paths = [path for path in paths_of(tree) if node in path]
    shared = int(tree.depth[node] + tree.size[node])
    lengths = [int(tree.size[path].sum()) for path in paths]
    if shared + sum(length - shared for length in lengths) <= limits.capacity:
        yield [node]
    children = np.flatnonzero(tree.parent == node).tolist()
    if children:
        for parts in itertools.product(*(list(selections(tree, limits, child)) for child in children)):
            yield list(itertools.chain(*parts))


@given(strategies.trees_and_capacities(max_leaves=7))
def test_single_path_saves_the_most_that_feasible_nodes_can(problem: tuple[PlanTree, int]) -> None:
    tree, limits = problem[0], RowLimits(problem[1])
    below = [sum(node in path for path in paths_of(tree)) for node in range(tree.num_nodes)]
    ends = tree.depth + tree.size
    most, fewest = max(
        (sum((below[node] - 1) * int(ends[node]) for node in nodes), -len(nodes)) for nodes in selections(tree, limits)
    )
    saving, row_of_leaf = choose_shared_nodes(tree, limits)
    assert (saving, -len(rows_of(row_of_leaf))) == (most, fewest)


@given(limited(max_leaves=8))
def test_single_path_rows_cost_at_most_what_the_paper_counts(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    saving, row_of_leaf = choose_shared_nodes(tree, limits)
    assert cost_of(tree, row_of_leaf, limits)[0] <= int(tree.length.sum()) - saving


def better(a: State, b: State) -> bool:
    """Return True if the traversals of `a` can replace different ones of `b` at no higher cost; try all ways."""
    return a[0] <= b[0] and any(
        all(x >= y for x, y in zip(a[1], chosen, strict=True)) for chosen in itertools.permutations(b[1], len(a[1]))
    )


def rooms(most: int) -> st.SearchStrategy[Rooms]:
    return st.lists(st.integers(0, 4), min_size=1, max_size=most).map(lambda values: tuple(sorted(values)))


@given(st.dictionaries(rooms(4), st.integers(0, 3), max_size=12))
def test_states_are_dropped_exactly_if_another_is_as_good(costs: dict[Rooms, int]) -> None:
    states = [(cost, left) for left, cost in costs.items()]
    expected = [b for b in states if not any(better(a, b) for a in states if a != b)]
    assert sorted(drop_dominated(states.copy())) == sorted(expected)


def fewest_bins(items: list[tuple[int, int]], room: int) -> int:
    """Return the minimum bins for items (child, load), never two of the same child in one; try every partition."""
    return min(
        len(bins)
        for bins in partitions(len(items))
        if all(
            sum(items[i][1] for i in some) <= room and len({items[i][0] for i in some}) == len(some) for some in bins
        )
    )


states_of_children = st.lists(
    st.lists(st.tuples(st.integers(0, 20), rooms(2)), min_size=1, max_size=3), min_size=1, max_size=3
)


@given(states_of_children)
@settings(max_examples=30)
def test_packing_at_the_root_chooses_the_best_states(children: list[list[State]]) -> None:
    room, size = 4, 5
    best = min(
        (sum(cost for cost, _ in chosen) + size * bins, bins)
        for chosen in itertools.product(*children)
        for bins in [fewest_bins([(i, room - left) for i, (_, lefts) in enumerate(chosen) for left in lefts], room)]
    )
    packing = pack(children, room, size, PlanTarget(best[0], best[1], 6), work=1e9, seconds=60)
    assert packing.proven
    assert packing.chosen is not None
    number = 1 + max(row for _, rows in packing.chosen for row in rows)
    assert (sum(cost for (cost, _), _ in packing.chosen) + size * number, number) == best
    # With one row less there is no packing at this cost, and CP-SAT proves it.
    nothing = pack(children, room, size, PlanTarget(best[0], best[1] - 1, 6), work=1e9, seconds=60)
    assert nothing.proven
    assert nothing.chosen is None


def test_planning_is_imported_without_solvers() -> None:
    code = "import sys, treepack.pack.plan.planning; print({'ortools'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_an_interrupt_after_a_solver_ran_is_still_an_exception() -> None:
    code = """
import os, signal, numpy as np
from treepack.pack.plan.methods.direct import direct
from treepack.pack.plan.problem import RowLimits, PlanTree, SearchOptions
columns = ([1, 2, 2], [0, 1, 1], [-1, 0, 0], [3, 2, 3], [1, 2], [1, 1])
direct(PlanTree(*(np.array(column) for column in columns)), RowLimits(3), SearchOptions(), incumbent=np.arange(2))
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (0, "interrupted\n"), out.stderr
