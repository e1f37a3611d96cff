"""Raw records, and the blocks of files that contain them: values that are cheap to send to another process.

    file --read_blocks--> LineBlock | ValueBlock | TableRows | DamagedBlock --records()--> Record(source, path, value)

    JSONL            one record per line, split at b"\\n" only       source "rollouts.jsonl:17"      Lines, unparsed
                     an array of messages is a conversation
    JSON array       one record per element                         source "rollouts.json[3]"      Values
    JSON document    one record, compact or pretty-printed          source "task.traj"             Values
    Parquet, Arrow   one record per row                             source "part.parquet[3]"       TableRows, columns
    torch.save       one record, or one per element of a list       source "rollouts.pt"           Values
    Inspect .eval    one record per sample                          source "log.eval[3]"           Values

A block needs no other block, so another process can make its records. A damaged record is an error, or, if the caller
passes a list `damaged`, a `Skipped` in this list. The readers give the records their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import orjson
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import COMPRESSED, EXTENSIONS
from treepack.files.input_files.json_text import parse_leniently
from treepack.files.input_files.number_lists import LineParser
from treepack.files.input_files.tables import values_of_columns
from treepack.trajectory import Skipped

DAMAGED_RECORD, DAMAGED_FILE = "damaged record", "damaged file, or the damaged rest of one"
_VALUES = 16  # elements of an array in a block: one is a whole rollout, often of several 100 kB


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record. `source` names it in messages, and `path` is its file (`<stdin>` for `-`).

    `line` is the text of the record if its lists of numbers were read as arrays.
    """

    source: str
    path: str
    value: dict[str, Any]
    line: memoryview | None = None

    @property
    def label(self) -> str:
        """`source` without the folder: the name of a trajectory without an id."""
        # path "logs/r.jsonl", source "logs/r.jsonl:17" -> "r.jsonl:17"
        return Path(self.path).name + self.source[len(self.path) :]

    def with_lists(self) -> Record:
        """Return the record with lists in place of the arrays that were read from `line`."""
        return self if self.line is None else replace(self, value=orjson.loads(self.line), line=None)


