"""Merge sorted runs of token sequences into one sorted order, or into one range of it for each of several processes.

    run 0   a b c d          run 1   a b x           order   a b c d       run 0, row 0, shared 0
            . . . . e                c                       . . . . e     run 0, row 1, shared 4
                                                             . . x         run 1, row 0, shared 2

A run stores only the tokens of each sequence that differ from the sequence before it. The merge remembers how many
tokens the next sequence of every run shares with the last sequence of the order. The sequence that shares the largest
number comes next. Only if several share the same number are they compared, starting after these tokens. So a token is
compared about once per run, not once per comparison.

`splitters` are sequences of the runs that cut the order into ranges of about the same size. A range is merged alone:
the tokens that its first sequence shares with the one before it follow from the tokens that each of them shares with
the splitter.

Memory: one sequence of each run. Equal sequences come in the order of the runs.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.trajectory import Int32, Int64

# Tokens compared at a time, four times as many after each step: most sequences differ soon, some only after thousands.
_FIRST_STEP, _LAST_STEP = 64, 1 << 14
# Sequences of which one splitter is chosen; ranges are then about as even as 1/16 of one.
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class SortedRun:
    """Sequences sorted by partition and tokens; the arrays have one value per sequence.

    Of each sequence, the tokens from number `skipped` on are stored, as int32 from byte `offsets` of the file
    `descriptor` on. The tokens before are the beginning of the sequence before it. The first `shared` tokens, at least
    `skipped`, are equal to the sequence before it, if that is in the same partition; otherwise both are 0.
    """

    descriptor: int
    offsets: Int64
    partition: Int32
    skipped: Int32
    shared: Int32
    lengths: Int32

    def path(self, row: int) -> Int32:
        """Return the partition and the tokens of one sequence."""
        path = np.empty(int(self.lengths[row]) + 1, np.int32)
        path[0] = self.partition[row]
        # Rows a b c d, . . . . e, . . x: of a b x, row 2 has the token x, row 1 none of a b, and row 0 a b.
        missing = len(path) - 1
        while missing:
            begin = int(self.skipped[row])
            if begin < missing:
                read_into(path[1 + begin : 1 + missing], self.descriptor, int(self.offsets[row]))
                missing = begin
            row -= 1
        return path

    def lower_bound(self, path: Int32) -> int:
        """Return the number of sequences that are smaller than `path`."""
        low, high = 0, len(self.lengths)
        while low < high:
            middle = (low + high) // 2
            own = self.path(middle)
            at = _common(own, path)
            if at < len(path) and (at == len(own) or own[at] < path[at]):
                low = middle + 1
            else:
                high = middle
        return low


def read_into(values: NDArray[Any], descriptor: int, offset: int) -> None:
    """Fill `values` with the bytes of a file from `offset` on."""
    # The system reads at most 2 GB at once.
    rest, at = values.data.cast("B") if len(values) else memoryview(b""), offset
    while len(rest):
        count = os.preadv(descriptor, [rest], at)
        assert count, "the run ends too early"
        rest, at = rest[count:], at + count


@dataclass(frozen=True, slots=True)
class MergedOrder:
    """Sequences in order: the run and row of each, its length, and how many tokens it shares with the one before.

    `equal` is 1 for sequences with the same tokens and partition as the one before.
    """

    run: array[int] = field(default_factory=lambda: array("i"))
    row: array[int] = field(default_factory=lambda: array("i"))
    lengths: array[int] = field(default_factory=lambda: array("i"))
    shared: array[int] = field(default_factory=lambda: array("i"))
    equal: array[int] = field(default_factory=lambda: array("b"))

    def extend(self, other: MergedOrder) -> None:
        """Append the sequences of the next range."""
        for name in MergedOrder.__slots__:
            getattr(self, name).extend(getattr(other, name))


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """The sequences that are not smaller than `begin`, and smaller than `end`; None has no limit."""

    begin: Int32 | None = None
    end: Int32 | None = None


def split(runs: Sequence[SortedRun], count: int) -> list[SequenceRange]:
    """Return at most `count` ranges that contain about the same number of stored tokens each."""
    if count == 1:
        return [SequenceRange()]
    total = sum(int(run.offsets[-1] - run.offsets[0]) for run in runs)
    step = max(1, total // (count * _SAMPLES))  # bytes from one sample to the next
    samples: list[Int32] = []
    done = 0
    for run in runs:
        # A run of bytes [100, 250) of all bytes and step 100 has the samples at 100 and 200.
        begin, end = done, done + int(run.offsets[-1] - run.offsets[0])
        places = np.arange(-(-begin // step) * step, end, step) - begin + run.offsets[0]
        rows = np.unique(np.searchsorted(run.offsets, places, side="right") - 1)
        samples += [run.path(row) for row in rows.tolist()]
        done = end
    ordered = {path.astype(">i4").tobytes(): path for path in samples}
    paths = [ordered[key] for key in sorted(ordered)]
    # The splitters of 32 samples and 2 ranges: number 16. The smallest sample is not a splitter.
    numbers = sorted({i * len(paths) // count for i in range(1, count)} - {0})
    splitters = [paths[number] for number in numbers]
    return [SequenceRange(*limits) for limits in zip([None, *splitters], [*splitters, None], strict=True)]


def merge(runs: Sequence[SortedRun], limits: SequenceRange = SequenceRange(), *, sharing: bool = True) -> MergedOrder:
    """Merge a range of `runs`; without `sharing`, no sequence shares a token with the one before.

    O(tokens of the range) steps of numpy, plus one step of Python for each sequence and run.
    """
    begins = [0 if limits.begin is None else run.lower_bound(limits.begin) for run in runs]
    ends = [len(run.lengths) if limits.end is None else run.lower_bound(limits.end) for run in runs]
    order = MergedOrder()
    heads = [
        _Head(number, run, begin, end)
        for number, (run, begin, end) in enumerate(zip(runs, begins, ends, strict=True))
        if begin < end
    ]
    known = [0] * len(heads)  # elements (partition and tokens) that each head shares with the last sequence
    last = -1
    while heads:
        common = max(known)
        first = _smallest(heads, known, common)
        head = heads[first]
        order.run.append(head.number)
        order.row.append(head.row)
        order.lengths.append(head.size - 1)
        order.shared.append(max(common - 1, 0) if sharing else 0)
        order.equal.append(common == head.size == last)
        last = head.size
        if head.advance():
            known[first] = head.shared
        else:
            del heads[first], known[first]
    if sharing and limits.begin is not None and order.shared:
        order.shared[0] = max(_shared_at(limits.begin, runs, begins) - 1, 0)
    return order


def _shared_at(splitter: Int32, runs: Sequence[SortedRun], begins: Sequence[int]) -> int:
    """Return the elements that the last sequence before `splitter` shares with the first one that is not before it.

    `begins` are the numbers of sequences of the runs before it.
    """
    # For a < s <= b, a and b share the minimum of (a, s) and (s, b), and neighbours share the largest number.
    bounds = list(zip(runs, begins, strict=True))
    before = (_common(run.path(row - 1), splitter) for run, row in bounds if row > 0)
    after = (_common(run.path(row), splitter) for run, row in bounds if row < len(run.lengths))
    return min(max(before, default=0), max(after, default=0))


class _Head:
    """The next sequence of a run: `path[:size]`; element 0 is its partition, the others are its tokens."""

    __slots__ = (
        *("_first", "_offsets", "_partition", "_run", "_shared", "_sizes", "_skipped"),
        *("number", "path", "row", "shared", "size"),
    )

    def __init__(self, number: int, run: SortedRun, begin: int, stop: int) -> None:
        """Start at row `begin`; the rows end before `stop`."""
        self.number, self._run, self._first, self.row = number, run, begin, begin
        rows = slice(begin, stop)
        # In elements: shared [3] in the partition of the sequence before -> 4, because the partition is shared too.
        same = np.diff(run.partition[rows], prepend=-1) == 0
        self._shared = _as_integers(np.where(same, run.shared[rows] + 1, 0))
        self._sizes = _as_integers(run.lengths[rows] + 1)
        self._skipped = _as_integers(run.skipped[rows])
        self._partition = _as_integers(run.partition[rows])
        self._offsets = array("q", run.offsets[rows].tobytes())
        self.path = np.empty(max(self._sizes), np.int32)
        self.shared, self.size = 0, self._sizes[0]
        self.path[: self.size] = run.path(begin)

    def advance(self) -> bool:
        """Read the next sequence; return False at the end. `shared` counts the elements of the one before."""
        self.row += 1
        at = self.row - self._first
        if at == len(self._sizes):
            return False
        self.shared, self.size = self._shared[at], self._sizes[at]
        self.path[0] = self._partition[at]
        read_into(self.path[1 + self._skipped[at] : self.size], self._run.descriptor, self._offsets[at])
        return True


def _as_integers(values: Int32) -> array[int]:
    # Elements of array.array are read several times faster than elements of numpy arrays.
    return array("i", values.astype(np.int32, copy=False).tobytes())


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
        at = _common(a.path[: a.size], b.path[: b.size], common)
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


def _common(a: Int32, b: Int32, start: int = 0) -> int:
    """Return the first index from `start` on where `a` and `b` differ, or the size of the shorter one."""
    stop, step = min(len(a), len(b)), _FIRST_STEP
    while start < stop:
        end = min(start + step, stop)
        different = a[start:end] != b[start:end]
        at = int(different.argmax())
        if different[at]:
            return start + at
        start, step = end, min(4 * step, _LAST_STEP)
    return stop
