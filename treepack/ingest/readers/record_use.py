"""The reading of the first record of a file: each of its fields with the use that its reader makes of it.

    {"messages": [{"role": "user", "content": "Bolts?"}, {"role": "assistant", "content": "Seven."}], "shelf": "A"}
    --explain-->  messages[].role structure (2)   messages[].content prompt (1), trained (1)   shelf metadata (1)

The use is found by experiment: a value is changed, the record is read again, and the trajectories are compared with
those before. So it is true for every format. Elements of lists count together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.record_files import read_blocks, read_records
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import ColumnMap
from treepack.ingest.readers.columns import aliases
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import shown
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.messages.containers import with_containers
from treepack.ingest.readers.reading import recognised_file
from treepack.ingest.readers.registry import all_formats
from treepack.trajectory import Chat, PromptCompletion, Skipped, Tokens, Trajectory

_MAX_TRIED = 20  # values of one field, in elements of lists, that are changed
_MAX_READ = 64  # records of a file whose records belong together
_TRAINED, _PROMPT, _STRUCTURE, _METADATA, _UNUSED = "trained", "prompt", "structure", "metadata", "not used"
# Facts of a trajectory that a field may set.
_FACTS = tuple("trajectory_id group_id step weight reward advantage temperature rollout_id".split())
_SHORT = {"trajectory_id": "id", "group_id": "group", "rollout_id": "rollout"}

_Steps = tuple[str | int, ...]
_Items = list[Trajectory | Skipped]
_UsesOf = Callable[[_Steps, Any], set[str]]


@dataclass(frozen=True, slots=True)
class FieldUse:
    """A field, or the same field of all elements of a list: its first value, and how many values have each use."""

    path: str
    value: str
    uses: dict[str, int]
    num_values: int


@dataclass(frozen=True, slots=True)
class RecordUse:
    """The first record of a file. `error` is its refusal, and `others` are the formats that it does not have."""

    source: str
    format: str | None
    columns: str | None
    fields: list[FieldUse]
    outcome: list[str]
    error: str | None
    notes: list[str] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    close: dict[str, int] = field(default_factory=dict)  # required fields that the record has, of `others` with some


def explain(path: str, options: ReadOptions) -> RecordUse:
    """Return the use of each field of the first record of the file `path`.

    Raises:
        TreepackError: the file cannot be read, or is not a file of records.
    """
    blocks = read_blocks(path, options.limits)
    error: str | None = None
    found: Format | None = None
    try:
        recognised = recognised_file(blocks, options)
        found = recognised.format
        assert found is not None  # only damaged records that were skipped have no format
        num = 1 if found.read_file is None else _MAX_READ
        records = list(islice((record for block in recognised.blocks for record in block.records()), num))
    except TreepackError as refusal:
        error = str(refusal)
        records = list(islice(read_records(path), 1))
    first = with_containers(records[0].with_lists())
    records[0] = first
    items: _Items = []
    if found is not None:
        try:
            items = list(found.trajectories(records, options))
        except TreepackError as refusal:
            error = str(refusal)
    others = [each for each in all_formats() if each is not found]
    uses_of = None if found is None or error is not None else _trial(found, records, options, items)
    return RecordUse(
        source=first.source,
        format=None if found is None else found.name,
        columns=_columns(found, first, options),
        fields=list(_fields(first.value, uses_of)),
        outcome=_outcome(items),
        error=error,
        notes=sorted({note for item in items if isinstance(item, Trajectory) for note in item.notes}),
        others={each.name: each.why_not(first.value) for each in others},
        close={each.name: number for each in others if (number := each.num_present(first.value))},
    )


def _columns(found: Format | None, record: Record, options: ReadOptions) -> str | None:
    if found is None or found.name != "columns":
        return None
    try:
        columns: ColumnMap = options.columns or aliases.columns_of(record)
    except TreepackError:
        return None
    return columns.line


def _outcome(items: _Items) -> list[str]:
    """Return one line for each kind of trajectory, and each reason for skipping."""
    kinds = Counter(f"skipped: {item.reason}" if isinstance(item, Skipped) else _kind(item) for item in items)
    return [f"{kind}: {number}" for kind, number in kinds.items()]


def _kind(item: Trajectory) -> str:
    names = {Chat: "conversation", PromptCompletion: "prompt and completion as text", Tokens: "token ids"}
    return names[type(item.content)]


def _trial(found: Format, records: Sequence[Record], options: ReadOptions, before: _Items) -> _UsesOf:
    """Return the function that finds the uses of a value of the first record by reading changed records."""

    def uses_of(steps: _Steps, value: Any) -> set[str]:
        uses: set[str] = set()
        for changed in _changes(value):
            first = replace(records[0], value=_with(records[0].value, steps, changed), line=None)
            try:
                uses |= _differences(before, list(found.trajectories([first, *records[1:]], options)))
            except TreepackError:
                uses.add(_STRUCTURE)
        # A change that breaks the record shows less than one that does not.
        return uses - {_STRUCTURE} or uses or {_UNUSED}

    return uses_of


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


def _with(value: Any, steps: _Steps, changed: Any) -> Any:
    """Return `value` with `changed` at `steps`."""
    if not steps:
        return changed
    inner = _with(value[steps[0]], steps[1:], changed)
    if isinstance(value, dict):
        return {**value, steps[0]: inner}
    return [inner if index == steps[0] else each for index, each in enumerate(value)]


def _differences(before: _Items, after: _Items) -> set[str]:
    """Return the uses of a value by which the reading changed from `before` to `after`."""
    if [type(item) for item in before] != [type(item) for item in after]:
        return {_STRUCTURE}
    uses: set[str] = set()
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Skipped) or isinstance(new, Skipped):
            uses |= {_STRUCTURE} if old != new else set()
            continue
        uses |= {_SHORT.get(name, name) for name in _FACTS if getattr(old, name) != getattr(new, name)}
        if old.metadata != new.metadata:
            uses.add(_METADATA)
        uses |= _in_content(old.content, new.content)
    return uses


def _in_content(old: Chat | PromptCompletion | Tokens, new: Chat | PromptCompletion | Tokens) -> set[str]:
    if isinstance(old, PromptCompletion) and isinstance(new, PromptCompletion):
        uses = {_TRAINED} if old.completion != new.completion else set()
        return uses | ({_PROMPT} if old.prompt != new.prompt else set())
    if isinstance(old, Chat) and isinstance(new, Chat):
        return _in_chat(old, new)
    if isinstance(old, Tokens) and isinstance(new, Tokens):
        return _in_tokens(old, new)
    return {_STRUCTURE}


def _in_chat(old: Chat, new: Chat) -> set[str]:
    if [each["role"] for each in old.messages] != [each["role"] for each in new.messages]:
        return {_STRUCTURE}
    uses = {"mask"} if old.message_weights != new.message_weights else set()
    for one, other, weight in zip(old.messages, new.messages, old.message_weights, strict=True):
        if one != other:
            uses.add(_TRAINED if weight else _PROMPT)
    if old.tools != new.tools or old.chat_template_kwargs != new.chat_template_kwargs:
        uses.add(_PROMPT)
    return uses | ({"temperature"} if old.message_temperatures != new.message_temperatures else set())


def _in_tokens(old: Tokens, new: Tokens) -> set[str]:
    if len(old.tokens) != len(new.tokens):
        return {_STRUCTURE}
    trained = np.zeros(len(old.tokens), np.bool_)
    for start, end in zip(old.starts, old.ends, strict=True):
        trained[start:end] = True
    changed = old.tokens != new.tokens
    uses = {_TRAINED} if (changed & trained).any() else set()
    uses |= {_PROMPT} if (changed & ~trained).any() else set()
    for name in ("starts", "ends", "span_weights"):
        if not np.array_equal(getattr(old, name), getattr(new, name)):
            uses.add("mask")
    for name in ("advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "temperatures"):
        if not _is_equal(getattr(old, name), getattr(new, name)) and "mask" not in uses:
            uses.add(name.replace("_", " "))
    return uses


def _is_equal(old: Any, new: Any) -> bool:
    return (old is None) == (new is None) and (old is None or np.array_equal(old, new, equal_nan=True))


def _fields(value: dict[str, Any], uses_of: _UsesOf | None) -> Iterator[FieldUse]:
    """Yield each field in the order of the record; the same field of elements of a list is one."""
    by_path: dict[str, list[tuple[_Steps, Any]]] = {}
    for steps, leaf in _leaves(value, ()):
        path = "".join("[]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
        by_path.setdefault(path, []).append((steps, leaf))
    for path, leaves in by_path.items():
        filled = [(steps, leaf) for steps, leaf in leaves if not is_empty(leaf)]
        # The first values and the last: 3 of [a b c d e] -> a b e
        half = _MAX_TRIED // 2
        tried = filled if len(filled) <= _MAX_TRIED else [*filled[:half], *filled[-half:]]
        uses: Counter[str] = Counter()
        for steps, leaf in tried:
            uses.update(("not read",) if uses_of is None else sorted(uses_of(steps, leaf)))
        sample = (filled or leaves)[0][1]
        plain = sample.tolist() if isinstance(sample, np.ndarray) else sample
        yield FieldUse(path, shown(plain), dict(uses) or {"empty": len(leaves)}, len(leaves))


def _leaves(value: Any, steps: _Steps) -> Iterator[tuple[_Steps, Any]]:
    """Yield the steps and value of each text, number, flag, null, empty list, and list of numbers."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*steps, name))
    elif isinstance(value, list) and value and not _is_numbers(value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*steps, index))
    else:
        yield steps, value


def _is_numbers(value: list[Any]) -> bool:
    return all(each is None or isinstance(each, int | float) for each in value) and value[0] is not None
