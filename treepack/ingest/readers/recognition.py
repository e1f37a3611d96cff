"""Recognise the format of a file by its first record, and find the list of records inside a document.

    pieces of a file --recognise--> Recognised: format, all pieces of the file, skipped records

With `skip_bad`, damaged records before the first usable one are skipped. `registry` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.messages import is_messages
from treepack.ingest.readers.number_lists import LARGE, list_fields
from treepack.ingest.readers.ranges import Range
from treepack.ingest.readers.records import Lines, Piece, Record, pieces_of_list
from treepack.trajectory import Skipped

MAX_PIECES = 16  # of a file whose first records are damaged, in which a record of a known format is searched


class UnknownFormatError(TreepackError):
    """No format matches a record."""


FormatOf = Callable[[Record], Format]  # raises UnknownFormatError if no format, or not the expected one, matches


@dataclass(frozen=True, slots=True)
class Recognised:
    """The format of a file, its pieces and its skipped records; no format if all records are damaged."""

    format: Format | None
    pieces: Iterator[Piece | Range]
    skipped: list[Skipped]


def recognise(
    pieces: Iterator[Piece | Range], format_of: FormatOf, *, expected: Format | None = None, skip_bad: bool
) -> Recognised:
    """Recognise the format of a file by its first record, or with `skip_bad` by the first one that has a known format.

    A document with one list of records is read as this list. If no record matches, the file has the `expected` format,
    and reading it raises the error.

    Raises:
        TreepackError: the first record is damaged, or of no known format while none is expected.
    """
    damaged: list[Skipped] | None = [] if skip_bad else None
    refusal: UnknownFormatError | None = None
    first: list[Piece | Range] = []  # taken to recognise the format, and put back before the others
    for piece in islice(pieces, MAX_PIECES if skip_bad else 1):
        first.append(piece)
        # As objects of Python, the numbers of a large line need twenty times its bytes. Rows of Parquet are arrays too.
        arrays = list_fields(piece.data) if isinstance(piece, Lines) and len(piece.data) > LARGE else ()
        for record in piece.records(damaged, arrays):
            try:
                return Recognised(format_of(record), chain(first, pieces), [])
            except UnknownFormatError as error:
                refusal = refusal or error
            if not skip_bad:
                break
    if refusal is None:
        return Recognised(None, iter(()), damaged or [])
    # The next piece is taken only if it matters: reading a file to its end adds it to the hash of the inputs.
    inner = _list_in_document(first[0], format_of) if len(first) == 1 else None
    following = [] if inner is None else list(islice(pieces, 1))
    if inner is not None and not following:
        return inner
    if expected is None:
        raise refusal
    return Recognised(expected, chain(first, following, pieces), [])


def _list_in_document(piece: Piece | Range, format_of: FormatOf) -> Recognised | None:
    """Return the records of the only list of objects in the only record of `piece`, or None if they are none."""
    # {"data": [{"messages": [..]}, {"messages": [..]}], "version": 2} -> the two elements of `data`
    records = list(islice(piece.records([]), 2))
    if len(records) != 1:
        return None
    record = records[0]
    names = lists_of_objects(record.value)
    if len(names) != 1:
        return None
    values = record.value[names[0]]
    try:
        format_of_list = format_of(Record(record.source, record.path, values[0]))
    except TreepackError:
        return None
    # A list of messages or spans is one rollout, or several that need each other.
    if format_of_list.read is None:
        return None
    others = [other for other, value in record.value.items() if other != names[0] and value is not None]
    skipped = [Skipped(record.source, f"fields beside the list '{names[0]}' of a document", is_rollout=False)]
    return Recognised(format_of_list, pieces_of_list(values, record.path, names[0]), skipped if others else [])


def lists_of_objects(value: dict[str, Any]) -> list[str]:
    """Return the names of the fields that are lists of at least one object, and of nothing else."""
    return [name for name, field in value.items() if isinstance(field, list) and field and is_messages(field)]
