"""The trie of sorted runs on disk: which tokens and trajectories of the runs follow each other, and in which nodes.

    runs --merge, in ranges--> order --forest_of--> nodes                            MergedRuns, in the first process
    TokenPlaces --read_merged_tokens--> tokens   RowPlaces --read_merged_rows--> table    in any process with the spools

The tokens of the trie are not copied: a sequence shares at least as many tokens with the one before it in the order as
with the one before it in its run, so its new tokens are stored one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.files import schema
from treepack.sequences import concatenate, unique_ids
from treepack.trajectory import Int32, Int64
from treepack.trie.builders.run_merge import MergedOrder, SequenceRange, SortedRun, merge, read_into, split
from treepack.trie.builders.spool import RunIndex, SpoolFiles, StoredRun, read_index, read_table, token_offsets
from treepack.trie.nodes import NodeArrays, forest_of


@dataclass(frozen=True, slots=True)
class RunsOfRange:
    """A range of the order of all runs, to be merged by `merge_range`.

    `ranks` has one array for each run: the rank of each of its partitions among the partitions of all runs.
    """

    runs: list[StoredRun]
    ranks: list[Int32]
    limits: SequenceRange
    share: str


def merge_range(spools: Sequence[SpoolFiles], task: RunsOfRange) -> MergedOrder:
    """Merge a range of the runs in `spools`."""
    runs = [_sorted_run(spools, run, ranks, task.share)[0] for run, ranks in zip(task.runs, task.ranks, strict=True)]
    return merge(runs, task.limits, sharing=task.share != "none")


def _sorted_run(spools: Sequence[SpoolFiles], run: StoredRun, ranks: Int32, share: str) -> tuple[SortedRun, RunIndex]:
    """Return a run as `run_merge` needs it, and its index."""
    spool = spools[run.spool]
    index = read_index(spool, run)
    skipped = index.shared if share != "none" else np.zeros_like(index.shared)
    offsets = token_offsets(run.tokens_start, index.lengths, skipped)
    descriptor = spool.tokens.file.fileno()
    return SortedRun(descriptor, offsets, ranks[index.partition], skipped, index.shared, index.lengths), index


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where tokens [begin, end) of the trie are stored: parts of files, in order.

    The first part begins at token `begins[0]`, which may be before `begin`. `begins` has one more entry than the rest.
    """

    begin: int
    end: int
    begins: Int64
    spool: Int32
    offset: Int64


def read_merged_tokens(spools: Sequence[SpoolFiles], places: TokenPlaces) -> Int32:
    """Return the tokens at `places`."""
    tokens = np.empty(places.end - places.begin, np.int32)
    begins = np.clip(places.begins, places.begin, places.end)
    offsets = places.offset + 4 * (begins[:-1] - places.begins[:-1])
    bounds = begins - places.begin
    for at, stop, spool, offset in zip(
        bounds[:-1].tolist(), bounds[1:].tolist(), places.spool.tolist(), offsets.tolist(), strict=True
    ):
        read_into(tokens[at:stop], spools[spool].tokens.file.fileno(), offset)
    return tokens


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """The table and the row of trajectories of the trie, by numbers.

    `tables` are spool, start and size of each table. `names` are the ids of the trajectories, if stored ids repeat.
    `columns` are the columns of all trajectories of the trie; a table may lack some of `schema.OPTIONAL`.
    """

    tables: list[tuple[int, int, int]]
    table: Int32
    row: Int32
    names: pa.Array | None
    columns: pa.Schema


def read_merged_rows(spools: Sequence[SpoolFiles], places: RowPlaces) -> pa.Table:
    """Return the trajectories at `places`, in order."""
    index = np.zeros(len(places.row), np.int64)
    slices, before = [], 0
    for i in np.unique(places.table).tolist():
        spool, start, size = places.tables[i]
        rows = places.row[places.table == i]
        low, high = int(rows.min()), int(rows.max()) + 1
        slices.append(read_table(spools[spool], start, size).slice(low, high - low))
        index[places.table == i] = rows - low + before
        before += high - low
    table = concatenate(slices).combine_chunks().take(pa.array(index))
    for field in places.columns:
        if field.name in schema.OPTIONAL.names and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    if places.names is not None:
        column = table.schema.get_field_index("trajectory_id")
        table = table.set_column(column, table.schema.field(column), places.names)
    for spool in {places.tables[i][0] for i in np.unique(places.table).tolist()}:
        spools[spool].tables.release()
    return table


