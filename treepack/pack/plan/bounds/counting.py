"""Counting along a tree, compiled. Import this module only where it is called: numba takes a while to load."""

from __future__ import annotations

import numba
import numpy as np

from treepack.trajectory import Int64

MOST_A_ROW = 16  # of the shares that are tried: items larger than a room's 2nd, 3rd, ... part
MOST_THRESHOLDS = 32


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def count(
    parent: Int64, end: Int64, size: Int64, stop: Int64, capacity: int, tokens: Int64, times: Int64
) -> tuple[Int64, Int64]:
    """Tokens that each subtree needs and rows that pass through each node, at least; from the leaves up.

    `tokens` and `times` are what is known already, `stop` the tokens from the root to the end of each node. A row that
    passes through node u has `capacity - stop[u]` tokens left for what is below it. If that needs D tokens, at least
    D / left rows pass through u. And a row that goes on to a child brings at least the shortest path there, so as many
    rows pass through u as bins are needed for the rows of all children with those sizes.
    """
    tokens, times = tokens.copy(), times.copy()
    shortest = size.copy()  # tokens of the shortest path down from the beginning of each node
    for node in range(len(parent) - 1, -1, -1):
        if end[node] > node + 1:
            below, children, child, least = 0, 0, node + 1, capacity
            while child < end[node]:
                below += tokens[child]
                times[node] = max(times[node], times[child])
                least = min(least, shortest[child])
                children += 1
                child = end[child]
            left = capacity - stop[node]
            if below:
                times[node] = max(times[node], -(-below // left))
            shortest[node] += least
            sizes, copies = np.zeros(children, np.int64), np.zeros(children, np.int64)
            child = node + 1
            for i in range(children):
                sizes[i], copies[i] = shortest[child], times[child]
                child = end[child]
            times[node] = max(times[node], _bins(sizes, copies, left))
        tokens[node] = max(tokens[node], size[node] * times[node])
        if end[node] > node + 1:
            tokens[node] = max(tokens[node], below + size[node] * times[node])
    return tokens, times


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _bins(sizes: Int64, copies: Int64, room: int) -> int:
    """Bins of `room` that items of `sizes` need at least: the bounds of Martello and Toth (1990), section 8.3."""
    most = 0
    for a_row in range(1, MOST_A_ROW + 1):
        count = 0
        for i in range(len(sizes)):
            if sizes[i] * (a_row + 1) > room:
                count += copies[i]
        most = max(most, -(-count // a_row))
    step = max(1, len(sizes) // MOST_THRESHOLDS)
    for t in range(0, len(sizes), step):
        threshold = sizes[t]
        if 2 * threshold > room:
            continue
        large, spare, small = 0, 0, 0
        for i in range(len(sizes)):
            if 2 * sizes[i] > room:
                large += copies[i]
                if sizes[i] <= room - threshold:
                    spare += copies[i] * (room - sizes[i])
            elif sizes[i] >= threshold:
                small += copies[i] * sizes[i]
        most = max(most, large + max(0, -(-(small - spare) // room) if small > spare else 0))
    return most


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def passes(parent: Int64, leaf: Int64, rows: Int64) -> Int64:
    """How many rows pass through each node, given the row of each leaf."""
    used = np.zeros(len(parent), np.int64)
    last = np.full(len(parent), -1)
    for k in np.argsort(rows, kind="mergesort"):
        node = leaf[k]
        while node >= 0 and last[node] != rows[k]:
            last[node] = rows[k]
            used[node] += 1
            node = parent[node]
    return used
