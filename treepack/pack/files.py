"""Directories on disk: Parquet parts and, last of all, the manifest that makes them whole.

    write_trie(trie, directory, ...)      nodes-*.parquet  trajectories-*.parquet  manifest.json
    write_packed(rows, directory, ...)    part-*.parquet                           manifest.json

Equal input gives equal bytes. Readers refuse other formats and versions, and parts that are missing, truncated or
altered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest, check_part, file_sha256, new_manifest, read_manifest, write_manifest
from treepack.pack.rows import Row, Terms, row_counts, row_totals
from treepack.trajectory import Int32, Int64
from treepack.trie.build import Trie

PART_TOKENS = 1 << 24
GROUP_TOKENS = 1 << 18

# Values that repeat or grow by one along a row cost next to nothing as differences; few distinct values, as indices.
DELTA = ("position_ids", "parent", "subtree_end", "scale", "trajectory_ends", "term_token", "term_trajectory")
DICTIONARY = (
    "loss_weight",
    "term_weight",
    "term_advantage",
    "trajectory_rewards",
    "trajectory_groups",
    "group_id",
    "metadata",
    "source",
)


class _Parts:
    """Numbered Parquet files of one kind, a new one when `PART_TOKENS` are in."""

    def __init__(self, directory: Path, stem: str, columns: pa.Schema) -> None:
        self.directory, self.stem, self.schema = directory, stem, columns
        self.writer: pq.ParquetWriter | None = None
        self.tokens = 0
        self.rows: list[int] = []

    def write(self, table: pa.Table, *, tokens: int) -> None:
        if self.writer is None or self.tokens >= PART_TOKENS:
            self.close()
            path = self.directory / self._name(len(self.rows))
            self.writer = pq.ParquetWriter(path, self.schema, **_encoding(self.schema))
            self.rows.append(0)
            self.tokens = 0
        self.writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.tokens += tokens
        self.rows[-1] += table.num_rows

    def _name(self, number: int) -> str:
        return f"{self.stem}-{number:05d}.parquet"

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def entries(self) -> list[dict[str, Any]]:
        self.close()
        return [_entry(self.directory / self._name(i), rows) for i, rows in enumerate(self.rows)]


def _encoding(columns: pa.Schema) -> dict[str, Any]:
    paths = {
        field.name: f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in columns
    }
    return {
        "compression": "zstd",
        "write_page_checksum": True,
        "compression_level": 3,
        "use_dictionary": [path for name, path in paths.items() if name in DICTIONARY],
        "column_encoding": {path: "DELTA_BINARY_PACKED" for name, path in paths.items() if name in DELTA},
    }


def _entry(path: Path, rows: int) -> dict[str, Any]:
    return {"name": path.name, "rows": rows, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _slices(sizes: Int64, limit: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive items of about `limit` tokens, at least one item each."""
    start, total = 0, 0
    for i, size in enumerate(sizes.tolist()):
        total += size
        if total >= limit:
            yield start, i + 1
            start, total = i + 1, 0
    if start < len(sizes):
        yield start, len(sizes)


