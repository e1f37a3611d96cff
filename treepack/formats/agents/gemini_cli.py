"""Sessions of Gemini CLI: one JSON document, or JSONL with a header and one change per line; and saved histories.

    {"sessionId": "S", "projectHash": "..", "messages": [message, ..]}                     session-*.json
    {"sessionId": "S", "projectHash": ".."}                                                session-*.jsonl
    {"id": "m1", "type": "user", "content": [{"text": ".."}]}
    {"id": "m2", "type": "gemini", "content": "..", "thoughts": [{"subject", "description"}], "toolCalls": [
        {"id": "c", "name": "..", "args": {..}, "result": [{"functionResponse": {..}}]}]}
    {"$set": {"messages": [..]}}, {"$rewindTo": "m1"}
    {"clientHistory": [{"role": "user", "parts": [..]}, ..], "toolCall": {..}}             checkpoint of files
    [{"role": "user", "parts": [..]}, {"role": "model", "parts": [..]}]                    checkpoint-<tag>.json

A line with the id of an earlier message replaces it. A rewind goes back to before the named message, and a `$set` of
messages replaces the history; each of them starts a new trajectory, in which earlier answers are not trained again. The
thoughts are summaries that the API returned; they are the reasoning of the message after them. The file contains
neither the system prompt nor the tools. A call after an image is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from treepack.files.input_files.json_text import parsed_json
from treepack.files.remote.cache import addresses_in
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
    is_empty,
    is_messages,
    object_at,
    objects_at,
    shown,
    skip_reason,
)
from treepack.ingest.readers.messages.gemini_parts import (
    CONTENT,
    EMPTY_NOTE,
    assistant_message,
    messages_of_content,
    parts_or_text,
    user_messages,
)

_CONTEXT_NOTE = "system prompt and tools are not in sessions of Gemini CLI"
_THOUGHTS_NOTE = "thoughts without an answer not used"
RESULT_NOTE = "tool call without a result"
_MODEL = frozenset({"gemini", "model"})  # types of a message of the model


_Message = JsonObject


@dataclass(slots=True)
class _SessionState:
    """The state of a session: its history by the ids of messages, and the calls so far."""

    source: str
    facts: JsonObject = field(default_factory=dict)
    history: dict[str, _Message] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    log: CallLog = field(default_factory=CallLog)


def _read_gemini_cli(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of a session, named after its id; their group is derived from the first prompt.

    Raises:
        TreepackError: a message or a part of a different form.
    """
    rows = list(records)
    if "role" in rows[0].value:
        yield from _of_contents(rows[0], [row.value for row in rows], options)
        return
    if (name := next((name for name in ("clientHistory", "history") if rows[0].value.get(name)), None)) is not None:
        for row in rows:
            contents = as_objects(row.value.get(name), source=row.source, name=name)
            yield from _of_contents(row, contents, options)
        return
    session = _SessionState(rows[0].path)
    session.log = CallLog(options.turns, rows[0].path)
    for row in rows:
        _apply(session, row)
    _flush(session)
    about = {name: session.facts.get(name) for name in ("kind", "summary")}
    value = {
        "trajectory_id": str(session.facts.get("sessionId") or rows[0].label),
        "model": session.log.model,
        **about,
    }
    record = replace(rows[0], source=rows[0].path, value=value)
    yield from session.log.read(record, options, context=(_CONTEXT_NOTE,))


def _of_contents(record: Record, contents: list[_Message], options: ReadOptions) -> Outcomes:
    """Read one history in the form of the API."""
    messages: list[_Message] = []
    log = CallLog(options.turns, record.path)
    reason = None
    history = str(Path(addresses_in(record.path)).parent)  # as a hash: checkpoints of one session are in one folder
    for number, content in enumerate(contents, 1):
        history = sha256(f"{history}{json.dumps(content, sort_keys=True)}".encode(errors="surrogatepass")).hexdigest()
        added = messages_of_content(content, where=f"{record.source}: content {number}")
        reason = reason or skip_reason(added)
        if content.get("role") == "model":
            if added:
                log.add(list(messages), added, reason=reason, lines=[(history, None)])
            else:
                log.note(EMPTY_NOTE)
        messages += added
    named = replace(record, source=record.path, value={"trajectory_id": record.label})
    yield from log.read(named, options, context=(_CONTEXT_NOTE,))


def _apply(session: _SessionState, row: Record) -> None:
    """Change the session by one line."""
    value = row.value
    if "$rewindTo" in value:
        _flush(session)
        names = list(session.history)
        index = names.index(value["$rewindTo"]) if value["$rewindTo"] in names else 0
        session.history = {name: session.history[name] for name in names[:index]}
        return
    if "$set" in value:
        changed = object_at(value, "$set", row.source)
        if changed.get("messages") is not None:
            _flush(session)
            session.history = {}
            _add(session, changed["messages"], row.source)
        session.facts |= changed
    elif "sessionId" in value:
        session.facts |= value
        _add(session, value.get("messages"), row.source)
    elif "type" in value:
        _add(session, [value], row.source)


