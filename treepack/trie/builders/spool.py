"""Sorted runs of trajectories on disk, in files without names that several processes can read.

    batches --RunStore.add--> up to the memory, sorted --> StoredRun in a SpoolFiles

    run   a b c d          tokens   a b c d e x         the tokens that a sequence does not share with the one before
          a b c d e        tables   the trajectories as an Arrow table, then partition, shared tokens, length and number
          a b x                     of arrival of each

A spool has one writer. Its files have no name, so nothing is left of them when the last process with them ends, even if
it is killed. A process gets the files of others when it is started (`SpoolFiles.__reduce__`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.sequences import Sequences, join
from treepack.trajectory import Int32, Int64
from treepack.trie.builders.in_memory import Partition, partitions
from treepack.trie.nodes import sort_sequences
from treepack.trie.store.table_stream import pad, write_table


class _SpoolFile:
    """A temporary file without a name, appended to and then read; it disappears with its last user."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None

    @property
    def file(self) -> IO[bytes]:
        """The file, created at the first use."""
        if self._file is None:
            with spool_disk(self._folder):
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed by `close`)
        return self._file

    def map(self) -> mmap.mmap:
        """Map the whole file for reading; it must not grow any more."""
        if self._map is None:
            self._map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def release(self) -> None:
        """Release the mapped pages in memory; they are read again when they are needed."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file; maps of it stay."""
        if self._file is not None:
            with suppress(OSError):  # closing tries the write that failed on a full disk again; it was reported already
                self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._folder, DupFd(self.file.fileno()))


def _received(folder: Path | None, handle: Any) -> _SpoolFile:
    """Return the file of a process in a process that it starts."""
    spool = _SpoolFile(folder)
    spool._file = os.fdopen(handle.detach(), "r+b")
    return spool


class SpoolFiles:
    """The files of one writer."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.tokens, self.tables, self.routes = _SpoolFile(folder), _SpoolFile(folder), _SpoolFile(folder)

    def __enter__(self) -> SpoolFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.tokens.close()
        self.tables.close()
        self.routes.close()


@contextmanager
def spool_disk(folder: Path | None) -> Iterator[None]:
    """Turn errors of the disk into a TreepackError of one sentence."""
    try:
        yield
    except OSError as error:
        raise TreepackError(
            f"{folder or tempfile.gettempdir()}: sorted runs cannot be spooled there ({error.strerror or error}); "
            f"{'free space there' if folder else 'set TMPDIR to a folder on a larger disk'}"
        ) from error


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run on disk: places in the files of spool number `spool`.

    `partitions` are the keys of its partitions, in order. `pieces` are number and trajectories of the pieces of input
    that it contains, in the order in which they arrived.
    """

    spool: int
    tokens_start: int
    index_start: int
    num_rows: int
    table_start: int
    table_size: int
    partitions: list[Partition]
    pieces: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RunIndex:
    """Facts about each sequence of a run, in sorted order; int32 [num_rows].

    `partition` are indices into `StoredRun.partitions`. `shared` tokens are shared with the sequence before it, in the
    same partition. `arrival` is the number of the trajectory in the run.
    """

    partition: Int32
    shared: Int32
    lengths: Int32
    arrival: Int32


def read_index(spool: SpoolFiles, run: StoredRun) -> RunIndex:
    values = np.empty((4, run.num_rows), np.int32)
    count = os.preadv(spool.tables.file.fileno(), [values.data], run.index_start)
    assert count == values.nbytes, "the run ends too early"
    return RunIndex(*values)


def read_table(spool: SpoolFiles, start: int, size: int) -> pa.Table:
    """Return the table of an Arrow stream; its columns stay in the file."""
    return pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(spool.tables.map()).slice(start, size))).read_all()


