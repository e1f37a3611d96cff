"""Merge rows that are not full, whatever trees they contain: fewer rows, and not one token more.

    items    tokens 5 3 3 2 2 1, capacity 8        rows   5+3   3+2+2+1

This is bin packing, done for each training step alone. A item is a row of a single tree. Best fit decreasing comes
first. If it needs more rows than a lower bound, rows are also filled one at a time, as full as their items allow, and
the result with fewer rows is returned. So the result is never worse than best fit decreasing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from treepack.pack.plan.problem import RowLimits
from treepack.pack.plan.unions import RowSizes
from treepack.trajectory import Int64

_WORD_BITS = 10  # low bits of a room, which select a bit of a word of `_OpenRows`; the high bits select the word
_LIMIT_UNITS = 1 << 20  # a larger limit is counted in this many units if it orders the rows: 1,024 words of 1,024 bits
_PROBES_PER_END = 4  # rows tried from either end of the rooms if limits other than tokens refuse a item
_GOOD_ROWS_RATIO = 1.0005  # rows over the lower bound on rows at which best fit is good enough
_CANDIDATES = 96  # items among which a row is filled; each costs one shift of `capacity` bits
_MAX_FILL_WORK = 1e10  # about ten seconds; inputs that need more have so many items that best fit is near the bound
_WORK_PER_CANDIDATE = 1500  # time of Python for each candidate, in bytes that are shifted in the same time


def merge_rows(items: RowSizes, steps: Int64, limits: RowLimits) -> Int64:
    """Return the row of each item, int64 [items]. Items of different `steps` int64 [items] never share a row.

    The numbers of the rows are arbitrary, without a gap. O(items log items), and at most `_MAX_FILL_WORK`.
    """
    row_of = np.zeros(len(steps), np.int64)
    num_rows = 0
    for mine in by_step(steps):
        row_of[mine] = num_rows + _merge_step(items.take(mine), limits)
        num_rows = int(row_of[mine].max()) + 1
    return row_of


def by_step(steps: Int64) -> Iterator[Int64]:
    """Yield the items of each step, ascending."""
    # steps [1, 0, 1] -> order [1, 0, 2], steps in order [0, 1, 1], cut after index 0 -> [1], [0, 2]
    order = np.argsort(steps, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(steps[order])) + 1)


def _merge_step(items: RowSizes, limits: RowLimits) -> Int64:
    # The scarcest limit comes first: it orders the items and the rows.
    uses = sorted(_uses(items, limits), key=_LimitUse.rows, reverse=True)
    best = _best_fit(uses)
    if best.max() + 1 <= _min_rows(uses) * _GOOD_ROWS_RATIO:
        return best
    # With several limits, try another one as the first; with tokens alone, fill rows if that is fast enough.
    if len(uses) > 1:
        other = _best_fit(uses[1:] + uses[:1])
    elif (best.max() + 1) * _CANDIDATES * (limits.capacity / 8 + _WORK_PER_CANDIDATE) <= _MAX_FILL_WORK:
        other = _fill_rows(items.tokens, limits.capacity)
    else:
        other = best
    return other if other.max() < best.max() else best


@dataclass(frozen=True, slots=True)
class _LimitUse:
    """The amount that each item uses of one limit: `amounts` int64 [items]."""

    amounts: Int64
    limit: int

    def rows(self) -> float:
        """Return how many rows the items would fill if this were the only limit."""
        return float(self.amounts.sum() / self.limit)


def _uses(items: RowSizes, limits: RowLimits) -> list[_LimitUse]:
    """Return the `_LimitUse` of the tokens, and one for each other limit that is set."""
    pairs_of_use = ((items.tokens, limits.capacity), (items.pairs, limits.pairs), (items.terms, limits.terms))
    return [_LimitUse(amounts, limit) for amounts, limit in pairs_of_use if limit is not None]


def _min_rows(uses: list[_LimitUse]) -> int:
    """Return a lower bound on rows: the maximum over all limits of the bound L2 of Martello and Toth (1990).

    L2, for any threshold a up to half the limit: items over half the limit need a row each. Those over limit - a
    leave no room for a item of a or more. Items from a to half the limit first use the room that the other large
    items leave, and the rest of them needs further rows.
    """
    min_rows = 0
    for use in uses:
        amounts, limit = np.sort(use.amounts), use.limit
        before = np.concatenate([[0], np.cumsum(amounts)])
        # Only 0 and the amounts up to half the limit matter as thresholds: [2, 3, 6, 7, 9], limit 10 -> [0, 2, 3].
        threshold = np.unique(np.concatenate([[0], amounts[2 * amounts <= limit]]))
        low, half = np.searchsorted(amounts, threshold, "left"), np.searchsorted(amounts, limit // 2, "right")
        high = np.searchsorted(amounts, limit - threshold, "right")
        # Threshold 3: low 1, half 2, high 4. Item 3 against the room 4 + 3 of items 6 and 7 -> rest -4, so 3 rows.
        rest = before[half] - before[low] - ((high - half) * limit - (before[high] - before[half]))
        min_rows = max(min_rows, int((len(amounts) - half + np.maximum(0, -(-rest // limit))).max()))
    return min_rows


@dataclass(slots=True)
class _OpenRows:
    """Open rows by their room, the tokens they have left. Two levels of bits find the smallest room that suffices.

    Bit i of `words[w]` is set if a row has room `w * 1024 + i`, and bit w of `summary` if `words[w]` is not 0.
    """

    rows: dict[int, list[int]] = field(default_factory=dict)
    words: dict[int, int] = field(default_factory=dict)
    summary: int = 0

    def add(self, room: int, row: int) -> None:
        rows = self.rows.get(room)
        if rows:
            rows.append(row)
            return
        self.rows[room] = [row]
        # room 2500 -> word 2, bit 452
        word = room >> _WORD_BITS
        self.words[word] = self.words.get(word, 0) | 1 << (room & (1 << _WORD_BITS) - 1)
        self.summary |= 1 << word

    def remove(self, room: int, at: int) -> None:
        rows = self.rows[room]
        del rows[at]
        if not rows:
            word = room >> _WORD_BITS
            self.words[word] ^= 1 << (room & (1 << _WORD_BITS) - 1)
            if not self.words[word]:
                self.summary ^= 1 << word

    def smallest(self, tokens: int) -> int:
        """Return the smallest room of a row that is at least `tokens`, or -1."""
        word = tokens >> _WORD_BITS
        low = self.words.get(word, 0) >> (tokens & (1 << _WORD_BITS) - 1)
        # `low & -low` keeps the lowest set bit: 0b10100 -> 0b100, bit_length 3, so the room is 2 above `tokens`.
        if low:
            return tokens + (low & -low).bit_length() - 1
        high = self.summary >> (word + 1)
        if not high:
            return -1
        word += (high & -high).bit_length()
        low = self.words[word]
        return (word << _WORD_BITS) + (low & -low).bit_length() - 1

    def largest(self, tokens: int) -> int:
        """Return the largest room of a row that is at most `tokens`, or -1."""
        word = tokens >> _WORD_BITS
        # (2 << 3) - 1 = 0b1111 keeps the bits 0 to 3
        low = self.words.get(word, 0) & (2 << (tokens & (1 << _WORD_BITS) - 1)) - 1
        if not low:
            word = (self.summary & (1 << word) - 1).bit_length() - 1
            if word < 0:
                return -1
            low = self.words[word]
        return (word << _WORD_BITS) + low.bit_length() - 1

    def probes(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield (room, index in `rows[room]`) of rows with room for `tokens`, `_PROBES_PER_END` from either end.

        The rows with the smallest rooms come first, then the rows with the largest ones.
        """
        room, tried = self.smallest(tokens), 0
        while room >= 0 and tried < _PROBES_PER_END:
            count = len(self.rows[room])
            yield from ((room, at) for at in range(count - 1, max(-1, count - 1 - _PROBES_PER_END + tried), -1))
            tried += count
            room = self.smallest(room + 1)
        # The first loop ended at `room`: from the top down to there no row is tried twice.
        stop, room, tried = room, self.largest(self.summary.bit_length() << _WORD_BITS), 0
        while room >= stop >= 0 and tried < _PROBES_PER_END:
            count = len(self.rows[room])
            yield from ((room, at) for at in range(count - 1, max(-1, count - 1 - _PROBES_PER_END + tried), -1))
            tried += count
            room = self.largest(room - 1) if room else -1


