"""Contents of Google's Gemini API as messages in OpenAI's form, in the names of its clients for Python and JavaScript.

    {role: model, parts: [{text, thought: true}, {text}, {functionCall: {id, name, args}}]}
        ->  assistant {reasoning_content, content, tool_calls}
    {role: user, parts: [{functionResponse: {id, name, response: {output}}}, {text}]}
        ->  tool, user

A part that is neither text, nor a call, nor a response stays a part of the content, so that `skip_reason` finds it. A
field that is not read becomes a field of the message, such as `content.mood`, which `normalise_messages` notes. The
signature of a thought is encrypted and left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, as_objects, as_text, is_messages, quoted, shown
from treepack.ingest.readers.messages.content_blocks import plain_content, plain_part, split_blocks
from treepack.ingest.readers.messages.merged_turns import left_over

EMPTY_NOTE = "message of the model without text or calls not used"

Message = JsonObject
Part = JsonObject

_USER_ROLES = frozenset({"user", "function", "tool"})
_CALL, _RESULT = ("functionCall", "function_call"), ("functionResponse", "function_response")
# Fields of a part next to its content: signatures of encrypted reasoning and details of media.
_DETAILS = frozenset("thoughtSignature thought_signature videoMetadata video_metadata media_resolution".split())
# Parts that are files.
_MEDIA = frozenset("inlineData inline_data fileData file_data".split())
# Paths of the fields of a content that are read, as programs write it; a format that has contents declares them.
CONTENT = """
    role parts.text parts.thought parts.functionCall.id parts.functionCall.name parts.functionCall.args
    parts.functionResponse.id parts.functionResponse.name parts.functionResponse.response
