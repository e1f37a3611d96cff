"""Coding agents whose logs are not read, by marks of their records, so that a refusal names the program.

    {"type": "session.start", "data": {..}, "parentId": null, ..}  --program_of-->  "GitHub Copilot CLI"

A program has alternatives of fields, as `Format.requires`. They count only if no format matches a record.
"""

from __future__ import annotations

from typing import Any

from treepack.ingest.readers.format import ANY, LIST, OBJECT, TEXT, Fields, first, has_fields, no, one_of, starting

UNREAD: dict[str, list[Fields]] = {
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


def program_of(value: dict[str, Any]) -> str | None:
    """Return the name of the program in `UNREAD` that wrote the record `value`, or None."""
    return next((program for program, marks in UNREAD.items() if has_fields(value, marks)), None)
