"""Tasks of Cline, Roo Code and Kilo Code: the history of one task, a list of messages in the form of Anthropic's API.

    [{"role": "user", "content": [{"type": "text", "text": "<task>.."}], "ts": 1}, {"role": "assistant", ..}, ..]
    {"version": 1, "sessionId": "S", "agent": "lead", "system_prompt": "..", "messages": [message, ..]}

The list is `api_conversation_history.json` in the folder of the task, or any file with such a list; the object is what
newer versions of Cline write. The list contains neither the system prompt nor the tools. In most versions the calls are
text in tags, and their results are messages of the user. Roo Code keeps the messages that a summary or a truncation
replaced, with a mark: they are in the prompts before it, but not in those after it, so a new trajectory starts there.
A turn that the program interrupted or wrote itself is context but not trained. A call after an image is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from treepack.formats.kit import (
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    as_text,
    folder_and_document,
    is_messages,
    object_or_empty,
    objects_at,
    shown,
    skip_reason,
)

_HISTORY = "api_conversation_history"
_CONTEXT_NOTE = "system prompt and tools are not in tasks of Cline"
_TOOLS_NOTE = "tools are not in sessions of Cline"
INTERRUPTED_NOTE = "interrupted turn not trained"
PROGRAM_NOTE = "turn that the program wrote not trained"
SUMMARY_NOTE = "summary of the history not trained"
REASONING_NOTE = "encrypted reasoning not used"
_NO_CALL = "task without a turn of the model"
EMPTY_NOTE = "turn without text or calls not trained"
SHOWN = "messages as the program showed them, which its api_conversation_history.json contains"
# The program adds this to a text that it stopped.
_INTERRUPTED = re.compile(r"\[Response interrupted by [^\]]*\]\s*$")
BY_PROGRAM = "Failure: I did not provide a response."
_KEPT = ("role", "content", "reasoning_content", "finish_reason")
# Fields of a message: the fields that are read, and the fields about it.
_ABOUT = frozenset(
    """
    ts id modelInfo metrics isSummary condenseId condenseParent truncationId truncationParent isTruncationMarker type
    summary encrypted_content text reasoning_details
    """.split()
)
_IDS = frozenset({"sessionId", "agent"})

Message = JsonObject


def _is_cline_message(value: JsonObject) -> bool:
    """Return whether `value` is a message of a task, and nothing else: any other field makes it another format."""
    is_content = isinstance(value.get("content"), str | list) or value.get("type") == "reasoning"
    return value.get("role") in ("user", "assistant") and is_content and value.keys() <= {*_KEPT, *_ABOUT}


def _is_session(value: JsonObject) -> bool:
    """Return whether `value` is a session of a newer version of Cline."""
    messages = value.get("messages")
    return value.keys() >= {"version", *_IDS} and is_messages(messages) and len(messages) > 0


def _is_shown(value: JsonObject) -> bool:
    """Return whether `value` is from `ui_messages.json` or is a `task_metadata.json`, which a task has next to it."""
    return (value.keys() >= {"ts", "type"} and value["type"] in ("say", "ask")) or "files_in_context" in value


def _is_cline_record(value: JsonObject) -> bool:
    """Return whether `value` is the first record of a file of Cline."""
    return _is_cline_message(value) or _is_session(value) or _is_shown(value)


@dataclass(slots=True)
class _TaskState:
    """The prompt of the next call, and the calls so far.

    The prompt has each message as logged and in chat form; the logged one of a system prompt is empty.
    """

    prompt: list[tuple[Message, Message]]
    log: CallLog


def _read_cline(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of a task, named after its folder, or of each session, named after its id.

    Their group is derived from the first prompt.

    Raises:
        TreepackError: `readers.messages` refuses a message.
    """
    rows = list(records)
    if _is_shown(rows[0].value):
        yield Skipped(rows[0].path, SHOWN, is_rollout=False)
        return
    if not _is_session(rows[0].value):
        folder, stem = folder_and_document(rows[0])
        value: JsonObject = {"trajectory_id": folder if stem == _HISTORY and folder else rows[0].label}
        record = replace(rows[0], source=rows[0].path, value=value)
        yield from _read_task(record, [row.value for row in rows], [], options)
        return
    for row in rows:
        prompt = row.value.get("system_prompt")
        system = [{"role": "system", "content": prompt}] if prompt else []
        value = {"trajectory_id": str(row.value.get("sessionId") or row.label), "agent": row.value.get("agent")}
        yield from _read_task(replace(row, value=value), row.value.get("messages"), system, options)


def _read_task(record: Record, messages: Any, system: list[Message], options: ReadOptions) -> Outcomes:
    task = _TaskState([({}, message) for message in system], CallLog(options.turns, record.source))
    reason: str | None = None
    for message in messages if is_messages(messages) else []:
        if message.get("type") == "reasoning":
            task.log.note(REASONING_NOTE)
            continue
        _check_marks(task, message, record.source)
        if message.get("isSummary") or message.get("isTruncationMarker"):
            task.prompt = _without_replaced(task.prompt, message)
            reason = skip_reason([chat for _, chat in task.prompt])
        chat = _chat(message, record.source)
        reason = reason or skip_reason([chat])
        if message.get("role") == "assistant":
            _add_call(task, message, chat, reason)
        task.prompt.append((message, chat))
    record = replace(record, value=record.value | {"model": task.log.model})
    context = (_TOOLS_NOTE if system else _CONTEXT_NOTE,)
    yield from task.log.read(record, options, context=context, empty=_NO_CALL)


