"""First fit over all rows of a forest, compiled: each trajectory in turn goes to the first row that still has room.

What a trajectory adds to a row is what it does not share with the paths that are there already. Two ways lead to the
first row, and the lower one wins:

    sharing nothing   a tree of minima over the loads of all rows: the first row that has room for all of it
    sharing           each node keeps the rows that pass through it, in blocks; walking from the leaf to the root, every
                      row of these blocks that has room for what lies below the node

Loads only grow, so the least load that a block had when it was last read is a lower bound now: most blocks are passed
over unread. A row leaves the blocks of a node for good once it has no room for the smallest of what could still come
there. O(log rows + depth in nodes + blocks) for each trajectory.

Import this module only where it is called: numba takes a second to load.
"""

from __future__ import annotations

import numba
import numpy as np

from treepack.trajectory import Int32, Int64

BLOCK = 16  # rows


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def first_fit(order: Int64, leaf: Int64, parent: Int64, path: Int64, least: Int64, limit: Int64, head: Int64) -> Int64:
    """Row of each leaf of `order`, int64 [len(order)], rows numbered from 0 in the order in which they are opened.

    `order` leaves in order of arrival; `leaf` and `parent` as in `Tree`; `path` [limits, nodes] what a path down to the
    end of each node adds to an empty row, within `limit` [limits] for every leaf; `least` [nodes] the fewest tokens
    that a leaf adds below each node; `head` [nodes] all -1, overwritten.
    """
    size = 1
    while size <= len(order):
        size *= 2
    load = np.zeros((len(limit), 2 * size), np.int64)
    rows = np.empty((16, BLOCK), np.int32)
    block = np.empty((16, 3), np.int64)  # rows in it, a lower bound on their tokens, the next block of the node
    num_blocks = 0
    seen, seen_at = np.full(len(order) + 1, -1, np.int64), np.empty(len(order) + 1, np.int64)
    row_of = np.empty(len(order), np.int64)
    for turn in range(len(order)):
        node = leaf[order[turn]]
        row = _first_with_room(load, size, limit - path[:, node])
        up = parent[node]
        while up >= 0:
            room = limit[0] - path[0, node] + path[0, up]
            before, at = -1, head[up]
            while at >= 0:
                after = block[at, 2]
                if block[at, 1] <= room:
                    _refresh(rows[at], block[at], load[0, size:], limit[0] - least[up])
                    for i in range(block[at, 0]):
                        candidate = rows[at, i]
                        if seen[candidate] != turn:
                            seen[candidate], seen_at[candidate] = turn, up
                            if candidate < row and _has_room(load, size + candidate, limit, path, node, up):
                                row = candidate
                if block[at, 0] > 0:
                    before = at
                elif before >= 0:
                    block[before, 2] = after
                else:
                    head[up] = after
                at = after
            up = parent[up]
        common = seen_at[row] if seen[row] == turn else -1
        row_of[turn] = row
        _add(load, size + row, path, node, common)
        up = parent[node]
        while up != common:
            at = head[up]
            if at < 0 or block[at, 0] == BLOCK:
                if num_blocks == len(block):
                    rows, block = _doubled(rows), _doubled(block)
                at = num_blocks
                num_blocks += 1
                block[at, 0], block[at, 1], block[at, 2] = 0, load[0, size + row], head[up]
                head[up] = at
            rows[at, block[at, 0]] = row
            block[at, 0] += 1
            block[at, 1] = min(block[at, 1], load[0, size + row])
            up = parent[up]
    return row_of


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _refresh(rows: Int32, block: Int64, load: Int64, most: int) -> None:
    """Drop the rows of a block whose load exceeds `most`, and set the bound to the least load of the others."""
    kept = 0
    block[1] = np.iinfo(np.int64).max
    for i in range(block[0]):
        row = rows[i]
        if load[row] <= most:
            rows[kept] = row
            kept += 1
            block[1] = min(block[1], load[row])
    block[0] = kept


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _first_with_room(load: Int64, size: int, most: Int64) -> int:
    """The first row whose loads are all at most `most`; there always is an empty one."""
    row, agreed = 0, False
    while not agreed:
        agreed = True
        for kind in range(len(most)):
            found = _first_at_most(load[kind], size, most[kind], row)
            if found != row:
                row, agreed = found, False
    return row


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _first_at_most(minima: Int64, size: int, most: int, start: int) -> int:
    """The first row from `start` on whose load is at most `most`, in a tree of minima with `size` rows."""
    at = start + size
    while minima[at] > most:
        while at % 2 == 1:
            at //= 2
        at += 1
    while at < size:
        at *= 2
        if minima[at] > most:
            at += 1
    return int(at - size)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _has_room(load: Int64, at: int, limit: Int64, path: Int64, node: int, common: int) -> bool:
    fits = True
    for kind in range(len(limit)):
        fits = fits and load[kind, at] + path[kind, node] - path[kind, common] <= limit[kind]
    return fits


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _add(load: Int64, at: int, path: Int64, node: int, common: int) -> None:
    for kind in range(len(load)):
        minima, place = load[kind], at
        minima[place] += path[kind, node] - (path[kind, common] if common >= 0 else 0)
        while place > 1:
            place //= 2
            minima[place] = min(minima[2 * place], minima[2 * place + 1])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _doubled(values: Int64) -> Int64:
    out = np.empty((2 * len(values), values.shape[1]), values.dtype)
    for i in range(len(values)):  # a slice takes numba 5 s to compile
        for k in range(values.shape[1]):
            out[i, k] = values[i, k]
    return out
