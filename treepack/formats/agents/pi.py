"""Sessions of the pi coding agent: one JSONL file per session, one entry per line.

    {"type": "session", "version": 3, "id": "<uuid>", "timestamp": "..", "cwd": "/work", "parentSession": "..."}
    {"type": "message", "id": "a1", "parentId": null, "message": {"role": "user", "content": "Hello"}}
    {"type": "message", "id": "a2", "parentId": "a1", "message": {"role": "assistant", "model": "..",
        "content": [{"type": "thinking", ..}, {"type": "text", ..}, {"type": "toolCall", ..}], "stopReason": "stop"}}
    {"type": "compaction", "id": "a3", "parentId": "a2", "summary": "..", "firstKeptEntryId": "a2"}

Entries form a tree by `parentId`. In version 1, which has no ids, each entry follows the entry before it. The prompt of
an assistant message is its path from the root, or from the summary of the last compaction and the entries that the
compaction kept. The output of `pi --mode json` has events in place of entries; its messages follow each other:

    {"type": "message_end", "message": ..}      others, such as message_update and agent_end, repeat the messages

Calls that continue each other are joined, so a compaction or a branch starts a new trajectory. Turns that several files
have, because a session was forked, are trained in the file that is read first. Summaries and commands of the user are
in the prompt under a title that this reader adds. The file contains neither the system prompt nor the tools.
Interrupted and failed turns are neither trained nor read. A call after an image is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import PurePath

from treepack.formats.kit import (
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    TreepackError,
    as_objects,
    as_text,
    quoted,
)

# The parent session is the path of a file, whose name ends with the id: "../2026-01-01_<uuid>.jsonl" -> "<uuid>"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Stop reasons of an incomplete message.
_FAILED = frozenset({"aborted", "error"})
# Entries of these types add nothing to a prompt.
_NO_CONTEXT = frozenset({"session", "model_change", "thinking_level_change", "custom", "label", "session_info"})
_IMAGE_NOTE = "call after an image not used"
_EVENTS = frozenset("agent_start turn_start message_start message_end".split())
_COMPACTIONS = frozenset({"compaction_end", "auto_compaction_end"})
_COMPACTED_NOTE = "turns after a compaction not used, because events do not show their prompt"
_NO_PROMPT_NOTE = "turns without their prompt in the events not used"
_FAILED_NOTE = "interrupted or failed turn not used"
_PARENT_NOTE = "prompt begins after an entry that is not in the file"


def _read_pi(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of a session, named after its id.

    Their group is that id, or the id of the session from which this session was forked.

    Raises:
        TreepackError: entries or messages of a different kind.
    """
    rows, faults = _without_events(list(records))
    header = rows[0]
    log = CallLog(options.turns, header.path)
    log.note(*faults)
    _add_calls(log, _entries(rows))
    name = str(header.value.get("id") or header.label)
    parent = _UUID.search(PurePath(str(header.value.get("parentSession") or "")).name)
    about = {"trajectory_id": name, "group_id": parent[0] if parent else name}
    value = about | {"cwd": header.value.get("cwd"), "model": log.model}
    yield from log.read(Record(header.path, header.path, value), options, context=(), empty="no turn of the model")


def _without_events(rows: list[Record]) -> tuple[list[Record], tuple[str, ...]]:
    """Return the entries of a session, made from the events of `pi --mode json`, and why others are not used."""
    if all(str(row.value.get("type")) not in _EVENTS for row in rows):
        return rows, ()
    entries = rows[:1]
    for row in rows[1:]:
        message = row.value.get("message")
        # A compaction names the entries that it kept by their ids, which events do not have.
        if str(row.value.get("type")) in _COMPACTIONS and row.value.get("result") is not None:
            return entries, (_COMPACTED_NOTE,)
        if row.value.get("type") == "message_end" and isinstance(message, dict):
            if len(entries) == 1 and message.get("role") == "assistant":
                return entries, (_NO_PROMPT_NOTE,)
            # [header, agent_start, message_end] -> [header, message]
            entries.append(Record(row.source, row.path, {"type": "message", "message": message}))
    return entries, ()


def _add_calls(log: CallLog, entries: dict[str, Record]) -> None:
    """Add a call for each complete message of the model, in the order of the file. O(length of a path) for each."""

    @cache  # the prompts of all later calls contain the same messages
    def said(name: str) -> list[JsonObject]:
        return _messages_of(entries[name])

    if not {record.value.get("parentId") or None for record in entries.values()} <= {None, *entries}:
        log.note(_PARENT_NOTE)
    for name, record in entries.items():
        message = record.value.get("message")
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        # No later prompt contains an incomplete message.
        if not _is_call(record):
            log.note(_FAILED_NOTE)
            continue
        prompt = _prompt(entries, record, said)
        if any(map(_has_image, prompt)):
            log.note(_IMAGE_NOTE)
        else:
            log.add(prompt, said(name), model=message.get("model"), lines=[(name, message)])


def _is_call(record: Record) -> bool:
    """Return whether the entry of `record` is a complete message of a model."""
    message = record.value.get("message")
    if record.value.get("type") != "message" or not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    return bool(message.get("content")) and str(message.get("stopReason")) not in _FAILED


def _above(entries: dict[str, Record], record: Record) -> Iterator[Record]:
    """Yield the entries before `record`, from its parent to the root; a cycle of parents is followed only once."""
    seen: set[str] = set()
    parent = record.value.get("parentId")
    while isinstance(parent, str) and parent in entries and parent not in seen:
        seen.add(parent)
        yield entries[parent]
        parent = entries[parent].value.get("parentId")


