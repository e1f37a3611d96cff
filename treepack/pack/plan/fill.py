"""Rows of single trees with room left are put together, whatever trees they hold: fewer rows, no token more.

    pieces   tokens 5 3 3 2 2 1, capacity 8        rows   5+3   3+2+2+1

Bin packing, step by step: best fit decreasing first, and where that misses the bound on rows, filling one row at a time
as full as its pieces allow. The answer with the fewest rows is taken, so it is never worse than best fit decreasing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from treepack.pack.plan.problem import Limits
from treepack.pack.plan.unions import RowSizes
from treepack.trajectory import Int64

WORD = 10  # bits of a room that say where in a word of `_Rooms` it lies
UNITS = 1 << 20  # to which a limit other than tokens is rounded where rows are ordered by it
PROBES = 4  # rows tried from either end when limits other than tokens refuse a piece
NEAR_ENOUGH = 1.0005  # times the bound on rows: no second try
CANDIDATES = 96  # pieces among which a row is filled
FILL_WORK = 1e10  # most work that filling may take, about ten seconds; best fit is near the bound where there is more
STEP_WORK = 1500  # what Python costs per candidate, in bytes of bits shifted meanwhile


def merge_rows(pieces: RowSizes, steps: Int64, limits: Limits) -> Int64:
    """The row of each piece, int64 [pieces], rows numbered arbitrarily; `steps` int64 [pieces] never mix.

    O(pieces log pieces), and a bounded amount of work for the filling.
    """
    row_of = np.zeros(len(steps), np.int64)
    num_rows = 0
    for mine in by_step(steps):
        row_of[mine] = num_rows + _merged(pieces.take(mine), limits)
        num_rows = int(row_of[mine].max()) + 1
    return row_of


def by_step(steps: Int64) -> Iterator[Int64]:
    """The pieces of each step, ascending."""
    order = np.argsort(steps, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(steps[order])) + 1)


def _merged(pieces: RowSizes, limits: Limits) -> Int64:
    uses = sorted(_uses(pieces, limits), key=_Use.rows, reverse=True)
    best = _best_fit(uses)
    if best.max() + 1 <= _fewest_rows(uses) * NEAR_ENOUGH:
        return best
    if len(uses) > 1:
        other = _best_fit(uses[1:] + uses[:1])
    elif (best.max() + 1) * CANDIDATES * (limits.capacity / 8 + STEP_WORK) <= FILL_WORK:
        other = _filled(pieces.tokens, limits.capacity)
    else:
        other = best
    return other if other.max() < best.max() else best


@dataclass(frozen=True, slots=True)
class _Use:
    """What each piece takes of one limit."""

    taken: Int64
    limit: int

    def rows(self) -> float:
        """Rows that the pieces would fill if nothing else were limited."""
        return float(self.taken.sum() / self.limit)


def _uses(pieces: RowSizes, limits: Limits) -> list[_Use]:
    """One for tokens and one for each other limit that is set."""
    given = ((pieces.tokens, limits.capacity), (pieces.pairs, limits.pairs), (pieces.terms, limits.terms))
    return [_Use(taken, limit) for taken, limit in given if limit is not None]


def _fewest_rows(uses: list[_Use]) -> int:
    """A lower bound on rows: the bound L2 of Martello and Toth (1990) for each limit.

    L2: for any threshold a, pieces over limit - a share a row with none of a or more, pieces over half the limit not
    with each other, and the others of at least a fill what the latter leave.
    """
    fewest = 0
    for use in uses:
        taken, limit = np.sort(use.taken), use.limit
        before = np.concatenate([[0], np.cumsum(taken)])
        small = np.unique(np.concatenate([[0], taken[2 * taken <= limit]]))
        least, half = np.searchsorted(taken, small, "left"), np.searchsorted(taken, limit // 2, "right")
        high = np.searchsorted(taken, limit - small, "right")
        over = before[half] - before[least] - ((high - half) * limit - (before[high] - before[half]))
        fewest = max(fewest, int((len(taken) - half + np.maximum(0, -(-over // limit))).max()))
    return fewest


@dataclass(slots=True)
class _Rooms:
    """Open rows by the tokens they have left; the least room that suffices is found through two levels of bits."""

    rows: dict[int, list[int]] = field(default_factory=dict)
    words: dict[int, int] = field(default_factory=dict)
    summary: int = 0

    def add(self, room: int, row: int) -> None:
        held = self.rows.get(room)
        if held:
            held.append(row)
            return
        self.rows[room] = [row]
        word = room >> WORD
        self.words[word] = self.words.get(word, 0) | 1 << (room & (1 << WORD) - 1)
        self.summary |= 1 << word

    def remove(self, room: int, at: int) -> None:
        held = self.rows[room]
        del held[at]
        if not held:
            word = room >> WORD
            self.words[word] ^= 1 << (room & (1 << WORD) - 1)
            if not self.words[word]:
                self.summary ^= 1 << word

    def least(self, tokens: int) -> int:
        """The least room of at least `tokens` that a row has, -1 if none has."""
        word = tokens >> WORD
        low = self.words.get(word, 0) >> (tokens & (1 << WORD) - 1)
        if low:
            return tokens + (low & -low).bit_length() - 1
        high = self.summary >> (word + 1)
        if not high:
            return -1
        word += (high & -high).bit_length()
        low = self.words[word]
        return (word << WORD) + (low & -low).bit_length() - 1

    def greatest(self, tokens: int) -> int:
        """The greatest room of at most `tokens` that a row has, -1 if none has."""
        word = tokens >> WORD
        low = self.words.get(word, 0) & (2 << (tokens & (1 << WORD) - 1)) - 1
        if not low:
            word = (self.summary & (1 << word) - 1).bit_length() - 1
            if word < 0:
                return -1
            low = self.words[word]
        return (word << WORD) + low.bit_length() - 1

    def probes(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Room and place in `rows[room]` of at most `PROBES` rows from the least room up, and as many from the top."""
        room, tried = self.least(tokens), 0
        while room >= 0 and tried < PROBES:
            held = len(self.rows[room])
            yield from ((room, at) for at in range(held - 1, max(-1, held - 1 - PROBES + tried), -1))
            tried += held
            room = self.least(room + 1)
        stop, room, tried = room, self.greatest(self.summary.bit_length() << WORD), 0
        while room >= stop >= 0 and tried < PROBES:
            held = len(self.rows[room])
            yield from ((room, at) for at in range(held - 1, max(-1, held - 1 - PROBES + tried), -1))
            tried += held
            room = self.greatest(room - 1) if room else -1


