"""Row groups of the parts of a trie directory: found by the footers alone, and read one by one.

    read_footers(directory) -> TrieFooters --nodes_of, trajectories_of--> PartGroups, ... --read_groups--> tables

A footer has the rows of each row group, the number of its tokens, and the minimum and maximum of columns. So the place
of a node or trajectory is known without reading a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError, first_line
from treepack.files import schema
from treepack.files.manifest import check_size, read_manifest
from treepack.files.manifest_entries import FileEntry
from treepack.files.part_columns import with_types
from treepack.files.remote.location import DirectoryLocation
from treepack.sequences import PER_TOKEN
from treepack.trajectory import Int64

_PartFooter = tuple[FileEntry, pq.FileMetaData]
_OPENERS = 16  # remote parts that are opened side by side; each costs some round trips
# Columns of trajectories that may be null.
OPTIONAL = ("reward", "advantage", "temperature", *PER_TOKEN, "rollout_id")


@dataclass(frozen=True, slots=True)
class PartGroups:
    """Row groups `numbers` of the part `file` of `size` bytes; `starts` are their first rows, over all parts."""

    file: str
    size: int
    numbers: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class TrieFooters:
    """The footers of a trie directory; groups are numbered over all parts of a kind.

    Attributes:
        node_start: first node of each row group of nodes, and the number of nodes; int64 [groups + 1].
        token_start: the same for tokens, int64 [groups + 1].
        trajectory_start: first trajectory of each row group of trajectories, and their number; int64 [groups + 1].
        first_end: the last node of the first trajectory of each row group, int64 [groups].
        longest: tokens of the longest trajectory.
        columns: columns of the trajectories.
        known: the columns that may be null and have a value, and "weight" if any weight is not 1.
    """

    node_start: Int64
    token_start: Int64
    trajectory_start: Int64
    first_end: Int64
    longest: int
    columns: tuple[str, ...]
    known: frozenset[str]
    _node_groups: tuple[tuple[FileEntry, int], ...]
    _trajectory_groups: tuple[tuple[FileEntry, int], ...]

    @property
    def num_nodes(self) -> int:
        return int(self.node_start[-1])

    @property
    def num_tokens(self) -> int:
        return int(self.token_start[-1])

    @property
    def num_trajectories(self) -> int:
        return int(self.trajectory_start[-1])

    def nodes_of(self, nodes: Int64) -> tuple[PartGroups, ...]:
        """Return the row groups that contain any of `nodes`, in order."""
        return _by_part(self._node_groups, self.node_start, _groups_of(self.node_start, nodes))

    def trajectories_of(self, trajectories: Int64) -> tuple[PartGroups, ...]:
        """Return the row groups that contain any of `trajectories`, in order."""
        return _by_part(self._trajectory_groups, self.trajectory_start, _groups_of(self.trajectory_start, trajectories))

    def trajectories_that_end_in(self, first: int, end: int) -> tuple[int, int]:
        """Return a range of trajectories, of whole row groups, with all that end in the nodes [first, end).

        The range also has the trajectory after them, if there is one.
        """
        # Row groups whose first trajectories end at nodes [3, 8, 20], nodes [9, 15) -> row groups 1 and 2, because the
        # last one has the next trajectory.
        begin = max(0, int(np.searchsorted(self.first_end, first, "left")) - 1)
        stop = min(len(self.first_end), int(np.searchsorted(self.first_end, end, "left")) + 1)
        return int(self.trajectory_start[begin]), int(self.trajectory_start[stop])


def _groups_of(start: Int64, rows: Int64) -> list[int]:
    # Row groups that start at [0, 4, 9], rows [5, 6, 9] -> row groups [1, 2].
    groups: list[int] = np.unique(np.searchsorted(start, rows, "right") - 1).tolist()
    return groups


def _by_part(places: Sequence[tuple[FileEntry, int]], start: Int64, groups: Sequence[int]) -> tuple[PartGroups, ...]:
    parts: dict[str, PartGroups] = {}
    for group in groups:
        entry, number = places[group]
        before = parts.get(entry["name"], PartGroups(entry["name"], entry["bytes"], (), ()))
        numbers, starts = (*before.numbers, number), (*before.starts, int(start[group]))
        parts[entry["name"]] = PartGroups(before.file, before.size, numbers, starts)
    return tuple(parts.values())


def read_footers(location: DirectoryLocation) -> TrieFooters:
    """Read the footers of all parts of a trie directory.

    Raises:
        TreepackError: a part is missing or truncated, or has other columns; or the directory is not a trie.
    """
    manifest = read_manifest(location, schema.TRIE_FORMAT)
    with ThreadPoolExecutor(1 if location.is_local else _OPENERS) as pool:
        entries = [entry for entry in manifest["files"] if entry["name"].startswith(tuple(schema.TRIE))]
        footers = [*pool.map(lambda entry: _footer(location, entry), entries)]
    both = [*zip(entries, footers, strict=True)]
    parts = {stem: [pair for pair in both if pair[0]["name"].startswith(stem)] for stem in schema.TRIE}
    for stem, pairs in parts.items():
        if not pairs:
            raise TreepackError(f"{location}: its manifest names no {stem} files; write it again")
    names = _check_columns(location, parts)
    nodes, trajectories = (
        [(entry, i, footer.row_group(i)) for entry, footer in pairs for i in range(footer.num_row_groups)]
        for pairs in parts.values()
    )
    rows = [group for _, _, group in trajectories]
    ends = [_column(group, "node_id").statistics for group in rows]
    lengths = [_column(group, "num_tokens").statistics for group in rows]
    if any(statistics is None or not statistics.has_min_max for statistics in (*ends, *lengths)):
        raise TreepackError(f"{location}: its parts have no statistics; build the trie again with treepack")
    return TrieFooters(
        node_start=_starts([group.num_rows for _, _, group in nodes]),
        token_start=_starts([_column(group, "tokens").num_values for _, _, group in nodes]),
        trajectory_start=_starts([group.num_rows for group in rows]),
        first_end=np.array([statistics.min for statistics in ends], np.int64),
        longest=max(statistics.max for statistics in lengths),
        columns=tuple(names),
        known=_known(names, rows),
        _node_groups=tuple((entry, i) for entry, i, _ in nodes),
        _trajectory_groups=tuple((entry, i) for entry, i, _ in trajectories),
    )


def _check_columns(location: DirectoryLocation, parts: Mapping[str, Sequence[_PartFooter]]) -> list[str]:
    """Refuse parts with other columns than the first part of their kind may have; return those of the trajectories.

    Raises:
        TreepackError: naming the part; or the nodes have routes.
    """
    of_nodes, of_trajectories = (pairs[0][1].schema.to_arrow_schema().names for pairs in parts.values())
    if "routes" in of_nodes:
        raise TreepackError(
            f"{location}: has recorded routes, which cannot be packed in slices; pack it without --ray and --partitions"
        )
    names: list[str] = schema.trajectory_columns(of_trajectories).names
    for expected, pairs in zip((schema.node_columns(of_nodes).names, names), parts.values(), strict=True):
        for entry, footer in pairs:
            if (own := footer.schema.to_arrow_schema().names) != expected:
                raise TreepackError(f"{location}: {entry['name']} has the columns {own}; write the trie again")
    return names


def _columns_of(name: str) -> pa.Schema:
    """Return all columns that a part of this name may have."""
    return schema.TRIE["nodes" if name.startswith("nodes") else "trajectories"]


def _footer(location: DirectoryLocation, entry: FileEntry) -> pq.FileMetaData:
    check_size(location, entry)
    footer = location.open_parquet(entry["name"], _columns_of(entry["name"])).metadata
    if footer.num_rows != entry["rows"]:
        raise TreepackError(
            f"{location.file_name(entry['name'])}: contains {footer.num_rows} rows, but the manifest lists "
            f"{entry['rows']}; build the trie again"
        )
    return footer


def _column(group: Any, name: str) -> Any:
    """Return the metadata of a column of a row group; a list column has its values in `name.list.element`."""
    return next(
        column
        for column in (group.column(i) for i in range(group.num_columns))
        if column.path_in_schema.partition(".")[0] == name
    )


def _known(names: Sequence[str], groups: Sequence[Any]) -> frozenset[str]:
    known = [name for name in OPTIONAL if name in names and any(_has_value(group, name) for group in groups)]
    # A row group without statistics may have any weight.
    bounds = [_column(group, "weight").statistics for group in groups]
    is_1 = [each is not None and each.has_min_max and each.min == each.max == 1 for each in bounds]
    return frozenset([*known, *([] if all(is_1) else ["weight"])])


def _has_value(group: Any, name: str) -> bool:
    column = _column(group, name)
    # Values count nulls and missing lists; an empty list, of a trajectory without trained tokens, does not occur.
    return column.statistics is None or column.statistics.null_count < column.num_values


def _starts(sizes: list[int]) -> Int64:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def read_groups(
    location: DirectoryLocation, parts: Sequence[PartGroups], columns: Sequence[str]
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the first row of each row group and the `columns` of it; pages are checked by their checksums.

    Raises:
        TreepackError: a part is missing, damaged or has another size.
    """
    for part in parts:
        check_size(location, {"name": part.file, "rows": 0, "bytes": part.size, "sha256": ""})
        known = _columns_of(part.file)
        with location.open_parquet(part.file, known) as file:
            for number, start in zip(part.numbers, part.starts, strict=True):
                try:
                    table = file.read_row_group(number, columns=[*columns])
                    table.validate(full=True)  # damaged offsets would otherwise surface later as a crash
                    table = with_types(table.select([*columns]), known)
                except Exception as error:  # pyarrow raises OSError, ArrowInvalid and others for damaged files
                    network = "" if location.is_local else ", or the network failed"
                    raise TreepackError(
                        f"{location.file_name(part.file)}: row group {number} cannot be read ({first_line(error)}); "
                        f"the file was altered, so build the trie again{network}"
                    ) from error
                yield start, table
