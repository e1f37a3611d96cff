"""Local copies of remote inputs, through which every reader works on files of this machine.

    local_copy("s3://bucket/trie") --> FOLDER/objects/0123456789abcdef/s3/bucket/trie     a Path
    a local path                   --> itself

    FOLDER/objects/KEY/            one object, or the objects of one directory; KEY depends on address and content
        s3/bucket/trie/...         the copies; each appears whole
        .pin                       locked by every process that uses the copies; its time is that of the last use
        .download                  locked by the process that downloads; the others wait

Parts of packed directories have copies of their own in the same folder, see `files.remote.part_copies`. One limit holds
for all copies, see `files.remote.cache_room`.

The folder is TREEPACK_CACHE, else treepack/ in XDG_CACHE_HOME or ~/.cache, or else a private folder in TMPDIR. Its size
is at most TREEPACK_CACHE_SIZE, by default half of the disk's space that is free or used by it. To make room, the copies
with the oldest use are removed, except copies that a running process uses.

The copies have paths of this machine, and messages should name addresses: `addresses_in` replaces one by the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.remote import object_store
from treepack.files.remote.address import SCHEMES, AnyPath, RemotePath
from treepack.files.remote.cache_room import OBJECTS, cache_folder, locked, pin, room, unpin
from treepack.files.remote.object_store import MissingError, ObjectInfo

_MANIFEST = "manifest.json"
_COPY = re.compile(rf"/[0-9a-f]{{16}}/({'|'.join(SCHEMES)})/")
# recent_copy protects at least this many files from removal, and more while they are small. Each has an open file.
_THREADS = 8  # downloads side by side
_RECENT_FILES, _RECENT_BYTES, _MOST_FILES = 16, 4 << 30, 256
# Sizes and folders of the files of `recent_copy` in this process, the last one at the end.
_RECENT: deque[tuple[int, Path]] = deque()


def local_copy(path: AnyPath) -> Path:
    """Return a local path with the content of `path`: a local path itself, or a copy of an object or a directory.

    If a directory has a manifest, the copy has the files that it lists, else all objects below it. The copy stays as
    long as this process runs.

    Raises:
        TreepackError: there is no such object, the store cannot be reached, or the copy needs more room than there is.
    """
    if isinstance(path, Path):
        return path
    content = object_store.read_object(path / _MANIFEST)
    if content is not None:
        return _directory_of_manifest(path, content)
    entry = object_store.info(path)
    if entry is not None:
        return _pinned(path, entry)
    objects = object_store.list_objects(path)
    if not objects:
        raise TreepackError(f"{path}: no such object and no prefix of one; check the address")
    copies_below(path, objects)
    return _path(path, _key_of(path, objects))


@contextmanager
def borrowed_copy(path: AnyPath) -> Iterator[Path]:
    """Yield a local path with the content of the object `path`; it may be removed for others after the block.

    Raises:
        TreepackError: see `local_copy`.
    """
    if isinstance(path, Path):
        yield path
        return
    entry = _present(path)
    local = _pinned(path, entry)
    try:
        yield local
    finally:
        unpin(_folder(_key(path, entry.version)))


@contextmanager
def borrowed_directory(path: AnyPath) -> Iterator[Path]:
    """Yield a local path with the content of a directory; a copy may be removed for others after the block.

    Raises:
        TreepackError: see `local_copy`.
    """
    local = local_copy(path)
    try:
        yield local
    finally:
        if not isinstance(path, Path):
            unpin(_folder(local.relative_to(_objects()).parts[0]))


def copies_below(prefix: AnyPath, objects: Mapping[str, ObjectInfo]) -> dict[str, Path]:
    """Return the paths of copies of objects below a prefix, by their names; they are in one folder and stay.

    Raises:
        TreepackError: see `local_copy`.
    """
    assert not isinstance(prefix, Path)
    key = _key_of(prefix, objects)
    _copy_all(key, [_WantedObject(prefix / name, entry) for name, entry in objects.items()])
    return {name: _path(prefix / name, key) for name in objects}


def recent_copy(path: AnyPath) -> Path:
    """Return a local path with the content of the object `path`, which is read soon, here or in a child process.

    Of many such files one by one, only the last ones stay for sure, so the inputs may be larger than the cache.

    Raises:
        TreepackError: see `local_copy`.
    """
    if isinstance(path, Path):
        return path
    entry = _present(path)
    local = _pinned(path, entry)
    _RECENT.append((entry.size, _folder(_key(path, entry.version))))
    while len(_RECENT) > _MOST_FILES or (
        len(_RECENT) > _RECENT_FILES and sum(size for size, _ in _RECENT) > _RECENT_BYTES
    ):
        unpin(_RECENT.popleft()[1])
    return local


def addresses_in(text: str) -> str:
    """Return `text`, such as a message, with the addresses of cached copies instead of their paths."""
    if _COPY.search(text) is None:  # nearly always; the folder need not exist then
        return text
    return re.sub(re.escape(str(_objects())) + _COPY.pattern, r"\1://", text)


@contextmanager
def naming_addresses() -> Iterator[None]:
    """Name addresses instead of cached copies in the message of a TreepackError; also a decorator."""
    try:
        yield
    except TreepackError as error:
        message = addresses_in(str(error))
        if message == str(error):
            raise
        raise TreepackError(message) from error


def _objects() -> Path:
    return cache_folder() / OBJECTS


def _key(path: RemotePath, version: str) -> str:
    # Equal addresses of two endpoints are two objects.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    return hashlib.sha256(f"{endpoint}\0{path}\0{version}".encode()).hexdigest()[:16]


def _folder(key: str) -> Path:
    return _objects() / key


def _path(path: RemotePath, key: str) -> Path:
    # Keys of objects may contain "..", and parts of no characters: a//../b -> a/%/%2E%2E/b
    escaped = {"": "%", ".": "%2E", "..": "%2E%2E"}
    parts = (part.replace("%", "%25") for part in path.path.split("/"))
    return _folder(key).joinpath(path.scheme, *(escaped.get(part, part) for part in parts))


def _key_of(prefix: RemotePath, objects: Mapping[str, ObjectInfo]) -> str:
    return _key(prefix, json.dumps({name: entry.version for name, entry in objects.items()}))


def _directory_of_manifest(path: RemotePath, content: bytes) -> Path:
    """Copy the manifest with this content and the files that it lists; a damaged manifest is copied alone."""
    key = _key(path, hashlib.sha256(content).hexdigest())
    manifest = _WantedObject(path / _MANIFEST, ObjectInfo(len(content), ""), content=content)
    parts = [
        _WantedObject(path / name, ObjectInfo(size, ""), sha256=digest) for name, size, digest in _files_of(content)
    ]
    _copy_all(key, [manifest, *parts])
    return _path(path, key)


def _files_of(content: bytes) -> list[tuple[str, int, str]]:
    """Return name, size and sha256 of the files of a manifest; none if it is damaged, which its reader reports."""
    try:
        files = [(entry["name"], entry["bytes"], entry["sha256"]) for entry in json.loads(content)["files"]]
    except (ValueError, KeyError, TypeError):
        return []
    return [
        (name, size, digest)
        for name, size, digest in files
        if isinstance(name, str) and "/" not in name and isinstance(size, int) and isinstance(digest, str)
    ]


def _present(path: RemotePath) -> ObjectInfo:
    entry = object_store.info(path)
    if entry is None:
        raise TreepackError(f"{path}: no such object; check the address")
    return entry


def _pinned(path: RemotePath, entry: ObjectInfo) -> Path:
    key = _key(path, entry.version)
    _copy_all(key, [_WantedObject(path, entry, is_checked=True)])
    return _path(path, key)


@dataclass(frozen=True, slots=True)
class _WantedObject:
    """An object to copy, of the size of `entry`.

    `content` are its bytes if they are known, `sha256` their hash. With `is_checked` its version must be that of
    `entry` after the download too.
    """

    path: RemotePath
    entry: ObjectInfo
    sha256: str | None = None
    content: bytes | None = None
    is_checked: bool = False


def _copy_all(key: str, objects: Sequence[_WantedObject]) -> None:
    """Make copies of objects in the folder of `key`, which is protected from removal from now on."""
    folder = _folder(key)
    try:
        pin(folder)
        if all(_is_there(each, key) for each in objects):
            return
        with locked(folder / ".download"):
            missing = [each for each in objects if not _is_there(each, key)]  # another process may have copied some
            for stale in folder.rglob(".*.partial"):  # of a process that was killed
                stale.unlink(missing_ok=True)
            with room(folder, sum(each.entry.size for each in missing)), ThreadPoolExecutor(_THREADS) as pool:
                for _ in pool.map(lambda each: _fetch(each, _path(each.path, key)), missing):
                    pass  # raises the first exception
    except OSError as error:
        raise TreepackError(
            f"{objects[0].path}: cannot be copied to {cache_folder()} ({error.strerror or error}); free some space "
            "there, or set TREEPACK_CACHE to another folder"
        ) from error


def _fetch(wanted: _WantedObject, local: Path) -> None:
    """Copy an object to the file `local`, which appears whole.

    Raises:
        TreepackError: it was replaced during the download, or its size or sha256 is another than the expected one.
    """
    local.parent.mkdir(parents=True, exist_ok=True)
    partial = local.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        if wanted.content is not None:
            partial.write_bytes(wanted.content)
        else:
            _download(wanted, partial)
            _check(wanted, partial)
        partial.replace(local)
    finally:
        partial.unlink(missing_ok=True)


def _download(wanted: _WantedObject, partial: Path) -> None:
    try:
        object_store.download(wanted.path, partial)
    except MissingError as error:
        if wanted.sha256 is None:
            raise
        path = wanted.path
        raise TreepackError(
            f"{path}: is missing; if {path.parent} is being replaced, run the command again, else write it again"
        ) from error


def _check(wanted: _WantedObject, partial: Path) -> None:
    path, size = wanted.path, partial.stat().st_size
    if wanted.sha256 is None:
        if size != wanted.entry.size or (wanted.is_checked and object_store.info(path) != wanted.entry):
            raise TreepackError(f"{path}: was replaced while it was read; run the command again")
        return
    if size != wanted.entry.size:
        raise TreepackError(
            f"{path}: has {size} bytes, its manifest lists {wanted.entry.size}; write {path.parent} again"
        )
    with partial.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != wanted.sha256:
            raise TreepackError(f"{path}: was altered since it was written (its sha256 differs); write it again")


def _is_there(wanted: _WantedObject, key: str) -> bool:
    try:
        return _path(wanted.path, key).stat().st_size == wanted.entry.size
    except OSError:
        return False