def _entries(records: list[Record]) -> dict[str, Record]:
    """Return the entries after the header by their ids; in version 1 the ids are the positions."""
    entries: dict[str, Record] = {}
    before: str | None = None
    has_ids = any(record.value.get("id") is not None for record in records[1:])
    for index, record in enumerate(records[1:], 1):
        value = record.value
        if value.get("type") == "session":
            raise TreepackError(f"{record.source}: begins a second session; put each session into a file of its own")
        # Version 1: entries 1, 2, 3 -> ids "r.jsonl 1", "r.jsonl 2", "r.jsonl 3", each the parent of the next.
        if not has_ids:
            kept = f"{record.path} {value.get('firstKeptEntryIndex')}"
            links = {"id": f"{record.path} {index}", "parentId": before, "firstKeptEntryId": kept}
            record = Record(record.source, record.path, value := value | links)
        before = as_text(value.get("id"), source=record.source, name="id")
        as_text(value.get("parentId"), source=record.source, name="parentId", default="")
        entries[before] = record
    return entries


def _prompt(entries: dict[str, Record], last: Record, said: Callable[[str], list[JsonObject]]) -> list[JsonObject]:
    """Return the messages before the entry `last`, in chat form; `said` returns those of an entry."""
    path = [*_above(entries, last)][::-1]
    # [a, b, compaction that keeps b, c] -> [summary, b, c]
    # The summary of the last compaction replaces everything before the entries that it kept.
    compactions = [index for index, record in enumerate(path) if record.value.get("type") == "compaction"]
    messages: list[JsonObject] = []
    if compactions:
        at = compactions[-1]
        first = path[at].value.get("firstKeptEntryId")
        start = next((index for index, record in enumerate(path[:at]) if record.value["id"] == first), at)
        messages.append(_summary("Summary of the conversation so far", path[at]))
        path = path[start:at] + path[at + 1 :]
    return [*messages, *(message for record in path for message in said(record.value["id"]))]


def _messages_of(record: Record) -> list[JsonObject]:
    """Return the messages that the entry of `record` adds to a prompt: one or none."""
    kind, message = record.value.get("type"), record.value.get("message")
    if kind == "message" and isinstance(message, dict):
        # The user can hide a command from the model (`excludeFromContext`).
        failed = message.get("role") == "assistant" and not _is_call(record)
        hidden = message.get("role") == "bashExecution" and message.get("excludeFromContext")
        return [] if failed or hidden else [_chat_message(message, record.source)]
    if kind == "branch_summary":
        return [_summary("Summary of another branch of the conversation", record)]
    if kind == "custom_message":
        return [{"role": "user", "content": record.value.get("content")}]
    if isinstance(kind, str) and (kind in _NO_CONTEXT or kind == "compaction"):
        return []
    raise TreepackError(f"{record.source}: has the type {quoted(kind)}; expected an entry of a pi session")


def _summary(title: str, record: Record) -> JsonObject:
    summary = as_text(record.value.get("summary"), source=record.source, name="summary", default="")
    return {"role": "user", "content": f"{title}:\n\n{summary}"}


def _chat_message(message: JsonObject, source: str) -> JsonObject:
    """Return a message of a session in chat form; image parts are kept, so that `_has_image` finds them."""
    role, content = message.get("role"), message.get("content")
    if role == "toolResult":
        call = {"tool_call_id": message.get("toolCallId"), "name": message.get("toolName")}
        return {"role": "tool", "content": content, **call}
    if role == "bashExecution":
        return {"role": "user", "content": _command(message)}
    if role in ("custom", "hookMessage"):
        return {"role": "user", "content": content}
    if role in ("branchSummary", "compactionSummary"):
        return {"role": "user", "content": message.get("summary")}
    if role != "assistant":
        return {"role": role, "content": content}
    ended = {"stopReason": message.get("stopReason")}
    if isinstance(content, str):
        return {"role": role, "content": content} | ended
    parts = as_objects(content, source=source, name="content")
    return {"role": role, "content": [_block(part, source) for part in parts]} | ended


def _block(part: JsonObject, source: str) -> JsonObject:
    """Return a part of the assistant as a block; unknown kinds are parts without text, which are refused later."""
    kind = part.get("type")
    if kind == "thinking":
        return {"type": kind, kind: as_text(part.get(kind), source=source, name=kind, default="")}
    if kind == "toolCall":
        return {"type": "tool_use", "id": part.get("id"), "name": part.get("name"), "input": part.get("arguments")}
    return {"type": kind, "text": part.get("text")}


def _command(message: JsonObject) -> str:
    """Return a command that the user ran, and its output."""
    lines = [f"$ {message.get('command')}", str(message.get("output") or "").rstrip("\n")]
    if message.get("exitCode"):
        lines.append(f"[exit code {message['exitCode']}]")
    return "\n".join(line for line in lines if line)


def _has_image(message: JsonObject) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


FORMAT = Format(
    name="pi",
    rank=110,
    program="pi (session files; output of `pi --mode json`)",
    recognised_by="a first line of `type` session with `timestamp` and `cwd`",
    requires="type:=session, timestamp, cwd",
    checked="first",
    used="""
        type id parentId cwd parentSession message.role message.content message.toolCallId message.toolName
        message.stopReason message.model summary firstKeptEntryId
    """,
    dropped="""
        message.usage, message.api, message.provider, message.details;
        timestamp;
        thinkingSignature;
        entries that are not in the prompt: custom, label, session_info, thinking_level_change, model_change
    """,
    keeps="masks, lineage",
    links="id parentId",
    read_file=_read_pi,
)
