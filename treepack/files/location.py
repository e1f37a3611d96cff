"""Location of a directory: on this machine, or in any filesystem that pyarrow or fsspec supports.

    "packed" | Path | "file:///data/packed"      local
    "s3://bucket/packed", "gs://", "hdfs://"     filesystems of pyarrow
    "hf://", "memory://" and all other schemes   fsspec, through pyarrow
    "packed" in filesystem=...                   that filesystem of pyarrow

    locate(path) -> Location --> bytes of a file, sizes, Parquet files

Each client of a remote filesystem raises its own exceptions; here every exception becomes one sentence. `manifest` and
`dataset` give the files their meaning.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from treepack.errors import TreepackError

_REMEDY = "check the address, the credentials and the network"


@dataclass(frozen=True)
class Location:
    """A directory: `root` inside `filesystem`; messages use `name`."""

    name: str
    root: str
    filesystem: fs.FileSystem

    @property
    def is_local(self) -> bool:
        """Return True if its files are on this machine; only then is it cheap to hash them."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def __str__(self) -> str:
        """Return the name, for messages."""
        return self.name

    def file_name(self, name: str) -> str:
        """Return the name of a file of the directory, for messages."""
        return f"{self.name.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file, or None if there is no such file.

        Raises:
            TreepackError: the file exists and cannot be read.
        """
        try:
            with self.filesystem.open_input_file(self._path(name)) as file:
                content: bytes = file.read()
                return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # clients raise exceptions of their own, without a common base
            raise self._read_error(name, error) from error

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file.

        Raises:
            TreepackError: the filesystem does not answer.
        """
        try:
            info = self.filesystem.get_file_info(self._path(name))
        except Exception as error:
            raise self._read_error(name, error) from error
        size: int | None = info.size if info.type == fs.FileType.File else None
        return size

    def open_stream(self, name: str) -> pa.NativeFile:
        """Open a file to read it once from the start; errors are those of the filesystem."""
        return self.filesystem.open_input_stream(self._path(name))

    def open_parquet(self, name: str) -> pq.ParquetFile:
        """Open a Parquet file; its pages are checked by checksum, and remote ranges are fetched together.

        Raises:
            TreepackError: the file cannot be read, or is not a Parquet file.
        """
        try:
            return pq.ParquetFile(
                self._path(name),
                filesystem=self.filesystem,
                page_checksum_verification=True,
                # Joins the small reads of all columns to few large ones, because each remote read costs a round trip.
                pre_buffer=not self.is_local,
            )
        except Exception as error:
            raise TreepackError(
                f"{self.file_name(name)}: is not a readable Parquet file ({first_line(error)}); the file was truncated "
                f"or altered, so pack the trie again{'' if self.is_local else ', or the network failed'}"
            ) from error

    def fresh(self) -> Location:
        """Return the same directory with a new connection, to be used in a process that was forked."""
        # A forked process shares sockets and locks with its parent; a round trip through pickle opens new ones.
        return self if self.is_local else Location(self.name, self.root, pickle.loads(pickle.dumps(self.filesystem)))

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if self.root else name

    def _read_error(self, name: str, error: Exception) -> TreepackError:
        remedy = "check its permissions" if self.is_local else _REMEDY
        return TreepackError(f"{self.file_name(name)}: cannot be read ({first_line(error)}); {remedy}")


def locate(path: str | Path, filesystem: fs.FileSystem | None = None) -> Location:
    """Return the directory at `path`: a local path or a URI, or a path inside `filesystem`; it need not exist.

    Raises:
        TreepackError: the scheme is unknown, its package is not installed, the bucket does not exist, or `filesystem`
            is not a filesystem of pyarrow.
    """
    name = str(path)
    if filesystem is not None:
        if not isinstance(filesystem, fs.FileSystem):
            raise TreepackError(
                f"{name}: filesystem is a {type(filesystem).__name__}; expected a pyarrow.fs.FileSystem, such as "
                "PyFileSystem(FSSpecHandler(filesystem)) for a filesystem of fsspec"
            )
        return Location(name, name, filesystem)
    # A Path is always local: Path("s3://bucket") has lost a slash and means a folder "s3:".
    if isinstance(path, Path) or "://" not in name:
        return Location(name, name, fs.LocalFileSystem())
    try:
        resolved, root = fs.FileSystem.from_uri(name)
    except pa.ArrowInvalid:  # a scheme that pyarrow does not support itself
        resolved, root = _fsspec(name)
    except Exception as error:
        raise TreepackError(f"{name}: cannot be opened ({first_line(error)}); {_REMEDY}") from error
    # "file:///data/packed" is a local path, and messages call it /data/packed.
    return Location(root if isinstance(resolved, fs.LocalFileSystem) else name, root, resolved)


def _fsspec(uri: str) -> tuple[fs.FileSystem, str]:
    scheme = uri.partition("://")[0]
    try:
        from fsspec.core import url_to_fs  # imported here, because most runs need no fsspec

        resolved, root = url_to_fs(uri)
    except ImportError as error:
        raise TreepackError(
            f"{uri}: needs a package that is not installed ({first_line(error)}); install it"
        ) from error
    except ValueError as error:
        raise TreepackError(
            f"{uri}: neither pyarrow nor fsspec reads {scheme}:// ({first_line(error)}); expected a local path, or a "
            "scheme such as s3, gs, hdfs, hf or file"
        ) from error
    except Exception as error:
        raise TreepackError(f"{uri}: cannot be opened ({first_line(error)}); {_REMEDY}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(resolved)), root


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its type if the message is empty."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
