"""The rows of a packed directory as `Batch`es, read on demand.

    packed/, s3://..., hf://... --PackedDataset--> dataset[i]            a Batch, in any order
                                                   for batch in dataset  one epoch, or the rest of it

The constructor checks every part file against the manifest. It also reads the scalar columns of every row, so that the
total weight of an optimiser step is available before the first row of the step is loaded. Token columns are read one
row group at a time, when a row needs them.

A local part is checked by its sha256. For a remote part the constructor checks the size, and reads footers and scalar
columns by range, once for all processes of a machine (`data.machine_tables`). `files.remote.part_copies` then downloads
the parts whose rows come next, and checks their hashes; rows of other parts are read by range. Each Parquet page is
checked by its own checksum when it is read. `data.part_reader` reads the files. `data.epochs` and `data.blocks` make
the order of an epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, fs
from torch.utils.data import Dataset

from treepack.data.batch import Batch, empty_batch, make_batch
from treepack.data.blocks import BALANCED, is_balanced
from treepack.data.epochs import block_of_rows, epoch_order, epoch_rounds, file_order
from treepack.data.machine_tables import MachineTables
from treepack.data.part_reader import PartReader, StoredGroup
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest
from treepack.files.prepared import PACKED, prepared_part
from treepack.files.remote.address import as_path
from treepack.files.remote.location import locate
from treepack.files.remote.part_copies import PartCopies
from treepack.files.schema import PACKED_FORMAT, ROUTES, ROWS, TERMS
from treepack.pack.files import row_of_table
from treepack.trajectory import Int64

# Maximum size of the cached row groups, about 9 million tokens. In a larger directory, a row read in random order must
# decode its whole row group of 2^18 tokens: 30 to 40 ms for a row of 8,192 tokens on 2 cores, 2 to 3 ms in file order.
CACHED_BYTES = 1 << 28
# Length of a row of padding: cheap to compute, but more than 1 because torch.compile specialises on a length of 1.
_PADDING_TOKENS = 16

# The next rows whose remote parts are downloaded ahead. A part of 2^24 tokens has 2,048 rows of 8,192 tokens.
AHEAD_ROWS = 4096

# One number per row: small enough to keep for every row of the directory.
_SCALARS = ("row_id", "step", "num_tokens", "num_pairs", "total_weight")


class PackedDataset(Dataset[Batch]):
    """The rows of a packed directory: a map-style dataset that also supports iteration, one epoch at a time.

    `dataset[i]` is row i of the files. `shuffle`, `rank` and `world` affect iteration only. A DataLoader accepts the
    dataset directly: give the loader a sampler, and `collate` as its `collate_fn`. Its workers open the files
    themselves; if the directory is remote, start them with `multiprocessing_context="spawn"`.

    Iteration yields the rows of this rank. They come in the order of the files or, with `shuffle`, in an order that
    depends on (seed, epoch), keeps the rows of a training step together and keeps the steps in order. Rank r takes
    every `world`-th row. Every rank gets the same number of rows, and no row is left out or repeated: if the rows of a
    training step do not divide by `world`, the remaining ranks get a `batch.empty_batch` of weight 0.

    With `blocks` above 1, the rows of each training step are cut into this number of blocks of neighbouring rows. The
    ranks of a machine take rows of its own block, so that it reads, and downloads, only its share of the parts.

    The dataset has one position, like an open file. `iter` continues after the last row that an iteration yielded, also
    after `load_state_dict`. It stops at the end of the epoch, and the next `iter` starts the next epoch. A `state_dict`
    taken between two rows counts the rows that all ranks got so far.

    Attributes:
        path: the directory.
        manifest: the directory's manifest.
        steps: training step of every row; None if its trajectories have no step.
        total_weight: float64 [num_rows], sum of loss_weight.
        num_tokens: int64 [num_rows].
        num_pairs: int64 [num_rows], attention score pairs.
        row_ids: int64 [num_rows].
        term_columns: the columns of `schema.TERMS` that the directory has.
        has_routes: True if the directory has recorded routes.
        epoch: the current epoch of the iteration, counted from 0.
        blocks: number of blocks of neighbouring rows; may be changed between two epochs.
        is_local: True if the directory is on this machine.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        multiple: int = 1,
        terms: bool = False,
        routes: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        blocks: int = 1,
        filesystem: fs.FileSystem | None = None,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """Open a packed directory.

        Args:
            path: a local path, also of an output of `treepack prepare`; an address (s3://, gs://, hf://); or a path
                inside `filesystem`.
            multiple: pad rows to a multiple of this number of tokens.
            terms: read the terms of the rows too.
            routes: read recorded routes too, if the rows have some; the model then replays them.
            shuffle: shuffle the rows of a training step during iteration.
            seed: seed of the shuffled order; the epoch is mixed into it.
            rank: index of this process among the `world` processes that iterate together.
            world: number of these processes.
            blocks: blocks of neighbouring rows, shuffled one by one: usually the number of machines, so that each reads
                only its own. The ranks must be numbered machine by machine, as torchrun does.
            filesystem: a pyarrow filesystem; by default the one that `path` names.
            cache: folder for copies of remote parts; by default that of `files.remote.cache`.
            cache_bytes: maximum size of these copies, by default half of the disk's free space; 0 for no copies.

        Raises:
            TreepackError: if the directory cannot be reached, is unfinished, has another format or does not match its
                manifest, if `rank` is not below `world`, or if it was packed with --balance and `blocks` is above 1.
        """
        if not 0 <= rank < world:
            raise TreepackError(f"{path}: rank is {rank} and world {world}; expected a rank from 0 to world - 1")
        if blocks < 1:
            raise TreepackError(f"{path}: blocks is {blocks}; expected at least 1")
        location = locate(prepared_part(as_path(path), PACKED) if filesystem is None else path, filesystem)
        self.path = Path(location.root) if location.is_local else location.name
        self.multiple, self.terms, self.routes = multiple, terms, routes
        self.shuffle, self.seed, self.rank, self.world, self.blocks = shuffle, seed, rank, world, blocks
        self.is_local = location.is_local
        self.epoch, self._position = 0, 0
        self._remaining: Iterator[tuple[int, int]] | None = None  # rounds of this epoch, None until one is needed
        self.manifest = read_manifest(location, PACKED_FORMAT)
        if blocks > 1 and is_balanced(self.manifest):
            raise TreepackError(f"{self.path}: {BALANCED}; give blocks=1, or pack without --balance")
        self._cache: OrderedDict[StoredGroup, pa.Table] = OrderedDict()  # ordered by last use, oldest first
        self._cached_bytes = 0
        copies = None
        if not location.is_local and cache_bytes != 0:
            copies = PartCopies(cache, cache_bytes, location, self.manifest["files"])
        # For a process that keeps no copies, no tables either.
        self._tables = MachineTables(
            None if copies is None else copies.folder.parent / "tables", self.manifest["sha256"]
        )
        self._reader = PartReader(location, self.manifest, copies, self._tables)
        self.term_columns = tuple(name for name in TERMS.names if name in self._reader.columns)
        self.has_routes = all(name in self._reader.columns for name in ROUTES.names)
        self._firsts = np.array([group.first for group in self._reader.groups], np.int64)
        index = self.once_per_machine("rows", self._read_scalars)
        if not index.num_rows:
            raise TreepackError(f"{self.path}: contains no row; pack the trie again")
        self.row_ids = index["row_id"].to_numpy()
        self.num_tokens = index["num_tokens"].to_numpy().astype(np.int64)
        self.num_pairs = index["num_pairs"].to_numpy().astype(np.int64)
        self.total_weight = index["total_weight"].to_numpy()
        self.steps: list[int | None] = index["step"].to_pylist()

    def __len__(self) -> int:
        """Return the number of rows, over all ranks."""
        return len(self.row_ids)

    def __getitem__(self, index: int) -> Batch:
        """Return row `index` in the order of the files.

        Raises:
            IndexError: if the row does not exist.
            TreepackError: if the row cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        # first rows of the groups [0, 5, 9]: index 4 -> group 0, index 5 -> group 1, index 20 -> group 2
        group = self._reader.groups[int(np.searchsorted(self._firsts, index, side="right")) - 1]
        table = self._load(group)
        return make_batch(row_of_table(table, index - group.first), multiple=self.multiple)

    def expect(self, rows: Sequence[int]) -> None:
        """Download the remote parts that these rows need, which come next in this order; return at once."""
        self._reader.expect(self._groups_of(rows))

    def claim(self, rows: Sequence[int] | Int64) -> None:
        """Take into account that the processes of this machine will read only these rows."""
        self._reader.claim(self._groups_of(rows))

    def _groups_of(self, rows: Sequence[int] | Int64) -> list[StoredGroup]:
        numbers = np.searchsorted(self._firsts, np.asarray(rows, np.int64), side="right") - 1
        return [self._reader.groups[number] for number in dict.fromkeys(numbers.tolist())]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rows of this rank that remain in the epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._next()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration as a JSON object; ranks that got the same number of rows agree on it.

        A state can be loaded with another number of ranks, because `position` counts the rows of the epoch that all
        ranks got in total.
        """
        return {
            "dataset": hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest(),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position,
            **({} if self.blocks == 1 else {"blocks": self.blocks}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rows that remained at `state`, in the same order.

        `shuffle`, `seed` and `blocks` change to match it, also for the epochs that follow. To use another number of
        blocks, for example on another number of machines, set `blocks` between two epochs.

        Raises:
            TreepackError: if `state` does not come from `state_dict`, or comes from another dataset.
        """
        expected = {**self.state_dict(), "blocks": self.blocks}
        if isinstance(state, dict):
            state = {"blocks": 1, **state}
        # `type` instead of isinstance: True is an int, but no epoch.
        if not isinstance(state, dict) or any(type(state.get(key)) is not type(expected[key]) for key in expected):
            raise TreepackError(f"{self.path}: this is no state of a PackedDataset; pass the result of state_dict()")
        if state["dataset"] != expected["dataset"]:
            raise TreepackError(
                f"{self.path}: the state belongs to a dataset with another manifest; open the directory where "
                "state_dict() was called"
            )
        self.shuffle, self.seed, self.blocks = state["shuffle"], state["seed"], state["blocks"]
        self.epoch, self._position, self._remaining = state["epoch"], state["position"], None

    def padding(self) -> Batch:
        """Return a row of padding, which a rank computes if it has no row left while another rank still has one."""
        length = -(-_PADDING_TOKENS // self.multiple) * self.multiple  # rounded up: multiple 24 -> 24, multiple 3 -> 18
        return empty_batch(length, terms=self.terms and bool(self.term_columns))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker process, without open files: the worker opens them itself."""
        return {**self.__dict__, "_remaining": None, "_cache": OrderedDict(), "_cached_bytes": 0}

    def _next(self) -> Batch:
        # If the row cannot be read, `_remaining` stays None: the next call computes the rounds again from `_position`,
        # which has not moved, and tries the same row.
        remaining, self._remaining = self._remaining or self._rounds(), None
        index, num_rows = next(remaining)
        batch = self.padding() if index < 0 else self[index]
        self._position += num_rows
        if self._position < len(self):
            self._remaining = remaining
        else:
            self.epoch, self._position = self.epoch + 1, 0
        return batch

    def _rounds(self) -> Iterator[tuple[int, int]]:
        """Yield, per remaining round of the epoch, this rank's row and the number of rows over all ranks."""
        if self.shuffle:
            parts = epoch_order(self.steps, range(len(self)), seed=self.seed, epoch=self.epoch, blocks=self.blocks)
        else:
            parts = file_order(self.steps, blocks=self.blocks)
        if not self.is_local:
            self.claim(self._rows_of_machine())
        table = epoch_rounds(parts, self.world, done=self._position, blocks=self.blocks)
        own, counts = table[:, self.rank], (table >= 0).sum(axis=1)
        # rank 1 of 2, table [[3, 1], [2, -1]] -> (1, 2), (-1, 1): the second round is padding here and counts one row
        for number, pair in enumerate(zip(own.tolist(), counts.tolist(), strict=True)):
            if number % (AHEAD_ROWS // 2) == 0:
                ahead = own[number : number + AHEAD_ROWS]
                self.expect(ahead[ahead >= 0].tolist())
            yield pair

    def max_position(self) -> int:
        """Return the largest position id of any row; reads one column, if no process of this machine has done so."""

        def compute_maximum() -> pa.Table:
            # as_py() is None for a row group without tokens
            columns = (table["position_ids"] for table in self.tables(["position_ids"]))
            maxima = (compute.max(compute.list_flatten(column)).as_py() or 0 for column in columns)
            return pa.table({"max_position": pa.array([max(maxima, default=0)], pa.int64())})

        maximum: int = self.once_per_machine("max_position", compute_maximum)["max_position"][0].as_py()
        return maximum

    def once_per_machine(self, name: str, compute: Callable[[], pa.Table]) -> pa.Table:
        """Return `compute()`, which all processes of this machine share if the directory is remote.

        Args:
            name: names the table; equal names must have equal tables for one directory.
            compute: a function of the content of the directory.
        """
        return compute() if self.is_local else self._tables.get(name, compute)

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the given columns of all rows in order, one table per row group.

        Raises:
            TreepackError: if a row group cannot be read or lacks a column.
        """
        return self._reader.tables([*columns])

    def _rows_of_machine(self) -> Int64:
        """Return the rows of the blocks from which this rank takes rows, which the ranks of its machine share."""
        # 2 blocks: ranks 0 and 1 of 4 have block 0. 4 blocks: rank 1 of 2 has the blocks 2 and 3.
        first, stop = self.rank * self.blocks // self.world, -(-(self.rank + 1) * self.blocks // self.world)
        block_of = block_of_rows(self.steps, range(len(self)), blocks=self.blocks)
        return np.flatnonzero((block_of >= first) & (block_of < stop))

    def _read_scalars(self) -> pa.Table:
        schema = pa.schema([ROWS.field(name) for name in _SCALARS])
        # The empty table gives a directory without rows its columns.
        return pa.concat_tables([schema.empty_table(), *self.tables(_SCALARS)])

    def _load(self, group: StoredGroup) -> pa.Table:
        if group not in self._cache:
            columns = [*ROWS.names, *(self.term_columns if self.terms else ())]
            columns += ROUTES.names if self.routes and self.has_routes else []
            self._cache[group] = self._reader.read(group, columns, soon=True)
            self._cached_bytes += self._cache[group].nbytes
            # The newest group stays even if it alone is larger than the limit: the caller is about to read it.
            while self._cached_bytes > CACHED_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        self._cache.move_to_end(group)
        return self._cache[group]
