"""Files to raw records, in pieces: decompresses and parses them, and hashes their bytes on the way.

    file --read_pieces--> Lines | Values | Rows --records()--> Record(source, path, value: dict)

    JSONL            one record per line, split at b"\\n" only       source "rollouts.jsonl:17"      Lines, unparsed
    JSON array       one record per element                         source "rollouts.json[3]"      Values
    JSON document    one record, compact or pretty-printed          source "task.traj"             Values
    Parquet, Arrow   one record per row                             source "part.parquet[3]"       Rows, Arrow columns
    torch.save       one record, or one per element of a list       source "rollouts.pt"           Values

A piece stands alone and is pickled cheaply, so that its records can be made in another process. What a file holds is
told from its bytes, not from its name: the magic number of gzip, zstd, Parquet, Arrow and torch, and else the first
non-empty line; but YAML, which a folder's search passes over, is told from its name. Nothing seeks, so standard input
works like a file. What a record means is left to the readers.

Memory: one piece, which is one record where that is larger; a JSON array or document, a file of torch, and Parquet that
is compressed as a file or comes from standard input, is held whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.ingest.readers.inputs import COMPRESSED, EXTENSIONS, STDIN, InputHash, displayed
from treepack.ingest.readers.tables import (
    ARROW_FILE_MAGIC,
    ARROW_STREAM_MAGIC,
    PARQUET_MAGIC,
    arrow_batches,
    parquet_batches,
    row_values,
)
from treepack.ingest.readers.torch_files import MAGIC as TORCH_MAGIC
from treepack.ingest.readers.torch_files import read_torch
from treepack.ingest.readers.yaml_files import SUFFIXES as YAML_SUFFIXES
from treepack.ingest.readers.yaml_files import read_yaml

COMPRESSION = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK = 1 << 20
# A small file is several pieces too, so that several workers share it; a large one has few that are worth a message.
FIRST_LINES, LINES = 1 << 16, 1 << 19  # bytes
VALUES = 16


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record. `source` names it in messages, `path` is the file it comes from (`<stdin>` for `-`)."""

    source: str
    path: str
    value: dict[str, Any]

    @property
    def label(self) -> str:
        """`source` without its folder: what a trajectory that has no id of its own is called."""
        return Path(self.path).name + self.source[len(self.path) :]


def folder_and_stem(record: Record) -> tuple[str, str]:
    """The folder's name and the file's name without its extensions, plus the record's place in a file of several."""
    path = Path(record.path)
    stem = path
    while stem.suffix in EXTENSIONS or stem.suffix in COMPRESSED:
        stem = stem.with_suffix("")
    return path.parent.name, stem.name + record.source[len(record.path) :]


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines of a JSONL file, as they are stored; the first of them is line `number` of the file at `path`."""

    path: str
    number: int
    data: bytes

    def records(self) -> Iterator[Record]:
        """The records of the lines that are not blank."""
        for number, line in enumerate(io.BytesIO(self.data), self.number):
            source = f"{self.path}:{number}"
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                if not line.strip():
                    continue
                value = parse_leniently(line, path=self.path, line=number, remedy="mend or remove the line")
            yield Record(source, self.path, _as_object(value, source))


@dataclass(frozen=True, slots=True)
class Values:
    """Elements of a JSON array from number `start` on, or a whole document, whose `start` is None."""

    path: str
    start: int | None
    values: list[Any]

    def records(self) -> Iterator[Record]:
        """One record per value."""
        for offset, value in enumerate(self.values):
            source = self.path if self.start is None else f"{self.path}[{self.start + offset}]"
            yield Record(source, self.path, _as_object(value, source))


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a Parquet or Arrow file from number `start` on."""

    path: str
    start: int
    batch: pa.RecordBatch

    def records(self) -> Iterator[Record]:
        """One record per row; lists of numbers are numpy arrays."""
        columns = row_values(self.batch, self.path)
        for number, values in enumerate(zip(*columns, strict=True), self.start):
            names = self.batch.schema.names
            yield Record(f"{self.path}[{number}]", self.path, dict(zip(names, values, strict=True)))


Piece = Lines | Values | TableRows


def read_records(path: str, *, input_hash: InputHash | None = None) -> Iterator[Record]:
    """The records of one file (`<stdin>`: of standard input), in order.

    Raises:
        TreepackError: unreadable, truncated, malformed or empty, or a record that is no JSON object.
    """
    for piece in read_pieces(path, input_hash=input_hash):
        yield from piece.records()


