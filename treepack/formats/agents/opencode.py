"""Sessions of opencode: one document per session, of `opencode export` or of its server, or a folder of small files.

    {"info": {"id": "ses_1", "directory": "/w", ..}, "messages": [
        {"info": {"id": "msg_1", "role": "user", ..}, "parts": [{"type": "text", "text": ".."}]},
        {"info": {"id": "msg_2", "role": "assistant", "modelID": "..", ..}, "parts": [
            {"type": "step-start"}, {"type": "reasoning", ..}, {"type": "text", ..},
            {"type": "tool", "tool": "bash", "callID": "c", "state": {"status": "completed", "input", "output"}},
            {"type": "step-finish", "reason": "tool-calls"}]}]}
    storage/session/<project>/ses_1.json, storage/message/ses_1/msg_1.json, storage/part/msg_1/prt_1.json

Each step of an answer is one call of the model: a message of the assistant with its calls, then their results. A
compaction replaces the history by a question and a summary, so a new trajectory starts; the summary is not trained,
because its prompt is not in the file. Steps that were interrupted are context only, and answers that failed are left
out. A session of a sub-agent belongs to the rollout of its parent. The file contains neither tools nor, unless the user
set one, the system prompt. A call after an image is left out.

The layout of the storage was tested with files of the program, and that of an export is from its description.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from treepack.calls.rollout_names import of_agent
from treepack.formats.kit import (
    STDIN,
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    as_objects,
    object_or_empty,
    objects_at,
    read_document,
    shown,
    skip_reason,
    with_notes,
)
from treepack.ingest.readers.fields.unread_notes import notes_of_record

CONTEXT_NOTE = "tools, and the system prompt unless the user set one, are not in sessions of opencode"
INTERRUPTED_NOTE = "interrupted turn not trained"
FAILED_NOTE = "answer that failed not used"
SUMMARY_NOTE = "summary for a compaction not trained"
SYNTHETIC_NOTE = "turn that the program wrote not trained"
RESULT_NOTE = "tool call without a result"
_CLEARED_NOTE = "result of a tool that later prompts do not contain any more"
_SYSTEM_NOTE = "later system prompt not used"
NO_TEXT_NOTE = "step of an answer without text or calls not used"
_EMPTY_NOTE = "message without parts not used"
_PART_OF_SESSION = "message or part of a message, which is read with its session"
# What opencode sends in place of parts without text.
COMPACTION, SUBTASK = "What did we do so far?", "The following tool was executed by the user"
ABORTED, TOO_LONG = "MessageAbortedError", "MessageOutputLengthError"
# Files whose text opencode sends in a separate text part.
_TEXT_FILES = ("text/", "application/x-directory")
# Parts that are not messages of the model, but mark the start or end of a step, or the state before it.
_MARKS = frozenset({"step-start", "step-finish", "compaction", "subtask"})
_READ = _MARKS | {"text", "reasoning", "tool", "file"}

_PART_FIELDS = (
    ("type", str, "text"),
    ("text", str | None, "text"),
    ("state", dict | None, "an object"),
    ("synthetic", bool | None, "true or false"),
    ("ignored", bool | None, "true or false"),
    ("tail_start_id", str | None, "text"),
)

_Message = JsonObject


@dataclass(slots=True)
class _SessionState:
    """The history before the next call, and the calls so far."""

    prompt: list[_Message] = field(default_factory=list)
    reason: str | None = None
    indices: dict[str, int] = field(default_factory=dict)  # of each message of the session in `prompt`
    log: CallLog = field(default_factory=CallLog)


def _read_opencode(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of a session, named after its id; their group is derived from the first prompt.

    Raises:
        TreepackError: messages or parts of a different kind, or `readers.messages` refuses a message.
    """
    rows = list(records)
    if "parts" in rows[0].value:
        messages = [row.value for row in rows]
        yield from _read_session(replace(rows[0], source=rows[0].path), {}, messages, options)
        return
    for row in rows:
        if "messages" in row.value:
            messages = as_objects(row.value["messages"], source=row.source, name="messages")
            yield from _read_session(row, object_or_empty(row.value.get("info")), messages, options)
        elif "sessionID" in row.value or "messageID" in row.value:
            yield Skipped(row.source, _PART_OF_SESSION, is_rollout=False)
        else:
            stored = _stored(row)
            items = list(_read_session(row, row.value, stored, options))
            # The files of messages and parts are not records, so their fields are noted here.
            yield from with_notes(items, notes_of_record({"messages": stored}, FORMAT.declared, items, row.source))


