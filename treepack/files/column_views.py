"""Views of Arrow columns: the values of single rows, without an object for every row of the column.

ListView(column)[i]          the list of row i as an array, or the lists of numbers of row i; without a copy
FilledView(lists, scalars)   the same, with a number for rows that have no list
ChunkedRows(table).take(rows)  some rows of a table
ColumnView(column)           texts or numbers of some rows
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.ragged import RaggedArray, join_lists
from treepack.trajectory import Int32, Int64

# Rows up to which a column is read value by value, at 1 microsecond each; a call of Arrow costs some 50.
FEW_ROWS = 32


class ListView(Sequence[Any]):
    """A nullable list column, row by row: `view[i]` has no copy and is None for a null.

    A row of numbers is an array, and a row of lists of numbers a `RaggedArray`.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        """View all chunks of `column`."""
        # Chunks of 2 and 3 rows -> starts 0 2 5.
        self._starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)]).tolist()
        self._chunks = [_ListChunk.of(chunk) for chunk in column.chunks]
        self.is_missing = all(chunk.is_empty for chunk in self._chunks)

    def __len__(self) -> int:
        """Return the number of rows."""
        length: int = self._starts[-1]
        return length

    def __getitem__(self, i: Any) -> Any:
        """Return the values of row `i`, which is an index from 0 on, not a slice."""
        if not 0 <= i < self._starts[-1]:
            raise IndexError(i)
        chunk = bisect.bisect_right(self._starts, i) - 1
        return self._chunks[chunk].row(i - self._starts[chunk])

    def __iter__(self) -> Iterator[Any]:
        for chunk, (start, end) in zip(self._chunks, pairwise(self._starts), strict=True):
            for i in range(end - start):
                yield chunk.row(i)


@dataclass(frozen=True, slots=True)
class _ListChunk:
    """Offsets of the rows in `values`, and True for each row that is not null; None if no row, or each one, is null.

    `is_empty` is True if every row is null; for lists of numbers, also if no list has a number.
    """

    offsets: Int32
    values: NDArray[Any] | RaggedArray
    valid: NDArray[np.bool_] | None
    is_null: bool
    is_empty: bool

    @classmethod
    def of(cls, chunk: pa.ListArray) -> _ListChunk:
        some, offsets = 0 < chunk.null_count < len(chunk), chunk.offsets.to_numpy()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False) if some else None
        is_null = 0 < chunk.null_count == len(chunk)
        if pa.types.is_large_list(chunk.type.value_type):
            lists = ragged_lists(chunk)
            return cls(offsets, lists, valid, is_null, len(chunk.flatten().flatten()) == 0)
        values = chunk.values.to_numpy(zero_copy_only=False)
        return cls(offsets, values, valid, is_null, chunk.null_count == len(chunk))

    def row(self, i: int) -> NDArray[Any] | RaggedArray | None:
        if self.is_null or (self.valid is not None and not self.valid[i]):
            return None
        return self.values[self.offsets[i] : self.offsets[i + 1]]


class FilledView(Sequence[NDArray[Any] | None]):
    """The rows of `lists`; a row without a list is its number in `scalars`, as an array without dimensions."""

    def __init__(self, lists: ListView | NoValues, scalars: pa.ChunkedArray, dtype: type[np.number[Any]]) -> None:
        """View both columns; `scalars` become `dtype`."""
        self._lists = lists
        self._known = scalars.is_valid().to_numpy()
        self._scalars = scalars.to_numpy().astype(dtype)
        self.is_missing = lists.is_missing and not self._known.any()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._lists)

    def __getitem__(self, i: Any) -> Any:
        """Return the values of row `i`, which is an index from 0 on, not a slice."""
        values = self._lists[i]
        return self._scalars[i : i + 1].reshape(()) if values is None and self._known[i] else values

    def __iter__(self) -> Iterator[NDArray[Any] | None]:
        for i, values in enumerate(self._lists):
            yield self._scalars[i : i + 1].reshape(()) if values is None and self._known[i] else values


