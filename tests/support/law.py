"""The law of reading: a change of any value of a record changes the result, or a note names the field.

    base     {"id": 1, "messages": [..], "cost": 3}  --read-->  trajectories, notes
    changed  {"id": 1, "messages": [..], "cost": 4}  --read-->  others, or the same and a note "field 'cost' not used"

`vanished` changes one value at a time, and returns the paths whose change nobody sees. `mutations` change one key at a
time: rename it, move it, give its value another type. `silent` returns those that change what is trained without a
note, a skip or a refusal that the original did not have.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import column_map
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.unread import is_prose
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.reading import UnreadPart, detect_format, read_parts
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Chat, PromptCompletion, Skipped, Tokens, Trajectory

Path = tuple[str | int, ...]
Item = Trajectory | Skipped

# Values of these fields decide by themselves what is trained, so another value may train something else.
DECIDING = frozenset(
    """
    loss loss_scale loss_weight trainable weight train sampled mask role from type status remove_sample trained
    is_copied_context finish_reason stop_reason is_demo is_last_step session_id parent llm_call_count
    trial_name trace_source action label kto_tag
    """.split()
)
# Names that several readers take for the same thing.
SYNONYMS = {
    "content": "text",
    "reasoning_content": "reasoning",
    "reward": "score",
    "messages": "conversations",
    "completion": "response",
    "response": "completion",
    "output": "response",
    "tools": "functions",
    "id": "trajectory_id",
    "loss_mask": "response_mask",
    "response_mask": "loss_mask",
    "chosen": "output",
    "arguments": "input",
}


@dataclass(frozen=True)
class Reading:
    """The result of the reader of `form` for records: its items, or the sentence of its refusal."""

    items: tuple[Item, ...] = ()
    refusal: str = ""
    form: Format | None = None

    @cached_property
    def notes(self) -> Counter[str]:
        """How often each note and each reason for skipping applies."""
        notes = (item.notes if isinstance(item, Trajectory) else (item.reason,) for item in self.items)
        return Counter(note for each in notes for note in each)

    @cached_property
    def facts(self) -> str:
        """Everything but the notes, as text."""
        return repr(
            [
                item if isinstance(item, Skipped) else (item.content, *[getattr(item, name) for name in FACTS])
                for item in self.items
            ]
        )

    @cached_property
    def trained(self) -> list[Any]:
        """The trained turns with their texts, for each trajectory."""
        return [list(_trained(item)) for item in self.items if isinstance(item, Trajectory)]

    @cached_property
    def turns(self) -> list[Any]:
        """Which turns are trained, without their texts."""
        return [[place for place, _ in turns] for turns in self.trained]


FACTS = """
    trajectory_id group_id step weight reward advantage metadata temperature rollout_id rollout_part source is_truncated
    failed
""".split()


def _trained(item: Trajectory) -> Iterator[tuple[Any, Any]]:
    content = item.content
    if isinstance(content, Chat):
        for message, weight in zip(content.messages, content.message_weights, strict=True):
            if weight:
                calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
                yield weight, (message["content"], message.get("reasoning_content"), calls)
    elif isinstance(content, PromptCompletion):
        yield 0, content.completion
    else:
        assert isinstance(content, Tokens)
        for start, end in zip(content.starts.tolist(), content.ends.tolist(), strict=True):
            yield (start, end), content.tokens[start:end].tolist()


def _call(function: dict[str, Any]) -> tuple[str, Any]:
    """Return name and arguments of a call; arguments as JSON text mean the same as an object."""
    arguments = function["arguments"]
    parsed = parsed_json(arguments)
    return function["name"], arguments if parsed is None else parsed


def read(records: Sequence[Record], form: Format | None = None) -> Reading:
    """Read `records` as one file, whose format its first record decides if it is not given."""
    if not records:
        return Reading()
    np.set_printoptions(threshold=100_000)
    try:
        form = form or formats_by_name()[detect_format(records[0])]
        return Reading(tuple(form.trajectories(records, ReadOptions(shapes=True))), form=form)
    except TreepackError as error:
        return Reading(refusal=str(error), form=form)


def read_edited(records: Sequence[Record], form: Format, columns: str) -> Reading:
    """Read `records` of one file with `columns`, which ignore fields or name a mask."""

    class Block:
        def records(self, *_: Any) -> Iterator[Record]:
            return iter(records)

    options = ReadOptions(shapes=True, columns=column_map(columns))
    try:
        return Reading(tuple(UnreadPart(Block(), form.name, options).trajectories()), form=form)  # type: ignore[arg-type]
    except TreepackError as error:
        return Reading(refusal=str(error), form=form)


def read_path(path: Any, columns: str | None = None) -> Reading:
    """Read the file at `path` as a command does, with `columns` if there are some."""
    options = ReadOptions(shapes=True, columns=None if columns is None else column_map(columns))
    try:
        return Reading(tuple(item for part in read_parts([path], options) for item in part.trajectories()))
    except TreepackError as error:
        return Reading(refusal=str(error))


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each text, number and boolean; of a long list, of its first two and its last element."""
    if isinstance(value, dict):
        for name, field in value.items():
            yield from leaves(field, (*path, name))
    elif isinstance(value, list) and not _is_numbers(value):
        places = range(len(value)) if len(value) <= 3 else (0, 1, len(value) - 1)
        for place in places:
            yield from leaves(value[place], (*path, place))
    elif isinstance(value, str | int | float | list | np.ndarray):
        yield path


