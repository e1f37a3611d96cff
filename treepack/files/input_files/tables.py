"""Parquet and Arrow files as batches of rows, and the rows as Python values.

    file --parquet_batches, arrow_batches--> record batches of a bounded size --values_of_columns--> one list per column

Arrow's own format is a file or, if `save_to_disk` of Hugging Face wrote it, a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError

# First four bytes. An Arrow file starts with ARROW1, a stream with the marker of a message.
PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"
_CHUNK = 1 << 20  # bytes of one read
# Limits of a batch: 256 kB of rows keep a block cheap to send to a worker, and 1024 rows bound its records in memory.
_ROWS, _ROW_BYTES = 1024, 1 << 18


@dataclass(frozen=True, slots=True)
class ParquetGroup:
    """A row group of a Parquet file: its rows, and its bytes as stored."""

    num_rows: int
    num_bytes: int


def parquet_groups(source: Any, path: str) -> list[ParquetGroup]:
    """Return the row groups of a Parquet file, given as a path or a buffer.

    Raises:
        TreepackError: the file is damaged; `path` names it.
    """
    with _readable(path), pq.ParquetFile(source) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        return [
            ParquetGroup(group.num_rows, sum(group.column(i).total_compressed_size for i in range(group.num_columns)))
            for group in groups
        ]


def parquet_batches(source: Any, path: str, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file, given as a path, a buffer or an open file, or of some of its row groups.

    Raises:
        TreepackError: the file is damaged; `path` names it.
    """
    # Without these two arguments, pyarrow reads a row group at once, which may be the whole file.
    with _readable(path), pq.ParquetFile(source, buffer_size=_CHUNK, pre_buffer=False) as file:
        sizes = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        largest = max((group.total_byte_size / max(1, group.num_rows) for group in sizes), default=0)
        yield from file.iter_batches(batch_size=_num_rows(largest), row_groups=groups)


def arrow_batches(source: Any, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow file, given as a path or a buffer, or of an Arrow stream with `read`.

    Raises:
        TreepackError: the file is damaged; `path` names it.
    """
    with _readable(path):
        for batch in _stored_batches(source):
            # Arrow maps the bytes of a file as they are; a damaged offset would be read as an address.
            batch.validate(full=True)
            # A stored batch may be the whole file. A slice copies nothing until it is pickled.
            size = _num_rows(batch.nbytes / max(1, batch.num_rows))
            yield from (batch.slice(start, size) for start in range(0, batch.num_rows, size))


def _stored_batches(source: Any) -> Iterator[pa.RecordBatch]:
    if hasattr(
        source, "peek"
    ):  # only the stream of `record_files`; an Arrow file is a path or a buffer, which can seek
        with pa.ipc.open_stream(source) as stream:
            yield from stream
        return
    opened = pa.memory_map(source) if isinstance(source, str) else source
    with opened, pa.ipc.open_file(opened) as file:
        yield from (file.get_batch(i) for i in range(file.num_record_batches))


def _num_rows(row_bytes: float) -> int:
    # Rows of 100 bytes -> 1024 rows, of 1000 bytes -> 262, of 1 MB -> 1.
    return int(max(1, min(_ROWS, _ROW_BYTES // max(1, row_bytes))))


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        # Arrow raises ValueError for text that is not UTF-8, and for dates and times that Python cannot represent.
        reason = str(error).strip().partition("\n")[0]
        raise TreepackError(f"{path}: not a readable Parquet or Arrow file ({reason}); write the file again") from error


def values_of_columns(batch: pa.RecordBatch, path: str) -> list[Sequence[Any]]:
    """Return the values of each column, one per row; lists of numbers are numpy arrays.

    Raises:
        TreepackError: a text is not UTF-8, or Python has no such date; `path` names the file.
    """
    with _readable(path):
        return [_column_values(column) for column in batch.columns]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _column_values(column: Any) -> Sequence[Any]:
    """Return one Python value per row. A list of numbers or booleans is a numpy slice, with NaN for a null inside it.

    A null field of a struct is left out. In Parquet, every struct of a column has the fields of all structs, so the
    arguments of a tool call would otherwise be printed with the names of arguments of other calls.
    """
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
        kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_primitive(kind.value_type) or pa.types.is_temporal(kind.value_type):
        return [_without_nulls(value) for value in column.to_pylist()]
    # values 5 6 7, offsets 0 2 3 -> [5 6], [7]. `values` ignores the slice of the batch, but `offsets` respects it.
    values = column.values.to_numpy(zero_copy_only=False)
    bounds = column.offsets.to_pylist()
    valid = column.is_valid().to_pylist()
    triples = zip(bounds, bounds[1:], valid, strict=False)
    return [values[start:end] if is_valid else None for start, end, is_valid in triples]
