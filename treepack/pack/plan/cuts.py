"""Cut sequences in the order of their trie into ranges under limits: the rows of consecutive sequences.

    sequences   A    B      C      D                 cut before C: the range C D has 4 shared tokens again
    shared      0    6      4      9

A range has the tokens of its first sequence, plus the tokens that each later one does not share with the one before it.
So a cut before sequence k costs exactly the tokens that k shares with k - 1, and all ranges together have N_tree tokens
plus the cost of the cuts. Score pairs add up in the same way. Loss terms share nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treepack.trajectory import Int64


@dataclass(frozen=True, slots=True)
class RangeMeasure:
    """An amount of every range and its limit: sequences a .. b - 1 have `total[b] - total[a] + again[a]`.

    `again[a]` is the amount that sequence a shares with the one before it: a range that begins with a has it again.
    """

    total: list[int]
    again: list[int]
    limit: int

    def amount(self, a: int, b: int) -> int:
        return self.total[b] - self.total[a] + self.again[a]


def range_measure(whole: Int64, again: Int64, limit: int) -> RangeMeasure:
    """Return the measure of sequences with the amounts `whole` alone, which share `again` with the one before them."""
    # The worked tree of docs/packing.md: lengths [6, 9, 7, 9, 12], shared [0, 4, 5, 4, 8] -> new tokens [6, 5, 2, 5, 4]
    # -> total [0, 6, 11, 13, 18, 22]. The row of leaves 2 and 3 has 18 - 11 + 5 = 12 tokens.
    return RangeMeasure(np.concatenate([[0], np.cumsum(whole - again)]).tolist(), again.tolist(), limit)


def best_starts(measures: Sequence[RangeMeasure], costs: list[int]) -> list[int]:
    """Return the first sequences of the ranges within all limits with the minimum sum of `costs` over these. O(n).

    A sequence that exceeds a limit alone is a range by itself. best[k] is the cost of the first k sequences:

        best[k] = min over a of best[a] + costs[a]

    The a whose range can end at sequence k - 1 are a window that only moves forward, so a queue of window minima finds
    the best one; of equal ones, the first.
    """
    num = len(costs)
    limited = [(m.total, m.again, m.limit) for m in measures]
    best = [0] * (num + 1)
    begin = [0] * num
    # (cost, a) with rising costs: the first is the minimum. A later candidate stays in the window longer, so it makes
    # all earlier ones of higher cost useless.
    window: deque[tuple[int, int]] = deque()
    for k in range(num):
        candidate = best[k] + costs[k]
        while window and window[-1][0] > candidate:
            window.pop()
        window.append((candidate, k))
        for total, again, limit in limited:
            while total[k + 1] - total[a := window[0][1]] + again[a] > limit and a < k:
                window.popleft()
        best[k + 1], begin[k] = window[0]
    # begin [0, 0, 2, 2, 4]: the last range starts at 4, the one before at begin[3] = 2, then 0 -> [0, 2, 4]
    starts: list[int] = []
    stop = num
    while stop:
        stop = begin[stop - 1]
        starts.append(stop)
    return starts[::-1]


def greedy_starts(measures: Sequence[RangeMeasure]) -> list[int]:
    """Return the first sequences of ranges, each of which begins because its first one does not fit the one before."""
    starts: list[int] = []
    for k in range(len(measures[0].again)):
        if not starts or any(m.amount(starts[-1], k + 1) > m.limit for m in measures):
            starts.append(k)
    return starts


def costs_in_order(*costs: list[int]) -> list[int]:
    """Return one cost for `best_starts` of several, each of which decides if the sums of the earlier ones are equal."""
    # No sum of later costs reaches the factor: [4, 5] and then [1, 1] -> factor 3 -> [13, 16]
    joined = costs[-1]
    for before in reversed(costs[:-1]):
        factor = sum(joined) + 1
        joined = [a * factor + b for a, b in zip(before, joined, strict=True)]
    return joined


def ranges_of(starts: list[int], num: int) -> list[tuple[int, int]]:
    """Return the start and stop of each range of `num` sequences."""
    # starts [0, 2, 4] of 5 sequences -> [(0, 2), (2, 4), (4, 5)]
    return list(pairwise([*starts, num])) if starts else []


def rows_of_starts(starts: list[int], num: int) -> Int64:
    """Return the number of its range for each of `num` sequences, int64 [num]."""
    # starts [0, 2, 4] of 5 sequences -> first ones marked [1, 0, 1, 0, 1] -> [0, 0, 1, 1, 2]
    marks = np.zeros(num, np.int64)
    marks[starts] = 1
    return np.cumsum(marks) - 1