def _is_numbers(value: list[Any]) -> bool:
    """Return whether a list contains numbers, which are one value: some of them may be of untrained tokens."""
    return bool(value) and isinstance(value[0], int | float)


def keys(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each field of each object; of a long list of objects, as `leaves` does."""
    if isinstance(value, dict):
        for name, field in value.items():
            yield (*path, name)
            yield from keys(field, (*path, name))
    elif isinstance(value, list):
        places = range(len(value)) if len(value) <= 3 else (0, 1, len(value) - 1)
        for place in places:
            yield from keys(value[place], (*path, place))


def at(value: Any, path: Path) -> Any:
    """Return the value at `path`."""
    for name in path:
        value = value[name]
    return value


def changed(value: Any) -> Any:
    """Return another value of the type of `value`: a text with a marker, the next number, the other boolean."""
    if isinstance(value, list):
        return [each if each is None else changed(each) for each in value]
    if isinstance(value, np.ndarray):
        return ~value if value.dtype == bool else value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        # A text of JSON stays one, so that a reader that parses it sees the marker.
        return value[:-1] + ', "zq7marker": 1}' if value.startswith("{") and len(value) > 2 else value + " zq7marker"
    return value + 1


def schema_path(path: Path) -> tuple[str, ...]:
    """Return `path` without the numbers of elements."""
    return tuple(name for name in path if isinstance(name, str))


def name_of(names: Sequence[str]) -> str:
    """Return `names` as one path without places of lists, which flat names have: "llm.tools.0.name"."""
    return ".".join(part for part in ".".join(names).split(".") if not part.isdecimal())


def _with_key(value: Any, path: Path) -> Path:
    """Return `path` with the key of an attribute of OTLP: attributes.3.value.stringValue -> attributes.llm.system."""
    for place in range(2, len(path)):
        if path[place] == "value" and "key" in (holder := at(value, path[:place])):
            return (*path[: place - 1], holder["key"])
    return path


def is_named(path: Path, notes: Iterable[str]) -> bool:
    """Return whether a note names the field at `path`, or a field that contains it."""
    names = schema_path(path)
    whole = [name_of(names[:end]) for end in range(1, len(names) + 1)]
    quoted = [note.split("'")[1] for note in notes if note.count("'") >= 2]
    # The children of children have the path of the first ones: root.children.children.cost -> root.cost
    ends = {tuple(each.split("."))[-1] for each in quoted if set(each.split(".")) <= set(names)}
    return (
        names[-1] in ends
        or any(name in quoted for name in (*whole, *names))
        or any(name in note.split() for name in names for note in notes)
    )


@dataclass
class Fates:
    """What became of the values of a format's samples: seen in the result or named in a note, or not."""

    seen: set[tuple[Any, ...]] = field(default_factory=set)
    unseen: dict[tuple[Any, ...], None] = field(default_factory=dict)

    @property
    def lost(self) -> list[str]:
        """The paths of values that nobody sees."""
        return list(dict.fromkeys(".".join(key[-1]) for key in self.unseen if key not in self.seen))


def follow(records: Sequence[Record], fates: Fates) -> None:
    """Change each value of `records`, one at a time, and add to `fates` what became of it.

    A text of several words must be seen in each record; for a number, a flag or a name, of which a reader may need one
    of many, one sample is enough.
    """
    base = read(records)
    if not base.trained:  # records that are no rollouts, such as the result of a trial, which its trajectories read
        return
    belong_together = formats_by_name()[detect_format(records[0])].read_file is not None
    for number, record in enumerate(records):
        for path in leaves(record.value):
            value = at(record.value, path)
            is_text = isinstance(value, str) and is_prose(value)
            # The rest of a path with keys such as places of a list is the same path.
            key = (
                (0 if belong_together else number, record.path, schema_path(path)) if is_text else (schema_path(path),)
            )
            if key in fates.seen:
                continue
            if is_named(_with_key(record.value, path), base.notes):
                fates.seen.add(key)
                continue
            after = read(_replaced(records, number, path, changed(value)))
            is_seen = after.refusal or after.facts != base.facts or after.notes != base.notes
            if is_seen:
                fates.seen.add(key)
            else:
                fates.unseen[key] = None


def misnamed(records: Sequence[Record]) -> list[str]:
    """Return the paths that a note calls not used although a change of each value under them changes the result."""
    base = read(records)
    effects: dict[tuple[str, ...], bool] = {}
    for number, record in enumerate(records):
        for path in leaves(record.value):
            name = name_of(schema_path(path))
            if f"field '{name}' not used" not in base.notes or effects.get(schema_path(path)) is False:
                continue
            after = read(_replaced(records, number, path, changed(at(record.value, path))))
            has_effect = bool(after.refusal) or after.facts != base.facts
            effects[schema_path(path)] = has_effect and effects.get(schema_path(path), True)
    return [".".join(path) for path, has_effect in effects.items() if has_effect]


OF_REQUEST = frozenset(
    "model messages input instructions tools temperature previous_response_id conversation n max_tokens".split()
)
OF_ROLLOUT = frozenset({"session_id", "group_id", "reward"})


def other_form(value: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a model in its other form: one object, or request and response."""
    if "request" in value:
        return {**value.get("response", {}), **value["request"], **{k: value[k] for k in OF_ROLLOUT & value.keys()}}
    answer = {k: each for k, each in value.items() if k not in OF_REQUEST | OF_ROLLOUT}
    asked = {k: value[k] for k in OF_REQUEST & value.keys()}
    return {"request": asked, "response": answer, **{k: value[k] for k in OF_ROLLOUT & value.keys()}}


def _replaced(records: Sequence[Record], number: int, path: Path, value: Any) -> list[Record]:
    def edit(record: Any) -> None:
        at(record, path[:-1])[path[-1]] = value

    return _edited(records, number, edit)


def _edited(records: Sequence[Record], number: int, edit: Callable[[Any], None]) -> list[Record]:
    done = list(records)
    value = copy.deepcopy(records[number].value)
    edit(value)
    done[number] = Record(records[number].source, records[number].path, value)
    return done


Edit = Callable[[Any], None]


def mutations(value: Any) -> Iterator[tuple[str, Path, Edit]]:
    """Yield name, path and edit of every mutation of one field of the record `value`, once for each path of names."""
    seen = set()
    for path in keys(value):
        if schema_path(path) in seen:
            continue
        seen.add(schema_path(path))
        field, name = at(value, path), str(path[-1])
        if field is None or (isinstance(field, str | list | dict) and not field):
            continue
        yield from ((kind, path, edit) for kind, edit in _edits(path, name, field))


def _edits(path: Path, name: str, field: Any) -> Iterator[tuple[str, Edit]]:
    def put(new: Any) -> Edit:
        return lambda record: at(record, path[:-1]).__setitem__(name, new)

    def move(to: Callable[[Any], Any], key: str = name) -> Edit:
        # A field that is there already would be lost by the mutation itself.
        def edit(record: Any) -> None:
            target = to(record)
            if isinstance(target, dict) and key not in target and target is not at(record, path):
                target[key] = at(record, path[:-1]).pop(name)

        return edit

    yield "renamed", move(lambda record: at(record, path[:-1]), name + "_x")
    if len(path) > 1:
        parents = [path[:end] for end in range(len(path) - 1)]
        yield "up", move(lambda record: _object(record, parents))
    yield "down", move(lambda record: at(record, path[:-1]).setdefault("extra_fields", {}))
    if name in SYNONYMS:
        other = SYNONYMS[name]
        twin = [{**field[0], "content": "zq7other"}] if isinstance(field, list) and _is_message(field) else "zq7other"
        yield f"doubled as {other}", lambda record: at(record, path[:-1]).setdefault(other, twin)
    # Content that is JSON is the text of the message.
    if isinstance(field, list | dict) and name != "content":
        yield "JSON text", put(json.dumps(field, default=str))
    if isinstance(field, str):
        yield "list of texts", put([field])
    yield "true", put(True)
    yield "null", put(None)
    yield "empty", put("")


def _is_message(field: list[Any]) -> bool:
    return bool(field) and isinstance(field[0], dict) and "content" in field[0]


def _object(record: Any, paths: list[Path]) -> Any:
    """Return the innermost object among those at `paths`, which contain each other."""
    return next(each for each in (at(record, path) for path in reversed(paths)) if isinstance(each, dict))


def _is_argument(value: Any, path: Path) -> bool:
    """Return whether `path` leads into the arguments of a call, which a model chose and no reader understands."""
    for place, name in enumerate(path[:-1]):
        holder = at(value, path[:place])
        if name in ("args", "arguments", "input", "parameters") and isinstance(holder, dict) and "name" in holder:
            return True
    return False


# Fields that decide what is trained, and that a record may have beside those that a reader knows.
BESIDE: dict[str, Any] = {
    "completion": "zq7 another answer",
    "response": "zq7 another answer",
    "responses": ["zq7 another answer"],
    "output": "zq7 another answer",
    "chosen": "zq7 another answer",
    "text": "zq7 another answer",
    "raw_output": "zq7 another answer",
    "loss_mask": [0],
    "assistant_mask": "[0]",
    "train": False,
    "finish_reason": "length",
}


def unnoticed(records: Sequence[Record]) -> list[str]:
    """Return the fields of `BESIDE` that nobody notices in a record: neither trained, nor noted, nor refused.

    Metadata is not enough: a rollout whose answer became metadata trains something else.
    """
    base = read(records)
    found = []
    # The last record that is a rollout, or a part of one: without it something else is trained.
    places = [k for k in range(len(records)) if read([*records[:k], *records[k + 1 :]]).trained != base.trained]
    if not base.trained or not places:
        return []
    last = records[places[-1]]
    for name, value in BESIDE.items():
        if name in last.value:
            continue
        edited = Record(last.source, last.path, {**last.value, name: value})
        after = read([*records[: places[-1]], edited, *records[places[-1] + 1 :]])
        is_truncated = [item.is_truncated for item in after.items if isinstance(item, Trajectory)]
        is_noticed = bool(after.refusal) or bool(after.notes - base.notes) or after.trained != base.trained
        if not is_noticed and not (name == "finish_reason" and any(is_truncated)):
            found.append(name)
    return found


@dataclass(frozen=True, slots=True)
class Change:
    """A mutation of a record: its name, the records after it, and whether it trains other turns in silence."""

    name: str
    records: Sequence[Record]
    is_silent: bool
    trains_same: bool


def silent(records: Sequence[Record], *, every: int) -> list[str]:
    """Return the mutations of each record that change the trained turns without a new note, skip or refusal.

    Of the mutations, one in `every` is tried. A record that is read alone decides the format of its file.
    """
    is_one_file = formats_by_name()[detect_format(records[0])].read_file is not None
    files = [records] if is_one_file else [[record] for record in records]
    tried = itertools.islice(itertools.chain.from_iterable(map(_mutations_of, files)), 0, None, every)
    changes = (_change(*each) for each in tried)
    return [change.name for change in changes if change is not None and change.is_silent]


def silently_read(records: Sequence[Record], name: str) -> int:
    """Return how many mutations of this name give another result, of a prompt or anything else, without a new note.

    Raises:
        AssertionError: no record has the field of the mutation.
    """
    base = read(records)
    edits = [(number, edit) for _, _, number, kind, path, edit in _mutations_of(records) if _named(kind, path) == name]
    assert edits, name
    others = (read(_edited(records, number, edit)) for number, edit in edits)
    return sum(not each.refusal and each.facts != base.facts and not each.notes - base.notes for each in others)


def _named(kind: str, path: Path) -> str:
    return f"{kind}: {'.'.join(schema_path(path))}"


def _mutations_of(records: Sequence[Record]) -> Iterator[tuple[Sequence[Record], Reading, int, str, Path, Edit]]:
    base = read(records)
    for number, record in enumerate(records):
        yield from ((records, base, number, *mutation) for mutation in mutations(record.value))


def changed_by_chance(records: Sequence[Record], number: int, rng: random.Random, base: Reading) -> Change | None:
    """Return a mutation of record `number`, compared with the reading `base`; None if there is none."""
    choices = list(mutations(records[number].value))
    return _change(records, base, number, *rng.choice(choices)) if choices else None


def _change(records: Sequence[Record], base: Reading, number: int, kind: str, path: Path, edit: Edit) -> Change | None:
    """Apply one mutation; None if it changes what the record says, so that other turns are trained rightly."""
    if path[-1] in DECIDING and kind in ("true", "null", "empty", "up"):
        return None
    if _is_argument(records[number].value, path):
        return None
    # A record without a list of steps is a rollout with fewer steps, also if the list was JSON text.
    field = at(records[number].value, path)
    if kind in ("null", "empty") and (isinstance(field, list | dict | np.ndarray) or parsed_json(field) is not None):
        return None
    edited = _edited(records, number, edit)
    after = read(edited, base.form if number else None)
    # null and "" remove the value itself, so texts may go; which turns are trained may not change.
    before, now = (base.turns, after.turns) if kind in ("null", "empty") else (base.trained, after.trained)
    is_noted = bool(after.refusal) or not after.items or bool(after.notes - base.notes)
    trains_same = after.trained == base.trained
    return Change(_named(kind, path), edited, not is_noted and before != now, trains_same)


# One answer in blocks whose order chat messages do not have, and one with the result of its call inside.
MIXED: list[dict[str, Any]] = [
    {"type": "text", "text": "Zq7 first."},
    {"type": "thinking", "thinking": "Zq7 second."},
    {"type": "text", "text": "Zq7 third."},
    {"type": "tool_use", "id": "zq7", "name": "zq7_call", "input": {"zq7": "fourth"}},
    {"type": "text", "text": "Zq7 fifth."},
]
WITH_RESULT: list[dict[str, Any]] = [
    {"type": "text", "text": "Zq7 first."},
    {"type": "tool_use", "id": "zq7", "name": "zq7_call", "input": {"zq7": "second"}},
    {"type": "tool_result", "tool_use_id": "zq7", "content": "Zq7 third."},
    {"type": "text", "text": "Zq7 fourth."},
]


def with_answer(records: Sequence[Record], content: Any) -> Iterator[list[Record]]:
    """Yield the records with `content` as that of each message of the assistant whose content is text, one at a time.

    Of messages at one path of names, the last one is changed.
    """
    for number, record in enumerate(records):
        places: dict[tuple[str, ...], Path] = {}
        for path in keys(record.value):
            holder = at(record.value, path[:-1])
            is_said = isinstance(holder, dict) and "assistant" in (holder.get("role"), holder.get("type"))
            if path[-1] == "content" and is_said and isinstance(at(record.value, path), str):
                places[schema_path(path)] = path
        for path in places.values():
            yield _replaced(records, number, path, content)


def said_in_order(reading: Reading) -> list[list[tuple[str, bool]]]:
    """Return the thoughts, texts and calls of each conversation in their order, each with whether it is trained."""
    found = []
    for item in reading.items:
        if not isinstance(item, Trajectory) or not isinstance(item.content, Chat):
            continue
        said: list[tuple[str, bool]] = []
        for message, weight in zip(item.content.messages, item.content.message_weights, strict=True):
            calls = [json.dumps(_call(call["function"])) for call in message.get("tool_calls") or ()]
            parts = [message.get("reasoning_content"), message["content"], *calls]
            said += [(part, weight > 0) for part in parts if part]
        found.append(said)
    return found


def order_of_marks(said: list[tuple[str, bool]]) -> list[str]:
    """Return the ordinal numbers of the texts of `MIXED` or `WITH_RESULT`, in their order."""
    words = "|".join("first second third fourth fifth".split())
    return [word for text, _ in said if "zq7" in text.lower() for word in re.findall(words, text)]


# A field that no format declares, and names of roles whose turns no model wrote.
FLAG = "zq7_flag"
_OTHERS = frozenset("user system tool human function developer observation environment prompter tool_result".split())


def with_flags(records: Sequence[Record]) -> Iterator[tuple[list[Record], set[Any]]]:
    """Yield the records with a flag on every turn of the model at one path of names, and the texts that it excludes.

    A turn is the innermost object of a list, or the record itself, that has a whole trained text or the ids of one, but
    no call. The flag depends on the text alone: false for the first text, true for the second, false for the third, ...
    """
    said = said_alone(read(records))
    flags = {key: bool(number % 2) for number, key in enumerate(dict.fromkeys(said))}
    turns: dict[tuple[str, ...], list[tuple[int, Path, Any]]] = {}
    for number, record in enumerate(records):
        for path, key in _turns(record.value, (), flags):
            turns.setdefault(schema_path(path), []).append((number, path, key))
    for places in turns.values():
        values = [copy.deepcopy(record.value) for record in records]
        for number, path, key in places:
            at(values[number], path)[FLAG] = flags[key]
        if {flags[key] for *_, key in places} == {True, False}:
            edited = [Record(each.source, each.path, value) for each, value in zip(records, values, strict=True)]
            yield edited, {key for *_, key in places if not flags[key]}


def said_alone(reading: Reading) -> list[Any]:
    """Return one trained text of each turn, or its ids."""
    return [key for turns in reading.trained for _, turn in turns for key in _keys_of(turn)]


def _keys_of(turn: Any) -> list[Any]:
    """Return the texts of a trained turn, or its ids: one value each that a record may contain as it is."""
    if isinstance(turn, list):
        return [tuple(turn)]
    content, thought, calls = (turn, None, []) if isinstance(turn, str) else turn
    texts = [content, thought, *(json.dumps(arguments) for _, arguments in calls)]
    return [text.strip() for text in texts if text and len(text.strip()) > 2][:1]


def _turns(value: Any, path: Path, flags: dict[Any, bool]) -> Iterator[tuple[Path, Any]]:
    """Yield path and key of each turn in `value`."""
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from _turns(each, (*path, place), flags)
    if not isinstance(value, dict):
        return
    fields = ((name, field) for name, field in value.items() if name not in ("tool_calls", "toolCalls"))
    inner = [each for name, field in fields for each in _turns(field, (*path, name), flags)]
    yield from inner
    is_turn = (not path or isinstance(path[-1], int)) and "key" not in value  # a pair of OpenTelemetry has a key
    if not inner and is_turn and not any(str(value.get(name)).lower() in _OTHERS for name in ("role", "from", "type")):
        found = [key for key in map(_key_of, _leaf_values(value)) if key in flags]
        yield from ((path, key) for key in found[-1:])


def _key_of(leaf: Any) -> Any:
    parsed = parsed_json(leaf) if isinstance(leaf, str) else leaf
    if isinstance(parsed, dict):
        return json.dumps(parsed)
    return leaf.strip() if isinstance(leaf, str) else tuple(leaf)


def _leaf_values(value: Any) -> Iterator[Any]:
    """Yield the texts, the lists of numbers, and the objects in `value`."""
    if isinstance(value, dict):
        yield value
        for field in value.values():
            yield from _leaf_values(field)
    elif isinstance(value, list) and not _is_numbers(value):
        for each in value:
            yield from _leaf_values(each)
    elif isinstance(value, str | list):
        yield value
