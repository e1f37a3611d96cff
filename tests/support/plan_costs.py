"""Costs of plans by the exact methods."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from support import strategies
from treepack.pack.plan.problem import PlanTree, RowLimits, TreeSolution, path_pairs
from treepack.trajectory import Int64

Cost = tuple[int, int]


def cost_of(tree: PlanTree, row_of_leaf: Int64, limits: RowLimits) -> Cost:
    """Tokens and rows of a plan, which must be one."""
    assert row_of_leaf.shape == (tree.num_leaves,)
    rows = rows_of(row_of_leaf)
    assert all(leaves and fits(tree, leaves, limits) for leaves in rows)
    return sum(int(tree.size[nodes_of(tree, leaves)].sum()) for leaves in rows), len(rows)


def proven_cost(tree: PlanTree, solution: TreeSolution, limits: RowLimits) -> Cost:
    cost = cost_of(tree, solution.row_of_leaf, limits)
    assert solution.lower_bound == cost[0]
    return cost


def alone(tree: PlanTree) -> Int64:
    return np.arange(tree.num_leaves)


@st.composite
def limited(draw: st.DrawFn, *, max_leaves: int) -> tuple[PlanTree, RowLimits]:
    """A tree and limits of which at least one other than the capacity is set; every leaf fits alone."""
    tree, capacity = draw(strategies.trees_and_capacities(max_leaves=max_leaves))
    pairs = int(path_pairs(tree.length).max()) + draw(st.integers(0, 60))
    terms = int(tree.terms.max()) + draw(st.integers(0, 6))
    which = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    return tree, RowLimits(capacity, pairs if which[0] else None, terms if which[1] else None)


def rows_of(row_of_leaf: Int64) -> list[list[int]]:
    return [np.flatnonzero(row_of_leaf == row).tolist() for row in range(int(row_of_leaf.max()) + 1)]


def nodes_of(tree: PlanTree, leaves: list[int]) -> list[int]:
    """The union of the leaves' paths."""
    return sorted({node for leaf in leaves for node in path_of(tree, leaf)})


def fits(tree: PlanTree, leaves: list[int], limits: RowLimits) -> bool:
    nodes = nodes_of(tree, leaves)
    return (
        int(tree.size[nodes].sum()) <= limits.capacity
        and (limits.pairs is None or int(tree.pairs[nodes].sum()) <= limits.pairs)
        and (limits.terms is None or int(tree.terms[leaves].sum()) <= limits.terms)
    )


def paths_of(tree: PlanTree) -> list[list[int]]:
    """Each leaf's nodes from the root down."""
    return [path_of(tree, leaf) for leaf in range(tree.num_leaves)]


def path_of(tree: PlanTree, leaf: int) -> list[int]:
    """The nodes of one leaf from the root down; node 0 is the root."""
    path = [int(tree.leaf[leaf])]
    while path[-1]:
        path.append(int(tree.parent[path[-1]]))
    return path[::-1]
