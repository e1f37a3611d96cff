"""Merge sorted runs of token sequences into one sorted order; each run is read once, in order.

    run 0   a b c d          run 1   a b x           order   a b c d       run 0, row 0, shared 0
            . . . . e                c                       . . . . e     run 0, row 1, shared 4
                                                             . . x         run 1, row 0, shared 2

A run stores only the tokens of each sequence that differ from the sequence before it. The merge remembers how many
tokens the next sequence of every run shares with the last sequence written. The one that shares the most tokens comes
next. Only if several share the same number are they compared, starting after these tokens. So a token is compared about
once per run, not once per comparison.

Memory: one sequence of each run. Equal sequences come in the order of the runs.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treepack.trajectory import Int32, Int64

# Tokens compared at a time, four times as many after each step: most sequences differ soon, some only after thousands.
FIRST_STEP, LAST_STEP = 64, 1 << 14


@dataclass(frozen=True, slots=True)
class SortedRun:
    """Sequences sorted by partition and tokens; the arrays have one value per sequence.

    Their tokens, int32, start at byte `start` of the file `descriptor`. The first `shared` tokens of a sequence are not
    stored, because the sequence before it starts with them too, in the same partition; `lengths` include them.
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
    """Sequences in order: the run and row of each, its length, and how many tokens it shares with the one before.

    `equal` is 1 for sequences with the same tokens and partition as the one before.
    """

    run: array[int] = field(default_factory=_integers)
    row: array[int] = field(default_factory=_integers)
    lengths: array[int] = field(default_factory=_integers)
    shared: array[int] = field(default_factory=_integers)
    equal: array[int] = field(default_factory=lambda: array("b"))


def merge(runs: Sequence[SortedRun], write: Callable[[Int32], object], *, sharing: bool = True) -> Merged:
    """Merge `runs`, and `write` the tokens of each sequence after the prefix that it shares with the one before.

    Without `sharing`, every sequence is written whole. O(tokens of the runs) steps of numpy, plus one step of Python
    for each sequence and run.
    """
    order = Merged()
    heads = [_Head(number, run) for number, run in enumerate(runs) if len(run.lengths)]
    known = [0] * len(heads)  # elements (partition and tokens) that each head shares with the last sequence written
    last = -1
    while heads:
        common = max(known)
        first = _smallest(heads, known, common)
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
    """The next sequence of a run: `path[:size]`; element 0 is its partition, the others are its tokens."""

    __slots__ = ("_offset", "_partition", "_run", "_shared", "_sizes", "number", "path", "row", "shared", "size")

    def __init__(self, number: int, run: SortedRun) -> None:
        self.number, self._run, self._offset, self.row = number, run, run.start, -1
        # In elements: shared [3] in the partition of the sequence before -> 4, because the partition is shared too.
        same = np.diff(run.partition, prepend=-1) == 0
        self._shared = array("i", np.where(same, run.shared + 1, 0).astype(np.int32).tobytes())
        self._sizes = array("i", (run.lengths + 1).astype(np.int32).tobytes())
        self._partition = array("i", run.partition.astype(np.int32).tobytes())
        self.path = np.empty(max(self._sizes), np.int32)
        self.advance()

    def advance(self) -> bool:
        """Read the next sequence; return False if there is none. `shared` counts the elements of the one before."""
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


def _smallest(heads: list[_Head], known: list[int], common: int) -> int:
    """Return the smallest of the heads that share `common` elements with the last sequence.

    Afterwards `known` counts the elements that each of these heads shares with the smallest one.
    """
    smallest = known.index(common)
    larger: list[int] = []
    for i in range(smallest + 1, len(heads)):
        if known[i] != common:
            continue
        a, b = heads[smallest], heads[i]
        at = _first_difference(a, b, common)
        if at == a.size or (at < b.size and a.path[at] < b.path[at]):
            known[i] = at
            larger.append(i)
            continue
        # Head i is the new smallest: i < smallest < other, so i and `other` share the minimum of what (i, smallest) and
        # (smallest, other) share. Example: a a, a b, a b c -> min(1, 2) = 1.
        for other in larger:
            known[other] = min(known[other], at)
        known[smallest] = at
        larger.append(smallest)
        smallest = i
    return smallest


def _first_difference(a: _Head, b: _Head, start: int) -> int:
    """Return the first index from `start` on where `a` and `b` differ, or the size of the shorter one."""
    stop, step = min(a.size, b.size), FIRST_STEP
    while start < stop:
        end = min(start + step, stop)
        different = a.path[start:end] != b.path[start:end]
        at = int(different.argmax())
        if different[at]:
            return start + at
        start, step = end, min(4 * step, LAST_STEP)
    return stop
