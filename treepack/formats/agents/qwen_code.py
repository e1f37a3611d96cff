"""Sessions of Qwen Code: one JSONL file per session or sub-agent, one entry per line.

    {"type": "user", "uuid": "u1", "parentUuid": null, "sessionId": "S", "message": {"role": "user", "parts": [..]}}
    {"type": "assistant", "uuid": "u2", "parentUuid": "u1", "model": "..", "message": {"role": "model", "parts": [
        {"text": "..", "thought": true}, {"functionCall": {"id": "c", "name": "..", "args": {..}}}]}}
    {"type": "tool_result", "uuid": "u3", "parentUuid": "u2", "message": {"role": "user", "parts": [
        {"functionResponse": {"id": "c", "name": "..", "response": {"output": ".."}}}]}}
    {"type": "system", "subtype": "chat_compression", "systemPayload": {"compressedHistory": [content, ..]}, ..}

Entries form a tree by `parentUuid`: the prompt of an answer is its path from the root, or from the last compression,
which replaces the history. A message may have several lines with one uuid. A rewind starts a branch, and a branch or a
compression starts a new trajectory. The file of a sub-agent may begin with the history that the agent inherited.
Neither the system prompt nor the tools are in other files. A call after an image is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from treepack.calls.call_logs import ORDER_NOTE, CallPrompt, passes_results, path_since
from treepack.calls.rollout_names import of_agent
from treepack.formats.kit import (
    CallLog,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    as_objects,
    as_text,
    is_messages,
    object_or_empty,
    skip_reason,
)
from treepack.ingest.readers.messages.gemini_parts import (
    CONTENT,
    EMPTY_NOTE,
    gemini_parts_of,
    messages_of_content,
    messages_of_system,
)
from treepack.ingest.readers.messages.merged_turns import parts_of_lines

_CONTEXT_NOTE = "system prompt and tools are not in sessions of Qwen Code"
PARENT_NOTE = "message before it is not in the file"
ROOT_NOTE = "message without a parent, which begins another history"
COMPRESSION, BOOTSTRAP = "chat_compression", "agent_bootstrap"


_Message = JsonObject


@dataclass(slots=True)
class _SessionEntry:
    """The lines of one uuid: the content of a message, or a payload that replaces the history."""

    uuid: str
    source: str
    parent: str | None
    kind: str
    content: _Message
    history: list[Any] | None


def _read_qwen_code(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of a session, named after it, or after it and its sub-agent.

    Their group is derived from the first prompt. A sub-agent belongs to the rollout of its session.

    Raises:
        TreepackError: a content that `gemini_parts` refuses.
    """
    rows = list(records)
    entries = _entries(rows)
    log = CallLog(options.turns, rows[0].path)
    log.note(*_missing(entries))
    if _passes_results(entries):
        yield Skipped(rows[0].path, ORDER_NOTE)
        return
    system, tools = _launch(rows)
    prompts: dict[str | None, CallPrompt] = {None: CallPrompt(system)}
    for entry in entries.values():
        if entry.kind != "assistant":
            continue
        answer = messages_of_content(entry.content, where=entry.source)
        prompt = _prompt(entries, entry.parent, prompts)
        if answer:
            log.add(prompt.messages, answer, reason=prompt.reason, tools=tools, lines=[(entry.uuid, entry.content)])
        else:
            log.note(EMPTY_NOTE)
    first = rows[0]
    session, agent = first.value.get("sessionId"), first.value.get("agentId")
    name = "/".join(part for part in (session, agent) if isinstance(part, str)) or first.label
    models = dict.fromkeys(row.value.get("model") for row in rows if isinstance(row.value.get("model"), str))
    about = {name: first.value.get(name) for name in ("cwd", "version", "gitBranch")}
    value = {"trajectory_id": name, "model": ", ".join(map(str, models)) or None} | about
    record = replace(first, source=first.path, value=value)
    for item in log.read(record, options, context=() if system and tools else (_CONTEXT_NOTE,)):
        yield of_agent(item, session, agent) if isinstance(session, str) and isinstance(agent, str) else item


def _entries(rows: list[Record]) -> dict[str, _SessionEntry]:
    """Return the entries by their uuid, in the order of the file."""
    entries: dict[str, _SessionEntry] = {}
    last: str | None = None
    for row in rows:
        value = row.value
        message = object_or_empty(value.get("message"))
        as_text(value.get("type"), source=row.source, name="type")
        as_text(value.get("subtype"), source=row.source, name="subtype", default="")
        # Without ids, each line follows the line before it.
        uuid, parent = value.get("uuid", row.source), value.get("parentUuid", last)
        last = as_text(uuid, source=row.source, name="uuid")
        as_text(parent, source=row.source, name="parentUuid", default="")
        if uuid not in entries:
            entries[uuid] = _SessionEntry(
                uuid,
                row.source,
                parent,
                value["type"],
                {"role": message.get("role"), "parts": []},
                _history(value, row.source),
            )
        # A stream writes one message as several lines, and a resumed session may repeat lines.
        entries[uuid].content["parts"].append(gemini_parts_of(message.get("parts"), where=row.source))
    for entry in entries.values():
        entry.content["parts"] = parts_of_lines(entry.content["parts"])
    return entries


