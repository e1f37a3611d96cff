"""The single-path method: disjoint subtrees, each one row, chosen to save the most.

A chosen node u puts all leaves below it into one row. The paper counts that row as one shared path, the root to u's
end, and every leaf's rest below u anew:

    L(u)   tokens from the root to u's end                   root --L(u)-- u -+- rest of leaf 1
    R(u)   sum over u's leaves of the tokens below u                          +- rest of leaf 2
    saves  (n_u - 1) L(u), feasible if L(u) + R(u) <= C                       '- rest of leaf 3

The row itself shares more than that, since leaves may share tokens below u too: the plan is the paper's, and costs at
most what the paper counts. A leaf alone saves 0 and always fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.pack.plan.problem import Limits, PlanTree, Search, Solution
from treepack.trajectory import Int64


def single_path(tree: PlanTree, limits: Limits, search: Search) -> Solution:
    """Rows of the nodes that save the most, fewest rows among those. O(nodes).

    Tree Training (arXiv 2511.00413), section 2.2.1, eq. 3-5.
    """
    return Solution(choose_shared_nodes(tree, limits)[1])


def choose_shared_nodes(tree: PlanTree, limits: Limits) -> tuple[int, Int64]:
    """The most that feasible nodes can save, eq. 5, and the row of each leaf, int64 [num_leaves]."""
    first = np.searchsorted(tree.leaf, np.arange(tree.num_nodes))
    stop = np.searchsorted(tree.leaf, tree.end)
    count, shared = stop - first, tree.depth + tree.size
    saving = ((count - 1) * shared).tolist()
    feasible = _feasible(tree, limits, first, stop).tolist()
    parent, starts, stops = tree.parent.tolist(), first.tolist(), stop.tolist()
    below = [(0, 0)] * tree.num_nodes  # most that the children save, and minus the rows that takes
    chosen = [False] * tree.num_nodes
    for node in range(tree.num_nodes - 1, -1, -1):
        best, own = below[node], (saving[node], -1)
        if stops[node] - starts[node] == 1 or (feasible[node] and own >= best):
            best, chosen[node] = own, True
        up = parent[node]
        if up >= 0:
            below[up] = (below[up][0] + best[0], below[up][1] + best[1])
        else:
            total = best[0]
    rows = np.zeros(tree.num_leaves, np.int64)
    row, node = 0, 0
    while node < tree.num_nodes:
        if chosen[node]:
            rows[starts[node] : stops[node]] = row
            row, node = row + 1, int(tree.end[node])
        else:
            node += 1
    return total, rows


def _feasible(tree: PlanTree, limits: Limits, first: Int64, stop: Int64) -> NDArray[np.bool_]:
    """Eq. 3 of every node; where limited, also the pairs and terms of its row."""
    lengths = np.concatenate([[0], np.cumsum(tree.length)])
    shared = tree.depth + tree.size
    fits = shared + lengths[stop] - lengths[first] - (stop - first) * shared <= limits.capacity
    if limits.pairs is not None:
        pairs = np.concatenate([[0], np.cumsum(tree.pairs)])
        above = (tree.depth * (tree.depth + 1)) // 2
        fits &= above + pairs[tree.end] - pairs[:-1] <= limits.pairs
    if limits.terms is not None:
        terms = np.concatenate([[0], np.cumsum(tree.terms)])
        fits &= terms[stop] - terms[first] <= limits.terms
    return np.asarray(fits)
