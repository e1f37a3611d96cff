"""Storage of large arrays of a trie: in memory, or in files without a name that are mapped.

    storage.growing_array(dtype, in_file=True) --append, finish--> array, and the storage with its map
    storage.zeros(count, dtype)                -->                 the same, an array that can be written
    storage.release()                          the pages of all maps leave the memory of this process
    PageReleaser(storage).count(num_tokens)    the same after every `RELEASE_TOKENS` tokens of a pass

A mapped page counts as memory of the process from its first use until `release`; then it is read again when it is
needed. The files have no name, so nothing is left of them when the last array ends, even if the process is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError

# An array goes to a file if it needs more than 1 / SHARE of the memory: several such arrays and their temporary copies
# exist at the same time.
SHARE = 8
# Tokens after which mapped pages are released: 16 MB of token ids, and the columns of as many trained tokens.
RELEASE_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class ArrayStorage:
    """Where the large arrays of a trie are.

    Attributes:
        memory: bytes that the command may use, None for no limit.
        folder: of the files, None for the folder of temporary files.
        maps: the files that are mapped so far.
    """

    # All storages are equal: no result depends on them.
    memory: int | None = field(default=None, compare=False)
    folder: Path | None = field(default=None, compare=False)
    maps: tuple[mmap.mmap, ...] = field(default=(), compare=False)

    def is_large(self, num_bytes: int) -> bool:
        """Return True if an array of this size belongs into a file."""
        return self.memory is not None and num_bytes > self.memory // SHARE

    def release(self) -> None:
        """Release the mapped pages in memory; they are read again when they are needed."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def join(self, array: NDArray[Any], mapped: mmap.mmap | None) -> tuple[NDArray[Any], ArrayStorage]:
        """Return `array`, and this storage with the map that contains it."""
        return array, self if mapped is None else replace(self, maps=(*self.maps, mapped))

    def zeros(self, count: int, dtype: type[np.generic]) -> tuple[NDArray[Any], ArrayStorage]:
        """Return `count` zeros that can be written, in memory or in a file, and the storage with its map.

        Raises:
            TreepackError: the disk fails.
        """
        size = count * np.dtype(dtype).itemsize
        if not size or not self.is_large(size):
            return np.zeros(count, dtype), self
        with disk(self.folder), tempfile.TemporaryFile(dir=self.folder) as file:
            # Not `truncate`: writing to a map of a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
        return self.join(np.frombuffer(mapped, dtype), mapped)

    def growing_array(self, dtype: type[np.generic], *, in_file: bool) -> _GrowingArray:
        """Return an empty array that can grow, in memory or in a file.

        Raises:
            TreepackError: the disk fails.
        """
        return _GrowingArray(self, dtype, in_file=in_file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the maps out: a copy in another process has its arrays in memory."""
        return ArrayStorage, (self.memory, self.folder)


class PageReleaser:
    """Releases the mapped pages of a storage during a pass over many tokens."""

    def __init__(self, storage: ArrayStorage, most: int = RELEASE_TOKENS) -> None:
        """Count nothing yet; pages are released after `most` tokens."""
        self._storage, self._num_tokens, self._most = storage, 0, most

    def count(self, num_tokens: int) -> None:
        """Count tokens that were read, and release the pages when they are enough."""
        self._num_tokens += num_tokens
        if self._num_tokens >= self._most:
            self._storage.release()
            self._num_tokens = 0


class _GrowingArray:
    """An array to which pieces are appended, in memory or in a file."""

    def __init__(self, storage: ArrayStorage, dtype: type[np.generic], *, in_file: bool) -> None:
        """Open a file if the array goes to one.

        Raises:
            TreepackError: the disk fails.
        """
        self._storage, self._dtype = storage, dtype
        self._pieces: list[NDArray[Any]] = []
        self._file: IO[bytes] | None = None
        if in_file:
            with disk(storage.folder):
                self._file = tempfile.TemporaryFile(dir=storage.folder)  # noqa: SIM115 (closed by `finish`)

    def append(self, piece: NDArray[Any]) -> None:
        """Append `piece`; it is copied if the array is in a file.

        Raises:
            TreepackError: the disk fails.
        """
        if self._file is None:
            self._pieces.append(piece)
            return
        with disk(self._storage.folder):
            self._file.write(np.ascontiguousarray(piece, self._dtype).data)

    def finish(self) -> tuple[NDArray[Any], ArrayStorage]:
        """Return the array, and the storage with its map.

        Raises:
            TreepackError: the disk fails.
        """
        if self._file is None:
            return np.concatenate([np.zeros(0, self._dtype), *self._pieces]), self._storage
        with disk(self._storage.folder), self._file as file:
            mapped = map_file(file)
        if mapped is None:
            return np.zeros(0, self._dtype), self._storage
        return self._storage.join(np.frombuffer(mapped, self._dtype), mapped)


def map_file(file: IO[bytes]) -> mmap.mmap | None:
    """Map all that was written to `file`, for reading; None if it is empty."""
    file.flush()
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.tell() else None


@contextmanager
def disk(folder: Path | None) -> Iterator[None]:
    """Turn errors of the disk into a TreepackError of one sentence.

    Raises:
        TreepackError: naming the folder.
    """
    try:
        yield
    except OSError as error:
        raise TreepackError(
            f"{folder or tempfile.gettempdir()}: the trie is larger than the memory, and its arrays cannot be stored "
            f"there ({error.strerror or error}); "
            f"{'free space there' if folder else 'set TMPDIR to a folder on a larger disk'}, or allow more memory"
        ) from error