@dataclass(frozen=True, slots=True)
class MergedRuns:
    """A trie on disk: its nodes, and for each trajectory in order where its row and its new tokens are stored.

    The new tokens of trajectory k, which it does not share with the one before, are tokens `begins[k] .. begins[k + 1]`
    of the trie. They are stored in spool `token_spool[k]` at byte `token_offset[k]`. Its row is row `row[k]` of table
    `table[k]`, one of `tables`: spool, start and size. `names` are the ids in order if ids of different rows repeat,
    and `renamed` is as in `Sequences`. `table_schema` has the columns of the trie and of all tables.
    """

    spools: Sequence[SpoolFiles]
    share: str
    nodes: NodeArrays
    lengths: Int64
    begins: Int64
    token_spool: Int32
    token_offset: Int64
    tables: list[tuple[int, int, int]]
    table: Int32
    row: Int32
    names: pa.Array | None
    renamed: pa.Table | None
    table_schema: pa.Schema

    def token_places(self, begin: int, end: int) -> TokenPlaces:
        """Return where tokens [begin, end) of the trie are stored; `end` > `begin`."""
        # Begins [0, 4, 5, 6], tokens [4, 6) -> trajectories 1 and 2.
        first = int(np.searchsorted(self.begins, begin, side="right")) - 1
        stop = int(np.searchsorted(self.begins, end, side="left"))
        each = slice(first, stop)
        return TokenPlaces(begin, end, self.begins[first : stop + 1], self.token_spool[each], self.token_offset[each])

    def row_places(self, begin: int, end: int) -> RowPlaces:
        """Return where trajectories [begin, end) are stored."""
        each = slice(begin, end)
        names = None if self.names is None else self.names[begin:end]
        return RowPlaces(self.tables, self.table[each], self.row[each], names, self.table_schema)

    def columns(self, names: list[str]) -> pa.Table:
        """Return columns of all trajectories, in the order in which they are stored; they stay in the files."""
        return pa.concat_tables(
            [read_table(self.spools[i], start, size).select(names) for i, start, size in self.tables]
        )


def merge_runs(
    spools: Sequence[SpoolFiles],
    runs: list[StoredRun],
    *,
    share: str,
    num_ranges: int = 1,
    merge_ranges: Callable[[list[RunsOfRange]], Iterable[MergedOrder]] | None = None,
) -> MergedRuns:
    """Merge `runs`, at least one: `merge_ranges` does it in other processes; without it, this process.

    Trajectories have three orders, and each index array below leads from one of them to another:

        stored     all rows of run 0, then all of run 1, ...: the place of (run, row) is first[run] + row
        merged     sorted by tokens, equal tokens by name: rows[i] is the stored place of trajectory i
        arrival    as they were read, in which equal ids get their numbers: arrival[stored place]
    """
    keys = {key: i for i, key in enumerate(sorted({key for run in runs for key in run.partitions}))}
    ranks = [np.array([keys[key] for key in run.partitions], np.int32) for run in runs]
    opened = [_sorted_run(spools, run, rank, share) for run, rank in zip(runs, ranks, strict=True)]
    tasks = [RunsOfRange(runs, ranks, each, share) for each in split([run for run, _ in opened], num_ranges)]
    order = MergedOrder()
    for part in (merge_range(spools, task) for task in tasks) if merge_ranges is None else merge_ranges(tasks):
        order.extend(part)
    shared, lengths = np.array(order.shared, np.int64), np.array(order.lengths, np.int64)
    # Runs of 3 and 2 rows begin at 0 and 3; (run, row) of the merged order [(1, 0), (0, 0), ...] -> stored [3, 0, ...].
    first = np.concatenate([[0], np.cumsum([run.num_rows for run in runs])])
    rows = first[np.array(order.run, np.int32)] + np.array(order.row, np.int64)
    offset, skipped = (
        np.concatenate(values)[rows]
        for values in ([run.offsets[:-1] for run, _ in opened], [run.skipped for run, _ in opened])
    )
    tables = [(run.spool, run.table_start, run.table_size) for run in runs]
    stored = [read_table(spools[each[0]], *each[1:]) for each in tables]
    names, renamed = _unique_names(stored, _arrivals(runs, [index for _, index in opened]))
    token_spool = np.array([run.spool for run in runs], np.int32)[np.array(order.run, np.int32)]
    rows = _by_name(rows, np.array(order.equal, np.bool_), names)
    table = (np.searchsorted(first, rows, side="right") - 1).astype(np.int32)
    return MergedRuns(
        spools=spools,
        share=share,
        nodes=forest_of(order.shared, order.lengths),
        lengths=lengths,
        begins=np.concatenate([[0], np.cumsum(lengths - shared)]),
        token_spool=token_spool,
        token_offset=offset + 4 * (shared - skipped),
        tables=tables,
        table=table,
        row=(rows - first[table]).astype(np.int32),
        names=None if renamed is None else names.take(pa.array(rows)),
        renamed=renamed,
        table_schema=schema.trajectory_columns(name for each in stored for name in each.column_names),
    )


