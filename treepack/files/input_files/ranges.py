"""Ranges of files that another process opens itself: lines of JSONL by bytes, rows of Parquet by row groups.

    plan_ranges    rollouts.jsonl   bytes 0 ..      bytes 65,610 ..     LineRange, LineRange, ...
                   part.parquet     row groups 0-3  row groups 4-7      RowGroups, RowGroups, ...
    range.blocks() -> LineBlock | TableRows | DamagedBlock                      in the other process

This process reads JSONL only to find the ends of lines and to number them, and of Parquet only the footer. A thread
hashes each file meanwhile. All other files are read by `record_files.read_blocks` and sent to the other process.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from treepack.errors import TreepackError
from treepack.files.input_files.byte_streams import CHUNK, num_newlines
from treepack.files.input_files.inputs import STDIN, FileHash, InputHash, displayed, unreadable
from treepack.files.input_files.json_files import BYTE_ORDER_MARK, FIRST_LINES, MAX_LINES, next_size, too_long
from treepack.files.input_files.json_text import parse_leniently
from treepack.files.input_files.limits import RecordLimits
from treepack.files.input_files.records import (
    DAMAGED_FILE,
    DAMAGED_RECORD,
    DamagedBlock,
    LineBlock,
    Record,
    RecordBlock,
    TableRows,
)
from treepack.files.input_files.tables import PARQUET_MAGIC, ParquetGroup, parquet_batches, parquet_groups
from treepack.files.remote.range_reading import Read, range_reader
from treepack.trajectory import Skipped

# Smaller files are read here: a thread and two more openings of the file would cost more than reading it.
MIN_FILE = 1 << 17
# A first line that is longer is read by `json_files`, which may find that the file is one document.
_MAX_FIRST_LINE = 1 << 24
# Stored bytes of the row groups of a block, at least one group.
GROUP_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class LineRange:
    """Whole lines of a JSONL file: `size` bytes from `offset` on; the first is line `number` of `path`.

    `file` is the absolute path by which the file is opened, `path` the one for messages.
    """

    path: str
    file: str
    number: int
    offset: int
    size: int

    def blocks(self) -> Iterator[RecordBlock]:
        """Read the lines, `MAX_LINES` bytes at a time, or more if a line is longer.

        Raises:
            TreepackError: the file cannot be read any more, or has become shorter.
        """
        number, begin, end = self.number, self.offset, self.offset + self.size
        size = MAX_LINES
        try:
            with range_reader(self.file) as read:
                while begin < end:
                    wanted = min(size, end - begin)
                    data = read(begin, wanted)
                    if len(data) < wanted:
                        raise TreepackError(f"{self.path}: became shorter while it was read; run the command again")
                    # The block ends in the middle of a line, which the next block begins with: "a\nbc" -> "a\n".
                    stop = wanted if begin + wanted == end else data.rfind(b"\n") + 1
                    if not stop:
                        size *= 2
                        continue
                    yield LineBlock(self.path, number, data if stop == wanted else data[:stop])
                    number, begin = number + num_newlines(data[:stop]), begin + stop
        except OSError as error:
            raise unreadable(self.path, error) from error

    def records(self, damaged: list[Skipped] | None = None, arrays: Sequence[str] = ()) -> Iterator[Record]:
        """Yield the records of `blocks`."""
        for block in self.blocks():
            yield from block.records(damaged, arrays)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups of a Parquet file; the first row is row `start` of `path`, and `size` are their stored bytes.

    `file` is the absolute path by which the file is opened. With `skip_bad` damage ends the block, which
    then has all groups of the file, as the damage ends a file.
    """

    path: str
    file: str
    start: int
    groups: tuple[int, ...]
    size: int
    skip_bad: bool

    def blocks(self) -> Iterator[RecordBlock]:
        """Read the rows in batches.

        Raises:
            TreepackError: the file is damaged or cannot be read any more, and `skip_bad` is False.
        """
        start = self.start
        try:
            for batch in parquet_batches(self.file, self.path, self.groups):
                if batch.num_rows:
                    yield TableRows(self.path, start, batch)
                start += batch.num_rows
        except (TreepackError, OSError) as error:
            sentence = error if isinstance(error, TreepackError) else unreadable(self.path, error)
            if not self.skip_bad:
                raise sentence from error
            yield DamagedBlock(Skipped(self.path, DAMAGED_FILE, detail=str(sentence)))

    def records(self, damaged: list[Skipped] | None = None, arrays: Sequence[str] = ()) -> Iterator[Record]:
        """Yield the records of `blocks`."""
        for block in self.blocks():
            yield from block.records(damaged, arrays)


Range = LineRange | RowGroups


