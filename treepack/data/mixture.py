"""Several packed directories as one, and the order in which a mixture takes their rows.

    [PackedDataset of 4 rows, of 2 rows] --MixedDataset--> rows 0 1 2 3 | 4 5, in the order of the directories

    shares [2, 1] --mixed_rows--> a a b a a b a a b ...    an endless stream: rows of a, rows of b
                                                           a's rows shuffled, then shuffled again, and so on; b's too

A share is a share of rows. Any stretch of the stream has the share of each directory to within some rows, whatever the
numbers of rows in the directories: a small directory is repeated, and a large one takes several epochs until all of its
rows were seen. No directory repeats a row before it has yielded all of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from treepack.data.batch import Batch
from treepack.data.blocks import turns
from treepack.data.dataset import PackedDataset
from treepack.data.packed_header import join_manifests
from treepack.errors import TreepackError
from treepack.files.remote.address import Paths, path_names
from treepack.trajectory import Float64, Int64


class MixedDataset:
    """The rows of several packed directories as one map-style dataset; row i is also its `row_id`.

    It has the attributes of `PackedDataset` that do not belong to an iteration. `manifest` has the entries that a model
    is compared with: the maxima of capacity and token id, the tokenizer, the options that all directories share, and
    all files.

    Attributes:
        sources: the directories.
        first: int64 [len(sources) + 1]; the rows of directory s are first[s] .. first[s + 1] - 1.
        owners: int64 [num_rows], the number of the directory of every row.
    """

    def __init__(self, sources: Sequence[PackedDataset]) -> None:
        """Join directories, at least one.

        Raises:
            TreepackError: their tokenizers differ, or their loss weights cannot be compared.
        """
        self.sources = tuple(sources)
        self.first: Int64 = np.cumsum([0, *map(len, self.sources)])  # 4 and 2 rows -> [0, 4, 6]
        self.owners: Int64 = np.repeat(np.arange(len(self.sources)), np.diff(self.first))  # -> [0, 0, 0, 0, 1, 1]
        self.path = ", ".join(str(source.path) for source in self.sources)
        self.terms = self.sources[0].terms
        self.manifest: dict[str, Any] = join_manifests(self.sources)
        names = [set(source.term_columns) for source in self.sources]
        # A column counts only if all directories have it.
        self.term_columns = tuple(name for name in self.sources[0].term_columns if all(name in each for each in names))
        self.row_ids: Int64 = np.arange(self.first[-1])
        self.num_tokens: Int64 = np.concatenate([source.num_tokens for source in self.sources])
        self.num_pairs: Int64 = np.concatenate([source.num_pairs for source in self.sources])
        self.total_weight: Float64 = np.concatenate([source.total_weight for source in self.sources])
        self.steps: list[int | None] = [step for source in self.sources for step in source.steps]

    @property
    def multiple(self) -> int:
        """Rows are padded to a multiple of this number of tokens."""
        return self.sources[0].multiple

    @multiple.setter
    def multiple(self, value: int) -> None:
        for source in self.sources:
            source.multiple = value

    def __len__(self) -> int:
        """Return the number of rows of all directories."""
        return int(self.first[-1])

    def __getitem__(self, index: int) -> Batch:
        """Return a row.

        Raises:
            IndexError: if the row does not exist.
            TreepackError: if the row cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        # first [0, 4, 6]: row 3 -> directory 0, row 4 -> directory 1; a directory without rows has none here
        owner = int(np.searchsorted(self.first, index, side="right")) - 1
        return replace(self.sources[owner][index - int(self.first[owner])], row_id=index)

    def __iter__(self) -> Iterator[Batch]:
        """Yield all rows in order."""
        return (self[row] for row in range(len(self)))

    def expect(self, rows: Sequence[int]) -> None:
        """Download the remote parts that these rows need, which come next in this order; return at once."""
        indices = np.asarray(rows, np.int64)
        owners = np.searchsorted(self.first, indices, side="right") - 1
        for owner in dict.fromkeys(owners.tolist()):
            self.sources[owner].expect((indices[owners == owner] - self.first[owner]).tolist())

    def claim(self, rows: Sequence[int] | Int64) -> None:
        """Take into account that the processes of this machine will read only these rows."""
        indices = np.asarray(rows, np.int64)
        for first, stop, source in zip(self.first[:-1], self.first[1:], self.sources, strict=True):
            source.claim(indices[(indices >= first) & (indices < stop)] - first)

    def padding(self) -> Batch:
        """Return a row of padding, see `PackedDataset.padding`."""
        return self.sources[0].padding()

    def max_position(self) -> int:
        """Return the largest position id of any row; reads one column."""
        return max(source.max_position() for source in self.sources)

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the given columns of all rows in order, one table per row group.

        Raises:
            TreepackError: if a row group cannot be read or lacks a column.
        """
        for source in self.sources:
            yield from source.tables(columns)


AnyDataset: TypeAlias = PackedDataset | MixedDataset


def open_packed(packed: Paths, *, terms: bool = False, routes: bool = False) -> AnyDataset:
    """Open one packed directory, or several as one dataset; see `PackedDataset` for the options.

    Raises:
        TreepackError: as `PackedDataset` and `MixedDataset`.
    """
    names = path_names(packed)
    if not names:
        raise TreepackError("there is no packed directory; give at least one")
    sources = [PackedDataset(name, terms=terms, routes=routes) for name in names]
    return sources[0] if len(sources) == 1 else MixedDataset(sources)


def sources_of(dataset: AnyDataset) -> tuple[PackedDataset, ...]:
    """Return the directories of a dataset, of which a `PackedDataset` has one."""
    return dataset.sources if isinstance(dataset, MixedDataset) else (dataset,)


def source_names(dataset: AnyDataset) -> list[str]:
    """Return a short name for each directory: the last part of its path, or numbers from 1 if two are equal."""
    names = [Path(str(source.path)).name for source in sources_of(dataset)]
    return names if len(set(names)) == len(names) else [str(number) for number in range(1, len(names) + 1)]


def source_of_rows(dataset: AnyDataset) -> Int64:
    """Return the number of the directory of every row, from 0; int64 [num_rows]."""
    return dataset.owners if isinstance(dataset, MixedDataset) else np.zeros(len(dataset), np.int64)


def mixed_rows(sources: Sequence[Int64], shares: Sequence[float], *, seed: int) -> Iterator[int]:
    """Yield rows without end, so that each source has its share of them; every source is shuffled in each pass.

    Args:
        sources: the rows of each source, int64 [n] with n at least 1.
        shares: of each source, positive; only their ratios matter.
        seed: not negative; the source and its pass are mixed into it.
    """
    streams = [_passes(rows, [seed, number]) for number, rows in enumerate(sources)]
    total = sum(shares)
    taken = [0] * len(sources)
    number = 0
    while True:
        number += 1
        # The source that is the furthest below its share of `number` rows. Shares 2 : 1, rows taken [1, 0], number 2:
        # [2 / 3 * 2 - 1, 1 / 3 * 2 - 0] = [0.33, 0.67] -> source 1. The first one wins a tie.
        owner = max(range(len(sources)), key=lambda s: shares[s] / total * number - taken[s])
        taken[owner] += 1
        yield next(streams[owner])


def mixed_blocks(sources: Sequence[Sequence[Int64]], shares: Sequence[float], *, seed: int) -> Iterator[int]:
    """Yield rows without end as `mixed_rows`, from blocks that take turns as in `data.blocks`.

    No block of a source repeats a row before it has yielded all of its rows. A source has its share of all rows, and of
    the rows of each block, to within some rows.

    Args:
        sources: the rows of each block of each source, int64 [n] with n at least 1; all have equally many blocks.
        shares: of each source, positive; only their ratios matter.
        seed: not negative; the source, the block and its pass are mixed into it.
    """
    ratios, num_blocks = np.array(shares) / sum(shares), len(sources[0])
    streams = [
        [_passes(rows, [seed, number, block]) for block, rows in enumerate(blocks)]
        for number, blocks in enumerate(sources)
    ]
    order, number = turns(num_blocks).tolist(), 0
    taken, taken_of = np.zeros(len(sources)), np.zeros((num_blocks, len(sources)))
    while True:
        block = order[number % num_blocks]
        number += 1
        # The source that is the furthest below its share of all rows and of the rows of the block. Shares 1 : 1, blocks
        # 0 and 1: number 1 takes source 0 of block 0, number 2 source 1 of block 1. The third row is again of block 0:
        # the sources are [.5, .5] below their share of all rows, and [0, 1] of the block, so it is one of source 1.
        lacking = ratios * number - taken + ratios * (taken_of[block].sum() + 1) - taken_of[block]
        owner = int(lacking.argmax())
        taken[owner] += 1
        taken_of[block, owner] += 1
        yield next(streams[owner][block])


def _passes(rows: Int64, seed: list[int]) -> Iterator[int]:
    number = 0
    while True:
        yield from np.random.default_rng([*seed, number]).permutation(rows).tolist()
        number += 1
