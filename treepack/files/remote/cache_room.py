"""The folder of the cache: its path, its one limit, the protection of copies in use, and the removal of others.

    FOLDER/objects/KEY/           copies of inputs; a process that uses them holds a lock of .pin in the folder
    FOLDER/parts/SHA256.parquet   the copy of a part; a process that has it open can read it after its removal
    FOLDER/parts/SHA256.partial   a part on its way; the process that downloads it holds its lock
    FOLDER/.room                  locked while old copies are removed to make room

    pin(folder)               this process uses the copies in `folder`
    room(folder, size)        bytes for new copies in `folder` until the block ends; old copies make room, or an error
    make_room(FOLDER, size)   the same for one file, while the caller holds the lock of .room; False if it has no room

The copies with the oldest use go first. `files.remote.cache` and `files.remote.part_copies` make the copies.
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

OBJECTS, PARTS, ROOM = "objects", "parts", ".room"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_RESCAN_SHARE = 0.05  # of the limit: bytes copied by this process before it sums up the sizes of all copies again

# Open .pin files of this process by the folders that they protect, with the number of users.
_PINS: dict[Path, tuple[int, int]] = {}
# The bytes in use at the last sum, by folder of the cache, and the bytes copied since.
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
        TreepackError: TREEPACK_CACHE_SIZE is not a number of bytes.
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
            f"TREEPACK_CACHE_SIZE or --cache-size is {chosen!r}; expected a number of bytes such as 500M or 100G"
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
            descriptor = os.open(folder / ".pin", os.O_RDWR | os.O_CREAT, 0o666)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not is_at(descriptor, folder / ".pin"):
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
    """Make room for `size` bytes in `folder`, a folder of `OBJECTS`, and reserve them until the block ends.

    Raises:
        TreepackError: they do not fit beside the copies in use.
    """
    cache = folder.parent.parent
    used, since = _SUMS.get(cache, (0, 0))
    limit = cache_limit(cache, used + since)
    if cache in _SUMS and since + size <= _RESCAN_SHARE * limit and used + since + size <= limit:
        _SUMS[cache] = used, since + size  # of thousands of small files, not each sums up all others
        yield
        return
    reserved = folder / f".reserved-{secrets.token_hex(4)}"
    with locked(cache / ROOM):
        limit = cache_limit(cache, used_size(cache))
        used, fits = make_room(cache, size, limit=limit, needed=folder)
        if not fits:
            raise TreepackError(
                f"the cache {cache} needs {size:,} more bytes, and may have {limit:,}, of which {used:,} are "
                "in use; set TREEPACK_CACHE_SIZE to more, or TREEPACK_CACHE to a folder on a larger disk"
            )
        with reserved.open("wb") as file:
            file.truncate(size)  # a sparse file, which takes no room and counts as used
        _SUMS[cache] = used, size
    try:
        yield
    finally:
        reserved.unlink(missing_ok=True)


def make_room(cache: Path, new: int, *, limit: int, needed: Path | None = None, spare: int = 0) -> tuple[int, bool]:
    """Remove the copies with the oldest use until `new` bytes fit; the caller holds the lock of `ROOM`.

    Args:
        cache: the folder of the cache.
        new: bytes of the new copy.
        limit: maximum bytes of all copies.
        needed: a folder of copies that stays.
        spare: bytes of the disk that stay free besides.

    Returns:
        The bytes of the copies that are left, and True if the new copy has room.
    """
    entries = sorted(_entries(cache), key=lambda entry: entry[2])
    used = sum(size for _, size, _ in entries)
    lacking = used + new - limit
    if spare:
        lacking = max(lacking, new + spare - shutil.disk_usage(cache).free)
    for path, size, _ in entries:
        if lacking <= 0:
            break
        remove = remove_unused if path.is_dir() else _remove_part
        if path != needed and remove(path):
            used, lacking = used - size, lacking - size
    _SUMS.pop(cache, None)
    return used, lacking <= 0


def protected_size(cache: Path) -> int:
    """Return the bytes of the copies in `cache` that running processes use; parts do not count."""
    return sum(_size(each) for each in (cache / OBJECTS).glob("*") if _is_used(each))


def used_size(cache: Path) -> int:
    """Return the bytes of all copies in `cache`."""
    return sum(size for _, size, _ in _entries(cache))


def _entries(cache: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield path, bytes and time of last use of every folder of copies and of every part."""
    for path in [*(cache / OBJECTS).glob("*"), *(cache / PARTS).glob("*.par*")]:
        with suppress(OSError):  # removed by another process at this moment
            status = path.stat()
            yield (path, _size(path), _last_use(path)) if path.is_dir() else (path, status.st_size, status.st_mtime)


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
        descriptor = open_locked(folder / ".pin", needs_locks=True)
    except OSError:
        return False
    if descriptor is None:
        return False
    try:
        # Renamed first, so that no process finds half of it; a later call removes the rest under the new name.
        gone = folder.with_name(f"removed-{secrets.token_hex(8)}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _remove_part(path: Path) -> bool:
    """Remove a part, or the remains of a download whose process died; return False for a download that runs."""
    if path.suffix == ".partial":
        descriptor = open_locked(path)
        if descriptor is None:
            return False
        os.close(descriptor)
    path.unlink(missing_ok=True)
    return True


def _is_used(folder: Path) -> bool:
    with suppress(OSError):
        descriptor = open_locked(folder / ".pin", needs_locks=True)
        if descriptor is None:
            return True
        os.close(descriptor)
    return False


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of `file`; wait for it. On a file system without locks, hold nothing."""
    descriptor = open_locked(file, wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        os.close(descriptor)


def open_locked(file: Path, *, wait: bool = False, needs_locks: bool = False) -> int | None:
    """Open or make `file` and lock it until it is closed; return its descriptor.

    Args:
        file: the file.
        wait: wait for a process or thread that holds the lock; otherwise return None.
        needs_locks: return None on a file system without locks; otherwise the open file has no lock there.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if needs_locks or isinstance(error, BlockingIOError):
            os.close(descriptor)
            return None
    return descriptor


def wait_for_lock(file: Path) -> None:
    """Wait until no process or thread holds the lock of `file`.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    descriptor = os.open(file, os.O_RDWR)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if the open file is still the one with the name `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
