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
from treepack.ingest.readers.messages.content_blocks import plain_content, split_blocks
from treepack.ingest.readers.messages.merged_turns import left_over
from treepack.ingest.readers.messages.message_trees import RENAMED_ROLES

Message = dict[str, Any]

_PART_FIELDS = frozenset("type content id name arguments response result output modality mime_type".split())


def messages_of_parts(messages: Any, source: str, name: str) -> list[Message]:
    """Return messages `{role, parts}` of the conventions of OpenTelemetry in chat form, with their parts in order.

    Raises:
        TreepackError: `name`, the attribute of the messages, has another form.
    """
    done: list[Message] = []
    for message in as_objects(messages, source=source, name=name):
        parts = parsed(message["parts"]) if "parts" in message else message.get("content")
        parts = [{"type": "text", "content": parts}] if isinstance(parts, str) else parts
        parts = as_objects(parts, source=source, name=f"parts of {name}")
        role = message.get("role")
        role = RENAMED_ROLES.get(role, role) if isinstance(role, str) else role
        said = {key: value for key, value in message.items() if key not in ("parts", "content")} | {"role": role}
        for part in parts:
            said |= left_over(part, _PART_FIELDS, "parts")
        blocks = [_block(part, source, name) for part in parts]
        blocks = [block for block in blocks if block.get("text") != ""]
        done += split_blocks([said | {"content": plain_content(blocks)}], between="")
    return done


def _block(part: Message, source: str, name: str) -> Message:
    kind, content = part.get("type"), part.get("content")
    if kind == "tool_call":
        return {"type": "tool_use", "id": part.get("id"), "name": part.get("name"), "input": part.get("arguments")}
    if kind == "tool_call_response":
        return {"type": "tool_result", "tool_use_id": part.get("id"), "content": _result(part)}
    if kind in ("text", "reasoning") and isinstance(content, str):
        return {"type": kind, "text": content}
    # A blob or a file: `skip_reason` finds the part, and the call is skipped.
    if isinstance(kind, str) and kind not in ("text", "reasoning"):
        return {"type": str(part.get("modality") or kind)}
    raise TreepackError(f"{source}: {name} has the part {shown(part)}; expected text under content")


def _result(part: dict[str, Any]) -> str:
    values = (part.get(name) for name in ("response", "result", "output", "content"))
    response = next((value for value in values if value is not None), "")
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
