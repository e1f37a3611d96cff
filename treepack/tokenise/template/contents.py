r"""Check that the trained text of a turn has everything that the model wrote: its text, its calls, one end.

    message   {"content": "Look:", "tool_calls": [f(city="Bonn"), g()]}
    answer    Look:\n<tool_call>{"name": "f", "arguments": {"city": "Bonn"}}</tool_call>...       right
    answer    <tool_call>...</tool_call>                                                          "Look:" is left out

Whitespace is ignored, because templates strip it and print lines of their own. Values of calls may be printed as JSON,
as text, or in the quotes of a different language.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

from treepack.tokenise.template.reasoning_tags import inner_thought, thought_of
from treepack.tokenise.template.rendering import ANOTHER_TEMPLATE, Message, UnfaithfulError

_TEXT_MISSING = "the chat template leaves out the text of a turn"
_CALLS_MISSING = "the chat template leaves out tool calls of a turn"
_ENDS_EARLY = "the chat template ends a turn before its last text"
_THOUGHT_NOTE = "reasoning left out, because the chat template does not print it"


def check_answer(message: Message, answer: str, *, end: str, source: str) -> tuple[str, ...]:
    """Check that `answer`, the trained text of a turn, contains the text and the calls of `message`; return notes.

    Args:
        message: the turn as the reader returned it, with content of text.
        answer: the trained text.
        end: the token that ends a sequence, which may be printed only at the end, or "".
        source: the place that errors name.

    Raises:
        UnfaithfulError: text or calls are left out, or the template ends the turn in its middle.
    """
    printed = _squeeze(answer)
    content = str(message.get("content") or "")
    inner = inner_thought(content)
    if not _has_text(printed, inner.rest if inner else content):
        raise UnfaithfulError(f"{source}: {_TEXT_MISSING}; {ANOTHER_TEMPLATE}", _TEXT_MISSING)
    calls = message.get("tool_calls") or []
    if not _has_calls(answer, calls):
        raise UnfaithfulError(f"{source}: {_CALLS_MISSING}; {ANOTHER_TEMPLATE}", _CALLS_MISSING)
    if end and _ends_early(answer, end, [content, thought_of(message), json.dumps(calls, ensure_ascii=False)]):
        raise UnfaithfulError(f"{source}: {_ENDS_EARLY}; {ANOTHER_TEMPLATE}", _ENDS_EARLY)
    return () if _has_text(printed, thought_of(message)) else (_THOUGHT_NOTE,)


def _has_text(printed: str, text: str) -> bool:
    return any(_squeeze(form) in printed for form in text_forms(text))


def _has_calls(answer: str, calls: list[dict[str, Any]]) -> bool:
    """Return True if the name of each of `calls` is in `answer`, in order, and all its arguments after its name."""
    index = 0
    for call in calls:
        # A name is not a part of a longer one: "get" is not in "functions.get_user".
        forms = "|".join(re.escape(form) for form in dict.fromkeys(text_forms(call["function"]["name"])))
        match = re.compile(rf"(?<!\w)(?:{forms})(?!\w)").search(answer, index)
        if match is None:
            return False
        index = match.end()
        rest = _squeeze(answer[index:])
        arguments = call["function"]["arguments"]
        if not _has_text(rest, arguments if isinstance(arguments, str) else json.dumps(arguments)) and not all(
            _has_text(rest, value) for value in _values(arguments)
        ):
            return False
    return True


def _values(arguments: Any) -> Iterator[str]:
    """Yield the keys and values of `arguments` as text: {"a": [1, {"b": "c"}]} -> a, 1, b, c."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            yield arguments
            return
        yield from _leaves(parsed)
    else:
        yield from _leaves(arguments)


def _leaves(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            yield from map(str, each)
            stack.extend(each.values())
        elif isinstance(each, list):
            stack.extend(each)
        elif each is None or isinstance(each, bool):
            pass  # null, None, true and True: templates write them in their own way
        else:
            yield str(each)


def text_forms(text: str) -> Iterator[str]:
    """Yield the forms in which templates print `text`: as it is, in JSON, in single quotes, in HTML."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    yield html.escape(text)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _ends_early(answer: str, end: str, texts: list[str]) -> bool:
    """Return True if the template prints `end` before the last text; a model may write it inside its own `texts`."""
    # "f()<end>g()<end>": two, of which the last one is the end.
    inside = answer.rstrip().removesuffix(end).count(end)
    return inside > sum(text.count(end) for text in texts)