def _stored(record: Record) -> list[JsonObject]:
    """Return the messages of a session that is stored as small files, with their parts, in the order of their names."""
    if record.path == STDIN:
        return []
    storage = Path(record.path).parent.parent.parent
    folder = storage / "message" / str(record.value.get("id"))
    messages: list[JsonObject] = []
    for path in sorted(folder.glob("*.json")):
        info = read_document(path)
        parts = sorted((storage / "part" / str(info.get("id"))).glob("*.json"))
        messages.append({"info": info, "parts": [read_document(part) for part in parts]})
    return messages


def _read_session(record: Record, info: JsonObject, messages: list[JsonObject], options: ReadOptions) -> Outcomes:
    session = _SessionState(log=CallLog(options.turns, record.source))
    for number, message in enumerate(messages, 1):
        where = f"{record.source}: message {number}"
        about = message.get("info")
        if not isinstance(about, dict) or about.get("role") not in ("user", "assistant"):
            raise TreepackError(f"{where} has the info {shown(about)}; expected an object with role, user or assistant")
        parts = objects_at(message, "parts", where)
        for part in parts:
            _check_part(part, where)
            if part["type"] not in _READ:
                session.log.note(f"part of type '{part['type'][:40]}' not used")
        if not parts:
            session.log.note(_EMPTY_NOTE)
        session.indices[str(about.get("id"))] = len(session.prompt)
        if about.get("role") == "assistant":
            _add_answer(session, about, parts, where)
        else:
            _add(session, _user(session, about, parts))
    # A list of messages alone has the id of its session in each message.
    head = messages[0].get("info") if messages else None
    name = info.get("id") or (head.get("sessionID") if isinstance(head, dict) else None) or record.label
    value = {
        "trajectory_id": str(name),
        "model": session.log.model,
        **{name: info.get(name) for name in ("title", "directory", "version")},
    }
    parent = info.get("parentID")
    for item in session.log.read(replace(record, value=value), options, context=(CONTEXT_NOTE,)):
        yield of_agent(item, parent, str(name)) if isinstance(parent, str) else item


def _check_part(part: JsonObject, where: str) -> None:
    """Refuse a part with a field of a different form.

    Raises:
        TreepackError: its type is not text, or a different field has a wrong kind.
    """
    for name, kind, expected in _PART_FIELDS:
        if not isinstance(part.get(name), kind):
            raise TreepackError(f"{where} has a part with the {name} {shown(part.get(name))}; expected {expected}")


def _add(session: _SessionState, messages: list[_Message]) -> None:
    session.prompt = [*session.prompt, *messages]
    session.reason = session.reason or skip_reason(messages)


def _user(session: _SessionState, info: JsonObject, parts: list[JsonObject]) -> list[_Message]:
    """Return the messages for a message of the user: the system prompt that the user set, and the content."""
    content: list[JsonObject] = []
    for part in parts:
        kind = part.get("type")
        if kind == "text" and not part.get("ignored"):
            content.append({"type": "text", "text": part.get("text")})
        elif kind in ("compaction", "subtask"):
            content.append({"type": "text", "text": COMPACTION if kind == "compaction" else SUBTASK})
        elif kind == "file" and not str(part.get("mime")).startswith(_TEXT_FILES):
            content.append({"type": "image"})
    if "compaction" in [part.get("type") for part in parts]:
        _compact(session, parts)
    has_system = any(message["role"] == "system" for message in session.prompt)
    system = [{"role": "system", "content": info["system"]}] if info.get("system") and not has_system else []
    if has_system and info.get("system") and {"role": "system", "content": info["system"]} not in session.prompt:
        session.log.note(_SYSTEM_NOTE)
    return [*system, *([{"role": "user", "content": content}] if content else [])]


def _compact(session: _SessionState, parts: list[JsonObject]) -> None:
    """Remove the history before a compaction, except the system prompt and the messages that it kept."""
    tails = [part.get("tail_start_id") for part in parts if isinstance(part.get("tail_start_id"), str)]
    start = session.indices.get(str(tails[-1]), len(session.prompt)) if tails else len(session.prompt)
    system = [message for message in session.prompt[:start] if message["role"] == "system"]
    session.prompt = [*system, *session.prompt[start:]]
    session.reason = skip_reason(session.prompt)
    session.indices.clear()


