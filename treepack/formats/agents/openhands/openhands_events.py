"""Events of OpenHands since version 1 (its SDK) to a view.

    {"kind": "SystemPromptEvent", "system_prompt": {"type": "text", ..}, "tools": [..]}    system prompt and tools
    {"kind": "MessageEvent", "llm_message": {"role": "user", "content": [..]}}             message, or text of the model
    {"kind": "ActionEvent", "thought": [..], "tool_call": {..}, "llm_response_id": "r1"}   one call of a response
    {"kind": "ObservationEvent", "tool_call_id": "c1", "observation": {..}}                its result
    {"kind": "Condensation", "forgotten_event_ids": [..], "summary": "..", ..}             summary of earlier events

Actions that follow each other and have one `llm_response_id` are one response of the model, whose text and reasoning
are in the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from treepack.calls.event_views import EventView, Message, command_output, event_parts, event_text
from treepack.formats.kit import JsonObject, as_text, is_messages, object_at
from treepack.ingest.readers.fields.values import as_texts

Event = JsonObject

_TOOLS_NOTE = "tools are in the file without their parameters"
_ERROR = "[An error occurred during execution.]\n"  # the agent puts it before the text of a failed tool
_SHELLS = frozenset({"TerminalObservation", "ExecuteBashObservation"})


def add_events(view: EventView, events: Sequence[Event], source: str) -> None:
    """Add all `events` of a conversation to `view`."""
    for group in _responses(events):
        first, kind = group[0], group[0].get("kind")
        if kind == "SystemPromptEvent":
            tools = first.get("tools")
            if is_messages(tools) and all("function" in tool for tool in tools):
                view.tools = tools or None
            elif tools:
                view.log.note(_TOOLS_NOTE)
            prompt = [
                as_text(object_at(first, name, source).get("text"), source=source, name=f"text of {name}", default="")
                for name in ("system_prompt", "dynamic_context")
            ]
            view.add(first.get("id"), {"role": "system", "content": "".join(prompt)})
        elif kind == "ActionEvent":
            view.answer(first.get("id"), _response(group, source), name=None)
            for event in group[1:]:
                view.add(event.get("id"))
        elif kind == "MessageEvent":
            _add_message(view, first, source)
        elif kind == "Condensation":
            forgotten = set(as_texts(first.get("forgotten_event_ids") or [], source=source, name="forgotten_event_ids"))
            as_text(first.get("summary"), source=source, name="summary", default="")
            view.forget(forgotten, first.get("summary"), first.get("summary_offset"))
        elif first.get("tool_call_id") is not None:
            result = {"tool_call_id": first["tool_call_id"], "name": first.get("tool_name")}
            view.add(first.get("id"), {"role": "tool", "content": _result(first, source)} | result)


def _responses(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Split `events` into groups: the actions of one response, or one other event."""

    # A1 A1 O O A2 -> [A1 A1] [O] [O] [A2]; names of responses are text, so they differ from the numbers.
    def key(numbered: tuple[int, Event]) -> int | str:
        number, event = numbered
        return event["llm_response_id"] if event.get("kind") == "ActionEvent" else number

    for _, group in groupby(enumerate(events), key):
        yield [event for _, event in group]


def _response(actions: list[Event], source: str) -> Message:
    first = actions[0]
    calls = [action.get("tool_call") for action in actions]
    message = {"role": "assistant", "content": event_text(first.get("thought"), source), "tool_calls": calls}
    return message | _reasoning(first)


def _reasoning(event: Event) -> JsonObject:
    """Return the reasoning of a response: as text, or as Anthropic's blocks."""
    if event.get("reasoning_content"):
        return {"reasoning_content": event["reasoning_content"]}
    blocks = event["thinking_blocks"] if isinstance(event.get("thinking_blocks"), list) else []
    thoughts = [block.get("thinking") for block in blocks if isinstance(block, dict)]
    texts = [thought for thought in thoughts if isinstance(thought, str) and thought]
    return {"reasoning_content": "\n\n".join(texts)} if texts else {"redacted_thinking": True} if thoughts else {}


def _add_message(view: EventView, event: Event, source: str) -> None:
    recorded = event.get("llm_message")
    recorded = recorded if isinstance(recorded, dict) else {}
    content = event_text([*event_parts(recorded.get("content")), *event_parts(event.get("extended_content"))], source)
    message = {"role": recorded.get("role"), "content": content}
    if recorded.get("role") == "assistant":
        view.answer(event.get("id"), message | _reasoning(recorded), name=None)
    else:
        view.add(event.get("id"), message)


def _result(event: Event, source: str) -> str | list[Any]:
    """Return the text of a result as the agent sends it to the model."""
    if event.get("kind") == "UserRejectObservation":
        return f"Action rejected: {event.get('rejection_reason')}"
    observation = event.get("observation")
    if not isinstance(observation, dict):
        return str(event.get("error") or "")
    # Before version 1.0 an error was the text in `error`, and other text was in `output`, `message` or `content`.
    named = ("error", "content", "output", "message")
    parts = next((part for name in named if isinstance(part := observation.get(name), str | list) and part), [])
    text = event_text(parts, source)
    if isinstance(text, list) or observation.get("screenshot_data"):
        return text if isinstance(text, list) else [{"type": "image"}]
    if str(observation.get("kind")) in _SHELLS:
        text = command_output(text, observation.get("metadata"))
    added = event_text(event.get("extended_content"), source)
    prefix = _ERROR if observation.get("is_error") else ""
    return prefix + text + (added if isinstance(added, str) else "")
