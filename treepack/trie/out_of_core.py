"""Build tries of more trajectories than fit into memory: sorted runs on disk, merged into the same trie.

    batches --as many as fit memory, sorted--> run on disk        run, run, ... --merge--> forest
                                                                                  tokens, table   on disk, mapped

    run 0   a b c d          run 1   a b x           merged   a b c d       from run 0, shared 0
            . . . . e                c                        . . . . e     from run 0, shared 4
                                                              . . x         from run 1, shared 2
                                                              c             from run 1, shared 0

A run stores each sequence without the tokens that it shares with the one before, so it is as large as its trie. Runs
are read once and in order. Input that fits into one run is built in memory and never written to disk.

Memory: about four times `RUN_BYTES`, 150 bytes for each trajectory, the longest trajectory once for each run, the
trajectories of 2^23 tokens, and all trajectories with the same tokens. The spool files have no name, so nothing is left
of them when the process ends, even if it is killed.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treepack.columns import NO_TRAJECTORY, Sequences, join, unique_ids, with_unique_ids
from treepack.errors import TreepackError
from treepack.trajectory import Int32, Int64
from treepack.trie.build import (
    NodeArrays,
    Partition,
    build_trie,
    forest_of,
    partitions,
    shared_with_previous,
    sorted_by_tokens,
    with_places,
)
from treepack.trie.run_merge import Merged, SortedRun, merge
from treepack.trie.trie import Trie

# Size of a run: sorting needs about four times as much, so 0.5 GB; 10 GB of input make some 100 runs.
RUN_BYTES = 1 << 27
# Trajectories are put into final order for so many tokens at a time: some 100 MB of columns.
TABLE_TOKENS = 1 << 23
# Arrow reads buffers without a copy if they start at a multiple of 64 bytes.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Built:
    """A trie whose tokens and trajectories may be memory-mapped files."""

    trie: Trie
    maps: tuple[mmap.mmap, ...] = ()

    def release(self) -> None:
        """Release the file pages in memory; they are read again when they are needed."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)


def build_large_trie(
    batches: Iterable[Sequences], *, share: str = "all", folder: Path | None = None, run_bytes: int = RUN_BYTES
) -> Built:
    """Build the trie that `build_trie` builds from all `batches`, in bounded memory; trajectory ids may repeat.

    Input larger than `run_bytes` is spooled to `folder`, by default the folder of temporary files. It needs twice 4
    bytes for each token of the tries, and twice the trajectories' columns.

    Raises:
        TreepackError: no trajectory, or the disk fails.
    """
    runs: list[_Stored] = []
    pending: list[Sequences] = []  # batches that are not in a run yet
    size = 0
    with _Spool(folder) as tokens, _Spool(folder) as tables:
        for batch in batches:
            pending.append(batch)
            size += batch.num_bytes
            if size >= run_bytes:
                with _disk(folder):
                    runs.append(_store(pending, tokens, tables, share=share))
                size = 0
        if runs:
            with _disk(folder):
                if pending:
                    runs.append(_store(pending, tokens, tables, share=share))
                return _merge(runs, tokens, tables, share=share, folder=folder)
    if not pending:
        raise TreepackError(NO_TRAJECTORY)
    sequences = join(pending)
    pending.clear()  # frees the batches before the trie is built
    return Built(build_trie(replace(sequences, table=with_unique_ids(sequences.table)), share=share))


class _Spool:
    """A temporary file without a name, appended to and then mapped; it disappears with its last user."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # closing tries the write that failed on a full disk again; it was reported already
                self._file.close()

    @property
    def file(self) -> IO[bytes]:
        """The file, created at the first use."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed by __exit__)
        return self._file

    def map(self) -> mmap.mmap:
        """Map the whole file for reading."""
        self.file.flush()
        return mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def _disk(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TreepackError(
            f"{folder or tempfile.gettempdir()}: sorted runs cannot be spooled there ({error.strerror or error}); "
            f"{'free' if folder else 'set TMPDIR to a folder on'} a larger disk"
        ) from error


@dataclass(frozen=True, slots=True)
class _Stored:
    """A run on disk; the arrays have one value per sequence, in sorted order.

    `partition` are indices into `partitions`. `arrival[row]` is the number, in order of arrival, of sorted row `row`.
    """

    tokens_start: int
    table_start: int
    table_size: int
    partition: Int32
    partitions: list[Partition]
    shared: Int32
    lengths: Int32
    arrival: Int32


def _store(pending: list[Sequences], tokens: _Spool, tables: _Spool, *, share: str) -> _Stored:
    """Sort the batches, write them as a run, and empty the list `pending`."""
    sequences = join(pending)
    pending.clear()
    partition, distinct = partitions(sequences.table, share=share)
    order = sorted_by_tokens(sequences, partition, range(len(partition)))
    shared = shared_with_previous(sequences, order, partition)
    # The new tokens of each: offsets [0, 4, 9], order [1, 0], shared [0, 3] -> [4, 9) and [0 + 3, 4).
    begins, ends = sequences.offsets[:-1][order] + shared, sequences.offsets[1:][order]
    tokens_start, table_start = tokens.file.tell(), tables.file.tell()
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        tokens.file.write(sequences.tokens[begin:end].data)
    table_size = _write_table(tables.file, [sequences.table.take(pa.array(order))])
    return _Stored(
        tokens_start=tokens_start,
        table_start=table_start,
        table_size=table_size,
        partition=partition[order].astype(np.int32),
        partitions=distinct,
        shared=np.array(shared, np.int32),
        lengths=(ends - begins + shared).astype(np.int32),
        arrival=np.array(order, np.int32),
    )


def _write_table(file: IO[bytes], parts: Iterable[pa.Table]) -> int:
    """Append `parts` of one table as an Arrow stream, padded for the next one; return the bytes of the stream."""
    start = file.tell()
    writer = None
    for part in parts:
        writer = writer or pa.ipc.new_stream(file, part.schema)
        writer.write_table(part)
    assert writer is not None
    writer.close()
    size = file.tell() - start
    file.write(bytes(-size % ALIGNMENT))
    return size


def _read_table(mapped: mmap.mmap, start: int, size: int) -> pa.Table:
    """Return the table of a mapped Arrow stream; its columns stay in the file."""
    return pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped).slice(start, size))).read_all()


