"""The lock of an output: only one process at a time writes it, and the lock ends with its process.

    with lock(out):     out/ belongs to this process until the block ends, even if out does not exist yet
        ...             a second `lock(out)` anywhere raises TreepackError at once

The lock is `flock` on the hidden file `.NAME.lock` beside the output. The kernel releases it when its process ends, by
`kill -9` too. So no process ids are compared, which have no meaning in another container or on another machine.
Containers and machines with one shared disk exclude each other if the file system supports flock (NFS, CephFS and GPFS
do; Lustre with the mount option flock).

The file is removed at the end. A process may have opened it just before:

    A locks inode 1      B opens inode 1      A removes the file      C makes inode 2 and locks it
    B gets the lock of inode 1, compares it with the file of that name, finds inode 2 and tries again: refused
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath, as_output
from treepack.files.remote.cache_room import is_at
from treepack.files.remote.remote_output import observed

# Errors of file systems without flock; NFS raises EBADF for the lock of a directory.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}

# Lock files of the blocks that run now, so that a command can lock its output and then call a function that does so.
_OWNED: ContextVar[frozenset[Path]] = ContextVar("owned", default=frozenset())


@contextmanager
def lock(out: AnyPath, *, option: str = "--out") -> Iterator[bool]:
    """Hold the lock of the output `out`, which may be a file, a directory, or not exist yet.

    A store has no locks. There the state of `out` is observed instead, and the last write of the block depends on it.

    Missing parents of `out` are made, and removed again if they are empty at the end. A block inside a block of the
    same output and thread shares its lock.

    Args:
        out: the output; all links to it have one lock.
        option: name of the option for `out`, for messages.

    Yields:
        False if the file system has no locks. Then nothing keeps others away.

    Raises:
        TreepackError: another process holds the lock, its folder cannot be written, or its store cannot be reached.
    """
    out = as_output(out, option=option)
    if not isinstance(out, Path):
        with observed(out):
            yield False
        return
    out = out.resolve()
    file = out.parent / f".{out.name}.lock"
    if file in _OWNED.get():
        yield True
        return
    new_folders = [folder for folder in out.parents if not folder.exists()]  # the deepest first
    descriptor: int | None = None
    try:
        try:
            descriptor = _acquire(file, out, option)
        except OSError as error:
            raise TreepackError(
                f"{out}: cannot be written ({error.strerror or error}); choose another {option}"
            ) from error
        if descriptor is not None:
            _OWNED.set(_OWNED.get() | {file})
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _OWNED.set(_OWNED.get() - {file})
            _release(descriptor, file)
        for folder in new_folders:
            with suppress(OSError):  # not empty, which is the usual case
                folder.rmdir()


def _acquire(file: Path, out: Path, option: str) -> int | None:
    """Return the descriptor that holds the lock, or None if the file system has no locks."""
    while True:
        try:
            descriptor = _open(file, out)
        except FileNotFoundError:
            descriptor = _open(file, out)  # a command that failed has just removed the empty folders that it had made
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read_owner(descriptor)
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise TreepackError(
                    f"{out}: is being written by {owner}; wait until it ends, or choose another {option}"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            with suppress(OSError):
                file.unlink()
            return None
        if is_at(descriptor, file) or is_at(descriptor, out):
            _write_owner(descriptor)
            return descriptor
        os.close(descriptor)  # the owner before has removed the file since it was opened


def _open(file: Path, out: Path) -> int:
    """Open the lock file, or the directory `out` itself if the folder around it cannot be written."""
    with suppress(FileExistsError):  # a parent is a file; the error of opening below is clearer
        out.parent.mkdir(parents=True, exist_ok=True)
    try:
        # No link is followed: in a folder like /tmp somebody else may have made one to a file of ours.
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno in _NOT_WRITABLE and out.is_dir():
            return os.open(out, os.O_RDONLY)  # a run directory that is a mount point
        raise


def _release(descriptor: int, file: Path) -> None:
    """Remove the lock file and end the lock."""
    with suppress(OSError):
        if is_at(descriptor, file):
            file.unlink()  # before the lock ends, so that no other process has it yet
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still have the descriptor, and with it the lock
    os.close(descriptor)


def _write_owner(descriptor: int) -> None:
    # Only for messages, and absent on a full disk.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _read_owner(descriptor: int) -> str:
    with suppress(OSError):
        name = os.pread(descriptor, 200, 0).decode("utf-8", "replace")
        if name and name.isprintable():
            return name
    return "another treepack process"
