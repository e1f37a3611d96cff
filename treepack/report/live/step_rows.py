"""The packed rows of each optimiser step of a run, from run.json, without torch.

    run.json, packed directories --open_run_rows--> ScheduledRows.of_step(12) -> [4, 0]      indices of rows
                                                    ScheduledRows.read(4) -> Row

A run does not record the rows of its steps, because they follow from its options: `data.epochs` orders the rows of an
epoch, and `train.schedule` cuts this order into steps. The numbers of rows and tokens in metrics.jsonl show whether the
rows are the right ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.data.epochs import epoch_order, steps_of_rows
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest, read_manifest
from treepack.pack.files import row_of_table
from treepack.pack.row import Row
from treepack.trajectory import Int64

_SCALARS = ["row_id", "step", "num_tokens", "total_weight"]


@dataclass(slots=True)
class ScheduledRows:
    """The rows of a run; the rows of each step follow from its options."""

    files: list[Path]
    groups: list[tuple[int, int, int]]  # for each row group its file, its number there, and its first row
    manifest: Manifest
    options: dict[str, Any]
    row_ids: Int64
    steps: list[int | None]
    num_tokens: Int64
    trained: Int64  # rows with weight
    owners: Int64  # the directory of each row
    directory: str | None = None  # of the rows; None if there are several
    _epoch: tuple[int, list[list[int]]] = field(default=(-1, []))

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of an epoch."""
        size = int(self.options["rows_per_step"])
        return sum(-(-len(part) // size) for part in steps_of_rows(self.steps, self.trained))

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the run."""
        return int(self.options.get("steps") or self.options["epochs"] * self.steps_per_epoch)

    def of_step(self, step: int) -> list[int]:
        """Return the rows of an optimiser step, counted from 1."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        known, rows = self._epoch  # together, because several threads ask
        if known != epoch:
            size = int(self.options["rows_per_step"])
            parts = epoch_order(
                self.steps,
                self.trained,
                seed=int(self.options["seed"]),
                epoch=epoch,
                blocks=int(self.options.get("blocks") or 1),
                owners=self.owners,
            )
            rows = [part[i : i + size].tolist() for part in parts for i in range(0, len(part), size)]
            self._epoch = (epoch, rows)
        return rows[place]

    def read(self, row: int) -> Row:
        """Return a row.

        Raises:
            TreepackError: its part is damaged or missing.
        """
        number = int(np.searchsorted([first for _, _, first in self.groups], row, side="right")) - 1
        file, group, first = self.groups[number]
        path = self.files[file]
        try:
            table = pq.ParquetFile(path, page_checksum_verification=True).read_row_group(group)
            return row_of_table(table, row - first)
        except (pa.ArrowException, OSError, TreepackError) as error:
            raise TreepackError(f"{path}: row {row} cannot be read ({error}); pack the trie again") from error


def open_run_rows(record: dict[str, Any], folder: Path) -> ScheduledRows:
    """Open the packed rows of a run.

    Args:
        record: its run.json.
        folder: its directory; relative paths of packed directories are looked up in the current one, in the folders
            above it, and in the one from which the training started.

    Raises:
        TreepackError: the rows cannot be found, are different rows, or their order is not known.
    """
    options, packed = record.get("options"), record.get("packed")
    if not isinstance(packed, str):
        raise TreepackError("run.json does not name the rows of the run")
    if not isinstance(options, dict):
        raise TreepackError("run.json has no options of a run")
    for name, minimum in {"rows_per_step": 1, "epochs": 1, "seed": 0, "steps": 1, "blocks": 1}.items():
        value = options.get(name)
        optional = value is None and name in ("steps", "blocks")
        if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            raise TreepackError(f"run.json has no valid option {name}; expected an integer of at least {minimum}")
    if options.get("mix"):
        raise TreepackError("the run mixes directories by shares (--mix), and the rows of its steps are not recorded")
    objective = options.get("objective")
    if isinstance(objective, dict) and objective.get("denominator") == "rollout":
        raise TreepackError(
            "the run has --denominator rollout, which keeps the rows of a rollout in one step, and the rows of its "
            "steps are not recorded"
        )
    if "://" in packed:
        raise TreepackError(f"{packed}: the rows are in an object store; copy them here to see them")
    started = record.get("folder")
    above = [Path.cwd(), *folder.resolve().parents, *([Path(started)] if isinstance(started, str) else [])]
    directories = _find(packed, above, str(record.get("packed_sha256")))
    return _open(directories, options)


def _find(packed: str, folders: Sequence[Path], sha256: str) -> list[Path]:
    """Return the packed directories of a run, in one of the `folders`, whose parts have the hash `sha256`."""
    found = False
    # Several directories are joined by ", " in run.json.
    for names in ([packed], packed.split(", ")):
        for base in folders:
            directories = [base / name for name in names]
            if not all((directory / "manifest.json").is_file() for directory in directories):
                continue
            found = True
            entries = [entry for each in directories for entry in read_manifest(each, schema.PACKED_FORMAT)["files"]]
            if hashlib.sha256("".join(entry["sha256"] for entry in entries).encode()).hexdigest() == sha256:
                return directories
    if found:
        raise TreepackError(f"{packed}: has other rows than the run was trained on")
    raise TreepackError(f"{packed}: no such packed directory; run the command in the folder where training started")


def _open(directories: list[Path], options: dict[str, Any]) -> ScheduledRows:
    files, groups, tables, owners, first = list[Path](), list[tuple[int, int, int]](), [], list[int](), 0
    manifests = [read_manifest(directory, schema.PACKED_FORMAT) for directory in directories]
    for owner, path in _parts(directories, manifests):
        try:
            part = pq.ParquetFile(path)
            tables.append(part.read(columns=_SCALARS))
            sizes = [part.metadata.row_group(i).num_rows for i in range(part.metadata.num_row_groups)]
        except (pa.ArrowException, OSError) as error:
            raise TreepackError(f"{path}: is not readable as Parquet ({error}); pack the trie again") from error
        for group, size in enumerate(sizes):
            groups.append((len(files), group, first))
            first += size
        owners += [owner] * sum(sizes)
        files.append(path)
    table = pa.concat_tables(tables)
    trained = np.flatnonzero(table["total_weight"].to_numpy())
    if not len(trained):
        raise TreepackError(f"{directories[0]}: no row has a trained token")
    several = len(directories) > 1
    return ScheduledRows(
        files=files,
        groups=groups,
        manifest=manifests[0],
        options=options,
        row_ids=np.arange(first) if several else table["row_id"].to_numpy().astype(np.int64),
        steps=table["step"].to_pylist(),
        num_tokens=table["num_tokens"].to_numpy().astype(np.int64),
        trained=trained,
        owners=np.array(owners, np.int64),
        directory=None if several else str(directories[0].resolve()),
    )


def _parts(directories: list[Path], manifests: list[Manifest]) -> Iterator[tuple[int, Path]]:
    for owner, (directory, manifest) in enumerate(zip(directories, manifests, strict=True)):
        for entry in manifest["files"]:
            yield owner, directory / entry["name"]
