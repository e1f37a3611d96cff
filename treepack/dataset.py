"""The rows of a packed directory as `Batch`es, read when they are asked for.

    packed/ --PackedDataset--> Batch, one row at a time, in any order

Opening reads every part once, to check it against the manifest's sha256, and the scalar columns of every row, so that
the weight of an optimiser step is known before its first row is loaded; token columns are read by row group. Order and
grouping of rows are left to the trainer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import parquet as pq
from torch.utils.data import Dataset

from treepack.batch import Batch, make_batch
from treepack.errors import TreepackError
from treepack.manifest import check_part, read_manifest
from treepack.schema import PACKED_FORMAT, ROWS, TERMS
from treepack.shards import row_of_table

CACHED_GROUPS = 4

_SCALARS = ("row_id", "step", "num_tokens", "num_pairs", "total_weight")
_REMEDY = "the file was truncated or altered, so pack the trie again"


@dataclass(frozen=True)
class _Group:
    """A row group of a part file; `first` is the index of its first row in the whole directory."""

    path: Path
    number: int
    first: int


class PackedDataset(Dataset[Batch]):
    """The rows of a packed directory.

    Attributes:
        manifest: the directory's manifest.
        steps: training step of every row, None where its trajectories name none.
        total_weight: float64 [num_rows], sum of loss_weight.
        num_tokens: int64 [num_rows].
        num_pairs: int64 [num_rows], attention score pairs.
        row_ids: int64 [num_rows].
        term_columns: the columns of `schema.TERMS` that the directory has.
    """

    def __init__(self, path: str | Path, *, multiple: int = 1, terms: bool = False) -> None:
        """Open `path`; rows are padded to a multiple of `multiple` tokens and hold their terms if `terms`.

        Raises:
            TreepackError: if the directory is unfinished, of another format, or not what its manifest says.
        """
        self.path = Path(path)
        self.multiple = multiple
        self.terms = terms
        self.manifest = read_manifest(self.path, PACKED_FORMAT)
        self._files: dict[Path, pq.ParquetFile] = {}
        self._cache: OrderedDict[_Group, pa.Table] = OrderedDict()
        self._groups = self._list_groups()
        present = self._open(self._groups[0].path).schema_arrow.names if self._groups else []
        self.term_columns = tuple(name for name in TERMS.names if name in present)
        self._firsts = np.array([group.first for group in self._groups], np.int64)
        index = self._read_scalars()
        self.row_ids = index["row_id"].to_numpy()
        self.num_tokens = index["num_tokens"].to_numpy().astype(np.int64)
        self.num_pairs = index["num_pairs"].to_numpy().astype(np.int64)
        self.total_weight = index["total_weight"].to_numpy()
        self.steps: list[int | None] = index["step"].to_pylist()

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.row_ids)

    def __getitem__(self, index: int) -> Batch:
        """Row `index` in the order of the files."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        group = self._groups[int(np.searchsorted(self._firsts, index, side="right")) - 1]
        table = self._load(group)
        return make_batch(row_of_table(table, index - group.first), multiple=self.multiple)

    def __iter__(self) -> Iterator[Batch]:
        """All rows in order."""
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        """State for a worker process, which opens the files itself."""
        return {**self.__dict__, "_files": {}, "_cache": OrderedDict()}

    def max_position(self) -> int:
        """The greatest position id of any row; reads one column."""
        columns = (table["position_ids"] for table in self.tables(["position_ids"]))
        return max((compute.max(compute.list_flatten(column)).as_py() or 0 for column in columns), default=0)

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Those columns of all rows in order, a row group at a time."""
        return (self._read(group, [*columns]) for group in self._groups)

    def _list_groups(self) -> list[_Group]:
        groups, first = [], 0
        for entry in self.manifest["files"]:
            path = check_part(self.path, entry)
            metadata = self._open(path).metadata
            if metadata.num_rows != entry["rows"]:
                raise TreepackError(
                    f"{path}: holds {metadata.num_rows} rows and the manifest says {entry['rows']}; {_REMEDY}"
                )
            for number in range(metadata.num_row_groups):
                groups.append(_Group(path, number, first))
                first += metadata.row_group(number).num_rows
        return groups

    def _read_scalars(self) -> pa.Table:
        wanted = pa.schema([ROWS.field(name) for name in _SCALARS])
        return pa.concat_tables([wanted.empty_table(), *self.tables(_SCALARS)])

    def _load(self, group: _Group) -> pa.Table:
        if group not in self._cache:
            self._cache[group] = self._read(group, [*ROWS.names, *(self.term_columns if self.terms else ())])
            if len(self._cache) > CACHED_GROUPS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return self._cache[group]

    def _read(self, group: _Group, columns: list[str]) -> pa.Table:
        try:
            table = self._open(group.path).read_row_group(group.number, columns=columns)
            table.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise TreepackError(
                f"{group.path}: row group {group.number} cannot be read ({_line(error)}); {_REMEDY}"
            ) from error
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise TreepackError(f"{group.path}: has no column {missing[0]}; {_REMEDY}")
        return table.select(columns)

    def _open(self, path: Path) -> pq.ParquetFile:
        if path not in self._files:
            try:
                self._files[path] = pq.ParquetFile(path, page_checksum_verification=True)
            except (pa.ArrowException, OSError) as error:
                raise TreepackError(f"{path}: is no readable Parquet file ({_line(error)}); {_REMEDY}") from error
        return self._files[path]


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
