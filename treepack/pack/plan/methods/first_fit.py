"""First fit over all rows of a forest: each trajectory in turn goes to the first row that still has room.

    for node in leaf[order]:                                by its definition, with rows as sets of nodes
        path = {node, parent[node], ... up to the root}
        row = the first of rows in which  sum(length of the nodes in row | path) <= limit,  else a new row
        row |= path

A trajectory adds to a row the tokens that it does not share with the paths of the row. There are two ways to find a row
with room, and the row with the lower number wins:

    without sharing   a segment tree of minima over the loads of all rows finds the first row with room for the whole
                      trajectory
    with sharing      each node keeps the rows that pass through it, in blocks; on the walk from the leaf to the root,
                      every row of these blocks is checked for room for the tokens below the node

Loads only grow, so the minimum load of a block when it was last read is a lower bound now, and most blocks are skipped
unread. A row is removed from the blocks of a node when it has no room for the shortest path from the node to a leaf.
O(log rows + depth in nodes + blocks) for each trajectory.

The loop runs in C, see `treepack/native/first_fit.c`.
"""

from __future__ import annotations

import numpy as np

from treepack.native.library import INT, INT32, INT64, in_c
from treepack.trajectory import Int32, Int64

FIRST_BLOCKS = 1024  # before they are doubled
NO_LIMIT = 2**62
_PLACED, _BLOCKS_USED, _TOKENS = range(3)  # entries of `progress`
_BLOCK = 16  # rows per block: few enough to read at once, many enough that most blocks are skipped by one comparison


def first_fit(
    order: Int64,
    leaf: Int64,
    parent: Int64,
    path: Int64,
    min_below: Int64,
    limit: Int64,
    head: Int64,
    *,
    max_tokens: int = NO_LIMIT,
) -> tuple[Int64, int]:
    """Return the row of each leaf of `order`, int64 [len(order)], and the tokens of all rows.

    Rows are numbered from 0 as they are opened. If the rows need more than `max_tokens`, the loop stops early and the
    rows of the other leaves are undefined. All arrays are int64:

    - `order` [any]: leaves in order of arrival; `leaf` [leaves] and `parent` [nodes] as in `PlanTree`
    - `path` [limits, nodes]: the load of the path down to the end of each node in an empty row; the first is tokens
    - `limit` [limits]: maximum loads of a row; every leaf is within them alone
    - `min_below` [nodes]: minimum tokens from the end of each node to the end of a leaf below it
    - `head` [nodes]: the first block of each node, -1 at the beginning; overwritten
    """
    # A segment tree of `size` rows per limit: row r is load[:, size + r], and entry i is the minimum of entries 2 i
    # and 2 i + 1. It has more rows than leaves, so that an empty row always exists: 3 leaves -> 4 rows, 5 -> 8.
    load = np.zeros((len(limit), 2 << len(order).bit_length()), np.int64)
    rows, blocks = np.empty((FIRST_BLOCKS, _BLOCK), np.int32), np.empty((FIRST_BLOCKS, 3), np.int64)
    seen, row_of = np.full((2, len(order) + 1), -1), np.empty(len(order), np.int64)
    progress = np.zeros(3, np.int64)
    while True:
        place_leaves(
            order, leaf, parent, path, min_below, limit, head, load, rows, blocks, seen, row_of, progress, max_tokens
        )
        if progress[_PLACED] == len(order) or progress[_TOKENS] > max_tokens:
            return row_of, int(progress[_TOKENS])
        rows, blocks = (np.concatenate([some, np.empty_like(some)]) for some in (rows, blocks))