def _add(session: _SessionState, messages: Any, source: str) -> None:
    for message in as_objects(messages, source=source, name="messages"):
        # A message without an id never replaces an earlier message.
        name = message.get("id")
        session.history[name if isinstance(name, str) else f"{source}/{len(session.history)}"] = message


def _flush(session: _SessionState) -> None:
    """Add a call for each message of the model that is not trained yet."""
    prompt: list[_Message] = []
    reason: str | None = None
    for name, message in session.history.items():
        where = f"{session.source}: message {name}"
        kind = message.get("type")
        if not isinstance(kind, str):
            raise TreepackError(f"{where} has the type {shown(kind)}; expected text, such as user or gemini")
        answer = _answer(session, message, where) if kind in _MODEL else None
        added = [answer, *_results(session, message, where)] if answer else []
        if kind == "user":
            added = list(user_messages(parts_or_text(message.get("content"), where=where), where=where))
        elif kind not in _MODEL:
            session.log.note(f"message of type '{kind[:40]}' not used")
        if answer is not None and name not in session.trained:
            session.trained.add(name)
            lines = [(message.get("id"), answer)]
            session.log.add(list(prompt), [answer], reason=reason, model=message.get("model"), lines=lines)
        reason = reason or skip_reason(added)
        prompt += added


def _answer(session: _SessionState, message: _Message, where: str) -> _Message | None:
    # Content may be text, but parts are a list.
    said = parts_or_text(message.get("content"), where=where)
    listed = objects_at(message, "parts", where)
    is_said = not is_empty(message.get("content"))
    if is_said and listed and said != listed:
        raise TreepackError(f"{where} has content and parts, which differ; remove one of them")
    parts = said if is_said else listed
    answer = assistant_message(parts, where=where) or {"role": "assistant", "content": []}
    calls = [
        {"type": "tool_use", "id": call.get("id"), "name": call.get("name"), "input": call.get("args")}
        for call in objects_at(message, "toolCalls", where)
    ]
    thoughts = [_thought(each, where) for each in objects_at(message, "thoughts", where)]
    if not calls and all(block["type"] == "thinking" for block in answer["content"]):
        session.log.note(_THOUGHTS_NOTE if thoughts or answer["content"] else EMPTY_NOTE)
        return None
    said = [{"type": "thinking", "thinking": thought} for thought in thoughts if thought]
    return answer | {"content": [*said, *answer["content"], *calls]}


def _thought(thought: JsonObject, where: str) -> str:
    """Return a thought as the API wrote it: the subject in bold, then the description.

    Raises:
        TreepackError: one of them is not text.
    """
    for name in ("subject", "description"):
        as_text(thought.get(name), source=where, name=f"{name} of a thought", default="")
    subject, description = thought.get("subject"), thought.get("description")
    return "\n\n".join(text for text in (f"**{subject}**" if subject else None, description) if text is not None)


def _results(session: _SessionState, message: _Message, where: str) -> Iterator[_Message]:
    """Yield the results of the tools that a message called."""
    for call in objects_at(message, "toolCalls", where):
        result, parsed = call.get("result"), parsed_json(call.get("result"))
        is_parts = is_messages(parsed) and any("functionResponse" in part for part in parsed)
        parts = parts_or_text(parsed if is_parts else result, where=where)
        if not parts:
            session.log.note(RESULT_NOTE)
            continue
        results = list(user_messages(parts, where=where))
        # A result of a different form, such as text or an image, is that of the same call.
        for result in results:
            about = {"role": "tool", "tool_call_id": call.get("id"), "name": call.get("name")}
            yield about | {name: value for name, value in result.items() if value is not None and name != "role"}


FORMAT = Format(
    name="gemini-cli",
    rank=130,
    program="Gemini CLI",
    recognised_by="`sessionId` with `projectHash` or `messages`; `clientHistory`, `history` or a list of `parts`",
    requires="""
        sessionId:text, projectHash:text;
        sessionId:text, messages:some(type:=gemini);
        clientHistory:first(role, parts:list), toolCall;
        history:first(role, parts:list);
        role:=user|model, parts:objects
    """,
    checked="first",
    used=(
        *"sessionId kind summary $rewindTo id type model content=parts thoughts.subject thoughts.description".split(),
        *"toolCalls.id toolCalls.name toolCalls.args toolCalls.result=parts".split(),
        *CONTENT,
        *"messages=. $set=. history.role history.parts=parts clientHistory.role clientHistory.parts=parts".split(),
    ),
    dropped="""
        messages of type info, warning and error (shown to the user only);
        resultDisplay, displayContent (what the program showed);
        toolCall of a checkpoint (the last call of its clientHistory)
    """,
    keeps="masks",
    links="id $rewindTo",
    read_file=_read_gemini_cli,
)
