"""Notes on the fields of records that are not used in their trajectories: of one record, or of all records of a file.

    record, its trajectories   --notes_of_record-->  "field 'steps.cost' not used", ..
    records of a file, items   --NotesOfFile-->      the items, the last trajectory with the notes

A field of the record itself may have become metadata, an id, the group, or the reward; `_facts_of` collects these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.field_paths import MISSING, field_at
from treepack.ingest.readers.fields.rewards import REWARDS, is_equal
from treepack.ingest.readers.fields.rollout_facts import GROUPS, IDS, SAMPLING_DICTS, STEPS
from treepack.ingest.readers.fields.token_fields import KEPT_FIELDS, KINDS, LENGTHS, RETURN
from treepack.ingest.readers.fields.unread import Declared, TrajectoryTexts, named, unread, unsaid
from treepack.ingest.readers.fields.values import JsonObject
from treepack.trajectory import Outcome, Outcomes, Tokens, Trajectory

View = Callable[[JsonObject], JsonObject]
# Fields of a trajectory that come from fields of a record with any of several names.
_FACTS = ("trajectory_id", "group_id", "step", "reward", "temperature", "rollout_id")
TOO_DEEP = "is nested too deeply to be read; remove the objects or lists inside each other"
_TOKENS = "=tokens"  # key of facts if a trajectory is token ids
_MAX_TEXTS = 1 << 26  # characters of the texts of a file that are kept to search them in its trajectories


def notes_of_record(value: JsonObject, declared: Declared, items: Sequence[Outcome], source: str) -> tuple[str, ...]:
    """Return a note on each field of the record `value` that is not used in its `items`; none without a trajectory.

    Raises:
        TreepackError: the record is nested too deeply.
    """
    facts = _facts_of(items)
    if not facts:
        return ()
    # The reader of tokens reads all fields of its names, or refuses the record; other formats have ids in other places.
    if _TOKENS in facts and not KINDS.keys() & declared.keys():
        del facts[_TOKENS]
    try:
        paths = list(unsaid(unread(value, declared), TrajectoryTexts(items)))
    except RecursionError:
        raise TreepackError(f"{source}: {TOO_DEEP}") from None
    return named(path for path in paths if not _is_fact(path, _value_at(value, path), facts))


class NotesOfFile:
    """Notes on the unread fields of records that are read together; the last trajectory gets each of them once."""

    def __init__(self, declared: Declared, view: View | None = None) -> None:
        """Take the fields that the format declares, of the `view` of each record."""
        self._declared = declared
        self._view = view
        self._fields: dict[tuple[str, str | None, bool], None] = {}  # an ordered set
        self._room = _MAX_TEXTS
        self._said = TrajectoryTexts(())

    def of_records(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield `records`, and keep their fields that may not be used."""
        for record in records:
            try:
                fields = list(unread(record.value if self._view is None else self._view(record.value), self._declared))
            except RecursionError:
                raise TreepackError(f"{record.source}: {TOO_DEEP}") from None
            for path, text, is_declared in fields:
                # The texts of a very large file are not searched, so the declared ones count as used.
                if text is not None and self._room <= 0:
                    if is_declared:
                        continue
                    text = None
                self._room -= len(text or "")
                self._fields[path, text, is_declared] = None
            yield record

    def on_items(self, items: Iterable[Outcome]) -> Outcomes:
        """Yield `items`, the last trajectory with the notes on all records, after which no other trajectory comes."""
        held: list[Outcome] = []  # the last trajectory and the items after it
        for item in items:
            if isinstance(item, Trajectory):
                if self._room > 0:
                    self._said.add(item)
                yield from held
                held.clear()
            if held or isinstance(item, Trajectory):
                held.append(item)
            else:
                yield item
        if held and isinstance(last := held[0], Trajectory):
            notes = named(unsaid(self._fields, self._said))
            held[0] = replace(last, notes=tuple(dict.fromkeys((*last.notes, *notes))))
        yield from held


_Facts = dict[str, list[Any]]  # values by the name of their metadata, or by the name of a field of `Trajectory`


def _facts_of(items: Iterable[Outcome]) -> _Facts:
    """Return the facts of the trajectories among `items` besides their content; {} if none is a trajectory."""
    facts: _Facts = {}
    for item in items:
        if not isinstance(item, Trajectory):
            continue
        if isinstance(item.content, Tokens):
            facts[_TOKENS] = []
        for name in _FACTS:
            facts.setdefault(f"={name}", []).append(getattr(item, name))
        for name, field in item.metadata.items():
            facts.setdefault(name, []).append(field)
            for path, each in _inner(field, name):
                facts.setdefault(path, []).append(each)
        for note in item.notes:
            if note.startswith("field '"):
                facts.setdefault(f"note {note.split(chr(39))[1]}", []).append(None)
    return facts


def _inner(field: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field inside of `field`: {"split": "test"} of info -> "info.split"."""
    for name, each in field.items() if isinstance(field, dict) else ():
        yield f"{path}.{name}", each
        yield from _inner(each, f"{path}.{name}")


def _is_fact(path: str, value: Any, facts: _Facts) -> bool:
    """Return whether the field at `path`, with `value` if it is a field of the record itself, is among the `facts`."""
    top = path.partition(".")[0]
    if f"note {path}" in facts or f"note {top}" in facts:
        return True
    if path in facts:
        # The same value, if the names are the same by chance.
        return value is None or any(_is_same(value, each) for each in facts[path])
    if path in REWARDS or top == "reward_info":
        return any(is_equal(value, reward) for reward in facts["=reward"]) or isinstance(value, dict)
    if path == "weight":
        return True
    if _TOKENS in facts and KINDS.get(path) not in (None, RETURN, LENGTHS):
        return not _is_text(value)
    if _TOKENS in facts and top in KEPT_FIELDS:
        return not isinstance(value, int | float | str)
    if top in SAMPLING_DICTS:
        return True
    if path in (*IDS, *GROUPS, *STEPS, "temperature", "trial", "task.key", "task.hash"):
        # An id is a part of the name: "7" of "7/chosen".
        names = [str(fact) for name in _FACTS for fact in facts[f"={name}"]]
        whole = int(value) if isinstance(value, float) and value.is_integer() else value  # 3.0 -> "3", as ids and steps
        return any(str(each) in name for name in names for each in (value, whole))
    return False


def _is_text(value: Any) -> bool:
    """Return whether `value` is text, messages, or a list of them: a name of token ids may have the text of the ids."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, str | dict)


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays of several elements
        return False


def _value_at(value: JsonObject, path: str) -> Any:
    """Return the value at `path`, whose names may contain dots themselves, or None if a list is on the path."""
    found = value[path] if path in value else field_at(value, path)
    return None if found is MISSING else found
