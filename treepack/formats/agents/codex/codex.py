"""Rollout files of the Codex CLI: one JSONL file per session, one event per line.

    {"type": "session_meta", "payload": {"id": "S", "cwd": "/work", "base_instructions": {"text": "You are .."}, ..}}
    {"type": "response_item", "payload": {"type": "message", "role": "user", "content": [{"type": "input_text", ..}]}}
    {"type": "response_item", "payload": {"type": "reasoning", ..}}, {"type": "function_call", ..}, ..
    {"type": "compacted", "payload": {"message": "..", "replacement_history": [item, ..]}}
    {"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": 1}}

Items of OpenAI's Responses API follow each other, and the history of the session is the prompt of each turn. It only
grows, until a compaction replaces it, or the user takes back turns; then a new trajectory starts:

    items        u a u b | compacted to s | u c          trajectories   u A u B      s u C

Sessions of early versions have the items themselves on their lines, after a line of `id` and `instructions`.

The base instructions and the developer messages after them are the system prompt. The file contains no tools, and the
prompt that Codex sends lacks the parts of the base instructions about tools that it does not offer. Reasoning is in the
file only if the server sends it in plain text; other reasoning is encrypted. Notes count both. A summary that the model
wrote for a compaction is left out, because its prompt is not in the file. `response_items` reads the items. A session
and its sub-agents are one rollout (`codex_files`). Turns that a fork copied are trained in the file that is read first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treepack.calls.call_logs import NO_CALL
from treepack.calls.copied_turns import COPIED_NOTE
from treepack.calls.rollout_names import group_of_first
from treepack.calls.session_files import first_records, in_session
from treepack.formats.agents.codex.codex_files import file_of_thread
from treepack.formats.kit import (
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Trajectory,
    TreepackError,
    as_objects,
    as_text,
    messages_of_items,
    object_at,
    object_or_empty,
    read_chats,
    shown,
    skip_reason,
)
from treepack.ingest.readers.messages.content_blocks import plain_part
from treepack.ingest.readers.messages.response_items import Item, ItemMessages

CONTEXT_NOTE = "tools, and changes of the system prompt for them, are not in sessions of Codex"
SUMMARY_NOTE = "summary for a compaction not used"
# A line with one of these fields is not the first line of an early session.
_SNAPSHOT = "ghost_snapshot"  # an item of Codex itself: the state of the files, which no model reads


_Message = JsonObject


@dataclass(slots=True)
class _ItemRange:
    """Items that follow each other; the first `num_before` are from earlier stretches, or replace them."""

    items: list[Item] = field(default_factory=list)
    num_before: int = 0


def _read_codex(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of a session, named after its id.

    Their group is derived from the first prompt, so that sessions with the same task are a group.

    Raises:
        TreepackError: an item that `response_items` refuses.
    """
    rows = [replace(row, value=_in_envelope(row.value)) for row in records]
    first, meta = rows[0], rows[0].value["payload"]
    log = _calls_of_file(rows, options.turns)
    contexts = [row.value.get("payload") for row in rows if row.value.get("type") == "turn_context"]
    models = [context.get("model") for context in contexts if isinstance(context, dict)]
    value = {
        "trajectory_id": str(meta.get("id") or first.label),
        "cwd": meta.get("cwd"),
        "version": meta.get("cli_version"),
        "model": ", ".join(dict.fromkeys(name for name in models if isinstance(name, str))) or None,
    }
    record = replace(first, source=first.path, value=value)
    items = log.read(record, options, context=(CONTEXT_NOTE,), reason=log.fault or NO_CALL)
    file = file_of_thread(first.path, meta) if log.calls else None
    is_agent = file is not None and file.number > 0
    yield from in_session(items, file, _group(file.path, options) if file is not None and is_agent else None)


def _in_envelope(value: JsonObject) -> JsonObject:
    """Return a line as `{type, payload}`, which lines of early versions are not."""
    # {"type": "message", ..} -> response_item, {"id": "S", "instructions": null} -> session_meta
    if "payload" in value:
        return value
    if "record_type" in value:
        return {"type": value["record_type"]}
    return {"type": "response_item" if "type" in value else "session_meta", "payload": value}


def _group(path: str, options: ReadOptions) -> str | None:
    """Return the group of the session at `path`, by its first prompt; None if it has no turn of the model."""
    rows = [replace(row, value=_in_envelope(row.value)) for row in first_records(Path(path))]
    items = read_chats(replace(rows[0], value={}), _calls_of_file(rows).calls[:1], options)
    return next((group_of_first(item) for item in items if isinstance(item, Trajectory)), None)


def _calls_of_file(rows: list[Record], turns: dict[str, str] | None = None) -> CallLog:
    """Return the calls of a session that are in no other file of `turns`."""
    path, meta = rows[0].path, rows[0].value["payload"]
    log = CallLog(turns, path)
    # A fork names its session, and a copied history begins with the `session_meta` of the copied session.
    metas = [object_or_empty(row.value.get("payload")) for row in rows if row.value.get("type") == "session_meta"]
    sessions = {str(each[name]) for each in metas for name in ("id", "forked_from_id") if each.get(name)}
    for stretch in _stretches(rows, log):
        chat = messages_of_items(stretch.items, source=path)
        log.note(*chat.notes)
        _add_calls(log, _system(meta, path), chat, stretch.items[: stretch.num_before], sessions)
    return log


