"""Sessions of the pi coding agent: one JSONL file per session, one entry per line.

    {"type": "session", "version": 3, "id": "<uuid>", "timestamp": "..", "cwd": "/work", "parentSession": "..."}
    {"type": "message", "id": "a1", "parentId": null, "message": {"role": "user", "content": "Hello"}}
    {"type": "message", "id": "a2", "parentId": "a1", "message": {"role": "assistant", "model": "..",
        "content": [{"type": "thinking", ..}, {"type": "text", ..}, {"type": "toolCall", ..}], "stopReason": "stop"}}
    {"type": "compaction", "id": "a3", "parentId": "a2", "summary": "..", "firstKeptEntryId": "a2"}

Entries are a tree by `parentId`; in version 1, which has no ids, each follows the one before. What an assistant message
answered is the way to it from the root, or from the summary of the last compaction and the entries that it kept. Such
calls are joined where they continue each other, so that a compaction or a branch begins a new trajectory. Summaries,
and commands that the user ran, are in the prompt in our words. The system prompt and the tools are not in the file.
Turns that were broken off or failed are neither trained nor read; a call behind an image is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.calls import SPLIT_NOTE
from treepack.ingest.readers.fields import ReadOptions, as_objects, quoted
from treepack.ingest.readers.format import ANY, LINEAGE, MASKS, Format, one_of
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.trajectories import conversation
from treepack.trajectory import Skipped, Trajectory

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
FAILED = frozenset({"aborted", "error"})
NO_CONTEXT = frozenset({"session", "model_change", "thinking_level_change", "custom", "label", "session_info"})
IMAGE_NOTE = "call behind an image not used"
FAILED_NOTE = "turn that was broken off or failed not used"


Entry = dict[str, Any]


def read_file(records: Iterator[Record], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of a session, called by its id, in the group of that id or of the session it was forked from.

    Raises:
        TreepackError: no header, or entries and messages of another kind.
    """
    found = list(records)
    header = found[0]
    chains, notes, models = _chains(_entries(found))
    if not chains:
        yield Skipped(header.source, "no turn of the model")
    name = str(header.value.get("id") or header.label)
    parent = UUID.search(PurePath(str(header.value.get("parentSession") or "")).name)
    group, model = parent[0] if parent else name, ", ".join(models) or None
    if len(chains) > 1:
        notes = (SPLIT_NOTE, *notes)
    for chain in chains:
        own = name if len(chains) == 1 else f"{name}/turn-{chain.first_call}"
        value = {"trajectory_id": own, "group_id": group, "cwd": header.value.get("cwd"), "model": model}
        record = Record(header.path, header.path, value)
        yield conversation(record, chain.messages, options, num_prompt=chain.num_prompt, notes=notes)
        notes = ()


@dataclass(slots=True)
class _Chain:
    """Calls that continue each other: what they were told and said, of which the first `num_prompt` are not trained."""

    first_call: int
    messages: list[dict[str, Any]]
    num_prompt: int


def _chains(entries: dict[str, Record]) -> tuple[list[_Chain], tuple[str, ...], tuple[str, ...]]:
    """The calls of a session, remarks to be counted, and the models that were called. O(entries) for each chain."""
    chains: list[_Chain] = []
    ends: dict[str, _Chain] = {}  # by the entry of the last call
    behind_image: set[str] = set()
    notes: dict[str, None] = {}
    models: dict[str, None] = {}
    num_calls = 0
    for name, record in entries.items():
        message = record.value.get("message")
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        if not _is_call(record):
            notes[FAILED_NOTE] = None
            continue
        num_calls += 1
        between, before = _since_last_call(entries, record)
        chain = ends.pop(before, None) if before is not None else None
        told = _prompt(entries, record) if chain is None else between
        if before in behind_image or any(map(_has_image, told)):
            behind_image.add(name)
            notes[IMAGE_NOTE] = None
            continue
        if chain is None:
            chain = _Chain(num_calls, told, len(told))
            chains.append(chain)
        else:
            chain.messages += told
        chain.messages.append(_chat_message(message, record.source))
        ends[name] = chain
        if isinstance(message.get("model"), str):
            models[message["model"]] = None
    return chains, tuple(notes), tuple(models)


def _is_call(record: Record) -> bool:
    """Whether the entry of `record` is what a model wrote, to its end."""
    message = record.value.get("message")
    if record.value.get("type") != "message" or not isinstance(message, dict) or message.get("role") != "assistant":
        return False
    return bool(message.get("content")) and str(message.get("stopReason")) not in FAILED


