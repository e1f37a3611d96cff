"""Lines of Claude Code that do not name the line before them, linked by their order in the file.

    {"type": "user", "session_id": "S", "parent_tool_use_id": null, "message": ..}        session S
    {"type": "assistant", "session_id": "S", "parent_tool_use_id": null, "message": ..}   follows it
    {"type": "user", "session_id": "S", "parent_tool_use_id": "t1", "message": ..}        sub-agent of the call t1
    {"type": "result", "session_id": "S", "result": "..", "stop_reason": ".."}            repeats the last answer

`claude -p --output-format stream-json` writes such lines, of one run or of several, and so do programs that copy
sessions without uuids. A chain, the lines of a session or of a sub-agent up to a compaction, is used only if it begins
with its prompt. A stream may lack the prompt and the texts of sub-agents; the session file has both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.values import JsonObject, is_messages, object_or_empty
from treepack.ingest.readers.unread_programs import unread_program

NO_PROMPT = "lines of the model without the prompt before them"
NO_SUMMARY = "lines after a compaction without its summary"
_NO_TEXTS = "lines of a sub-agent without its texts"
NO_CONTENT = "lines of a session in which a message has no content"
REMEDY = (
    "give the session file below ~/.claude/projects or ~/.qwen, or run claude -p with --input-format stream-json "
    "--replay-user-messages"
)


def line_of_stream(value: JsonObject) -> JsonObject:
    """Return a line of a stream with the names that a session file has; other lines stay as they are."""
    names = {"session_id": "sessionId", "parent_tool_use_id": "agentId"}
    if "session_id" not in value or "sessionId" in value:
        return value
    failed = {"isApiErrorMessage": True} if value.get("error") or value.get("is_api_error_message") else {}
    return {names.get(name, name): field for name, field in value.items()} | failed


def linked_sessions(rows: list[Record]) -> Iterator[tuple[list[Record], tuple[str, ...]]]:
    """Yield the lines of each session with `uuid`, `parentUuid` and `message.id`, and why other lines are not used.

    Lines that have links already are one session.

    Raises:
        UnreadProgramError: a line of Cursor or Droid, whose streams begin like a stream of Claude Code.
    """
    if any("parentUuid" in row.value for row in rows):
        yield rows, ()
        return
    chains: dict[tuple[Any, Any, int], list[Record]] = {}  # by session, sub-agent and number of compactions
    damaged: set[tuple[Any, Any, int]] = set()
    compactions: Counter[tuple[Any, Any]] = Counter()
    # A session may have no uuids, or one for all lines; a later session may repeat the uuids of an earlier one.
    uuids = Counter(map(_name_of, rows))
    for row in rows:
        if (error := unread_program(row, particular=False)) is not None:
            raise error
        value = line_of_stream(row.value)
        name = value.get("sessionId"), value.get("agentId")
        compactions[name] += value.get("subtype") == "compact_boundary"
        chain = chains.setdefault((*name, compactions[name]), [])
        if value.get("type") in ("user", "assistant") and isinstance(value.get("message"), dict):
            if "content" not in value["message"]:
                damaged.add((*name, compactions[name]))
            uuid = value.get("uuid") if uuids[_name_of(row)] == 1 else None
            row = replace(row, value=value | {"uuid": uuid or row.source})
            chain.append(_linked(row, chain[-1] if chain else None))
        elif (reason := _stop_reason(value)) is not None and chain:
            chain[-1].value["message"].setdefault("stop_reason", reason)
    sessions = dict.fromkeys(session for session, _, _ in chains)
    for session in sessions:
        own = {key: chain for key, chain in chains.items() if key[0] == session and chain}
        faults = {key: NO_CONTENT if key in damaged else _fault(chain, *key[1:]) for key, chain in own.items()}
        if own or len(sessions) == 1:
            used = [row for key, chain in own.items() if faults[key] is None for row in chain]
            yield used, tuple(dict.fromkeys(fault for fault in faults.values() if fault))


def _name_of(row: Record) -> str:
    return f"{row.value.get('session_id', row.value.get('sessionId'))} {row.value.get('uuid')}"


def _linked(row: Record, before: Record | None) -> Record:
    value = row.value
    message = {name: field for name, field in value["message"].items() if field is not None}
    if value["type"] == "assistant" and "id" not in message:
        # Without ids, the blocks of a message are lines after each other.
        follows = before is not None and before.value["type"] == "assistant"
        message["id"] = before.value["message"]["id"] if follows and before is not None else row.source
    parent = None if before is None else before.value["uuid"]
    return replace(row, value=value | {"message": message, "parentUuid": parent})


def _stop_reason(value: JsonObject) -> Any:
    """Return why the last answer ended, by the line `result` or an event of the API; None if `value` is neither."""
    delta = object_or_empty(object_or_empty(value.get("event")).get("delta"))
    return delta.get("stop_reason") if value.get("type") == "stream_event" else value.get("stop_reason")


def _fault(chain: list[Record], agent: Any, number: int) -> str | None:
    """Return why a chain cannot be used: not all that the model has read or written is in it."""
    first = chain[0].value
    kinds = _kinds(first)
    if first["type"] != "user" or "tool_result" in kinds or not kinds:
        return NO_PROMPT
    if number and not (first.get("isSynthetic") or first.get("isCompactSummary")):
        return NO_SUMMARY
    answers = [row.value for row in chain if row.value["type"] == "assistant"]
    return _NO_TEXTS if agent is not None and answers and "text" not in _kinds(answers[-1]) else None


def _kinds(value: JsonObject) -> list[Any]:
    content = value["message"].get("content")
    return [part.get("type") for part in content] if is_messages(content) else ["text"] if content else []
