"""The most profitable row of a tree: a knapsack in which a node can only be taken with its parent.

Nodes are in depth-first order. `best[i][room]` is the maximum profit of nodes from i on, when the parent of i is taken:

    best[i][room] = max(best[end[i]][room],                         leave out i and its subtree
                        profit[i] + best[i + 1][room - size[i]])    take i, then continue with the next node

`column_generation.py` is the only user.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.native.library import BOOL, INT32, INT64, in_c
from treepack.pack.plan.problem import PlanTree
from treepack.trajectory import Int32, Int64


@in_c(INT64, INT32, INT64, INT32)
def fill_table(sizes: Int64, profits: Int32, end: Int64, table: Int32) -> None:
    """Write all of `best` into `table` int32 [nodes + 1, room + 1]. O(nodes * room)."""
    nodes = len(sizes)
    # The line after the last node: nothing is left to take. It is `best[end[i]]` of all nodes on the last path.
    table[nodes, :] = 0
    for i in range(nodes - 1, -1, -1):
        table[i] = _take_or_leave(int(sizes[i]), profits[i], table[i + 1], table[end[i]])


def best_row(sizes: Int64, end: Int64, table: Int32) -> NDArray[np.bool_]:
    """Return the nodes that a best row takes, read from a full table; bool [nodes]."""
    taken = np.zeros(len(sizes), np.bool_)
    mark_best_row(sizes, end, table, taken)
    return taken


@in_c(INT64, INT64, INT32, BOOL)
def mark_best_row(sizes: Int64, end: Int64, table: Int32, taken: NDArray[np.bool_]) -> None:
    """Set `taken` bool [nodes] at the nodes that a best row takes."""
    i, room = 0, table.shape[1] - 1
    while i < len(sizes):
        if room >= sizes[i] and table[i, room] != table[end[i], room]:
            taken[i] = True
            room -= sizes[i]
            i += 1
        else:
            i = end[i]


def best_profits(tree: PlanTree, profit: Int64, capacity: int) -> Int64:
    """Return `best[0]` alone, int64 [capacity + 1], in whole tokens.

    O(nodes * capacity) time, O(capacity log nodes) memory. The order of children does not change the result. With the
    largest subtree last, few lines are needed at a time, because a node and its last child have the same `end`.
    """
    order, end = _largest_last(tree)
    sizes, profits = tree.size[order].tolist(), profit[order].tolist()
    # Line i is read by node i - 1 and by every node whose subtree ends at i; after the last of them it is removed.
    readers = np.bincount(np.concatenate([end, np.arange(1, tree.num_nodes + 1)]))
    lines = {tree.num_nodes: np.zeros(capacity + 1, np.int64)}
    for i in range(tree.num_nodes - 1, -1, -1):
        lines[i] = _take_or_leave(sizes[i], profits[i], lines[i + 1], lines[end[i]])
        for read in (i + 1, end[i]):
            readers[read] -= 1
            if readers[read] == 0:
                del lines[read]
    return lines[0]


def _largest_last(tree: PlanTree) -> tuple[Int64, Int64]:
    """Return a depth-first order in which the child with most nodes comes last, and the subtree ends in that order.

    Parents [-1, 0, 1, 1, 0] -> order [0, 4, 1, 2, 3]: node 4 has fewer nodes below it than node 1.
    """
    count = tree.end - np.arange(tree.num_nodes)
    place, free = np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64)
    before = np.zeros(tree.num_nodes, np.int64)
    # The smallest subtree comes first: before[node] is the distance to its parent, free[up] that of the next child.
    for node in np.argsort(count, kind="stable")[:-1].tolist():
        up = tree.parent[node]
        before[node] = free[up]
        free[up] += count[node]
    for node in range(1, tree.num_nodes):
        place[node] = place[tree.parent[node]] + before[node]
    order = np.argsort(place)
    return order, np.arange(tree.num_nodes) + count[order]


def _take_or_leave(size: int, profit: int, taking: NDArray[Any], leaving: NDArray[Any]) -> NDArray[Any]:
    """Return the line of one node: `taking` is the line of the next node, `leaving` that of the end of its subtree."""
    # out[:size] = leaving[:size]; out[size + r] = max(taking[r] + profit, leaving[size + r])
    out = leaving.copy()
    np.maximum(taking[: max(0, len(out) - size)] + profit, leaving[size:], out=out[size:])
    return out