def ragged_lists(chunk: pa.ListArray | pa.ListScalar) -> RaggedArray:
    """Return the lists in every cell of a chunk, or in one cell, of a column of lists of numbers; without a copy."""
    inner = chunk.values
    return RaggedArray(inner.values.to_numpy(zero_copy_only=False), inner.offsets.to_numpy())


def number_column(cells: Sequence[NDArray[Any] | None], dtype: Any) -> pa.ListArray:
    """Return a column of lists of numbers of `dtype`, one array for each cell; None is a null."""
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    missing = np.array([cell is None for cell in cells])
    # The usual case by far, and np.concatenate refuses an empty list.
    if missing.all():
        return pa.nulls(len(cells), pa.list_(kind))
    # [.1 .2], None, [.3] -> offsets 0 2 2 3, mask False True False: None has no values and is null.
    offsets = np.zeros(len(cells) + 1, np.int32)
    np.cumsum([0 if cell is None else len(cell) for cell in cells], out=offsets[1:])
    flat = np.concatenate([cell for cell in cells if cell is not None])
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind), mask=pa.array(missing))


def ragged_column(cells: Sequence[RaggedArray | None], dtype: Any) -> pa.ListArray:
    """Return a column whose cells are several lists of numbers of `dtype` each; None is a null."""
    lists = join_lists([RaggedArray.empty(0, dtype), *(cell for cell in cells if cell is not None)])
    inner = pa.LargeListArray.from_arrays(lists.offsets, pa.array(lists.values))
    # [[5 7] []], None, [[9]] -> offsets 0 2 2 3 of the lists
    offsets = np.cumsum([0, *(0 if cell is None else len(cell) for cell in cells)], dtype=np.int32)
    missing = pa.array([cell is None for cell in cells], pa.bool_())
    return pa.ListArray.from_arrays(offsets, inner, mask=missing if missing.true_count else None)


class NoValues(Sequence[None]):
    """A missing column: None for each row."""

    def __init__(self, num_rows: int) -> None:
        """Stand for a column of `num_rows` nulls."""
        self._rows, self.is_missing = range(num_rows), True

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        """Return None."""
        self._rows[i]
        return None


View = ListView | FilledView | NoValues


class ChunkedRows:
    """Single rows of a table of many chunks, which may be a mapped file; `Table.take` would copy whole columns."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._schema = table.schema
        # Batches of 3 and 2 rows -> [0, 3, 5].
        self._offsets = np.concatenate([[0], np.cumsum([batch.num_rows for batch in self._batches])]).astype(np.int64)

    def take(self, rows: Int64) -> pa.Table:
        """Return the rows `rows`, in this order."""
        batches = np.searchsorted(self._offsets, rows, side="right") - 1
        order = np.argsort(batches, kind="stable")
        # Rows [4, 0, 3] -> batches [1, 0, 1], order [1, 0, 2]: row 0 of batch 0, then rows 1 and 0 of batch 1.
        bounds = np.flatnonzero(np.diff(batches[order], prepend=-1, append=-1)).tolist()
        parts = [
            self._batches[batches[order[a]]].take(pa.array(rows[order[a:b]] - self._offsets[batches[order[a]]]))
            for a, b in pairwise(bounds)
        ]
        table = pa.Table.from_batches(parts, self._schema)
        return table if len(parts) < 2 else table.take(pa.array(np.argsort(order)))


class ColumnView:
    """A column of texts or numbers, of which few rows are read at a time, without an object for every row."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        """View all chunks of `column`."""
        self._chunks = column.chunks
        self._starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)]).tolist()
        self._rows = ChunkedRows(pa.table({"values": column}))

    def value(self, row: int) -> Any:
        """Return the value of one row."""
        chunk = bisect.bisect_right(self._starts, row) - 1
        return self._chunks[chunk][row - self._starts[chunk]].as_py()

    def values(self, rows: Int64) -> list[Any]:
        """Return the values of `rows`, in this order."""
        if len(rows) <= FEW_ROWS:
            return [self.value(row) for row in rows.tolist()]
        values: list[Any] = self._rows.take(rows)["values"].to_pylist()
        return values
