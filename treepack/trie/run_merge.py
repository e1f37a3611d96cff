"""Sorted runs of token sequences to one sorted order, read once, in order.

    run 0   a b c d          run 1   a b x           order   a b c d       run 0, row 0, shared 0
            . . . . e                c                       . . . . e     run 0, row 1, shared 4
                                                             . . x         run 1, row 0, shared 2

A run holds of each sequence only what it does not share with the one before. What the next sequence of every run shares
with the last one merged is kept: the one that shares most comes next, and only those that share equally much are
compared, behind what they share. So a token is compared about once for each run, not once for each comparison.

Memory: one sequence of each run. The order is total but for equal sequences, which come in the order of the runs.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treepack.trajectory import Int32, Int64

FIRST_STEP, LAST_STEP = 64, 1 << 14  # tokens compared at a time


@dataclass(frozen=True, slots=True)
class SortedRun:
    """Sequences sorted by partition and tokens; arrays have one value for each.

    From byte `start` of the file `descriptor` on lie their tokens, int32, without the `shared` ones that each begins
    with like the sequence before it in the same partition. `lengths` count these too.
    """

    descriptor: int
    start: int
    partition: Int64
    shared: Int64
    lengths: Int64


def _integers() -> array[int]:
    return array("i")


@dataclass(frozen=True, slots=True)
class Merged:
    """Sequences in order: where each lies, its length, and how many tokens it shares with the one before.

    `equal` tells those that have the same tokens as the one before, in the same partition.
    """

    run: array[int] = field(default_factory=_integers)
    row: array[int] = field(default_factory=_integers)
    lengths: array[int] = field(default_factory=_integers)
    shared: array[int] = field(default_factory=_integers)
    equal: array[int] = field(default_factory=lambda: array("b"))


def merge(runs: Sequence[SortedRun], write: Callable[[Int32], object], *, sharing: bool = True) -> Merged:
    """Merge `runs`, and `write` the tokens of each sequence that it does not share with the one before.

    Without `sharing` every sequence is written whole and shares nothing. O(tokens of the runs) steps of numpy, plus one
    of Python for each sequence and run.
    """
    order = Merged()
    heads = [_Head(number, run) for number, run in enumerate(runs) if len(run.lengths)]
    known = [0] * len(heads)  # elements that each head shares with the last sequence written
    last = -1
    while heads:
        common = max(known)
        first = _least(heads, known, common)
        head = heads[first]
        shared = max(common - 1, 0) if sharing else 0
        write(head.path[1 + shared : head.size])
        order.run.append(head.number)
        order.row.append(head.row)
        order.lengths.append(head.size - 1)
        order.shared.append(shared)
        order.equal.append(common == head.size == last)
        last = head.size
        if head.advance():
            known[first] = head.shared
        else:
            del heads[first], known[first]
    return order


class _Head:
    """The next sequence of a run: `path[:size]`, of which element 0 is the partition and the others the tokens."""

    __slots__ = ("_offset", "_partition", "_run", "_shared", "_sizes", "number", "path", "row", "shared", "size")

    def __init__(self, number: int, run: SortedRun) -> None:
        self.number, self._run, self._offset, self.row = number, run, run.start, -1
        same = np.diff(run.partition, prepend=-1) == 0
        self._shared = array("i", np.where(same, run.shared + 1, 0).astype(np.int32).tobytes())
        self._sizes = array("i", (run.lengths + 1).astype(np.int32).tobytes())
        self._partition = array("i", run.partition.astype(np.int32).tobytes())
        self.path = np.empty(max(self._sizes), np.int32)
        self.advance()

    def advance(self) -> bool:
        """Go to the next sequence, if there is one. `shared` is what it shares with the one before, as elements."""
        self.row += 1
        if self.row == len(self._sizes):
            return False
        self.shared, self.size = self._shared[self.row], self._sizes[self.row]
        self.path[0] = self._partition[self.row]
        new = self.path[max(self.shared, 1) : self.size]
        if len(new):
            count = os.preadv(self._run.descriptor, [new.data], self._offset)
            assert count == new.nbytes, "the run ends too early"
            self._offset += count
        return True


def _least(heads: list[_Head], known: list[int], common: int) -> int:
    """The least of the `heads` of which `common` elements are known; `known` becomes what all share with it."""
    least = known.index(common)
    beaten: list[int] = []
    for i in range(least + 1, len(heads)):
        if known[i] != common:
            continue
        a, b = heads[least], heads[i]
        at = _first_difference(a, b, common)
        if at == a.size or (at < b.size and a.path[at] < b.path[at]):
            known[i] = at
            beaten.append(i)
            continue
        for other in beaten:  # it is above `least`, which is above `i`
            known[other] = min(known[other], at)
        known[least] = at
        beaten.append(least)
        least = i
    return least


def _first_difference(a: _Head, b: _Head, start: int) -> int:
    """Index of the first element from `start` on in which `a` and `b` differ, or the size of the shorter one."""
    stop, step = min(a.size, b.size), FIRST_STEP
    while start < stop:
        end = min(start + step, stop)
        different = a.path[start:end] != b.path[start:end]
        at = int(different.argmax())
        if different[at]:
            return start + at
        start, step = end, min(4 * step, LAST_STEP)
    return stop
