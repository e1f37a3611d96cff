"""Streams of bytes: hash a file while it is read, and never read more than one record's worth at a time.

    file --HashingReader--> bytes --as_buffer--> stream --read_line, read_whole--> at most `max_size` bytes

A compressed file of a few bytes can have a line of gigabytes, so no function here reads to the end of a line or a file
without a limit.
"""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import STDIN, BytesRead

COMPRESSION = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}  # by the first two bytes of a file
CHUNK = 1 << 20  # bytes of one read of a stream that may be decompressed
# Bytes of one read of a file. Smaller than that, because progress is measured in bytes of files: 1 MB of a compressed
# one may take a minute to tokenise.
_FILE_CHUNK = 1 << 16


class TooLargeError(TreepackError):
    """A record has more bytes than `max_size`."""


class HashingReader(io.RawIOBase):
    """Read the bytes of a file, and hash and count them on the way."""

    def __init__(self, path: str, bytes_read: BytesRead | None = None) -> None:
        self._bytes_read = BytesRead() if bytes_read is None else bytes_read
        self.sha256 = hashlib.sha256()
        self._closes_file = False  # Python closes this reader also if the file cannot be opened
        self._file: Any = sys.stdin.buffer if path == STDIN else Path(path).open("rb", buffering=0)  # noqa: SIM115
        self._closes_file = path != STDIN
        self._bytes_read.begin(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._file.readinto(buffer)
        self.sha256.update(memoryview(buffer)[:size])
        self._bytes_read.count(size)
        return size

    def drain(self) -> None:
        """Read the rest that no parser has read, so that the hash covers the whole file."""
        while self.read(CHUNK):
            pass

    def close(self) -> None:
        if self._closes_file:
            self._file.close()
        super().close()


class _Joined(io.RawIOBase):
    """Bytes that were read ahead, and then the rest of a stream. A buffer may close it; the stream stays open."""

    def __init__(self, data: bytes, rest: Any) -> None:
        self._data = memoryview(data)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._data:
            size: int = self._rest.readinto(buffer)
            return size
        part = self._data[: len(buffer)]
        buffer[: len(part)] = part
        self._data = self._data[len(part) :]
        return len(part)


def as_buffer(rest: Any, data: bytes = b"") -> io.BufferedReader:
    """Return a buffer over `data` and then the stream `rest`, which stays open when the buffer is collected."""
    return io.BufferedReader(_Joined(data, rest), _FILE_CHUNK)


def read_line(stream: Any, start: bytes, max_size: int) -> bytes:
    """Return the rest of a line that begins with `start`, cut so that the line has at most `max_size` + 1 bytes."""
    line: bytes = stream.readline(max(1, max_size + 1 - len(start)))
    return line


def skip_line(stream: Any) -> None:
    """Read to the end of the current line without keeping it."""
    while (part := stream.readline(CHUNK)) and not part.endswith(b"\n"):
        pass


def num_newlines(data: bytes) -> int:
    """Return the number of newlines in `data`, ten times as fast as `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))


def read_whole(stream: Any, path: str, max_size: int) -> bytes:
    """Return the rest of `stream`.

    Raises:
        TooLargeError: it has more than `max_size` bytes; it is read only so far.
    """
    data: bytes = stream.read(max_size + 1)
    if len(data) > max_size:
        raise TooLargeError(
            f"{path}: is read as a whole and has more than {shown_size(max_size)}; raise --max-record-size, or write "
            "its rollouts as JSONL"
        )
    return data


def shown_size(size: int) -> str:
    """Return a number of bytes for a person: 1073741824 -> 1 GB, in units of 1024."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:,} bytes"
