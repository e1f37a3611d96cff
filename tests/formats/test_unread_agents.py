"""Logs of coding agents that are not read: the refusal names the program."""

from __future__ import annotations

from typing import Any

import pytest

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.reading import detect_format
from treepack.ingest.readers.recognition import AGENTS

RECORDS: dict[str, list[dict[str, Any]]] = {
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
    ],
    "Factory's Droid": [
        {"type": "session_start", "id": "d", "title": "t", "owner": "u", "cwd": "/w"},
        {"type": "message", "session_id": "d", "timestamp": "t", "role": "user", "text": "q"},
    ],
    "Kimi CLI": [{"type": "metadata", "protocol_version": "1.4", "created_at": 1}],
    "Antigravity": [{"step_index": 0, "source": "USER", "type": "USER_INPUT", "status": "DONE", "content": "q"}],
    "Goose": [{"working_dir": "/w", "description": "d", "message_count": 2, "total_tokens": 9}],
    "the Agent Client Protocol": [{"method": "session/update", "params": {"update": {}}, "timestamp": 1}],
    "opencode run (opencode export writes a session that is read)": [
        {"type": "step_start", "timestamp": 1, "sessionID": "ses_1", "part": {"type": "step-start"}}
    ],
}


def test_every_program_has_a_record_here() -> None:
    assert list(RECORDS) == list(AGENTS)


@pytest.mark.parametrize(("program", "value"), [(name, value) for name, values in RECORDS.items() for value in values])
def test_a_log_that_is_not_read_is_refused_by_the_name_of_its_program(program: str, value: dict[str, Any]) -> None:
    with pytest.raises(TreepackError) as caught:
        detect_format(Record("log.jsonl:1", "log.jsonl", value))
    assert str(caught.value).startswith(f"log.jsonl:1: is an export of {program}, which treepack does not read; ")