def folder_and_stem(record: Record) -> tuple[str, str]:
    """Return the name of the folder, and the name of the file without extensions plus the record's place in it."""
    # "runs/a/log.json.gz[3]" -> ("a", "log[3]"); ".v2" of "log.v2.json" is not an extension of ours and stays.
    path = Path(record.path)
    stem = path
    while stem.suffix in EXTENSIONS or stem.suffix in COMPRESSED:
        stem = stem.with_suffix("")
    return path.parent.name, stem.name + record.source[len(record.path) :]


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines of a JSONL file as stored; the first is line `number` of the file `path`."""

    path: str
    number: int
    data: bytes

    def records(self, damaged: list[Skipped] | None = None, arrays: Sequence[str] = ()) -> Iterator[Record]:
        """Yield one record per line that is not blank; a damaged line is put into `damaged` if that is a list.

        Lists of numbers in the fields `arrays` are read as int32 or float64 arrays if their text is plain.

        Raises:
            TreepackError: a line is not a JSON object, and `damaged` is None.
        """
        parser = LineParser(arrays)
        for number, line in enumerate(self._lines(), self.number):
            source = f"{self.path}:{number}"
            try:
                try:
                    value, has_arrays = parser.parse(line)  # strict; json, which is slower, takes over below
                except orjson.JSONDecodeError:
                    if not bytes(line).strip():
                        continue
                    value = parse_leniently(bytes(line), path=self.path, line=number, remedy="fix or remove the line")
                    has_arrays = False
                value = as_object(as_conversation(value), source)
                record = Record(source, self.path, value, line if has_arrays else None)
            except TreepackError as error:
                _put_aside(error, source, damaged)
                continue
            yield record

    def _lines(self) -> Iterator[memoryview]:
        """Yield each line with its newline, without a copy."""
        view, start = memoryview(self.data), 0
        while start < len(self.data):
            end = self.data.find(b"\n", start) + 1 or len(self.data)
            yield view[start:end]
            start = end


@dataclass(frozen=True, slots=True)
class ValueBlock:
    """Elements of a JSON array from number `start` on, or a whole document, with `start` None.

    `field` is the name of the array if it is a field of a document: `rollouts.json.data[3]`.
    """

    path: str
    start: int | None
    values: list[Any]
    field: str = ""

    def records(self, damaged: list[Skipped] | None = None, arrays: Sequence[str] = ()) -> Iterator[Record]:
        """Yield one record per value; a value that is not an object is put into `damaged` if that is a list.

        Raises:
            TreepackError: a value is not a JSON object, and `damaged` is None.
        """
        name = f"{self.path}.{self.field}" if self.field else self.path
        for offset, value in enumerate(self.values):
            source = name if self.start is None else f"{name}[{self.start + offset}]"
            try:
                record = Record(source, self.path, as_object(value, source))
            except TreepackError as error:
                _put_aside(error, source, damaged)
                continue
            yield record


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a Parquet or Arrow file from number `start` on."""

    path: str
    start: int
    batch: pa.RecordBatch

    def records(self, damaged: list[Skipped] | None = None, arrays: Sequence[str] = ()) -> Iterator[Record]:
        """Yield one record per row; lists of numbers are numpy arrays. Damaged rows are put into `damaged`, a list.

        Raises:
            TreepackError: a text is not UTF-8, or Python has no such date, and `damaged` is None.
        """
        try:
            columns = values_of_columns(self.batch, self.path)
        except TreepackError as error:
            if damaged is None or self.batch.num_rows == 1:
                _put_aside(error, f"{self.path}[{self.start}]", damaged)
                return
            for offset in range(self.batch.num_rows):
                yield from TableRows(self.path, self.start + offset, self.batch.slice(offset, 1)).records(damaged)
            return
        for number, values in enumerate(zip(*columns, strict=True), self.start):
            names = self.batch.schema.names
            yield Record(f"{self.path}[{number}]", self.path, dict(zip(names, values, strict=True)))


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """Something that cannot be read: a record, or a file from some place on. `sentence` is the error."""

    skipped: Skipped

    def records(self, damaged: list[Skipped] | None = None, arrays: Sequence[str] = ()) -> Iterator[Record]:
        """Yield nothing, and put the fault into `damaged`.

        Raises:
            TreepackError: `damaged` is None.
        """
        if damaged is None:
            raise TreepackError(self.skipped.detail)
        damaged.append(self.skipped)
        yield from ()


RecordBlock = LineBlock | ValueBlock | TableRows | DamagedBlock


def _put_aside(error: TreepackError, source: str, damaged: list[Skipped] | None) -> None:
    if damaged is None:
        raise error
    damaged.append(Skipped(source, DAMAGED_RECORD, detail=str(error)))


def blocks_of_value(value: Any, path: str) -> Iterator[RecordBlock]:
    if not isinstance(value, list):
        yield ValueBlock(path, None, [value])
        return
    yield from blocks_of_list(value, path)


def blocks_of_list(values: list[Any], path: str, field: str = "") -> Iterator[RecordBlock]:
    """Yield the blocks of an array, which is the field `field` of a document if that is a name."""
    for start in range(0, len(values), _VALUES):
        yield ValueBlock(path, start, values[start : start + _VALUES], field)


def as_conversation(value: Any) -> Any:
    """Return the record of a line that is an array of messages, any other value as it is."""
    # [{"role": .., ..}, ..] -> {"messages": [..]}     [{"from": .., ..}, ..] -> {"conversations": [..]}
    for key, field in (("role", "messages"), ("from", "conversations")):
        if isinstance(value, list) and value and all(isinstance(each, dict) and key in each for each in value):
            return {field: value}
    return value


def is_of_lines(path: str) -> bool:
    """Return whether each line of a file is a record by its name: the only line of a.jsonl.gz, but not of a.json."""
    stem = PurePath(path)
    return (stem.with_suffix("") if stem.suffix in COMPRESSED else stem).suffix in (".jsonl", ".ndjson")


class NoObjectError(TreepackError):
    """A record is not a JSON object."""


def as_object(value: Any, source: str) -> dict[str, Any]:
    if type(value) is not dict:
        names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise NoObjectError(f"{source}: contains {names.get(type(value), 'a number')}; expected a JSON object")
    return value
