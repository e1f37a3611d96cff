"""The place of a run: a folder on this machine, or an address in an object store with a folder for files on their way.

    open_place("runs/a", ranks)       Place: folder runs/a, under its lock
    open_place("s3://b/run", ranks)   Place: folder FOLDER/runs/KEY/rank-0-1f2e3d4c, one for each rank

    s3://b/run/owner.json             the process that writes the run; the newest one wins, and the one before stops
              /metrics.jsonl ...      uploaded every minute, with every checkpoint and at the end, also after an error

FOLDER is that of `files.remote.cache`. A store has no locks: two processes of one machine are kept apart by a lock in
FOLDER, and two machines by owner.json, which is compared before every upload that other objects depend on. A folder
whose files could not be uploaded stays, and the message names it. `train.saving.run_directory` and
`train.saving.checkpoint` give the files their meaning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.address import AnyPath, RemotePath, as_output
from treepack.files.lock import lock
from treepack.files.remote import object_store
from treepack.files.remote.cache_room import cache_folder
from treepack.files.remote.retries import patiently
from treepack.train.ranks import Ranks

OWNER = "owner.json"
METRICS = "metrics.jsonl"
_INTERVAL = 60.0  # seconds from one upload of the metrics to the next
_MAX_SHARE = 0.05  # of the time is spent on these uploads, because a store cannot append to a file
_KEPT = ".kept"  # marks a folder whose files could not be uploaded

_log = logging.getLogger("treepack")


@dataclass(frozen=True)
class Place:
    """A run directory `out`; this rank writes its files in `folder`, which is `out` itself if `uploads` is None."""

    out: AnyPath
    folder: Path
    uploads: Uploads | None = None

    def claim(self) -> None:
        """Become the owner of a remote run, and copy its metrics to the folder; to be called on the first rank."""
        if self.uploads is not None:
            self.uploads.claim()

    def push(self) -> None:
        """Upload the files of the first rank that have changed, such as metrics; nothing for a local run.

        Raises:
            TreepackError: the store fails, or another process writes the run now; the files stay in `folder`.
        """
        if self.uploads is not None:
            with self.uploads.kept_on_errors():
                patiently(self.uploads.push)


class Uploads:
    """Uploads from the folder of one rank to the run `out`; on the first rank also by a thread, see `claim`."""

    def __init__(self, folder: Path, out: RemotePath) -> None:
        self.folder, self.out = folder, out
        self._owner = json.dumps(
            {"process": os.getpid(), "host": socket.gethostname(), "token": secrets.token_hex(8)}
        ).encode()
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of the last upload, by name
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self) -> None:
        """Become the owner, copy the metrics to the folder, and start to upload at intervals.

        Raises:
            TreepackError: the store fails.
        """
        object_store.write(self.out / OWNER, self._owner)
        content = object_store.read_object(self.out / METRICS)
        if content is not None:
            (self.folder / METRICS).write_bytes(content)
        self._thread = threading.Thread(target=self._run, name="treepack-uploads", daemon=True)
        self._thread.start()

    def check_owner(self) -> None:
        """Refuse to write a run that another process has continued.

        Raises:
            TreepackError: naming that process.
        """
        content = object_store.read_object(self.out / OWNER)
        if content == self._owner:
            return
        try:
            owner = json.loads(content or b"")
            name = f"process {owner['process']} on {owner['host']}"
        except (ValueError, KeyError, TypeError):
            name = "another process"
        raise TreepackError(f"{self.out}: {name} has continued or replaced this run; let only one process train there")

    def push(self) -> None:
        """Upload the files of the folder that have changed since the last call, if this is the first rank.

        Raises:
            TreepackError: the store fails, or another process writes the run now.
        """
        if self._thread is None:  # not the owner
            return
        with self._lock:
            changed = {name: state for name, state in self._files() if self._sent.get(name) != state}
            if changed:
                self.check_owner()
            for name, state in changed.items():
                object_store.upload(self.folder / name, self.out / name)
                self._sent[name] = state

    def send(self, local: Path, name: str, *, expected: str | None = object_store.ANY) -> None:
        """Upload one file under `name`; wait while the store does not answer.

        Raises:
            TreepackError: the store fails.
        """
        patiently(lambda: object_store.upload(local, self.out / name, expected=expected))

    @contextmanager
    def kept_on_errors(self) -> Iterator[None]:
        """Keep the folder if the block fails or is interrupted, and name it."""
        try:
            yield
        except TreepackError as error:
            self.keep()
            raise TreepackError(
                f"{error}; what could not be uploaded is kept in {self.folder}, and --resume continues from what was"
            ) from error
        except BaseException:
            self.keep()
            _log.info("what could not be uploaded is kept in %s", self.folder)
            raise

    def keep(self) -> None:
        """Keep the folder after the run."""
        with suppress(OSError):
            (self.folder / _KEPT).touch()

    def leave(self) -> None:
        """Give the run up, so that nobody owns it.

        Raises:
            TreepackError: the store fails.
        """
        if self._thread is not None and object_store.read_object(self.out / OWNER) == self._owner:
            object_store.delete([self.out / OWNER])

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause = _INTERVAL
        while not self._stop.wait(pause):
            start = time.monotonic()
            with suppress(TreepackError):  # the next call of `push` by the run meets the same error
                self.push()
            pause = max(_INTERVAL, (time.monotonic() - start) / _MAX_SHARE)

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            # Hidden files, checkpoints and the model are on their way too, but not by this function.
            if not any(part.startswith(".") for part in name.parts) and path.is_file():
                status = path.stat()
                yield name.as_posix(), (status.st_size, status.st_mtime_ns)


@contextmanager
def open_place(out: str | AnyPath, ranks: Ranks) -> Iterator[Place]:
    """Hold the lock of the run directory `out`, and yield its place; all ranks must call this function.

    Raises:
        TreepackError: another process of this machine writes the run, or its folder cannot be written; at the end, the
            last metrics cannot be uploaded.
    """
    out = as_output(out)
    with ExitStack() as stack:
        if not isinstance(out, RemotePath):
            ranks.lead(lambda: _enter(stack, out, str(out)))
            yield Place(out, out)
            return
        runs = cache_folder() / "runs" / hashlib.sha256(str(out).encode()).hexdigest()[:16]
        ranks.lead(lambda: _enter(stack, runs, str(out)))
        folder = _new_folder(runs, ranks.rank)
        place = Place(out, folder, Uploads(folder, out))
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
            if not (path / _KEPT).exists():
                shutil.rmtree(path, ignore_errors=True)
        folder = runs / f"rank-{rank}-{secrets.token_hex(4)}"
        folder.mkdir(parents=True)
    except OSError as error:
        raise TreepackError(f"{runs}: cannot be written ({error.strerror or error}); choose another --cache") from error
    return folder


def _remove(folder: Path) -> None:
    if not (folder / _KEPT).exists():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other ranks or kept files
            folder.parent.rmdir()
