r"""Thoughts of a model in the text of prompts and messages: the tags around them, and prompts that open one.

prompt                ...<|Assistant|><think>\n              opens a thought: the tail "<think>\n"
content of a message  <think>\nWhy?\n</think>\n\nBecause.    thought "Why?", then "Because."
content of a message  Why?\n</think>\n\nBecause.             the same: the prompt opened it
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# Tags of reasoning models. <thought> and similar tags are ordinary text, which a prompt asks for (MINT).
_TAGS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
}
_OPENINGS = "|".join(map(re.escape, _TAGS))
_OPEN_AT_END = re.compile(rf"({_OPENINGS})\s*\Z")
_EMPTY_THOUGHT = "|".join(rf"{re.escape(start)}\s*{re.escape(end)}" for start, end in _TAGS.items())
_EMPTY = re.compile(_EMPTY_THOUGHT)
_EMPTY_AT_END = re.compile(rf"(?:{_EMPTY_THOUGHT})\s*\Z")


@dataclass(frozen=True, slots=True)
class _InnerThought:
    """The thought inside the content of a message, the text that closes it, and the text after it."""

    text: str
    closing: str
    rest: str


def open_thought(prompt: str) -> str:
    """Return the end of `prompt` that opens a thought, such as "<think>" with its newline; empty if none is open."""
    match = _OPEN_AT_END.search(prompt)
    return match[0] if match else ""


def closes_thought(prompt: str) -> bool:
    """Return True if `prompt` ends with an empty thought, so that the model writes none."""
    return _EMPTY_AT_END.search(prompt) is not None


def closing(opening: str) -> str:
    """Return the text that closes an empty thought after `opening`, as Qwen3's prompt without thinking does."""
    # "<think>\n" -> "\n</think>\n\n", so that the prompt becomes "<think>\n\n</think>\n\n".
    return ("\n" if opening.endswith("\n") else "\n\n") + _TAGS[opening.strip()] + "\n\n"


def without_empty_thought(text: str) -> str:
    """Return `text` without an empty thought at its beginning: `<think></think>Hi` -> `Hi`."""
    match = _EMPTY.match(text)
    return text[match.end() :] if match else text


def inner_thought(content: str) -> _InnerThought | None:
    """Return the thought at the beginning of `content`, whose opening tag may be missing, or None."""
    for start, end in _TAGS.items():
        # The last closing tag: templates cut there, and text before it is thought in any case.
        before, tag, rest = content.rpartition(end)
        stem = before.lstrip()
        # "See <think>x</think> below" is not a thought, but an answer about tags.
        if tag and (stem.startswith(start) or start not in stem):
            text = stem.removeprefix(start)
            inner, answer = text.strip("\n"), rest.lstrip()
            gap = text[len(text.rstrip("\n")) :]
            return _InnerThought(inner, gap + tag + rest[: len(rest) - len(answer)], answer)
    return None


def count_closings(text: str) -> int:
    """Return the number of closing tags in `text`."""
    return sum(text.count(end) for end in _TAGS.values())


def thought_of(message: dict[str, Any]) -> str:
    """Return the recorded thought of a message: its reasoning, or the thought inside its content."""
    if message.get("reasoning_content"):
        return str(message["reasoning_content"])
    inner = inner_thought(message["content"])
    return inner.text if inner else ""
