"""Contents of Gemini's API as chat messages, in the names of its clients for Python and JavaScript.

{role: user, parts: [{text}]}                                   user
{role: model, parts: [{text, thought}, {text}, {functionCall}]}   assistant {reasoning_content, content, tool_calls}
{role: user, parts: [{functionResponse}, {functionResponse}]}   tool, tool
"""

from __future__ import annotations

import json
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import shown
from treepack.ingest.readers.messages import is_messages
from treepack.ingest.readers.turns import left_over

Message = dict[str, Any]

ROLES = {"model": "assistant", "function": "tool"}
CALL, RESULT = ("function_call", "functionCall"), ("function_response", "functionResponse")
# Fields of a part beside its content: signatures of encrypted reasoning and details of media.
DETAILS = frozenset("thought thought_signature thoughtSignature video_metadata videoMetadata media_resolution".split())
MEDIA = frozenset("inline_data inlineData file_data fileData".split())


def gemini_messages(contents: Any, system: Any, source: str) -> list[Message]:
    """Return the messages of `contents`, after the `system` instruction if there is one; text is a user's message.

    Raises:
        TreepackError: contents or parts are not of the form above.
    """
    done = []
    if system:
        parts = system if isinstance(system, str) else _parts(system, source)
        text = parts if isinstance(parts, str) else "".join(str(part.get("text") or "") for part in parts)
        done.append({"role": "system", "content": text})
    contents = [contents] if isinstance(contents, str | dict) else contents
    if not isinstance(contents, list):
        raise TreepackError(f"{source}: contents is {shown(contents)}; expected a list of contents")
    for content in contents:
        if isinstance(content, str):
            done.append({"role": "user", "content": content})
        else:
            done += _of_content(content, source)
    return done


def gemini_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the function declarations of `tools` as schemas, and other tools as they are; None without any."""
    # [{"functionDeclarations": [{"name": "f"}]}] -> [{"name": "f"}]
    done: list[dict[str, Any]] = []
    for tool in tools if is_messages(tools) else []:
        declared = tool.get("function_declarations", tool.get("functionDeclarations"))
        done += declared if is_messages(declared) else [tool]
    return done or None


def _parts(content: Any, source: str) -> list[dict[str, Any]]:
    parts = content.get("parts") if isinstance(content, dict) else content
    parts = [parts] if isinstance(parts, dict) else parts or []
    if not is_messages(parts):
        raise TreepackError(f"{source}: has the parts {shown(parts)}; expected a list of parts")
    return parts


def _of_content(content: Any, source: str) -> list[Message]:
    if not isinstance(content, dict):
        raise TreepackError(f"{source}: has the content {shown(content)}; expected an object with parts")
    role = content.get("role", "user")
    message: Message = {"role": ROLES.get(role, role) if isinstance(role, str) else role, "content": []}
    results: list[Message] = []
    for part in _parts(content, source):
        _add(part, message, results)
    texts = [each["text"] for each in message["content"] if each["type"] == "text"]
    if len(texts) == len(message["content"]):
        message["content"] = "".join(texts)
    is_empty = not any(message.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    return results if results and is_empty else [*results, message]


def _add(part: dict[str, Any], message: Message, results: list[Message]) -> None:
    call, result = (
        next((part[name] for name in names if isinstance(part.get(name), dict)), None) for names in (CALL, RESULT)
    )
    if call is not None:
        arguments = call.get("args") or {}
        message.setdefault("tool_calls", []).append(
            {"id": call.get("id"), "name": call.get("name"), "arguments": arguments}
        )
        message |= left_over(call, ("id", "name", "args"), "tool_calls")
    elif result is not None:
        response = result.get("response")
        content = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
        done = {"role": "tool", "name": result.get("name"), "tool_call_id": result.get("id"), "content": content}
        results.append({name: value for name, value in done.items() if value is not None})
    elif isinstance(text := part.get("text"), str):
        if part.get("thought") is True:
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        else:
            message["content"].append({"type": "text", "text": text})
    else:
        # A file, or code that the server ran: `skip_reason` finds the part.
        kinds = [name for name, value in part.items() if value is not None and name not in DETAILS]
        if kinds:
            message["content"].append({"type": "image" if MEDIA & set(kinds) else kinds[0]})