def plan_ranges(path: str, how: RecordLimits, input_hash: InputHash | None) -> Iterator[RecordBlock | Range] | None:
    """Return the ranges of the file `path`, which is hashed meanwhile; None if it has to be read as a stream.

    Raises:
        OSError: the file cannot be read.
    """
    if path == STDIN:
        return None
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size < MIN_FILE:
        return None
    with Path(path).open("rb") as file:
        is_parquet = file.read(4) == PARQUET_MAGIC
        file.seek(0)
        first = None if is_parquet else _first_object(file, path, min(_MAX_FIRST_LINE, how.max_size))
    if not is_parquet and first is None:
        return None
    return _hashed(path, how, InputHash() if input_hash is None else input_hash, first)


def _hashed(
    path: str, how: RecordLimits, input_hash: InputHash, first: tuple[int, int, int] | None
) -> Iterator[RecordBlock | Range]:
    """Yield the ranges of a file and hash it; with `skip_bad` also the rest after damage."""
    shown, real = displayed(path), os.path.abspath(path)  # noqa: PTH100 (a link must stay a link)
    input_hash.bytes_read.begin(path)
    follower = FileHash(path)
    is_complete = False
    try:
        blocks = _row_groups(shown, real, how) if first is None else _lines_of_file(shown, real, how, first)
        for block, end in blocks:
            input_hash.bytes_read.count(end - follower.end)
            follower.follow(end)
            yield block
        is_complete = True
    except TreepackError:
        is_complete = how.skip_bad
        raise
    finally:
        if is_complete:
            input_hash.add(shown, follower)
        else:
            follower.stop()


def _first_object(file: BinaryIO, path: str, max_size: int) -> tuple[int, int, int] | None:
    """Return number, start and end of the first line with text; None if it is not a JSON object, or too long."""
    number, start = 0, 0
    while (line := file.readline(max_size + 1)) and len(line) <= max_size:
        number += 1
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if text.strip():
            begin = start + len(line) - len(text)
            is_object = text.lstrip().startswith(b"{") and _is_object(text, path, number)
            return (number, begin, start + len(line)) if is_object else None
        start += len(line)
    return None


def _is_object(line: bytes, path: str, number: int) -> bool:
    with suppress(orjson.JSONDecodeError):
        return isinstance(orjson.loads(line), dict)
    with suppress(TreepackError):
        return isinstance(parse_leniently(line, path=path, line=number, remedy=""), dict)
    return False


def _lines_of_file(
    shown: str, real: str, how: RecordLimits, first: tuple[int, int, int]
) -> Iterator[tuple[RecordBlock | Range, int]]:
    with range_reader(real) as read:
        yield from _line_ranges(shown, real, read, how, first)


def _line_ranges(
    shown: str, real: str, read: Read, how: RecordLimits, first: tuple[int, int, int]
) -> Iterator[tuple[RecordBlock | Range, int]]:
    """Yield blocks of whole lines, each with its end; `first` are number, start and end of the first line."""
    number, start, end = first
    yield LineRange(shown, real, number, start, end - start), end
    begin, number, size = end, number + 1, FIRST_LINES
    while data := read(begin, size):
        end, num_lines = begin + len(data), num_newlines(data)
        if not data.endswith(b"\n"):
            # The range ends in the middle of a line, so the rest of the line is added.
            line = begin + data.rfind(b"\n") + 1
            end, is_ended = _line_end(read, end, line + how.max_size + 1)
            if end - line > how.max_size:
                # The range ends before the line that is too long.
                if line > begin:
                    yield LineRange(shown, real, number, begin, line - begin), line
                number += num_lines
                error = too_long(shown, number, how.max_size)
                if not how.skip_bad:
                    raise error
                end, _ = (end, True) if is_ended else _line_end(read, end, None)
                yield DamagedBlock(Skipped(f"{shown}:{number}", DAMAGED_RECORD, detail=str(error))), end
                begin, number = end, number + 1
                continue
            num_lines += is_ended
        yield LineRange(shown, real, number, begin, end - begin), end
        begin, number = end, number + num_lines
        size = next_size(size, begin)


def _line_end(read: Read, start: int, limit: int | None) -> tuple[int, bool]:
    """Return the end of the line that contains byte `start`, at most `limit`, and True if a newline ends it."""
    while data := read(start, CHUNK if limit is None else min(CHUNK, limit - start)):
        at = data.find(b"\n")
        if at >= 0:
            return start + at + 1, True
        start += len(data)
    return start, False


def _row_groups(shown: str, real: str, how: RecordLimits) -> Iterator[tuple[RecordBlock | Range, int]]:
    """Yield blocks of row groups, each with the end of its bytes; with `skip_bad` all groups in one block."""
    groups: list[ParquetGroup] = parquet_groups(real, shown)
    start, first, size, position = 0, 0, 0, 0
    for i, group in enumerate(groups):
        size += group.num_bytes
        if i + 1 < len(groups) and (how.skip_bad or size < GROUP_BYTES):
            continue
        num_rows = sum(each.num_rows for each in groups[first : i + 1])
        position += size
        if num_rows:
            yield RowGroups(shown, real, start, tuple(range(first, i + 1)), size, how.skip_bad), position
        start, first, size = start + num_rows, i + 1, 0
