"""The reading of the first record of a file with an answer: each field with the use that its reader makes of it.

    {"messages": [{"role": "user", "content": "Bolts?"}, {"role": "assistant", "content": "Seven."}], "shelf": "A"}
    --explain-->  messages[].role structure (2)   messages[].content prompt (1), trained (1)   shelf metadata (1)

The use is found by experiment, for every format alike: values are changed, and the record is read again. Elements of
lists count together. Many values are changed at once, and halves of them only if the trajectories differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.record_files import read_blocks, read_records
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import ColumnMap
from treepack.ingest.readers.columns import aliases
from treepack.ingest.readers.columns.edits import edited
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, shown
from treepack.ingest.readers.reading import recognised_file
from treepack.ingest.readers.reading_differences import METADATA, STRUCTURE, changes_of, differences
from treepack.ingest.readers.registry import all_formats
from treepack.ingest.readers.turn_flags import TurnWeights, keys_of_turn, lines_of_texts, said_turns
from treepack.trajectory import Chat, Outcome, PromptCompletion, Tokens, Trajectory

_MAX_TRIED, _MAX_TRIALS = 20, 600  # values of one field that are changed, and readings of changed records
_MAX_READ = 64  # records of a file that are read: all of a session, or those before the first with an answer
_KINDS = {Chat: "conversation", PromptCompletion: "prompt and completion as text", Tokens: "token ids"}
_Leaf = tuple[tuple[str | int, ...], Any]  # the steps to a value of a record, and the value


@dataclass(frozen=True, slots=True)
class FieldUse:
    """A field, or the same field of all elements of a list: its first value, and how many values have each use."""

    path: str
    value: str
    uses: dict[str, int]
    num_values: int


@dataclass(frozen=True, slots=True)
class RecordUse:
    """The first record of a file with an answer. `error` is its refusal, `others` are the formats that it lacks."""

    source: str
    format: str | None
    columns: str | None
    fields: list[FieldUse]
    outcome: list[str]
    error: str | None
    notes: list[str] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    close: list[str] = field(default_factory=list)  # `others` of which the record has required fields, most first


def explain(path: str, options: ReadOptions) -> RecordUse:
    """Return the use of each field of the first record with an answer, or of the first record, of the file `path`.

    Raises:
        TreepackError: the file cannot be read, or is not a file of records.
    """
    error = columns = found = trial = None
    items: list[Outcome] = []
    kept: list[Record] = []
    edits = options.columns if options.columns and options.columns.is_edit else None
    edit = partial(edited, columns=edits or ColumnMap({}, {}, ()), weights=TurnWeights())
    try:
        recognised = recognised_file(read_blocks(path, options.limits), options)
        found = recognised.format
        assert found is not None  # only damaged records that were skipped have no format
        options = replace(options, columns=None) if edits else options
        stream = (edit(record.with_lists())[0] for block in recognised.blocks for record in block.records())
        records = islice(stream, _MAX_READ)
        for together in [list(records)] if found.read_file else ([each] for each in records):
            kept = kept or together
            items = list(found.trajectories(together, options))
            if any(isinstance(item, Trajectory) and any(said_turns(item)) for item in items):
                kept = together
                break
        columns = (options.columns or aliases.columns_of(kept[0])).line if found.name == "columns" else None
    except TreepackError as refusal:
        error = str(refusal)
        kept = kept or [edit(each.with_lists())[0] for each in islice(read_records(path), 1)]
    made = [item for item in items if isinstance(item, Trajectory)]
    keys = {key for item in made for _, said in said_turns(item) for key in keys_of_turn(said)}
    place = next((place for place, record in enumerate(kept) if lines_of_texts(record.value) & keys), 0)  # is trained
    if found is not None and error is None:
        trial = partial(_trial, partial(found.trajectories, options=options), kept, place, items)
    others = {each.name: each for each in all_formats() if each is not found}
    present = {name: each.num_present(kept[place].value) for name, each in others.items()}
    kinds = (
        _KINDS[type(each.content)] if isinstance(each, Trajectory) else f"skipped: {each.reason}" for each in items
    )
    return RecordUse(
        source=kept[place].source,
        format=None if found is None else found.name,
        columns=columns,
        fields=list(_fields(kept[place].value, trial, {name for item in made for name in item.metadata})),
        outcome=[f"{kind}: {number}" for kind, number in Counter(kinds).items()],
        error=error,
        notes=sorted({note for item in made for note in item.notes}),
        others={name: each.why_not(kept[place].value) for name, each in others.items()},
        close=sorted((name for name in others if present[name]), key=lambda name: -present[name]),
    )


def _trial(read: Any, records: Sequence[Record], place: int, before: list[Outcome], leaves: list[_Leaf]) -> set[str]:
    """Return the uses of the values `leaves` of the record at `place`, found by reading `records` with other values."""
    uses: set[str] = set()
    choices = [(steps, changes_of(value)) for steps, value in leaves]
    for number in range(max(len(each) for _, each in choices)):
        value: Any = deepcopy(records[place].value)
        for steps, each in choices:
            holder = reduce(lambda holder, step: holder[step], steps[:-1], value)
            holder[steps[-1]] = each[min(number, len(each) - 1)]
        changed = replace(records[place], value=value, line=None)
        try:
            uses |= differences(before, list(read([*records[:place], changed, *records[place + 1 :]])))
        except TreepackError:
            uses.add(STRUCTURE)
    # A change that breaks the record shows less than one that does not.
    return uses - {STRUCTURE} or uses


def _uses(leaves: list[_Leaf], trial: Callable[[list[_Leaf]], set[str]], metadata: set[str]) -> list[set[str]]:
    """Return the uses of each of `leaves`; of values that are metadata alone, one trial for all of them."""
    uses: list[set[str]] = [set() for _ in leaves]
    groups = [range(len(leaves))] if leaves else []
    for _ in range(_MAX_TRIALS):
        if not groups:
            break
        group = groups.pop()
        found = trial([leaves[number] for number in group])
        is_metadata = found == {METADATA} and all(leaves[number][0][0] in metadata for number in group)
        if not found or is_metadata or len(group) == 1:
            for number in group:
                uses[number] = found or {"not used"}
        else:
            groups += [group[len(group) // 2 :], group[: len(group) // 2]]
    return uses


def _fields(value: JsonObject, trial: Any, metadata: set[str]) -> Iterator[FieldUse]:
    """Yield each field in the order of the record; the same field of elements of a list is one."""
    by_path: dict[str, list[_Leaf]] = {}
    for steps, leaf in _leaves(value, ()):
        path = "".join("[]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
        by_path.setdefault(path, []).append((steps, leaf))
    filled = {path: [each for each in leaves if not is_empty(each[1])] for path, leaves in by_path.items()}
    half = _MAX_TRIED // 2  # the first values and the last
    tried = {path: [*each[:half], *each[half:][-half:]] for path, each in filled.items()}
    order = [leaf for each in tried.values() for leaf in each]
    found = _uses(order, trial, metadata) if trial else [{"not read"} for _ in order]
    uses = {steps: each for (steps, _), each in zip(order, found, strict=True)}
    for path, leaves in by_path.items():
        counts = Counter(use for steps, _ in tried[path] for use in sorted(uses[steps]))
        sample = (filled[path] or leaves)[0][1]
        uses_of_path = dict(counts) or {"not tried" if filled[path] else "empty": len(leaves)}
        sample = sample.tolist() if isinstance(sample, np.ndarray) else sample
        yield FieldUse(path, shown(sample), uses_of_path, len(leaves))


def _leaves(value: Any, steps: tuple[str | int, ...]) -> Iterator[_Leaf]:
    """Yield the steps and value of each text, number, flag, null, empty list, and list of numbers."""
    is_nested = isinstance(value, list) and any(not isinstance(each, int | float | None) for each in value)
    if is_nested or (isinstance(value, dict) and value):
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*steps, step))
    else:
        yield steps, value