""".split()


def gemini_messages(contents: Any, system: Any, source: str) -> list[Message]:
    """Return the messages of `contents`, after the `system` instruction if there is one; text is a user's message.

    Raises:
        TreepackError: contents or parts are not of the form above.
    """
    done: list[Message] = []
    if system:
        done += messages_of_system(system, where=source)
    contents = [contents] if isinstance(contents, str | dict) else contents
    if not isinstance(contents, list):
        raise TreepackError(f"{source}: contents is {shown(contents)}; expected a list of contents")
    for number, content in enumerate(contents, 1):
        where = f"{source}: content {number}"
        if isinstance(content, str):
            done.append({"role": "user", "content": content})
            continue
        if isinstance(content, dict):
            content = {"role": "user"} | content
        # An answer without text has an end, and perhaps a reason for it.
        empty = {"role": "assistant", "content": ""}
        done += messages_of_content(content, where=where) or [empty | {"role": content["role"]}]
    return done


def gemini_tools(tools: Any) -> list[JsonObject] | None:
    """Return the function declarations of `tools` as schemas, and other tools as they are; None if both are empty."""
    # [{"functionDeclarations": [{"name": "f"}]}] -> [{"name": "f"}]
    done: list[JsonObject] = []
    for tool in tools if is_messages(tools) else []:
        declared = tool.get("function_declarations", tool.get("functionDeclarations"))
        done += declared if is_messages(declared) else [tool]
    return done or None


def messages_of_system(system: Any, *, where: str) -> list[Message]:
    """Return the message of a system instruction, which is text, a content, or parts; none if it has no parts.

    Raises:
        TreepackError: it is something else.
    """
    content = (
        system if isinstance(system, dict) and "parts" in system else {"parts": parts_or_text(system, where=where)}
    )
    return messages_of_content(content | {"role": "system"}, where=where)


def messages_of_content(content: Any, *, where: str) -> list[Message]:
    """Return the messages of one content; none if it has no parts, or only empty ones of the model.

    Raises:
        TreepackError: the role or a part has a different form.
    """
    if not isinstance(content, dict):
        raise TreepackError(f"{where} is {shown(content)}; expected an object with role and parts")
    role, parts = content.get("role"), gemini_parts_of(content.get("parts"), where=where)
    if role == "model":
        message = assistant_message(parts, where=where)
        messages = split_blocks([message]) if message else []
    elif role == "system":
        messages = [_message("system", parts, where)] if parts else []
    elif isinstance(role, str) and role in _USER_ROLES:
        messages = list(user_messages(parts, where=where))
    else:
        raise TreepackError(f"{where} has role {quoted(role)}; expected user or model")
    if messages:
        messages[-1] |= left_over(content, ("role", "parts"), "contents")
    return messages


def gemini_parts_of(parts: Any, *, where: str) -> list[Part]:
    """Return a list of parts, from one part, or a list of parts and texts; an empty list for null.

    Raises:
        TreepackError: it is something else. A text is refused, because it may be parts as JSON.
    """
    listed = [parts] if isinstance(parts, dict) else parts
    if isinstance(listed, list):
        listed = [{"text": plain_part(part, where)} if isinstance(part, str) else part for part in listed]
    return as_objects(listed, source=where, name="parts")


def parts_or_text(content: Any, *, where: str) -> list[Part]:
    """Return a list of parts like `parts_of`; a text is one part.

    Raises:
        TreepackError: it is neither text nor parts.
    """
    return [{"text": content}] if isinstance(content, str) else gemini_parts_of(content, where=where)


def assistant_message(parts: list[Part], *, where: str) -> Message | None:
    """Return the message of the model that consists of `parts`, as blocks for `split_blocks`; None if it has no blocks.

    Raises:
        TreepackError: a text or the mark of a thought has another form.
    """
    blocks: list[Part] = []
    rest: Message = {}
    for part in parts:
        if _is_thought(part, where):
            text = as_text(part.get("text"), source=where, name="text", default="")
            rest |= left_over(part, ("text", "thought", *_DETAILS), "content")
            if blocks and "thinking" in blocks[-1]:  # parts of a stream
                blocks[-1]["thinking"] += text
            elif text:
                blocks.append({"type": "thinking", "thinking": text})
            continue
        (name, call), (ran, result) = _object(part, _CALL), _object(part, _RESULT)
        if name is not None:
            arguments = {} if call.get("args") is None else call["args"]
            blocks.append({"type": "tool_use", "id": call.get("id"), "name": call.get("name"), "input": arguments})
            rest |= left_over(call, ("id", "name", "args"), "tool_calls")
        elif ran is not None:
            message = _result(result, where)
            blocks.append(message | {"type": "tool_result", "tool_use_id": message.get("tool_call_id")})
        content, more = _content([part if (done := name or ran) is None else _without(part, done)], where)
        blocks += content
        rest |= more
    return {"role": "assistant", "content": blocks} | rest if blocks else None


def user_messages(parts: list[Part], *, where: str) -> Iterator[Message]:
    """Yield the messages of the user and of tools that consist of `parts`, in their order.

    Raises:
        TreepackError: a text or the parts of a result have another form.
    """
    rest: list[Part] = []
    for part in parts:
        name, result = _object(part, _RESULT)
        if name is None:
            rest.append(part)
            continue
        if rest:
            yield _message("user", rest, where)
        yield _result(result, where)
        beside = _without(part, name)
        rest = [beside] if any(key not in _DETAILS for key in beside) else []
    if rest:
        yield _message("user", rest, where)


def _result(response: JsonObject, where: str) -> Message:
    # Newer versions put images of a result into the response.
    parts = [{"text": response_text(response.get("response"))}, *gemini_parts_of(response.get("parts"), where=where)]
    about = {"tool_call_id": response.get("id"), "name": response.get("name")}
    about = {name: value for name, value in about.items() if value is not None}
    known = ("id", "name", "response", "parts")
    return _message("tool", parts, where) | about | left_over(response, known, "results")


def response_text(response: Any) -> str:
    """Return the text of a function's response: its only text, or else its JSON."""
    # {"output": "7"} -> "7", {"error": "no file"} -> "no file", {"a": 1, "b": 2} -> '{"a": 1, "b": 2}'
    if response is None or isinstance(response, str):
        return response or ""
    if isinstance(response, dict) and len(response) == 1 and isinstance(text := next(iter(response.values())), str):
        return text
    return json.dumps(response, ensure_ascii=False)


def _object(part: Part, names: tuple[str, ...]) -> tuple[str | None, JsonObject]:
    """Return the first of `names` under which `part` has an object, and the object."""
    return next(((name, part[name]) for name in names if isinstance(part.get(name), dict)), (None, {}))


def _without(part: Part, name: str) -> Part:
    return {key: value for key, value in part.items() if key != name and not is_empty(value)}


def _is_thought(part: Part, where: str) -> bool:
    thought = part.get("thought")
    if thought is not None and not isinstance(thought, bool):
        raise TreepackError(f"{where} has the thought {shown(thought)}; expected true or false")
    return bool(thought)


def _message(role: str, parts: list[Part], where: str) -> Message:
    content, rest = _content(parts, where)
    return {"role": role, "content": plain_content(content)} | rest


def _content(parts: list[Part], where: str) -> tuple[list[Part], Message]:
    """Return text and files as parts of chat, and fields to note; a part that is not text has the type of its field."""
    content: list[JsonObject] = []
    rest: Message = {}
    for part in parts:
        text = as_text(part.get("text"), source=where, name="text", default="")
        known = ("text", *(["thought"] if part.get("thought") is False else []), *_DETAILS)
        fields = {name: value for name, value in part.items() if name not in known and not is_empty(value)}
        if text:
            content.append({"type": "text", "text": text})
        if media := [name for name in fields if name in _MEDIA]:
            content.append({"type": "image"})
        elif fields and part.get("text") is None:
            content.append({"type": next(iter(fields))})
        else:
            rest |= left_over(fields, media, "content")
    return content, rest