def _system(meta: JsonObject, path: str) -> list[_Message]:
    base = meta.get("base_instructions")
    text = base.get("text") if isinstance(base, dict) else base
    text = as_text(text, source=path, name="base_instructions", default="")
    return [{"role": "system", "content": plain_part(text, path)}] if text else []


def _stretches(rows: list[Record], log: CallLog) -> list[_ItemRange]:
    """Return the stretches of the history."""
    stretches = [_ItemRange()]
    for row in rows:
        kind = as_text(row.value.get("type"), source=row.source, name="type")
        payload, metadata = (object_at(row.value, name, row.source) for name in ("payload", "metadata"))
        as_text(payload.get("type"), source=row.source, name="payload.type", default="")
        if not payload:
            continue
        if kind == "response_item" and metadata.get("compaction_output"):
            log.note(SUMMARY_NOTE)
        elif kind == "response_item" and payload.get("type") != _SNAPSHOT:
            stretches[-1].items.append(payload)
        elif kind == "compacted":
            # A copy, because later items are appended, and the list belongs to the record.
            items = _compacted(payload, stretches[-1].items, row.source)
            stretches.append(_ItemRange(list(items), len(items)))
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            items = _rolled_back(stretches[-1].items, payload.get("num_turns"), row.source)
            stretches.append(_ItemRange(list(items), len(items)))
    return stretches


def _compacted(payload: JsonObject, items: list[Item], source: str) -> list[Item]:
    """Return the history after a compaction. Without one in the file: messages of the user, and the summary."""
    if payload.get("replacement_history") is not None:
        return as_objects(payload["replacement_history"], source=source, name="replacement_history")
    messages = [item for item in items if item.get("type") == "message" and item.get("role") != "assistant"]
    message = as_text(payload.get("message"), source=source, name="message", default="")
    return [*messages, {"type": "message", "role": "user", "content": message}]


def _rolled_back(items: list[Item], num_turns: Any, source: str) -> list[Item]:
    """Return `items` before the last `num_turns` messages of the user."""
    if type(num_turns) is not int or num_turns < 0:
        raise TreepackError(f"{source}: num_turns is {shown(num_turns)}; expected the number of turns")
    # u a u b, one turn -> u a. Codex writes its context as messages of the user too, in tags: it is not a turn.
    turns = [index for index, item in enumerate(items) if _is_turn(item)]
    return items if num_turns == 0 or not turns else items[: turns[max(len(turns) - num_turns, 0)]]


def _is_turn(item: Item) -> bool:
    if item.get("type") != "message" or item.get("role") != "user":
        return False
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else [parts]
    return not any(isinstance(text, str) and text.lstrip().startswith("<") for text in texts)


def _add_calls(
    log: CallLog, system: list[_Message], chat: ItemMessages, earlier: Sequence[Item], sessions: set[str]
) -> None:
    """Add a call for each message of the model that does not consist of `earlier` items.

    Items of the first messages may be copies from one of the `sessions`; items have no ids of their own.
    """
    earlier_ids = {id(item) for item in earlier}
    history = _joined([*system, *chat.messages])
    shift = len(history) - len(chat.messages)
    reason = None
    for number, (message, items) in enumerate(zip(chat.messages, chat.items, strict=True)):
        reason = reason or skip_reason([message])
        if message["role"] != "assistant" or any(id(item) in earlier_ids for item in items):
            continue
        # The first answer that is not a copy ends the copied history: a later one may have an equal text.
        is_copy = log.is_copy((name, item) for name in sessions for item in items)
        if is_copy and not log.calls:
            log.note(COPIED_NOTE)
        else:
            log.add(history[: number + shift], [message], reason=reason)


def _joined(messages: list[_Message]) -> list[_Message]:
    """Return `messages` with the system prompt and the developer messages after it as one message.

    Codex sends them as several messages, which many chat templates do not accept.
    """
    num = next((i for i, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    texts = [each["content"] for each in messages[:num]]
    if num < 2 or not all(isinstance(text, str) for text in texts):
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[num:]]


FORMAT = Format(
    name="codex",
    rank=170,
    program="Codex CLI",
    recognised_by="a first line of `type` session_meta with `payload`, or of `id`, `timestamp`, and `instructions` or "
    "`git`, and no content",
    requires="""
        type:=session_meta, payload:object;
        id:text, timestamp:text, instructions|git, type:!, messages:!, prompt:!, input:!, output:!, response:!,
            completion:!
    """,
    checked="first",
    used="""
        type payload payload.id payload.cwd payload.cli_version payload.base_instructions payload.type
        payload.role payload.content payload.name payload.arguments payload.call_id payload.output
        payload.model payload.message payload.replacement_history payload.num_turns metadata.compaction_output
        payload.input payload.action payload.status payload.forked_from_id
        payload.source.subagent.thread_spawn.parent_thread_id
    """,
    dropped="""
        event_msg (repeats the items for the user), except thread_rolled_back;
        turn_context except the model, world_state, token_usage_record;
        payload.encrypted_content and payload.summary of reasoning
    """,
    also="payload.execution payload.tools",
    keeps="masks",
    view=_in_envelope,
    read_file=_read_codex,
)
