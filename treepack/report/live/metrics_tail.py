"""The new lines of a metrics file that another process appends to.

    MetricsTail(path).read_new() --> record, record, ...      since the last call
                                     None, record, ...        the file was replaced: forget everything before

A resumed run removes the steps after its checkpoint by a new file of the same name. A last line without its end is left
for the next call. A line that is not a record is counted and left out; memory is bounded, however long a line is.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from treepack.errors import TreepackError

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 20  # a line of the trainer has less than 2 kB


class MetricsTail:
    """A reader of a metrics file; `num_damaged` lines were left out, the first of them is line `first_damaged`."""

    def __init__(self, path: Path) -> None:
        """Read `path`, which may not exist yet."""
        self._path = path
        self._descriptor: int | None = None
        self._start()

    def _start(self) -> None:
        self._rest, self._skipping, self._number, self._last = b"", False, 0, 0
        self.num_damaged, self.first_damaged = 0, 0

    def read_new(self) -> Iterator[dict[str, Any] | None]:
        """Yield the records that are new since the last call, and None before them if the file was replaced.

        Raises:
            TreepackError: the file is a link, or not a regular file, or the disk fails.
        """
        if self._is_replaced():
            self.close()
            self._start()
            yield None
        if self._descriptor is None:
            self._descriptor = open_regular(self._path)
        if self._descriptor is None:
            return
        try:
            while chunk := os.read(self._descriptor, CHUNK_BYTES):
                yield from self._records(chunk)
        except OSError as error:
            raise TreepackError(f"{self._path}: cannot be read ({error.strerror}); check its disk") from error

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_replaced(self) -> bool:
        """Return true if the open file is not the one of this name any more, or has become shorter."""
        if self._descriptor is None:
            return False
        opened = os.fstat(self._descriptor)
        try:
            now = self._path.lstat()
        except OSError:
            return True
        # An inode number is not used again while its file is open.
        same = (opened.st_dev, opened.st_ino) == (now.st_dev, now.st_ino)
        return not same or now.st_size < os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def _records(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._number += 1
            if self._skipping:  # the end of a line that was too long
                self._skipping = False
                continue
            record = None if len(line) > MAX_LINE_BYTES else _parse(line)
            if record is None or record["step"] <= self._last:
                self._count_damaged(self._number)
                continue
            self._last = record["step"]
            yield record
        if len(rest) > MAX_LINE_BYTES:
            if not self._skipping:
                self._count_damaged(self._number + 1)
            self._skipping, rest = True, b""
        self._rest = rest

    def _count_damaged(self, number: int) -> None:
        self.first_damaged = self.first_damaged or number
        self.num_damaged += 1


def open_regular(path: Path) -> int | None:
    """Open a regular file of a run directory to read, and return its descriptor; None if it does not exist.

    Raises:
        TreepackError: the file is a link, which may lead outside the run, or no file, or cannot be read.
    """
    try:
        # A pipe would block without O_NONBLOCK.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else error.strerror
        raise TreepackError(f"{path}: cannot be read ({reason}); expected a regular file of a training run") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TreepackError(f"{path}: is not a regular file; expected the file of a training run")
    return descriptor


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is none."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = json.loads(line)  # takes NaN, Infinity and lone surrogates, which other writers may have left
        except (ValueError, RecursionError):
            return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and 1 <= step < 1 << 53
    return record if is_step else None
