"""Counting along a tree, compiled. Import this module only where it is called: numba takes a while to load."""

from __future__ import annotations

import numba
import numpy as np

from treepack.trajectory import Int64


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def count(parent: Int64, size: Int64, stop: Int64, capacity: int, tokens: Int64, times: Int64) -> tuple[Int64, Int64]:
    """Tokens that each subtree needs and rows that pass through each node, at least; from the leaves up.

    `tokens` and `times` are what is known already, `stop` the tokens from the root to the end of each node.
    """
    tokens, times = tokens.copy(), times.copy()
    below = np.zeros(len(parent), np.int64)
    for node in range(len(parent) - 1, -1, -1):
        if below[node]:
            times[node] = max(times[node], -(-below[node] // (capacity - stop[node])))
        tokens[node] = max(tokens[node], below[node] + size[node] * times[node])
        up = parent[node]
        if up >= 0:
            below[up] += tokens[node]
            times[up] = max(times[up], times[node])
    return tokens, times


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
