"""Local copies of the parts of a remote packed directory, shared by all processes of a machine.

    FOLDER/SHA256.parquet             a whole part, checked against the manifest while it was downloaded
    FOLDER/SHA256.partial             a part on its way; the process that downloads it holds its lock

    find(name)  --> path of the copy, or None; waits if a process of this machine is downloading it
    want(name)  --> a thread downloads the part soon; the reader does not wait and reads by range meanwhile
    expect(...) --> the same for the parts of the rows that come next
    claim(...)  --> the parts that this machine will read, by default all of the directory

The name of a copy is the hash of its content, so several data sets and runs share a folder. If a copy needs room, the
copies with the oldest use are removed; a process that has one open can still read it. Parts that together
fit into the limit are all copied. Otherwise a part is copied when at least half of its row groups were read by range
or come soon, because rows in random order would download whole parts for single rows. A copy never has to exist: if
the disk is full or the store does not answer, the requests of the reader meet the same fault.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from treepack.errors import TreepackError
from treepack.files.remote.cache_room import (
    PARTS,
    ROOM,
    cache_folder,
    cache_limit,
    is_at,
    locked,
    make_room,
    open_locked,
    protected_size,
    used_size,
    wait_for_lock,
)
from treepack.files.remote.location import DirectoryLocation

_log = logging.getLogger("treepack")

_THREADS = 4  # one stream of an object store carries 50 to 100 MB/s
_BLOCK = 1 << 20
_SPARE = 1 << 30  # bytes of the disk that are left free
_HALF = 0.5


class _PartEntry(TypedDict):
    """A part of a manifest: name, size and sha256; manifests have more entries."""

    name: str
    bytes: int
    sha256: str


class _AlteredError(TreepackError):
    """A part does not have the hash that the manifest lists."""


class PartCopies:
    """Copies of the parts of a directory; they can be pickled and used after a fork, in which threads start again."""

    def __init__(
        self, folder: str | Path | None, limit: int | None, location: DirectoryLocation, entries: Iterable[_PartEntry]
    ) -> None:
        """Make the folder of the copies.

        Args:
            folder: a folder for copies; by default `cache_room.cache_folder`.
            limit: maximum bytes of all copies in it, also of other inputs; by default `cache_room.cache_limit`.
            location: the remote directory.
            entries: its parts.

        Raises:
            TreepackError: the folder cannot be written.
        """
        self.cache = (cache_folder() if folder is None else Path(folder)).absolute()
        self.folder = self.cache / PARTS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            used = used_size(self.cache)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise TreepackError(
                f"{self.folder}: cannot be written ({error.strerror or error}), so copies of remote parts have no "
                "place; choose another --cache"
            ) from error
        self.limit, self._location = cache_limit(self.cache, used) if limit is None else limit, location
        self._entries = {entry["name"]: entry for entry in entries}
        self.claim(self._entries)
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without threads."""
        kept = ("cache", "folder", "limit", "_location", "_entries", "_claimed", "_room", "_fits")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Start without threads."""
        self.__dict__.update(state)
        self._start()

    def claim(self, names: Iterable[str]) -> None:
        """Take into account that this machine reads only these parts."""
        self._claimed = sum(self._entries[name]["bytes"] for name in names)
        self._measure_room()

    def _measure_room(self) -> None:
        """Find out how many bytes of the limit copies of other inputs leave for parts, and if the claimed parts fit."""
        self._room = self.limit - protected_size(self.cache)
        self._fits = self._claimed <= self._room

    def find(self, name: str) -> Path | None:
        """Return the path of the copy of a part, or None; wait for a download that has started.

        Raises:
            AlteredError: a part was altered in the store; any part, because rows of it may have been read by range.
        """
        self._own()
        if self._faults:
            raise self._faults[0]
        if self._is_whole(name):
            return self._use(name)
        with suppress(FileNotFoundError):
            wait_for_lock(self._path(name, ".partial"))
        return self._use(name) if self._is_whole(name) else None

    def want(self, name: str, share: float) -> None:
        """Download a part soon, of which the `share` (0 to 1) was just read by range, if that is worth it."""
        self._own()
        self._rented[name] += share
        if self._fits or self._rented[name] >= _HALF:
            with self._changed:
                if name not in self._queue and name not in self._busy:
                    self._queue.appendleft(name)
            self._work()

    def expect(self, shares: Mapping[str, float]) -> None:
        """Download the parts of the rows that come next, in this order; `shares` (0 to 1) of them are needed."""
        self._own()
        self._measure_room()
        room, soon = self._room // 2, list[str]()
        for name, share in shares.items():
            room -= self._entries[name]["bytes"]
            if room < 0:  # more would displace the parts in use
                break
            if self._is_whole(name):
                self._use(name)  # so that it is not removed before it is read
            elif self._fits or share >= _HALF:
                soon.append(name)
        with self._changed:
            self._queue.clear()
            self._queue.extend(name for name in soon if name not in self._busy)
        self._work()

    def drop(self, name: str) -> None:
        """Remove a copy that cannot be read."""
        self._path(name).unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until no download is queued or running; for tests."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._busy)

    def _start(self) -> None:
        self._process = os.getpid()
        # pyarrow aborts the process if a thread of it is in a read when the interpreter ends.
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._stop, self._threads)
        self._changed = threading.Condition()
        self._queue: deque[str] = deque()
        self._busy: set[str] = set()
        self._num_threads = 0
        self._rented: defaultdict[str, float] = defaultdict(float)  # share read by range since it was copied
        self._faults: list[_AlteredError] = []

    def _own(self) -> None:
        """Forget the threads and connections of the parent after a fork."""
        if self._process != os.getpid():
            self._location = self._location.fresh()
            self._start()

    def _path(self, name: str, suffix: str = ".parquet") -> Path:
        return self.folder / f"{self._entries[name]['sha256']}{suffix}"

    def _is_whole(self, name: str) -> bool:
        try:
            return self._path(name).stat().st_size == self._entries[name]["bytes"]
        except OSError:
            return False

    def _use(self, name: str) -> Path:
        path = self._path(name)
        with suppress(OSError):  # removed by another process at this moment; opening it fails then
            os.utime(path)
        return path

    def _work(self) -> None:
        """Start another thread if there is more to do than threads."""
        with self._changed:
            for _ in range(min(len(self._queue), _THREADS - self._num_threads)):
                self._num_threads += 1
                # Daemons, because otherwise the interpreter would wait for all downloads before it calls `_end`.
                thread = threading.Thread(target=self._run, name="treepack-parts", daemon=True)
                self._threads[:] = [each for each in self._threads if each.is_alive()] + [thread]
                thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                name = self._queue.popleft() if self._queue and not self._stop.is_set() else None
                if name is None:
                    self._num_threads -= 1
                    return
                self._busy.add(name)
            try:
                self._fetch(name)
            except _AlteredError as error:
                self._faults.append(error)
            except Exception as error:  # clients raise exceptions of their own; a reader by range meets the same fault
                _log.info("%s: was not copied to %s (%s)", self._location.file_name(name), self.folder, error)
            with self._changed:
                self._busy.discard(name)
                self._changed.notify_all()

    def _fetch(self, name: str) -> None:
        """Download a part, unless another process of this machine does.

        Raises:
            AlteredError: the part was altered.
            Exception: the store does not answer, or the disk fails.
        """
        entry, partial = self._entries[name], self._path(name, ".partial")
        if self._is_whole(name) or entry["bytes"] > self.limit:
            return
        descriptor = open_locked(partial)
        if descriptor is None:
            return
        try:
            # Both may be false after another process had the lock: it renamed the file, or a copy was there before.
            if not is_at(descriptor, partial) or self._is_whole(name) or not self._reserve(descriptor, entry):
                return
            # Twice, because a connection can break without an error.
            if not (self._download(name, descriptor) or self._download(name, descriptor)):
                if self._stop.is_set():
                    return
                raise _AlteredError(
                    f"{self._location.file_name(name)}: was altered since it was written (its sha256 differs); "
                    "pack the trie again"
                )
            partial.replace(self._path(name))
            self._rented[name] = 0
        finally:
            with suppress(OSError):
                if is_at(descriptor, partial):
                    partial.unlink()
            os.close(descriptor)

    def _download(self, name: str, descriptor: int) -> bool:
        """Write the part to an open file of its size, and return True if it is the one of the manifest."""
        entry, digest, offset = self._entries[name], hashlib.sha256(), 0
        with self._location.open_stream(name) as stream:
            while (block := stream.read(_BLOCK)) and not self._stop.is_set():
                digest.update(block)
                if offset + len(block) > entry["bytes"]:
                    return False
                offset += os.pwrite(descriptor, block, offset)
        return offset == entry["bytes"] and digest.hexdigest() == entry["sha256"]

    def _reserve(self, descriptor: int, entry: _PartEntry) -> bool:
        """Give the open file the size of the part, and remove old copies for it; False if it does not fit."""
        with locked(self.cache / ROOM):
            _, fits = make_room(self.cache, entry["bytes"], limit=self.limit, spare=_SPARE)
            if fits:
                os.ftruncate(descriptor, entry["bytes"])  # from now on it counts as used
            return fits


def _end(stop: threading.Event, threads: list[threading.Thread]) -> None:
    """Stop the downloads of a cache that is no longer used, and at the end of the process."""
    stop.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
