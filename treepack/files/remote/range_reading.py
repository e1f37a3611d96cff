"""Raw inputs that are read without a copy: bytes of a file, on this machine or by range from an object store.

    range_reader(path)                             bytes from any offset of a file
    parquet_source(path)                           what pyarrow opens
    ObjectReader(address, size).read(offset, size) bytes, if the object is read once from its start; the offsets may go
                             .hexdigest()          back a little; then the sha256 of the whole object

All other inputs in a store are copied first. A cluster reads raw rollouts by range instead: each task reads its share
of a large file, so with N tasks on N machines the store sends the file once, and not N times as for copies. Hashes of
the ends of two objects of equal size decide without a copy if they can be equal.

Memory of an ObjectReader: three blocks.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.remote import object_store
from treepack.files.remote.address import as_path, as_remote_path
from treepack.files.remote.location import locate

BLOCK = 1 << 25  # bytes of one request

Read = Callable[[int, int], bytes]  # bytes of a file, from an offset on


@contextmanager
def range_reader(path: str) -> Iterator[Read]:
    """Yield a function that returns so many bytes of a file from an offset on, fewer at its end.

    Raises:
        OSError: a file of this machine cannot be opened or read.
        TreepackError: there is no such object, or the store fails.
    """
    target = as_path(path)
    if not isinstance(target, Path):
        yield partial(object_store.read_range, target)
        return
    with target.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        yield lambda offset, size: os.pread(descriptor, size, offset)


@contextmanager
def parquet_source(path: str) -> Iterator[Any]:
    """Yield what pyarrow opens: a path, or an object that is read by range."""
    target = as_path(path)
    if isinstance(target, Path):
        yield path
        return
    location = locate(target)
    with location.filesystem.open_input_file(location.root) as source:
        yield source


class ObjectReader:
    """Blocks of an object near the offset that was read last."""

    def __init__(self, address: str, size: int) -> None:
        """Read nothing yet; `size` are the bytes of the object."""
        self.size = size
        self._path = as_remote_path(address)
        self._sha256 = hashlib.sha256()
        self._end = 0  # of the bytes that were fetched
        self._blocks: deque[tuple[int, bytes]] = deque()  # start and bytes

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer at the end of the object.

        `offset` is at most `BLOCK` bytes before the largest one so far.

        Raises:
            TreepackError: the store fails, or the object has become shorter.
        """
        while self._end < min(offset + size, self.size):
            self._fetch()
        while self._blocks and self._blocks[0][0] + len(self._blocks[0][1]) + BLOCK <= offset:
            self._blocks.popleft()
        # Blocks [0, 4), [4, 8), offset 3, size 3 -> bytes 3 of the first one and 0, 1 of the second.
        blocks = [data[max(offset - start, 0) : max(offset + size - start, 0)] for start, data in self._blocks]
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def hexdigest(self) -> str:
        """Read the rest, and return the sha256 of the whole object in hex.

        Raises:
            TreepackError: see `read`.
        """
        while self._end < self.size:
            self._fetch()
            self._blocks.clear()
        return self._sha256.hexdigest()

    def stream(self) -> io.BufferedReader:
        """Return a stream of the object from its start on."""
        return io.BufferedReader(_Raw(self))

    def _fetch(self) -> None:
        data = object_store.read_range(self._path, self._end, min(BLOCK, self.size - self._end))
        if not data:
            raise TreepackError(f"{self._path}: became shorter while it was read; run the command again")
        self._sha256.update(data)
        self._blocks.append((self._end, data))
        self._end += len(data)


class _Raw(io.RawIOBase):
    def __init__(self, reader: ObjectReader) -> None:
        self._reader, self._position = reader, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._reader.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
