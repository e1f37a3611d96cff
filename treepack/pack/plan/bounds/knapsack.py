"""The most profitable row of a tree, compiled: a knapsack whose items need their parents.

In depth-first order, with what may be taken from node i on once i's parent is taken,

    best[i][room] = max(best[end[i]][room],                         leave out i and all below it
                        profit[i] + best[i + 1][room - size[i]])    take i, then see what follows

Import this module only where it is called: numba takes a while to load.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from treepack.pack.plan.problem import PlanTree
from treepack.trajectory import Int32, Int64


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fill_table(sizes: Int64, profits: Int32, end: Int64, table: Int32) -> None:
    """All of `best` into `table` int32 [nodes + 1, room + 1]. O(nodes * room)."""
    nodes = len(sizes)
    table[nodes, :] = 0
    for i in range(nodes - 1, -1, -1):
        _take_or_leave(sizes[i], profits[i], table[i + 1], table[end[i]], table[i])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def dearest_row(sizes: Int64, end: Int64, table: Int32) -> NDArray[np.bool_]:
    """Which nodes a best row takes, read from a full table; bool [nodes]."""
    nodes = len(sizes)
    taken = np.zeros(nodes, np.bool_)
    i, room = 0, table.shape[1] - 1
    while i < nodes:
        if room >= sizes[i] and table[i, room] != table[end[i], room]:
            taken[i] = True
            room -= sizes[i]
            i += 1
        else:
            i = end[i]
    return taken


def most_profit(tree: PlanTree, profit: Int64, capacity: int) -> Int64:
    """`best[0]` alone, int64 [capacity + 1], in whole tokens. O(nodes * capacity) time, O(capacity log nodes) memory.

    The order of children does not matter, and with the largest subtree last few lines are needed at a time: a node and
    its last child leave out to the same one.
    """
    order, end = _largest_last(tree)
    return np.asarray(_first_line(tree.size[order], profit[order], end, capacity))


def _largest_last(tree: PlanTree) -> tuple[Int64, Int64]:
    """Depth-first order of the nodes in which the largest child's subtree comes last, and the ends in that order."""
    held = tree.end - np.arange(tree.num_nodes)
    place, free = np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64)
    before = np.zeros(tree.num_nodes, np.int64)
    for node in np.argsort(held, kind="stable")[:-1].tolist():
        up = tree.parent[node]
        before[node] = free[up]
        free[up] += held[node]
    for node in range(1, tree.num_nodes):
        place[node] = place[tree.parent[node]] + before[node]
    order = np.argsort(place)
    return order, np.arange(tree.num_nodes) + held[order]


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _first_line(sizes: Int64, profits: Int64, end: Int64, capacity: int) -> Int64:
    nodes = len(sizes)
    readers = np.zeros(nodes + 1, np.int64)
    for i in range(nodes):
        readers[end[i]] += 1
        readers[i + 1] += 1
    lines = [np.zeros(capacity + 1, np.int64)]
    free = [0]
    free.pop()
    line_of = np.zeros(nodes + 1, np.int64)
    for i in range(nodes - 1, -1, -1):
        if len(free) == 0:
            lines.append(np.zeros(capacity + 1, np.int64))
            free.append(len(lines) - 1)
        line_of[i] = free.pop()
        _take_or_leave(sizes[i], profits[i], lines[line_of[i + 1]], lines[line_of[end[i]]], lines[line_of[i]])
        for read in (i + 1, end[i]):
            readers[read] -= 1
            if readers[read] == 0:
                free.append(line_of[read])
    first: Int64 = lines[line_of[0]]
    return first


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _take_or_leave(size: int, profit: int, taking: Int64, leaving: Int64, out: Int64) -> None:
    """One node, for all rooms: `taking` and `leaving` are the best of what follows."""
    size = min(size, len(out))
    out[:size] = leaving[:size]
    rest, without, value = out[size:], leaving[size:], taking[: len(out) - size]
    for room in range(len(rest)):
        rest[room] = max(value[room] + profit, without[room])
