"""A packed directory: `part-*.parquet` and, last, `manifest.json`.

    write_packed(rows, directory, capacity=...)      read_rows(directory) -> Row, Row, ...

Equal rows give equal bytes. Readers refuse other formats and versions, and parts that are missing or damaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.address import AnyPath, as_path
from treepack.files.cache import local_copy
from treepack.files.manifest import Manifest, Provenance, complete_manifest, read_manifest, write_manifest
from treepack.files.parts import PartWriter, open_part
from treepack.pack.options import PackOptions
from treepack.pack.row import Row, RowTerms, row_counts, row_totals

# Tokens per row group, which is the unit that a reader decodes: some megabytes of columns.
GROUP_TOKENS = 1 << 18
# Columns that have a value, and in a list only values, in each row. In the others, null means a missing value.
WITHOUT_NULLS = frozenset(field.name for field in (*schema.ROWS, *schema.TERMS) if not field.nullable)


def write_packed(
    rows: Iterable[Row],
    directory: Path,
    *,
    capacity: int,
    provenance: Provenance = Provenance(),  # noqa: B008 (immutable)
) -> Manifest:
    """Write `rows` of at most `capacity` tokens into an existing empty `directory`, the manifest last; return it.

    `provenance` is the rest of the manifest. Its options must name the `semantics` and `normalize` that the loss
    weights of the rows were made with; without these names the defaults of `PackOptions` are recorded.

    Raises:
        TreepackError: there is no row.
    """
    parts: PartWriter | None = None
    group: list[Row] = []
    counted: Counter[str] = Counter()
    group_tokens, max_token_id = 0, 0
    for row in rows:
        if parts is None:
            parts = PartWriter(directory, "part", row_schema(row))
        group.append(row)
        counted.update(row_counts(row))
        max_token_id = max(max_token_id, int(row.input_ids.max()))
        group_tokens += row.num_tokens
        if group_tokens >= GROUP_TOKENS:
            parts.write(rows_table(group, parts.schema), tokens=group_tokens)
            group, group_tokens = [], 0
    if parts is None:
        raise TreepackError(f"{directory}: there is no row to write")
    if group:
        parts.write(rows_table(group, parts.schema), tokens=group_tokens)
    entries = {"max_token_id": max_token_id, "files": parts.entries()}
    return write_manifest(
        directory, packed_manifest(counted, capacity=capacity, provenance=provenance, entries=entries)
    )


def packed_manifest(
    counted: Counter[str],
    *,
    capacity: int,
    provenance: Provenance = Provenance(),  # noqa: B008 (immutable)
    entries: Mapping[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of rows whose summed `row_counts` are `counted`; `entries` describe their files."""
    usual = PackOptions()
    defaults = {"semantics": usual.semantics, "normalize": usual.normalize}
    provenance = replace(
        provenance,
        options={**defaults, **provenance.options},
        totals={**provenance.totals, **row_totals(counted, capacity=capacity)},
    )
    return complete_manifest(schema.PACKED_FORMAT, provenance, {"capacity": capacity, **(entries or {})})


def row_schema(row: Row) -> pa.Schema:
    """Return the columns of a packed directory whose rows have the terms that `row` has."""
    if row.terms is None:
        return schema.ROWS
    present = [field for field in schema.TERMS if getattr(row.terms, field.name.removeprefix("term_")) is not None]
    return pa.schema([*schema.ROWS, *present])


def rows_table(rows: list[Row], columns: pa.Schema) -> pa.Table:
    """Return `rows` as an Arrow table of `columns`."""
    return pa.Table.from_arrays([_row_column(rows, field) for field in columns], schema=columns)


def _row_column(rows: list[Row], field: pa.Field) -> pa.Array:
    if not pa.types.is_list(field.type):
        return pa.array([getattr(row, field.name) for row in rows], field.type)
    if field.name in schema.TERMS.names:
        values = [getattr(row.terms, field.name.removeprefix("term_")) for row in rows]
    else:
        values = [getattr(row, field.name) for row in rows]
    # Offsets of the rows in the flat column: lengths [3, 2] -> [0, 3, 5].
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int32)
    kind = field.type.value_type
    if pa.types.is_string(kind):
        flat = pa.array([text for value in values for text in value], kind)
    else:
        flat = pa.array(np.concatenate(values), kind, from_pandas=field.nullable)  # NaN becomes null
    return pa.ListArray.from_arrays(offsets, flat)


def read_rows(directory: str | AnyPath) -> Iterator[Row]:
    """Yield the rows of a packed directory, on this machine or in an object store, in order.

    Raises:
        TreepackError: see `read_manifest` and `check_part`.
    """
    directory = local_copy(as_path(directory))
    for entry in read_manifest(directory, schema.PACKED_FORMAT)["files"]:
        part = open_part(directory, entry)
        for group in range(part.num_row_groups):
            table = part.read_row_group(group)
            for i in range(table.num_rows):
                yield row_of_table(table, i)


def row_of_table(table: pa.Table, i: int) -> Row:
    """Return row `i` of a table of packed rows.

    Raises:
        TreepackError: a column is missing, or a stored sum does not match the columns it sums.
    """
    has_terms = any(name in schema.TERMS.names for name in table.column_names)
    required = schema.ROWS.names + [name for name in schema.TERMS.names if name in WITHOUT_NULLS and has_terms]
    missing = [name for name in required if name not in table.column_names]
    if missing:
        raise TreepackError(
            f"its rows have no column {missing[0]}, so an older treepack wrote them; pack the trie again"
        )
    values: dict[str, Any] = {name: _cell(table, name, i) for name in table.column_names}
    terms = None
    if "term_token" in values:
        columns: dict[str, Any] = {name.removeprefix("term_"): values.get(name) for name in schema.TERMS.names}
        terms = RowTerms(**columns)
    derived = {name: values.pop(name) for name in ("num_tokens", "num_pairs", "total_weight")}
    row = Row(terms=terms, **{name: values[name] for name in schema.ROWS.names if name not in derived})
    # total_weight is a sum of float64, so a file of another program may differ by rounding.
    for name, stored in derived.items():
        if not math.isclose(stored, getattr(row, name), rel_tol=1e-9):
            raise TreepackError(
                f"row {row.row_id}: {name} is {stored} and its other columns give {getattr(row, name)}; "
                "pack the trie again"
            )
    return row


def _cell(table: pa.Table, name: str, i: int) -> Any:
    cell = table[name][i]
    is_list = pa.types.is_list(cell.type)
    has_null = not cell.is_valid or (is_list and cell.values.null_count > 0)
    if has_null and name in WITHOUT_NULLS:
        raise TreepackError(f"its row {i} has a null in {name}; pack the trie again")
    if not is_list or not cell.is_valid:
        return cell.as_py()
    if pa.types.is_string(cell.type.value_type):
        return cell.values.to_pylist()
    return cell.values.to_numpy(zero_copy_only=False)
