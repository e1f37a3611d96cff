"""Where a directory is: on this machine, or in any filesystem that pyarrow or fsspec knows.

    "packed" | Path | "file:///data/packed"      local
    "s3://bucket/packed", "gs://", "hdfs://"     pyarrow's own filesystems
    "hf://", "memory://" and what else there is  fsspec, through pyarrow
    "packed" in filesystem=...                   as it is given

    locate(path) -> Location --> bytes of a file, sizes, Parquet files

What goes wrong far away comes in as many exceptions as there are clients; here each becomes one sentence. What the
files mean is left to `manifest` and `dataset`.
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
    """A directory: `root` inside `filesystem`; `name` is what messages call it."""

    name: str
    root: str
    filesystem: fs.FileSystem

    @property
    def is_local(self) -> bool:
        """Whether its files are read at the speed of a disk, and can be hashed."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def __str__(self) -> str:
        """The name, for messages."""
        return self.name

    def file_name(self, name: str) -> str:
        """What messages call a file of it."""
        return f"{self.name.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes | None:
        """The bytes of a file, None if there is no such file.

        Raises:
            TreepackError: it is there and cannot be read.
        """
        try:
            with self.filesystem.open_input_file(self._place(name)) as file:
                content: bytes = file.read()
                return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            raise self._unreadable(name, error) from error

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is no such file.

        Raises:
            TreepackError: the filesystem does not answer.
        """
        try:
            info = self.filesystem.get_file_info(self._place(name))
        except Exception as error:
            raise self._unreadable(name, error) from error
        size: int | None = info.size if info.type == fs.FileType.File else None
        return size

    def open_parquet(self, name: str) -> pq.ParquetFile:
        """A Parquet file whose pages are checked against their checksums; far away, ranges are fetched together.

        Raises:
            TreepackError: it cannot be read, or is no Parquet file.
        """
        try:
            return pq.ParquetFile(
                self._place(name),
                filesystem=self.filesystem,
                page_checksum_verification=True,
                pre_buffer=not self.is_local,
            )
        except Exception as error:
            raise TreepackError(
                f"{self.file_name(name)}: is no readable Parquet file ({first_line(error)}); the file was truncated or "
                f"altered, so pack the trie again{'' if self.is_local else ', or the network failed'}"
            ) from error

    def fresh(self) -> Location:
        """The same directory with a connection of its own, for a process that was forked."""
        return self if self.is_local else Location(self.name, self.root, pickle.loads(pickle.dumps(self.filesystem)))

    def _place(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if self.root else name

    def _unreadable(self, name: str, error: Exception) -> TreepackError:
        remedy = "check its permissions" if self.is_local else _REMEDY
        return TreepackError(f"{self.file_name(name)}: cannot be read ({first_line(error)}); {remedy}")


def locate(path: str | Path, filesystem: fs.FileSystem | None = None) -> Location:
    """The directory at `path`: a local path or a URI, or a path inside `filesystem`; it need not exist.

    Raises:
        TreepackError: an unknown scheme, a package that it needs, a missing bucket, or no pyarrow filesystem.
    """
    name = str(path)
    if filesystem is not None:
        if not isinstance(filesystem, fs.FileSystem):
            raise TreepackError(
                f"{name}: filesystem is a {type(filesystem).__name__}; expected a pyarrow.fs.FileSystem, such as "
                "PyFileSystem(FSSpecHandler(filesystem)) for one of fsspec"
            )
        return Location(name, name, filesystem)
    if isinstance(path, Path) or "://" not in name:
        return Location(name, name, fs.LocalFileSystem())
    try:
        found, root = fs.FileSystem.from_uri(name)
    except pa.ArrowInvalid:  # none of pyarrow's own
        found, root = _fsspec(name)
    except Exception as error:
        raise TreepackError(f"{name}: cannot be opened ({first_line(error)}); {_REMEDY}") from error
    return Location(root if isinstance(found, fs.LocalFileSystem) else name, root, found)


def _fsspec(uri: str) -> tuple[fs.FileSystem, str]:
    scheme = uri.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        found, root = url_to_fs(uri)
    except ImportError as error:
        raise TreepackError(f"{uri}: needs a package that is not installed ({first_line(error)})") from error
    except ValueError as error:
        raise TreepackError(
            f"{uri}: neither pyarrow nor fsspec reads {scheme}:// ({first_line(error)}); expected a local path, or a "
            "scheme such as s3, gs, hdfs, hf or file"
        ) from error
    except Exception as error:
        raise TreepackError(f"{uri}: cannot be opened ({first_line(error)}); {_REMEDY}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(found)), root


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
