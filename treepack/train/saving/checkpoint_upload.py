"""Checkpoints in an object store: each rank uploads its files, and checkpoint.json completes a checkpoint.

    PREFIX/step-00000010/__0_0.distcp ...    from all ranks, to their final names
    PREFIX/step-00000010/.metadata
    PREFIX/step-00000010/checkpoint.json     last, only if absent: without it the step is unfinished, and is not used

`train.saving.checkpoint` writes the files to the disk of each rank first, and `CheckpointUpload` uploads them in the
thread of the save. A store that does not answer is asked again for `files.remote.retries.OUTAGE_SECONDS`. `fetch`
copies the files of a checkpoint back, once on each machine, and checks size and hash of each.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath
from treepack.files.remote.object_store import ObjectInfo
from treepack.files.remote.retries import patiently
from treepack.files.remote.uploads import FolderUploads
from treepack.train.saving.checkpoint_files import RECORD, parse_record, step_of_name


class CheckpointUpload:
    """The checkpoints at `prefix` below a run; each rank has one. Methods raise TreepackError."""

    def __init__(self, uploads: FolderUploads, name: str) -> None:
        self._uploads, self._name = uploads, name
        self.prefix: AnyPath = uploads.out / name

    def clear(self, step: str | None = None) -> None:
        """Remove unfinished checkpoints and the checkpoint `step`; called on the first rank before others upload."""
        patiently(lambda: self._clear(step))

    def send(self, folder: Path, step: str, files: list[dict[str, Any]]) -> None:
        """Upload the files of this rank, which are in `folder`."""
        for entry in files:
            self._uploads.send(folder / entry["name"], f"{self._name}/{step}/{entry['name']}")

    def complete(self, folder: Path, step: str, *, keep: int, best: int | None = None) -> None:
        """Upload the record of a checkpoint whose other files are uploaded, and remove older checkpoints.

        Called on the first rank. The metrics come first, so that they have every step of a complete checkpoint.
        """
        patiently(self._uploads.push)
        patiently(self._uploads.check_owner)
        self._uploads.send(folder / RECORD, f"{self._name}/{step}/{RECORD}", expected=None)
        patiently(lambda: self._remove_older(step, keep, best))

    def keep(self) -> Path:
        """Keep the folder of this rank after the run, because files of it could not be uploaded; return it."""
        self._uploads.keep()
        return self._uploads.folder

    def _clear(self, step: str | None) -> None:
        for name, files in self.steps().items():
            if name == step or RECORD not in files:
                self._remove(name, files)

    def _remove_older(self, written: str, keep: int, best: int | None) -> None:
        """Keep the checkpoint `written`, the newest `keep` - 1 complete ones before it, `best`, and all later ones."""
        steps = self.steps()
        num_kept = 1
        for name, files in list(steps.items())[list(steps).index(written) + 1 :]:
            if RECORD in files and step_of_name(name) == best:
                continue
            if RECORD in files and num_kept < keep:
                num_kept += 1
            else:
                self._remove(name, files)

    def _remove(self, step: str, files: dict[str, ObjectInfo]) -> None:
        # The record first: a process that dies here must leave no record without files.
        names = sorted(files, key=lambda name: (name != RECORD, name))
        self._uploads.remove(f"{self._name}/{step}/{name}" for name in names)

    def steps(self) -> dict[str, dict[str, ObjectInfo]]:
        """Return the objects of each checkpoint, also of unfinished ones, by their names; newest first."""
        steps: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
        for path, info in self._uploads.list(self._name).items():
            step, _, name = path.partition("/")
            if name and step_of_name(step) is not None:
                steps[step][name] = info
        return dict(sorted(steps.items(), reverse=True, key=lambda item: step_of_name(item[0]) or 0))

    def record(self, step: str) -> dict[str, Any] | str:
        """Return checkpoint.json of a checkpoint, or its fault."""
        content = self._uploads.read(f"{self._name}/{step}/{RECORD}")
        return f"{RECORD} is missing" if content is None else parse_record(content, step)

    def fetch(self, step: str, files: list[dict[str, Any]], folder: Path, *, first: int) -> str | None:
        """Copy the files of a checkpoint to `folder`, which the ranks of a machine share; return a fault, or None.

        Args:
            step: name of the checkpoint.
            files: its files, as its record lists them.
            folder: a folder with only the copies of this checkpoint.
            first: index of the file to begin with, different on each rank, so that the ranks of a machine share the
                work.
        """
        start = first % len(files)
        for entry in files[start:] + files[:start]:
            name = entry["name"]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                fault = self._uploads.fetch(f"{self._name}/{step}/{name}", folder / name, entry)
            except OSError as error:
                raise TreepackError(
                    f"{folder}: the checkpoint cannot be copied there ({error.strerror or error}); free disk space, or "
                    "choose another --cache"
                ) from error
            if fault is not None:
                return fault
        return None