@in_c(INT64, INT64, INT64, INT64, INT64, INT64, INT64, INT64, INT32, INT64, INT64, INT64, INT64, INT)
def place_leaves(
    order: Int64,
    leaf: Int64,
    parent: Int64,
    path: Int64,
    min_below: Int64,
    limit: Int64,
    head: Int64,
    load: Int64,
    rows: Int32,
    blocks: Int64,
    seen: Int64,
    row_of: Int64,
    progress: Int64,
    max_tokens: int,
) -> None:
    """Continue first fit at leaf `progress[PLACED]` of `order`, until all leaves have a row or too few blocks are free.

    Stops as well if the rows have more than `max_tokens`. C allocates nothing, so the caller passes every array, and
    calls again with more blocks. Arguments that are not of `first_fit`:

    - `load` [limits, 2 * size]: the segment trees, and `row_of` [len(order)]: the result
    - `rows` int32 [blocks, BLOCK]: the rows of each block; `blocks` [blocks, 3]: their number, a lower bound on their
      tokens, and the next block of the node
    - `seen` [2, rows]: the last turn in which each row was met, -1 at the beginning, and the deepest node that the row
      shares with the leaf of this turn; the walk goes up, so the first node at which a row is met is the deepest
    - `progress` [3]: the number of leaves `_PLACED`, of `_BLOCKS_USED`, and of `_TOKENS` of all rows
    """
    size = load.shape[1] // 2
    seen, seen_at = seen
    for turn in range(progress[_PLACED], len(order)):
        node = leaf[order[turn]]
        # Before the walk, so that a call with more blocks can repeat the turn: each node of the path may need a block.
        if progress[_BLOCKS_USED] + _num_above(parent, node) > len(blocks):
            return
        row = _first_with_room(load, size, limit - path[:, node])
        up = parent[node]
        while up >= 0:
            # A row through `up` may have at most this load, because the leaf adds only its tokens below `up`.
            room = limit[0] - path[0, node] + path[0, up]
            before, at = -1, head[up]
            while at >= 0:
                after = blocks[at, 2]
                if blocks[at, 1] <= room:
                    _refresh(rows[at], blocks[at], load[0, size:], limit[0] - min_below[up])
                    for i in range(blocks[at, 0]):
                        candidate = rows[at, i]
                        if seen[candidate] != turn:
                            seen[candidate], seen_at[candidate] = turn, up
                            if candidate < row and _has_room(load, size + candidate, limit, path, node, up):
                                row = candidate
                # An empty block is taken out of the list of its node.
                if blocks[at, 0] > 0:
                    before = at
                elif before >= 0:
                    blocks[before, 2] = after
                else:
                    head[up] = after
                at = after
            up = parent[up]
        common = seen_at[row] if seen[row] == turn else -1
        row_of[turn] = row
        _add(load, size + row, path, node, common)
        # The row is new to the nodes between the leaf and `common`: it goes into the first block of each, or a new one.
        up = parent[node]
        while up != common:
            at = head[up]
            if at < 0 or blocks[at, 0] == _BLOCK:
                blocks[progress[_BLOCKS_USED]] = 0, load[0, size + row], at
                at = head[up] = progress[_BLOCKS_USED]
                progress[_BLOCKS_USED] += 1
            rows[at, blocks[at, 0]] = row
            blocks[at, 0] += 1
            blocks[at, 1] = min(blocks[at, 1], load[0, size + row])
            up = parent[up]
        progress[_PLACED] = turn + 1
        progress[_TOKENS] += path[0, node] - (path[0, common] if common >= 0 else 0)
        if progress[_TOKENS] > max_tokens:
            return


def _num_above(parent: Int64, node: int) -> int:
    num = 0
    while parent[node] >= 0:
        num, node = num + 1, parent[node]
    return num


def _refresh(rows: Int32, block: Int64, load: Int64, most: int) -> None:
    """Drop the rows of a block whose load exceeds `most`, and set the bound to the minimum load of the others."""
    # loads [7, 3, 9], most 7: rows [5, 6, 8] -> [5, 6], bound 3
    count = 0
    block[1] = np.iinfo(np.int64).max
    for i in range(block[0]):
        row = rows[i]
        if load[row] <= most:
            rows[count] = row
            count += 1
            block[1] = min(block[1], load[row])
    block[0] = count


def _first_with_room(load: Int64, size: int, most: Int64) -> int:
    """Return the first row whose loads are all at most `most` int64 [limits]; there is always an empty row."""
    # Each limit moves the row forward, until no limit moves it any more.
    row, agreed = 0, False
    while not agreed:
        agreed = True
        for kind in range(len(most)):
            candidate = _first_at_most(load[kind], size, most[kind], row)
            if candidate != row:
                row, agreed = candidate, False
    return row


def _first_at_most(minima: Int64, size: int, most: int, start: int) -> int:
    """Return the first row from `start` on whose load is at most `most`, in a segment tree of `size` rows."""
    # Up: a right child (odd) has nothing more below its parent, so climb until a left child and step to its sibling.
    at = start + size
    while minima[at] > most:
        while at % 2 == 1:
            at //= 2
        at += 1
    # Down: the left child if its minimum is small enough, else the right one.
    while at < size:
        at *= 2
        if minima[at] > most:
            at += 1
    return int(at - size)


def _has_room(load: Int64, at: int, limit: Int64, path: Int64, node: int, common: int) -> bool:
    """Return whether the row at entry `at` has room for the part of the path to `node` that is below `common`."""
    fits = True
    for kind in range(len(limit)):
        fits = fits and load[kind, at] + path[kind, node] - path[kind, common] <= limit[kind]
    return fits


def _add(load: Int64, at: int, path: Int64, node: int, common: int) -> None:
    """Add the path to `node` below `common` (-1: the whole path) to the row at entry `at`, and update the minima."""
    for kind in range(len(load)):
        minima, entry = load[kind], at
        minima[entry] += path[kind, node] - (path[kind, common] if common >= 0 else 0)
        while entry > 1:
            entry //= 2
            minima[entry] = min(minima[2 * entry], minima[2 * entry + 1])
