"""Sessions of Claude Code: one JSONL file per session or sub-agent, one entry per line.

    {"type": "user", "uuid": "u1", "parentUuid": null, "sessionId": "S", "message": {"role": "user", "content": "Hi"}}
    {"type": "assistant", "uuid": "u2", "parentUuid": "u1", "message": {"id": "m1", "content": [{"type": "text", ..}]}}
    {"type": "assistant", "uuid": "u3", "parentUuid": "u2", "message": {"id": "m1", "content": [{"type": "tool_use", ..}
    {"type": "user", "uuid": "u4", "parentUuid": "u3", "message": {"content": [{"type": "tool_result", ..}]}}

Entries form a tree by `parentUuid`. A message of the model has one line for each of its content blocks, all with the
same `message.id`, or one for each snapshot of its text. The result of a parallel call is a child of its own block, so
the tree branches inside a turn:

    u1 - m1 text - m1 call A - m1 call B - result B          the prompt of m2 contains both calls and both results,
                            `- result A - m2 text            although its path has only A

The prompt of a message is its path from the root, with whole messages and all their results, or from the summary of the
last compaction and the messages that the compaction kept. A branch starts a new trajectory. The file contains neither
the system prompt nor the tools, and only some of the reminders that Claude Code adds; a note counts this. Messages that
Claude Code wrote in the name of the model, and interrupted ones, are context but not trained. A call after an image is
left out. A turn that several files have, because a session was copied or forked, is trained in the file that is read
first. A session and its sub-agents, in the same file or in others, are one rollout (`session_files`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from treepack.calls.call_logs import NO_CALL, ORDER_NOTE, CallPrompt, passes_results, path_since
from treepack.calls.rollout_names import group_of_first
from treepack.calls.session_files import (
    SessionFile,
    agents_below,
    agents_beside,
    file_of_session,
    first_records,
    in_session,
)
from treepack.calls.stream_lines import REMEDY, line_of_stream, linked_sessions
from treepack.formats.kit import (
    STDIN,
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    TreepackError,
    as_text,
    object_at,
    object_or_empty,
    read_chats,
    shown,
    skip_reason,
)
from treepack.ingest.readers.fields.endings import raw_of
from treepack.ingest.readers.messages.content_blocks import split_blocks
from treepack.ingest.readers.messages.merged_turns import parts_of_lines

SYNTHETIC = "<synthetic>"  # the model of a message that Claude Code wrote
INTERRUPTED = "[Request interrupted by user]"
CONTEXT_NOTE = "system prompt, tools and some reminders are not in sessions of Claude Code"
INTERRUPTED_NOTE = "interrupted turn not trained"
PARENT_NOTE = "prompt begins after a line that is not in the file"
SUB_AGENT = "description of a sub-agent, whose session is another file"

_Message = JsonObject


@dataclass(frozen=True, slots=True)
class _SessionEntry:
    """A line of the tree, number `index` in the file.

    `key` is the id of the model's message that contains this block, and None for other lines.
    """

    index: int
    uuid: str
    parent: str | None
    kind: str
    message: _Message
    value: JsonObject
    key: str | None


@dataclass(slots=True)
class _SessionTree:
    """The lines of a file that are in the tree."""

    entries: dict[str, _SessionEntry] = field(default_factory=dict)  # by uuid, in the order of the file
    blocks: dict[str, list[_SessionEntry]] = field(default_factory=dict)  # of each message of the model, by its key
    # By the id of a tool call: the uuid of its block, and the kind of sub-agent that it starts.
    called: dict[str, tuple[str, Any]] = field(default_factory=dict)
    results: dict[str, _SessionEntry] = field(default_factory=dict)  # by the id of the call
    kept: dict[str, list[str]] = field(default_factory=dict)  # uuid of a summary -> entries that its compaction kept
    agents: dict[str, Any] = field(default_factory=dict)  # by the id of a sub-agent with a result in the file: its kind


def _read_claude_code(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of a session, named after it, or after it and its sub-agent.

    Their group is derived from the first prompt of the session, so that sessions with the same task are a group.

    Raises:
        TreepackError: `readers.messages` refuses a message.
    """
    rows = list(records)
    if "agentType" in rows[0].value:
        yield Skipped(rows[0].source, SUB_AGENT, is_rollout=False)
        return
    for lines, faults in linked_sessions(rows):
        if lines or not faults:
            yield from _read_session(lines or rows, faults, options)
        else:
            yield Skipped(rows[0].source, faults[0], detail=f"{rows[0].source}: has {faults[0]}; {REMEDY}")


