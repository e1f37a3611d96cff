"""Recorded routes as bytes of a Parquet column, and back; `schema.ROUTES` describes the columns.

    uint8 [tokens, layers, k] --route_bytes--> bytes of tokens * layers * k * 1
    bytes of all nodes        --route_array--> uint8 or uint16 [tokens, layers, k]

Bytes, not lists of numbers: Parquet stores a number of 8 bits in 32, and reads it ten times slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.trajectory import Routes

_NAMES = tuple(schema.ROUTES.names)


def route_bytes(routes: Routes) -> bytes:
    """Return the bytes of `routes` [tokens, layers, k], little-endian."""
    return routes.astype(routes.dtype.newbyteorder("<"), copy=False).tobytes()


def route_array(data: bytes | NDArray[np.uint8], shape: tuple[int, int, int], source: str) -> Routes:
    """Return the routes of so many tokens, layers and experts of each token; they cannot be written.

    Raises:
        TreepackError: the number of bytes fits neither uint8 nor uint16.
    """
    size = len(data)
    count = int(np.prod(shape, dtype=np.int64))
    if size not in (count, 2 * count) or min(shape[1:]) < 1:
        raise TreepackError(f"{source}: has {size} bytes of routes for {list(shape)} experts; write it again")
    flat = np.frombuffer(data, np.uint8)
    return (flat if size == count else flat.view(np.dtype("<u2")).astype(np.uint16, copy=False)).reshape(shape)


def route_columns(routes: Routes, offsets: NDArray[Any]) -> list[pa.Array]:
    """Return the columns of `schema.ROUTES` of rows that own the tokens between `offsets` [rows + 1].

    Raises:
        TreepackError: the rows have 2 GB of routes or more, too many for the offsets of a column.
    """
    rows = len(offsets) - 1
    layers, experts = routes.shape[1:]
    width = layers * experts * routes.itemsize
    # Rows of 2 and 1 tokens, 4 bytes for each -> offsets 0 8 12.
    ends = ((offsets - offsets[0]) * width).astype(np.int64)
    if ends[-1] >= 1 << 31:
        raise TreepackError(
            f"part of the trie has {ends[-1]:,} bytes of routes, and 2 GB are too many; build it without --keep-routes"
        )
    data = pa.py_buffer(route_bytes(routes[offsets[0] : offsets[-1]]))
    values = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends.astype(np.int32)), data])
    return [pa.array(np.full(rows, layers, np.int32)), pa.array(np.full(rows, experts, np.int32)), values]


def route_content(table: pa.Table, source: str) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Return the bytes of all rows of a table with `schema.ROUTES`, and their layers and experts per token.

    Raises:
        TreepackError: a column is missing, or rows have different layers or numbers of experts.
    """
    missing = [name for name in _NAMES if name not in table.column_names]
    if missing:
        raise TreepackError(f"{source}: has recorded routes and no column {missing[0]}; write it again")
    layers, experts = (table[name].unique().to_pylist() for name in _NAMES[:2])
    if len(layers) != 1 or len(experts) != 1:
        raise TreepackError(f"{source}: has routes of {layers} layers and {experts} experts; write it again")
    parts = []
    for chunk in table["routes"].chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        parts.append(np.frombuffer(data, np.uint8)[ends[0] : ends[-1]] if data is not None else np.zeros(0, np.uint8))
    return np.concatenate(parts), (layers[0], experts[0])
