"""Tables of Arrow in files of a trie that is being built or read: one stream after another, each padded.

parts of a table --write_table--> stream | padding to 64 bytes | next stream ...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

import pyarrow as pa

# Arrow reads buffers without a copy if they start at a multiple of 64 bytes.
_ALIGNMENT = 64


def write_table(file: IO[bytes], parts: Iterable[pa.Table]) -> int:
    """Append `parts` of one table as an Arrow stream, padded for the next one; return the bytes of the stream."""
    start = file.tell()
    writer = None
    for part in parts:
        writer = writer or pa.ipc.new_stream(file, part.schema)
        writer.write_table(part)
    assert writer is not None
    writer.close()
    size = file.tell() - start
    pad(file, start)
    return size


def pad(file: IO[bytes], start: int) -> None:
    """Append zeros until the bytes since `start` are a multiple of `_ALIGNMENT`."""
    file.write(bytes(-(file.tell() - start) % _ALIGNMENT))
