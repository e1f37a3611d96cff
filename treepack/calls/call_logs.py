"""Collect the calls of a session while a reader walks through its log.

log.add(prompt, [answer])        a call, or the note "call not used: REASON" if text cannot represent it
log.add(.., lines=[("u1", line)]) the same, or a note if a session in another file has this line
log.note("interrupted turn")     a note that is counted once for the session
log.read(record, options, ..)    the trajectories with the notes, or a skipped rollout without a call
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treepack.calls.chat_calls import ChatCall, read_chats
from treepack.calls.conversations import with_notes
from treepack.calls.copied_turns import COPIED_NOTE, CopiedLine, is_copy
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.values import JsonObject
from treepack.ingest.readers.messages.content_blocks import skip_reason
from treepack.trajectory import Outcomes, Skipped

_UNUSED = "call not used: "
NO_CALL = "session without a turn of the model"
ORDER_NOTE = "session whose answers do not follow the results of their calls, such as one of iFlow CLI"


def passes_results(answers: Iterable[tuple[set[str], Any, int]], results: Mapping[str, int]) -> bool:
    """Return whether an answer follows the line before an earlier call, whose result it should follow.

    Answers are the ids of their calls, the line that they follow, and their place in the file; results are the places
    of results by the ids of their calls.
    """
    # u | call of u | result of call | answer of u: in iFlow CLI, all answers name the line of the user before them.
    after: dict[Any, list[int]] = {}
    for calls, parent, place in answers:
        if any(result < place for result in after.setdefault(parent, [])):
            return True
        after[parent] += [results[name] for name in calls if name in results]
    return False


@dataclass(frozen=True, slots=True)
class CallPrompt:
    """The messages before a call, and the reason if they cannot be read as text."""

    messages: list[JsonObject]
    reason: str | None = None


def path_since(
    entries: Mapping[str, Any], last: str | None, prompts: Mapping[str | None, CallPrompt]
) -> tuple[list[Any], CallPrompt]:
    """Return the entries from the nearest of `prompts` above the entry `last` up to it, and this prompt.

    Entries name the one before them as `parent`; a cycle of parents is followed only once.
    """
    path: dict[str, Any] = {}
    while last is not None and last not in prompts and last in entries and last not in path:
        path[last] = entries[last]
        last = entries[last].parent
    return [*path.values()][::-1], prompts.get(last, prompts[None])


@dataclass(slots=True)
class CallLog:
    """The calls of a session so far, notes to be counted, and the names of the models that answered, each once.

    `turns` are the files of all lines of the model (`ReadOptions.turns`), and `path` is the file of this session.
    """

    turns: dict[str, str] | None = None
    path: str = ""
    calls: list[ChatCall] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    models: dict[str, None] = field(default_factory=dict)

    @property
    def model(self) -> str | None:
        """The names of the models, or None."""
        return ", ".join(self.models) or None

    @property
    def fault(self) -> str | None:
        """The first note on a call that is not used."""
        return next((note for note in self.notes if note.startswith(_UNUSED) or note == COPIED_NOTE), None)

    def is_copy(self, lines: Iterable[CopiedLine]) -> bool:
        """Return whether a file read before has one of the `lines` of a turn, as `copied_turns.is_copy`."""
        return is_copy(lines, self.turns, self.path)

    def note(self, *notes: str) -> None:
        """Add `notes`."""
        self.notes |= dict.fromkeys(notes)

    def add(
        self,
        prompt: Sequence[Any],
        response: Sequence[Any],
        *,
        reason: str | None = None,
        model: Any = None,
        lines: Iterable[CopiedLine] = (),
        **settings: Any,
    ) -> None:
        """Add a call with the fields `settings` of a `ChatCall`, or a note on it.

        `reason` is the reason if text cannot represent the prompt. A `model` that is not text is left out.
        `lines` are the lines of the turn, an id and a content each.
        """
        if self.is_copy(lines):
            self.note(COPIED_NOTE)
            return
        if (unused := reason or skip_reason(response)) is not None:
            self.note(_UNUSED + unused)
            return
        self.calls.append(ChatCall(prompt, response, **settings))
        if isinstance(model, str):
            self.models[model] = None

    def read(
        self,
        record: Record,
        options: ReadOptions,
        *,
        context: tuple[str, ...],
        empty: str = NO_CALL,
        reason: str | None = None,
    ) -> Outcomes:
        """Yield the trajectories of the session that `record` describes, with the notes `context` and all others.

        Without a call, it is skipped for `reason`, or else for its notes, or for `empty` if it has none.

        Raises:
            TreepackError: as `read_chats`.
        """
        if self.calls:
            yield from with_notes(read_chats(record, self.calls, options), (*context, *self.notes))
        else:
            yield Skipped(record.source, reason or "; ".join(self.notes) or empty)
