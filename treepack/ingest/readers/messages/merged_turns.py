"""Messages of the assistant that are parts of one turn, as one message."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from treepack.ingest.readers.fields.values import JsonObject

Message = JsonObject


def left_over(value: JsonObject, known: Collection[str], prefix: str) -> JsonObject:
    """Return the fields of a part of a message that are not `known`, under names that become notes of the message."""
    # {"name": "f", "input": {}} without "input" in `known`, prefix "tool_calls" -> {"tool_calls.input": {}}
    return {
        f"{prefix}.{name}": each for name, each in value.items() if name not in known and each not in (None, [], {}, "")
    }


def answered(messages: list[Message]) -> list[Message]:
    """Return the messages of a response, or none if the model has written nothing."""
    keys = ("content", "reasoning_content", "tool_calls", "function_call")
    return messages if any(message.get(key) for message in messages for key in keys) else []


def merged_turns(messages: Sequence[Message]) -> list[Message]:
    """Join messages of the assistant that are parts of one turn: reasoning, then text, then calls.

    The items of a response of OpenAI's Responses API are logged as one message each.
    """
    # reasoning | text | call | call -> one message; text | text -> two
    done: list[Message] = []
    for message in messages:
        last = done[-1] if done else {}
        if last.get("role") == message.get("role") == "assistant" and _follows(last, message):
            done[-1] = _joined(last, message)
        else:
            done.append(message)
    return done


def parts_of_lines(lines: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the parts of one message that a log has in several lines: new parts, or snapshots of a stream.

    A line that continues the text of the line before replaces it. A part that a line repeats is there once.
    """
    # ["There"], ["There are"], ["There are", call], [call] -> "There are", call
    whole: list[Sequence[Any]] = []
    for line in lines:
        grown = whole and len(whole[-1]) <= len(line) and all(map(_grows, whole[-1], line))
        whole[len(whole) - bool(grown) :] = [line]
    done: list[Any] = []
    for line in whole:
        done += [part for part in line if part not in done]
    return done


def _grows(before: Any, after: Any) -> bool:
    """Return whether the part `after` is the part `before`, or continues its text or its call."""
    if before == after or not (isinstance(before, dict) and isinstance(after, dict)):
        return bool(before == after)
    if any(before.get(name) != after.get(name) for name in ("type", "thought", "id")):
        return False
    texts = ((before.get(name), after.get(name)) for name in ("text", "thinking"))
    is_longer = any(isinstance(a, str) and a and str(b).startswith(a) for a, b in texts)
    return is_longer or (before.get("type") == "tool_use" and before.get("id") is not None)


def _follows(before: Message, after: Message) -> bool:
    indices = [
        [index for index, key in enumerate(("reasoning_content", "content", "tool_calls")) if message.get(key)]
        for message in (before, after)
    ]
    first, second = indices
    # Only calls may be followed by more of their kind, and content in parts is left as it is.
    is_text = all(isinstance(message.get("content") or "", str) for message in (before, after))
    return is_text and bool(first and second) and (first[-1] < second[0] or first[-1] == second[0] == 2)


def _joined(before: Message, after: Message) -> Message:
    joined = {**before, **{key: value for key, value in after.items() if value}}
    if before.get("tool_calls") and after.get("tool_calls"):
        joined["tool_calls"] = [*before["tool_calls"], *after["tool_calls"]]
    return joined
