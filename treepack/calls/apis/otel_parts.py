"""Messages `{role, parts}` of the conventions of OpenTelemetry, as chat messages.

{role: assistant, parts: [{type: reasoning, content}, {type: text, content}, {type: tool_call, id, name, arguments}]}
{role: tool, parts: [{type: tool_call_response, id, response}]}
"""

from __future__ import annotations

import json
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed
from treepack.ingest.readers.fields.values import as_objects, shown
from treepack.ingest.readers.messages.merged_turns import left_over
from treepack.ingest.readers.messages.message_trees import RENAMED_ROLES

Message = dict[str, Any]

_PART_FIELDS = frozenset("type content id name arguments response result modality mime_type".split())


def messages_of_parts(messages: Any, source: str, name: str) -> list[Message]:
    """Return messages `{role, parts}` of the conventions of OpenTelemetry in chat form, one for each result of a tool.

    Raises:
        TreepackError: `name`, the attribute of the messages, has another form.
    """
    done: list[Message] = []
    for message in as_objects(messages, source=source, name=name):
        parts = parsed(message["parts"]) if "parts" in message else message.get("content")
        parts = [{"type": "text", "content": parts}] if isinstance(parts, str) else parts
        parts = as_objects(parts, source=source, name=f"parts of {name}")
        results = [part for part in parts if part.get("type") == "tool_call_response"]
        done += [{"role": "tool", "tool_call_id": part.get("id"), "content": _result(part)} for part in results]
        others = [part for part in parts if part.get("type") != "tool_call_response"]
        if others or not results:
            role = message.get("role")
            role = RENAMED_ROLES.get(role, role) if isinstance(role, str) else role
            rest = {key: value for key, value in message.items() if key not in ("role", "parts", "content")}
            done.append(rest | _message_of_parts(role, others, source, name))
    return done


def _message_of_parts(role: Any, parts: list[Message], source: str, name: str) -> Message:
    message: Message = {"role": role, "content": ""}
    for part in parts:
        message |= left_over(part, _PART_FIELDS, "parts")
        kind, content = part.get("type"), part.get("content")
        if kind == "tool_call":
            message.setdefault("tool_calls", []).append({key: part.get(key) for key in ("id", "name", "arguments")})
        elif kind in ("text", "reasoning") and isinstance(content, str):
            key = "content" if kind == "text" else "reasoning_content"
            message[key] = message.get(key, "") + content
        # A blob or a file: `skip_reason` finds the part, and the call is skipped.
        elif isinstance(kind, str) and kind not in ("text", "reasoning"):
            return {"role": role, "content": [{"type": str(part.get("modality") or kind)}]}
        else:
            raise TreepackError(f"{source}: {name} has the part {shown(part)}; expected text under content")
    return message


def _result(part: dict[str, Any]) -> str:
    response = part.get("response", part.get("result"))
    return (
        response if isinstance(response, str) else "" if response is None else json.dumps(response, ensure_ascii=False)
    )
