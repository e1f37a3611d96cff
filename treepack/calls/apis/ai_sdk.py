"""Messages of the AI SDK (Vercel), whose parts are named with hyphens, as chat messages.

{role: assistant, content: [{type: reasoning}, {type: text}, {type: tool-call, toolCallId, toolName, input}]}
{role: tool, content: [{type: tool-result, toolCallId, output}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed
from treepack.ingest.readers.fields.values import is_messages, shown
from treepack.ingest.readers.messages.content_blocks import split_blocks

Message = dict[str, Any]


def has_sdk_parts(content: Any) -> bool:
    """Return whether the content of a message has parts of the AI SDK, and not of a different library."""
    kinds = {part.get("type") for part in content} if is_messages(content) else set()
    return bool(kinds & {"tool-call", "tool-result"}) or (
        "reasoning" in kinds and not any("summary" in p for p in content)
    )


def messages_of_sdk(message: Message) -> list[Message]:
    """Return a message of the AI SDK as messages: the results of tools, and its texts, thoughts and calls, in order."""
    return split_blocks([message | {"content": [_block(part) for part in message["content"]]}])


def _block(part: Message) -> Message:
    kind = part.get("type")
    if kind == "tool-call":
        call = sdk_call(part)
        return {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["arguments"]}
    if kind != "tool-result":
        return part
    values = (part.get(name) for name in ("output", "result", "content", "text"))
    output = next((value for value in values if value is not None), None)
    if isinstance(output, dict) and "value" in output:
        output = output["value"]
    is_content = is_messages(output) and all(isinstance(each.get("type"), str) for each in output)
    if not isinstance(output, str | None) and not is_content:
        output = json.dumps(output, ensure_ascii=False)
    return {
        "type": "tool_result",
        "tool_use_id": part.get("toolCallId"),
        "name": part.get("toolName"),
        "content": output,
    }


def sdk_call(part: Message) -> Message:
    """Return a tool call in chat form.

    Raises:
        TreepackError: the call has no input.
    """
    arguments = part.get("input", part.get("args"))
    if arguments is None:
        raise TreepackError(f"{part.get('toolName')} is called with {shown(part)}; expected input or args")
    return {"id": part.get("toolCallId"), "name": part.get("toolName"), "arguments": arguments}


def messages_of_sdk_response(value: dict[str, Any]) -> Iterator[Message]:
    """Yield the message of a response `{text, toolCalls, finishReason}`."""
    calls = parsed(value.get("toolCalls")) or []
    message: Message = {"role": "assistant", "content": value.get("text")}
    if is_messages(calls) and calls:
        message["tool_calls"] = [sdk_call(each) for each in calls]
    if isinstance(reason := value.get("finishReason"), str):
        message["finish_reason"] = reason
    yield message
