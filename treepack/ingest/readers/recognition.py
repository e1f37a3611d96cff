"""Recognise the format of a file by its records, and find the list of records inside a document.

    blocks of a file --recognise--> Recognised: format, all blocks of the file, skipped records

The first record of a known format decides. Records before it are refused by the reader as any other bad record, or
skipped with `skip_bad`. `registry` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from treepack.errors import TreepackError
from treepack.files.input_files.number_lists import LARGE, list_fields
from treepack.files.input_files.ranges import Range
from treepack.files.input_files.records import LineBlock, Record, RecordBlock, ValueBlock, blocks_of_list, is_of_lines
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, is_messages
from treepack.ingest.readers.format import Format
from treepack.trajectory import Skipped

# Blocks and records in which one of a known format is searched; each record is compared with all formats.
_MAX_PIECES, _MAX_RECORDS = 16, 256

# Words of the name of a list of turns, of facts of one rollout beside it, and of figures of many rollouts.
_TURNS = frozenset(
    "turn turns step steps round rounds interaction interactions exchange exchanges transition transitions trajectory "
    "history dialog dialogue conversation messages actions calls trace".split()
)
_FACTS = frozenset(
    "reward rewards score scores return returns success solved outcome task goal question problem prompt query "
    "instruction episode".split()
)
_OF_MANY = frozenset("mean avg average std min max num rate".split())


_FormatOf = Callable[[Record], Format | None]  # None if no format, or not the expected one, matches


@dataclass(frozen=True, slots=True)
class RecognisedFile:
    """The format of a file, its blocks and its skipped records; no format if all records are damaged."""

    format: Format | None
    blocks: Iterator[RecordBlock | Range]
    skipped: list[Skipped]


def recognise(
    blocks: Iterator[RecordBlock | Range],
    format_of: _FormatOf,
    *,
    refuse: Callable[[Sequence[Record]], TreepackError],
    expected: Format | None = None,
    skip_bad: bool,
) -> RecognisedFile:
    """Recognise the format of a file by the first of its records that has a known format.

    A document with one list of records is read as this list. If no record matches, the file has the `expected` format,
    and reading it raises the error. `refuse` returns the error about records of no known format.

    Raises:
        TreepackError: the first record is damaged, or no record has a known format while none is expected.
    """
    damaged: list[Skipped] = []
    unknown: list[Record] = []  # the first records, which have no known format
    num_records = 0
    taken: list[RecordBlock | Range] = []  # to recognise the format, and put back before the others
    for block in islice(blocks, _MAX_PIECES):
        taken.append(block)
        # As objects of Python, the numbers of a large line need twenty times its bytes. Rows of Parquet are arrays too.
        arrays = list_fields(block.data) if isinstance(block, LineBlock) and len(block.data) > LARGE else ()
        if not skip_bad and len(taken) == 1:
            next(block.records(None, arrays), None)  # raises the error about a damaged first record
        for record in block.records(damaged, arrays):
            if (found := format_of(record)) is not None:
                return RecognisedFile(found, chain(taken, blocks), [])
            unknown += [record] if len(unknown) < _MAX_PIECES else []
            num_records += 1
        if len(taken) == 1 and (inner := _list_in_document(block, format_of)) is not None:
            following = list(islice(blocks, 1))
            if not following:
                return inner
            blocks = chain(following, blocks)
        if not skip_bad and num_records >= _MAX_RECORDS:
            break
    if not unknown:
        return RecognisedFile(None, iter(()), damaged)
    if expected is None:
        raise refuse(unknown)
    return RecognisedFile(expected, chain(taken, blocks), [])


def _list_in_document(block: RecordBlock | Range, format_of: _FormatOf) -> RecognisedFile | None:
    """Return the records of the only list of objects in the only record of `block`, or None if they are none."""
    # {"data": [{"messages": [..]}, {"messages": [..]}], "version": 2} -> the two elements of `data`
    records = list(islice(block.records([]), 2))
    if len(records) != 1:
        return None
    record = records[0]
    # The only line of r.jsonl is a record, as it would be among others.
    if is_of_lines(record.path) and not isinstance(block, ValueBlock):
        return None
    names = lists_of_objects(record.value)
    if len(names) != 1 or is_episode(record.value, names[0]):
        return None
    values = record.value[names[0]]
    elements = (Record(record.source, record.path, value) for value in values[:_MAX_RECORDS])
    format_of_list = next((found for element in elements if (found := format_of(element)) is not None), None)
    # A list of messages or spans is one rollout, or several that need each other.
    if format_of_list is None or format_of_list.read is None:
        return None
    others = [other for other, value in record.value.items() if other != names[0] and value is not None]
    skipped = [Skipped(record.source, f"fields beside the list '{names[0]}' of a document", is_rollout=False)]
    return RecognisedFile(format_of_list, blocks_of_list(values, record.path, names[0]), skipped if others else [])


def is_episode(value: JsonObject, name: str) -> bool:
    """Return whether the list `name` of a document has the turns of one rollout, by its name or the facts beside it."""
    # {"turns": [{"prompt": .., "response": ..}, ..], "total_reward": 1}, but not {"results": [..], "mean_reward": 0.5}
    words = [set(each.lower().split("_")) for each, field in value.items() if each != name and not is_empty(field)]
    is_of_one = any(each & _FACTS and not each & _OF_MANY for each in words)
    return is_of_one or bool(set(name.lower().split("_")) & _TURNS)


def lists_of_objects(value: JsonObject) -> list[str]:
    """Return the names of the fields that are lists of at least one object, and of nothing else."""
    return [name for name, field in value.items() if isinstance(field, list) and field and is_messages(field)]


def refuse_own_row(record: Record) -> None:
    """Refuse a row of a packed directory, or a node of a trie.

    Raises:
        TreepackError: `record` has the columns of one. Both have token ids, so `tokens` would match them.
    """
    if "subtree_end" in record.value or {"tree_id", "node_id"} <= record.value.keys():
        raise TreepackError(
            f"{record.source}: is a part of a trie or packed directory; "
            "give the whole directory with its manifest to pack, stats or train, or the rollouts it was made from"
        )
