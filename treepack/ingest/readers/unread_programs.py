"""Programs whose exports and logs are not read, by marks of their records, so that a refusal names the program.

    {"type": "session.start", "data": {..}, "parentId": null, ..}  --program_of-->  "GitHub Copilot CLI"

A program has alternatives of fields, as `Format.requires`.
"""

from __future__ import annotations

from typing import Any

from treepack.ingest.readers.kinds import ANY, LIST, OBJECT, TEXT, Fields, first, has_fields, no, one_of, some, starting

# Tracers of calls. Checked before the formats: a part of such a record may look like one of them.
_BRAINTRUST: Fields = {
    "_xact_id": ANY,
    ("root_span_id", "span_attributes", "experiment_id", "log_id", "project_id"): ANY,
}
_WEAVE: Fields = {"op_name": TEXT, "started_at": ANY, ("inputs", "trace_id"): ANY}
TRACERS: dict[str, list[Fields]] = {
    "Braintrust": [
        _BRAINTRUST,
        {"root_span_id": ANY, "span_attributes": ANY},
        {"events": first(_BRAINTRUST)},
        {"data": first(_BRAINTRUST)},
    ],
    "Weave": [{"op_name": starting("weave:///")}, _WEAVE, {"calls": first(_WEAVE)}],
    "MLflow": [
        {"info": OBJECT, "data.spans": LIST},
        {"spans": some({"attributes.mlflow.traceRequestId": ANY})},
        {("trace_metadata", "request_metadata"): ANY, ("execution_time_ms", "execution_duration"): ANY},
    ],
    "Helicone": [
        {"request_created_at": ANY, ("request_body", "response_body", "response_created_at"): ANY},
        {"heliconeMetadata": OBJECT},
        {"data": first({"request_created_at": ANY, ("request_body", "response_body", "response_created_at"): ANY})},
    ],
}
# Coding agents. These marks are weak, so they count only if no format matches.
AGENTS: dict[str, list[Fields]] = {
    "GitHub Copilot CLI": [
        {"type": starting(prefix), "data": OBJECT, "id": ANY, "parentId": ANY}
        for prefix in ("session.", "user.", "assistant.", "system.", "tool.", "hook.")
    ],
    "GitHub Copilot Chat": [
        {"requests": LIST, ("requesterUsername", "responderUsername", "initialLocation"): ANY},
        {"requests": LIST, "sessionId": TEXT, "creationDate": ANY},
        {"kind": ANY, "v.requests": LIST},
    ],
    "Cursor": [
        {"role": one_of("user", "assistant"), "message.content": ANY, "type": no(ANY)},
        {"composerId": TEXT, ("conversation", "fullConversationHeadersOnly", "isAgentic"): ANY},
        {"bubbleId": TEXT, "type": ANY},
        {"tabs": first({"bubbles": LIST})},
    ],
    "Factory's Droid": [
        {"type": one_of("session_start"), "id": TEXT, ("sessionTitle", "owner"): ANY},
        {"type": one_of("message"), "session_id": TEXT, "role": ANY, "text": ANY},
    ],
    "Kimi CLI": [{"type": one_of("metadata"), "protocol_version": ANY}],
    "Antigravity": [{"step_index": ANY, "source": TEXT, "type": TEXT, "status": ANY}],
    "Goose": [{"working_dir": TEXT, "message_count": ANY}],
    "the Agent Client Protocol": [{"method": starting("session/"), "params": OBJECT}],
    "opencode run (opencode export writes a session that is read)": [
        {"sessionID": TEXT, "timestamp": ANY, "type": TEXT, "part": OBJECT}
    ],
}


def program_of(value: dict[str, Any], programs: dict[str, list[Fields]]) -> str | None:
    """Return the name of the program among `programs` that wrote the record `value`, or None."""
    return next((program for program, marks in programs.items() if has_fields(value, marks)), None)
