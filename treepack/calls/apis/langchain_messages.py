"""Messages of LangChain, as objects or as the arguments of their constructors, as chat messages."""

from __future__ import annotations

from typing import Any

from treepack.calls.conversations import without
from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.values import JsonObject, is_messages, object_or_empty, quoted, shown
from treepack.ingest.readers.messages.content_blocks import split_blocks
from treepack.ingest.readers.messages.normal_form import READ

Message = JsonObject
ROLES = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "function",
    # The classes of messages as constructors, and as chunks of a stream.
    "HumanMessage": "user",
    "AIMessage": "assistant",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "HumanMessageChunk": "user",
    "AIMessageChunk": "assistant",
    "FunctionMessage": "function",
}
# Fields of messages without which nothing is lost: ids, usage, and copies of other fields.
_HARMLESS = frozenset(
    "id type example additional_kwargs response_metadata usage_metadata tool_call_chunks invalid_tool_calls lc "
    "stop_reason stop_sequence usage model object created annotations chunk_position artifact status".split()
)


def chat_messages(message: Any, source: str) -> list[Message]:
    """Return a message in chat form, also from JSON text. The results of tools among its parts become messages."""
    message = parsed_json(message) or message
    if not isinstance(message, dict):
        raise TreepackError(f"{source}: has the message {shown(message)}; expected an object")
    fields, kind = message, message.get("type")
    if isinstance(message.get("kwargs"), dict):
        names = message.get("id")
        fields, kind = message["kwargs"], names[-1] if isinstance(names, list) and names else None
    elif isinstance(message.get("data"), dict):
        fields = message["data"]
    role = ROLES.get(kind) if isinstance(kind, str) else None
    role = role or fields.get("role")
    if role is None:
        raise TreepackError(f"{source}: has a message of type {quoted(kind)}; expected one of {', '.join(ROLES)}")
    # Fields of other names become notes.
    done = {name: each for name, each in fields.items() if (each is not None if name in READ else each)}
    done = without(done, _HARMLESS) | {"role": role}
    if fields.get("invalid_tool_calls"):
        raise TreepackError(f"{source}: has a tool call that is not JSON; remove the message")
    holders = (object_or_empty(fields.get("response_metadata")), fields)
    if (reason := next((each for each in map(endings.raw_of, holders) if each), None)) is not None:
        done.setdefault("finish_reason", reason)
    return _by_parts(_with_calls(done, object_or_empty(fields.get("additional_kwargs"))))


def generated(generation: Message) -> Any:
    """Return the message of a generation, made from its text if it has nothing else."""
    return generation.get("message") or {"role": "assistant", "content": generation.get("text")}


def _with_calls(message: Message, more: JsonObject) -> Message:
    """Return `message` with its calls under the names of chat, and with fields of LangChain's `additional_kwargs`."""
    calls = message.get("tool_calls") or more.get("tool_calls")
    if is_messages(calls):
        # {"id", "name", "args"} of LangChain -> {"id", "name", "arguments"}
        named = [{"id": call.get("id"), "name": call.get("name"), "arguments": call.get("args")} for call in calls]
        message["tool_calls"] = [
            renamed if "args" in call else call for renamed, call in zip(named, calls, strict=True)
        ]
    elif isinstance(more.get("function_call"), dict):
        message["function_call"] = more["function_call"]
    if isinstance(more.get("reasoning_content"), str):
        message.setdefault("reasoning_content", more["reasoning_content"])
    return message


def _by_parts(message: Message) -> list[Message]:
    """Return `message` with its thoughts, calls and results in the form of chat; its parts may repeat its calls."""
    parts, calls = message.get("content"), message.get("tool_calls")
    if not is_messages(parts):
        return [message]
    if not calls:
        return split_blocks([message], between="")
    # content [text, tool_use "c"], tool_calls [call "c"] -> the call in the place of the part
    by_id = {str(call.get("id")): call for call in calls if isinstance(call, dict)}
    placed = []
    for part in parts:
        call = by_id.pop(str(part.get("id")), None) if part.get("type") == "tool_use" else None
        if call is not None:
            function = object_or_empty(call.get("function", call))
            part = {"type": "tool_use", "id": call.get("id"), "name": function.get("name")}
            part["input"] = function.get("arguments")
        if call is not None or part.get("type") not in ("tool_use", "tool_call", "function_call"):
            placed.append(part)
    message["tool_calls"] = list(by_id.values())
    return split_blocks([message | {"content": placed}], between="")
