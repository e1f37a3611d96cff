"""One input format as a value: the program that writes it, the fields that identify it, the function that reads it.

    FORMAT = Format(
        name="mint",
        program="MINT",
        recognised_by="`state.history`, a list of messages, and `task`",
        requires="state.history:objects, task:object",
        used="state.history state.success task.task_id",
        keeps="rewards, lineage",
        read=read,
    )

`requires` has alternatives of fields and their `kinds`. A record has the format if it has all fields of at least one
alternative.

`Format.matches` detects the format, and `Format.check` refuses a record that lacks a field, so a reader does neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from treepack.errors import TreepackError
from treepack.files.input_files.records import DAMAGED_FILE, DAMAGED_RECORD, Record
from treepack.ingest.readers.fields.field_paths import MISSING, field_at
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import group_of
from treepack.ingest.readers.fields.unread import Declared, declare
from treepack.ingest.readers.fields.unread_notes import TOO_DEEP, NotesOfFile, View, notes_of_record
from treepack.ingest.readers.fields.values import BadValueError, as_id, close_names, shown
from treepack.ingest.readers.kinds import Fields, Requirement, alternatives, as_names, has_field, has_fields
from treepack.ingest.readers.messages.containers import with_containers
from treepack.ingest.readers.turn_flags import TurnFlags, known_names
from treepack.trajectory import Outcome, Outcomes, Skipped, Trajectory

# The columns of the table of `treepack formats`.
KEEPS = tuple("token ids, masks, log-probabilities, rewards, lineage".split(", "))
_MAX_REMOVED = 100  # damaged records of a file whose records belong together; each costs a reading of the file
ReadRecord = Callable[[Record, ReadOptions], Outcomes]
_ReadFile = Callable[[Iterator[Record], ReadOptions], Outcomes]


@dataclass(frozen=True, slots=True)
class Format:
    """One format: its facts for `treepack formats`, and its reader.

    A test reads the sample of the format under tests/rollouts and compares the result with `keeps`, and the fields of
    the sample with `used`. Paths of fields have dots for fields inside fields (`info.reward`); a path without deeper
    declared paths covers everything under it.
    """

    name: str
    # The program that writes the format.
    program: str
    # `requires` in words.
    recognised_by: str
    # Alternatives of fields, as text or values (`kinds`), or a function of the record.
    requires: Requirement | str
    # Paths of the fields that are read, in a list or as text. Any other field is noted when a record is read
    # (`fields.unread`).
    used: Sequence[str]
    # Known fields that are not read, in a list or as text with semicolons, with the reason in brackets if it is not
    # plain.
    dropped: Sequence[str] = ()
    # Some of `KEEPS`, in a list or as text with commas:
    #   token ids           the ids of the sampler; nothing is tokenised again
    #   masks               the record marks the trained tokens or messages; they do not follow from the roles
    #   log-probabilities   of the sampled tokens
    #   rewards             of the rollout
    #   lineage             the task of the rollouts, or the prefix that they share
    keeps: Sequence[str] = ()
    # Reads one record.
    read: ReadRecord | None = None
    # Reads all records of one file, in place of `read`, for a format whose records belong together.
    read_file: _ReadFile | None = None
    # True if a record may be in several files with the same answers: one process reads them all (`ReadOptions.turns`).
    overlaps: bool = False
    # True if a rollout needs other files of its folder, which a copy of one object of a store lacks.
    needs_folder: bool = False
    # The records that must have the required fields: each, the first of a file only, or none, if the reader itself
    # refuses a record with a more precise message.
    checked: Literal["each", "first", "none"] = "each"
    # Fields of a record, at most 64, whose lists of numbers `read` accepts as int32 or float64 arrays too. JSON is read
    # several times faster into them.
    arrays: Sequence[str] = ()
    # False for a reader that passes records on to other formats, which note their unused fields.
    notes_unused: bool = True
    # Fields that connect records, such as the id of the one before, which are ids or null.
    links: Sequence[str] = ()
    # Fields of the facts of a rollout from which `fields.failures` knows if its environment or harness broke, in a list
    # or as text.
    failed: Sequence[str] = ()
    # More paths as in `used`, of forms that neither the sample nor the documentation shows.
    also: Sequence[str] = ()
    # Returns a record of a file as it is declared, if names of fields are among its values, or values are among its
    # names.
    view: View | None = None
    # A record is compared with the formats by ascending rank, and with formats of equal rank by name. The ranks of
    # treepack's own formats are above 0, so formats of other packages come first unless they set one.
    rank: int = 0
    declared: Declared = field(init=False)
    known: frozenset[str] = field(init=False)  # names of declared fields, which are not unread flags of turns
    required: Requirement = field(init=False)  # `requires`, not as text

    def __post_init__(self) -> None:
        assert (self.read is None) != (self.read_file is None), self.name
        assert self.read is not None or not self.arrays, self.name
        assert self.read_file is not None or self.view is None, self.name
        separators = {"used": " ", "also": " ", "links": " ", "failed": " ", "dropped": "; ", "keeps": ", "}
        for name, separator in separators.items():
            texts = getattr(self, name)
            # Lines of a text are one.
            parts = " ".join(texts.split()).split(separator) if isinstance(texts, str) else texts
            object.__setattr__(self, name, tuple(parts))
        assert set(self.keeps) <= set(KEEPS), self.name
        object.__setattr__(self, "declared", declare((*self.used, *self.also)))
        object.__setattr__(self, "known", known_names(self.declared))
        required = alternatives(self.requires) if isinstance(self.requires, str) else self.requires
        object.__setattr__(self, "required", required)

    def matches(self, value: dict[str, Any]) -> bool:
        """Return whether the record `value` has this format."""
        return has_fields(value, self.required)

    def required_fields(self) -> set[str]:
        """Return the names of the fields of a record that an alternative requires; none if a function decides."""
        if callable(self.required):
            return set()
        paths = [name for fields in self.required for names in fields for name in as_names(names)]
        return {path.partition(".")[0] for path in paths}

    def why_not(self, value: dict[str, Any]) -> str:
        """Return why the record `value` is not read as this format: a missing or wrong field, or an earlier format."""
        return "has its fields, but another format comes first" if self.matches(value) else self._refusal(value)

    def num_present(self, value: dict[str, Any]) -> int:
        """Return how many required fields of its closest alternative `value` has; 0 if a function decides."""
        return 0 if callable(self.required) else max(_num_present(value, fields) for fields in self.required)

    def check(self, record: Record) -> None:
        """Refuse a record that does not have this format.

        Raises:
            TreepackError: `record` lacks a required field, or the field has another kind.
        """
        if not self.matches(record.value):
            if (name := self._null(record.value)) is not None:
                raise BadValueError(f"{record.source}: {self._refusal(record.value)}", f"{name} is null")
            raise TreepackError(f"{record.source}: {self._refusal(record.value)}")

    def trajectories(self, records: Iterable[Record], options: ReadOptions) -> Outcomes:
        """Read the `records` of one file.

        Raises:
            TreepackError: a record does not have this format, or its fields contradict each other.
        """
        options = replace(options, failed=self.failed)
        if self.read_file is None:
            for number, record in enumerate(records):
                items = self._of_record(record, number, options)
                yield from _without_damage(items, record) if options.limits.skip_bad else items
        elif options.limits.skip_bad:
            yield from self._of_damaged_file(list(records), options)
        else:
            yield from self._of_file(records, options)

    def _of_record(self, record: Record, number: int, options: ReadOptions) -> Outcomes:
        """Read record `number` of a file; a skipped rollout gets the group that its record names."""
        if record.line is not None:
            try:
                items = list(self._of_value(record, number, options))
            except TreepackError:
                record = record.with_lists()  # the message quotes a list as JSON, not as an array
            else:
                yield from items
                return
        yield from self._of_value(record, number, options)

    def _of_value(self, record: Record, number: int, options: ReadOptions) -> Outcomes:
        assert self.read is not None
        record = with_containers(record)
        try:
            self._check_record(record, number)
            items = list(self.read(record, options))
        except BadValueError as error:
            # One bad value of one rollout refuses this rollout, and not the file.
            items = [Skipped(record.source, error.reason, detail=str(error))]
        except RecursionError:
            raise TreepackError(f"{record.source}: {TOO_DEEP}") from None
        notes: tuple[str, ...] = ()
        if self.notes_unused:
            notes = notes_of_record(record.value, self.declared, items, record.source)
            flags = TurnFlags(self.known)
            list(flags.of_records([record]))
            list(flags.on_items(iter(items)))
        for item in items:
            is_lost = isinstance(item, Skipped) and item.is_rollout and item.group_id is None
            if notes and isinstance(item, Trajectory):
                # Once per record: a reader may have noted a field itself.
                item, notes = replace(item, notes=tuple(dict.fromkeys((*item.notes, *notes)))), ()
            yield replace(item, group_id=group_of(record)) if is_lost else item

    def _of_file(self, records: Iterable[Record], options: ReadOptions) -> Outcomes:
        assert self.read_file is not None
        notes, flags = NotesOfFile(self.declared, self.view), TurnFlags(self.known)
        read = flags.of_records(notes.of_records(self._check_records(records)), self.view)
        return notes.on_items(flags.on_items(self.read_file(read, options)))

    def _of_damaged_file(self, records: list[Record], options: ReadOptions) -> Outcomes:
        """Read the records of a file that belong together, without damaged ones.

        An error names the record at its beginning. This record is removed and the file is read again, at most
        `_MAX_REMOVED` times; an error that names no record, or one more, skips the file.
        """
        assert self.read_file is not None
        path = records[0].path if records else ""
        for _ in range(_MAX_REMOVED):
            if not records:
                return
            try:
                yield from list(self._of_file(records, options))
                return
            except TreepackError as error:
                number = _number_of_record(str(error), records)
                if number is None:
                    break
                yield _damaged(records.pop(number), error)
        yield Skipped(path, DAMAGED_FILE, detail=f"{path}: contains damaged records that belong to all others")

    def _check_records(self, records: Iterable[Record]) -> Iterator[Record]:
        for number, record in enumerate(map(with_containers, records)):
            self._check_record(record, number)
            yield record

    def _check_record(self, record: Record, number: int) -> None:
        for path in self.links:
            if (link := field_at(record.value, path)) is not MISSING and link is not None:
                as_id(link, source=record.source, name=path)
        if self.checked == "each" or (self.checked == "first" and number == 0):
            self.check(record)

    def _null(self, value: dict[str, Any]) -> str | None:
        """Return a required field that is null, if the record would have this format with another value."""
        if callable(self.required):
            return None
        for fields in self.required:
            wrong = [names for names, kind in fields.items() if not has_field(value, names, kind)]
            if len(wrong) == 1 and isinstance(wrong[0], str) and field_at(value, wrong[0]) is None:
                return wrong[0]
        return None

    def _refusal(self, value: dict[str, Any]) -> str:
        """Name the first wrong field of the alternative that `value` is closest to."""
        # "`task_id` and `traj`" -> "task_id and traj": backticks are for the docs page.
        form = f"{self.recognised_by.replace('`', '')} (format {self.name})"
        if callable(self.required):
            return f"is not a record of {self.program}; expected {form}"
        # {"messages": 7} is closest to the alternative with `messages`, so the message is about this field.
        closest = max(self.required, key=lambda fields: _num_present(value, fields))
        names, kind = next((names, kind) for names, kind in closest.items() if not has_field(value, names, kind))
        names = as_names(names)
        # If one of several names is present, its value is wrong; if none is, the field is missing.
        for name in names:
            if (field := field_at(value, name)) is not MISSING:
                return f"{name} is {shown(field)}; expected {kind.text} (format {self.name})"
        # A similar name that has another kind of value is another field.
        similar = [name for name in close_names(value, names) if kind.test(value[name])]
        hint = f", but {', '.join(similar)}" if similar else ""
        return f"has no {' or '.join(names)}{hint}; expected {form}"


def _without_damage(items: Outcomes, record: Record) -> list[Outcome]:
    """Return the `items` of `record`, or that it is damaged: never a part of a record."""
    try:
        return list(items)
    except TreepackError as error:
        return [_damaged(record, error)]


def _damaged(record: Record, error: TreepackError) -> Skipped:
    return Skipped(record.source, DAMAGED_RECORD, group_of(record), str(error))


def _number_of_record(message: str, records: list[Record]) -> int | None:
    """Return the index of the record that an error names, or None if it names none."""
    # "r.jsonl:17: turn 3 ..." names the record with the source "r.jsonl:17", but not "r.jsonl:1".
    named = (i for i, record in enumerate(records) if re.match(re.escape(record.source) + r"(?!\w)", message))
    return next(named, None)


def _num_present(value: dict[str, Any], fields: Fields) -> int:
    """Count the fields that `value` has; a field that must be absent does not bring a record closer to a format."""
    return sum(has_field(value, names, kind) for names, kind in fields.items() if not kind.test(MISSING))
