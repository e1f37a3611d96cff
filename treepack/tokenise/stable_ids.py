"""Replace random ids and times of a conversation by numbered ones, so that rollouts share more: `--normalize-ids`.

    call_8f2a91 ... 2026-03-01T09:12:44Z      =>      call00000 ... 2000-01-01T00:00:00Z
    call_55d0c7 ... 2026-03-01T09:12:59Z      =>      call00001 ... 2000-01-01T00:00:01Z

Ids of tool calls, UUIDs and points in time are numbered per kind, in the order of their first use in the conversation.
They are replaced everywhere: in calls, results, arguments and text. Equal ids stay equal and different ids stay
different, so a text that refers to an id still refers to the same one. A text that computes with times becomes wrong,
so ids are replaced only with the option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from treepack.trajectory import Chat, Trajectory

_UUID = re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")
# Matches "2026-03-01 09:12", "2026-03-01T09:12:44.123Z" and "2026-03-01T09:12:44+02:00", but no date without a time.
_TIME = re.compile(
    r"\b\d{4}-\d{2}-\d{2}(?P<between>[T ])\d{2}:\d{2}"
    r"(?P<seconds>:\d{2})?(?P<fraction>\.\d+)?(?P<zone>Z|[+-]\d{2}:?\d{2})?"
)
_START = datetime(2000, 1, 1)  # without a zone, because the zone of the text is kept
_SHORTEST_ID = 6  # characters; a shorter id, such as "1" or "a", occurs in text with other meanings
_NOTES = {"call": "tool call ids made stable", "uuid": "UUIDs made stable", "time": "times made stable"}


def with_stable_ids(item: Trajectory) -> Trajectory:
    """Replace the ids of a conversation, and note each kind of id. Other content stays unchanged, with a note."""
    if not isinstance(item.content, Chat):
        return replace(item, notes=(*item.notes, "no conversation, ids not made stable"))
    messages, kinds = stable_messages(item.content.messages)
    notes = tuple(_NOTES[kind] for kind in _NOTES if kind in kinds)
    return replace(item, content=replace(item.content, messages=messages), notes=item.notes + notes)


def stable_messages(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """Return normalised `messages` with numbered ids, and the kinds of ids that changed: "call", "uuid", "time"."""
    # All ids of calls are collected first, because text may name a call before the call itself.
    calls: dict[str, str] = {}
    for message in messages:
        for call_id in (*(call["id"] for call in message.get("tool_calls", ())), message.get("tool_call_id")):
            if call_id is not None:
                # Nine characters, letters and digits only: the one form that Mistral's templates accept.
                calls.setdefault(str(call_id), f"call{len(calls):05}")
    names = _Names(calls)
    return [_replace_ids(message, names) for message in messages], names.kinds


class _Names:
    """The new ids of one conversation; UUIDs and times get theirs in the order in which they occur."""

    def __init__(self, calls: dict[str, str]) -> None:
        self._calls = calls
        self._known: dict[str, str] = {}
        self._counts = {"uuid": 0, "time": 0}
        self.kinds = frozenset({"call"} if any(old != new for old, new in calls.items()) else ())
        # Longest first, so that the pattern does not match call_1 inside call_12.
        long = sorted((re.escape(old) for old in calls if len(old) >= _SHORTEST_ID), key=len, reverse=True)
        self._in_text = re.compile("|".join(long)) if long else None

    def call(self, name: Any) -> str:
        """Return the new id of a tool call."""
        return self._calls[str(name)]

    def text(self, text: str) -> str:
        """Replace every id and time in `text`."""
        if self._in_text is not None:
            text = self._in_text.sub(lambda match: self._calls[match[0]], text)
        return _TIME.sub(self._time, _UUID.sub(self._uuid, text))

    def _uuid(self, match: re.Match[str]) -> str:
        # Version 4 and variant 8 keep it a valid UUID, for tools that validate.
        return self._number("uuid", match[0].lower(), lambda number: f"00000000-0000-4000-8000-{number:012x}")

    def _time(self, match: re.Match[str]) -> str:
        seconds, fraction = match["seconds"], match["fraction"] or ""

        def name(number: int) -> str:
            # Number 1 is 2000-01-01T00:00:01 in the form with seconds, and 2000-01-01T00:01 in the form without.
            unit = timedelta(seconds=number) if seconds else timedelta(minutes=number)
            stamp = (_START + unit).strftime("%Y-%m-%d" + match["between"] + ("%H:%M:%S" if seconds else "%H:%M"))
            return stamp + re.sub(r"\d", "0", fraction) + (match["zone"] or "")

        return self._number("time", match[0], name)

    def _number(self, kind: str, old: str, name: Callable[[int], str]) -> str:
        """Return the new id of `old`: `name` of the next number of its `kind` if `old` is new."""
        if old not in self._known:
            self._known[old] = name(self._counts[kind])
            self._counts[kind] += 1
            # An id that is numbered already does not count as changed, so a second run changes and notes nothing.
            if self._known[old] != old:
                self.kinds |= {kind}
        return self._known[old]


def _replace_ids(message: dict[str, Any], names: _Names) -> dict[str, Any]:
    done = message | {"content": names.text(message["content"])}
    if "reasoning_content" in message:
        done["reasoning_content"] = names.text(message["reasoning_content"])
    if "tool_calls" in message:
        done["tool_calls"] = [
            call | {"id": names.call(call["id"]), "function": _in_values(call["function"], names)}
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id") is not None:
        done["tool_call_id"] = names.call(message["tool_call_id"])
    return done


def _in_values(value: Any, names: _Names) -> Any:
    """Replace the ids in the texts of `value`, except in the names of fields."""
    if isinstance(value, str):
        return names.text(value)
    if isinstance(value, dict):
        return {name: _in_values(part, names) for name, part in value.items()}
    return [_in_values(part, names) for part in value] if isinstance(value, list) else value
