"""Row groups of the parts of a packed directory, on this machine or in an object store.

    local     every part is checked by its sha256 and stays open
    remote    footers by range, once for all processes of a machine (`data.machine_tables`)
              row groups from a copy of the part (`files.remote.part_copies`), or by range until a copy exists

Reading by range is needed beside copies. A part of 2^24 random tokens in rows of at most 65,536 has 46.1 MB in 58 row
groups. Its footer and scalar columns, which are all that the start of a run reads, have 0.12 MB, and a row group has
0.82 MB. So a run that copied first would start after 390 times the bytes. A row in random order, of parts that do not
fit into the cache together, would cost 56 times as many.

If the store does not answer after the directory was opened, reading is repeated for
`files.remote.retries.OUTAGE_SECONDS`.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import parquet as pq

from treepack.data.machine_tables import MachineTables
from treepack.errors import TreepackError, first_line
from treepack.files.manifest import Manifest, check_part, check_size
from treepack.files.manifest_entries import FileEntry
from treepack.files.part_columns import check_part_columns, with_types
from treepack.files.remote.location import DirectoryLocation
from treepack.files.remote.part_copies import PartCopies
from treepack.files.remote.retries import OUTAGE_SECONDS, pauses
from treepack.files.schema import PACKED

_T = TypeVar("_T")

_OPENERS = 16  # remote files that are opened side by side; each costs some round trips
_FOOTERS = 256  # of copies, kept so that each read of a row group does not parse 2 KB per row group of the part again
_ENDED = object()
_TRIES = 2  # further attempts to read a row group while the store answers
_REMEDY = "the file was truncated or altered, so pack the trie again"


@dataclass(frozen=True)
class StoredGroup:
    """Row group `number` of the part `file`, of which it is the `share`; its first row is row `first` of all parts."""

    file: str
    number: int
    first: int
    share: float


class PartReader:
    """Reader of the parts of one directory; it can be pickled and used after a fork."""

    def __init__(
        self, location: DirectoryLocation, manifest: Manifest, copies: PartCopies | None, tables: MachineTables
    ) -> None:
        """Check every part; of a remote one its size, and its footer if no process of this machine has done so.

        Args:
            location: the directory.
            manifest: its manifest.
            copies: copies of the parts if they are remote, None for reading by range only.
            tables: tables that the processes of this machine share if the directory is remote.

        Raises:
            TreepackError: a part is missing, damaged, or has another number of rows.
        """
        self.location, self._copies = location, copies
        self._entries = {entry["name"]: entry for entry in manifest["files"]}
        self._process = os.getpid()
        self._files: dict[str, pq.ParquetFile] = {}
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()  # of copies, ordered by last use
        if not location.is_local:
            self._check_sizes()
        layout = self._read_layout() if location.is_local else tables.get("layout", self._read_layout)
        self.groups = _list_groups(layout)
        # All parts have the columns of the first one: one command writes the directory.
        self.columns: list[str] = json.loads(layout.schema.metadata[b"columns"])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without open files."""
        return {**self.__dict__, "_process": None, "_files": {}, "_footers": OrderedDict()}

    def read(self, group: StoredGroup, columns: list[str], *, soon: bool = False) -> pa.Table:
        """Return columns of a row group.

        Args:
            group: one of `groups`.
            columns: their names.
            soon: more of the part will be read, so a remote part is copied to this machine if that is worth it.

        Raises:
            TreepackError: it cannot be read, or lacks a column.
        """
        if self.location.is_local:
            return self._read_group(self._open(group.file), group, columns)
        table = self._read_copy(group, columns)
        if table is None:
            table = self._read_range(group, columns)
            if soon and self._copies is not None:
                self._copies.want(group.file, group.share)
        return table

    def tables(self, columns: list[str]) -> Iterator[pa.Table]:
        """Yield columns of all row groups in order.

        Raises:
            TreepackError: as `read`.
        """
        if self.location.is_local:
            return (self.read(group, columns) for group in self.groups)
        files: dict[str, list[StoredGroup]] = {}
        for group in self.groups:
            files.setdefault(group.file, []).append(group)
        tables = self._map(lambda groups: [self.read(group, columns) for group in groups], [*files.values()])
        return (table for each in tables for table in each)

    def claim(self, groups: Sequence[StoredGroup]) -> None:
        """Take into account that the processes of this machine read only these row groups."""
        if self._copies is not None:
            self._copies.claim(dict.fromkeys(group.file for group in groups))

    def expect(self, groups: Sequence[StoredGroup]) -> None:
        """Copy the remote parts of `groups`, which will be read in this order; return at once."""
        if self._copies is not None:
            # Of a part with 64 row groups, of which 16 are read, the share is 1/4.
            shares = dict.fromkeys((group.file for group in groups), 0.0)
            for group in groups:
                shares[group.file] += group.share
            self._copies.expect(shares)

    def _map(self, function: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """Return the result for each item, computed side by side if the directory is remote."""
        with ThreadPoolExecutor(1 if self.location.is_local else _OPENERS) as pool:
            return [*pool.map(function, items)]

    def _check_sizes(self) -> None:
        """Check that all parts are there with their sizes, by a listing of the directory."""
        sizes = self.location.sizes()
        for name, entry in self._entries.items():
            if sizes.get(name) != entry["bytes"]:
                check_size(self.location, entry)  # asks for this part, and raises unless the listing was stale

    def _check(self, entry: FileEntry) -> pq.FileMetaData:
        """Check a part against its entry, and return its footer."""
        if self.location.is_local:  # a hash of a remote part would download all of it
            check_part(Path(self.location.root), entry)
        footer = self._open(entry["name"]).metadata
        if footer.num_rows != entry["rows"]:
            raise TreepackError(
                f"{self.location.file_name(entry['name'])}: contains {footer.num_rows} rows, but the manifest "
                f"lists {entry['rows']}; {_REMEDY}"
            )
        return footer

    def _read_layout(self) -> pa.Table:
        """Check every part, and return one row per part: `file`, and `rows`, the number of rows of each row group."""
        footers = self._map(self._check, [*self._entries.values()])
        sizes = [[each.row_group(number).num_rows for number in range(each.num_row_groups)] for each in footers]
        columns = json.dumps(footers[0].schema.to_arrow_schema().names)
        table = pa.table({"file": [*self._entries], "rows": pa.array(sizes, pa.list_(pa.int64()))})
        return table.replace_schema_metadata({"columns": columns})

    def _read_copy(self, group: StoredGroup, columns: list[str]) -> pa.Table | None:
        """Return columns of a row group from the copy of its part, or None if it has no copy."""
        path = self._copies.find(group.file) if self._copies is not None else None
        if path is None or self._copies is None:
            return None
        try:
            # Closed after each read: a copy that is removed while it is open would still take room.
            footer = self._footers.get(group.file)
            with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
                check_part_columns(file.schema_arrow, PACKED, str(path), _REMEDY)
                self._keep_footer(group.file, file.metadata)
                return self._read_group(file, group, columns)
        # Removed or damaged; the store has the same values, and a new copy follows. A damaged footer is ArrowInvalid.
        except (OSError, pa.ArrowException, TreepackError):
            self._footers.pop(group.file, None)
            self._copies.drop(group.file)
            return None

    def _keep_footer(self, file: str, footer: pq.FileMetaData) -> None:
        self._footers[file] = footer
        self._footers.move_to_end(file)
        while len(self._footers) > _FOOTERS:
            self._footers.popitem(last=False)

    def _read_range(self, group: StoredGroup, columns: list[str]) -> pa.Table:
        """Return columns of a row group from the store; wait while it does not answer.

        Raises:
            TreepackError: it has not answered for `files.remote.retries.OUTAGE_SECONDS`, or the part was altered.
        """
        num_answers, retries = 0, None
        while True:
            try:
                return self._read_group(self._open(group.file), group, columns)
            except TreepackError as error:
                fault = error
            self._files.pop(group.file, None)
            if self._answers(group.file):
                num_answers += 1  # either a connection broke, or the part is damaged
                if num_answers > _TRIES:
                    raise fault
                continue
            retries = retries or pauses(str(fault))
            if next(retries, _ENDED) is _ENDED:
                raise TreepackError(
                    f"{self.location.file_name(group.file)}: the store has not answered for "
                    f"{OUTAGE_SECONDS / 60:.0f} minutes; check the network and the credentials, and resume the run"
                ) from fault

    def _answers(self, file: str) -> bool:
        """Return True if the store answers.

        Raises:
            TreepackError: it does, and the part is missing or has another size.
        """
        try:
            self.location.size(file)
        except TreepackError:
            return False
        check_size(self.location, self._entries[file])
        return True

    def _read_group(self, file: pq.ParquetFile, group: StoredGroup, columns: list[str]) -> pa.Table:
        path = self.location.file_name(group.file)
        try:
            table = file.read_row_group(group.number, columns=columns)
            table.validate(full=True)  # damaged offsets would otherwise surface later as a crash
            table = with_types(table, PACKED)
        except Exception as error:  # pyarrow raises OSError, ArrowInvalid and others for damaged files
            raise TreepackError(
                f"{path}: row group {group.number} cannot be read ({first_line(error)}); {_REMEDY}"
                f"{'' if self.location.is_local else ', or the network failed'}"
            ) from error
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise TreepackError(f"{path}: has no column {missing[0]}; {_REMEDY}")
        return table.select(columns)

    def _open(self, file: str) -> pq.ParquetFile:
        if self._process != os.getpid():  # a forked worker shares neither files nor connections with its parent
            self._process, self._files, self.location = os.getpid(), {}, self.location.fresh()
        if file not in self._files:
            self._files[file] = self.location.open_parquet(file, PACKED)
        return self._files[file]


def _list_groups(layout: pa.Table) -> list[StoredGroup]:
    """Return all row groups from the table of `PartReader._read_layout`."""
    groups, first = [], 0
    for file, sizes in zip(layout["file"].to_pylist(), layout["rows"].to_pylist(), strict=True):
        for number, num_rows in enumerate(sizes):
            groups.append(StoredGroup(file, number, first, 1 / len(sizes)))
            first += num_rows
    return groups
