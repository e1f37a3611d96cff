"""Counting along a tree: lower bounds carried from the leaves to the root, and rows through each node.

`lower_bound.py` is the main user. The loops run in C, see `treepack/native/counting.c`.
"""

from __future__ import annotations

import numpy as np

from treepack.native.library import INT, INT64, in_c
from treepack.trajectory import Int64

_MAX_ITEMS_PER_BIN = 16  # items over 1/2, 1/3, ... 1/17 of the room are counted: at most 1, 2, ... 16 of them fit a bin
_MAX_THRESHOLDS = 32  # tried for the bound L2, evenly spread over the sizes; each costs O(items)


def count(end: Int64, size: Int64, stop: Int64, capacity: int, tokens: Int64, times: Int64) -> tuple[Int64, Int64]:
    """Return lower bounds on the tokens of each subtree and on the rows through each node, from the leaves to the root.

    `tokens` and `times` int64 [nodes] are bounds that are already proven, `stop` the tokens from the root to the end of
    each node. A row that passes through node u has `left = capacity - stop[u]` tokens left for the nodes below u. If
    these need D tokens, at least D / left rows pass through u. A second bound comes from bin packing: the bins are the
    rows through u, of size `left`. The items are the rows through each child; an item is as large as the shortest path
    down from this child.
    """
    assert stop.max() <= capacity, "a path exceeds the capacity"
    tokens, times = tokens.copy(), times.copy()
    count_up(end, size, stop, capacity, tokens, times, size.copy(), np.empty(2 * len(size), np.int64))
    return tokens, times


@in_c(INT64, INT64, INT64, INT, INT64, INT64, INT64, INT64)
def count_up(
    end: Int64, size: Int64, stop: Int64, capacity: int, tokens: Int64, times: Int64, shortest: Int64, items: Int64
) -> None:
    """Raise `tokens` and `times` in place to the bounds of `count`.

    `shortest` int64 [nodes] begins as the size of each node. Then it is the tokens of the shortest path down from the
    beginning of the node. `items` int64 [2 * nodes] is scratch.
    """
    # The worked tree of docs/packing.md, capacity 12: below d (stop 8) are 5 tokens, 12 - 8 = 4 left -> 2 rows, and
    # 2 * 4 + 5 = 13 tokens. Below the prompt (stop 4): 2 + 7 + 13 = 22, 8 left -> 3 rows -> 3 * 4 + 22 = 34 tokens.
    nodes = len(size)
    sizes, copies = items[:nodes], items[nodes:]
    for node in range(nodes - 1, -1, -1):
        below, children, child, shortest_below = 0, 0, node + 1, capacity
        while child < end[node]:
            below += tokens[child]
            times[node] = max(times[node], times[child])
            shortest_below = min(shortest_below, shortest[child])
            sizes[children], copies[children] = shortest[child], times[child]
            children += 1
            child = end[child]  # the next child begins after the subtree of this one
        if children:
            left = capacity - stop[node]
            if below and left:
                times[node] = max(times[node], -(-below // left))
            shortest[node] += shortest_below
            times[node] = max(times[node], _min_bins(sizes[:children], copies[:children], left))
        tokens[node] = max(tokens[node], below + size[node] * times[node])


def _min_bins(sizes: Int64, copies: Int64, room: int) -> int:
    """Return a lower bound on the bins of size `room` for `copies[i]` items of `sizes[i]` each.

    Martello and Toth (1990), section 8.3.
    """
    bound = 0
    # At most n items over room / (n + 1) fit one bin: sizes [6, 6, 5, 2], room 10, n 1 -> 2 items over 5 -> 2 bins;
    # n 2 -> 3 items over 10 / 3 -> 2 bins.
    for per_bin in range(1, _MAX_ITEMS_PER_BIN + 1):
        count = 0
        for i in range(len(sizes)):
            if sizes[i] * (per_bin + 1) > room:
                count += copies[i]
        bound = max(bound, -(-count // per_bin))
    # L2 with threshold 5: items 6 and 6 leave no room for an item of 5 or more, so item 5 needs a third bin.
    step = max(1, len(sizes) // _MAX_THRESHOLDS)
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
        bound = max(bound, large + max(0, -(-(small - spare) // room) if small > spare else 0))
    return bound


def passes(parent: Int64, leaf: Int64, rows: Int64) -> Int64:
    """Return the number of rows that pass through each node, int64 [nodes], from the row of each leaf."""
    used = np.zeros(len(parent), np.int64)
    count_rows(parent, leaf, rows, np.argsort(rows, kind="stable"), np.full(len(parent), -1), used)
    return used


@in_c(INT64, INT64, INT64, INT64, INT64, INT64)
def count_rows(parent: Int64, leaf: Int64, rows: Int64, order: Int64, last: Int64, used: Int64) -> None:
    """Add the rows that pass through each node to `used`; `order` sorts the leaves by row, `last` begins as -1."""
    # Leaves row by row, so `last[u]` is enough to count a row once: nodes [1, 3, 4, 6, 7] of the worked tree in rows
    # [0, 1, 1, 0, 2] -> [3, 1, 1, 1, 1, 2, 1, 1]; the root (node 0) is in 3 rows, d (node 5) in 2.
    for k in order:
        node = leaf[k]
        while node >= 0 and last[node] != rows[k]:
            last[node] = rows[k]
            used[node] += 1
            node = parent[node]