def _arrivals(runs: list[StoredRun], indices: list[RunIndex]) -> Int64:
    """Return the number, in order of arrival, of each row of all runs."""
    # Runs of the pieces [(0, 2), (3, 1)] and [(1, 4)] with 2, 1 and 4 trajectories: pieces 0, 1, 3 begin at 0, 2, 6, so
    # the trajectories of the runs arrived as numbers 0 1 6 and 2 3 4 5. A piece is in several runs only of one worker.
    pieces = [piece for run in runs for piece in run.pieces]
    counts = np.array([count for _, count in pieces], np.int64)
    by_piece = np.argsort(np.array([number for number, _ in pieces]), kind="stable")
    begins = np.empty_like(counts)
    begins[by_piece] = np.cumsum(counts[by_piece]) - counts[by_piece]
    arrived = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    first = np.cumsum([0, *(run.num_rows for run in runs)])
    return np.concatenate([arrived[start + index.arrival] for start, index in zip(first[:-1], indices, strict=True)])


def _unique_names(stored: Sequence[pa.Table], arrival: Int64) -> tuple[pa.ChunkedArray | pa.Array, pa.Table | None]:
    """Return the ids of all rows as stored, with numbers if they repeat, and what `unique_ids` returns about those."""
    ids, sources = (
        pa.chunked_array([chunk for table in stored for chunk in table[name].chunks])
        for name in ("trajectory_id", "source")
    )
    # The inverse of a permutation is its argsort: arrival [2, 0, 1] -> [1, 2, 0], the row of each arrival.
    back = pa.array(np.argsort(arrival))
    names, renamed = unique_ids(ids.take(back), sources.take(back))
    return (ids if renamed is None else names.take(pa.array(arrival))), renamed


def _by_name(rows: Int64, equal: NDArray[np.bool_], names: pa.ChunkedArray | pa.Array) -> Int64:
    """Return `rows` with trajectories of equal tokens sorted by `names`, the names of all rows."""
    # All members of groups with equal tokens: equal [0, 1, 1, 0, 0, 1] -> places 0, 1, 2 and 4, 5.
    among = np.flatnonzero(equal | np.append(equal[1:], False))
    if not len(among):
        return rows
    table = pa.table({"group": np.cumsum(~equal[among]), "name": names.take(pa.array(rows[among]))})
    by_name = pc.sort_indices(table, sort_keys=[("group", "ascending"), ("name", "ascending")]).to_numpy()
    sorted_rows = rows.copy()
    sorted_rows[among] = rows[among[by_name]]
    return sorted_rows
