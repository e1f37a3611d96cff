"""Trajectories with recorded routes, between the processes that read them and the one that builds their trie.

    batches --RoutedStore.add--> StoredBatch in a SpoolFiles, in any process
    StoredBatch, ... --join_stored--> Sequences of all, in order of arrival; routes in a mapped file if they are large

Routes are some hundred bytes for each token, so they are never in memory at once. Tokens and tables are: 4 bytes for
each token, and the columns of the trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.sequences import NO_TRAJECTORY, Sequences, concatenate, fill_routes, route_shape, with_unique_ids
from treepack.trajectory import Int32, Routes, missing_route
from treepack.trie.builders.run_merge import read_into
from treepack.trie.builders.spool import SpoolFiles, read_table, spool_disk
from treepack.trie.route_symbols import ROUTES_AT_ONCE
from treepack.trie.storage import ArrayStorage
from treepack.trie.store.table_stream import write_table


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch of the piece of input number `piece`, in the files of spool number `spool`.

    `routes` are layers, experts and bytes of each expert, None if no trajectory of the batch has routes.
    """

    spool: int
    piece: int
    tokens_start: int
    num_tokens: int
    table_start: int
    table_size: int
    routes_start: int
    routes: tuple[int, int, int] | None


class RoutedStore:
    """Write batches into a spool as they arrive."""

    def __init__(self, spool: SpoolFiles, *, number: int) -> None:
        """Store nothing yet; `number` is that of the spool."""
        self._spool, self._number = spool, number
        self._stored: list[StoredBatch] = []

    def add(self, batch: Sequences, piece: int) -> None:
        """Add a batch of the piece of input number `piece`; the numbers never fall.

        Raises:
            TreepackError: the disk fails.
        """
        tokens, tables, routes = self._spool.tokens.file, self._spool.tables.file, self._spool.routes.file
        starts, form = (tokens.tell(), tables.tell(), routes.tell()), None
        with spool_disk(self._spool.folder):
            tokens.write(batch.tokens.data)
            size = write_table(tables, [batch.table])
            if batch.routes is not None:
                form = (*batch.routes.shape[1:], batch.routes.itemsize)
                routes.write(np.ascontiguousarray(batch.routes).data)
        self._stored.append(
            StoredBatch(self._number, piece, starts[0], len(batch.tokens), starts[1], size, starts[2], form)
        )

    def finish(self) -> list[StoredBatch]:
        """Return all batches.

        Raises:
            TreepackError: the disk fails.
        """
        with spool_disk(self._spool.folder):
            for each in (self._spool.tokens, self._spool.tables, self._spool.routes):
                each.file.flush()
        return self._stored


def join_stored(
    spools: list[SpoolFiles], stored: list[StoredBatch], storage: ArrayStorage
) -> tuple[Sequences, ArrayStorage]:
    """Return the trajectories of all batches with unique ids, and the storage with the map of their routes.

    Raises:
        TreepackError: no trajectory; routes of different layers, or numbers of experts; or the disk fails.
    """
    if not stored:
        raise TreepackError(NO_TRAJECTORY)
    # A piece is read by one process, so its batches are in order already.
    stored = sorted(stored, key=lambda batch: batch.piece)
    tokens = np.concatenate([_tokens(spools[batch.spool], batch) for batch in stored])
    tables = [read_table(spools[batch.spool], batch.table_start, batch.table_size) for batch in stored]
    table = concatenate(tables).combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(table["num_tokens"].to_numpy(), dtype=np.int64)])
    shape = route_shape([None if batch.routes is None else batch.routes[:2] for batch in stored])
    routes = None
    if shape is not None:
        routes, storage = _join_routes(spools, stored, (len(tokens), *shape), storage)
    return with_unique_ids(Sequences(tokens, offsets, table, routes)), storage


def _tokens(spool: SpoolFiles, batch: StoredBatch) -> Int32:
    tokens = np.empty(batch.num_tokens, np.int32)
    read_into(tokens, spool.tokens.file.fileno(), batch.tokens_start)
    return tokens


def _join_routes(
    spools: list[SpoolFiles], stored: list[StoredBatch], shape: tuple[int, int, int], storage: ArrayStorage
) -> tuple[Routes, ArrayStorage]:
    kind = np.uint8 if all(batch.routes is None or batch.routes[2] == 1 for batch in stored) else np.uint16
    flat, storage = storage.zeros(int(np.prod(shape)), kind)
    joined = flat.reshape(shape)
    missing = missing_route(joined)
    start = 0
    for batch in stored:
        for begin in range(0, batch.num_tokens, ROUTES_AT_ONCE):
            end = min(begin + ROUTES_AT_ONCE, batch.num_tokens)
            rows = joined[start + begin : start + end]
            if batch.routes is None:
                rows[:] = missing
            else:
                own = np.empty(rows.shape, np.uint8 if batch.routes[2] == 1 else np.uint16)
                place = batch.routes_start + begin * own[0].nbytes
                read_into(own.reshape(-1), spools[batch.spool].routes.file.fileno(), place)
                fill_routes(rows, own)
        start += batch.num_tokens
        storage.release()
    return joined, storage
