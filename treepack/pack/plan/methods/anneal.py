"""A plan made better by tearing out neighbouring leaves and putting them back, compiled: ruin and recreate.

    rows of a tree --tear out strings of neighbouring leaves from one to four rows--> put each back where it adds least
                   --keep it if it costs no more than a cooling temperature allows--> repeat

Leaves that share much lie close in depth-first order, so the torn-out strings start at one leaf and its neighbours, as
in the string removal of Christiaens and Vanden Berghe (Slack induction by string removals, 2020). A leaf goes back to
the row that shares most with it and, among those, to the fullest that has room. Large trees are improved in windows of
neighbouring rows, so the time is linear. Work is counted, not timed: the same plan on any machine.

Import this module only where it is called: numba takes a while to load.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from treepack.pack.plan.problem import Limits, PlanTree, path_pairs
from treepack.pack.plan.unions import range_minima
from treepack.trajectory import Int64

WINDOW = 48  # rows that are improved together: more find little better plans, and each step gets slower
SPARE_ROWS = 4
MOST_ROWS_TORN = 4
LONGEST_STRING = 10
BLINK = 0.01  # chance that a row is overlooked, so that the same leaves do not always fall back to the same places
HOT, COLD = 0.5, 0.005  # temperatures, in mean node sizes
NO_LIMIT = 2**62


class AnnealShape(NamedTuple):
    """The tree: for each node its parent, a `jump` to an ancestor, tokens and score pairs to its end; its leaves."""

    parent: Int64
    jump: Int64
    stop: Int64
    pairs: Int64
    leaf: Int64
    terms: Int64
    shared: Int64


class AnnealedRows(NamedTuple):
    """`through` int32 [nodes, rows]: children of the node that the row passes through, and leaves of it that end there.

    `passing` [nodes] counts the rows that pass through each node; what each row holds, [rows].
    """

    row_of: Int64
    through: Any
    passing: Int64
    tokens: Int64
    pairs: Int64
    terms: Int64
    leaves: Int64


def anneal(tree: PlanTree, limits: Limits, row_of_leaf: Int64, *, steps_per_leaf: int, passes: int = 3) -> Int64:
    """A plan that is at least as good as `row_of_leaf` int64 [leaves]: fewer tokens, then fewer rows.

    Each pass takes about `steps_per_leaf` steps for each leaf and starts from the result of the one before, its windows
    shifted by half.
    """
    lengths, shared, terms = tree.length, tree.shared, tree.terms
    caps = np.array([limits.capacity, *(NO_LIMIT if cap is None else cap for cap in (limits.pairs, limits.terms))])
    rows = row_of_leaf.copy()
    for turn in range(passes):
        for leaves in _windows(rows, _fill(lengths, shared, rows), turn):
            shape = _shape(lengths[leaves], _shared_within(shared, leaves), terms[leaves])
            names, local = np.unique(rows[leaves], return_inverse=True)
            steps = steps_per_leaf * len(leaves)
            local = _anneal(shape, caps, local.astype(np.int64), len(names) + SPARE_ROWS, steps, turn)
            fresh = rows.max() + 1 + np.arange(SPARE_ROWS)
            rows[leaves] = np.concatenate([names, fresh])[local]
        rows = np.unique(rows, return_inverse=True)[1].astype(np.int64)
    return rows


def _windows(rows: Int64, fill: Int64, turn: int) -> list[Int64]:
    """Leaves, ascending, of `WINDOW` rows each.

    These are next to each other in the tree, half a window further on every turn; on every third turn they are alike in
    how much they hold, so that the emptiest meet.
    """
    num_rows = len(fill)
    if num_rows <= WINDOW:
        return [np.arange(len(rows))]
    middle = np.bincount(rows, weights=np.arange(len(rows))) / np.bincount(rows)
    order = np.argsort(fill if turn % 3 == 2 else middle, kind="stable")
    window_of_row = np.zeros(num_rows, np.int64)
    window_of_row[order] = (np.arange(num_rows) + turn * WINDOW // 2) // WINDOW
    window = window_of_row[rows]
    by_window = np.argsort(window, kind="stable")
    pieces = np.split(by_window, np.flatnonzero(np.diff(window[by_window])) + 1)
    return [piece for piece in pieces if len(piece) > 1]


def _shared_within(shared: Int64, leaves: Int64) -> Int64:
    """Tokens that each of `leaves`, ascending, shares with the one before it there, 0 for the first."""
    return np.concatenate([[0], range_minima(shared, leaves[:-1] + 1, leaves[1:] + 1)]).astype(np.int64)


def _fill(lengths: Int64, shared: Int64, rows: Int64) -> Int64:
    """Tokens of each row."""
    by_row = np.argsort(rows, kind="stable")
    follows = np.flatnonzero(np.diff(rows[by_row]) == 0) + 1
    repeated = np.zeros(len(rows), np.int64)
    repeated[follows] = range_minima(shared, by_row[follows - 1] + 1, by_row[follows] + 1)
    return np.bincount(rows[by_row], weights=lengths[by_row] - repeated).astype(np.int64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _nodes(lengths: Int64, shared: Int64) -> tuple[Int64, Int64, Int64]:
    """Parent and tokens from the root to the end of each node, and each leaf's node; nodes in no particular order.

    The open path is a stack. A leaf that leaves it inside a node cuts that node in two.
    """
    num = len(lengths)
    parent, stop, leaf = np.full(2 * num, -1), np.zeros(2 * num, np.int64), np.zeros(num, np.int64)
    path = np.zeros(num + 1, np.int64)
    depth, made = 0, 0
    for k in range(num):
        last = -1
        while depth and stop[path[depth - 1]] > shared[k]:
            depth -= 1
            last = path[depth]
        above = path[depth - 1] if depth else -1
        if last >= 0 and shared[k] > (stop[above] if above >= 0 else 0):
            parent[made], stop[made] = above, shared[k]
            parent[last] = above = made
            path[depth] = made
            depth, made = depth + 1, made + 1
        parent[made], stop[made] = above, lengths[k]
        leaf[k] = path[depth] = made
        depth, made = depth + 1, made + 1
    return parent[:made], stop[:made], leaf


def _shape(lengths: Int64, shared: Int64, terms: Int64) -> AnnealShape:
    parent, stop, leaf = _nodes(lengths, shared)
    return AnnealShape(parent, _jumps(parent, stop), stop, path_pairs(stop), leaf, terms, shared)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _jumps(parent: Int64, stop: Int64) -> Int64:
    """An ancestor of each node such that any other is reached in O(log depth) jumps and steps to parents.

    Myers (1983), An applicative random-access stack: a jump is as long as the two that it skips, and one.
    """
    jump, depth = np.full(len(parent), -1), np.zeros(len(parent), np.int64)
    for node in np.argsort(stop, kind="mergesort"):
        up = parent[node]
        if up >= 0:
            depth[node] = depth[up] + 1
            far = jump[up]
            jump[node] = up
            if far >= 0 and jump[far] >= 0 and depth[up] - depth[far] == depth[far] - depth[jump[far]]:
                jump[node] = jump[far]
    return jump


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _random(state: Any) -> float:
    """The next number in [0, 1) of xorshift64*; `state` uint64 [1], not 0."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _put(shape: AnnealShape, rows: AnnealedRows, k: int, row: int) -> None:
    """Add leaf k to a row."""
    end = shape.leaf[k]
    node = end
    while node >= 0:
        rows.through[node, row] += 1
        if rows.through[node, row] > 1:
            break
        rows.passing[node] += 1
        node = shape.parent[node]
    rows.tokens[row] += shape.stop[end] - (shape.stop[node] if node >= 0 else 0)
    rows.pairs[row] += shape.pairs[end] - (shape.pairs[node] if node >= 0 else 0)
    rows.terms[row] += shape.terms[k]
    rows.leaves[row] += 1
    rows.row_of[k] = row


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _take(shape: AnnealShape, rows: AnnealedRows, k: int) -> None:
    """Remove leaf k from its row."""
    row, end = rows.row_of[k], shape.leaf[k]
    node = end
    while node >= 0:
        rows.through[node, row] -= 1
        if rows.through[node, row] > 0:
            break
        rows.passing[node] -= 1
        node = shape.parent[node]
    rows.tokens[row] -= shape.stop[end] - (shape.stop[node] if node >= 0 else 0)
    rows.pairs[row] -= shape.pairs[end] - (shape.pairs[node] if node >= 0 else 0)
    rows.terms[row] -= shape.terms[k]
    rows.leaves[row] -= 1
    rows.row_of[k] = -1


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _tear(shape: AnnealShape, rows: AnnealedRows, removed: Int64, was_in: Int64, state: Any) -> int:
    """Take strings of neighbouring leaves out of a few rows; returns how many, in `removed` and `was_in` which."""
    num = len(shape.leaf)
    low = int(_random(state) * num)
    high, at, count = low + 1, low, 0
    longest = 1 + int(_random(state) * LONGEST_STRING)
    is_torn = np.zeros(len(rows.tokens), np.bool_)
    wanted, found = 1 + int(_random(state) * MOST_ROWS_TORN), 0
    while True:
        row = rows.row_of[at]
        if row >= 0 and not is_torn[row]:
            is_torn[row] = True
            found += 1
            size = min(rows.leaves[row], 1 + int(_random(state) * longest))
            left = int(_random(state) * size)
            before, got, j = at, 0, at
            while j >= 0 and got <= left:
                if rows.row_of[j] == row:
                    before, got = j, got + 1
                j -= 1
            got, j = 0, before
            while j < num and got < size:
                if rows.row_of[j] == row:
                    _take(shape, rows, j)
                    removed[count], was_in[count] = j, row
                    count, got = count + 1, got + 1
                j += 1
        if found == wanted or (low == 0 and high == num):
            return count
        # The next neighbour is the one on the side that shares more.
        if high == num or (low > 0 and shape.shared[low] > shape.shared[high]):
            low -= 1
            at = low
        else:
            at = high
            high += 1


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _best_row(shape: AnnealShape, rows: AnnealedRows, caps: Int64, k: int, state: Any) -> int:
    """The row where leaf k adds fewest tokens, the fullest of those; an empty one if none has room, -1 if none is."""
    end = shape.leaf[k]
    node, seen = end, 0
    while node >= 0:
        if rows.passing[node] == seen:  # the same rows as through the node before, and none had room
            far = shape.jump[node]
            node = far if far >= 0 and rows.passing[far] == seen else shape.parent[node]
            continue
        seen = rows.passing[node]
        tokens, pairs = shape.stop[end] - shape.stop[node], shape.pairs[end] - shape.pairs[node]
        best, most = -1, -1
        for row in range(len(rows.tokens)):
            if rows.through[node, row] and rows.tokens[row] > most and rows.tokens[row] + tokens <= caps[0]:
                fits = rows.pairs[row] + pairs <= caps[1] and rows.terms[row] + shape.terms[k] <= caps[2]
                if fits and _random(state) >= BLINK:
                    best, most = row, rows.tokens[row]
                elif fits:
                    seen = -1
        if best >= 0:
            return best
        node = shape.parent[node]
    for row in range(len(rows.tokens)):
        if rows.leaves[row] == 0:
            return row
    return -1


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _put_back(shape: AnnealShape, rows: AnnealedRows, caps: Int64, removed: Int64, state: Any) -> bool:
    """Put all of `removed` somewhere: in random order, longest first, or along the tree from either side."""
    num = len(removed)
    keys = np.zeros(num)
    order = int(_random(state) * 4)
    for i in range(num):
        k = removed[i]
        if order == 0:
            keys[i] = _random(state)
        elif order == 1:
            keys[i] = -shape.stop[shape.leaf[k]]
        else:
            keys[i] = k if order == 2 else -k
    for i in np.argsort(keys):
        row = _best_row(shape, rows, caps, removed[i], state)
        if row < 0:
            return False
        _put(shape, rows, removed[i], row)
    return True


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _anneal(shape: AnnealShape, caps: Int64, row_of: Int64, num_rows: int, steps: int, seed: int) -> Int64:
    num, nodes = len(row_of), len(shape.parent)
    state = np.array([88172645463325252 + 2654435761 * (seed + 1)], np.uint64)
    empty = np.zeros(num_rows, np.int64)
    through = np.zeros((nodes, num_rows), np.int32)
    passing = np.zeros(nodes, np.int64)
    rows = AnnealedRows(row_of.copy(), through, passing, empty.copy(), empty.copy(), empty.copy(), empty)
    for k in range(num):
        _put(shape, rows, k, row_of[k])
    removed, was_in = np.zeros(num, np.int64), np.zeros(num, np.int64)
    best_rows = row_of.copy()
    scale = num + 1  # tokens first, rows second
    cost = rows.tokens.sum() * scale + (rows.leaves > 0).sum()
    best = cost
    heat = HOT * scale * rows.tokens.sum() / nodes
    factor = (COLD / HOT) ** (1 / steps)
    for _ in range(steps):
        heat *= factor
        count = _tear(shape, rows, removed, was_in, state)
        placed = _put_back(shape, rows, caps, removed[:count], state)
        new = rows.tokens.sum() * scale + (rows.leaves > 0).sum()
        if placed and new < cost - heat * np.log(1 - _random(state)):
            cost = new
            if cost < best:
                best = cost
                best_rows[:] = rows.row_of
        else:
            for i in range(count):
                if rows.row_of[removed[i]] >= 0:
                    _take(shape, rows, removed[i])
            for i in range(count):
                _put(shape, rows, removed[i], was_in[i])
    return best_rows