def _best_fit(uses: list[_Use]) -> Int64:
    """Pieces in decreasing order of the first use; each goes to the row with least of it left, but enough of all."""
    first, others = uses[0], uses[1:]
    taken, limit = first.taken, first.limit
    if limit > UNITS:
        taken, limit = -(-taken * UNITS // limit), UNITS  # rounded up, so that rows stay within the limit
    order = np.argsort(-taken, kind="stable")
    row_of = np.zeros(len(order), np.int64)
    others = [_Use(use.taken[order], use.limit) for use in others]
    sizes = taken[order].tolist()
    row_of[order] = _best_fit_of_several(sizes, limit, others) if others else _best_fit_of_one(sizes, limit)
    return row_of


def _best_fit_of_one(sizes: list[int], limit: int) -> list[int]:
    rooms, num_rows, chosen = _Rooms(), 0, []
    for size in sizes:
        room = rooms.least(size)
        if room < 0:
            room, row, num_rows = limit, num_rows, num_rows + 1
        else:
            row = rooms.rows[room][-1]
            rooms.remove(room, -1)
        chosen.append(row)
        if room > size:
            rooms.add(room - size, row)
    return chosen


def _best_fit_of_several(sizes: list[int], limit: int, others: list[_Use]) -> list[int]:
    """As best fit, but of the rows with room `PROBES` of the fullest and of the emptiest are asked for the others."""
    rooms, chosen = _Rooms(), []
    least = [int(use.taken.min()) for use in others]
    left: list[list[int]] = []  # what each row has left of the other uses
    for size, *taken in zip(sizes, *(use.taken.tolist() for use in others), strict=True):
        for room, at in rooms.probes(size):
            row = rooms.rows[room][at]
            if all(a <= b for a, b in zip(taken, left[row], strict=True)):
                rooms.remove(room, at)
                break
        else:
            row, room = len(left), limit
            left.append([use.limit for use in others])
        left[row] = [b - a for a, b in zip(taken, left[row], strict=True)]
        chosen.append(row)
        if room > size and all(a <= b for a, b in zip(least, left[row], strict=True)):
            rooms.add(room - size, row)
    return chosen


def _filled(tokens: Int64, capacity: int) -> Int64:
    """Row after row: the largest piece left, and with it those that fill the row best.

    The minimum bin slack heuristic of Gupta and Ho (1999) as Fleszar and Hindi (2002) seed it, with subset sums as bits
    of one integer.
    """
    order = np.argsort(tokens, kind="stable")
    sizes, first, counts = (found.tolist() for found in np.unique(tokens[order], return_index=True, return_counts=True))
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
            chosen = _fullest(_candidates(sizes, waiting, room), room)
        row += 1
    return row_of


def _candidates(sizes: list[int], waiting: dict[int, list[int]], room: int) -> list[int]:
    """At most `CANDIDATES` sizes of waiting pieces that fit `room`, ascending: half the largest, half spread evenly."""
    stop = bisect.bisect_right(sizes, room)
    largest = range(max(0, stop - CANDIDATES // 2), stop)
    spread = range(0, largest.start, max(1, -(-largest.start // (CANDIDATES // 4))))
    found: list[int] = []
    for at in (*reversed(largest), *reversed(spread)):
        size = sizes[at]
        found += [size] * min(len(waiting[size]), room // size)
        if len(found) >= CANDIDATES:
            break
    return found[:CANDIDATES][::-1]


def _fullest(candidates: list[int], room: int) -> list[int]:
    """A subset of `candidates`, ascending, with the greatest sum up to `room`; large ones first, for they fit worst."""
    mask = (1 << room + 1) - 1
    reached = [1]
    for size in candidates:
        reached.append((reached[-1] | reached[-1] << size) & mask)
    rest = reached[-1].bit_length() - 1
    chosen = []
    for at in range(len(candidates) - 1, -1, -1):
        if not reached[at] >> rest & 1:
            chosen.append(candidates[at])
            rest -= candidates[at]
    return chosen
