"""Rows to the columns of one row group of a Parquet file.

    row [7 8 9], row [5 6]   --append, append-->   values 7 8 9 5 6, offsets 0 3 5   --table-->   Arrow list column

The values are copied into arrays that are used again for the next row group. Fresh memory for each row group would cost
an eighth of the time of writing: the system clears every page of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.columns import BY_PACKED, MAKES_TERMS, Axis, Lists
from treepack.files import schema
from treepack.files.column_views import ragged_column
from treepack.files.routes import route_bytes
from treepack.pack.row import Row, RowTerms, rollout_numbers_of, rollout_places_of
from treepack.ragged import RaggedArray
from treepack.trajectory import Int32


def row_schema(row: Row) -> pa.Schema:
    """Return the columns of a packed directory whose rows have the terms and routes that `row` has."""
    routes = [] if row.routes is None else [*schema.ROUTES]
    if row.terms is None:
        return pa.schema([*schema.ROWS, *routes])
    present = [field for field in schema.TERMS if _has_column(row.terms, field.name)]
    return pa.schema([*schema.ROWS, *present, *routes])


def _has_column(terms: RowTerms, name: str) -> bool:
    return name not in BY_PACKED or getattr(terms, BY_PACKED[name].name) is not None


def packed_columns(known: Collection[str]) -> pa.Schema:
    """Return the columns of a packed directory, if the columns `known` of the trajectories have any value.

    `known` contains "weight" if any weight is not 1. The columns are from `row_schema` for the rows of a whole
    trie. Rows of a slice without such values have nulls.
    """
    if MAKES_TERMS.isdisjoint(known):
        return schema.ROWS

    def is_present(name: str) -> bool:
        return name not in BY_PACKED or any(source in known for source in BY_PACKED[name].sources)

    return pa.schema([*schema.ROWS, *(field for field in schema.TERMS if is_present(field.name))])


class RowGroup:
    """The columns of a growing number of rows."""

    def __init__(self, columns: pa.Schema) -> None:
        self.columns = columns
        self.num_rows = self.num_tokens = self.num_route_bytes = 0
        self._lists: dict[str, _ListColumn] = {}
        self._ragged: dict[str, list[RaggedArray]] = {}  # the cells of each row
        self._values: dict[str, list[Any]] = {}  # numbers, and texts of lists
        for field in columns:
            if field.name in BY_PACKED and isinstance(BY_PACKED[field.name].kind, Lists):
                self._ragged[field.name] = []
            elif pa.types.is_list(field.type):
                self._lists[field.name] = _ListColumn(field)
            else:
                self._values[field.name] = []

    @property
    def num_terms(self) -> int:
        return self._lists["term_token"].offsets[-1] if "term_token" in self._lists else 0

    def append(self, row: Row) -> None:
        """Copy the columns of `row`; a column of terms that it does not have becomes null."""
        for name, values in self._values.items():
            values.append(getattr(row, name) if name not in _ROUTES else _route_value(row, name))
        self.num_route_bytes += 0 if row.routes is None else row.routes.nbytes
        for name, column in self._lists.items():
            column.append(_term_values(row, name) if name in _TERMS else getattr(row, name))
        for name, cells in self._ragged.items():
            cells.append(_term_values(row, name))
        self.num_rows += 1
        self.num_tokens += row.num_tokens

    def table(self) -> pa.Table:
        """Return the rows as an Arrow table, which is valid until `clear`."""
        arrays = {name: column.array() for name, column in self._lists.items()}
        arrays |= {name: ragged_column(cells, BY_PACKED[name].kind.dtype) for name, cells in self._ragged.items()}
        arrays |= {name: pa.array(values, self.columns.field(name).type) for name, values in self._values.items()}
        return pa.Table.from_arrays([arrays[name] for name in self.columns.names], schema=self.columns)

    def clear(self) -> None:
        """Remove the rows; their memory stays for the next ones."""
        self.num_rows = self.num_tokens = self.num_route_bytes = 0
        for values in (*self._values.values(), *self._ragged.values()):
            values.clear()
        for column in self._lists.values():
            column.clear()


_TERMS = frozenset(schema.TERMS.names)
_ROUTES = frozenset(schema.ROUTES.names)


def _route_value(row: Row, name: str) -> int | bytes:
    assert row.routes is not None
    if name == "routes":
        return route_bytes(row.routes)
    return int(row.routes.shape[1 if name == "route_layers" else 2])


def _term_values(row: Row, name: str) -> Any:
    """Return the values of a column of the terms of `row`, missing ones if it has none."""
    assert row.terms is not None
    if name not in BY_PACKED:
        return getattr(row.terms, name.removeprefix("term_"))
    column = BY_PACKED[name]
    if column.name == "rollout":
        return rollout_places_of(row)
    if column.name == "rollout_number":
        return rollout_numbers_of(row)
    num = len(row.trajectory_ids) if column.axis is Axis.TRAJECTORY else len(row.terms.token)
    return column.kind.filled(getattr(row.terms, column.name), num)


class _ListColumn:
    """A growing list column; the lists are arrays of numbers, or lists of texts."""

    def __init__(self, field: pa.Field) -> None:
        self.kind, self.nullable = field.type.value_type, field.nullable
        self.texts: list[str] = []
        self.numbers: NDArray[Any] = np.zeros(0, None if self.is_text else self.kind.to_pandas_dtype())
        self.offsets = [0]

    @property
    def is_text(self) -> bool:
        return bool(pa.types.is_string(self.kind))

    def append(self, values: Any) -> None:
        begin, end = self.offsets[-1], self.offsets[-1] + len(values)
        self.offsets.append(end)
        if self.is_text:
            self.texts += values
            return
        if end > len(self.numbers):  # the memory doubles, so that all copies together are at most twice the values
            grown = np.empty(max(end, 2 * len(self.numbers)), self.numbers.dtype)
            grown[:begin] = self.numbers[:begin]
            self.numbers = grown
        self.numbers[begin:end] = values

    def array(self) -> pa.ListArray:
        if self.is_text:
            flat = pa.array(self.texts, self.kind)
        else:
            flat = pa.array(self.numbers[: self.offsets[-1]], self.kind, from_pandas=self.nullable)  # NaN becomes null
        offsets: Int32 = np.array(self.offsets, np.int32)
        return pa.ListArray.from_arrays(offsets, flat)

    def clear(self) -> None:
        self.texts.clear()
        self.offsets = [0]
