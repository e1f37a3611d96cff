"""The state of a training run, from the files in its directory and from its lock.

    .RUN.start                      starting; failed, if its last line is an error; died, if no process holds the lock
    train.json                      finished
    .RUN.lock, held by a process    running
    .RUN.lock, held by none         died: a process that ends in order removes its lock
    neither                         stopped, after SIGTERM or an error; waiting, before the first step

The view must not keep a trainer from its lock. A probe takes a shared lock for an instant and only if that can succeed,
so a lock that was free once is not probed again until a process has written its name into it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.directory import RUN
from treepack.report.live.metrics_tail import open_regular
from treepack.report.live.start_lines import NO_START, RunStart, StartLines
from treepack.report.live.start_log import start_file

FINISHED, METRICS = "train.json", "metrics.jsonl"
FORMAT = "treepack-train"
_MAX_RECORD_BYTES = 1 << 24
# A file system without locks: the run counts as running if its metrics are this young.
_YOUNG_SECONDS = 120
_LOOK_SECONDS = 0.5  # between two looks for a run that has started


@dataclass(frozen=True, slots=True)
class RunState:
    """`kind` is waiting, starting, running, finished, stopped, failed or died.

    `owner` names the process that has or had the lock. `start` has the lines before the first step of the command.
    """

    kind: str
    owner: str = ""
    start: RunStart = NO_START


class RunFolder:
    """The directory of a training run, which another process may be writing."""

    def __init__(self, folder: Path, *, is_alive: Callable[[], bool] | None = None) -> None:
        """Take `folder` as the directory of a run.

        Args:
            folder: the directory.
            is_alive: returns true while the trainer runs; a process that the trainer has started passes it, and then
                locks are not looked at.

        Raises:
            TreepackError: it has no run, or run.json is damaged.
        """
        self.path, self._is_alive = folder, is_alive
        self.metrics = folder / METRICS
        self._start = StartLines(folder)
        self._free: tuple[int, int] | None = None  # inode and time of a lock file that no process held
        self.record = _read_run_file(folder / RUN)
        if self.record is None and not self.metrics.exists() and not self._start.path.exists():
            raise TreepackError(f"{folder}: has no {RUN} and no {METRICS}; give the --out of treepack train")
        if self.record is not None and self.record.get("format") != FORMAT:
            raise TreepackError(f"{folder / RUN}: is not from treepack train; give the --out of treepack train")

    def refresh(self) -> None:
        """Read run.json again, which a resumed run may have replaced; a damaged one keeps the record before."""
        with suppress(TreepackError):
            self.record = _read_run_file(self.path / RUN) or self.record

    def finished(self) -> dict[str, Any] | None:
        """Return train.json of a finished run; empty if it is damaged, None if it does not exist."""
        try:
            return _read_run_file(self.path / FINISHED)
        except TreepackError:
            return {}

    def state(self) -> RunState:
        """Return the state of the run now."""
        start = self._start.read()
        if start.error:
            return RunState("failed", start=start)
        if (self.path / FINISHED).exists() and not start.is_starting:
            return RunState("finished")
        alive = "starting" if start.is_starting else "running"
        if self._is_alive is not None:
            return RunState(alive if self._is_alive() else "stopped", start=start)
        folder = self.path.resolve()
        held, owner = self._probe(folder.parent / f".{folder.name}.lock")
        if held is False:
            return RunState("died", owner, start)
        if held is None:  # no lock file: if none can be made, the run directory itself is locked
            held = self._probe(folder)[0]
        if held or (held is None and (start.is_starting or self._is_young())):
            return RunState(alive, owner, start)
        return RunState("stopped" if self.metrics.exists() else "waiting")

    def _is_young(self) -> bool:
        with suppress(OSError):
            return time.time() - self.metrics.stat().st_mtime < _YOUNG_SECONDS
        return False

    def _probe(self, file: Path) -> tuple[bool | None, str]:
        """Return whether a process holds the lock on `file`, None if that is unknown; and the owner in the file."""
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                opened = os.fstat(descriptor)
                stamp = (opened.st_ino, opened.st_mtime_ns)
                owner = _printable(os.pread(descriptor, 200, 0)) if stat.S_ISREG(opened.st_mode) else ""
                if stamp == self._free:
                    return False, owner
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError as error:
                    return (True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None), owner
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                self._free = stamp
                return False, owner
            finally:
                os.close(descriptor)
        return None, ""


def is_run(path: Path) -> bool:
    """Return true if `path` looks like the directory of a training run, or of one that is starting."""
    return (path / RUN).is_file() or (path / METRICS).is_file() or start_file(path).is_file()


def wait_for_run(path: Path) -> None:
    """Return when `path` is the directory of a run."""
    while not is_run(path):
        time.sleep(_LOOK_SECONDS)


def _read_run_file(path: Path) -> dict[str, Any] | None:
    """Return the object of a JSON file of a run; None if the file does not exist.

    Raises:
        TreepackError: the file is a link, or damaged.
    """
    descriptor = open_regular(path)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_MAX_RECORD_BYTES + 1)
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); restore it from a copy") from error
    if not isinstance(record, dict) or len(content) > _MAX_RECORD_BYTES:
        raise TreepackError(f"{path}: is damaged (no object of a run); restore it from a copy")
    return record


def _printable(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    return text if text.isprintable() else ""
