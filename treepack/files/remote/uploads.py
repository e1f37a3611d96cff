"""Uploads from a folder of this machine to an address, while a long command writes files there.

    claim      ADDRESS/owner.json: this process owns the address; the newest one wins, and the one before stops
    push       the files of the folder that have changed: by a thread every minute, and when the caller asks for it
    send       one file, also under a condition
    fetch      one object back to this machine, checked by size and hash

A store has no locks, so owner.json is compared before every upload that other objects depend on. Files that could not
be uploaded stay in the folder, and the message names it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.remote import object_store
from treepack.files.remote.address import AnyPath
from treepack.files.remote.cache_room import locked
from treepack.files.remote.retries import patiently

_OWNER = "owner.json"
KEPT = ".kept"  # marks a folder whose files could not be uploaded
_INTERVAL = 60.0  # seconds from one upload of changed files to the next
_MAX_SHARE = 0.05  # of the time is spent on these uploads, because a store cannot append to a file

_log = logging.getLogger("treepack")


class FolderUploads:
    """Uploads from `folder` to the address `out`; after `claim` also by a thread. Methods raise TreepackError."""

    def __init__(self, folder: Path, out: AnyPath) -> None:
        assert not isinstance(out, Path)
        self.folder, self.out = folder, out
        self._owner = json.dumps(
            {"process": os.getpid(), "host": socket.gethostname(), "token": secrets.token_hex(8)}
        ).encode()
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of the last upload, by name
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, continued: str) -> None:
        """Become the owner, copy the object `continued` to the folder if there is one, and start the thread."""
        object_store.write(self.out / _OWNER, self._owner)
        content = object_store.read_object(self.out / continued)
        if content is not None:
            (self.folder / continued).write_bytes(content)
        self._thread = threading.Thread(target=self._run, name="treepack-uploads", daemon=True)
        self._thread.start()

    def check_owner(self) -> None:
        """Refuse to write a run that another process has continued; the message names that process."""
        content = object_store.read_object(self.out / _OWNER)
        if content == self._owner:
            return
        try:
            owner = json.loads(content or b"")
            name = f"process {owner['process']} on {owner['host']}"
        except (ValueError, KeyError, TypeError):
            name = "another process"
        raise TreepackError(f"{self.out}: {name} has continued or replaced this run; let only one process train there")

    def push(self) -> None:
        """Upload the files of the folder that have changed since the last call, if this process is the owner."""
        if self._thread is None:
            return
        with self._lock:
            changed = {name: state for name, state in self._files() if self._sent.get(name) != state}
            if changed:
                self.check_owner()
            for name, state in changed.items():
                object_store.upload(self.folder / name, self.out / name)
                self._sent[name] = state

    def send(self, local: Path, name: str, *, expected: str | None = object_store.ANY) -> None:
        """Upload one file under `name`; wait while the store does not answer."""
        patiently(lambda: object_store.upload(local, self.out / name, expected=expected))

    def list(self, name: str) -> Mapping[str, object_store.ObjectInfo]:
        """Return the objects below `name`, by their names there."""
        return object_store.list_objects(self.out / name)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an object, or None if it does not exist; wait while the store does not answer."""
        return patiently(lambda: object_store.read_object(self.out / name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, in this order."""
        object_store.delete(self.out / name for name in names)

    def fetch(self, name: str, local: Path, entry: Mapping[str, Any]) -> str | None:
        """Copy an object to the file `local`, once for all processes of this machine; return its fault, or None.

        Args:
            name: name of the object.
            local: the file, which appears whole.
            entry: its `bytes` and `sha256`, and its `name` for the message.

        Raises:
            OSError: the disk fails.
        """
        address = self.out / name
        with locked(local.with_name(f".{local.name}.lock")):
            if local.exists():  # another process has copied and checked it
                return None
            info = patiently(lambda: object_store.info(address))
            if info is None:
                return f"{entry['name']} is missing"
            if info.size != entry["bytes"]:
                return f"{entry['name']} has another size"
            partial = local.with_name(f".{local.name}.{secrets.token_hex(4)}")
            try:
                patiently(lambda: object_store.download(address, partial))
                with partial.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                        return f"{entry['name']} was altered"
                partial.rename(local)
            finally:
                partial.unlink(missing_ok=True)
        return None

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
            (self.folder / KEPT).touch()

    def leave(self) -> None:
        """Remove owner.json if this process is the owner."""
        if self._thread is not None and object_store.read_object(self.out / _OWNER) == self._owner:
            object_store.delete([self.out / _OWNER])

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
