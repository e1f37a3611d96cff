"""Files to raw records, in pieces: decompress and parse files, and hash their bytes on the way.

    file --read_pieces--> Lines | Values | TableRows --records()--> Record(source, path, value: dict)

    JSONL            one record per line, split at b"\\n" only       source "rollouts.jsonl:17"      Lines, unparsed
    JSON array       one record per element                         source "rollouts.json[3]"      Values
    JSON document    one record, compact or pretty-printed          source "task.traj"             Values
    Parquet, Arrow   one record per row                             source "part.parquet[3]"       TableRows, columns
    torch.save       one record, or one per element of a list       source "rollouts.pt"           Values

A piece needs no other piece and is cheap to pickle, so another process can make its records. The bytes of a file decide
how it is read, not its name: the magic number of gzip, zstd, Parquet, Arrow and torch, or else the first line with
text. Only YAML is recognised by its name; the search of a folder skips it. No code seeks, so standard input works like
a file. The readers give the records their meaning.

Memory: one piece, which is one record if that is larger. A JSON array or document, a file of torch, and Parquet that is
compressed as a file or comes from standard input are in memory as a whole.
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
CHUNK = 1 << 20  # bytes of one read of a file
# Bytes of the pieces of a JSONL file: the first line, then 64, 128, 256, 512, 512, ... KiB. Small first pieces let
# several workers share a small file; large later pieces make the cost of a message negligible.
FIRST_LINES, LINES = 1 << 16, 1 << 19
VALUES = 16  # elements of an array in a piece: one is a whole rollout, often of several 100 kB


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record. `source` names it in messages, and `path` is its file (`<stdin>` for `-`)."""

    source: str
    path: str
    value: dict[str, Any]

    @property
    def label(self) -> str:
        """`source` without the folder: the name of a trajectory without an id."""
        # path "logs/r.jsonl", source "logs/r.jsonl:17" -> "r.jsonl:17"
        return Path(self.path).name + self.source[len(self.path) :]


