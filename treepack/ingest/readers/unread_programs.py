"""The programs whose exports and logs are not read: marks of their records, and what to do instead.

{"type": "thread.started", "thread_id": "t"}   is an export of codex exec --json, which treepack does not read; ...

`UNREAD` is the only list of them. Marks are alternatives of fields, as `Format.requires`.
"""

from __future__ import annotations

from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.kinds import (
    ANY,
    COLUMN,
    IDS,
    LIST,
    OBJECT,
    TEXT,
    Fields,
    ValueKind,
    first,
    has_fields,
    no,
    one_of,
    some,
    starting,
)


@dataclass(frozen=True, slots=True)
class UnreadProgram:
    """A program, the marks of its records, and a remedy.

    A part of a record of a `particular` program may look like a format, so its marks are compared before the formats.
    The marks of all others are weak: they count only if no format matches.
    """

    name: str
    marks: list[Fields]
    remedy: str = "write each conversation as one record with messages (format chat)"
    particular: bool = False


class UnknownFormatError(TreepackError):
    """No format matches a record. `reason` is the short reason to skip the file."""

    reason = "file of no known format"


class ToolSchemasError(UnknownFormatError):
    """A file is a list of tool schemas, which chat templates print."""

    reason = "tool schemas, to give with --tools FILE"

    def __init__(self, source: str) -> None:
        super().__init__(f"{source}: is a tool schema and not a rollout; give its file with --tools")


class UnreadProgramError(UnknownFormatError):
    """A record is an export of a program that treepack does not read."""

    def __init__(self, source: str, program: UnreadProgram) -> None:
        super().__init__(f"{source}: is an export of {program.name}, which treepack does not read; {program.remedy}")
        self.reason = f"export of {program.name}, which is not read"


def unread_program(record: Record, *, particular: bool) -> UnknownFormatError | None:
    """Return the error about a tool schema, or a record of a program in `UNREAD`; None if it is neither."""
    if not particular and has_fields(record.value, _TOOL_SCHEMA):
        return ToolSchemasError(record.source)
    found = next((p for p in UNREAD if p.particular == particular and has_fields(record.value, p.marks)), None)
    return None if found is None else UnreadProgramError(record.source, found)


def _tracer(name: str, marks: list[Fields]) -> UnreadProgram:
    remedy = "write each call of a model as one record with request and response (format openai-chat)"
    return UnreadProgram(name, marks, remedy, particular=True)


def _or_list(fields: Fields, *names: str) -> list[Fields]:
    """Return the marks of a record with `fields`, and of a document with a list of such records under a name."""
    inside: list[Fields] = [{name: first(fields)} for name in names]
    return [fields, *inside]


def _session(folder: str, form: str) -> str:
    return f"give the session file of the same run below {folder} (format {form})"


