"""The places of a run's checkpoints: a directory that all ranks share, or an object store.

    for each step:  clear on the first rank; put on every rank; commit on the first rank, which completes the checkpoint

    LocalTarget    DIRECTORY/.step-00000010.partial-*    written by all ranks; `commit` renames it to step-00000010
    StoreTarget    PREFIX/step-00000010/...              every rank uploads its files from a separate folder, and
                   PREFIX/step-00000010/checkpoint.json  last, only if absent: without it the step is not used

So ranks on several machines without a shared disk write one checkpoint to a store. A store that does not answer is
asked again for `files.remote.retries.OUTAGE_SECONDS`. `fetch` checks the files of a checkpoint on this machine, after
it copies those of a store, once on each machine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath
from treepack.files.remote.object_store import ObjectInfo
from treepack.files.remote.retries import patiently
from treepack.files.remote.uploads import FolderUploads
from treepack.train.saving.checkpoint_files import (
    RECORD,
    find_damage,
    has_all_files,
    list_steps,
    parse_record,
    read_record,
    step_of_name,
    sync_names,
)
from treepack.train.saving.checkpoint_ranks import RankGroup


class CheckpointTarget(Protocol):
    """Where the checkpoints of a run are. Methods raise TreepackError or OSError."""

    @property
    def name(self) -> AnyPath:
        """The directory or address of the checkpoints."""

    @property
    def folder(self) -> Path:
        """The directory in which a rank writes the files of a checkpoint that is not complete."""

    @property
    def is_copied(self) -> bool:
        """True if `fetch` returns a copy."""

    def clear(self, step: str | None) -> None:
        """Remove unfinished checkpoints, and what must not be there when `step` is written; on the first rank."""

    def put(self, partial: Path, step: str, files: Sequence[Path]) -> None:
        """Store the files of this rank, which are in `partial`."""

    def commit(self, partial: Path, step: str, *, keep: int, best: int | None) -> None:
        """Complete the checkpoint with the record in `partial`, and remove older ones; on the first rank.

        The newest `keep` complete ones stay, and that of the step `best`.
        """

    def failure(self, partial: Path, step: str, problem: str) -> TreepackError:
        """Return the sentence about a checkpoint that is not complete, after a look at the files in `partial`."""

    def steps(self) -> list[str]:
        """Return the names of possible checkpoints, newest first."""

    def record(self, step: str) -> dict[str, Any] | str:
        """Return checkpoint.json of a checkpoint, or its fault."""

    def fetch(self, step: str, record: dict[str, Any], ranks: RankGroup) -> tuple[Path, str | None]:
        """Check this rank's share of the files; return the directory on this machine, and a fault of a file or None."""


