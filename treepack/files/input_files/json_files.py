"""Files of JSON to blocks: one record on each line, one array, or one document.

The first line decides. An object is JSONL, an array on one line is the whole file, and anything else is tried as a
document of many lines. An array of messages is a line of JSONL if more lines follow, or by the name of the file. With
`skip_bad`, the elements of a damaged array and the lines after a damaged first line are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from treepack.errors import TreepackError
from treepack.files.input_files.byte_streams import (
    CHUNK,
    TooLargeError,
    as_buffer,
    num_newlines,
    read_line,
    shown_size,
    skip_line,
)
from treepack.files.input_files.json_text import array_elements, csv_refusal, is_csv, parse_leniently
from treepack.files.input_files.limits import RecordLimits
from treepack.files.input_files.number_lists import LARGE, LineParser, list_fields
from treepack.files.input_files.records import (
    DAMAGED_RECORD,
    DamagedBlock,
    LineBlock,
    RecordBlock,
    ValueBlock,
    as_conversation,
    as_object,
    blocks_of_value,
    is_of_lines,
)
from treepack.trajectory import Skipped

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Bytes of the blocks of a JSONL file: the first line, then 64, 128, 256, 512, 512, ... KiB. Small first blocks let
# several workers share a small file; large later blocks make the cost of a message and of a batch of columns small.
# From 32 MiB on, a block has 1/64 of the bytes before it, up to 1 MiB: at most MIN_RECORD_SIZE, so that a line that is
# too long is never inside a block.
FIRST_LINES, LINES, MAX_LINES = 1 << 16, 1 << 19, 1 << 20


def next_size(size: int, position: int) -> int:
    """Return the bytes of the block after one of `size` bytes that ends at `position`."""
    return min(2 * size, max(LINES, min(MAX_LINES, position // 64)))


def json_blocks(stream: Any, path: str, how: RecordLimits) -> Iterator[RecordBlock]:
    number, first = _first_line(stream, path, how.max_size)
    if not first:
        return
    try:
        # Lists as arrays: as objects of Python, the numbers of a large line need twenty times its bytes.
        value = LineParser(list_fields(first) if len(first) > LARGE else ()).parse(first)[0]
    except orjson.JSONDecodeError:
        blocks = _lenient_blocks(first, stream, path, number, how)
    else:
        blocks = _blocks_from(value, first, stream, path, number, how)
        del value
    del first
    yield from blocks


def _blocks_from(
    value: Any, first: bytes, stream: Any, path: str, number: int, how: RecordLimits
) -> Iterator[RecordBlock]:
    """Yield the blocks of a file whose `first` line is `value`: an array is the whole file, an object is JSONL."""
    following = b""
    if is_talk := as_conversation(value) is not value:
        while not following.strip() and (part := stream.readline(CHUNK)):
            following += part
        stream, is_talk = as_buffer(stream, following), bool(following.strip()) or is_of_lines(path)
    if isinstance(value, list) and not is_talk:
        if not how.skip_bad:
            _refuse_more(stream, path, number)
        yield from blocks_of_value(value, path)
        if how.skip_bad:
            _refuse_more(stream, path, number)
    else:
        if not how.skip_bad:
            as_object(as_conversation(value), f"{path}:{number}")
        blocks = _line_blocks(first, stream, path, number, how)
        del first, value  # a large line should be in memory once, and not until the end of the file
        yield from blocks


def _first_line(stream: Any, path: str, max_size: int) -> tuple[int, bytes]:
    """Return number and bytes of the first line that is not blank, without the mark; no bytes if all are blank."""
    number = 0
    while line := read_line(stream, b"", max_size):
        number += 1
        if len(line) > max_size:
            raise too_long(path, number, max_size)
        first = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if first.strip():
            return number, first
    return number, b""


def _line_blocks(first: bytes, stream: Any, path: str, number: int, how: RecordLimits) -> Iterator[RecordBlock]:
    """Yield blocks of whole lines; the first line has been read and is line `number`."""
    size, data, position = FIRST_LINES, first, 0
    del first
    while data:
        # A read ends in the middle of a line, so the rest of the line is added.
        if not data.endswith(b"\n"):
            start = data.rfind(b"\n") + 1
            data += read_line(stream, data[start:], how.max_size)
            if len(data) - start > how.max_size:
                # The block ends before the line that is too long, of which one byte more than the limit was read.
                before, is_cut = data[:start], not data.endswith(b"\n")
                if before:
                    yield LineBlock(path, number, before)
                number += num_newlines(before)
                error = too_long(path, number, how.max_size)
                if not how.skip_bad:
                    raise error
                yield DamagedBlock(Skipped(f"{path}:{number}", DAMAGED_RECORD, detail=str(error)))
                if is_cut:
                    skip_line(stream)
                number += 1
                data = stream.read(size)
                continue
        yield LineBlock(path, number, data)
        number += num_newlines(data)
        position += len(data)
        data = stream.read(size)
        size = next_size(size, position)


def too_long(path: str, number: int, max_size: int) -> TooLargeError:
    return TooLargeError(
        f"{path}:{number}: the line has more than {shown_size(max_size)}; raise --max-record-size, or remove the line"
    )


def _lenient_blocks(first: bytes, stream: Any, path: str, number: int, how: RecordLimits) -> Iterator[RecordBlock]:
    """Return the blocks of a file by parsing its first line leniently, or else the whole file as one document.

    If both fail, the error is about the line if the file looks like JSONL: no second line, or an object on it. With
    `skip_bad`, the elements of a damaged array or the lines after a damaged one are read instead.
    """
    try:
        return _blocks_from(
            parse_leniently(first, path=path, line=number, remedy="fix or remove the line"),
            first,
            stream,
            path,
            number,
            how,
        )
    except TreepackError as error:
        of_line = error
    if is_csv(first, path):
        raise csv_refusal(path)
    is_array = first.lstrip().startswith(b"[")
    rest: bytes = stream.read(how.max_size + 1)
    second = next((line for line in rest.split(b"\n", 64) if line.strip()), None)
    is_lines = second is None or _is_object(second)
    if len(rest) > how.max_size:
        if how.skip_bad and is_lines and not is_array:
            return _line_blocks(first, as_buffer(stream, rest), path, number, how)
        raise of_line if is_lines else _too_large(path, how.max_size)
    try:
        return blocks_of_value(parse_leniently(first + rest, path=path, line=number, remedy="fix the document"), path)
    except TreepackError as of_document:
        if how.skip_bad and is_array:
            return _blocks_of_elements(first + rest, path)
        if how.skip_bad and is_lines:
            return _line_blocks(first, as_buffer(stream, rest), path, number, how)
        raise (of_line if is_lines else of_document) from None


def _too_large(path: str, max_size: int) -> TooLargeError:
    return TooLargeError(
        f"{path}: is a JSON document of more than {shown_size(max_size)}; raise --max-record-size, or write one "
        "rollout on each line"
    )


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _refuse_more(stream: Any, path: str, number: int) -> None:
    while part := stream.readline(CHUNK):
        if part.strip():
            raise TreepackError(
                f"{path}:{number + 1}: text after a JSON array that is not messages; put one record on each line, or "
                "all into one array"
            )
        number += part.endswith(b"\n")


def _blocks_of_elements(data: bytes, path: str) -> Iterator[RecordBlock]:
    """Yield a block for each element of a damaged array."""
    for number, value, fault in array_elements(data, path):
        if fault is None:
            yield ValueBlock(path, number, [value])
        else:
            yield DamagedBlock(Skipped(f"{path}[{number}]", DAMAGED_RECORD, detail=fault))