def _missing(entries: dict[str, _SessionEntry]) -> Iterator[str]:
    """Yield notes on entries that begin a history, although they are not the first one."""
    for number, entry in enumerate(entries.values()):
        if entry.parent is not None and entry.parent not in entries:
            yield PARENT_NOTE
        elif entry.parent is None and number > 0 and entry.history is None:
            yield ROOT_NOTE


def _passes_results(entries: dict[str, _SessionEntry]) -> bool:
    """Return whether an answer does not follow the result of a call before it."""

    def ids(entry: _SessionEntry, name: str) -> set[str]:
        parts = (object_or_empty(part.get(name)) for part in entry.content["parts"])
        return {str(part["id"]) for part in parts if part.get("id")}

    places = {name: k for k, entry in enumerate(entries.values()) for name in ids(entry, "functionResponse")}
    answers = [(k, entry) for k, entry in enumerate(entries.values()) if entry.kind == "assistant"]
    before = [entries[entry.parent] for _, entry in answers if entry.parent in entries]
    is_next = any(places.keys() & ids(entry, "functionCall") for entry in before)
    return is_next or passes_results(((ids(each, "functionCall"), each.parent, k) for k, each in answers), places)


def _history(value: JsonObject, source: str) -> list[Any] | None:
    """Return the contents that replace the history at a line, or None if it is another line."""
    payload = value.get("systemPayload")
    if value.get("type") != "system" or not isinstance(payload, dict):
        return None
    names = {COMPRESSION: "compressedHistory", BOOTSTRAP: "history"}
    name = names.get(str(value.get("subtype")))
    return None if name is None else list(as_objects(payload.get(name), source=source, name=name))


def _launch(rows: list[Record]) -> tuple[list[_Message], Any]:
    """Return the system prompt and the tools of a sub-agent; older versions wrote them into the file."""
    payloads = [row.value.get("systemPayload") for row in rows if row.value.get("subtype") == BOOTSTRAP]
    payload = next((each for each in payloads if isinstance(each, dict)), {})
    instruction, tools = payload.get("systemInstruction"), payload.get("tools")
    system = messages_of_system(instruction, where=rows[0].source) if instruction else []
    declared = [_schema(tool) for tool in tools] if isinstance(tools, list) and tools and is_messages(tools) else None
    return system, declared


def _schema(tool: JsonObject) -> JsonObject:
    """Return a declaration of a function with the schema of its parameters under OpenAI's name."""
    schema = tool.get("parametersJsonSchema")
    rest = {name: value for name, value in tool.items() if name != "parametersJsonSchema"}
    return rest if schema is None else rest | {"parameters": schema}


def _prompt(entries: dict[str, _SessionEntry], last: str | None, prompts: dict[str | None, CallPrompt]) -> CallPrompt:
    """Return the messages up to the entry `last`, and keep them in `prompts`, so that the next call starts from there.

    O(entries since the last call, and messages of the prompt).
    """
    path, before = path_since(entries, last, prompts)
    messages, reason = list(before.messages), before.reason
    for entry in path:
        contents = [entry.content] if entry.history is None else entry.history
        if entry.history is not None:
            messages, reason = list(prompts[None].messages), None
        elif entry.kind == "system":
            continue
        added = [message for content in contents for message in messages_of_content(content, where=entry.source)]
        messages += added
        reason = reason or skip_reason(added)
    return prompts.setdefault(last, CallPrompt(messages, reason))


FORMAT = Format(
    name="qwen-code",
    rank=120,
    program="Qwen Code",
    recognised_by="`type` and `sessionId`, with `message.parts`, or with `subtype` and `systemPayload`",
    requires="""
        type:=user|assistant|tool_result|system, sessionId:text, message.parts:list;
        type:=system, sessionId:text, subtype:text, systemPayload:object
    """,
    checked="first",
    used=(
        *"type subtype uuid parentUuid sessionId agentId cwd version gitBranch model systemPayload.tools".split(),
        *(f"message.{path}" for path in CONTENT),
        *(f"systemPayload.{name}=message" for name in ("compressedHistory", "history", "systemInstruction")),
    ),
    dropped="""
        toolCallResult (the result as the program showed it);
        systemPayload of other subtypes (commands of the user, titles, telemetry, snapshots of files)
    """,
    keeps="masks",
    read_file=_read_qwen_code,
)
