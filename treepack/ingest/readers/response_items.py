"""Items of OpenAI's Responses API to chat messages: a turn of the assistant is spread over several items.

    message user | reasoning, message, function_call, function_call | function_call_output, function_call_output | ...
    user         | assistant {reasoning, content, tool_calls}       | tool, tool                                 | ...

Of a turn the reasoning comes first, then at most one message, then the calls; what is out of this order begins the
next turn. A turn that says nothing is left out. Hosted tools (a server's web search, say) are named in a note, except
for an `mcp_call`, which holds both the call and its result. Contents with an image, say, stay parts, for the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import quoted, shown
from treepack.ingest.readers.messages import is_messages

Item = dict[str, Any]

REASONING, TEXT, CALL = range(3)
CALLS = ("function_call", "custom_tool_call", "mcp_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
EMPTY_NOTE = "assistant turn without content left out"
SUMMARY_NOTE = "reasoning that is known by its summary only left out"


@dataclass(frozen=True, slots=True)
class ItemMessages:
    """Messages in OpenAI's chat form, the items that each is made of, and remarks to be counted."""

    messages: list[dict[str, Any]]
    items: list[list[Item]]
    notes: tuple[str, ...]


def messages_of_items(items: Any, *, source: str, summaries: bool = False) -> ItemMessages:
    """The messages of `items`, a list of items or the text of one user message.

    `summaries` says that a reasoning item without content holds the reasoning itself under `summary`.

    Raises:
        TreepackError: an item that is none, or without what its type requires.
    """
    if items is None or isinstance(items, str):
        items = [{"role": "user", "content": items}] if items else []
    if not is_messages(items):
        raise TreepackError(f"{source}: holds the items {shown(items)}; expected a list of items or text")
    notes: dict[str, None] = {}
    messages: list[dict[str, Any]] = []
    parts: list[list[Item]] = []
    for group in _turns(_usable(items, notes)):
        if _place(group[0]) is None:
            message = _given(group[0], source)
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


def _place(item: Item) -> int | None:
    """The place of an item in a turn of the assistant; None if it is none of the assistant's."""
    kind = _kind(item)
    if kind == "reasoning":
        return REASONING
    if kind == "message" and item.get("role") == "assistant":
        return TEXT
    return CALL if kind in CALLS else None


def _usable(items: list[Item], notes: dict[str, None]) -> Iterator[Item]:
    for item in items:
        kind = _kind(item)
        if kind not in ("reasoning", "message", *CALLS, *RESULTS):
            notes[f"item of type {quoted(kind)} not used"] = None
            continue
        yield item
        if kind == "mcp_call":
            result = item.get("output") or item.get("error")
            yield {"type": "function_call_output", "call_id": item.get("id"), "output": result}


def _turns(items: Iterator[Item]) -> Iterator[list[Item]]:
    """`items` in groups, one for each message."""
    group: list[Item] = []
    for item in items:
        place, last = _place(item), _place(group[-1]) if group else None
        if group and (place is None or last is None or place < last or place == last == TEXT):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _turn(group: list[Item], source: str, notes: dict[str, None], *, summaries: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reasoning: list[str] = []
    for item in group:
        place = _place(item)
        if place == REASONING:
            content = _text(item.get("content"), source)
            summary = _text(item.get("summary"), source, between="\n\n")
            if summary and not content and not summaries:
                notes[SUMMARY_NOTE] = None
            reasoning.append(content or (summary if summaries else ""))
        elif place == TEXT:
            message["content"] = _content(item.get("content"), source)
        else:
            message.setdefault("tool_calls", []).append(_call(item, source))
    if text := "\n\n".join(filter(None, reasoning)):
        message["reasoning_content"] = text
    return message


def _call(item: Item, source: str) -> dict[str, Any]:
    if not isinstance(item.get("name"), str):
        raise TreepackError(f"{source}: has the item {shown(item)}; expected a call with a name")
    arguments = item.get("arguments")
    if _kind(item) == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
    call_id = item.get("id") if _kind(item) == "mcp_call" else item.get("call_id")
    return {"id": call_id, "type": "function", "function": {"name": item["name"], "arguments": arguments}}


def _given(item: Item, source: str) -> dict[str, Any]:
    """The message of an item that the assistant has not written."""
    if _kind(item) == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"), source)}
    output = item.get("output")
    text = _content(output, source) if isinstance(output, list) or output is None else output
    if not isinstance(text, str | list):
        text = json.dumps(text, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}


def _content(content: Any, source: str) -> str | list[dict[str, Any]]:
    """The text of parts, or the parts that are no text if there are any."""
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    others = [kind for kind in kinds if isinstance(kind, str) and kind not in (*TEXT_PARTS, "refusal")]
    return [{"type": kind} for kind in others] or _text(content, source)


def _text(content: Any, source: str, *, between: str = "") -> str:
    """The text of parts; a refusal is text too."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        text = part.get("refusal") if kind == "refusal" else part.get("text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise TreepackError(f"{source}: has the content part {shown(part)}; expected text parts only")
        texts.append(text)
    return between.join(texts)
