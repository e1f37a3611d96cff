"""The place of a run: a folder on this machine, or an address in an object store with a folder for files on their way.

    open_place("runs/a", ranks)       Place: folder runs/a, under its lock
    open_place("s3://b/run", ranks)   Place: folder FOLDER/runs/KEY/rank-0-1f2e3d4c, one for each rank

    s3://b/run/owner.json             the process that writes the run; the newest one wins, and the one before stops
              /metrics.jsonl ...      uploaded every minute, with every checkpoint and at the end, also after an error

FOLDER is that of `files.remote.cache`. A lock in FOLDER keeps two processes of one machine apart, and owner.json two
machines, see `files.remote.uploads`. `train.saving.run_directory` and `train.saving.checkpoint` give the files their
meaning.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.lock import lock
from treepack.files.remote.address import AnyPath, as_output
from treepack.files.remote.cache_room import cache_folder
from treepack.files.remote.retries import patiently
from treepack.files.remote.uploads import KEPT, FolderUploads
from treepack.train.ranks import Ranks
from treepack.train.saving.checkpoint_files import CHECKPOINTS
from treepack.train.saving.checkpoint_targets import CheckpointTarget, LocalTarget, StoreTarget

METRICS = "metrics.jsonl"

_log = logging.getLogger("treepack")


@dataclass(frozen=True)
class Place:
    """A run directory `out`; this rank writes its files in `folder`, which is `out` itself if `uploads` is None."""

    out: AnyPath
    folder: Path
    uploads: FolderUploads | None = None

    @property
    def checkpoints(self) -> CheckpointTarget:
        """The checkpoints of the run."""
        return (
            LocalTarget(self.folder / CHECKPOINTS) if self.uploads is None else StoreTarget(self.uploads, CHECKPOINTS)
        )

    def claim(self) -> None:
        """Become the owner of a remote run, and copy its metrics to the folder; to be called on the first rank."""
        if self.uploads is not None:
            self.uploads.claim(METRICS)

    def push(self) -> None:
        """Upload the files of the first rank that have changed, such as metrics; nothing for a local run.

        Raises:
            TreepackError: the store fails, or another process writes the run now; the files stay in `folder`.
        """
        if self.uploads is not None:
            with self.uploads.kept_on_errors():
                patiently(self.uploads.push)


@contextmanager
def open_place(out: str | AnyPath, ranks: Ranks) -> Iterator[Place]:
    """Hold the lock of the run directory `out`, and yield its place; all ranks must call this function.

    Raises:
        TreepackError: another process of this machine writes the run, or its folder cannot be written; at the end, the
            last metrics cannot be uploaded.
    """
    out = as_output(out)
    with ExitStack() as stack:
        if isinstance(out, Path):
            ranks.lead(lambda: _enter(stack, out, str(out)))
            yield Place(out, out)
            return
        runs = cache_folder() / "runs" / hashlib.sha256(str(out).encode()).hexdigest()[:16]
        ranks.lead(lambda: _enter(stack, runs, str(out)))
        folder = _new_folder(runs, ranks.rank)
        place = Place(out, folder, FolderUploads(folder, out))
        stack.callback(_remove, folder)
        assert place.uploads is not None
        stack.callback(place.uploads.stop)
        try:
            yield place
        except BaseException:
            _push_last(place)
            raise
        place.push()
        place.uploads.leave()


def _enter(stack: ExitStack, folder: Path, name: str) -> None:
    try:
        stack.enter_context(lock(folder))
    except TreepackError as error:
        raise TreepackError(str(error).replace(str(folder), name)) from error


def _push_last(place: Place) -> None:
    """Upload the last metrics after an error, which is raised and not hidden by an error of the store."""
    assert place.uploads is not None
    try:
        with place.uploads.kept_on_errors():
            place.uploads.push()  # once: an interrupted command ends soon
    except TreepackError as error:
        _log.info("%s", error)


def _new_folder(runs: Path, rank: int) -> Path:
    """Return a new folder for this rank, and remove those of its processes that were killed.

    Raises:
        TreepackError: the disk fails.
    """
    try:
        for path in runs.glob(f"rank-{rank}-*"):
            if not (path / KEPT).exists():
                shutil.rmtree(path, ignore_errors=True)
        folder = runs / f"rank-{rank}-{secrets.token_hex(4)}"
        folder.mkdir(parents=True)
    except OSError as error:
        raise TreepackError(f"{runs}: cannot be written ({error.strerror or error}); choose another --cache") from error
    return folder


def _remove(folder: Path) -> None:
    if not (folder / KEPT).exists():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other ranks or kept files
            folder.parent.rmdir()
