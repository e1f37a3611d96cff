"""Directories on disk: Parquet parts and, last of all, the manifest that makes them whole.

    write_trie(trie, directory, ...)      nodes-*.parquet  trajectories-*.parquet  manifest.json
    write_packed(rows, directory, ...)    part-*.parquet                           manifest.json

Equal input gives equal bytes. Readers refuse other formats and versions, and parts that are missing, truncated or
altered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest, new_manifest, read_manifest, write_manifest
from treepack.files.parts import PartWriter, open_part
from treepack.pack.row import Row, RowTerms, row_counts, row_totals

GROUP_TOKENS = 1 << 18


def write_packed(rows: Iterable[Row], directory: Path, manifest: Manifest) -> Manifest:
    """Write `rows` and then `manifest`, completed by format, row totals and files; returns it.

    `manifest` must give the `capacity`, and in `options` the `semantics` and `normalize` of the rows.

    Raises:
        TreepackError: no row, or an entry of the manifest is missing.
    """
    parts: PartWriter | None = None
    waiting: list[Row] = []
    counted: Counter[str] = Counter()
    held, max_token_id = 0, 0
    for row in rows:
        if parts is None:
            parts = PartWriter(directory, "part", row_schema(row))
        waiting.append(row)
        counted.update(row_counts(row))
        max_token_id = max(max_token_id, int(row.input_ids.max()))
        held += row.num_tokens
        if held >= GROUP_TOKENS:
            parts.write(rows_table(waiting, parts.schema), tokens=held)
            waiting, held = [], 0
    if parts is None:
        raise TreepackError(f"{directory}: there is no row to write")
    if waiting:
        parts.write(rows_table(waiting, parts.schema), tokens=held)
    manifest = new_manifest(schema.PACKED_FORMAT, manifest)
    manifest |= {
        "max_token_id": max_token_id,
        "totals": manifest["totals"] | row_totals(counted, capacity=manifest["capacity"]),
        "files": parts.entries(),
    }
    write_manifest(directory, manifest)
    return manifest


def row_schema(row: Row) -> pa.Schema:
    """Columns of a packed directory whose rows carry what `row` carries."""
    if row.terms is None:
        return schema.ROWS
    present = [field for field in schema.TERMS if getattr(row.terms, field.name.removeprefix("term_")) is not None]
    return pa.schema([*schema.ROWS, *present])


def rows_table(rows: list[Row], columns: pa.Schema) -> pa.Table:
    """`rows` as an Arrow table of `columns`."""
    return pa.Table.from_arrays([_row_column(rows, field) for field in columns], schema=columns)


def _row_column(rows: list[Row], field: pa.Field) -> pa.Array:
    if not pa.types.is_list(field.type):
        return pa.array([getattr(row, field.name) for row in rows], field.type)
    if field.name in schema.TERMS.names:
        values = [getattr(row.terms, field.name.removeprefix("term_")) for row in rows]
    else:
        values = [getattr(row, field.name) for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int32)
    kind = field.type.value_type
    if pa.types.is_string(kind):
        flat = pa.array([text for value in values for text in value], kind)
    else:
        flat = pa.array(np.concatenate(values), kind, from_pandas=field.nullable)  # NaN becomes null
    return pa.ListArray.from_arrays(offsets, flat)


def read_rows(directory: Path | str) -> Iterator[Row]:
    """The rows of a packed directory, in order.

    Raises:
        TreepackError: see `read_manifest` and `check_part`.
    """
    directory = Path(directory)
    for entry in read_manifest(directory, schema.PACKED_FORMAT)["files"]:
        part = open_part(directory, entry)
        for group in range(part.num_row_groups):
            table = part.read_row_group(group)
            for i in range(table.num_rows):
                yield row_of_table(table, i)


def row_of_table(table: pa.Table, i: int) -> Row:
    """Row `i` of a table of packed rows.

    Raises:
        TreepackError: a column is missing, or a stored sum does not match the columns it sums.
    """
    missing = [name for name in schema.ROWS.names if name not in table.column_names]
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
    for name, stored in derived.items():
        if not math.isclose(stored, getattr(row, name), rel_tol=1e-9):
            raise TreepackError(
                f"row {row.row_id}: {name} is {stored} and its other columns give {getattr(row, name)}; "
                "pack the trie again"
            )
    return row


def _cell(table: pa.Table, name: str, i: int) -> Any:
    cell = table[name][i]
    if not pa.types.is_list(cell.type):
        return cell.as_py()
    if pa.types.is_string(cell.type.value_type):
        return cell.values.to_pylist()
    return cell.values.to_numpy(zero_copy_only=False)
