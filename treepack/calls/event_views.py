"""Logs of events to calls: the prompt of a call is the view of the events before it.

    events   system, user, action A, result, action B, result, condensation of A and its result to "S", action C
    prompts  of A: system user    of B: system user A result    of C: system user S B result

A condensation takes events out of the view and puts a summary in their place, as an agent does before a prompt becomes
too long. Every event has a place in the view, even if its message is part of a different one, because condensations
name events by id and count them.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from treepack.calls.call_logs import CallLog
from treepack.ingest.readers.messages.content_blocks import plain_part, skip_reason

Message = dict[str, Any]


@dataclass(slots=True)
class _ViewedEvent:
    """An event by its id, its message, and the reason if the message is not text."""

    event: Any
    message: Message | None
    reason: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.reason = None if self.message is None else skip_reason([self.message])


class EventView:
    """The events that the next prompt contains, and the calls so far."""

    def __init__(self) -> None:
        self.log = CallLog()
        self.tools: Any = None
        self._events: list[_ViewedEvent] = []
        self._responses: set[str] = set()

    def add(self, event: Any, message: Message | None = None) -> None:
        """Add an event by its id, and its message if it has one."""
        self._events.append(_ViewedEvent(event if isinstance(event, str | int) else None, message))

    def answer(self, event: Any, response: Message, *, name: str | None, history: Message | None = None) -> None:
        """Add a response of the model as a call; later prompts contain `history` instead of it, unless that is None.

        Several events may come from one response, which has a `name`: the first one adds it.
        """
        if name is not None and name in self._responses:
            self.add(event)
            return
        self._responses |= {name} - {None}  # type: ignore[arg-type]
        reason = next((each.reason for each in self._events if each.reason is not None), None)
        prompt = [each.message for each in self._events if each.message is not None]
        self.log.add(prompt, [response], reason=reason, tools=self.tools)
        self.add(event, response if history is None else history)

    def forget(self, events: Container[Any], summary: Any, index: Any) -> None:
        """Take `events` out of the view, and put the text `summary` before the `index`-th of the others."""
        # view 1 2 3 4, forget 2 3, summary S at 1 -> 1 S 4
        self._events = [each for each in self._events if each.event not in events]
        if isinstance(summary, str) and isinstance(index, int):
            # A damaged log may have a place beyond the view, or too large for an index.
            message = {"role": "user", "content": summary}
            self._events.insert(min(max(index, 0), len(self._events)), _ViewedEvent(None, message))


def event_parts(value: Any) -> list[Any]:
    """Return a list as it is, null as an empty list, and any other value as a list of it."""
    return value if isinstance(value, list) else [] if value is None else [value]


def event_text(value: Any, where: str) -> str | list[Any]:
    """Return the text of content parts, joined; the parts themselves if one of them is not text.

    Raises:
        TreepackError: a part is an object as JSON text.
    """
    if isinstance(value, str):
        return value
    parts = [plain_part(part, where) if isinstance(part, str) else part for part in event_parts(value)]
    texts = [part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None for part in parts]
    return "".join(text for text in texts if text) if all(isinstance(text, str) for text in texts) else parts


def command_output(output: Any, metadata: Any) -> str:
    """Return the output of a command as OpenHands shows it to the model, with lines about the shell after it."""
    metadata = metadata if isinstance(metadata, dict) else {}
    lines = [f"{metadata.get('prefix') or ''}{output or ''}{metadata.get('suffix') or ''}"]
    if metadata.get("working_dir"):
        lines.append(f"[Current working directory: {metadata['working_dir']}]")
    if metadata.get("py_interpreter_path"):
        lines.append(f"[Python interpreter: {metadata['py_interpreter_path']}]")
    if metadata.get("exit_code", -1) not in (-1, None):
        lines.append(f"[Command finished with exit code {metadata['exit_code']}]")
    return "\n".join(lines)
