"""Improve a plan by removing neighbouring leaves and inserting them again: ruin and recreate.

    rows of a tree --> tear strings of neighbouring leaves out of one to four rows
                   --> put each leaf back into the row that grows least
                   --> keep the result if its cost is within a falling temperature, and repeat

Leaves that share many tokens are close in depth-first order. So the torn strings start at one leaf and its neighbours,
as in the string removal of Christiaens and Vanden Berghe (Slack induction by string removals, 2020). A leaf goes back
to the rows that share the maximum with it, and of these rows to the fullest one that has room. Large trees are improved
in windows of neighbouring rows, so the time is linear. The work is counted in steps, so the plan is the same on any
machine.

The loops run in C, see `treepack/native/anneal.c`. The file ends with their slow twins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from treepack.native.library import FLOAT, INT, INT32, INT64, in_c
from treepack.pack.plan.methods.jump_tree import jump_tree
from treepack.pack.plan.problem import PlanTree, RowLimits
from treepack.pack.plan.unions import row_tokens
from treepack.trajectory import Int32, Int64
from treepack.trie.shared_prefixes import range_minima

WINDOW_ROWS = 48  # rows that are improved together; with more, steps get slower and plans hardly better
_SPARE_ROWS = 4  # empty rows of a window, so that a step can open rows
_MAX_ROWS_TORN = 4  # per step
_MAX_STRING_LEAVES = 10  # torn out of one row in one step
_SKIP_PROBABILITY = 0.01  # of a row with room, so that leaves do not always return to the same rows
_FIRST_TEMPERATURE, _LAST_TEMPERATURE = 0.5, 0.005  # in mean node sizes; it falls by a constant factor per step
_NO_LIMIT = 2**62


class _AnnealShape(NamedTuple):
    """A tree, as arrays by node and by leaf.

    `by_node` [4, nodes]: the parent, an ancestor to `jump` to, and the tokens and score pairs from the root to its end.
    `by_leaf` [3, leaves]: its node, its loss terms, and the tokens that it shares with the leaf before it.
    """

    parent: Int64
    jump: Int64
    stop: Int64
    pairs: Int64
    leaf: Int64
    terms: Int64
    shared: Int64


class _AnnealedRows(NamedTuple):
    """Rows while leaves move.

    `row_of` [leaves] is the row of each leaf, -1 if it is torn out. `through` int32 [nodes, rows] counts the children
    of the node that the row passes through, and its leaves that end at the node: 0 if the row does not pass through the
    node. `passing` [nodes] counts the rows that pass through each node. The others, `by_row` [4, rows], are the sums of
    each row.
    """

    row_of: Int64
    through: Int32
    passing: Int64
    tokens: Int64
    pairs: Int64
    terms: Int64
    leaves: Int64


def anneal(
    tree: PlanTree,
    limits: RowLimits,
    row_of_leaf: Int64,
    *,
    steps_per_leaf: int,
    passes: int = 3,
    enough: tuple[int, int] = (0, 0),
) -> Int64:
    """Return a plan with fewer tokens than `row_of_leaf` int64 [leaves], or as many and fewer rows, or the same plan.

    Each pass makes `steps_per_leaf` steps per leaf and starts from the result of the pass before, with its windows
    shifted by half of their length. No pass follows a plan with at most the tokens and rows of `enough`.
    """
    lengths, shared, terms = tree.length, tree.shared, tree.terms
    caps = np.array([limits.capacity, *(_NO_LIMIT if cap is None else cap for cap in (limits.pairs, limits.terms))])
    rows = row_of_leaf.copy()
    for turn in range(passes):
        fill = row_tokens(lengths, shared, rows, int(rows.max()) + 1)
        if fill.sum() <= enough[0] and len(fill) <= enough[1]:
            break
        for leaves in _windows(rows, fill, turn):
            within = _shared_within(shared, leaves)
            by_node, leaf = jump_tree(lengths[leaves], within)
            shape = by_node, np.stack([leaf, terms[leaves], within])
            # rows [7, 2, 7] of the leaves -> names [2, 7], local [1, 0, 1]; rows 2 .. 5 of the window are spare.
            names, local = np.unique(rows[leaves], return_inverse=True)
            steps = steps_per_leaf * len(leaves)
            local = _anneal(shape, caps, local.astype(np.int64), len(names) + _SPARE_ROWS, steps, turn)
            fresh = rows.max() + 1 + np.arange(_SPARE_ROWS)
            rows[leaves] = np.concatenate([names, fresh])[local]
        # Number the rows without gaps again: [9, 2, 9] -> [1, 0, 1].
        rows = np.unique(rows, return_inverse=True)[1].astype(np.int64)
    return rows


def _windows(rows: Int64, fill: Int64, turn: int) -> list[Int64]:
    """Return the leaves, ascending, of windows of `WINDOW_ROWS` rows each.

    The rows of a window are next to each other in the tree, and every turn shifts the windows by half of their length.
    On every third turn the rows of a window have about equal tokens instead, so that the emptiest rows are together.
    """
    num_rows = len(fill)
    if num_rows <= WINDOW_ROWS:
        return [np.arange(len(rows))]
    # The mean leaf of each row: rows [0, 0, 1, 0] -> (0 + 1 + 3) / 3 and 2.
    middle = np.bincount(rows, weights=np.arange(len(rows))) / np.bincount(rows)
    order = np.argsort(fill if turn % 3 == 2 else middle, kind="stable")
    window_of_row = np.zeros(num_rows, np.int64)
    window_of_row[order] = (np.arange(num_rows) + turn * WINDOW_ROWS // 2) // WINDOW_ROWS
    window = window_of_row[rows]
    by_window = np.argsort(window, kind="stable")
    windows = np.split(by_window, np.flatnonzero(np.diff(window[by_window])) + 1)
    return [leaves for leaves in windows if len(leaves) > 1]


def _shared_within(shared: Int64, leaves: Int64) -> Int64:
    """Return the tokens that each of `leaves`, ascending, shares with the one before it there, 0 for the first."""
    # Leaves 1 and 4 share the minimum over shared[2:5].
    return np.concatenate([[0], range_minima(shared, leaves[:-1] + 1, leaves[1:] + 1)]).astype(np.int64)


def _anneal(shape: tuple[Int64, Int64], caps: Int64, row_of: Int64, num_rows: int, steps: int, seed: int) -> Int64:
    """Return the best rows of the leaves, int64 [leaves], of `steps` steps from `row_of`; at most `num_rows` rows."""
    nodes = shape[0].shape[1]
    through, passing = np.zeros((nodes, num_rows), np.int32), np.zeros(nodes, np.int64)
    by_row, best_rows = np.zeros((4, num_rows), np.int64), np.empty_like(row_of)
    # The temperature falls from FIRST_TEMPERATURE to LAST_TEMPERATURE times the mean tokens per node.
    factor = (_LAST_TEMPERATURE / _FIRST_TEMPERATURE) ** (1 / steps)
    anneal_rows(*shape, caps, through, passing, by_row, row_of.copy(), best_rows, steps, factor, seed)
    return best_rows


@in_c(INT64, INT64, INT64, INT32, INT64, INT64, INT64, INT64, INT, FLOAT, INT)
def anneal_rows(
    by_node: Int64,
    by_leaf: Int64,
    caps: Int64,
    through: Int32,
    passing: Int64,
    by_row: Int64,
    row_of: Int64,
    best_rows: Int64,
    steps: int,
    factor: float,
    seed: int,
) -> None:
    """Make `steps` steps from `row_of`, and write the best rows of the leaves into `best_rows`.

    The arrays are fields of `_AnnealShape` and `_AnnealedRows`. `through`, `passing` and `by_row` begin as 0. Each step
    multiplies the temperature by `factor`.
    """
    shape, rows = _AnnealShape(*by_node, *by_leaf), _AnnealedRows(row_of, through, passing, *by_row)
    num, state = len(row_of), _RandomState(88172645463325252 + 2654435761 * (seed + 1))
    for k in range(num):
        _put(shape, rows, k, row_of[k])
    best_rows[:] = row_of
    removed, was_in = np.zeros(num, np.int64), np.zeros(num, np.int64)
    scale = num + 1  # tokens first, rows second
    cost = rows.tokens.sum() * scale + (rows.leaves > 0).sum()
    best = cost
    heat = _FIRST_TEMPERATURE * scale * rows.tokens.sum() / len(passing)
    for _ in range(steps):
        heat *= factor
        count = _tear(shape, rows, removed, was_in, state)
        is_complete = _put_back(shape, rows, caps, removed[:count], state)
        new = rows.tokens.sum() * scale + (rows.leaves > 0).sum()
        # Accept an increase d of the cost with the probability exp(-d / heat).
        if is_complete and new < cost - heat * math.log(1 - state.next()):
            cost = new
            if cost < best:
                best = cost
                best_rows[:] = row_of
        else:
            # Undo the step: out of the new rows, then back into the old ones.
            for i in range(count):
                if row_of[removed[i]] >= 0:
                    _take(shape, rows, removed[i])
            for i in range(count):
                _put(shape, rows, removed[i], was_in[i])


class _RandomState:
    """The generator xorshift64*; its state is an integer of 64 bits, not 0."""

    def __init__(self, state: int) -> None:
        self.state = state

    def next(self) -> float:
        """Return the next number in [0, 1)."""
        x = self.state
        x ^= x >> 12
        x ^= x << 25 & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 27
        self.state = x
        # The high 53 bits, over 2**53.
        return float((x * 2685821657736338717 & 0xFFFFFFFFFFFFFFFF) >> 11) / 9007199254740992.0


def _put(shape: _AnnealShape, rows: _AnnealedRows, k: int, row: int) -> None:
    """Add leaf k to a row."""
    end = shape.leaf[k]
    node = end
    while node >= 0:
        rows.through[node, row] += 1
        if rows.through[node, row] > 1:
            break  # the row passed through the node before, so the path above it is paid
        rows.passing[node] += 1
        node = shape.parent[node]
    rows.tokens[row] += shape.stop[end] - (shape.stop[node] if node >= 0 else 0)
    rows.pairs[row] += shape.pairs[end] - (shape.pairs[node] if node >= 0 else 0)
    rows.terms[row] += shape.terms[k]
    rows.leaves[row] += 1
    rows.row_of[k] = row


def _take(shape: _AnnealShape, rows: _AnnealedRows, k: int) -> None:
    """Remove leaf k from its row."""
    row, end = rows.row_of[k], shape.leaf[k]
    node = end
    while node >= 0:
        rows.through[node, row] -= 1
        if rows.through[node, row] > 0:
            break  # other leaves of the row still need the node
        rows.passing[node] -= 1
        node = shape.parent[node]
    rows.tokens[row] -= shape.stop[end] - (shape.stop[node] if node >= 0 else 0)
    rows.pairs[row] -= shape.pairs[end] - (shape.pairs[node] if node >= 0 else 0)
    rows.terms[row] -= shape.terms[k]
    rows.leaves[row] -= 1
    rows.row_of[k] = -1


def _tear(shape: _AnnealShape, rows: _AnnealedRows, removed: Int64, was_in: Int64, state: _RandomState) -> int:
    """Take strings of neighbouring leaves out of a few rows, and return the number of leaves.

    The leaves are written to `removed`, and their rows to `was_in`.
    """
    # Leaves low .. high - 1 have been visited: a start leaf, then neighbours on either side. Each new row on the way
    # loses a string of leaves that contains the visited leaf, until enough rows are torn.
    num = len(shape.leaf)
    low = int(state.next() * num)
    high, at, count = low + 1, low, 0
    longest = 1 + int(state.next() * _MAX_STRING_LEAVES)
    is_torn = np.zeros(len(rows.tokens), np.bool_)
    target, num_torn = 1 + int(state.next() * _MAX_ROWS_TORN), 0
    while True:
        row = rows.row_of[at]
        if row >= 0 and not is_torn[row]:
            is_torn[row] = True
            num_torn += 1
            size = min(rows.leaves[row], 1 + int(state.next() * longest))
            left = int(state.next() * size)
            # Back by `left` leaves of the row to the begin of the string, then forward to take `size` of them.
            begin, num_leaves, j = at, 0, at
            while j >= 0 and num_leaves <= left:
                if rows.row_of[j] == row:
                    begin, num_leaves = j, num_leaves + 1
                j -= 1
            num_leaves, j = 0, begin
            while j < num and num_leaves < size:
                if rows.row_of[j] == row:
                    _take(shape, rows, j)
                    removed[count], was_in[count] = j, row
                    count, num_leaves = count + 1, num_leaves + 1
                j += 1
        if num_torn == target or (low == 0 and high == num):
            return count
        # The next neighbour is on the side that shares more tokens.
        if high == num or (low > 0 and shape.shared[low] > shape.shared[high]):
            low -= 1
            at = low
        else:
            at = high
            high += 1


def _best_row(shape: _AnnealShape, rows: _AnnealedRows, caps: Int64, k: int, state: _RandomState) -> int:
    """Return the row to which leaf k adds the minimum of tokens, and of these rows the fullest.

    If no row of the tree has room, return an empty row, or -1 if none is left.
    """
    # From the leaf up: a row that passes through a deeper node shares more with the leaf.
    end = shape.leaf[k]
    node, seen = end, 0
    while node >= 0:
        # As many rows as at the node below it are the same rows, and none of them had room: continue above, by a jump
        # if all nodes up to its target have the same rows.
        if rows.passing[node] == seen:
            far = shape.jump[node]
            node = far if far >= 0 and rows.passing[far] == seen else shape.parent[node]
            continue
        seen = rows.passing[node]
        tokens, pairs = shape.stop[end] - shape.stop[node], shape.pairs[end] - shape.pairs[node]
        best, best_tokens = -1, -1
        for row in range(len(rows.tokens)):
            if rows.through[node, row] and rows.tokens[row] > best_tokens and rows.tokens[row] + tokens <= caps[0]:
                fits = rows.pairs[row] + pairs <= caps[1] and rows.terms[row] + shape.terms[k] <= caps[2]
                if fits and state.next() >= _SKIP_PROBABILITY:
                    best, best_tokens = row, rows.tokens[row]
                elif fits:
                    seen = -1  # a skipped row gets another chance at the node above
        if best >= 0:
            return best
        node = shape.parent[node]
    for row in range(len(rows.tokens)):
        if rows.leaves[row] == 0:
            return row
    return -1


def _put_back(shape: _AnnealShape, rows: _AnnealedRows, caps: Int64, removed: Int64, state: _RandomState) -> bool:
    """Put all leaves of `removed` into rows, and return False if a leaf finds no row.

    The order is one of four: random, longest first, or along the tree from either side.
    """
    num = len(removed)
    keys = np.zeros(num)
    order = int(state.next() * 4)
    for i in range(num):
        k = removed[i]
        if order == 0:
            keys[i] = state.next()
        elif order == 1:
            keys[i] = -shape.stop[shape.leaf[k]]
        else:
            keys[i] = k if order == 2 else -k
    for i in np.argsort(keys, kind="stable"):
        row = _best_row(shape, rows, caps, removed[i], state)
        if row < 0:
            return False
        _put(shape, rows, removed[i], row)
    return True
