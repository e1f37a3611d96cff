"""Parquet parts of a directory: numbered files of bounded size, with their encodings, written and read.

    tables --PartWriter--> part-00000.parquet  part-00001.parquet  ...   and their entries for the manifest
    entries of a manifest --read_parts--> one table, every part checked against its size and sha256

Equal tables give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files.manifest import FileEntry, Manifest, check_part, file_sha256
from treepack.files.remote_output import publish
from treepack.trajectory import Int64

# Tokens per part: large enough that a big data set has hundreds of files rather than millions, small enough that a
# part is copied or read again in seconds.
PART_TOKENS = 1 << 24

# These columns repeat a value or grow by one along a row, so their differences take almost no room.
DELTA = ["position_ids", "parent", "subtree_end", "scale", "trajectory_ends", "term_token", "term_trajectory"]

# These columns have few distinct values; as indices into a dictionary they take almost no room.
DICTIONARY = [
    "loss_weight",
    "term_weight",
    "term_advantage",
    "trajectory_rewards",
    "trajectory_groups",
    "group_id",
    "metadata",
    "source",
]


class PartWriter:
    """Numbered Parquet files of one kind; a new one is started when the last one has `PART_TOKENS` tokens."""

    def __init__(self, directory: Path, stem: str, columns: pa.Schema) -> None:
        self.directory, self.stem, self.schema = directory, stem, columns
        self.writer: pq.ParquetWriter | None = None
        self.tokens = 0
        self.rows: list[int] = []
        self._entries: list[FileEntry] = []

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
            path = self.directory / self._name(len(self._entries))
            entry = _entry(path, self.rows[-1])
            entry["name"] = publish(path, entry["sha256"])
            self._entries.append(entry)

    def entries(self) -> list[FileEntry]:
        """Close the last file and return the manifest's entry of each."""
        self.close()
        return self._entries


def _encoding(columns: pa.Schema) -> dict[str, Any]:
    # Parquet names the values inside a list column `input_ids` as `input_ids.list.element`.
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


def _entry(path: Path, rows: int) -> FileEntry:
    return {"name": path.name, "rows": rows, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def token_slices(sizes: Int64, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, end) of consecutive items that reach `limit` tokens, with at least one item each.

    `sizes` int64 [num_items] are their tokens; the last range may have fewer.
    """
    start, total = 0, 0
    for i, size in enumerate(sizes.tolist()):  # sizes [3, 4, 9, 1], limit 6 -> (0, 2), (2, 3), (3, 4)
        total += size
        if total >= limit:
            yield start, i + 1
            start, total = i + 1, 0
    if start < len(sizes):
        yield start, len(sizes)


def open_part(directory: Path, entry: FileEntry) -> pq.ParquetFile:
    """Open a part after checking its size and hash.

    Raises:
        TreepackError: the part is missing, damaged, or no Parquet file.
    """
    path = check_part(directory, entry)
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TreepackError(f"{path}: is not readable as Parquet ({error}); write it again") from error


def refuse_links(directory: Path, manifest: Manifest) -> None:
    """Refuse parts that are links to files outside the directory: they are missing from a copy of it.

    Raises:
        TreepackError: naming the part.
    """
    for entry in manifest["files"]:
        path = directory / entry["name"]
        if path.is_symlink() and not path.resolve().is_relative_to(directory.resolve()):
            raise TreepackError(
                f"{path}: is a link to {path.resolve()} outside the directory; copy the file there (cp --dereference)"
            )


def read_parts(directory: Path, manifest: Manifest, stem: str, columns: pa.Schema) -> pa.Table:
    """Read all parts called `stem`-NNNNN.parquet as one table of `columns`.

    Raises:
        TreepackError: there is no such part, one is damaged, or the columns differ.
    """
    entries = [entry for entry in manifest["files"] if entry["name"].startswith(stem)]
    tables = [open_part(directory, entry).read() for entry in entries]
    if not tables:
        raise TreepackError(f"{directory}: its manifest names no {stem} files; write it again")
    table = pa.concat_tables(tables)
    if table.schema.names != columns.names:
        raise TreepackError(f"{directory}: {stem} files have the columns {table.schema.names}; write it again")
    try:
        return table.cast(columns)
    except (pa.ArrowException, ValueError) as error:  # ValueError: a null in a column that has none
        reason = str(error).partition("\n")[0]
        raise TreepackError(f"{directory}: {stem} files have wrong values ({reason}); write it again") from error
