"""The methods contiguous and heuristic: order the leaves, then cut the order into rows; see `cuts`."""

from __future__ import annotations

import numpy as np

from treepack.pack.plan.cuts import (
    RangeMeasure,
    best_starts,
    costs_in_order,
    greedy_starts,
    range_measure,
    rows_of_starts,
)
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, path_pairs
from treepack.trajectory import Int64


def _measures(tree: PlanTree, limits: RowLimits, order: Int64, shared: Int64) -> list[RangeMeasure]:
    """Return a measure for each limit that is set; each leaf of `order` shares `shared` tokens with the one before."""
    lengths = tree.length[order]
    measures = [range_measure(lengths, shared, limits.capacity)]
    if limits.pairs is not None:
        measures.append(range_measure(path_pairs(lengths), path_pairs(shared), limits.pairs))
    if limits.terms is not None:
        measures.append(range_measure(tree.terms[order], np.zeros_like(shared), limits.terms))
    return measures


def contiguous(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Cut the depth-first order of the leaves into rows with minimum tokens, then minimum rows. O(leaves)."""
    shared = tree.shared
    return TreeSolution(_fewest_tokens(_measures(tree, limits, np.arange(tree.num_leaves), shared), shared))


def cut_in_order(lengths: Int64, shared: Int64, capacity: int) -> Int64:
    """Return the row of each leaf, as `contiguous`, for leaves that are not a `PlanTree`.

    Args:
        lengths: tokens of each leaf, int64 [leaves], at most `capacity`, in the order of the trie.
        shared: tokens that each leaf shares with the leaf before it, int64 [leaves], 0 for the first.
        capacity: maximum tokens of a row.
    """
    return _fewest_tokens([range_measure(lengths, shared, capacity)], shared)


def _fewest_tokens(measures: list[RangeMeasure], shared: Int64) -> Int64:
    num = len(shared)
    return rows_of_starts(best_starts(measures, costs_in_order(shared.tolist(), [1] * num)), num)


def deepest_first(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Visit children by their deepest leaf, deepest first, and begin a new row if the next leaf does not fit.

    Tree Training (arXiv 2511.00413), section 2.2.2, "heuristic algorithm".
    """
    order, shared = _deepest_first_order(tree)
    starts = greedy_starts(_measures(tree, limits, np.array(order), np.array(shared, np.int64)))
    rows = np.zeros(tree.num_leaves, np.int64)
    rows[order] = rows_of_starts(starts, tree.num_leaves)
    return TreeSolution(rows)


def _deepest_first_order(tree: PlanTree) -> tuple[list[int], list[int]]:
    """Return the leaves in that order, and the tokens that each one shares with the one before it."""
    deepest = (tree.depth + tree.size).tolist()
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    children: list[list[int]] = [[] for _ in parent]
    for node in range(tree.num_nodes - 1, 0, -1):
        up = parent[node]
        deepest[up] = max(deepest[up], deepest[node])
        children[up].append(node)
    leaf_at = dict(zip(tree.leaf.tolist(), range(tree.num_leaves), strict=True))
    # `common` is the minimum depth of the nodes entered since the last leaf: the shared tokens of the next leaf.
    open_nodes, order, shared, common = [0], [], [], 0
    while open_nodes:
        node = open_nodes.pop()
        common = min(common, depth[node])
        if children[node]:
            # A stack: the last one is visited next, so the deepest child comes last.
            open_nodes.extend(sorted(children[node], key=lambda child: (deepest[child], -child)))
        else:
            order.append(leaf_at[node])
            shared.append(common)
            common = deepest[node]
    return order, shared
