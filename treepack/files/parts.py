"""Parquet parts of a directory: numbered files of bounded size, with their encodings, written and read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files.manifest import Manifest, check_part, file_sha256
from treepack.trajectory import Int64

PART_TOKENS = 1 << 24


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


class PartWriter:
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


def token_slices(sizes: Int64, limit: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive items of about `limit` tokens, at least one item each."""
    start, total = 0, 0
    for i, size in enumerate(sizes.tolist()):
        total += size
        if total >= limit:
            yield start, i + 1
            start, total = i + 1, 0
    if start < len(sizes):
        yield start, len(sizes)


def open_part(directory: Path, entry: dict[str, Any]) -> pq.ParquetFile:
    """Open a part after checking its size and hash."""
    path = check_part(directory, entry)
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TreepackError(f"{path}: is not readable as Parquet ({error}); write it again") from error


def read_parts(directory: Path, manifest: Manifest, stem: str, columns: pa.Schema) -> pa.Table:
    entries = [entry for entry in manifest["files"] if entry["name"].startswith(stem)]
    tables = [open_part(directory, entry).read() for entry in entries]
    if not tables:
        raise TreepackError(f"{directory}: its manifest names no {stem} files; write it again")
    table = pa.concat_tables(tables)
    if table.schema.names != columns.names:
        raise TreepackError(f"{directory}: {stem} files have the columns {table.schema.names}; write it again")
    return table.cast(columns)
