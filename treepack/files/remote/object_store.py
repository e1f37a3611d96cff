"""Objects in a store: read, list, download, upload and delete them, with one interface to all client libraries.

    s3:// by s3fs     gs:// by gcsfs     hf:// by huggingface_hub, read only     all of them filesystems of fsspec

These libraries find the credentials, endpoints and regions (AWS_PROFILE, AWS_ENDPOINT_URL, gcloud's login,
HF_TOKEN, ...). They repeat a request that failed for the moment, with growing pauses. Every exception of theirs becomes
one sentence here.

A write may have a condition, so that of two writers one wins and the other gets `ExistsError`:

    expected=ANY        replace whatever is there
    expected=None       only if the object does not exist    If-None-Match: *  of S3, ifGenerationMatch=0 of GCS
    expected="v1"       only if its version is still "v1"    If-Match of S3; elsewhere compared just before
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from treepack.errors import TreepackError, first_line, install_hint
from treepack.files.remote.address import RemotePath

_T = TypeVar("_T")

ANY: Final = "*"
"""The condition of a write that replaces whatever is there."""

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "hf": ("huggingface_hub", "train")}
_LOGGERS = ("fsspec", "gcsfs", "s3fs")
_ENVIRONMENT = ("AWS_", "GOOGLE_", "GCSFS_", "STORAGE_EMULATOR_HOST", "HF_")  # read by the clients when they start
_WILDCARDS = frozenset("*?[")
_WRITER = "treepack-writer"
_CONFLICTS = {"PreconditionFailed", "412"}
_COLLISIONS = {"ConditionalRequestConflict", "409"}  # another conditional write of the object runs at this moment
_COLLISION_ATTEMPTS = 5
_DENIED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "ExpiredToken", "InvalidToken", "403", "401"}
_BUSY = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "500", "502", "503", "504"}
# Parts of the names of exceptions for a failing network. Their classes are in libraries that only one scheme imports.
_NETWORK = (
    "Connect",
    "Timeout",
    "HTTPClient",
    "Endpoint",
    "ClientOSError",
    "IncompleteRead",
    "Payload",
    "Disconnected",
)


class ExistsError(TreepackError):
    """The object of a conditional write exists, or has changed since it was looked at."""


class MissingError(TreepackError):
    """There is no such object."""


class UnavailableError(TreepackError):
    """The store does not answer at the moment; the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The size of an object in bytes, and its version, which changes when the object is replaced."""

    size: int
    version: str


def read_object(path: RemotePath) -> bytes | None:
    """Return the bytes of an object, or None if it does not exist.

    Raises:
        TreepackError: the store cannot be reached, or denies the access.
    """
    return _found(path, lambda store: bytes(store.cat_file(path.path)))


def read_range(path: RemotePath, offset: int, size: int) -> bytes:
    """Return `size` bytes of an object from byte `offset` on, fewer at its end.

    Raises:
        MissingError: the object does not exist.
        TreepackError: see `read_object`.
    """
    return _call(path, lambda store: bytes(store.cat_file(path.path, start=offset, end=offset + size)))


def info(path: RemotePath) -> ObjectInfo | None:
    """Return the size and the version of an object, or None if it does not exist.

    Raises:
        TreepackError: see `read_object`.
    """
    entry = _found(path, lambda store: store.info(path.path))
    return _object_info(entry) if entry is not None and _is_object(entry) else None


def list_objects(prefix: RemotePath) -> dict[str, ObjectInfo]:
    """Return the objects below a prefix, by their names below it, sorted; nested ones have names with slashes.

    Raises:
        TreepackError: see `read_object`; or the bucket does not exist.
    """
    entries = _found(prefix, lambda store: store.find(prefix.path, detail=True)) or {}
    start = f"{prefix.path}/"
    below = {name.lstrip("/"): entry for name, entry in entries.items() if _is_object(entry)}
    names = sorted(name for name in below if name.startswith(start) and not name.endswith("/"))
    return {name.removeprefix(start): _object_info(below[name]) for name in names}


def find_objects(pattern: RemotePath) -> list[tuple[RemotePath, dict[str, ObjectInfo] | None]]:
    """Return the objects and prefixes that an address or a pattern with *, ** and ? names, sorted.

    A prefix comes with the objects below it, see `list_objects`; an object comes with None.

    Raises:
        TreepackError: see `list_objects`.
    """
    if info(pattern) is not None:
        return [(pattern, None)]
    if objects := list_objects(pattern):
        return [(pattern, objects)]
    if not _WILDCARDS & set(pattern.path):
        return []
    entries = _found(pattern, lambda store: store.glob(pattern.path, detail=True)) or {}
    matches = sorted((RemotePath(pattern.scheme, name.strip("/")), _is_object(entries[name])) for name in entries)
    return [(match, None if is_object else list_objects(match)) for match, is_object in matches]


def download(path: RemotePath, local: Path) -> None:
    """Write the bytes of an object to the file `local`, which is not whole if this fails.

    Raises:
        MissingError: the object does not exist.
        TreepackError: see `read_object`; or the disk is full.
    """
    try:
        _call(path, lambda store: store.get_file(path.path, str(local)))
    except OSError as error:  # of this machine's disk, see _sentence
        raise TreepackError(f"{local}: cannot be written ({error.strerror or error})") from error


def upload(local: Path, path: RemotePath, *, expected: str | None = ANY) -> None:
    """Write the file `local` to an object, in several parts if it is large; it appears whole or stays absent.

    Args:
        local: the file.
        path: the object.
        expected: the condition, see the top of this file.

    Raises:
        ExistsError: the condition is not met.
        TreepackError: the bucket does not exist, the store cannot be reached, or denies the access.
    """
    _write(path, expected, lambda store, how: store.put_file(str(local), path.path, **how))


def write(path: RemotePath, content: bytes, *, expected: str | None = ANY) -> None:
    """Write bytes to an object.

    Args:
        path: the object.
        content: its bytes.
        expected: the condition, see the top of this file.

    Raises:
        ExistsError: the condition is not met.
        TreepackError: see `upload`.
    """
    _write(path, expected, lambda store, how: store.pipe_file(path.path, content, **how))


def delete(paths: Iterable[RemotePath]) -> None:
    """Delete objects; ignore names without an object.

    Raises:
        TreepackError: the store cannot be reached, or denies the access.
    """
    for path in paths:
        _found(path, lambda store, path=path: store.rm_file(path.path), verb="deleted")  # type: ignore[misc]


def client(path: RemotePath) -> Any:
    """Return the fsspec filesystem of the store of `path`, one for each process.

    Raises:
        TreepackError: its package is not installed.
    """
    names = sorted(name for name in os.environ if name.startswith(_ENVIRONMENT))
    return _client(path.scheme, os.getpid(), tuple((name, os.environ[name]) for name in names))


# By process, because a forked child must not use the connections of its parent.
@functools.lru_cache(maxsize=8)
def _client(scheme: str, process: int, environment: tuple[tuple[str, str], ...]) -> Any:
    # They log the exceptions that they raise, which Python prints with tracebacks if a logger has no handler.
    for name in _LOGGERS:
        if not logging.getLogger(name).handlers:
            logging.getLogger(name).addHandler(logging.NullHandler())
    try:
        import fsspec  # imported here, because most runs need no fsspec

        if scheme == "memory":
            return fsspec.filesystem("memory")
        # A listing is asked for again each time, because other processes write too.
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        package, extra = _PACKAGES.get(scheme, ("fsspec", "s3"))
        raise TreepackError(f"{scheme}:// needs {package}; {install_hint(extra)}") from error


def _write(path: RemotePath, expected: str | None, send: Callable[[Any, dict[str, Any]], object]) -> None:
    """Write an object under a condition."""
    writer = secrets.token_hex(8)
    how: dict[str, Any] = {"mode": "overwrite" if expected is not None else "create"}
    if path.scheme in ("s3", "gs"):
        # A request whose answer was lost is sent again, and then refused because of the object that it wrote.
        how["Metadata" if path.scheme == "s3" else "metadata"] = {_WRITER: writer}
    if path.scheme == "s3" and expected not in (None, ANY):
        how["IfMatch"] = expected
    elif expected not in (None, ANY):
        present = info(path)
        if present is None or present.version != expected:
            raise _exists(path)
    for attempt in range(_COLLISION_ATTEMPTS):
        try:
            _call(path, lambda store: send(store, how), verb="written")
            return
        except ExistsError:
            if _writer_of(path) == writer:
                return
            raise
        except MissingError as error:  # a write to a bucket that does not exist
            raise _no_bucket_error(path) from error
        except _CollisionError as error:
            if attempt == _COLLISION_ATTEMPTS - 1:
                raise _exists(path) from error


def _writer_of(path: RemotePath) -> str | None:
    if path.scheme == "s3":
        entry = _found(path, lambda store: store.metadata(path.path))
    elif path.scheme == "gs":
        entry = (_found(path, lambda store: store.info(path.path)) or {}).get("metadata")
    else:
        entry = None
    return None if entry is None else entry.get(_WRITER)


def _found(path: RemotePath, function: Callable[[Any], _T], *, verb: str = "read") -> _T | None:
    """Return `function` of the client, or None if the object does not exist.

    Raises:
        TreepackError: another error; or the bucket does not exist.
    """
    try:
        return _call(path, function, verb=verb)
    except MissingError:
        return None


def _call(path: RemotePath, function: Callable[[Any], _T], *, verb: str = "read") -> _T:
    """Return `function` of the client.

    Raises:
        MissingError: the object does not exist.
        ExistsError: the condition of a write is not met.
        TreepackError: one sentence about the exception of the client.
    """
    store = client(path)
    try:
        return function(store)
    except TreepackError:
        raise
    except Exception as error:  # clients raise exceptions of their own, without a common base
        raise _sentence(path, error, verb) from error


class _CollisionError(TreepackError):
    """Two conditional writes of one object met; the request is sent again."""


def _sentence(path: RemotePath, error: Exception, verb: str) -> Exception:
    if isinstance(error, OSError) and error.filename is not None:
        return error  # of a file on this machine
    code, reason = _code(error), first_line(error)
    if code == "NoSuchBucket" or "bucket does not exist" in reason:
        return _no_bucket_error(path)
    if code in _CONFLICTS or isinstance(error, FileExistsError):
        return _exists(path)
    if code in _COLLISIONS:
        return _CollisionError(f"{path}: is being written by another process; run the command again")
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return MissingError(f"{path}: no such object; check the address")
    name = type(error).__name__
    if code == "NotImplemented":
        return TreepackError(
            f"{path}: cannot be {verb}, because the store has no conditional writes (If-None-Match, If-Match); "
            "choose one that has them, or a local path"
        )
    if "Credential" in name or "Token" in name or isinstance(error, PermissionError) or code in _DENIED:
        return TreepackError(f"{path}: cannot be {verb}, access denied ({reason}); {_login(path.scheme)}")
    is_network = isinstance(error, TimeoutError | ConnectionError) or any(part in name for part in _NETWORK)
    if is_network or code in _BUSY:
        return UnavailableError(
            f"{path}: cannot be {verb}, the store does not answer ({reason}); check the network and the endpoint, and "
            "run the command again"
        )
    return TreepackError(f"{path}: cannot be {verb} ({reason}); check the address, the credentials and the network")


def _code(error: Exception) -> str:
    """Return the error code of S3 or the HTTP status of an exception, or an empty string."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):  # of botocore
            return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "code", None) or "")


def _login(scheme: str) -> str:
    return {
        "s3": "check the credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) and their rights",
        "gs": "log in with gcloud auth application-default login, or check the rights of the account",
        "hf": "log in with hf auth login, or set HF_TOKEN",
    }.get(scheme, "check the credentials")


def _exists(path: RemotePath) -> ExistsError:
    return ExistsError(f"{path}: exists, or has just been written by another process; choose another output")


def _no_bucket_error(path: RemotePath) -> TreepackError:
    return TreepackError(
        f"{path}: there is no bucket {path.bucket}; create it, or check the address, the account and the endpoint"
    )


def _is_object(entry: Mapping[str, Any]) -> bool:
    return entry.get("type") == "file"


def _object_info(entry: Mapping[str, Any]) -> ObjectInfo:
    names = ("ETag", "generation", "etag", "blob_id", "created")  # s3fs, gcsfs, gcsfs, huggingface_hub, memory
    version: Any = next((entry[name] for name in names if entry.get(name)), "")
    if isinstance(version, datetime):  # memory gives a time for one object, and its seconds in a list
        version = version.timestamp()
    return ObjectInfo(int(entry.get("size") or 0), str(version))
