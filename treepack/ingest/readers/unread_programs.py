"""The programs whose exports and logs are not read: marks of their records, and what to do instead.

{"type": "thread.started", "thread_id": "t"}   is an export of codex exec --json, which treepack does not read; ...

`UNREAD` is the only list of them. Marks are alternatives of fields as text (`kinds`), as `Format.requires`.
"""

from __future__ import annotations

from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.kinds import has_fields


@dataclass(frozen=True, slots=True)
class _UnreadProgram:
    """A program, the marks of its records, and a remedy.

    A part of a record of a `particular` program may look like a format, so its marks are compared before the formats.
    The marks of all others are weak: they count only if no format matches.
    """

    name: str
    marks: str
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

    def __init__(self, source: str, program: _UnreadProgram) -> None:
        super().__init__(f"{source}: is an export of {program.name}, which treepack does not read; {program.remedy}")
        self.reason = f"export of {program.name}, which is not read"


def unread_program(record: Record, *, particular: bool) -> UnknownFormatError | None:
    """Return the error about a tool schema, or a record of a program in `UNREAD`; None if it is neither."""
    if not particular and has_fields(record.value, _TOOL_SCHEMA):
        return ToolSchemasError(record.source)
    found = next((p for p in UNREAD if p.particular == particular and has_fields(record.value, p.marks)), None)
    return None if found is None else UnreadProgramError(record.source, found)


def _tracer(name: str, marks: str) -> _UnreadProgram:
    remedy = "write each call of a model as one record with request and response (format openai-chat)"
    return _UnreadProgram(name, marks, remedy, particular=True)


def _or_list(fields: str, *names: str) -> str:
    """Return the marks of a record with `fields`, and of a document with a list of such records under a name."""
    return "; ".join((fields, *(f"{name}:first({fields})" for name in names)))


def _session(folder: str, form: str) -> str:
    return f"give the session file of the same run below {folder} (format {form})"


_TOOL_SCHEMA = """
    type:=function, function.name:text, function.parameters:object, function.arguments:!;
    name:text, parameters|input_schema|inputSchema:object, description:text, messages:!
"""
_BRAINTRUST = "_xact_id, root_span_id|span_attributes|experiment_id|log_id|project_id"
_WEAVE = "op_name:text, started_at, inputs|trace_id"
_HELICONE = "request_created_at, request_body|response_body|response_created_at"
_AUTOGEN = """
    source:text,
    type:=TextMessage|StopMessage|HandoffMessage|MultiModalMessage|StructuredMessage|ThoughtEvent
"""
UNREAD: tuple[_UnreadProgram, ...] = (
    _tracer("Braintrust", _or_list(_BRAINTRUST, "events", "data") + "; root_span_id, span_attributes"),
    _tracer("Weave", "op_name:=weave:///*; " + _or_list(_WEAVE, "calls")),
    _tracer(
        "MLflow",
        """
        info:object, data.spans:list; spans:some(attributes:of_mlflow);
        trace_metadata|request_metadata, execution_time_ms|execution_duration
        """,
    ),
    _tracer("Helicone", "heliconeMetadata:object; " + _or_list(_HELICONE, "data")),
    # Libraries of agents.
    _UnreadProgram(
        "Bedrock Converse or Strands Agents, with calls or reasoning",
        """
        messages:some(content:some(toolUse|toolResult|reasoningContent:object));
        message.content:first(text|toolUse|toolResult|reasoningContent, type:!), message_id;
        schemaType:=ModelInvocationLog
        """,
        particular=True,
    ),
    _UnreadProgram(
        "pydantic-ai",
        _or_list(
            "kind:=request|response, parts:first(part_kind:text)",
            *"messages all_messages message_history new_messages".split(),
        ),
        particular=True,
    ),
    _UnreadProgram(
        "AutoGen", _or_list(_AUTOGEN, "messages") + "; type:=TeamState*, agent_states:object", particular=True
    ),
    _UnreadProgram("Amp", "id:=T-*, messages:list, v", particular=True),
    _UnreadProgram(
        "Google ADK as a session (its spans are read)", _or_list("author:text, invocationId|invocation_id", "events")
    ),
    _UnreadProgram("Letta", "message_type:text, id, date|content|tool_call|reasoning"),
    # Dumps of trainers.
    _UnreadProgram(
        "ms-swift (completions.jsonl)",
        "prompt:list, completion:list, gen_step|step|advantages:list",
        "write each element of its columns as one record with prompt, completion and reward (format chat)",
    ),
    _UnreadProgram(
        "Atropos",
        "tokens:column, masks:column, scores:list",
        "write each element of its columns as one record with input_ids, labels and reward (format tokens)",
        particular=True,
    ),
    _UnreadProgram(
        "agent-lightning (triplets)",
        _or_list("prompt.token_ids:ids, response.token_ids:ids", "triplets"),
        "write each triplet as one record and add --columns "
        "prompt_ids=prompt.token_ids,answer_ids=response.token_ids,reward=reward?",
    ),
    # Streams of headless runs.
    _UnreadProgram(
        "codex exec --json",
        """
        type:=thread.*, thread_id:text; type:=item.*, item:object; msg.type:text, id;
        workdir:text, approval, sandbox
        """,
        "it has neither the prompt nor the calls as the model wrote them; " + _session("~/.codex/sessions", "codex"),
    ),
    _UnreadProgram(
        "gemini --output-format stream-json",
        "type:=init, session_id:text, model",
        _session("~/.gemini/tmp", "gemini-cli"),
    ),
    _UnreadProgram(
        "opencode run",
        "sessionID:text, timestamp, type:text, part:object",
        "give what opencode export writes of the same session (format opencode)",
    ),
    # Coding agents.
    _UnreadProgram(
        "GitHub Copilot CLI",
        "; ".join(
            f"type:={prefix}.*, data:object, id, parentId"
            for prefix in ("session", "user", "assistant", "system", "tool", "hook")
        ),
    ),
    _UnreadProgram(
        "GitHub Copilot Chat",
        """
        requests:list, requesterUsername|responderUsername|initialLocation;
        requests:list, sessionId:text, creationDate; kind, v.requests:list
        """,
    ),
    _UnreadProgram(
        "Cursor",
        """
        role:=user|assistant, message.content, type:!;
        composerId:text, conversation|fullConversationHeadersOnly|isAgentic;
        bubbleId:text, type; tabs:first(bubbles:list); type:=tool_call, session_id:text, tool_call:object
        """,
    ),
    _UnreadProgram(
        "Factory's Droid",
        "type:=session_start, id:text, sessionTitle|owner; type:=message, session_id:text, role, text",
    ),
    _UnreadProgram("Kimi CLI", "type:=metadata, protocol_version"),
    _UnreadProgram("Kiro or Amazon Q", "conversation_id:text, history:first(user:object, assistant)"),
    _UnreadProgram(
        "gptme", "role:text, content:text, timestamp:text, pinned|hide|files|file_hashes|call_id|ui_only|ephemeral_ttl"
    ),
    _UnreadProgram("Antigravity", "step_index, source:text, type:text, status"),
    _UnreadProgram("Goose", "working_dir:text, message_count"),
    _UnreadProgram("Grok Build", "type:=system|user|assistant, content, message:!, sessionId:!"),
    _UnreadProgram("the Agent Client Protocol", "method:=session/*, params:object"),
    _UnreadProgram("the Agent Host Protocol", "ahpProtocolVersion"),
)
