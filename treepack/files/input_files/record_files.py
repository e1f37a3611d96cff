"""Files to blocks: decompress a file, recognise its kind, and hash its bytes on the way.

    path --read_blocks--> LineBlock | ValueBlock | TableRows | DamagedBlock, ...

The bytes of a file decide how it is read, not its name: the magic number of gzip, zstd, Parquet, Arrow and torch, or
else the first line with text. Only YAML is recognised by its name; the search of a folder skips it. No code seeks, so
standard input works like a file.

A file that cannot be read is an error. With `skip_bad`, it is a `DamagedBlock` after the blocks before the damage.

Memory: one block, which is one record if that is larger. A JSON array or document, YAML, a file of torch, and Parquet
that is compressed as a file or comes from standard input are in memory as a whole. No line, and no file that is read as
a whole, may have more than `max_size` bytes; nothing beyond them is decompressed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files.input_files.byte_streams import (
    CHUNK,
    COMPRESSION,
    HashingReader,
    as_buffer,
    read_whole,
)
from treepack.files.input_files.eval_files import is_eval_file, read_eval_file
from treepack.files.input_files.inputs import STDIN, InputHash, displayed, unreadable
from treepack.files.input_files.json_files import json_blocks
from treepack.files.input_files.limits import DEFAULT_LIMITS, RecordLimits
from treepack.files.input_files.ranges import Range, plan_ranges
from treepack.files.input_files.records import (
    DAMAGED_FILE,
    DamagedBlock,
    Record,
    RecordBlock,
    TableRows,
    ValueBlock,
    blocks_of_value,
)
from treepack.files.input_files.remote_inputs import opened_path
from treepack.files.input_files.tables import (
    ARROW_FILE_MAGIC,
    ARROW_STREAM_MAGIC,
    PARQUET_MAGIC,
    arrow_batches,
    parquet_batches,
)
from treepack.files.input_files.torch_files import MAGIC as TORCH_MAGIC
from treepack.files.input_files.torch_files import NotPlainError, read_torch
from treepack.files.input_files.yaml_files import SUFFIXES as YAML_SUFFIXES
from treepack.files.input_files.yaml_files import read_yaml
from treepack.trajectory import Skipped

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # begins the small text that replaces a file in a clone


def read_records(path: str, *, input_hash: InputHash | None = None) -> Iterator[Record]:
    """Yield the records of one file (`<stdin>`: of standard input), in order.

    Raises:
        TreepackError: the file is unreadable, truncated, malformed or empty, or a record is not a JSON object.
    """
    for block in read_blocks(path, input_hash=input_hash):
        yield from block.records()


def read_blocks(
    path: str,
    limits: RecordLimits = DEFAULT_LIMITS,
    *,
    input_hash: InputHash | None = None,
    as_ranges: bool = False,
) -> Iterator[RecordBlock | Range]:
    """Yield the blocks of one file (`<stdin>`: of standard input), in order; the first block has a record.

    If the limits skip damage, a block may also be a `DamagedBlock`, and the first may have no record. With `as_ranges`,
    blocks are ranges of the file if it can be split.

    Raises:
        TreepackError: the file is unreadable, truncated, empty or of an unknown kind. Errors inside of a block are
            raised by its `records`.
    """
    shown = displayed(path)
    try:
        yield from _whole_file(path, input_hash, limits, as_ranges=as_ranges)
    except NotPlainError:
        raise  # a file of torch that is not a rollout, such as a checkpoint, is not damaged
    except TreepackError as error:
        if not limits.skip_bad:
            raise
        yield DamagedBlock(Skipped(shown, DAMAGED_FILE, detail=str(error)))


def _whole_file(
    path: str, input_hash: InputHash | None, how: RecordLimits, *, as_ranges: bool
) -> Iterator[RecordBlock | Range]:
    """Yield the blocks of one file and hash it; turn errors of libraries into sentences."""
    num_blocks = 0
    path = opened_path(path)
    shown = displayed(path)
    try:
        ranges = plan_ranges(path, how, input_hash) if as_ranges else None
        for block in _stream(path, input_hash, how) if ranges is None else ranges:
            num_blocks += 1
            yield block
    except (OSError, EOFError) as error:
        raise unreadable(shown, error) from error
    except MemoryError as error:
        raise TreepackError(
            f"{shown}: does not fit into memory; write its rollouts as JSONL, or give a smaller --max-record-size "
            "and --skip-bad"
        ) from error
    if num_blocks == 0:
        raise TreepackError(f"{shown}: contains no record; remove it from the inputs")


def _stream(path: str, input_hash: InputHash | None, how: RecordLimits) -> Iterator[RecordBlock]:
    """Yield the blocks of a file that is read in order, and hash it on the way."""
    shown = displayed(path)
    with HashingReader(path, None if input_hash is None else input_hash.bytes_read) as raw:
        try:
            yield from _blocks_of(raw, path, how)
        except (TreepackError, OSError, EOFError):
            if how.skip_bad:
                _hash_rest(raw, shown, input_hash)
            raise
        _hash_rest(raw, shown, input_hash)


def _hash_rest(raw: HashingReader, shown: str, input_hash: InputHash | None) -> None:
    # A parser may stop early, for example at the end marker of an Arrow stream, or at damage.
    raw.drain()
    if input_hash is not None:
        input_hash.add(shown, raw.sha256.hexdigest())


def _blocks_of(raw: HashingReader, path: str, how: RecordLimits) -> Iterator[RecordBlock]:
    # peek(n) returns at least one byte and does not consume it, even on a pipe.
    stream, shown = as_buffer(raw), displayed(path)
    compression = COMPRESSION.get(stream.peek(2)[:2])
    if compression is not None:
        stream = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), compression), CHUNK)
    if stream.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
        raise TreepackError(f"{shown}: is a pointer of Git LFS; fetch the file with git lfs pull")
    if Path(path).suffix in YAML_SUFFIXES:
        return blocks_of_value(read_yaml(read_whole(stream, shown, how.max_size), shown), shown)
    magic = stream.peek(4)[:4]
    if magic == TORCH_MAGIC:  # of every zip archive
        data = read_whole(stream, shown, how.max_size)
        return _eval_blocks(data, shown, how) if is_eval_file(data) else blocks_of_value(read_torch(data, shown), shown)
    if magic == ARROW_STREAM_MAGIC:
        return _row_blocks(arrow_batches(stream, shown), shown)
    if magic not in (PARQUET_MAGIC, ARROW_FILE_MAGIC):
        return json_blocks(stream, shown, how)
    source: Any = path
    if compression is None and path != STDIN:
        raw.drain()  # only for the hash: Arrow opens the file again by its path, and reads parts of it
    else:
        source = pa.BufferReader(read_whole(stream, shown, how.max_size))
    batches = parquet_batches if magic == PARQUET_MAGIC else arrow_batches
    return _row_blocks(batches(source, shown), shown)


def _eval_blocks(data: bytes, path: str, how: RecordLimits) -> Iterator[RecordBlock]:
    for number, value in enumerate(read_eval_file(data, path, max_size=how.max_size)):
        yield ValueBlock(path, number, [value])


def _row_blocks(batches: Iterator[pa.RecordBatch], path: str) -> Iterator[RecordBlock]:
    start = 0
    for batch in batches:
        if batch.num_rows:
            yield TableRows(path, start, batch)
        start += batch.num_rows
