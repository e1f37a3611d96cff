"""Addresses of files: a path on this machine, or an object or prefix in an object store.

    "packed" | Path | "file:///data/packed"     Path
    "s3://bucket/packed" | "gs://..."           RemotePath, read and written
    "hf://datasets/OWNER/NAME/packed"           RemotePath, only read
    any other scheme                            refused

`as_path` is called where an address enters: by the parameter type of the commands and by public functions. A RemotePath
is not an `os.PathLike`, so code that expects a file of this machine fails on it and never writes a local folder `s3:`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from treepack.errors import TreepackError

READ_ONLY = frozenset({"hf"})
# memory:// is the store of fsspec in this process, which only tests use.
SCHEMES = ("s3", "gs", "hf", "memory")
_ACCEPTED = "expected a local path, file://, s3:// or gs://, or hf:// for inputs"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """An object or a prefix in an object store: s3://bucket/key has the scheme "s3" and the path "bucket/key"."""

    scheme: str
    path: str

    def __str__(self) -> str:
        """Return the address, as messages and manifests name it."""
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> RemotePath:
        """Return the address of `name` below this one."""
        return RemotePath(self.scheme, f"{self.path}/{name}")

    @property
    def bucket(self) -> str:
        """The first part of the path."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The file extension, such as .jsonl, or an empty string."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The prefix that contains it."""
        return RemotePath(self.scheme, self.path.rpartition("/")[0] or self.path)

    def is_relative_to(self, other: RemotePath) -> bool:
        """Return True if it is `other` or below it."""
        return self.scheme == other.scheme and f"{self.path}/".startswith(f"{other.path}/")


AnyPath = Path | RemotePath
_OnePath = str | os.PathLike[str] | RemotePath
Paths = _OnePath | Sequence[_OnePath]  # one path, or several


def path_names(paths: Paths) -> list[str]:
    """Return one path or address, or each of several, as text.

    Raises:
        TreepackError: something else is among them.
    """
    several = isinstance(paths, Iterable) and not isinstance(paths, str | os.PathLike)
    given: Iterable[Any] = paths if several else [paths]  # type: ignore[assignment]
    return [str(path) if isinstance(path, RemotePath) else _text(path) for path in given]


def _text(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or value == "":  # Path("") is this folder, which nobody named
        fault = "is empty" if value == "" else f"has the type {type(value).__name__}"
        raise TreepackError(f"{value!r} {fault}; expected a path or an address")
    return str(os.fspath(value))


def as_path(value: _OnePath) -> Path | RemotePath:
    """Return the path or the address that `value` names; `file://` is a local path.

    Raises:
        TreepackError: a scheme that is not accepted, an address without a bucket, or no path at all.
    """
    if isinstance(value, RemotePath):
        return value
    match = None if isinstance(value, Path) else _SCHEME.fullmatch(_text(value))
    if match is None:
        return _local(Path(_text(value)))
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        # file:///data and file://localhost/data are /data; any other host is another machine.
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise TreepackError(f"{value}: is no path on this machine; write file:///PATH")
        return Path(f"/{unquote(path)}")
    if scheme not in SCHEMES:
        raise TreepackError(f"{value}: {match[1]}:// is not supported; {_ACCEPTED}")
    path = rest.strip("/")
    if not path:
        raise TreepackError(f"{value}: names no bucket; write {scheme}://BUCKET/NAME")
    return RemotePath(scheme, path)


def is_address(value: str) -> bool:
    """Return True if `value` has a scheme, accepted or not."""
    return _SCHEME.fullmatch(value) is not None


def as_output(value: _OnePath, *, option: str = "--out") -> Path | RemotePath:
    """Return the path or the address of an output.

    Args:
        value: the output.
        option: name of the option for it, for messages.

    Raises:
        TreepackError: see `as_path`; or the store is read only, or no file can have this name.
    """
    path = as_path(value)
    if isinstance(path, Path):
        _check_local_output(path, option)
        return path
    if path.scheme in READ_ONLY:
        raise TreepackError(f"{path}: {path.scheme}:// is read only; choose a local {option} or one in s3:// or gs://")
    if "//" in path.path:
        raise TreepackError(f"{path}: has an empty part between two slashes; choose another {option}")
    return path


def _check_local_output(path: Path, option: str) -> None:
    """Refuse a path that cannot be written, before any work starts.

    Raises:
        TreepackError: the path is not UTF-8, too long, or leads through a link to itself.
    """
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise TreepackError(
            f"{shown}: has a name or lies in a folder that is no text in UTF-8, which Parquet files need; choose "
            f"another {option}"
        ) from error
    try:
        path.stat()
    except OSError as error:  # mostly, because the file does not exist yet
        if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            return
        raise TreepackError(f"{path}: cannot be written ({error.strerror}); choose another {option}") from error


def _local(path: Path) -> Path:
    """Return `path`, unless it is an address that has lost a slash: Path("s3://bucket/x") is s3:/bucket/x.

    Raises:
        TreepackError: with the remedy.
    """
    scheme, *rest = path.parts or ("",)
    if rest and _LOST_SLASH.fullmatch(scheme) and not path.exists():
        raise TreepackError(
            f"{scheme}//{'/'.join(rest)}: was given as a Path, which drops a slash; pass the address as a string"
        )
    return path