def read_pieces(path: str, *, input_hash: InputHash | None = None) -> Iterator[Piece]:
    """The pieces of one file (`<stdin>`: of standard input), in order; the first of them holds a record.

    Raises:
        TreepackError: unreadable, truncated or empty, or not of a kind that pieces are made of; what is wrong inside of
            a piece its `records` say.
    """
    num_pieces = 0
    shown = displayed(path)
    try:
        with _HashingReader(path) as raw:
            for piece in _pieces_of(raw, path):
                num_pieces += 1
                yield piece
            raw.drain()
            if input_hash is not None:
                input_hash.add(shown, raw.sha256.hexdigest())
    except (OSError, EOFError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = said.strip().partition("\n")[0]
        raise TreepackError(f"{shown}: cannot be read ({reason}); restore the file or its permissions") from error
    if num_pieces == 0:
        raise TreepackError(f"{shown}: holds no record; remove it from the inputs")


class _HashingReader(io.RawIOBase):
    """The bytes of a file, hashed as they pass."""

    def __init__(self, path: str) -> None:
        self.sha256 = hashlib.sha256()
        self._is_stdin = path == STDIN
        self._file: Any = sys.stdin.buffer if self._is_stdin else Path(path).open("rb", buffering=0)  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._file.readinto(buffer)
        self.sha256.update(memoryview(buffer)[:size])
        return size

    def drain(self) -> None:
        """Read what no parser asked for, so that the hash covers the whole file."""
        while self.read(CHUNK):
            pass

    def close(self) -> None:
        if not self._is_stdin:
            self._file.close()
        super().close()


class _Undrained(io.RawIOBase):
    """`raw` for a buffer that must not close it when it is collected: its hash is not finished yet."""

    def __init__(self, raw: _HashingReader) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._raw.readinto(buffer)


def _pieces_of(raw: _HashingReader, path: str) -> Iterator[Piece]:
    stream = io.BufferedReader(_Undrained(raw), CHUNK)
    compression = COMPRESSION.get(stream.peek(2)[:2])
    if compression is not None:
        stream = io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), compression), CHUNK)
    if Path(path).suffix in YAML_SUFFIXES:
        return _pieces_of_value(read_yaml(stream.read(), displayed(path)), displayed(path))
    magic = stream.peek(4)[:4]
    if magic == TORCH_MAGIC:
        return _pieces_of_value(read_torch(stream.read(), displayed(path)), displayed(path))
    if magic == ARROW_STREAM_MAGIC:
        return _row_pieces(arrow_batches(stream, displayed(path)), displayed(path))
    if magic not in (PARQUET_MAGIC, ARROW_FILE_MAGIC):
        return _json_pieces(stream, displayed(path))
    source: Any = path
    if compression is None and path != STDIN:
        raw.drain()
    else:
        source = pa.BufferReader(stream.read())
    batches = parquet_batches if magic == PARQUET_MAGIC else arrow_batches
    return _row_pieces(batches(source, displayed(path)), displayed(path))


def _json_pieces(stream: Any, path: str) -> Iterator[Piece]:
    number, first = 0, b""
    for number, line in enumerate(stream, 1):
        first = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if first.strip():
            break
    else:
        return
    try:
        value = orjson.loads(first)
    except orjson.JSONDecodeError:
        value = _parse_start(first, stream, path=path, number=number)
        if isinstance(value, _Document):
            yield from _pieces_of_value(value.value, path)
            return
    if isinstance(value, list):
        _refuse_more(stream, path, number)
        yield from _pieces_of_value(value, path)
        return
    _as_object(value, f"{path}:{number}")
    size, data = FIRST_LINES, first
    while data:
        if not data.endswith(b"\n"):
            data += stream.readline()
        yield Lines(path, number, data)
        number += data.count(b"\n")
        data = stream.read(size)
        size = min(2 * size, LINES)


@dataclass(frozen=True, slots=True)
class _Document:
    value: Any


def _parse_start(first: bytes, stream: Any, *, path: str, number: int) -> Any:
    """What the first line holds if it is lenient JSON, else the whole rest of the stream as one `_Document`.

    If neither can be parsed, the error is that of the line where the next line, or the lack of one, speaks for JSONL.
    """
    try:
        return parse_leniently(first, path=path, line=number, remedy="mend or remove the line")
    except TreepackError as of_line:
        rest = stream.read()
        try:
            return _Document(parse_leniently(first + rest, path=path, line=number, remedy="mend the document"))
        except TreepackError as of_document:
            second = next((line for line in rest.split(b"\n") if line.strip()), None)
            raise (of_line if second is None or _is_object(second) else of_document) from None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def parse_leniently(text: bytes, *, path: str, line: int, remedy: str) -> Any:
    """`text` by the standard library's parser, which takes NaN and long integers and says where it fails.

    Raises:
        TreepackError: not UTF-8, malformed, nested too deeply, or holding half of a surrogate pair.
    """
    try:
        value = json.loads(text.rstrip(b"\r\n").decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeDecodeError as error:
        at = line + text.count(b"\n", 0, error.start)
        reason = f"not UTF-8 (byte 0x{text[error.start]:02x})"
    except UnicodeEncodeError:
        at, reason = line, "half of a surrogate pair in a string"
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        reason = f"malformed JSON ({error.msg} at column {error.colno})"
    except (RecursionError, ValueError) as error:
        at, reason = line, f"unusable JSON ({error})"
    raise TreepackError(f"{path}:{at}: {reason}; {remedy}")


def _refuse_more(stream: Any, path: str, number: int) -> None:
    for after, line in enumerate(stream, number + 1):
        if line.strip():
            raise TreepackError(
                f"{path}:{after}: text after a JSON array; put one record on each line or all of them in one array"
            )


def _pieces_of_value(value: Any, path: str) -> Iterator[Piece]:
    if not isinstance(value, list):
        yield Values(path, None, [value])
        return
    for start in range(0, len(value), VALUES):
        yield Values(path, start, value[start : start + VALUES])


class NoObjectError(TreepackError):
    """A record is no JSON object."""


def _as_object(value: Any, source: str) -> dict[str, Any]:
    if type(value) is not dict:
        names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise NoObjectError(f"{source}: holds {names.get(type(value), 'a number')}; expected a JSON object")
    return value


def _row_pieces(batches: Iterator[pa.RecordBatch], path: str) -> Iterator[Piece]:
    start = 0
    for batch in batches:
        if batch.num_rows:
            yield TableRows(path, start, batch)
        start += batch.num_rows