class LocalTarget:
    """Checkpoints in the directory `name`, which all ranks share."""

    is_copied = False

    def __init__(self, directory: Path) -> None:
        self.name = self.folder = directory

    def clear(self, step: str | None) -> None:  # a step of the same name stays until it is replaced
        """Create the directory and remove unfinished checkpoints."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".step-*.partial-*"):
            shutil.rmtree(path)

    def put(self, partial: Path, step: str, files: Sequence[Path]) -> None:
        """Do nothing: the files are in place."""

    def commit(self, partial: Path, step: str, *, keep: int, best: int | None) -> None:
        """Rename `partial`, and remove older checkpoints."""
        path, suffix = self.folder / step, partial.name.removeprefix(f".{step}.partial-")
        # A directory cannot replace another in one step. If the process dies between the two renames, `latest` uses
        # the one with the suffix .replaced-*.
        if path.exists():
            path.rename(path.with_name(f"{step}.replaced-{suffix}"))
        partial.rename(path)
        sync_names(self.folder)
        with suppress(OSError):  # the new checkpoint is whole; an old one that stays only costs space
            for name in _superseded(self.steps(), step, keep, best, lambda name: has_all_files(self.folder / name)):
                # Renamed first: a process that dies while it deletes must not leave a valid name to half a checkpoint.
                hidden = self.folder / f".{name}.partial-{suffix}"
                (self.folder / name).rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)

    def failure(self, partial: Path, step: str, problem: str) -> TreepackError:
        """Remove the files."""
        shutil.rmtree(partial, ignore_errors=True)
        return TreepackError(
            f"{self.folder / step}: the checkpoint could not be written ({problem}); check that its disk is mounted "
            "and has free space, and resume from the checkpoint before it"
        )

    def steps(self) -> list[str]:
        """Return the names, a replaced one after its successor."""
        return [path.name for path in list_steps(self.folder)]

    def record(self, step: str) -> dict[str, Any] | str:
        """Return the record, or its fault."""
        return read_record(self.folder / step)

    def fetch(self, step: str, record: dict[str, Any], ranks: RankGroup) -> tuple[Path, str | None]:
        """Compare sizes and hashes."""
        # 5 files and 2 ranks: rank 0 checks files 0, 2, 4 and rank 1 files 1, 3.
        path = self.folder / step
        faults = (find_damage(path, entry, hashed=True) for entry in record["files"][ranks.rank :: ranks.size])
        return path, next(filter(None, faults), None)


class StoreTarget:
    """Checkpoints below a run in an object store, and their files on the way in the folder of `uploads`."""

    is_copied = True

    def __init__(self, uploads: FolderUploads, name: str) -> None:
        self._uploads, self._below = uploads, name
        self.name = uploads.out / name
        self.folder = uploads.folder / name

    def clear(self, step: str | None) -> None:
        """Remove unfinished checkpoints and the checkpoint `step`."""

        def remove() -> None:
            for name, files in self._objects().items():
                if name == step or RECORD not in files:
                    self._remove(name, files)

        patiently(remove)

    def put(self, partial: Path, step: str, files: Sequence[Path]) -> None:
        """Upload the files."""
        for path in files:
            self._uploads.send(path, f"{self._below}/{step}/{path.name}")

    def commit(self, partial: Path, step: str, *, keep: int, best: int | None) -> None:
        """Upload the metrics, so that they have every step of a complete checkpoint, then the record."""
        patiently(self._uploads.push)
        patiently(self._uploads.check_owner)
        self._uploads.send(partial / RECORD, f"{self._below}/{step}/{RECORD}", expected=None)

        def remove() -> None:
            steps = self._objects()
            for name in _superseded(list(steps), step, keep, best, lambda name: RECORD in steps[name]):
                self._remove(name, steps[name])

        patiently(remove)

    def failure(self, partial: Path, step: str, problem: str) -> TreepackError:
        """Keep the files after the run."""
        self._uploads.keep()
        return TreepackError(
            f"{self.name / step}: the checkpoint could not be uploaded ({problem}); its files are kept in "
            f"{self._uploads.folder}, and --resume continues from the checkpoint before it"
        )

    def steps(self) -> list[str]:
        """Return the names of complete checkpoints."""
        return [name for name, files in self._objects().items() if RECORD in files]

    def record(self, step: str) -> dict[str, Any] | str:
        """Return the record, or its fault."""
        content = self._uploads.read(f"{self._below}/{step}/{RECORD}")
        return f"{RECORD} is missing" if content is None else parse_record(content, self.name / step)

    def fetch(self, step: str, record: dict[str, Any], ranks: RankGroup) -> tuple[Path, str | None]:
        """Copy the files to a folder that the ranks of a machine share."""
        # A folder for each content. Each rank begins with another file, so that they share the work.
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        folder = self._uploads.folder.parent / self._below / f"{step}-{digest[:16]}"
        start = ranks.rank % len(record["files"])
        for entry in record["files"][start:] + record["files"][:start]:
            name = entry["name"]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                fault = self._uploads.fetch(f"{self._below}/{step}/{name}", folder / name, entry)
            except OSError as error:
                raise TreepackError(
                    f"{folder}: the checkpoint cannot be copied there ({error.strerror or error}); free disk space, or "
                    "choose another --cache"
                ) from error
            if fault is not None:
                return folder, fault
        return folder, None

    def _objects(self) -> dict[str, dict[str, ObjectInfo]]:
        """Return the objects of each checkpoint, also of unfinished ones, by their names; newest first."""
        steps: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
        for path, info in self._uploads.list(self._below).items():
            step, _, name = path.partition("/")
            if name and step_of_name(step) is not None:
                steps[step][name] = info
        return dict(sorted(steps.items(), reverse=True, key=lambda item: step_of_name(item[0]) or 0))

    def _remove(self, step: str, files: dict[str, ObjectInfo]) -> None:
        # The record first: a process that dies here must leave no record without files.
        names = sorted(files, key=lambda name: (name != RECORD, name))
        self._uploads.remove(f"{self._below}/{step}/{name}" for name in names)


def as_target(place: Path | CheckpointTarget) -> CheckpointTarget:
    """Return the target itself, or that of a directory."""
    return LocalTarget(place) if isinstance(place, Path) else place


def _superseded(
    steps: Sequence[str], written: str, keep: int, best: int | None, is_whole: Callable[[str], bool]
) -> list[str]:
    """Return the checkpoints to remove after `written`; `steps` are the names of all of them, newest first.

    The newest `keep` whole ones stay, `written` among them, and the best one. Later ones stay too. They do not belong
    to this run, which would have continued from them: they are damaged, or another run wrote them.
    """
    # keep 2, after writing 30: 10, 20, 20.replaced-*, 30, 40 -> 20, 30, 40 stay
    # the same if 20 is damaged: 10, 20, 20.replaced-*, 30, 40 -> 20.replaced-*, 30, 40 stay
    last = step_of_name(written) or 0
    removed, num_kept = [], 1
    for name in steps:
        step = step_of_name(name) or 0
        if name == written or step > last or (step == best and is_whole(name)):
            continue
        if num_kept < keep and step < last and is_whole(name):
            num_kept += 1
        else:
            removed.append(name)
    return removed