def _merge(runs: list[_Stored], tokens: _Spool, tables: _Spool, *, share: str, folder: Path | None) -> Built:
    ranks = {key: i for i, key in enumerate(sorted({key for run in runs for key in run.partitions}))}
    tokens.file.flush()
    with _Spool(folder) as own, _Spool(folder) as trajectories:
        order = merge(
            [
                SortedRun(
                    descriptor=tokens.file.fileno(),
                    start=run.tokens_start,
                    partition=np.array([ranks[key] for key in run.partitions])[run.partition],
                    shared=run.shared.astype(np.int64),
                    lengths=run.lengths.astype(np.int64),
                )
                for run in runs
            ],
            lambda new: own.file.write(new.data),
            sharing=share != "none",
        )
        tokens.file.truncate(0)
        forest = forest_of(order.shared, order.lengths)
        source = tables.map()
        parts = [_read_table(source, run.table_start, run.table_size) for run in runs]
        named = _with_unique_ids(parts, [run.arrival for run in runs])
        places = _places(order, [part["trajectory_id"] for part in named])
        _write_table(trajectories.file, _in_order(named, places, np.array(order.lengths), forest, source))
        mapped = own.map(), trajectories.map()
        table = _read_table(mapped[1], 0, len(mapped[1]))
        return Built(forest.trie(np.frombuffer(mapped[0], np.int32), table, share=share), mapped)


def _with_unique_ids(parts: list[pa.Table], arrivals: list[Int32]) -> list[pa.Table]:
    """Return the sorted `parts` with unique ids, which are assigned in the order of arrival."""
    # The inverse of a permutation is its argsort: arrival [2, 0, 1] -> [1, 2, 0], the sorted row of each arrival.
    back = [pa.array(np.argsort(arrival)) for arrival in arrivals]
    columns = [
        pa.chunked_array([part[name].combine_chunks().take(rows) for part, rows in zip(parts, back, strict=True)])
        for name in ("trajectory_id", "source")
    ]
    names, named, begin = unique_ids(*columns), [], 0
    for part, arrival in zip(parts, arrivals, strict=True):
        run_names = names.slice(begin, len(arrival)).take(pa.array(arrival))
        column = part.schema.get_field_index("trajectory_id")
        named.append(part.set_column(column, part.schema.field(column), run_names))
        begin += len(arrival)
    return named


def _places(order: Merged, names: list[pa.ChunkedArray]) -> tuple[Int32, Int32]:
    """Return run and row of each trajectory in order; trajectories with equal tokens are sorted by their `names`."""
    run, row = np.array(order.run, np.int32), np.array(order.row, np.int32)
    equal = np.array(order.equal, np.bool_)
    # All members of groups with equal tokens: equal [0, 1, 1, 0, 0, 1] -> rows 0, 1, 2 and 4, 5.
    among = np.flatnonzero(equal | np.append(equal[1:], False))
    if len(among):
        group = np.cumsum(~equal[among])
        rows = [pa.array(row[among][run[among] == i]) for i in range(len(names))]
        chosen = pa.chunked_array(
            [part.combine_chunks().take(of_part) for part, of_part in zip(names, rows, strict=True)]
        )
        of_run = np.argsort(run[among], kind="stable")
        table = pa.table({"group": group[of_run], "name": chosen.combine_chunks()})
        by_name = pc.sort_indices(table, sort_keys=[("group", "ascending"), ("name", "ascending")]).to_numpy()
        sorted_places = among[of_run[by_name]]
        run[among], row[among] = run[sorted_places], row[sorted_places]
    return run, row


def _in_order(
    parts: list[pa.Table], places: tuple[Int32, Int32], lengths: Int64, forest: NodeArrays, source: mmap.mmap
) -> Iterator[pa.Table]:
    """Yield the trajectories in order, with tree and node, `TABLE_TOKENS` tokens at a time."""
    bounds = np.flatnonzero(np.diff(np.cumsum(lengths) // TABLE_TOKENS, prepend=0)).tolist()
    for begin, end in zip([0, *bounds], [*bounds, len(lengths)], strict=True):
        run, row = places[0][begin:end], places[1][begin:end]
        index = np.zeros(end - begin, np.int64)
        slices, before = [], 0
        for i in np.unique(run).tolist():
            rows = row[run == i]
            low, high = int(rows.min()), int(rows.max()) + 1
            slices.append(parts[i].slice(low, high - low))
            index[run == i] = rows - low + before
            before += high - low
        if slices:
            yield with_places(pa.concat_tables(slices).combine_chunks().take(pa.array(index)), forest, begin)
        source.madvise(mmap.MADV_DONTNEED)
