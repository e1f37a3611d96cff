"""Reasoning of a turn, in the fields and forms of many APIs, as one text.

"thinking": "A"                                              "A"
"reasoning_details": [{"type": "reasoning.text", "text": "A"}]   "A", also as JSON text
"reasoning_details": [{"type": "reasoning.encrypted", ..}]       none, and the field is named as not used
"content": "<think>A</think> B", "reasoning": "A"            none: the content has it
"""

from __future__ import annotations

import re
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, shown

# Names of the reasoning of a turn in APIs and data sets: text, or parts with text. The first one counts.
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "reasoning_text",
    "thought",
    "thoughts",
    "reasoning_details",
    "thinking_blocks",
    "reasoningText",
    "reasoningContent",
    "thinking_content",
    "think",
    "chain_of_thought",
)
_NAMES = frozenset(REASONING)
# Names of the text in a part of reasoning, and of its summary.
_REASONING_TEXTS = ("text", "thinking", "reasoning", "think", "reasoningText", "content", "summary")
_THOUGHT = re.compile(r"\s*<think(?:ing)?>(.*?)</think(?:ing)?>", re.DOTALL)


def reasoning_of(message: JsonObject, where: str) -> tuple[str | None, frozenset[str]]:
    """Return the reasoning of a turn, and the fields of the message with another reasoning, which is not read.

    Raises:
        TreepackError: a reasoning is neither text nor parts with text.
    """
    if _NAMES.isdisjoint(message):  # most messages
        return None, frozenset()
    texts = {name: _reasoning_text(message[name], name, where) for name in REASONING if not is_empty(message.get(name))}
    texts = {name: text for name, text in texts.items() if text}  # encrypted reasoning has none, and is noted
    # An empty text is a reasoning without words, which templates print; other values without content are none.
    names = [name for name in REASONING if message.get(name) == ""]
    first = next(iter(texts), names[0] if names else None)
    reasoning = None if first is None else texts.get(first, "")
    content = message.get("content")
    if reasoning and reasoning.strip() and isinstance(content, str) and _thought(content) == reasoning.strip():
        reasoning = None  # the content repeats it between its tags
    unread = {name for name in REASONING if not is_empty(message.get(name)) and name not in texts}
    unread |= {name for name, text in texts.items() if text != texts[next(iter(texts))]}
    return reasoning, frozenset(unread)


def _thought(content: str) -> str | None:
    """Return the reasoning between tags at the beginning of a content, or None."""
    match = _THOUGHT.match(content)
    return None if match is None else match.group(1).strip()


def _reasoning_text(value: Any, name: str, where: str) -> str:
    """Return the text of reasoning, which is text or parts: [{"type": "thinking", "thinking": "A"}, ..] -> "A..".

    JSON text of such parts is parsed. Encrypted parts have no text.
    """
    if isinstance(value, str):
        parsed = parsed_json(value)
        parts = parsed if isinstance(parsed, list) else []
        is_parts = bool(parts) and all(isinstance(part, dict) and "type" in part for part in parts)
        return _reasoning_text(parsed, name, where) if is_parts else value
    texts = []
    for part in [value] if isinstance(value, dict) else value if isinstance(value, list) else [None]:
        text = next((part[key] for key in _REASONING_TEXTS if key in part), "") if isinstance(part, dict) else part
        if not isinstance(text, str | list | dict):
            raise TreepackError(f"{where} has the {name} {shown(value)}; expected text")
        texts.append(_reasoning_text(text, name, where))
    return "".join(texts)
