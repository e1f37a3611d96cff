"""Methods that order the leaves and cut the order into rows.

For leaves in any depth-first order, the union of consecutive ones costs the first one's length plus what each later
one does not share with its predecessor. So a cut before leaf k costs exactly what k shares with k - 1, and the total
of all rows is N_tree plus the cost of the cuts. Score pairs add up in the same way, loss terms leaf by leaf.

    leaves   A    B      C      D                 cut before C: the row of C and D pays 4 again
    shares   0    6      4      9
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.problem import Limits, PlanTree, Search, Solution, path_pairs
from treepack.trajectory import Int64


@dataclass(frozen=True, slots=True)
class _Measure:
    """One limit over leaves in some order: a row of leaves a .. b - 1 holds `total[b] - total[a] + again[a]`.

    `again[a]` is what leaf a shares with the leaf before it, which counts anew where a row begins with a.
    """

    total: list[int]
    again: list[int]
    limit: int


def _measures(tree: PlanTree, limits: Limits, order: Int64, shared: Int64) -> list[_Measure]:
    """The limits that are set, for the leaves in `order`, of which each shares `shared` tokens with the one before."""
    lengths = tree.length[order]

    def measure(whole: Int64, again: Int64, limit: int) -> _Measure:
        return _Measure(np.concatenate([[0], np.cumsum(whole - again)]).tolist(), again.tolist(), limit)

    found = [measure(lengths, shared, limits.capacity)]
    if limits.pairs is not None:
        found.append(measure(path_pairs(lengths), path_pairs(shared), limits.pairs))
    if limits.terms is not None:
        found.append(measure(tree.terms[order], np.zeros_like(shared), limits.terms))
    return found


def contiguous(tree: PlanTree, limits: Limits, search: Search) -> Solution:
    """The best cut of the depth-first order: fewest tokens, then fewest rows. O(leaves).

    The rows that can end at a leaf are a window that only moves forward, so a queue of window minima suffices.
    """
    num, shared = tree.num_leaves, tree.shared
    repeated = shared.tolist()
    measures = [(m.total, m.again, m.limit) for m in _measures(tree, limits, np.arange(num), shared)]
    best = [(0, 0)] + [(0, 0)] * num
    begin = [0] * num
    window: deque[tuple[tuple[int, int], int]] = deque()
    for k in range(num):
        tokens, rows = best[k]
        candidate = (tokens + repeated[k], rows + 1)
        while window and window[-1][0] > candidate:
            window.pop()
        window.append((candidate, k))
        for total, again, limit in measures:
            while total[k + 1] - total[window[0][1]] + again[window[0][1]] > limit:
                window.popleft()
        best[k + 1], begin[k] = window[0]
    return Solution(_rows_of_begins(begin))


def _rows_of_begins(begin: list[int]) -> Int64:
    """Row of each leaf, given where the row that ends at each leaf begins."""
    rows = np.zeros(len(begin), np.int64)
    stop = len(begin)
    while stop:
        start = begin[stop - 1]
        rows[start] += 1
        stop = start
    return np.cumsum(rows) - 1


def deepest_first(tree: PlanTree, limits: Limits, search: Search) -> Solution:
    """Visit children by their deepest leaf, deepest first; a new row when the next leaf does not fit.

    Tree Training (arXiv 2511.00413), section 2.2.2, "heuristic algorithm".
    """
    rows = np.zeros(tree.num_leaves, np.int64)
    order, shared = _deepest_first_order(tree)
    measures = _measures(tree, limits, np.array(order), np.array(shared, np.int64))
    row, start = 0, 0
    for k, leaf in enumerate(order):
        if any(m.total[k + 1] - m.total[start] + m.again[start] > m.limit for m in measures):
            row, start = row + 1, k
        rows[leaf] = row
    return Solution(rows)


def _deepest_first_order(tree: PlanTree) -> tuple[list[int], list[int]]:
    """Leaves in that order and the tokens that each shares with the one before it."""
    deepest = (tree.depth + tree.size).tolist()
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    children: list[list[int]] = [[] for _ in parent]
    for node in range(tree.num_nodes - 1, 0, -1):
        up = parent[node]
        deepest[up] = max(deepest[up], deepest[node])
        children[up].append(node)
    leaf_at = dict(zip(tree.leaf.tolist(), range(tree.num_leaves), strict=True))
    open_nodes, order, shared, common = [0], [], [], 0
    while open_nodes:
        node = open_nodes.pop()
        common = min(common, depth[node])
        if children[node]:
            open_nodes.extend(sorted(children[node], key=lambda child: (deepest[child], -child)))
        else:
            order.append(leaf_at[node])
            shared.append(common)
            common = deepest[node]
    return order, shared