def _read_session(rows: list[Record], faults: tuple[str, ...], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the lines of one session; `faults` are why others of its lines are not used."""
    session = _session(rows)
    # A stream of several runs repeats the lines of a run that a later one resumes.
    log = _calls(session, CallLog(options.turns, f"{rows[0].path} {rows[0].value.get('sessionId')}"))
    log.note(*faults)
    file, group = _file_of(session, rows[0].path, options)
    record = replace(rows[0], source=rows[0].path, value=_description(session, rows[0], file))
    if log.calls:
        items = log.read(record, options, context=(CONTEXT_NOTE,))
        yield from in_session(items, file, group)
    else:
        yield Skipped(record.source, next(iter(log.notes), NO_CALL), is_rollout=bool(session.blocks))


def _file_of(session: _SessionTree, path: str, options: ReadOptions) -> tuple[SessionFile | None, str | None]:
    """Return the file at `path` of a session with sub-agents, or of one of them, and the group of the session.

    The file is None for a session without sub-agents. The group is None if this file has the first prompt.
    """
    head = next((entry.value for entry in session.entries.values()), {})
    name, agent = head.get("sessionId"), head.get("agentId")
    if not isinstance(name, str) or path == STDIN:
        return None, None
    if not isinstance(agent, str):
        agents = agents_below(path, name) + agents_beside(path, session.agents)
        return (SessionFile(name, path, 0) if agents and Path(path).name == f"{name}.jsonl" else None), None
    main = file_of_session(path, name)
    if main is None:
        return None, None
    called, group = _main(main, Path(main).stat().st_mtime_ns, options)
    agents = agents_below(main, name) + agents_beside(main, called)
    file = Path(path).name
    kind = as_text(called.get(agent), source=path, name="subagent_type", default="") or None
    return (SessionFile(name, main, 1 + agents.index(file), kind), group) if file in agents else (None, None)


@lru_cache(maxsize=64)
def _main(path: str, _changed: int, options: ReadOptions) -> tuple[dict[str, Any], str | None]:
    """Return the sub-agents that the session at `path` has called, and the group of its first prompt."""
    rows = list(first_records(Path(path)))
    if not rows:
        return {}, None
    session = _session(rows)
    items = read_chats(replace(rows[0], value={}), _calls(session, CallLog()).calls[:1], options)
    first = next((item for item in items if isinstance(item, Trajectory)), None)
    return session.agents, None if first is None else group_of_first(first)


def _session(rows: list[Record]) -> _SessionTree:
    session = _SessionTree()
    for row in rows:
        value = row.value
        uuid, parent, message = value.get("uuid"), value.get("parentUuid"), object_or_empty(value.get("message"))
        # Titles, snapshots and queues have no uuid and no place in the tree.
        if not isinstance(uuid, str):
            continue
        if not isinstance(content := message.get("content"), str | list | None):
            raise TreepackError(f"{row.source}: message.content is {shown(content)}; expected text or a list of blocks")
        segment = object_at(object_at(value, "compactMetadata", row.source), "preservedSegment", row.source)
        for name in ("headUuid", "tailUuid", "anchorUuid") if segment else ():
            as_text(segment.get(name), source=row.source, name=name)
        parent = as_text(parent, source=row.source, name="parentUuid", default="") or None
        key = None
        if value.get("type") == "assistant":
            if message.get("id") is None or parent is None:
                raise TreepackError(f"{row.source}: a line of the model lacks message.id or parentUuid; give both")
            key = str(message["id"])
        entry = _SessionEntry(len(session.entries), uuid, parent, str(value.get("type")), message, value, key)
        if key is not None:
            session.blocks.setdefault(key, []).append(entry)
            called = [part for part in _parts(message) if part.get("type") == "tool_use"]
            session.called |= {
                str(part.get("id")): (uuid, object_or_empty(part.get("input")).get("subagent_type")) for part in called
            }
        # A resumed session may repeat lines, and a stream the line of an answer that grows.
        if uuid in session.entries:
            continue
        session.entries[uuid] = entry
        if entry.kind == "user":
            done = _ids(message, "tool_result", "tool_use_id")
            session.results |= dict.fromkeys(done, entry)
            agent = object_or_empty(value.get("toolUseResult")).get("agentId")
            kinds = [session.called[name][1] for name in done if name in session.called]
            session.agents |= {agent: kinds[0] if len(kinds) == 1 else None} if isinstance(agent, str) else {}
    for entry in session.entries.values():
        _add_kept(session, entry)
    session.entries |= {entry.uuid: entry for entry in _moved_results(session)}
    return session


def _moved_results(session: _SessionTree) -> Iterator[_SessionEntry]:
    """Yield the results whose parent is not in the file, such as a line of progress, with their call as parent."""
    for entry in session.entries.values():
        if entry.kind == "user" and entry.parent is not None and entry.parent not in session.entries:
            calls = _ids(entry.message, "tool_result", "tool_use_id") & session.called.keys()
            yield from (replace(entry, parent=session.called[name][0]) for name in sorted(calls)[:1])


def _add_kept(session: _SessionTree, entry: _SessionEntry) -> None:
    """Record the entries that the compaction at `entry` kept, under the summary after which they are in the prompt."""
    segment = object_or_empty(object_or_empty(entry.value.get("compactMetadata")).get("preservedSegment"))
    # The segment head - x - tail is walked from its end, and ends with the head or the root: tail, x, head.
    uuids: list[str] = []
    uuid = segment.get("tailUuid")
    while isinstance(uuid, str) and uuid in session.entries and uuid not in uuids:
        uuids.append(uuid)
        uuid = None if uuid == segment.get("headUuid") else session.entries[uuid].parent
    # A forked session has written the kept entries again after the summary.
    anchor = str(segment.get("anchorUuid"))
    if uuids and session.entries[uuids[-1]].parent != anchor:
        session.kept[anchor] = uuids[::-1]


def _ids(message: _Message, kind: str, name: str) -> set[str]:
    """Return the field `name` of the blocks of type `kind`."""
    return {str(part.get(name)) for part in _parts(message) if part.get("type") == kind}


def _parts(message: _Message) -> list[JsonObject]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _calls(session: _SessionTree, log: CallLog) -> CallLog:
    """Add one call for each message of the model to `log`, in the order of their first lines, and return it."""
    results = {name: entry.index for name, entry in session.results.items()}
    answers = ((_called(blocks), blocks[0].parent, blocks[0].index) for blocks in session.blocks.values())
    if passes_results(answers, results):
        log.note(ORDER_NOTE)
        return log
    prompts: dict[str | None, CallPrompt] = {None: CallPrompt([])}  # by the entry before a call
    interrupted = {entry.parent for entry in session.entries.values() if _is_interruption(entry)}
    if not {entry.parent for entry in session.entries.values()} <= {None, *session.entries}:
        log.note(PARENT_NOTE)
    has_models = any(block.message.get("model") for blocks in session.blocks.values() for block in blocks)
    for blocks in session.blocks.values():
        prompt = _prompt(session, blocks[0].parent, prompts)
        answer = _answer(blocks)
        if (model := blocks[0].message.get("model")) == SYNTHETIC or not answer:
            continue
        if any(block.uuid in interrupted for block in blocks):
            log.note(INTERRUPTED_NOTE)
            continue
        # Only the last line of a message has the reason.
        reasons = [reason for block in blocks if (reason := block.message.get("stop_reason")) is not None]
        is_known = isinstance(model, str) and model != ""
        unknown = None if is_known or not has_models else "its model is not text"  # perhaps SYNTHETIC
        # The last line of a message has the stop string too.
        ending = raw_of(blocks[-1].message) if reasons and blocks[-1].message.get("stop_sequence") else None
        ending = ending or (reasons[-1] if reasons else None)
        lines = [(name, each.message.get("content")) for each in blocks for name in _names(each)]
        log.add(prompt.messages, answer, reason=prompt.reason or unknown, ending=ending, lines=lines)
    return log


def _names(entry: _SessionEntry) -> tuple[Any, Any]:
    """Return the ids of a line that its copies have: its uuid or that of its original, and the id of the request."""
    return object_or_empty(entry.value.get("forkedFrom")).get("messageUuid") or entry.uuid, entry.value.get("requestId")


def _called(blocks: list[_SessionEntry]) -> set[str]:
    """Return the ids of the calls of a message."""
    return {name for block in blocks for name in _ids(block.message, "tool_use", "id")}


def _is_interruption(entry: _SessionEntry) -> bool:
    texts = [entry.message.get("content"), *(part.get("text") for part in _parts(entry.message))]
    return entry.kind == "user" and INTERRUPTED in texts


def _prompt(session: _SessionTree, last: str | None, prompts: dict[str | None, CallPrompt]) -> CallPrompt:
    """Return the messages up to the entry `last`, and keep them in `prompts`, so that the next call starts from there.

    O(entries since the last call, and messages of the prompt).
    """
    path, before = path_since(session.entries, last, prompts)
    between: list[_Message] = []
    done: set[str] = set()
    for entry in path:
        between += _messages(session, entry, done)
        for name in session.kept.get(entry.uuid, []):
            between += _messages(session, session.entries[name], done)
    prompt = CallPrompt([*before.messages, *between], before.reason or skip_reason(between))
    return prompts.setdefault(last, prompt)


def _messages(session: _SessionTree, entry: _SessionEntry, done: set[str]) -> list[_Message]:
    """Return the messages that `entry` adds to a prompt; `done` are the messages of the model that are in it."""
    if entry.key is not None:
        # The path has several blocks of a message: the first one adds the whole message, with its results.
        if entry.key in done or entry.value.get("isApiErrorMessage"):
            return []
        done.add(entry.key)
        blocks = session.blocks[entry.key]
        ids = _called(blocks)
        # In the order of the file. An entry may have several results, but it is in the prompt once.
        results = {session.results[name].index: session.results[name] for name in ids if name in session.results}
        return [*_answer(blocks), *(message for index in sorted(results) for message in _user(results[index]))]
    if entry.kind == "user":
        # A result is in the prompt already, after its call.
        is_result = not session.called.keys().isdisjoint(_ids(entry.message, "tool_result", "tool_use_id"))
        return [] if is_result else _user(entry)
    attachment = entry.value.get("attachment")
    if isinstance(attachment, dict) and attachment.get("type") == "queued_command":
        return [{"role": "user", "content": attachment.get("prompt")}]
    if entry.kind == "system" and entry.value.get("subtype") == "local_command":
        return [{"role": "user", "content": entry.value.get("content")}]
    return []


def _user(entry: _SessionEntry) -> list[_Message]:
    return split_blocks([{"role": "user", "content": entry.message.get("content")}])


def _answer(blocks: list[_SessionEntry]) -> list[_Message]:
    """Return the message of the model whose lines are `blocks`: a list of one, or of none if it is empty."""
    values = [block.message.get("content") for block in blocks]
    content = parts_of_lines(
        [value if isinstance(value, list) else [{"type": "text", "text": value}] for value in values if value]
    )
    return split_blocks([{"role": "assistant", "content": content}]) if content else []


def _description(session: _SessionTree, first: Record, file: SessionFile | None) -> JsonObject:
    models = [blocks[0].message.get("model") for blocks in session.blocks.values()]
    names = dict.fromkeys(name for name in models if isinstance(name, str) and name != SYNTHETIC)
    head = next((entry.value for entry in session.entries.values()), first.value)
    name = "/".join(part for part in (head.get("sessionId"), head.get("agentId")) if isinstance(part, str))
    return {
        "trajectory_id": name or first.label,
        "cwd": head.get("cwd"),
        "version": head.get("version"),
        "model": ", ".join(names) or None,
        "agent": None if file is None else file.agent,
    }


FORMAT = Format(
    name="claude-code",
    rank=160,
    program="Claude Code (session files; streams of `claude -p --output-format stream-json`, and of programs like it)",
    recognised_by="`type` and `sessionId` or `session_id`, a first line of `type` summary or file-history-snapshot, a "
    "file .meta.json",
    # Qwen Code writes lines with the same fields, but messages in the form of Gemini's API.
    requires="""
        type:text, sessionId:text, message.parts:!, systemPayload:!;
        type:=system|user|assistant|result|stream_event|rate_limit_event, session_id:text,
            subtype|message|event|rate_limit_info;
        type:=summary, leafUuid:text;
        type:=file-history-snapshot, messageId:text;
        agentType:text, toolUseId:text
    """,
    checked="first",
    used="""
        type uuid parentUuid sessionId agentId cwd version subtype content message.id message.content
        message.model message.content.tool_use_id compactMetadata.preservedSegment attachment.prompt
        isApiErrorMessage message.content.type message.content.text message.content.thinking message.content.id
        message.content.name message.content.input message.content.content message.content.is_error
        toolUseResult.agentId message.stop_reason
    """,
    also="requestId forkedFrom.messageUuid",
    dropped="""
        attachments except queued commands (reminders);
        message.usage, toolUseResult except the id of a sub-agent;
        lines that are not in the tree: summary, file-history-snapshot, queue-operation, last-prompt, mode
    """,
    keeps="masks",
    view=line_of_stream,
    links="uuid parentUuid sessionId session_id agentId parent_tool_use_id message.id type subtype",
    read_file=_read_claude_code,
)
