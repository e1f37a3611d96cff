"""Contents of Google's Gemini API to messages in OpenAI's form.

    {role: model, parts: [{text, thought: true}, {text}, {functionCall: {id, name, args}}]}
        ->  assistant {reasoning_content, content, tool_calls}
    {role: user, parts: [{functionResponse: {id, name, response: {output}}}, {text}]}
        ->  tool, user

A part that is neither text, nor a call, nor a response stays a part of the content, so that `skip_reason` finds it. The
signature of a thought is encrypted and left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import quoted, shown

USER_ROLES = frozenset({"user", "function", "tool"})
# Parts that are files, by their names in the API.
MEDIA = frozenset({"inlineData", "fileData", "inline_data", "file_data"})

Message = dict[str, Any]


def messages_of_content(content: Any, *, where: str) -> list[Message]:
    """Return the messages of one content; none if it has no parts.

    Raises:
        TreepackError: the role or a part is of another form.
    """
    if not isinstance(content, dict):
        raise TreepackError(f"{where} is {shown(content)}; expected an object with role and parts")
    role, parts = content.get("role"), parts_of(content.get("parts"), where=where)
    if role == "model":
        message = assistant_message(parts)
        return [message] if message else []
    if role == "system":
        return [{"role": "system", "content": [_part(part) for part in parts]}] if parts else []
    if not isinstance(role, str) or role not in USER_ROLES:
        raise TreepackError(f"{where} has role {quoted(role)}; expected user or model")
    return list(user_messages(parts))


def parts_of(parts: Any, *, where: str) -> list[dict[str, Any]]:
    """Return a list of parts, from text, one part, or a list of both; an empty list for null.

    Raises:
        TreepackError: it is something else.
    """
    listed = [] if parts is None else parts if isinstance(parts, list) else [parts]
    listed = [{"text": part} if isinstance(part, str) else part for part in listed]
    if not all(isinstance(part, dict) for part in listed):
        raise TreepackError(f"{where} has the parts {shown(parts)}; expected a list of objects")
    return listed


def assistant_message(parts: list[dict[str, Any]]) -> Message | None:
    """Return the message of the model that consists of `parts`, or None if they contain nothing."""
    message: Message = {"role": "assistant", "content": []}
    thoughts: list[str] = []
    for part in parts:
        if part.get("thought") is True:
            thoughts.append(str(part.get("text") or ""))
        elif isinstance(call := part.get("functionCall"), dict):
            calls = message.setdefault("tool_calls", [])
            calls.append({"id": call.get("id"), "name": call.get("name"), "arguments": call.get("args")})
        elif part.get("text") != "":
            message["content"].append(_part(part))
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message if message["content"] or len(message) > 2 else None


def user_messages(parts: list[dict[str, Any]]) -> Iterator[Message]:
    """Yield the messages of the user and of tools that consist of `parts`, in their order."""
    rest: list[dict[str, Any]] = []
    for part in parts:
        response = part.get("functionResponse")
        if not isinstance(response, dict):
            rest.append(_part(part))
            continue
        if rest:
            yield {"role": "user", "content": rest}
            rest = []
        yield _result(response)
    if rest:
        yield {"role": "user", "content": rest}


def _result(response: dict[str, Any]) -> Message:
    content: list[dict[str, Any]] = [{"type": "text", "text": response_text(response.get("response"))}]
    # Newer versions put images of a result into the response.
    content += [_part(part) for part in response.get("parts") or [] if isinstance(part, dict)]
    return {"role": "tool", "tool_call_id": response.get("id"), "name": response.get("name"), "content": content}


def response_text(response: Any) -> str:
    """Return the text of a function's response: its only text, or else its JSON."""
    # {"output": "7"} -> "7", {"error": "no file"} -> "no file", {"a": 1, "b": 2} -> '{"a": 1, "b": 2}'
    if response is None or isinstance(response, str):
        return response or ""
    if isinstance(response, dict) and len(response) == 1 and isinstance(text := next(iter(response.values())), str):
        return text
    return json.dumps(response, ensure_ascii=False)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part in OpenAI's form; one that is not text has the type of its field."""
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = next((name for name in part if name not in ("thoughtSignature", "text")), "part")
    return {"type": "image" if kind in MEDIA else kind}
