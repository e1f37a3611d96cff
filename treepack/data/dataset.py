"""The rows of a packed directory as `Batch`es, read when they are asked for.

    packed/, s3://..., hf://... --PackedDataset--> dataset[i]            a Batch, in any order
                                                   for batch in dataset  one epoch, or what is left of it

Opening checks every part against the manifest and reads the scalar columns of every row, so that the weight of an
optimiser step is known before its first row is loaded; token columns are read by row group. A local part is checked by
its sha256. Of a remote one, which hashing would download, the size is checked, and every page that is read by its
checksum. The order of an epoch is in `order`, filesystems are in `storage`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, fs
from pyarrow import parquet as pq
from torch.utils.data import Dataset

from treepack.data.batch import Batch, empty_batch, make_batch
from treepack.data.epochs import epoch_order, file_order, rounds
from treepack.errors import TreepackError
from treepack.files.location import first_line, locate
from treepack.files.manifest import check_part, check_size, read_manifest
from treepack.files.schema import PACKED_FORMAT, ROWS, TERMS
from treepack.pack.files import row_of_table

# Row groups are kept up to this size: some 9 million tokens. Beyond it, a row in random order decodes its whole group
# of 2^18 tokens: 30 to 40 ms a row of 8,192 tokens, against 2 to 3 ms in order, on 2 cores.
CACHED_BYTES = 1 << 28
PADDING = 16  # tokens of a row of padding: next to nothing, and not the one token that a compiler specialises on

_SCALARS = ("row_id", "step", "num_tokens", "num_pairs", "total_weight")
_REMEDY = "the file was truncated or altered, so pack the trie again"


@dataclass(frozen=True)
class _RowGroup:
    """A row group of the part file `file`; `first` is the index of its first row in the whole directory."""

    file: str
    number: int
    first: int


class PackedDataset(Dataset[Batch]):
    """The rows of a packed directory: a map-style dataset, which can also be iterated over, an epoch at a time.

    `dataset[i]` is row i of the files, whatever `shuffle`, `rank` and `world` say; those are about iteration alone. A
    DataLoader takes it as it is: give the loader a sampler, and `collate` as its `collate_fn`. Its workers open the
    files themselves; where the directory is remote, start them by `multiprocessing_context="spawn"`.

    Iteration gives the rows of this rank, in the order of the files or, with `shuffle`, in one of (seed, epoch) that
    keeps the rows of a training step together and the steps in order. Rank r takes every `world`-th row. Every rank
    gets equally many: where the rows of a training step do not divide by `world`, the ranks that have none left get
    `batch.empty_batch`, of weight 0, and no row is left out or repeated.

    There is one position, as in an open file: `iter` goes on where the last iteration stopped, also after
    `load_state_dict`; at the end of the epoch it ends, and the next `iter` begins the next epoch. `state_dict` between
    two rows counts those that were given, on all ranks.

    Attributes:
        path: where it is.
        manifest: the directory's manifest.
        steps: training step of every row, None where its trajectories name none.
        total_weight: float64 [num_rows], sum of loss_weight.
        num_tokens: int64 [num_rows].
        num_pairs: int64 [num_rows], attention score pairs.
        row_ids: int64 [num_rows].
        term_columns: the columns of `schema.TERMS` that the directory has.
        epoch: the epoch that iteration is in, counted from 0.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        multiple: int = 1,
        terms: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        filesystem: fs.FileSystem | None = None,
    ) -> None:
        """Open a packed directory.

        Args:
            path: a local path, a URI that pyarrow or fsspec reads, or a path inside `filesystem`.
            multiple: rows are padded to a multiple of this many tokens.
            terms: whether rows hold their terms.
            shuffle: whether iteration shuffles the rows of a training step.
            seed: of the order, with the epoch.
            rank: this process among the `world` that iterate together.
            world: number of such processes.
            filesystem: of pyarrow; by default what `path` says.

        Raises:
            TreepackError: if the directory cannot be reached, is unfinished, of another format, or not what its
                manifest says; or there is no such rank.
        """
        if not 0 <= rank < world:
            raise TreepackError(f"{path}: rank is {rank} and world {world}; expected a rank from 0 to world - 1")
        self._location = locate(path, filesystem)
        self.path = Path(self._location.root) if self._location.is_local else self._location.name
        self.multiple, self.terms = multiple, terms
        self.shuffle, self.seed, self.rank, self.world = shuffle, seed, rank, world
        self.epoch, self._position = 0, 0
        self._left: Iterator[tuple[int, int]] | None = None
        self.manifest = read_manifest(self._location, PACKED_FORMAT)
        self._process = os.getpid()
        self._files: dict[str, pq.ParquetFile] = {}
        self._cache: OrderedDict[_RowGroup, pa.Table] = OrderedDict()
        self._cached = 0
        self._groups = self._list_groups()
        present = self._open(self._groups[0].file).schema_arrow.names if self._groups else []
        self.term_columns = tuple(name for name in TERMS.names if name in present)
        self._firsts = np.array([group.first for group in self._groups], np.int64)
        index = self._read_scalars()
        self.row_ids = index["row_id"].to_numpy()
        self.num_tokens = index["num_tokens"].to_numpy().astype(np.int64)
        self.num_pairs = index["num_pairs"].to_numpy().astype(np.int64)
        self.total_weight = index["total_weight"].to_numpy()
        self.steps: list[int | None] = index["step"].to_pylist()

    def __len__(self) -> int:
        """Number of rows, of all ranks."""
        return len(self.row_ids)

    def __getitem__(self, index: int) -> Batch:
        """Row `index` in the order of the files."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        group = self._groups[int(np.searchsorted(self._firsts, index, side="right")) - 1]
        table = self._load(group)
        return make_batch(row_of_table(table, index - group.first), multiple=self.multiple)

    def __iter__(self) -> Iterator[Batch]:
        """The rows of this rank that are left in the epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._next()

    def state_dict(self) -> dict[str, Any]:
        """Where iteration is, as JSON holds it; the same on every rank after equally many rows.

        It goes on with any number of ranks: `position` counts the rows that all of them were given in the epoch.
        """
        return {
            "dataset": self._fingerprint(),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with the rows that were left, in its order: `shuffle` and `seed` become those of `state`.

        Raises:
            TreepackError: it is no such state, or one of another dataset.
        """
        expected = self.state_dict()
        if not isinstance(state, dict) or any(type(state.get(key)) is not type(expected[key]) for key in expected):
            raise TreepackError(f"{self.path}: the state is none of a PackedDataset; expected what state_dict gave")
        if state["dataset"] != expected["dataset"]:
            raise TreepackError(
                f"{self.path}: the state is of a dataset with another manifest; open the directory that it was made on"
            )
        self.shuffle, self.seed = state["shuffle"], state["seed"]
        self.epoch, self._position, self._left = state["epoch"], state["position"], None

    def padding(self) -> Batch:
        """A row of nothing but padding, for a rank that has no row left when others have one."""
        length = -(-PADDING // self.multiple) * self.multiple
        return empty_batch(length, terms=self.terms and bool(self.term_columns))

    def __getstate__(self) -> dict[str, Any]:
        """State for a worker process, which opens the files itself."""
        unopened: dict[str, Any] = {"_process": None, "_left": None, "_files": {}}
        unopened |= {"_cache": OrderedDict(), "_cached": 0}
        return {**self.__dict__, **unopened}

    def _next(self) -> Batch:
        turns, self._left = self._left or self._turns(), None  # worked out anew should the row be unreadable
        index, taken = next(turns)
        batch = self.padding() if index < 0 else self[index]
        self._position += taken
        if self._position < len(self):
            self._left = turns
        else:
            self.epoch, self._position = self.epoch + 1, 0
        return batch

    def _turns(self) -> Iterator[tuple[int, int]]:
        """What is left of the epoch: this rank's row, and how many rows all ranks get with it."""
        if self.shuffle:
            parts = epoch_order(self.steps, range(len(self)), seed=self.seed, epoch=self.epoch)
        else:
            parts = file_order(self.steps)
        left = rounds(parts, self.world, done=self._position)
        return iter(zip(left[:, self.rank].tolist(), (left >= 0).sum(axis=1).tolist(), strict=True))

    def _fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    def max_position(self) -> int:
        """The greatest position id of any row; reads one column."""
        columns = (table["position_ids"] for table in self.tables(["position_ids"]))
        return max((compute.max(compute.list_flatten(column)).as_py() or 0 for column in columns), default=0)

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Those columns of all rows in order, a row group at a time."""
        return (self._read(group, [*columns]) for group in self._groups)

    def _list_groups(self) -> list[_RowGroup]:
        groups, first = [], 0
        for entry in self.manifest["files"]:
            if self._location.is_local:
                check_part(Path(self._location.root), entry)
            else:
                check_size(self._location, entry)
            metadata = self._open(entry["name"]).metadata
            if metadata.num_rows != entry["rows"]:
                raise TreepackError(
                    f"{self._location.file_name(entry['name'])}: holds {metadata.num_rows} rows and the manifest says "
                    f"{entry['rows']}; {_REMEDY}"
                )
            for number in range(metadata.num_row_groups):
                groups.append(_RowGroup(entry["name"], number, first))
                first += metadata.row_group(number).num_rows
        return groups

    def _read_scalars(self) -> pa.Table:
        wanted = pa.schema([ROWS.field(name) for name in _SCALARS])
        return pa.concat_tables([wanted.empty_table(), *self.tables(_SCALARS)])

    def _load(self, group: _RowGroup) -> pa.Table:
        if group not in self._cache:
            self._cache[group] = self._read(group, [*ROWS.names, *(self.term_columns if self.terms else ())])
            self._cached += self._cache[group].nbytes
            while self._cached > CACHED_BYTES and len(self._cache) > 1:
                self._cached -= self._cache.popitem(last=False)[1].nbytes
        self._cache.move_to_end(group)
        return self._cache[group]

    def _read(self, group: _RowGroup, columns: list[str]) -> pa.Table:
        path = self._location.file_name(group.file)
        file = self._open(group.file)
        try:
            table = file.read_row_group(group.number, columns=columns)
            table.validate(full=True)
        except Exception as error:
            raise TreepackError(
                f"{path}: row group {group.number} cannot be read ({first_line(error)}); {_REMEDY}"
                f"{'' if self._location.is_local else ', or the network failed'}"
            ) from error
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise TreepackError(f"{path}: has no column {missing[0]}; {_REMEDY}")
        return table.select(columns)

    def _open(self, file: str) -> pq.ParquetFile:
        if self._process != os.getpid():  # a forked worker shares neither files nor connections with its parent
            self._process, self._files, self._location = os.getpid(), {}, self._location.fresh()
        if file not in self._files:
            self._files[file] = self._location.open_parquet(file)
        return self._files[file]
