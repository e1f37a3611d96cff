"""The single-path method: disjoint subtrees, each in one row, chosen so that they save as many tokens as possible.

A chosen node u puts all leaves below it into one row. The paper counts this row as one shared path, from the root to
the end of u, plus the rest of every leaf below u, not shared:

    L(u)   tokens from the root to u's end                   root --L(u)-- u -+- rest of leaf 1
    R(u)   sum over u's leaves of the tokens below u                          +- rest of leaf 2
    saves  (n_u - 1) L(u), feasible if L(u) + R(u) <= C                       '- rest of leaf 3

The row itself shares more, because leaves may also share tokens below u. So the plan is the plan of the paper, with at
most the tokens that the paper counts. A leaf alone saves 0 and always fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution
from treepack.trajectory import Int64


def single_path(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Plan the rows that save the maximum, and of these plans the one with minimum rows. O(nodes).

    Tree Training (arXiv 2511.00413), section 2.2.1, eq. 3-5.
    """
    return TreeSolution(choose_shared_nodes(tree, limits)[1])


def choose_shared_nodes(tree: PlanTree, limits: RowLimits) -> tuple[int, Int64]:
    """Return the maximum saving of feasible nodes, eq. 5, and the row of each leaf, int64 [num_leaves]."""
    # The leaves below node u are first[u] .. stop[u] - 1: leaf nodes [1, 3, 4], ends [5, 2, 5, 4, 5] -> first
    # [0, 0, 1, 1, 2], stop [3, 1, 3, 2, 3].
    first = np.searchsorted(tree.leaf, np.arange(tree.num_nodes))
    stop = np.searchsorted(tree.leaf, tree.end)
    count, shared = stop - first, tree.depth + tree.size
    saving = ((count - 1) * shared).tolist()
    feasible = _feasible(tree, limits, first, stop).tolist()
    parent, starts, stops = tree.parent.tolist(), first.tolist(), stop.tolist()
    below = [(0, 0)] * tree.num_nodes  # maximum saving of the children, and minus the number of their rows
    chosen = [False] * tree.num_nodes
    for node in range(tree.num_nodes - 1, -1, -1):
        best, alone = below[node], (saving[node], -1)
        if stops[node] - starts[node] == 1 or (feasible[node] and alone >= best):
            best, chosen[node] = alone, True
        up = parent[node]
        if up >= 0:
            below[up] = (below[up][0] + best[0], below[up][1] + best[1])
        else:
            total = best[0]
    # From the root down: below a chosen node nothing else counts, so its subtree is skipped.
    rows = np.zeros(tree.num_leaves, np.int64)
    row, node = 0, 0
    while node < tree.num_nodes:
        if chosen[node]:
            rows[starts[node] : stops[node]] = row
            row, node = row + 1, int(tree.end[node])
        else:
            node += 1
    return total, rows


def _feasible(tree: PlanTree, limits: RowLimits, first: Int64, stop: Int64) -> NDArray[np.bool_]:
    """Return eq. 3 for every node, bool [nodes], together with the limits on pairs and terms if there are any."""
    # lengths[stop] - lengths[first] is the sum of the lengths of all leaves below a node.
    lengths = np.concatenate([[0], np.cumsum(tree.length)])
    shared = tree.depth + tree.size
    fits = shared + lengths[stop] - lengths[first] - (stop - first) * shared <= limits.capacity
    if limits.pairs is not None:
        pairs = np.concatenate([[0], np.cumsum(tree.pairs)])
        # The pairs of the path above the node, plus the pairs of all nodes in its subtree.
        above = (tree.depth * (tree.depth + 1)) // 2
        fits &= above + pairs[tree.end] - pairs[:-1] <= limits.pairs
    if limits.terms is not None:
        terms = np.concatenate([[0], np.cumsum(tree.terms)])
        fits &= terms[stop] - terms[first] <= limits.terms
    return np.asarray(fits)
