"""Parquet parts of a directory: numbered files of bounded size, with their encodings, written and read.

    tables --PartWriter--> part-00000.parquet  part-00001.parquet  ...   and their entries for the manifest
    entries of a manifest --read_parts--> one table, every part checked against its size and sha256
                          --read_row_groups--> the same as tables of bounded size

Equal tables give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files.manifest import FileEntry, Manifest, check_part, file_sha256
from treepack.files.remote_output import publish
from treepack.trajectory import Int64

# Tokens per part: large enough that a big data set has hundreds of files rather than millions, small enough that a
# part is copied or read again in seconds.
PART_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a Parquet file stores its columns; every reader of Parquet knows these encodings.

    Attributes:
        level: level of zstd, of all columns that `levels` does not name.
        levels: level of zstd of some columns.
        delta: integer columns that are stored as differences; good if they grow by one or repeat.
        dictionary: columns that are stored as indices into their distinct values.
        list_statistics: also record the minimum and maximum of list columns, which costs a tenth of their time.
    """

    level: int = 3
    levels: Mapping[str, int] = field(default_factory=dict)
    delta: tuple[str, ...] = ()
    dictionary: tuple[str, ...] = ()
    list_statistics: bool = True

    def options(self, columns: pa.Schema) -> dict[str, Any]:
        """Return the options of `pq.ParquetWriter` for a file of `columns`."""
        lists = {column.name for column in columns if pa.types.is_list(column.type)}
        # Parquet names the values inside a list column `input_ids` as `input_ids.list.element`.
        paths = {name: f"{name}.list.element" if name in lists else name for name in columns.names}
        levels = {path: self.levels.get(name, self.level) for name, path in paths.items()}
        statistics = [path for name, path in paths.items() if name not in lists]
        return {
            "compression": "zstd",
            "compression_level": levels if self.levels else self.level,
            "write_page_checksum": True,
            "write_statistics": True if self.list_statistics else statistics,
            "use_dictionary": [path for name, path in paths.items() if name in self.dictionary],
            "column_encoding": {path: "DELTA_BINARY_PACKED" for name, path in paths.items() if name in self.delta},
        }


TRIE_ENCODING = Encoding(dictionary=("group_id", "metadata", "source"))


class PartWriter:
    """Numbered Parquet files of one kind, from number `first` on; a new one is started after `PART_TOKENS` tokens."""

    def __init__(
        self, directory: Path, stem: str, columns: pa.Schema, encoding: Encoding = TRIE_ENCODING, *, first: int = 0
    ) -> None:
        self.directory, self.stem, self.schema, self.first = directory, stem, columns, first
        self.options = encoding.options(columns)
        self.writer: pq.ParquetWriter | None = None
        self.path = directory
        self.rows = self.tokens = 0  # of the open part
        self.finished: list[FileEntry] = []

    def write(self, table: pa.Table, *, tokens: int) -> None:
        """Write `table` as one row group of `tokens` tokens."""
        if self.writer is None or self.tokens >= PART_TOKENS:
            self.close()
            self.path = self.directory / f"{self.stem}-{self.first + len(self.finished):05d}.parquet"
            self.writer = pq.ParquetWriter(self.path, self.schema, **self.options)
            self.rows = self.tokens = 0
        self.writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.tokens += tokens
        self.rows += table.num_rows

    def close(self) -> None:
        """Finish the open part, if there is one."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
            entry = _entry(self.path, self.rows)
            entry["name"] = publish(self.path, entry["sha256"])
            self.finished.append(entry)

    def entries(self) -> list[FileEntry]:
        """Finish the last part and return the manifest's entry of each."""
        self.close()
        return self.finished


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


def planned_parts(sizes: Int64, limit: int) -> list[list[tuple[int, int]]]:
    """Return the slices of the items of each part, if the `token_slices` of `sizes` are written by one `PartWriter`."""
    parts: list[list[tuple[int, int]]] = []
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = PART_TOKENS
    for start, end in token_slices(sizes, limit):
        if tokens >= PART_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append((start, end))
        tokens += int(offsets[end] - offsets[start])
    return parts


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


def read_parts(
    directory: Path, manifest: Manifest, stem: str, columns: pa.Schema, optional: pa.Schema | None = None
) -> pa.Table:
    """Read all parts called `stem`-NNNNN.parquet as one table of `columns`, and after them any of `optional`.

    Raises:
        TreepackError: there is no such part, one is damaged, or the columns differ.
    """
    tables = [*read_row_groups(directory, manifest, stem, columns, optional, whole=True)]
    return pa.concat_tables(tables)


def read_row_groups(
    directory: Path,
    manifest: Manifest,
    stem: str,
    columns: pa.Schema,
    optional: pa.Schema | None = None,
    *,
    whole: bool = False,
) -> Iterator[pa.Table]:
    """Yield the row groups of the parts that `read_parts` reads as tables of equal columns; if `whole`, the parts.

    Raises:
        TreepackError: as `read_parts`.
    """
    entries = [entry for entry in manifest["files"] if entry["name"].startswith(stem)]
    if not entries:
        raise TreepackError(f"{directory}: its manifest names no {stem} files; write it again")
    known: pa.Schema | None = None
    for entry in entries:
        part = open_part(directory, entry)
        names = part.schema_arrow.names
        if known is None:
            known = pa.schema([*columns, *(field for field in optional or () if field.name in names)])
        if names != known.names:
            raise TreepackError(f"{directory}: {stem} files have the columns {names}; write it again")
        groups = [part.read()] if whole else (part.read_row_group(i) for i in range(part.num_row_groups))
        try:
            for group in groups:
                yield group.cast(known)
        except (pa.ArrowException, ValueError) as error:  # ValueError: a null in a column that has none
            reason = str(error).partition("\n")[0]
            raise TreepackError(f"{directory}: {stem} files have wrong values ({reason}); write it again") from error
