"""Items of OpenAI's Responses API to chat messages: one turn of the assistant consists of several items.

    message user | reasoning, message, function_call, function_call | function_call_output, function_call_output | ...
    user         | assistant {reasoning, content, tool_calls}       | tool, tool                                 | ...

In a turn the reasoning comes first, then at most one message, then the calls. An item out of this order starts the next
turn. A turn without content is left out. Items of hosted tools (such as the web search of a server) become notes; only
an `mcp_call` is read, because it contains both the call and its result. Content with an image or another part that is
not text stays a list of parts, so that the caller can skip it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject, as_objects, as_text, as_texts, quoted, shown

Item = JsonObject

_REASONING, TEXT, _CALL = range(3)  # the order of items in a turn
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "mcp_call", "tool_search_call")
RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
EMPTY_NOTE = "assistant turn without content left out"
SUMMARY_NOTE = "reasoning with a summary only left out"
ENCRYPTED_NOTE = "encrypted reasoning left out"


@dataclass(frozen=True, slots=True)
class ItemMessages:
    """Messages in OpenAI's chat form, the items of each message, and remarks to be counted."""

    messages: list[JsonObject]
    items: list[list[Item]]
    notes: tuple[str, ...]


def messages_of_items(items: Any, *, source: str, summaries: bool = False) -> ItemMessages:
    """Return the messages of `items`, a list of items or the text of one user message.

    With `summaries`, the `summary` of a reasoning item without content is the reasoning itself.

    Raises:
        TreepackError: an item is not an object, or lacks a field that its type requires.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}] if items else []
    items = as_objects(items, source=source, name="items")
    notes: dict[str, None] = {}
    messages: list[JsonObject] = []
    parts: list[list[Item]] = []
    for group in _turns(_usable(items, notes)):
        if _rank(group[0]) is None:
            message = _input_message(group[0], source)
        else:
            message = _turn(group, source, notes, summaries=summaries)
            if not any(message.get(key) for key in ("content", "tool_calls", "reasoning_content")):
                notes[EMPTY_NOTE] = None
                continue
        messages.append(message)
        parts.append(group)
    return ItemMessages(messages, parts, tuple(notes))


def _kind(item: Item) -> str:
    return str(item.get("type") or "message")


def _rank(item: Item) -> int | None:
    """Return the rank of an item in a turn of the assistant, or None if the assistant has not written it."""
    kind = _kind(item)
    if kind == "reasoning":
        return _REASONING
    if kind == "message" and item.get("role") == "assistant":
        return TEXT
    return _CALL if kind in CALLS else None


def _usable(items: list[Item], notes: dict[str, None]) -> Iterator[Item]:
    for item in items:
        kind = _kind(item)  # an item without a type is a message, the short form of the API
        # A search for tools by the server is no call of the model.
        is_of_server = kind.startswith("tool_search") and item.get("execution") != "client"
        if is_of_server or kind not in ("reasoning", "message", *CALLS, *RESULTS):
            notes[f"item of type {quoted(kind)} not used"] = None
            continue
        yield item
        # A server ran the tool, so the result is in the same item: it becomes a separate item.
        if kind == "mcp_call":
            result = item.get("output") or item.get("error")
            yield {"type": "function_call_output", "call_id": item.get("id"), "output": result}


def _turns(items: Iterator[Item]) -> Iterator[list[Item]]:
    """Split `items` into groups, one for each message."""
    # reasoning text call call | user | text | text call -> four groups: a second text starts a new turn.
    group: list[Item] = []
    for item in items:
        rank, last = _rank(item), _rank(group[-1]) if group else None
        if group and (rank is None or last is None or rank < last or rank == last == TEXT):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _turn(group: list[Item], source: str, notes: dict[str, None], *, summaries: bool) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": ""}
    reasoning: list[str] = []
    for item in group:
        rank = _rank(item)
        if rank == _REASONING:
            content = _text(item.get("content"), source)
            # The paragraphs of a summary are parts of their own, without newlines between them.
            summary = _text(item.get("summary"), source, between="\n\n")
            if summary and not content and not summaries:
                notes[SUMMARY_NOTE] = None
            if item.get("encrypted_content") and not content and not summary:
                notes[ENCRYPTED_NOTE] = None
            # A summary is not the text that the model generated, so it must not be trained as reasoning.
            reasoning.append(content or (summary if summaries else ""))
        elif rank == TEXT:
            message["content"] = _content(item.get("content"), source)
        else:
            message.setdefault("tool_calls", []).append(_call(item, source))
    if text := "\n\n".join(filter(None, reasoning)):
        message["reasoning_content"] = text
    # An item of a response that a limit cut.
    if any(item.get("status") == "incomplete" for item in group):
        message["finish_reason"] = "incomplete"
    return message


def _call(item: Item, source: str) -> JsonObject:
    # OpenAI's own shell tool has no name: {"action": {"command": ["ls"], ..}} -> local_shell {"command": ["ls"], ..}
    if _kind(item) == "local_shell_call":
        action = item.get("action")
        if not isinstance(action, dict) or action.get("type") != "exec":
            raise TreepackError(f"{source}: has the action {shown(action)}; expected an object of type exec")
        as_texts(action.get("command"), source=source, name="action.command")
        action = {name: value for name, value in action.items() if value is not None}
        item = item | {"name": "local_shell", "arguments": json.dumps(action, ensure_ascii=False)}
    elif _kind(item) == "tool_search_call":
        item = item | {"name": "tool_search"}
    as_text(item.get("name"), source=source, name="name of a call")
    # A custom tool takes free text; chat messages need JSON: "ls" -> {"input": "ls"}.
    arguments = item.get("arguments")
    if _kind(item) == "custom_tool_call":
        text = as_text(item.get("input"), source=source, name="input", default="")
        arguments = json.dumps({"input": text}, ensure_ascii=False)
    call_id = item.get("id") if _kind(item) == "mcp_call" else item.get("call_id") or item.get("id")
    return {"id": call_id, "type": "function", "function": {"name": item["name"], "arguments": arguments}}


def _input_message(item: Item, source: str) -> JsonObject:
    """Return the message of an item that the assistant has not written."""
    if _kind(item) == "tool_search_output":
        item = item | {"output": json.dumps(item.get("tools"), ensure_ascii=False)}
    if ("content" if _kind(item) == "message" else "output") not in item:
        raise TreepackError(f"{source}: has the item {shown(item)}; expected a message with content, or an output")
    if _kind(item) == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"), source)}
    output = item.get("output")
    text = _content(output, source) if isinstance(output, list) or output is None else output
    if not isinstance(text, str | list):
        text = json.dumps(text, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}


def _content(content: Any, source: str) -> str | list[JsonObject]:
    """Return the text of `content`, or its parts that are not text if it has such parts."""
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    others = [kind for kind in kinds if isinstance(kind, str) and kind not in (*_TEXT_PARTS, "refusal")]
    return [{"type": kind} for kind in others] or _text(content, source)


def _text(content: Any, source: str, *, between: str = "") -> str:
    """Return the text of `content`, joined with `between`; a refusal is text too.

    Raises:
        TreepackError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        text = part.get("refusal") if kind == "refusal" else part.get("text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise TreepackError(f"{source}: has the content part {shown(part)}; expected text parts only")
        texts.append(text)
    return between.join(texts)
