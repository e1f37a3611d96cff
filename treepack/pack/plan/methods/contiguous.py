"""The methods contiguous and heuristic: order the leaves, then cut the order into rows.

In any depth-first order of the leaves, a row of consecutive leaves has the tokens of its first leaf, plus the tokens
that each later leaf does not share with the leaf before it. So a cut before leaf k costs exactly the tokens that k
shares with k - 1, and the total of all rows is N_tree plus the cost of the cuts. Score pairs add up in the same way.
Loss terms are added leaf by leaf.

    leaves   A    B      C      D                 cut before C: the row of C and D has 4 shared tokens again
    shares   0    6      4      9
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, path_pairs
from treepack.trajectory import Int64


@dataclass(frozen=True, slots=True)
class _Measure:
    """One limit, for leaves in some order: a row of leaves a .. b - 1 uses `total[b] - total[a] + again[a]` of it.

    `again[a]` is the amount that leaf a shares with the leaf before it. It counts again in a row that begins with a.
    """

    total: list[int]
    again: list[int]
    limit: int


def _measure(whole: Int64, again: Int64, limit: int) -> _Measure:
    # The worked tree of docs/packing.md: lengths [6, 9, 7, 9, 12], shared [0, 4, 5, 4, 8] -> new tokens [6, 5, 2, 5, 4]
    # -> total [0, 6, 11, 13, 18, 22]. The row of leaves 2 and 3 has 18 - 11 + 5 = 12 tokens.
    return _Measure(np.concatenate([[0], np.cumsum(whole - again)]).tolist(), again.tolist(), limit)


def _measures(tree: PlanTree, limits: RowLimits, order: Int64, shared: Int64) -> list[_Measure]:
    """Return a measure for each limit that is set; each leaf of `order` shares `shared` tokens with the one before."""
    lengths = tree.length[order]
    measures = [_measure(lengths, shared, limits.capacity)]
    if limits.pairs is not None:
        measures.append(_measure(path_pairs(lengths), path_pairs(shared), limits.pairs))
    if limits.terms is not None:
        measures.append(_measure(tree.terms[order], np.zeros_like(shared), limits.terms))
    return measures


def contiguous(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Cut the depth-first order of the leaves into rows with minimum tokens, then minimum rows. O(leaves).

    best[k] is the cost of the first k leaves, over all first leaves a of the last row:

        best[k] = min over a of best[a] + (tokens that leaf a shares with a - 1, one row)

    The leaves a whose row can end at leaf k - 1 are a window that only moves forward, so a queue of window minima finds
    the best one.
    """
    shared = tree.shared
    return TreeSolution(_cut(_measures(tree, limits, np.arange(tree.num_leaves), shared), shared.tolist()))


def cut_in_order(lengths: Int64, shared: Int64, capacity: int) -> Int64:
    """Return the row of each leaf, as `contiguous`, for leaves that are not a `PlanTree`.

    Args:
        lengths: tokens of each leaf, int64 [leaves], at most `capacity`, in the order of the trie.
        shared: tokens that each leaf shares with the leaf before it, int64 [leaves], 0 for the first.
        capacity: maximum tokens of a row.
    """
    return _cut([_measure(lengths, shared, capacity)], shared.tolist())


def _cut(limited: list[_Measure], repeated: list[int]) -> Int64:
    """Return the row of each leaf, for the tokens `repeated` that each leaf shares with the leaf before it."""
    num = len(repeated)
    measures = [(m.total, m.again, m.limit) for m in limited]
    best = [(0, 0)] + [(0, 0)] * num
    begin = [0] * num
    # (cost, a) with rising costs: the first is the minimum. A later candidate stays in the window longer, so it makes
    # all earlier ones of higher cost useless.
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
    return _rows_of_begins(begin)


def _rows_of_begins(begin: list[int]) -> Int64:
    """Return the row of each leaf; `begin[k]` is the first leaf of the row whose last leaf is k, if there is one."""
    # begin [0, 0, 2, 2, 4]: the last row is leaf 4, the one before leaves 2 and 3, then 0 and 1 -> first leaves marked
    # [1, 0, 1, 0, 1] -> rows [0, 0, 1, 1, 2].
    rows = np.zeros(len(begin), np.int64)
    stop = len(begin)
    while stop:
        start = begin[stop - 1]
        rows[start] += 1
        stop = start
    return np.cumsum(rows) - 1


def deepest_first(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Visit children by their deepest leaf, deepest first, and begin a new row if the next leaf does not fit.

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
