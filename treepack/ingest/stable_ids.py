"""Ids that differ between rollouts for no reason, made the same: what `--normalize-ids` does to a conversation.

    call_8f2a91 ... 2026-03-01T09:12:44Z      =>      call00000 ... 2000-01-01T00:00:00Z
    call_55d0c7 ... 2026-03-01T09:12:59Z      =>      call00001 ... 2000-01-01T00:00:01Z

Ids of tool calls, UUIDs and points in time become the first, second, ... of their kind that the conversation names:
equal ones stay equal, different ones different, wherever they stand: in calls, results, arguments and text. So what
speaks of an id still speaks of the same one; what reckons with times does not, which is why nobody gets this unasked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from treepack.trajectory import Chat, Trajectory

UUID = re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")
TIME = re.compile(
    r"\b\d{4}-\d{2}-\d{2}(?P<between>[T ])\d{2}:\d{2}"
    r"(?P<seconds>:\d{2})?(?P<fraction>\.\d+)?(?P<zone>Z|[+-]\d{2}:?\d{2})?"
)
START = datetime(2000, 1, 1)  # without a zone: that of the text is kept
SHORTEST_ID = 6  # shorter ids stand in text for other things
NOTES = {"call": "tool call ids made stable", "uuid": "UUIDs made stable", "time": "times made stable"}


def with_stable_ids(item: Trajectory) -> Trajectory:
    """A conversation with stable ids, each kind that was replaced noted; what is no conversation stays, with a note."""
    if not isinstance(item.content, Chat):
        return replace(item, notes=(*item.notes, "no conversation, ids not made stable"))
    messages, kinds = stable_messages(item.content.messages)
    notes = tuple(NOTES[kind] for kind in NOTES if kind in kinds)
    return replace(item, content=replace(item.content, messages=messages), notes=item.notes + notes)


def stable_messages(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """`messages`, normalised ones, with stable ids, and which kinds were found: "call", "uuid", "time"."""
    calls: dict[str, str] = {}
    for message in messages:
        for found in (*(call["id"] for call in message.get("tool_calls", ())), message.get("tool_call_id")):
            if found is not None:
                calls.setdefault(str(found), f"call{len(calls):05}")
    names = _Names(calls)
    return [_renamed(message, names) for message in messages], names.kinds


class _Names:
    """The stable names of one conversation, given out in the order in which they are asked for."""

    def __init__(self, calls: dict[str, str]) -> None:
        self._calls = calls
        self._known: dict[str, str] = {}
        self._counts = {"uuid": 0, "time": 0}
        self.kinds = frozenset({"call"} if any(old != new for old, new in calls.items()) else ())
        long = sorted((re.escape(old) for old in calls if len(old) >= SHORTEST_ID), key=len, reverse=True)
        self._in_text = re.compile("|".join(long)) if long else None

    def call(self, name: Any) -> str:
        return self._calls[str(name)]

    def text(self, text: str) -> str:
        """`text` with every id and time in it replaced."""
        if self._in_text is not None:
            text = self._in_text.sub(lambda found: self._calls[found[0]], text)
        return TIME.sub(self._time, UUID.sub(self._uuid, text))

    def _uuid(self, found: re.Match[str]) -> str:
        return self._named("uuid", found[0].lower(), lambda number: f"00000000-0000-4000-8000-{number:012x}")

    def _time(self, found: re.Match[str]) -> str:
        seconds, fraction = found["seconds"], found["fraction"] or ""

        def name(number: int) -> str:
            unit = timedelta(seconds=number) if seconds else timedelta(minutes=number)
            stamp = (START + unit).strftime("%Y-%m-%d" + found["between"] + ("%H:%M:%S" if seconds else "%H:%M"))
            return stamp + re.sub(r"\d", "0", fraction) + (found["zone"] or "")

        return self._named("time", found[0], name)

    def _named(self, kind: str, old: str, name: Callable[[int], str]) -> str:
        if old not in self._known:
            self._known[old] = name(self._counts[kind])
            self._counts[kind] += 1
            if self._known[old] != old:
                self.kinds |= {kind}
        return self._known[old]


def _renamed(message: dict[str, Any], names: _Names) -> dict[str, Any]:
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
    """`value` with the ids in its text replaced, but not in the names of fields."""
    if isinstance(value, str):
        return names.text(value)
    if isinstance(value, dict):
        return {name: _in_values(part, names) for name, part in value.items()}
    return [_in_values(part, names) for part in value] if isinstance(value, list) else value
