"""Rows for several ranks: in every training step a multiple of their number, none empty, even in score pairs.

    pieces of a step --split_cheapest--> at least as many as rows --balanced--> row of each piece

Ranks take rows in order, R at a time, and wait for the slowest. So `plan_rows` sorts the rows of a step by pairs, and
R consecutive rows are nearly alike even where all of them cannot be.

There are as many rows as the fewest that hold the pieces, rounded up to a multiple. If there are fewer pieces than
that, pieces are split where it repeats the fewest tokens: with its trajectories in the order of the trie, a cut before
one of them repeats what it shares with the one before it in the same piece.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan.fill import by_step, merge_rows
from treepack.pack.plan.problem import Limits, path_pairs
from treepack.pack.plan.unions import RowSizes, row_sizes, shared_with_previous
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

TRIES = 32  # rows that are asked for room before placing by pairs gives up
SAMPLE = 512  # rows among which partners are sought
PARTNERS = 24  # rows that a row may trade pieces with in one move
PIECES = 12  # pieces of a row that are considered in one move
MOVES = 4  # moves tried for each row of a step ...
MOST_MOVES = 2000  # ... and at most in all
EVEN = 1.005  # times the mean of the pairs: even enough


def balanced_rows(trie: Trie, row_of: Int64, limits: Limits, multiple_of: int) -> Int64:
    """The final row of each trajectory, int64 [num_trajectories], given the rows `row_of` of single trees.

    Raises:
        TreepackError: a step with fewer trajectories than rows.
    """
    steps = trie.step_rank
    num_pieces = int(row_of.max()) + 1
    piece_steps = steps_of(row_of, steps, num_pieces)
    merged = merge_rows(row_sizes(trie, row_of, num_pieces), piece_steps, limits)
    fewest = [len(np.unique(merged[mine])) for mine in by_step(piece_steps)]
    wanted = np.array([-(-rows // multiple_of) * multiple_of for rows in fewest])
    _refuse_small_steps(trie, wanted, multiple_of)
    lacking = wanted - np.bincount(piece_steps)
    if (lacking > 0).any():
        row_of = split_cheapest(trie, row_of, lacking)
        num_pieces = int(row_of.max()) + 1
        piece_steps = steps_of(row_of, steps, num_pieces)
    sizes = row_sizes(trie, row_of, num_pieces)
    target = np.zeros(num_pieces, np.int64)
    first = 0
    for mine, rows in zip(by_step(piece_steps), wanted.tolist(), strict=True):
        target[mine] = first + _spread(sizes.take(mine), limits, rows)
        first += rows
    return target[row_of]


def steps_of(row_of: Int64, steps: Int64, num_rows: int) -> Int64:
    """Step of each row, given that of each trajectory."""
    row_steps = np.zeros(num_rows, np.int64)
    row_steps[row_of] = steps
    return row_steps


def _refuse_small_steps(trie: Trie, wanted: Int64, multiple_of: int) -> None:
    held = np.bincount(trie.step_rank)
    small = np.flatnonzero(held < wanted)
    if len(small):
        step = trie.trajectories["step"][int((trie.step_rank == small[0]).argmax())].as_py()
        where = "the input" if step is None else f"training step {step}"
        raise TreepackError(
            f"{where} has {held[small[0]]} trajectories, too few for {wanted[small[0]]} rows, a multiple of "
            f"{multiple_of} ({len(small)} such steps in all); give --balance a smaller number or gather more rollouts"
        )


def split_cheapest(trie: Trie, row_of: Int64, lacking: Int64) -> Int64:
    """`row_of` with `lacking[s]` more rows in step s, if positive, made by the cuts that repeat the fewest tokens.

    Of cuts that repeat as many, those come first whose lesser side has the most pairs.
    """
    order = np.argsort(row_of, kind="stable")
    rows = row_of[order]
    shared = shared_with_previous(trie, row_of, order)
    stop = np.cumsum(path_pairs(trie.lengths[order]) - path_pairs(shared))
    begins = np.concatenate([[True], rows[1:] != rows[:-1]])
    start = np.concatenate([[0], stop[:-1]])
    before = start - start[begins][rows]
    after = stop[np.append(begins[1:], True)][rows] - start + path_pairs(shared)
    cuts = np.flatnonzero(~begins)
    steps = trie.step_rank[order][cuts]
    by_cost = np.lexsort([-np.minimum(before, after)[cuts], shared[cuts], steps])
    first = np.searchsorted(steps[by_cost], np.arange(len(lacking)))
    for begin, more in zip(first.tolist(), lacking.tolist(), strict=True):
        begins[cuts[by_cost[begin : begin + max(0, more)]]] = True
    split = np.zeros(len(order), np.int64)
    split[order] = np.cumsum(begins) - 1
    return split


def _spread(pieces: RowSizes, limits: Limits, num_rows: int) -> Int64:
    """Pieces of one step to exactly `num_rows` rows, none empty, even in pairs."""
    by_pairs = _longest_first(pieces, limits, num_rows)
    if by_pairs is None:
        row_of = _unmerged(pieces.pairs, merge_rows(pieces, np.zeros(len(pieces.pairs), np.int64), limits), num_rows)
    else:
        row_of = by_pairs
    return _improved(_PairSpread.of(pieces, limits, row_of))


def _longest_first(pieces: RowSizes, limits: Limits, num_rows: int) -> Int64 | None:
    """Pieces in decreasing order of pairs, each to the row with the fewest that has room; None if one finds no room."""
    most = _most(pieces, limits)
    left = [list(most) for _ in range(num_rows)]
    rows = [(0, row) for row in range(num_rows)]
    row_of = np.zeros(len(pieces.pairs), np.int64)
    sizes = list(zip(pieces.tokens.tolist(), pieces.pairs.tolist(), pieces.terms.tolist(), strict=True))
    for piece in np.lexsort([np.arange(len(sizes)), -pieces.tokens, -pieces.pairs]).tolist():
        size = sizes[piece]
        refused: list[tuple[int, int]] = []
        while rows and len(refused) < TRIES:
            held, row = heapq.heappop(rows)
            if all(a <= b for a, b in zip(size, left[row], strict=True)):
                break
            refused.append((held, row))
        else:
            return None
        left[row] = [b - a for a, b in zip(size, left[row], strict=True)]
        row_of[piece] = row
        for entry in (*refused, (held + size[1], row)):
            heapq.heappush(rows, entry)
    return row_of


def _most(pieces: RowSizes, limits: Limits) -> tuple[int, int, int]:
    """Most tokens, pairs and terms of a row; where there is no limit, what all pieces have."""
    return (
        limits.capacity,
        int(pieces.pairs.sum()) if limits.pairs is None else limits.pairs,
        int(pieces.terms.sum()) if limits.terms is None else limits.terms,
    )


def _unmerged(pairs: Int64, row_of: Int64, num_rows: int) -> Int64:
    """`row_of` with more rows, `num_rows` in all: time and again the row with the most pairs is split in two."""
    members: list[list[int]] = [[] for _ in range(num_rows)]
    for piece, row in enumerate(row_of.tolist()):
        members[row].append(piece)
    cost = pairs.tolist()
    count = int(row_of.max()) + 1
    heap = [(-sum(cost[i] for i in held), row) for row, held in enumerate(members[:count]) if len(held) > 1]
    heapq.heapify(heap)
    while count < num_rows:
        _, row = heapq.heappop(heap)
        halves: list[list[int]] = [[], []]
        sums = [0, 0]
        for piece in sorted(members[row], key=lambda i: (-cost[i], i)):
            side = 0 if sums[0] <= sums[1] else 1
            halves[side].append(piece)
            sums[side] += cost[piece]
        for at, held, total in ((row, halves[0], sums[0]), (count, halves[1], sums[1])):
            members[at] = held
            if len(held) > 1:
                heapq.heappush(heap, (-total, at))
        count += 1
    spread = np.zeros(len(pairs), np.int64)
    for row, held in enumerate(members):
        spread[held] = row
    return spread


@dataclass(slots=True)
class _PairSpread:
    """Pieces in rows, while pieces move: `sizes` int64 [pieces, 3] of tokens, pairs and terms, `used` of each row."""

    sizes: Int64
    most: Int64
    row_of: Int64
    members: list[list[int]]
    used: Int64

    @classmethod
    def of(cls, pieces: RowSizes, limits: Limits, row_of: Int64) -> _PairSpread:
        sizes = np.stack([pieces.tokens, pieces.pairs, pieces.terms], axis=1)
        num_rows = int(row_of.max()) + 1
        used = np.zeros((num_rows, 3), np.int64)
        np.add.at(used, row_of, sizes)
        members: list[list[int]] = [[] for _ in range(num_rows)]
        for piece, row in enumerate(row_of.tolist()):
            members[row].append(piece)
        return cls(sizes, np.array(_most(pieces, limits)), row_of.copy(), members, used)

    def move(self, piece: int, row: int) -> None:
        old = int(self.row_of[piece])
        self.members[old].remove(piece)
        self.members[row].append(piece)
        self.used[old] -= self.sizes[piece]
        self.used[row] += self.sizes[piece]
        self.row_of[piece] = row


def _improved(spread: _PairSpread) -> Int64:
    """Rows with the most pairs give pieces to others, or trade, as long as that lowers the greater of the two."""
    num_rows = len(spread.used)
    even = EVEN * spread.used[:, 1].mean()
    settled = np.zeros(num_rows, bool)
    for _ in range(min(MOVES * num_rows, MOST_MOVES)):
        row = int(np.where(settled, -1, spread.used[:, 1]).argmax())
        if settled[row] or spread.used[row, 1] <= even:
            break
        trade = _best_trade(spread, row, together=1) or _best_trade(spread, row, together=2)
        if trade is None:
            settled[row] = True
            continue
        given, other, taken = trade
        for piece in given:
            spread.move(piece, other)
        for piece in taken:
            spread.move(piece, row)
    return spread.row_of


def _best_trade(spread: _PairSpread, row: int, *, together: int) -> tuple[list[int], int, list[int]] | None:
    """Up to `together` pieces that `row` gives, the row that takes them, and what it gives back; None if none helps."""
    stride = -(-len(spread.used) // SAMPLE)
    sample = np.arange(row % stride, len(spread.used), stride)
    others = sample[np.argsort(spread.used[sample, 1], kind="stable")]
    others = others[others != row]
    partners = np.concatenate([others[: PARTNERS // 3], _some(others[PARTNERS // 3 :], PARTNERS - PARTNERS // 3)])
    bundles = [_bundles(spread.members[other], together) for other in partners.tolist()]
    owner = np.repeat(partners, [len(found) for found in bundles])
    taken, given = np.concatenate(bundles), _bundles(spread.members[row], together)[1:]
    back, sizes = (np.where(b[:, :, None] < 0, 0, spread.sizes[b]).sum(axis=1) for b in (taken, given))
    change = sizes[:, None, :] - back[None, :, :]
    after_row, after_other = spread.used[row] - change, spread.used[owner] + change
    allowed = (after_row <= spread.most).all(axis=2) & (after_other <= spread.most).all(axis=2)
    allowed &= (after_row[:, :, 0] > 0) & (after_other[:, :, 0] > 0)
    most = int(spread.used[row, 1])
    greater = np.where(allowed, np.maximum(after_row[:, :, 1], after_other[:, :, 1]), most)
    best = int(greater.argmin())
    if greater.flat[best] >= most:
        return None
    a, b = divmod(best, len(taken))
    return [i for i in given[a].tolist() if i >= 0], int(owner[b]), [i for i in taken[b].tolist() if i >= 0]


def _bundles(members: list[int], together: int) -> Int64:
    """Nothing, each of some members, and with `together` 2 each two of them; int64 [bundles, 2] filled up with -1."""
    some = np.array([-1, *_some(np.array(members), PIECES)])
    return some[_choices(len(some), together)]


@functools.cache
def _choices(count: int, together: int) -> Int64:
    """Entry 0 twice, each other entry with it, and with `together` 2 each two others."""
    alone = np.stack([np.arange(count), np.zeros(count, np.int64)], axis=1)
    if together == 1:
        return alone
    return np.concatenate([alone, np.stack(np.triu_indices(count - 1, 1), axis=1) + 1])


def _some(values: Int64, count: int) -> Int64:
    """At most `count` of `values`, evenly spaced."""
    if len(values) <= count:
        return values
    return values[np.linspace(0, len(values) - 1, count).astype(np.int64)]
