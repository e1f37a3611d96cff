"""Recognise a field that repeats trained text: a copy of the answer, or the whole rollout as one text.

messages [user "Bolts?", assistant "Seven."]    "Seven."                                   repeats the answer
                                                "### Q: Bolts?\\n### A: Seven."             contains all messages
                                                [{"from": "gpt", "value": "Seven."}, ..]    the same in another form
                                                "Eight."                                   another answer
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treepack.ingest.readers.fields.unread import is_prose
from treepack.trajectory import Chat, PromptCompletion, Tokens

_NAMES = frozenset({"role", "from", "type", "name", "id", "speaker"})  # fields of a message that are not text


def repeats(value: Any, content: Tokens | Chat | PromptCompletion) -> bool:
    """Return whether each text in `value` is a message of `content`, or `value` is one text with all messages."""
    said = [text.strip() for text in _said(content) if text.strip()]
    own = [text.strip() for text in _texts(value) if text.strip()]
    if not said or not own:
        return False
    # By lines, because a template may print the lines of a message in two places: instruction and input of Alpaca.
    whole = "\n".join(own)
    lines = (line.strip() for text in said for line in text.splitlines())
    # {"text": "Guten Tag!"} next to "Translate: Guten Tag!": prose that a message contains is not another answer.
    parts = all(text in said or (is_prose(text) and any(text in each for each in said)) for text in own)
    return parts or all(line in whole for line in lines)


def note_on(name: str) -> str:
    """Return the note on such a field."""
    return f"field '{name}' not used, because it repeats the messages"


def _said(content: Tokens | Chat | PromptCompletion) -> list[str]:
    if isinstance(content, Chat):
        return [str(message.get("content") or "") for message in content.messages]
    return [content.prompt, content.completion] if isinstance(content, PromptCompletion) else []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in _NAMES:
                yield from _texts(each)