def folder_and_stem(record: Record) -> tuple[str, str]:
    """Return the name of the folder, and the name of the file without extensions plus the record's place in it."""
    # "runs/a/log.json.gz[3]" -> ("a", "log[3]"); ".v2" of "log.v2.json" is not an extension of ours and stays.
    path = Path(record.path)
    stem = path
    while stem.suffix in EXTENSIONS or stem.suffix in COMPRESSED:
        stem = stem.with_suffix("")
    return path.parent.name, stem.name + record.source[len(record.path) :]


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines of a JSONL file as stored; the first is line `number` of the file `path`."""

    path: str
    number: int
    data: bytes

    def records(self) -> Iterator[Record]:
        """Yield one record per line that is not blank.

        Raises:
            TreepackError: a line is not a JSON object.
        """
        for number, line in enumerate(io.BytesIO(self.data), self.number):
            source = f"{self.path}:{number}"
            try:
                value = orjson.loads(line)  # strict; several times as fast as json, which takes over below
            except orjson.JSONDecodeError:
                if not line.strip():
                    continue
                value = parse_leniently(line, path=self.path, line=number, remedy="fix or remove the line")
            yield Record(source, self.path, _as_object(value, source))


@dataclass(frozen=True, slots=True)
class Values:
    """Elements of a JSON array from number `start` on, or a whole document, with `start` None."""

    path: str
    start: int | None
    values: list[Any]

    def records(self) -> Iterator[Record]:
        """Yield one record per value.

        Raises:
            TreepackError: a value is not a JSON object.
        """
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
        """Yield one record per row; lists of numbers are numpy arrays.

        Raises:
            TreepackError: a text is not UTF-8, or Python has no such date.
        """
        columns = row_values(self.batch, self.path)
        for number, values in enumerate(zip(*columns, strict=True), self.start):
            names = self.batch.schema.names
            yield Record(f"{self.path}[{number}]", self.path, dict(zip(names, values, strict=True)))


Piece = Lines | Values | TableRows


def read_records(path: str, *, input_hash: InputHash | None = None) -> Iterator[Record]:
    """Yield the records of one file (`<stdin>`: of standard input), in order.

    Raises:
        TreepackError: the file is unreadable, truncated, malformed or empty, or a record is not a JSON object.
    """
    for piece in read_pieces(path, input_hash=input_hash):
        yield from piece.records()


def read_pieces(path: str, *, input_hash: InputHash | None = None) -> Iterator[Piece]:
    """Yield the pieces of one file (`<stdin>`: of standard input), in order; the first piece has a record.

    Raises:
        TreepackError: the file is unreadable, truncated, empty or of an unknown kind. Errors inside of a piece are
            raised by its `records`.
    """
    num_pieces = 0
    shown = displayed(path)
    try:
        with _HashingReader(path) as raw:
            for piece in _pieces_of(raw, path):
                num_pieces += 1
                yield piece
            # A parser may stop early, for example at the end marker of an Arrow stream.
            raw.drain()
            if input_hash is not None:
                input_hash.add(shown, raw.sha256.hexdigest())
    except (OSError, EOFError) as error:
        # OSError: "No such file or directory" without the number and the path. EOFError comes from truncated gzip.
        message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = message.strip().partition("\n")[0]
        raise TreepackError(f"{shown}: cannot be read ({reason}); restore the file or its permissions") from error
    if num_pieces == 0:
        raise TreepackError(f"{shown}: contains no record; remove it from the inputs")


class _HashingReader(io.RawIOBase):
    """Read the bytes of a file and hash them on the way."""

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
        """Read the rest that no parser has read, so that the hash covers the whole file."""
        while self.read(CHUNK):
            pass

    def close(self) -> None:
        if not self._is_stdin:
            self._file.close()
        super().close()


class _Undrained(io.RawIOBase):
    """A view of `raw` that a buffer may close. A collected BufferedReader closes its file, but `raw` still hashes."""

    def __init__(self, raw: _HashingReader) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._raw.readinto(buffer)


def _pieces_of(raw: _HashingReader, path: str) -> Iterator[Piece]:
    # peek(n) returns at least one byte and does not consume it, also on a pipe.
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
        raw.drain()  # only for the hash: Arrow opens the file again by its path, and reads parts of it
    else:
        source = pa.BufferReader(stream.read())
    batches = parquet_batches if magic == PARQUET_MAGIC else arrow_batches
    return _row_pieces(batches(source, displayed(path)), displayed(path))


def _json_pieces(stream: Any, path: str) -> Iterator[Piece]:
    # Skip blank lines and the mark; `first` is then line `number`, and `stream` is after it.
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
    # A read ends in the middle of a line, so the rest of the line is added: pieces are whole lines.
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
    """Parse the first line leniently, or else the first line and the rest of the stream as one `_Document`.

    If both fail, the error is about the line if the file looks like JSONL: no second line, or an object on it.
    """
    try:
        return parse_leniently(first, path=path, line=number, remedy="fix or remove the line")
    except TreepackError as of_line:
        rest = stream.read()
        try:
            return _Document(parse_leniently(first + rest, path=path, line=number, remedy="fix the document"))
        except TreepackError as of_document:
            second = next((line for line in rest.split(b"\n") if line.strip()), None)
            raise (of_line if second is None or _is_object(second) else of_document) from None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def parse_leniently(text: bytes, *, path: str, line: int, remedy: str) -> Any:
    """Parse `text` with the standard library, which accepts NaN and long integers and reports the place of an error.

    Raises:
        TreepackError: the text is not UTF-8, malformed, nested too deeply, or has half of a surrogate pair.
    """
    try:
        value = json.loads(text.rstrip(b"\r\n").decode("utf-8"))
        # "\ud800" is legal JSON but not legal text: writing it as UTF-8 would fail much later, so it is tried here.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeDecodeError as error:
        at = line + text.count(b"\n", 0, error.start)  # `text` may be a document of many lines
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
    """A record is not a JSON object."""


def _as_object(value: Any, source: str) -> dict[str, Any]:
    if type(value) is not dict:
        names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise NoObjectError(f"{source}: contains {names.get(type(value), 'a number')}; expected a JSON object")
    return value


def _row_pieces(batches: Iterator[pa.RecordBatch], path: str) -> Iterator[Piece]:
    start = 0
    for batch in batches:
        if batch.num_rows:
            yield TableRows(path, start, batch)
        start += batch.num_rows
