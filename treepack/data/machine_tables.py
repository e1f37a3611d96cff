"""Small tables about a remote directory, which one process of a machine computes and all of its processes map.

    FOLDER/KEY-rows.arrow       an Arrow file, and the sha256 of these bytes in its last 32 bytes
    FOLDER/KEY-rows.lock        held by the process that computes the table; the others wait for it

KEY is the hash of the directory's manifest, so a table belongs to one content, at any address. A table is whole or
absent, and stays for the next run: a run that starts again reads nothing from the store. If it cannot be written, each
process has its own. The tables of the directories with the oldest use are removed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from treepack.files.remote.cache_room import open_locked

_MAX_TABLES = 64  # about 40 bytes per row of the directory
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class MachineTables:
    """The tables of the directory whose manifest has the hash `key`, in `folder`; each process has its own if None."""

    folder: Path | None
    key: str

    def get(self, name: str, compute: Callable[[], pa.Table]) -> pa.Table:
        """Return the table of that name; `compute` runs only if no process of this machine has done so before.

        The values of the table are in the file and not in the memory of this process.

        Raises:
            TreepackError: by `compute`.
        """
        if self.folder is None:
            return compute()
        path = self.folder / f"{self.key}-{name}.arrow"
        table = _read(path)
        if table is not None:
            return table
        lock = _lock(path.with_suffix(".lock"))
        try:
            table = _read(path)  # written by the process that had the lock before
            if table is None:
                table = compute()
                with suppress(OSError):  # a full disk
                    if lock is not None:
                        _remove_partial(path)
                    _write(path, table)
                    table = _read(path) or table
                    _remove_old(self.folder)
            return table
        finally:
            if lock is not None:
                os.close(lock)


def _read(path: Path) -> pa.Table | None:
    """Return the table in a file; None if the file is missing or damaged."""
    try:
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
        body = content.slice(0, max(0, content.size - _DIGEST))
        if hashlib.sha256(body).digest() != content.slice(body.size).to_pybytes():
            return None
        os.utime(path)
    except OSError:
        return None
    with pa.ipc.open_file(body) as reader:
        return reader.read_all()


def _write(path: Path, table: pa.Table) -> None:
    """Write a table, so that the file is whole or absent.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    body = sink.getvalue()
    # A unique name, because a file system without locks lets two processes write the table.
    temporary = path.with_suffix(f".{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(body)
            file.write(hashlib.sha256(body).digest())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _lock(path: Path) -> int | None:
    """Wait for the lock of `path`, and return its descriptor; None if the folder cannot be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_locked(path, wait=True)
    return None


def _remove_partial(path: Path) -> None:
    """Remove the partial tables of processes that were killed; to be called under the lock."""
    for partial in path.parent.glob(f"{path.stem}.*.partial"):
        partial.unlink(missing_ok=True)


def _remove_old(folder: Path) -> None:
    """Remove the tables with the oldest use."""
    tables = sorted(folder.glob("*.arrow"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in tables[_MAX_TABLES:]:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
