"""Lists of numbers of different lengths, one for each trained token or term, as two arrays.

    lists [5 7] [] [9]   ->   values 5 7 9   offsets 0 2 2 3

A list without numbers was not recorded. In files these are list<large_list<number>>: the inner offsets have 64 bits,
because the sets of token ids of a column may have more than 2^31 values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class RaggedArray:
    """n lists: list i is `values[offsets[i]:offsets[i + 1]]`.

    `values` are numbers of one type, and `offsets` int64 [n + 1] ascend; the first one need not be 0, so that a slice
    needs no copy.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Iterable[Sequence[Any] | NDArray[Any]], dtype: type[np.generic] | np.dtype[Any]) -> RaggedArray:
        """Return `lists` as numbers of `dtype`."""
        arrays = [np.asarray(each, dtype) for each in lists]
        values = np.concatenate([np.zeros(0, dtype), *arrays])
        return cls(values, _offsets([len(each) for each in arrays]))

    @classmethod
    def empty(cls, num: int, dtype: type[np.generic] | np.dtype[Any]) -> RaggedArray:
        """Return `num` lists without numbers."""
        return cls(np.zeros(0, dtype), np.zeros(num + 1, np.int64))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Numbers of each list, int64 [n]."""
        return np.diff(self.offsets)

    @property
    def flat(self) -> NDArray[Any]:
        """The numbers of all lists, one list after the other."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    def __len__(self) -> int:
        """Return the number of lists."""
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice | NDArray[Any]) -> RaggedArray:
        """Return the lists of a slice of step 1, without a copy, or of an array of indices."""
        if isinstance(rows, slice):
            begin, end, step = rows.indices(len(self))
            assert step == 1, "a slice with a step"
            return RaggedArray(self.values, self.offsets[begin : max(begin, end) + 1])
        sizes = self.sizes[rows]
        offsets = _offsets(sizes)
        # Lists of [2, 0, 1] numbers, rows [2, 0] -> starts [2, 0], offsets [0, 1, 3] -> places [2] and [0, 1].
        places = np.repeat(self.offsets[:-1][rows] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return RaggedArray(self.values[places], offsets)

    def list(self, i: int) -> NDArray[Any]:
        """Return list `i`."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def equals(self, other: RaggedArray) -> bool:
        """Return True if both have the same lists; NaN equals NaN."""
        is_float = self.values.dtype.kind == "f"
        same = np.array_equal(self.sizes, other.sizes)
        return same and np.array_equal(self.flat, other.flat, equal_nan=is_float)


def _offsets(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def join_lists(parts: Sequence[RaggedArray]) -> RaggedArray:
    """Concatenate `parts`, at least one of them."""
    sizes = np.concatenate([part.sizes for part in parts])
    return RaggedArray(np.concatenate([part.flat for part in parts]), _offsets(sizes))
