"""Messages of OpenInference, whose fields are nested under the names of their kinds, as chat messages.

{"message": {"role", "content", "tool_calls": [{"tool_call": {"id", "function": {"name", "arguments"}}}]}}
{"message": {"role", "contents": [{"message_content": {"type": "reasoning", "text"}}, {"tool_call": {..}}]}}
"""

from __future__ import annotations

from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject, object_or_empty, objects_at, shown
from treepack.ingest.readers.messages.content_blocks import MEDIA_PARTS, plain_content
from treepack.ingest.readers.messages.merged_turns import left_over

Message = JsonObject

RENAMED_ROLES = {"Human": "user", "human": "user", "AI": "assistant", "ai": "assistant", "model": "assistant"}
_HIDDEN_NOTE = "encrypted reasoning left out"
_FIELDS = frozenset("role content contents tool_calls function_call_name function_call_arguments_json".split())
_CALL_FIELDS = frozenset("id type function name arguments reasoning_signature".split())
# The text of a part, and the fields that providers attach to it: ids and encrypted reasoning, which is noted.
_PART_FIELDS = frozenset("type text id image signature data encrypted_content".split())


def message_of_tree(message: Message, source: str, notes: dict[str, None]) -> Message:
    """Return one message in chat form; remarks are added to `notes`.

    Raises:
        TreepackError: the message has another form.
    """
    fields = message.get("message", message)
    if not isinstance(fields, dict):
        raise TreepackError(f"{source}: has the message {shown(fields)}; expected an object")
    # Fields of other names become notes.
    done = {key: value for key, value in fields.items() if key not in _FIELDS}
    if "message" in message:
        done |= left_over(message, ("message",), "beside")
    role = fields.get("role")
    if role is not None:
        done["role"] = RENAMED_ROLES.get(role, role) if isinstance(role, str) else role
    tool_calls = objects_at(fields, "tool_calls", source)
    calls = [each.get("tool_call", each) for each in tool_calls]
    if isinstance(name := fields.get("function_call_name"), str):
        done["function_call"] = {"name": name, "arguments": fields.get("function_call_arguments_json")}
    blocks: list[JsonObject] = []
    for part in objects_at(fields, "contents", source):
        if isinstance(call := part.get("tool_call"), dict):
            calls = [each for each in calls if each != call]  # it is there twice
            own = _call(call, done, notes)
            function = object_or_empty(own.get("function", own))
            blocks.append({"type": "tool_use", "id": own.get("id"), "name": function.get("name")})
            blocks[-1]["input"] = function.get("arguments")
        elif isinstance(content := part.get("message_content"), dict):
            if not isinstance(content.get("type"), str) or not isinstance(content.get("text", ""), str):
                raise TreepackError(f"{source}: has the content {shown(content)}; expected text")
            blocks += _content(content, done, notes)
        else:
            raise TreepackError(f"{source}: has the content {shown(part)}; expected message_content or tool_call")
    done["content"] = _joined(fields.get("content"), blocks, source)
    if calls:
        done["tool_calls"] = [_call(call, done, notes) for call in calls]
    return done


def _content(part: JsonObject, message: Message, notes: dict[str, None]) -> list[JsonObject]:
    """Return a part of the content as a block; fields that are not read go into `message`."""
    kind, text = part.get("type"), part.get("text")
    message |= left_over(part, _PART_FIELDS, "contents")
    if kind == "reasoning" and not isinstance(text, str):
        if any(part.get(key) is not None for key in ("signature", "data", "encrypted_content")):
            notes[_HIDDEN_NOTE] = None
        return []
    # Anything but text stays a part of its type, which `skip_reason` finds.
    if kind in MEDIA_PARTS or not isinstance(text, str):
        return [{"type": "text without text" if kind == "text" else str(kind)}]
    return [{"type": kind if kind == "reasoning" else "text", "text": text}]


def _joined(content: Any, blocks: list[JsonObject], source: str) -> Any:
    """Return the content of a message, given as text, as blocks, or as both."""
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    if content and text and content != text:
        raise TreepackError(f"{source}: has the content {shown(content)} and other contents; expected one of them")
    if not blocks:
        return content
    if content and not text:  # after the thoughts, before the calls
        place = next((index for index, block in enumerate(blocks) if block["type"] == "tool_use"), len(blocks))
        blocks.insert(place, {"type": "text", "text": content})
    return plain_content(blocks)


def _call(call: Message, message: Message, notes: dict[str, None]) -> Message:
    if call.get("reasoning_signature") is not None:
        notes[_HIDDEN_NOTE] = None
    done = {key: value for key, value in call.items() if key in _CALL_FIELDS and key != "reasoning_signature"}
    function = done.get("function")
    message |= left_over(call, _CALL_FIELDS, "tool_calls")
    if isinstance(function, dict):
        message |= left_over(function, ("name", "arguments"), "tool_calls.function")
        # A call without arguments is written without them, with "" or with "{}", in the same trace.
        if function.get("arguments") == "":
            done["function"] = function | {"arguments": "{}"}
    return done