def _since_last_call(entries: dict[str, Record], record: Record) -> tuple[list[dict[str, Any]], str | None]:
    """The messages between the call of `record` and the one before it, and that one's entry.

    None where there is none, or where a compaction lies between them.
    """
    between: list[dict[str, Any]] = []
    seen: set[str] = set()
    parent = record.value.get("parentId")
    while isinstance(parent, str) and parent in entries and parent not in seen:
        seen.add(parent)
        above = entries[parent]
        if _is_call(above):
            return between, parent
        if above.value.get("type") == "compaction":
            return [], None
        between = _messages_of(above) + between
        parent = above.value.get("parentId")
    return [], None


def _entries(records: list[Record]) -> dict[str, Record]:
    """The entries behind the header by their ids; those of version 1 get ids from their place."""
    entries: dict[str, Record] = {}
    before: str | None = None
    for place, record in enumerate(records[1:], 1):
        value = record.value
        if value.get("type") == "session":
            raise TreepackError(f"{record.source}: begins a second session; put each session into a file of its own")
        if not isinstance(value.get("id"), str):
            kept = value.get("firstKeptEntryIndex")
            value = value | {
                "id": str(place),
                "parentId": before,
                "firstKeptEntryId": None if kept is None else str(kept),
            }
            record = Record(record.source, record.path, value)
        entries[value["id"]] = record
        before = value["id"]
    return entries


def _prompt(entries: dict[str, Record], last: Record) -> list[dict[str, Any]]:
    """The messages in front of the entry `last`, in chat form."""
    path: list[Record] = []
    seen: set[str] = set()
    parent = last.value.get("parentId")
    while isinstance(parent, str) and parent in entries and parent not in seen:
        seen.add(parent)
        path.append(entries[parent])
        parent = entries[parent].value.get("parentId")
    path.reverse()
    compactions = [place for place, record in enumerate(path) if record.value.get("type") == "compaction"]
    messages: list[dict[str, Any]] = []
    if compactions:
        at = compactions[-1]
        first = path[at].value.get("firstKeptEntryId")
        start = next((place for place, record in enumerate(path[:at]) if record.value["id"] == first), at)
        messages.append(_summary("Summary of the conversation so far", path[at]))
        path = path[start:at] + path[at + 1 :]
    for record in path:
        messages += _messages_of(record)
    return messages


def _messages_of(record: Record) -> list[dict[str, Any]]:
    """What the entry of `record` adds to a prompt: one message or none."""
    kind, message = record.value.get("type"), record.value.get("message")
    if kind == "message" and isinstance(message, dict):
        failed = message.get("role") == "assistant" and not _is_call(record)
        hidden = message.get("role") == "bashExecution" and message.get("excludeFromContext")
        return [] if failed or hidden else [_chat_message(message, record.source)]
    if kind == "branch_summary":
        return [_summary("Summary of another branch of the conversation", record)]
    if kind == "custom_message":
        return [{"role": "user", "content": record.value.get("content")}]
    if isinstance(kind, str) and (kind in NO_CONTEXT or kind == "compaction"):
        return []
    raise TreepackError(f"{record.source}: has the type {quoted(kind)}; expected an entry of a pi session")


def _summary(title: str, record: Record) -> dict[str, Any]:
    return {"role": "user", "content": f"{title}:\n\n{record.value.get('summary') or ''}"}


def _chat_message(message: dict[str, Any], source: str) -> dict[str, Any]:
    """A message of a session in chat form; parts that are images stay as they are, to be found."""
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
    if role != "assistant" or isinstance(content, str):
        return {"role": role, "content": content}
    said: dict[str, Any] = {"role": role, "content": []}
    for part in as_objects(content, source=source, name="content"):
        kind = part.get("type")
        if kind == "thinking":
            said["reasoning_content"] = said.get("reasoning_content", "") + str(part.get("thinking") or "")
        elif kind == "toolCall":
            call = {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("arguments")}
            said.setdefault("tool_calls", []).append(call)
        else:
            said["content"].append({"type": kind, "text": part.get("text")})
    return said


def _command(message: dict[str, Any]) -> str:
    """A command that the user ran, and what it printed."""
    lines = [f"$ {message.get('command')}", str(message.get("output") or "").rstrip("\n")]
    if message.get("exitCode"):
        lines.append(f"[exit code {message['exitCode']}]")
    return "\n".join(line for line in lines if line)


def _has_image(message: dict[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


FORMAT = Format(
    name="pi",
    program="pi",
    recognised_by="a first line of `type` session with `timestamp` and `cwd`",
    requires=[{"type": one_of("session"), "timestamp": ANY, "cwd": ANY}],
    checked="first",
    used="""
        type id parentId cwd parentSession message.role message.content message.toolCallId message.toolName
        message.stopReason message.model summary firstKeptEntryId
    """.split(),
    dropped=(
        "message.usage, message.api, message.provider, message.details",
        "timestamp",
        "thinkingSignature",
        "entries that are not in the prompt: custom, label, session_info, thinking_level_change, model_change",
    ),
    keeps={MASKS, LINEAGE},
    read_file=read_file,
)
