"""Location of a directory that is read: on this machine, in an object store, or in a filesystem of pyarrow.

    "packed" | Path | "file:///data/packed"      local
    "s3://...", "gs://...", "hf://..."           the filesystem of fsspec that `files.remote.object_store` opens
    "packed" in filesystem=...                   that filesystem of pyarrow

    locate(path) -> DirectoryLocation --> bytes of a file, sizes, streams, Parquet files

Every client of a remote filesystem raises different exceptions; here every exception becomes one sentence. `manifest`
and `dataset` give the files their meaning; `object_store` writes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from treepack.errors import TreepackError, first_line
from treepack.files.part_columns import check_part_columns
from treepack.files.remote import object_store
from treepack.files.remote.address import RemotePath, as_path

_AHEAD_BYTES = 8 << 20  # read at a time from an object that is read from its start to its end
_REMEDY = "check the address, the credentials and the network"


@dataclass(frozen=True)
class DirectoryLocation:
    """A directory: `root` inside `filesystem`; messages use `name`. `remote` is its address in an object store."""

    name: str
    root: str
    filesystem: fs.FileSystem
    remote: RemotePath | None = None

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
        """Return the bytes of a file, or None if the file does not exist.

        Raises:
            TreepackError: the file exists and cannot be read.
        """
        if self.remote is not None:
            return object_store.read_object(self.remote / name)
        try:
            with self.filesystem.open_input_file(self._path(name)) as file:
                content: bytes = file.read()
                return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # clients raise exceptions of their own, without a common base
            raise self._read_error(name, error) from error

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if the file does not exist.

        Raises:
            TreepackError: the filesystem does not answer.
        """
        if self.remote is not None:
            found = object_store.info(self.remote / name)
            return None if found is None else found.size
        try:
            info = self.filesystem.get_file_info(self._path(name))
        except Exception as error:
            raise self._read_error(name, error) from error
        size: int | None = info.size if info.type == fs.FileType.File else None
        return size

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files in bytes, by their names; one request for each thousand of them.

        Raises:
            TreepackError: the filesystem does not answer.
        """
        if self.remote is not None:
            return {name: entry.size for name, entry in object_store.list_objects(self.remote).items()}
        try:
            entries = self.filesystem.get_file_info(fs.FileSelector(self.root or ".", allow_not_found=True))
        except Exception as error:
            raise self._read_error("", error) from error
        return {entry.base_name: entry.size for entry in entries if entry.type == fs.FileType.File}

    def open_stream(self, name: str) -> pa.NativeFile:
        """Open a file to read it once from the start; errors of the filesystem are not converted."""
        if self.remote is not None:
            store = object_store.client(self.remote)
            file = store.open(self._path(name), "rb", block_size=_AHEAD_BYTES, cache_type="readahead")
            return pa.PythonFile(file, mode="r")
        return self.filesystem.open_input_stream(self._path(name))

    def open_parquet(self, name: str, columns: pa.Schema) -> pq.ParquetFile:
        """Open a part; its pages are checked by checksum, and remote ranges are fetched together.

        Raises:
            TreepackError: the file cannot be read, is not a Parquet file, or has another type in one of `columns`.
        """
        try:
            part = pq.ParquetFile(
                self._path(name),
                filesystem=self.filesystem,
                page_checksum_verification=True,
                # Joins the small reads of all columns to few large ones, because each remote read costs a round trip.
                pre_buffer=not self.is_local,
            )
        except Exception as error:
            raise TreepackError(
                f"{self.file_name(name)}: is not a readable Parquet file ({first_line(error)}); the file was truncated "
                f"or altered, so write it again{'' if self.is_local else ', or the network failed'}"
            ) from error
        check_part_columns(part.schema_arrow, columns, self.file_name(name), f"write {self} again")
        return part

    def fresh(self) -> DirectoryLocation:
        """Return the same directory with a new connection, to be used in a process that was forked."""
        if self.remote is not None:
            return DirectoryLocation(self.name, self.root, _arrow(self.remote), self.remote)
        # A forked process shares sockets and locks with its parent; a round trip through pickle opens new ones.
        return (
            self
            if self.is_local
            else DirectoryLocation(self.name, self.root, pickle.loads(pickle.dumps(self.filesystem)))
        )

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if self.root else name

    def _read_error(self, name: str, error: Exception) -> TreepackError:
        remedy = "check its permissions" if self.is_local else _REMEDY
        return TreepackError(f"{self.file_name(name)}: cannot be read ({first_line(error)}); {remedy}")


def locate(path: str | Path | RemotePath, filesystem: fs.FileSystem | None = None) -> DirectoryLocation:
    """Return the directory at `path`: a path or an address, or a path inside `filesystem`; it need not exist.

    Raises:
        TreepackError: the scheme is not accepted, its package is not installed, or `filesystem` is not a filesystem of
            pyarrow.
    """
    name = str(path)
    if filesystem is not None:
        if not isinstance(filesystem, fs.FileSystem):
            raise TreepackError(
                f"{name}: filesystem is a {type(filesystem).__name__}; expected a pyarrow.fs.FileSystem, such as "
                "PyFileSystem(FSSpecHandler(filesystem)) for a filesystem of fsspec"
            )
        return DirectoryLocation(name, name, filesystem)
    target = as_path(path)
    if isinstance(target, RemotePath):
        return DirectoryLocation(str(target), target.path, _arrow(target), target)
    # "file:///data/packed" is a local path, and messages call it /data/packed.
    return DirectoryLocation(str(target), str(target), fs.LocalFileSystem())


class _ByRange(fs.FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """Files that are read by range: without the client's buffer, which would read tens of megabytes for a footer."""

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.fs.open(path, "rb", cache_type="none"), mode="r")


def _arrow(target: RemotePath) -> fs.FileSystem:
    return fs.PyFileSystem(_ByRange(object_store.client(target)))