def _add_call(task: _TaskState, message: Message, chat: Message, reason: str | None) -> None:
    texts = _texts(message.get("content"))
    if message.get("isSummary"):
        task.log.note(SUMMARY_NOTE)
    elif any(map(_INTERRUPTED.search, texts)):
        task.log.note(INTERRUPTED_NOTE)
    elif texts == [BY_PROGRAM]:
        task.log.note(PROGRAM_NOTE)
    elif reason is None and not chat.get("content"):
        task.log.note(EMPTY_NOTE)
    else:
        about = object_or_empty(message.get("modelInfo"))
        prompt, model = [each for _, each in task.prompt], about.get("modelId") or about.get("id")
        task.log.add(prompt, [chat], reason=reason, model=model, lines=[(message.get("ts"), chat)])


def _check_marks(task: _TaskState, message: Message, source: str) -> None:
    """Refuse names of a summary or truncation of a different form; note marks without names, and names without marks.

    Raises:
        TreepackError: a name is not text.
    """
    for mark, kind in (("isSummary", "condense"), ("isTruncationMarker", "truncation")):
        for name in (f"{kind}Id", f"{kind}Parent"):
            as_text(message.get(name), source=source, name=f"{name} of a message", default="")
        is_marked, is_named = bool(message.get(mark)), bool(message.get(f"{kind}Id"))
        if is_marked != is_named:
            there, missing = (mark, f"{kind}Id") if is_marked else (f"{kind}Id", mark)
            task.log.note(f"{there} without {missing}, so no message is replaced")


def _without_replaced(prompt: list[tuple[Message, Message]], marker: Message) -> list[tuple[Message, Message]]:
    """Return `prompt` without the messages that the summary or truncation `marker` replaced, and their results."""
    names = {name: marker.get(f"{name}Id") for name in ("condense", "truncation")}
    kept = [
        (message, chat)
        for message, chat in prompt
        if not any(name is not None and message.get(f"{kind}Parent") == name for kind, name in names.items())
    ]
    if len(kept) == len(prompt):
        return kept
    blocks = [block for message, _ in kept for block in _blocks(message)]
    calls = {str(block.get("id")) for block in blocks if block.get("type") == "tool_use"}
    return [(message, chat) for message, chat in kept if not _is_orphan(message, calls)]


def _is_orphan(message: Message, calls: set[str]) -> bool:
    """Return whether a message consists of results of calls that are not in the prompt any more."""
    blocks = _blocks(message)
    return bool(blocks) and all(
        block.get("type") == "tool_result" and str(block.get("tool_use_id")) not in calls for block in blocks
    )


def _blocks(message: Message) -> list[JsonObject]:
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [str(block.get("text")) for block in _blocks({"content": content}) if block.get("type") == "text"]


def _chat(message: Message, source: str) -> Message:
    """Return `message` without the fields of the program, with its reasoning and files in known forms."""
    chat = {name: message[name] for name in _KEPT if message.get(name) is not None}
    details = objects_at(message, "reasoning_details", source)
    if "reasoning_content" not in chat:
        texts = [detail["text"] for detail in details if detail.get("text") is not None]
        if not all(isinstance(text, str) for text in texts):
            raise TreepackError(f"{source}: reasoning_details is {shown(details)}; expected objects with text")
        chat |= {"reasoning_content": "".join(texts)} if texts else {}
    if isinstance(message.get("content"), list):
        chat["content"] = [_block(block) if isinstance(block, dict) else block for block in message["content"]]
    return chat


def _block(block: JsonObject) -> JsonObject:
    kind, text = block.get("type"), block.get("text")
    if kind == "reasoning" and isinstance(text, str):
        return {"type": "thinking", "thinking": text}
    if kind == "file" and isinstance(block.get("content"), str):
        return {
            "type": "text",
            "text": f'<file_content path="{block.get("path")}">\n{block["content"]}\n</file_content>',
        }
    if kind == "tool_result" and _is_data(block.get("content")):
        return block | {"content": json.dumps(block["content"], ensure_ascii=False)}
    return block


def _is_data(content: Any) -> bool:
    """Return whether the content of a result is an object, or a list with something that is not a part of a message."""
    if not isinstance(content, list):
        return isinstance(content, dict)
    return any(not isinstance(part, str) and not (isinstance(part, dict) and "type" in part) for part in content)


FORMAT = Format(
    name="cline",
    rank=150,
    program="Cline, Roo Code, Kilo Code",
    recognised_by="a list of messages of `role` and `content`, often with `ts`; or `sessionId`, `agent` and `messages`",
    requires=_is_cline_record,
    checked="first",
    used="""
        role reasoning_content finish_reason reasoning_details.text modelInfo.modelId modelInfo.id isSummary condenseId
        condenseParent truncationId truncationParent isTruncationMarker type sessionId agent system_prompt messages=.
        content.type content.text content.thinking content.path content.id content.name content.input
        content.tool_use_id content.content content.is_error
    """,
    dropped="""
        summary, encrypted_content, text of an entry of type reasoning;
        ui_messages.json, task_metadata.json (what the program showed);
        tool calls as text in tags stay text
    """,
    keeps="masks",
    read_file=_read_cline,
)