class RunStore:
    """Collect batches of trajectories, and store them as a sorted run whenever they have `run_bytes`.

    Without sharing, sequences are stored whole. Memory: about four times `run_bytes`.
    """

    def __init__(self, spool: SpoolFiles, *, number: int = 0, share: str, run_bytes: int) -> None:
        """Store nothing yet; `number` is that of the spool."""
        self._spool, self._number, self._share, self._run_bytes = spool, number, share, run_bytes
        self._size = 0
        self._pieces: list[tuple[int, int]] = []
        self.pending: list[Sequences] = []  # batches that are not in a run yet
        self.runs: list[StoredRun] = []

    def add(self, batch: Sequences, piece: int) -> None:
        """Add a batch of the piece of input number `piece`; the numbers never fall.

        Raises:
            TreepackError: the disk fails.
        """
        self.pending.append(batch)
        self._pieces.append((piece, len(batch.offsets) - 1))
        self._size += batch.num_bytes
        if self._size >= self._run_bytes:
            self._store()

    def finish(self) -> list[StoredRun]:
        """Store the rest, and return all runs.

        Raises:
            TreepackError: the disk fails.
        """
        if self.pending:
            self._store()
        return self.runs

    def _store(self) -> None:
        sequences = join(self.pending)
        self.pending.clear()
        if sequences.routes is not None:
            raise TreepackError(
                f"rollouts with recorded routes need more than {self._run_bytes:,} bytes, an eighth of the memory; "
                "build the tries of fewer files, or allow more memory (--memory)"
            )
        with spool_disk(self._spool.folder):
            self.runs.append(_write_run(sequences, self._spool, self._pieces, share=self._share, number=self._number))
        self._pieces, self._size = [], 0


def _write_run(
    sequences: Sequences, spool: SpoolFiles, pieces: list[tuple[int, int]], *, share: str, number: int
) -> StoredRun:
    partition, distinct = partitions(sequences.table, share=share)
    order, shared_tokens = sort_sequences(sequences.tokens, sequences.offsets, partition)
    shared = np.array(shared_tokens, np.int64)
    # The new tokens of each: offsets [0, 4, 9], order [1, 0], shared [0, 3] -> [4, 9) and [0 + 3, 4).
    begins, ends = sequences.offsets[:-1][order], sequences.offsets[1:][order]
    stored_from = begins + (shared if share != "none" else 0)
    each = (sequences.tokens[a:b] for a, b in zip(stored_from.tolist(), ends.tolist(), strict=True))
    index = RunIndex(*(np.asarray(x, np.int32) for x in (partition[order], shared, ends - begins, order)))
    return append_run(spool, number, each, [sequences.table.take(pa.array(order))], index, distinct, pieces)


def append_run(
    spool: SpoolFiles,
    number: int,
    tokens: Iterable[Int32],
    tables: Iterable[pa.Table],
    index: RunIndex,
    partitions: list[Partition],
    pieces: list[tuple[int, int]],
) -> StoredRun:
    """Append a run to spool `number`; the fields of `StoredRun` and the header of this file explain the arguments.

    `tokens` and `tables` are read once, piece by piece.
    """
    tokens_file, file = spool.tokens.file, spool.tables.file
    tokens_start, table_start = tokens_file.tell(), file.tell()
    for each in tokens:
        tokens_file.write(np.ascontiguousarray(each).data)
    table_size = write_table(file, tables)
    index_start, num_rows = file.tell(), len(index.lengths)
    for values in (index.partition, index.shared, index.lengths, index.arrival):
        file.write(values.data)
    pad(file, index_start)
    tokens_file.flush()
    file.flush()
    return StoredRun(number, tokens_start, index_start, num_rows, table_start, table_size, partitions, pieces)


def token_offsets(start: int, lengths: Int32, skipped: Int32) -> Int64:
    """Return the bytes at which the stored tokens of each sequence begin, int64 [num_rows + 1]."""
    # Lengths [4, 5, 3] of which [0, 4, 2] tokens are not stored -> 4, 1, 1 tokens -> start + [0, 16, 20, 24].
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.astype(np.int64) - skipped, out=offsets[1:])
    return start + 4 * offsets
