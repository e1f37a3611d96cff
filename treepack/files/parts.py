"""Parquet parts of a directory: numbered files of bounded size, with their encodings, written and read.

    tables --PartWriter--> part-00000.parquet  part-00001.parquet  ...   and their entries for the manifest
    entries of a manifest --open_part--> _OpenPart, checked against its size, its sha256 and the types of the schema
                          --read_row_groups--> tables of bounded size

Equal tables give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files.manifest import Manifest, check_part, file_sha256
from treepack.files.manifest_entries import FileEntry
from treepack.files.part_columns import check_part_columns, with_types
from treepack.files.remote.remote_output import publish
from treepack.files.schema import is_ragged
from treepack.trajectory import Int64

# Tokens per part: large enough that a big data set has hundreds of files rather than millions, small enough that a
# part is copied or read again in seconds.
PART_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class ColumnEncoding:
    """The encodings of the columns of a Parquet file; every reader of Parquet supports them.

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
        paths |= {field.name: f"{field.name}.list.element.list.element" for field in columns if is_ragged(field.type)}
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


_TRIE_ENCODING = ColumnEncoding(dictionary=("group_id", "metadata", "source"))


class PartWriter:
    """Numbered Parquet files of one kind, from number `first` on; a new one is started after `PART_TOKENS` tokens."""

    def __init__(
        self,
        directory: Path,
        stem: str,
        columns: pa.Schema,
        encoding: ColumnEncoding = _TRIE_ENCODING,
        *,
        first: int = 0,
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
            size, sha256 = self.path.stat().st_size, file_sha256(self.path)
            name = publish(self.path, sha256)
            self.finished.append({"name": name, "rows": self.rows, "bytes": size, "sha256": sha256})

    def entries(self) -> list[FileEntry]:
        """Finish the last part and return the manifest's entry of each."""
        self.close()
        return self.finished


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


@dataclass(frozen=True, slots=True)
class _OpenPart:
    """An open part of a directory, whose columns have the types of `columns` if they are there."""

    path: Path
    file: pq.ParquetFile
    columns: pa.Schema

    @property
    def names(self) -> list[str]:
        """Columns of the file."""
        names: list[str] = self.file.schema_arrow.names
        return names

    @property
    def group_sizes(self) -> list[int]:
        """Rows of each row group."""
        return [self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]

    def read_group(self, number: int) -> pa.Table:
        """Return a row group.

        Raises:
            TreepackError: it is damaged.
        """
        return self._checked(lambda: self.file.read_row_group(number))

    def read(self, names: list[str] | None = None) -> pa.Table:
        """Return all rows, of the columns `names` if they are given.

        Raises:
            TreepackError: the part is damaged.
        """
        return self._checked(lambda: self.file.read(columns=names))

    def _checked(self, read: Callable[[], pa.Table]) -> pa.Table:
        try:
            table = read()
            table.validate(full=True)  # texts that are not UTF-8 would otherwise be noticed in the middle of the work
            return with_types(table, self.columns)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise TreepackError(f"{self.path}: cannot be read as Parquet ({reason}); write it again") from error
        except ValueError as error:
            raise TreepackError(f"{self.path}: has {error}; write it again") from error


def open_part(directory: Path, entry: FileEntry, columns: pa.Schema) -> _OpenPart:
    """Open a part after checking its size, its hash and the types of the `columns` that it has.

    Raises:
        TreepackError: the part is missing, damaged, or no Parquet file; or a column has another type.
    """
    path = check_part(directory, entry)
    try:
        part = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise TreepackError(f"{path}: is not readable as Parquet ({error}); write it again") from error
    check_part_columns(part.schema_arrow, columns, str(path), f"write {directory} again")
    return _OpenPart(path, part, columns)


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


def read_row_groups(
    directory: Path,
    manifest: Manifest,
    stem: str,
    columns: pa.Schema,
    optional: pa.Schema | None = None,
    *,
    whole: bool = False,
) -> Iterator[pa.Table]:
    """Yield the row groups of all parts called `stem`-NNNNN.parquet as tables of `columns` and any of `optional`.

    All tables have the same columns. If `whole`, each table is a part.

    Raises:
        TreepackError: a part is missing or damaged, or the columns differ.
    """
    entries = [entry for entry in manifest["files"] if entry["name"].startswith(stem)]
    if not entries:
        raise TreepackError(f"{directory}: its manifest names no {stem} files; write it again")
    known: pa.Schema | None = None
    for entry in entries:
        part = open_part(directory, entry, pa.schema([*columns, *(optional or ())]))
        names = part.names
        if known is None:
            known = pa.schema([*columns, *(field for field in optional or () if field.name in names)])
        if names != known.names:
            raise TreepackError(f"{directory}: {stem} files have the columns {names}; write it again")
        groups = [part.read()] if whole else (part.read_group(i) for i in range(len(part.group_sizes)))
        try:
            for group in groups:
                yield group.cast(known)
        except (pa.ArrowException, ValueError) as error:  # ValueError: a null in a column that has none
            reason = str(error).partition("\n")[0]
            raise TreepackError(f"{directory}: {stem} files have wrong values ({reason}); write it again") from error