def _add_answer(session: _SessionState, info: JsonObject, parts: list[JsonObject], where: str) -> None:
    error, is_summary = info.get("error"), info.get("summary")
    for key, value, kind in (("error", error, dict), ("summary", is_summary, bool)):
        if value is not None and not isinstance(value, kind):
            raise TreepackError(f"{where} has the {key} {shown(value)}; expected that of an answer of opencode")
    failure = (error or {}).get("name")
    if error and failure not in (ABORTED, TOO_LONG):
        session.log.note(FAILED_NOTE)
        return
    steps = _steps(parts)
    for number, step in enumerate(steps):
        is_last = number == len(steps) - 1
        answer, results = _step(session, step, where)
        if answer is None:
            if any(part["type"] in ("text", "reasoning") for part in step):
                session.log.note(NO_TEXT_NOTE)
            continue
        ends = [part.get("reason") for part in step if part.get("type") == "step-finish"]
        reason = ends[-1] if ends else info.get("finish") if is_last else None
        if failure == TOO_LONG and is_last:
            reason = "length"
        if reason is not None:
            answer["finish_reason"] = reason
        is_interrupted = failure == ABORTED and is_last
        if is_summary:
            session.log.note(SUMMARY_NOTE)
        elif is_interrupted:
            session.log.note(INTERRUPTED_NOTE)
        elif any(part.get("type") == "text" and part.get("synthetic") for part in step):
            session.log.note(SYNTHETIC_NOTE)
        else:
            model = info.get("modelID") or object_or_empty(info.get("model")).get("modelID")
            # A fork has new ids, and keeps the times.
            ids = (info.get("id"), object_or_empty(info.get("time")).get("created"))
            lines = [(name, answer) for name in ids]
            session.log.add(session.prompt, [answer], reason=session.reason, model=model, lines=lines)
        _add(session, [answer, *results])


def _steps(parts: list[JsonObject]) -> list[list[JsonObject]]:
    """Return the parts of each call of the model; a step-start begins one, or else a text after a tool."""
    # [start, text, tool, finish, start, text, finish] -> [[start, text, tool, finish], [start, text, finish]]
    kinds = [part.get("type") for part in parts]
    steps: list[list[JsonObject]] = [[]]
    for index, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
        is_next = kind in ("text", "reasoning") and index > 0 and kinds[index - 1] == "tool"
        if steps[-1] and (kind == "step-start" if "step-start" in kinds else is_next):
            steps.append([])
        steps[-1].append(part)
    return steps


def _step(session: _SessionState, step: list[JsonObject], where: str) -> tuple[_Message | None, list[_Message]]:
    """Return the message of a step and the results of its calls; no message if the step is empty."""
    blocks: list[_Message] = []
    results: list[_Message] = []
    for part in step:
        kind, text = part.get("type"), part.get("text")
        if kind in ("text", "reasoning") and text and not (kind == "text" and part.get("ignored")):
            blocks.append({"type": kind, "text": text})
        elif kind == "tool":
            state = part.get("state") or {}
            about = {"id": part.get("callID"), "name": part.get("tool")}
            blocks.append({"type": "tool_use", **about, "input": state.get("input")})
            results += _result(session, part, state, where)
        elif kind == "file" and not str(part.get("mime")).startswith(_TEXT_FILES):
            blocks.append({"type": "image"})
    if all(block["type"] == "reasoning" for block in blocks):
        return None, []
    return {"role": "assistant", "content": blocks}, results


def _result(session: _SessionState, part: JsonObject, state: JsonObject, where: str) -> list[_Message]:
    """Return the message with the result of a call, none if it did not end."""
    output = state.get("output") if state.get("output") is not None else state.get("error")
    if output is None:
        session.log.note(RESULT_NOTE)
        return []
    if isinstance(state.get("time"), dict) and state["time"].get("compacted"):
        session.log.note(_CLEARED_NOTE)
    content = [{"type": "text", "text": output}]
    # An image in a result cannot be read as text, as in messages.
    content += [{"type": "image"} for _ in objects_at(state, "attachments", where)]
    return [{"role": "tool", "tool_call_id": part.get("callID"), "name": part.get("tool"), "content": content}]


FORMAT = Format(
    name="opencode",
    rank=140,
    program="opencode",
    recognised_by="`info` with `messages` or `parts`; or a session, message or part of its storage",
    requires="""
        info:object, messages:first(info:object, parts:list);
        info.role:text, info.sessionID:text, parts:list;
        id:text, projectID:text, directory:text;
        id:text, sessionID:text, role:text, time:object;
        id:text, messageID:text, type:text
    """,
    checked="first",
    used="""
        info.id info.parentID info.title info.directory info.version info.sessionID info.role info.modelID
        info.model.modelID info.system info.error.name info.finish info.summary
        parts.type parts.text parts.synthetic parts.ignored parts.callID parts.tool parts.tail_start_id
        parts.state.input parts.state.output parts.state.error parts.state.time.compacted parts.reason parts.mime
        messages.info=info messages.parts=parts id parentID title directory version sessionID messageID
    """,
    dropped="""
        parts of type snapshot, patch, agent and retry (no message of the model);
        files of text (opencode sends their text in a text part);
        tools of a message (names only);
        state.title, state.metadata (what the program showed)
    """,
    keeps="masks",
    links="info.id info.parentID info.sessionID id parentID sessionID messageID",
    needs_folder=True,
    read_file=_read_opencode,
)
