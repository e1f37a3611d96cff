"""The reading of the first record of a file with an answer: each field with the use that its reader makes of it.

    {"messages": [{"role": "user", "content": "Bolts?"}, {"role": "assistant", "content": "Seven."}], "shelf": "A"}
    --explain-->  messages[].role structure (2)   messages[].content prompt (1), trained (1)   shelf metadata (1)

The use is found by experiment: values are changed, the record is read again, and the trajectories are compared with
those before. So it is true for every format. Elements of lists count together. Many values are changed at once, and
halves of them only if the trajectories differ; the number of readings has a limit, whatever the number of fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from treepack.columns import COLUMNS, Numbers
from treepack.errors import TreepackError
from treepack.files.input_files.record_files import read_blocks, read_records
from treepack.files.input_files.records import Record
from treepack.ingest.readers.columns import aliases
from treepack.ingest.readers.columns.edits import edited
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, shown
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.messages.containers import with_containers
from treepack.ingest.readers.reading import recognised_file
from treepack.ingest.readers.registry import all_formats
from treepack.ingest.readers.turn_flags import TurnWeights, keys_of_turn, lines_of_texts, said_turns
from treepack.trajectory import Chat, Outcome, PromptCompletion, Tokens, Trajectory

_MAX_TRIED = 20  # values of one field, in elements of lists, that are changed
_MAX_READ = 64  # records of a file that are read: all of a session, or those before the first with an answer
_MAX_TRIALS = 600  # readings of changed records
_TRAINED, _PROMPT, _MASK, _STRUCTURE, _METADATA = "trained prompt mask structure metadata".split()
_KINDS = {Chat: "conversation", PromptCompletion: "prompt and completion as text", Tokens: "token ids"}
# Facts of a trajectory that a field may set, and values of trained tokens with the names of their fields in `Tokens`.
_FACTS = {name: name for name in "step weight reward advantage temperature".split()}
_FACTS |= {"id": "trajectory_id", "group": "group_id", "rollout": "rollout_id"}
_LISTS = {
    column.stored.replace("_", " "): column.name
    for column in COLUMNS
    if column.stored is not None and isinstance(column.kind, Numbers)
}

_Leaf = tuple[tuple[str | int, ...], Any]  # the steps to a value of a record, and the value
_Trial = Callable[[list[_Leaf]], set[str]]  # the uses of several values that are changed together


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
    try:
        recognised = recognised_file(read_blocks(path, options.limits), options)
        found = recognised.format
        assert found is not None  # only damaged records that were skipped have no format
        options = replace(options, columns=None) if edits else options
        stream = (record.with_lists() for block in recognised.blocks for record in block.records())
        edit = (edited(each, edits, TurnWeights())[0] if edits else with_containers(each) for each in stream)
        records = islice(edit, _MAX_READ)
        for together in [list(records)] if found.read_file else ([each] for each in records):
            kept = kept or together
            items = list(found.trajectories(together, options))
            if any(isinstance(item, Trajectory) and any(said_turns(item)) for item in items):
                kept = together
                break
        if found.name == "columns":
            columns = (options.columns or aliases.columns_of(kept[0])).line
    except TreepackError as refusal:
        error = str(refusal)
        kept = kept or [with_containers(each.with_lists()) for each in islice(read_records(path), 1)]
    made = [item for item in items if isinstance(item, Trajectory)]
    # The first record that contains a line that is trained.
    keys = {key for item in made for _, said in said_turns(item) for key in keys_of_turn(said)}
    place = next((place for place, record in enumerate(kept) if lines_of_texts(record.value) & keys), 0)
    if found is not None and error is None:
        trial = _trial(found, kept, place, options, items)
    value = kept[place].value
    others = {each.name: each for each in all_formats() if each is not found}
    present = {name: each.num_present(value) for name, each in others.items()}
    kinds = (
        _KINDS[type(each.content)] if isinstance(each, Trajectory) else f"skipped: {each.reason}" for each in items
    )
    return RecordUse(
        source=kept[place].source,
        format=None if found is None else found.name,
        columns=columns,
        fields=list(_fields(value, trial, {name for item in made for name in item.metadata})),
        outcome=[f"{kind}: {number}" for kind, number in Counter(kinds).items()],
        error=error,
        notes=sorted({note for item in made for note in item.notes}),
        others={name: each.why_not(value) for name, each in others.items()},
        close=sorted((name for name in others if present[name]), key=lambda name: -present[name]),
    )


def _trial(found: Format, records: Sequence[Record], place: int, options: ReadOptions, before: list[Outcome]) -> _Trial:
    """Return the function that finds the uses of values of the record at `place` by reading changed records."""

    def trial(leaves: list[_Leaf]) -> set[str]:
        uses: set[str] = set()
        choices = [(steps, _changes(value)) for steps, value in leaves]
        for number in range(max(len(each) for _, each in choices)):
            value: Any = deepcopy(records[place].value)
            for steps, each in choices:
                holder = reduce(lambda holder, step: holder[step], steps[:-1], value)
                holder[steps[-1]] = each[min(number, len(each) - 1)]
            changed = replace(records[place], value=value, line=None)
            try:
                after = list(found.trajectories([*records[:place], changed, *records[place + 1 :]], options))
                uses |= _differences(before, after)
            except TreepackError:
                uses.add(_STRUCTURE)
        # A change that breaks the record shows less than one that does not.
        return uses - {_STRUCTURE} or uses

    return trial


def _uses(leaves: list[_Leaf], trial: _Trial, metadata: set[str]) -> list[set[str]]:
    """Return the uses of each of `leaves`; of values that are metadata alone, one trial for all of them."""
    uses: list[set[str]] = [set() for _ in leaves]
    groups = [range(len(leaves))] if leaves else []
    for _ in range(_MAX_TRIALS):
        if not groups:
            break
        group = groups.pop()
        found = trial([leaves[number] for number in group])
        is_metadata = found == {_METADATA} and all(leaves[number][0][0] in metadata for number in group)
        if not found or is_metadata or len(group) == 1:
            for number in group:
                uses[number] = found or {"not used"}
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return uses


def _changes(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + " X"]
    if isinstance(value, int | float):
        return [value + 1, value - 1]
    numbers = value.tolist() if isinstance(value, np.ndarray) else list(value)
    if all(each in (0, 1) for each in numbers):
        # Flags of a mask: the first and the last one, of which padding may hide one.
        return [[1 - numbers[0], *numbers[1:]], [*numbers[:-1], 1 - numbers[-1]]]
    return [[each if each is None else each + 1 for each in numbers]]


def _differences(before: list[Outcome], after: list[Outcome]) -> set[str]:
    """Return the uses of values by which the reading changed from `before` to `after`."""
    uses: set[str] = set()
    for old, new in zip_longest(before, after):
        ways = _ways(old, old), _ways(new, old)
        names = {name for name in ways[0] | ways[1] if ways[0].get(name) != ways[1].get(name)}
        if _STRUCTURE in names:
            names = {_STRUCTURE}
        elif _MASK in names:  # other marks are other trained tokens, and other values of them
            names -= {_TRAINED, _PROMPT, *_LISTS}
        uses |= names
    return uses


def _ways(item: Outcome | None, old: Outcome | None) -> JsonObject:
    """Return the values of `item` by their use; `old`, the item before a change, decides which are trained."""
    if not isinstance(item, Trajectory) or not isinstance(old, Trajectory):
        return {_STRUCTURE: item}
    one, marks = item.content, old.content
    ways: JsonObject = {way: getattr(item, name) for way, name in _FACTS.items()} | {_METADATA: item.metadata}
    if isinstance(one, PromptCompletion):
        return ways | {_TRAINED: one.completion, _PROMPT: one.prompt, _STRUCTURE: type(one)}
    if isinstance(one, Chat) and isinstance(marks, Chat):
        split = list(zip(one.messages, marks.message_weights, strict=False))
        ways |= {_STRUCTURE: [each["role"] for each in one.messages], _MASK: one.message_weights}
        ways |= {_TRAINED: [each for each, weight in split if weight], "temperature": one.message_temperatures}
        return ways | {_PROMPT: ([each for each, weight in split if not weight], one.tools, one.chat_template_kwargs)}
    if isinstance(one, Tokens) and isinstance(marks, Tokens) and len(one.tokens) == len(marks.tokens):
        trained = np.zeros(len(one.tokens), np.bool_)
        for start, end in zip(marks.starts, marks.ends, strict=True):
            trained[start:end] = True
        lists = {_TRAINED: one.tokens[trained], _PROMPT: one.tokens[~trained]}
        lists |= {name: getattr(one, column) for name, column in _LISTS.items()}
        ways[_MASK] = [each.tobytes() for each in (one.starts, one.ends, one.span_weights)]
        # As bytes, two NaN are equal.
        return ways | {name: None if each is None else np.asarray(each).tobytes() for name, each in lists.items()}
    return {_STRUCTURE: item is old}


def _fields(value: JsonObject, trial: _Trial | None, metadata: set[str]) -> Iterator[FieldUse]:
    """Yield each field in the order of the record; the same field of elements of a list is one."""
    by_path: dict[str, list[_Leaf]] = {}
    for steps, leaf in _leaves(value, ()):
        path = "".join("[]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
        by_path.setdefault(path, []).append((steps, leaf))
    filled = {path: [each for each in leaves if not is_empty(each[1])] for path, leaves in by_path.items()}
    # The first values and the last: 3 of [a b c d e] -> a b e
    half = _MAX_TRIED // 2
    tried = {path: [*each[:half], *each[half:][-half:]] for path, each in filled.items()}
    # The first value of each field comes before the second one of any, as the number of trials has a limit.
    order = [leaf for each in zip_longest(*tried.values()) for leaf in each if leaf is not None]
    found = _uses(order, trial, metadata) if trial else [{"not read"} for _ in order]
    uses = {steps: each for (steps, _), each in zip(order, found, strict=True)}
    for path, leaves in by_path.items():
        counts = Counter(use for steps, _ in tried[path] for use in sorted(uses[steps]))
        sample = (filled[path] or leaves)[0][1]
        plain = sample.tolist() if isinstance(sample, np.ndarray) else sample
        without = "not tried" if filled[path] else "empty"
        yield FieldUse(path, shown(plain), dict(counts) or {without: len(leaves)}, len(leaves))


def _leaves(value: Any, steps: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the steps and value of each text, number, flag, null, empty list, and list of numbers."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*steps, name))
    elif isinstance(value, list) and any(not isinstance(each, int | float | None) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*steps, index))
    else:
        yield steps, value