_OF_MLFLOW = ValueKind(
    "attributes of MLflow", lambda value: isinstance(value, dict) and "mlflow.traceRequestId" in value
)
_HELICONE: Fields = {"request_created_at": ANY, ("request_body", "response_body", "response_created_at"): ANY}
_BEDROCK = ("toolUse", "toolResult", "reasoningContent")
_PYDANTIC: Fields = {"kind": one_of("request", "response"), "parts": first({"part_kind": TEXT})}
_AUTOGEN: Fields = {
    "source": TEXT,
    "type": one_of(*"TextMessage StopMessage HandoffMessage MultiModalMessage StructuredMessage ThoughtEvent".split()),
}
_TRIPLET: Fields = {"prompt.token_ids": IDS, "response.token_ids": IDS}
_TOOL_SCHEMA: list[Fields] = [
    {"type": one_of("function"), "function.name": TEXT, "function.parameters": OBJECT, "function.arguments": no(ANY)},
    {"name": TEXT, ("parameters", "input_schema", "inputSchema"): OBJECT, "description": TEXT, "messages": no(ANY)},
]
UNREAD: tuple[UnreadProgram, ...] = (
    _tracer(
        "Braintrust",
        [
            *_or_list(
                {
                    "_xact_id": ANY,
                    ("root_span_id", "span_attributes", "experiment_id", "log_id", "project_id"): ANY,
                },
                "events",
                "data",
            ),
            {"root_span_id": ANY, "span_attributes": ANY},
        ],
    ),
    _tracer(
        "Weave",
        [
            {"op_name": starting("weave:///")},
            *_or_list({"op_name": TEXT, "started_at": ANY, ("inputs", "trace_id"): ANY}, "calls"),
        ],
    ),
    _tracer(
        "MLflow",
        [
            {"info": OBJECT, "data.spans": LIST},
            {"spans": some({"attributes": _OF_MLFLOW})},
            {("trace_metadata", "request_metadata"): ANY, ("execution_time_ms", "execution_duration"): ANY},
        ],
    ),
    _tracer("Helicone", [{"heliconeMetadata": OBJECT}, *_or_list(_HELICONE, "data")]),
    # Libraries of agents.
    UnreadProgram(
        "Bedrock Converse or Strands Agents, with calls or reasoning",
        [
            {"messages": some({"content": some({_BEDROCK: OBJECT})})},
            {"message.content": first({("text", *_BEDROCK): ANY, "type": no(ANY)}), "message_id": ANY},
            {"schemaType": one_of("ModelInvocationLog")},
        ],
        particular=True,
    ),
    UnreadProgram(
        "pydantic-ai",
        _or_list(_PYDANTIC, "messages", "all_messages", "message_history", "new_messages"),
        particular=True,
    ),
    UnreadProgram(
        "AutoGen",
        [*_or_list(_AUTOGEN, "messages"), {"type": starting("TeamState"), "agent_states": OBJECT}],
        particular=True,
    ),
    UnreadProgram("Amp", [{"id": starting("T-"), "messages": LIST, "v": ANY}], particular=True),
    UnreadProgram(
        "Google ADK as a session (its spans are read)",
        _or_list({"author": TEXT, ("invocationId", "invocation_id"): ANY}, "events"),
    ),
    UnreadProgram("Letta", [{"message_type": TEXT, "id": ANY, ("date", "content", "tool_call", "reasoning"): ANY}]),
    # Dumps of trainers.
    UnreadProgram(
        "ms-swift (completions.jsonl)",
        [{"prompt": LIST, "completion": LIST, ("gen_step", "step", "advantages"): LIST}],
        "write each element of its columns as one record with prompt, completion and reward (format chat)",
    ),
    UnreadProgram(
        "Atropos",
        [{"tokens": COLUMN, "masks": COLUMN, "scores": LIST}],
        "write each element of its columns as one record with input_ids, labels and reward (format tokens)",
        particular=True,
    ),
    UnreadProgram(
        "agent-lightning (triplets)",
        _or_list(_TRIPLET, "triplets"),
        "write each triplet as one record and add --columns "
        "prompt_ids=prompt.token_ids,answer_ids=response.token_ids,reward=reward?",
    ),
    # Streams of headless runs.
    UnreadProgram(
        "codex exec --json",
        [
            {"type": starting("thread."), "thread_id": TEXT},
            {"type": starting("item."), "item": OBJECT},
            {"msg.type": TEXT, "id": ANY},
            {"workdir": TEXT, "approval": ANY, "sandbox": ANY},
        ],
        "it has neither the prompt nor the calls as the model wrote them; " + _session("~/.codex/sessions", "codex"),
    ),
    UnreadProgram(
        "gemini --output-format stream-json",
        [{"type": one_of("init"), "session_id": TEXT, "model": ANY}],
        _session("~/.gemini/tmp", "gemini-cli"),
    ),
    UnreadProgram(
        "opencode run",
        [{"sessionID": TEXT, "timestamp": ANY, "type": TEXT, "part": OBJECT}],
        "give what opencode export writes of the same session (format opencode)",
    ),
    # Coding agents.
    UnreadProgram(
        "GitHub Copilot CLI",
        [
            {"type": starting(prefix), "data": OBJECT, "id": ANY, "parentId": ANY}
            for prefix in ("session.", "user.", "assistant.", "system.", "tool.", "hook.")
        ],
    ),
    UnreadProgram(
        "GitHub Copilot Chat",
        [
            {"requests": LIST, ("requesterUsername", "responderUsername", "initialLocation"): ANY},
            {"requests": LIST, "sessionId": TEXT, "creationDate": ANY},
            {"kind": ANY, "v.requests": LIST},
        ],
    ),
    UnreadProgram(
        "Cursor",
        [
            {"role": one_of("user", "assistant"), "message.content": ANY, "type": no(ANY)},
            {"composerId": TEXT, ("conversation", "fullConversationHeadersOnly", "isAgentic"): ANY},
            {"bubbleId": TEXT, "type": ANY},
            {"tabs": first({"bubbles": LIST})},
            {"type": one_of("tool_call"), "session_id": TEXT, "tool_call": OBJECT},
        ],
    ),
    UnreadProgram(
        "Factory's Droid",
        [
            {"type": one_of("session_start"), "id": TEXT, ("sessionTitle", "owner"): ANY},
            {"type": one_of("message"), "session_id": TEXT, "role": ANY, "text": ANY},
        ],
    ),
    UnreadProgram("Kimi CLI", [{"type": one_of("metadata"), "protocol_version": ANY}]),
    UnreadProgram(
        "Kiro or Amazon Q", [{"conversation_id": TEXT, "history": first({"user": OBJECT, "assistant": ANY})}]
    ),
    UnreadProgram("gptme", [{"role": TEXT, "content": TEXT, "timestamp": TEXT, ("pinned", "hide", "files"): ANY}]),
    UnreadProgram("Antigravity", [{"step_index": ANY, "source": TEXT, "type": TEXT, "status": ANY}]),
    UnreadProgram("Goose", [{"working_dir": TEXT, "message_count": ANY}]),
    UnreadProgram(
        "Grok Build",
        [{"type": one_of("system", "user", "assistant"), "content": ANY, "message": no(ANY), "sessionId": no(ANY)}],
    ),
    UnreadProgram("the Agent Client Protocol", [{"method": starting("session/"), "params": OBJECT}]),
    UnreadProgram("the Agent Host Protocol", [{"ahpProtocolVersion": ANY}]),
)