def _best_fit(uses: list[_LimitUse]) -> Int64:
    """Assign items by falling amounts of the first use; each goes to the row with the smallest room that suffices."""
    first, others = uses[0], uses[1:]
    amounts, limit = first.amounts, first.limit
    if limit > _LIMIT_UNITS:
        amounts, limit = -(-amounts * _LIMIT_UNITS // limit), _LIMIT_UNITS  # rounded up, so rows stay within the limit
    order = np.argsort(-amounts, kind="stable")
    row_of = np.zeros(len(order), np.int64)
    others = [_LimitUse(use.amounts[order], use.limit) for use in others]
    sizes = amounts[order].tolist()
    row_of[order] = _best_fit_of_several(sizes, limit, others) if others else _best_fit_of_one(sizes, limit)
    return row_of


def _best_fit_of_one(sizes: list[int], limit: int) -> list[int]:
    rooms, num_rows, chosen = _OpenRows(), 0, []
    for size in sizes:
        room = rooms.smallest(size)
        if room < 0:
            room, row, num_rows = limit, num_rows, num_rows + 1
        else:
            row = rooms.rows[room][-1]
            rooms.remove(room, -1)
        chosen.append(row)
        # A full row is dropped: tokens are the only limit here, and every item has at least one token.
        if room > size:
            rooms.add(room - size, row)
    return chosen


def _best_fit_of_several(sizes: list[int], limit: int, others: list[_LimitUse]) -> list[int]:
    """Return the rows by best fit, where only the fullest and the emptiest rows are checked for the other limits.

    Of the rows with room, `_PROBES_PER_END` of the fullest and as many of the emptiest are checked.
    """
    rooms, chosen = _OpenRows(), []
    minima = [int(use.amounts.min()) for use in others]
    left: list[list[int]] = []  # per row: the amounts left of the other limits
    for size, *amounts in zip(sizes, *(use.amounts.tolist() for use in others), strict=True):
        for room, at in rooms.probes(size):
            row = rooms.rows[room][at]
            if all(a <= b for a, b in zip(amounts, left[row], strict=True)):
                rooms.remove(room, at)
                break
        else:
            row, room = len(left), limit
            left.append([use.limit for use in others])
        left[row] = [b - a for a, b in zip(amounts, left[row], strict=True)]
        chosen.append(row)
        # A row that has no room for the smallest item stays closed, so that it takes no probe from the others.
        if room > size and all(a <= b for a, b in zip(minima, left[row], strict=True)):
            rooms.add(room - size, row)
    return chosen


def _fill_rows(tokens: Int64, capacity: int) -> Int64:
    """Fill row after row: the largest item left, and with it the items that fill the row best.

    This is the minimum bin slack heuristic of Gupta and Ho (1999), started with the largest item as Fleszar and Hindi
    (2002) do. Subset sums are the bits of one integer.
    """
    order = np.argsort(tokens, kind="stable")
    # tokens [5, 3, 5] -> order [1, 0, 2], sizes [3, 5], first [0, 1], counts [1, 2] -> waiting {3: [1], 5: [0, 2]}
    sizes, first, counts = (part.tolist() for part in np.unique(tokens[order], return_index=True, return_counts=True))
    waiting = {size: order[a : a + n].tolist() for size, a, n in zip(sizes, first, counts, strict=True)}
    row_of = np.zeros(len(tokens), np.int64)
    row = 0
    while sizes:
        room = capacity
        chosen = [sizes[-1]]
        while chosen:
            for size in chosen:
                row_of[waiting[size].pop()] = row
                room -= size
                if not waiting[size]:
                    del sizes[bisect.bisect_left(sizes, size)]
            # A row may get further items, because not all that fit were candidates.
            chosen = _best_subset(_candidates(sizes, waiting, room), room)
        row += 1
    return row_of


def _candidates(sizes: list[int], waiting: dict[int, list[int]], room: int) -> list[int]:
    """Return at most `_CANDIDATES` sizes of waiting items that fit `room`, ascending.

    Half of the sizes are the largest ones, the others are spread evenly over the rest. A size counts once for each of
    its items.
    """
    stop = bisect.bisect_right(sizes, room)
    largest = range(max(0, stop - _CANDIDATES // 2), stop)
    spread = range(0, largest.start, max(1, -(-largest.start // (_CANDIDATES // 4))))
    candidates: list[int] = []
    for at in (*reversed(largest), *reversed(spread)):
        size = sizes[at]
        candidates += [size] * min(len(waiting[size]), room // size)
        if len(candidates) >= _CANDIDATES:
            break
    return candidates[:_CANDIDATES][::-1]


def _best_subset(candidates: list[int], room: int) -> list[int]:
    """Return a subset of `candidates`, ascending, with the maximum sum up to `room`; large ones are preferred.

    Small items are easier to fit into later rows.
    """
    # Bit s of reached[i] is set if some of the first i candidates sum to s: [2, 3] -> 0b1, 0b101, 0b101101.
    mask = (1 << room + 1) - 1
    reached = [1]
    for size in candidates:
        reached.append((reached[-1] | reached[-1] << size) & mask)
    rest = reached[-1].bit_length() - 1
    chosen = []
    # From the last candidate back: if the sum cannot be reached without it, it is part of the subset.
    for at in range(len(candidates) - 1, -1, -1):
        if not reached[at] >> rest & 1:
            chosen.append(candidates[at])
            rest -= candidates[at]
    return chosen
