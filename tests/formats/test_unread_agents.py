"""Exports and logs that are not read: the refusal names the program, and says what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import column_map
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import detect_format
from treepack.ingest.readers.registry import formats_by_name
from treepack.ingest.readers.unread_programs import UNREAD
from treepack.trajectory import Tokens, Trajectory

_OF_PYDANTIC = {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": "q"}]}
_OF_AUTOGEN = {"source": "user", "type": "TextMessage", "content": "q", "models_usage": None}
_TRIPLET = {"prompt": {"token_ids": [5, 6]}, "response": {"token_ids": [7, 8]}, "reward": None}
_TRACE = {"_xact_id": "1", "root_span_id": "r", "input": "q"}
_CALL = {"op_name": "openai.chat", "started_at": "t", "trace_id": "t"}
_REQUEST = {"request_created_at": "t", "request_body": {}}
RECORDS: dict[str, list[dict[str, Any]]] = {
    "Braintrust": [_TRACE, {"events": [_TRACE]}, {"data": [_TRACE]}, {"root_span_id": "r", "span_attributes": {}}],
    "Weave": [_CALL, {"calls": [_CALL]}, {"op_name": "weave:///a/b"}],
    "MLflow": [
        {"info": {}, "data": {"spans": []}},
        {"spans": [{"attributes": {"mlflow.traceRequestId": "t"}}]},
        {"trace_metadata": {}, "execution_duration": 1},
    ],
    "Helicone": [_REQUEST, {"data": [_REQUEST]}, {"heliconeMetadata": {}}],
    "Bedrock Converse or Strands Agents, with calls or reasoning": [
        {"messages": [{"role": "user", "content": [{"text": "q"}]}, {"content": [{"toolUse": {"name": "f"}}]}]},
        {"message": {"role": "user", "content": [{"text": "q"}]}, "message_id": 0},
        {"schemaType": "ModelInvocationLog", "operation": "Converse"},
    ],
    "pydantic-ai": [_OF_PYDANTIC, {"messages": [_OF_PYDANTIC]}, {"all_messages": [_OF_PYDANTIC]}],
    "AutoGen": [_OF_AUTOGEN, {"messages": [_OF_AUTOGEN]}, {"type": "TeamState", "agent_states": {}}],
    "Amp": [{"v": 3, "id": "T-1", "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}],
    "Google ADK as a session (its spans are read)": [
        {"author": "user", "invocation_id": "e", "content": {"parts": [{"text": "q"}]}},
        {"id": "s", "appName": "a", "events": [{"author": "user", "invocationId": "e"}]},
    ],
    "Letta": [{"id": "m", "message_type": "assistant_message", "content": "a"}],
    "ms-swift (completions.jsonl)": [{"gen_step": [1], "prompt": ["q"], "completion": ["a"], "Accuracy": [1.0]}],
    "Atropos": [{"tokens": [[5, 6, 7]], "masks": [[-100, -100, 7]], "scores": [1.0]}],
    "agent-lightning (triplets)": [_TRIPLET, {"rollout_id": "r", "triplets": [_TRIPLET]}],
    "codex exec --json": [
        {"type": "thread.started", "thread_id": "t"},
        {"type": "item.completed", "item": {"id": "i", "type": "agent_message", "text": "a"}},
        {"id": "0", "msg": {"type": "agent_message", "message": "a"}},
        {"workdir": "/w", "model": "m", "approval": "never", "sandbox": "read-only"},
    ],
    "gemini --output-format stream-json": [{"type": "init", "timestamp": "t", "session_id": "s", "model": "m"}],
    "opencode run": [{"type": "step_start", "timestamp": 1, "sessionID": "ses_1", "part": {"type": "step-start"}}],
    "GitHub Copilot CLI": [
        {"type": "session.start", "data": {"sessionId": "s"}, "id": "e1", "timestamp": "t", "parentId": None},
        {"type": "user.message", "data": {"content": "q"}, "id": "e2", "timestamp": "t", "parentId": "e1"},
    ],
    "GitHub Copilot Chat": [
        {"version": 3, "requesterUsername": "u", "responderUsername": "GitHub Copilot", "requests": [{"message": {}}]},
        {"version": 3, "sessionId": "s", "creationDate": 1, "requests": []},
        {"kind": 0, "v": {"version": 3, "requests": []}},
    ],
    "Cursor": [
        {"role": "user", "message": {"content": [{"type": "text", "text": "q"}]}},
        {"_v": 3, "composerId": "c", "createdAt": 1, "fullConversationHeadersOnly": []},
        {"_v": 2, "bubbleId": "b", "type": 2, "text": "a"},
        {"tabs": [{"tabId": "t", "bubbles": []}]},
        {"type": "tool_call", "subtype": "started", "session_id": "s", "tool_call": {"readToolCall": {}}},
    ],
    "Factory's Droid": [
        {"type": "session_start", "id": "d", "title": "t", "owner": "u", "cwd": "/w"},
        {"type": "message", "session_id": "d", "timestamp": "t", "role": "user", "text": "q"},
    ],
    "Kimi CLI": [{"type": "metadata", "protocol_version": "1.4", "created_at": 1}],
    "Kiro or Amazon Q": [{"conversation_id": "c", "history": [{"user": {"content": {}}, "assistant": {}}]}],
    "gptme": [
        {"role": "system", "content": "s", "timestamp": "t", "pinned": True},
        {"role": "assistant", "content": "Seven.", "timestamp": "t", "call_id": "c"},
    ],
    "Antigravity": [{"step_index": 0, "source": "USER", "type": "USER_INPUT", "status": "DONE", "content": "q"}],
    "Goose": [{"working_dir": "/w", "description": "d", "message_count": 2, "total_tokens": 9}],
    "Grok Build": [{"type": "system", "content": "s"}, {"type": "user", "content": [{"type": "text", "text": "q"}]}],
    "the Agent Client Protocol": [{"method": "session/update", "params": {"update": {}}, "timestamp": 1}],
    "the Agent Host Protocol": [{"ahpProtocolVersion": "0.7.0", "chat": {}, "session": {}}],
}


def test_every_program_has_a_record_here() -> None:
    assert list(RECORDS) == [each.name for each in UNREAD]


@pytest.mark.parametrize(("program", "value"), [(name, value) for name, values in RECORDS.items() for value in values])
def test_a_log_that_is_not_read_is_refused_by_the_name_of_its_program(program: str, value: dict[str, Any]) -> None:
    with pytest.raises(TreepackError) as caught:
        detect_format(Record("log.jsonl:1", "log.jsonl", value))
    remedy = next(each.remedy for each in UNREAD if each.name == program)
    assert str(caught.value) == f"log.jsonl:1: is an export of {program}, which treepack does not read; {remedy}"


def test_a_line_with_one_message_is_refused_with_the_form_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"role": "assistant", "content": "Seven.", "timestamp": "t"}\n')
    with pytest.raises(TreepackError, match="if it is a message, write each conversation as one record with messages"):
        list(read_trajectories([path]))


def test_the_remedy_for_triplets_reads_them() -> None:
    program = next(each for each in UNREAD if each.name == "agent-lightning (triplets)")
    columns = column_map(program.remedy.rpartition(" ")[2])
    record = Record("t.jsonl:1", "t.jsonl", _TRIPLET)
    (item,) = formats_by_name()["columns"].trajectories([record], ReadOptions(columns=columns))
    assert isinstance(item, Trajectory)
    assert isinstance(item.content, Tokens)
    assert item.content.tokens[item.content.starts[0] : item.content.ends[0]].tolist() == [7, 8]
