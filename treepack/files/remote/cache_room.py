"""The folder of the cache: its place, its limit, the protection of copies in use, and the removal of old ones.

    pin(folder)           this process uses the copies in `folder`, a sub-folder of FOLDER/objects
    room(folder, size)    bytes for a new copy; folders that no running process uses make room, the oldest use first

`files.remote.cache` describes the files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treepack.errors import TreepackError

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_RESCAN_SHARE = 0.05  # of the limit: bytes copied by this process before it sums up the sizes of all copies again

# Open .pin files of this process by the folders that they protect, with the number of users.
_PINS: dict[Path, tuple[int, int]] = {}
# The bytes in use at the last sum, by folder of the cache, and those copied since.
_SUMS: dict[Path, tuple[int, int]] = {}


def cache_folder() -> Path:
    """Return the folder of the copies, which every process of this user shares; it is made if it does not exist.

    Raises:
        TreepackError: no folder can be written.
    """
    chosen = os.environ.get("TREEPACK_CACHE")
    if chosen:
        try:
            Path(chosen).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TreepackError(
                f"TREEPACK_CACHE is {chosen}, which cannot be made ({error.strerror}); choose another folder"
            ) from error
        return Path(chosen).absolute()
    for folder in _usual_folders():
        with suppress(OSError, RuntimeError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            # In a folder like /tmp somebody else may have made one of this name.
            is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_private and os.access(folder, os.W_OK | os.X_OK):
                return folder.absolute()
    raise TreepackError("copies of remote inputs need a folder that can be written; set TREEPACK_CACHE to one")


def cache_limit(folder: Path, used: int) -> int:
    """Return the maximum number of bytes in the cache `folder`, of which `used` are in use.

    Raises:
        TreepackError: TREEPACK_CACHE_SIZE is no number of bytes.
    """
    chosen = os.environ.get("TREEPACK_CACHE_SIZE")
    if not chosen:
        return (shutil.disk_usage(folder).free + used) // 2
    digits = chosen.upper().removesuffix("B")
    unit = _UNITS.get(digits[-1:], 1)
    try:
        return int(float(digits[:-1] if unit > 1 else digits) * unit)
    except ValueError:
        raise TreepackError(
            f"TREEPACK_CACHE_SIZE is {chosen!r}; expected a number of bytes such as 500M or 100G"
        ) from None


def _usual_folders() -> Iterator[Path]:
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen and Path(chosen).is_absolute():
        yield Path(chosen) / "treepack"
    with suppress(RuntimeError):  # no home
        yield Path.home() / ".cache" / "treepack"
    yield Path(tempfile.gettempdir()) / f"treepack-cache-{os.getuid()}"


def pin(folder: Path) -> None:
    """Protect a folder of copies from removal until this process ends or unpins it, and note that it is used."""
    descriptor, users = _PINS.get(folder, (-1, 0))
    while descriptor < 0:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # removed by another process at this moment
            descriptor = os.open(folder / ".pin", os.O_RDWR | os.O_CREAT, 0o600)
            _flock(descriptor, fcntl.LOCK_SH)
            if not _is_at(descriptor, folder / ".pin"):
                os.close(descriptor)
                descriptor = -1
    with suppress(OSError):
        os.utime(descriptor)
    _PINS[folder] = descriptor, users + 1


def unpin(folder: Path) -> None:
    descriptor, users = _PINS.pop(folder, (-1, 0))
    if users > 1:
        _PINS[folder] = descriptor, users - 1
    elif descriptor >= 0:
        os.close(descriptor)


@contextmanager
def room(folder: Path, size: int) -> Iterator[None]:
    """Make room for `size` bytes in `folder`, and reserve them until the block ends.

    Raises:
        TreepackError: they do not fit beside the copies in use.
    """
    reserved = folder / f".reserved-{secrets.token_hex(4)}"
    objects = folder.parent
    used, since = _SUMS.get(objects, (0, 0))
    limit = cache_limit(objects.parent, used + since)
    if objects in _SUMS and since + size <= _RESCAN_SHARE * limit and used + since + size <= limit:
        _SUMS[objects] = used, since + size  # of thousands of small files, not each sums up all others
        yield
        return
    with locked(objects.parent / ".room"):
        sizes = {each: _size(each) for each in objects.iterdir() if each.is_dir()}
        used = sum(sizes.values())
        limit = cache_limit(objects.parent, used)
        for each in sorted(sizes, key=_last_use):
            if used + size <= limit:
                break
            if each != folder and remove_unused(each):
                used -= sizes[each]
        if used + size > limit:
            raise TreepackError(
                f"the cache {objects.parent} needs {size:,} more bytes, and may have {limit:,}, of which {used:,} are "
                "in use; set TREEPACK_CACHE_SIZE to more, or TREEPACK_CACHE to a folder on a larger disk"
            )
        with reserved.open("wb") as file:
            file.truncate(size)  # a sparse file, which takes no room and counts as used
        _SUMS[objects] = used, size
    try:
        yield
    finally:
        reserved.unlink(missing_ok=True)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed at this moment
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _last_use(folder: Path) -> float:
    try:
        return (folder / ".pin").stat().st_mtime
    except OSError:
        return 0.0


def remove_unused(folder: Path) -> bool:
    """Remove a folder of copies unless a running process uses it; return True if it is gone."""
    try:
        descriptor = os.open(folder / ".pin", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return False
    try:
        if not _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        # Renamed first, so that nobody finds half of it. The name is no key, so it is removed later if that fails now.
        gone = folder.with_name(f"removed-{secrets.token_hex(8)}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of `file`; wait for it. On a file system without locks, hold nothing."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return operation & fcntl.LOCK_EX == 0
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