def write_trie(
    trie: Trie, directory: Path, manifest: Manifest, *, release: Callable[[], object] = lambda: None
) -> Manifest:
    """Write `trie` and then `manifest`, completed by format, token range and files; returns it.

    `release` is called after every piece written, so that mapped tokens need not stay in memory.
    """
    nodes = _Parts(directory, "nodes", schema.NODES)
    tree_id = trie.tree_id
    max_token_id = 0
    for a, b in _slices(trie.node_length, PART_TOKENS // 8):
        offsets = (trie.node_start[a : b + 1] - trie.node_start[a]).astype(np.int32)
        own = pa.array(trie.tokens[trie.node_start[a] : trie.node_start[b]])
        max_token_id = max(max_token_id, int(own.to_numpy().max()))
        columns = [
            tree_id[a:b],
            np.arange(a, b, dtype=np.int32),
            trie.parent[a:b],
            trie.depth[a:b].astype(np.int32),
            pa.ListArray.from_arrays(offsets, own),
            trie.num_passing[a:b],
        ]
        nodes.write(pa.Table.from_arrays([pa.array(c) for c in columns], schema=schema.NODES), tokens=len(own))
        release()
    trajectories = _Parts(directory, "trajectories", schema.TRAJECTORIES)
    lengths = trie.lengths
    for a, b in _slices(lengths, PART_TOKENS // 2):
        # Where chunks end, pages do too: one chunk, so that the bytes do not depend on how the table was put together.
        trajectories.write(trie.trajectories.slice(a, b - a).combine_chunks(), tokens=int(lengths[a:b].sum()))
        release()
    manifest = new_manifest(schema.TRIE_FORMAT, manifest) | {
        "share": trie.share,
        "max_token_id": max_token_id,
        "files": nodes.entries() + trajectories.entries(),
    }
    write_manifest(directory, manifest)
    return manifest


def write_packed(rows: Iterable[Row], directory: Path, manifest: Manifest) -> Manifest:
    """Write `rows` and then `manifest`, completed by format, row totals and files; returns it.

    `manifest` must give the `capacity`, and in `options` the `semantics` and `normalize` of the rows.

    Raises:
        TreepackError: no row, or an entry of the manifest is missing.
    """
    parts: _Parts | None = None
    waiting: list[Row] = []
    counted: Counter[str] = Counter()
    held, max_token_id = 0, 0
    for row in rows:
        if parts is None:
            parts = _Parts(directory, "part", row_schema(row))
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


def open_part(directory: Path, entry: dict[str, Any]) -> pq.ParquetFile:
    """Open a part after checking its size and hash."""
    path = check_part(directory, entry)
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TreepackError(f"{path}: is not readable as Parquet ({error}); write it again") from error


def _read_parts(directory: Path, manifest: Manifest, stem: str, columns: pa.Schema) -> pa.Table:
    entries = [entry for entry in manifest["files"] if entry["name"].startswith(stem)]
    tables = [open_part(directory, entry).read() for entry in entries]
    if not tables:
        raise TreepackError(f"{directory}: its manifest names no {stem} files; write it again")
    table = pa.concat_tables(tables)
    if table.schema.names != columns.names:
        raise TreepackError(f"{directory}: {stem} files have the columns {table.schema.names}; write it again")
    return table.cast(columns)


def read_trie(directory: Path | str) -> Trie:
    """Read a trie directory.

    Raises:
        TreepackError: see `read_manifest` and `check_part`.
    """
    directory = Path(directory)
    manifest = read_manifest(directory, schema.TRIE_FORMAT)
    nodes = _read_parts(directory, manifest, "nodes", schema.NODES)
    trajectories = _read_parts(directory, manifest, "trajectories", schema.TRAJECTORIES)
    chunks = nodes["tokens"].chunks
    sizes = np.concatenate([chunk.value_lengths().to_numpy() for chunk in chunks])
    parent = nodes["parent_id"].to_numpy()
    return Trie(
        tokens=np.concatenate([chunk.flatten().to_numpy() for chunk in chunks]),
        node_start=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        node_end=_subtree_ends(parent),
        parent=parent,
        depth=nodes["depth"].to_numpy().astype(np.int64),
        num_passing=nodes["num_trajectories"].to_numpy(),
        end_node=trajectories["node_id"].to_numpy(),
        trajectories=trajectories,
        share=manifest["share"],
    )


def _subtree_ends(parent: Int32) -> Int32:
    ends = list(range(1, len(parent) + 1))
    for node, up in zip(range(len(parent) - 1, -1, -1), reversed(parent.tolist()), strict=True):
        if up >= 0:
            ends[up] = max(ends[up], ends[node])
    return np.array(ends, np.int32)


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
        terms = Terms(**columns)
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
