"""An object of a store that is read once from its start to its end, and hashed on the way, without a copy on disk.

    ObjectReader(place, size).read(offset, size)   bytes; the offsets may go back a little
                             .hexdigest()          sha256 of the whole object

Memory: three blocks.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from typing import Any

from treepack.errors import TreepackError
from treepack.files.address import RemotePath
from treepack.files.remote import object_store

BLOCK = 1 << 25  # bytes of one request


class ObjectReader:
    """Blocks of an object near the last place that was read."""

    def __init__(self, place: RemotePath, size: int) -> None:
        """Read nothing yet; `size` are the bytes of the object."""
        self.size = size
        self._place = place
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
        data = object_store.read_range(self._place, self._end, min(BLOCK, self.size - self._end))
        if not data:
            raise TreepackError(f"{self._place}: became shorter while it was read; run the command again")
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
