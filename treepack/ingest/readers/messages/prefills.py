"""Prefills: beginnings of answers that a request contained, as one turn with the answers that continue them.

    user, assistant {"content": "{", "prefix": true}, assistant "7}"      DeepSeek, Mistral; Kimi writes `partial`
    {"messages": [user, assistant "{"], "continue_final_message": true}   vLLM, SGLang
    {"model": "claude-..", "messages": [user, assistant "{"]}             Anthropic continues the last answer always

    --mark_prefills, with_prefills-->  user, assistant {"content": "{7}", PREFILL: 1}

The first `PREFILL` characters of the content are not trained. Without such a mark, a model writes a new turn after an
answer, and a note counts this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.values import BadValueError, JsonObject
from treepack.ingest.readers.messages.reasoning import REASONING

Message = JsonObject

NEW_TURN_NOTE = "request that ends with an answer, its response read as a new turn"
_MARKS, _ECHO = ("prefix", "partial"), "echo"
_HOLDERS = ("extra_body", "optional_params", "model_parameters")
_REASON = "prefill in an answer with reasoning"


def is_answer(message: Any) -> bool:
    """Return whether `message` is an answer of the assistant without calls, which a model can continue."""
    return isinstance(message, dict) and message.get("role") == "assistant" and not message.get("tool_calls")


def is_prefill(message: Any) -> bool:
    """Return whether `message` is marked as the beginning of an answer."""
    return is_answer(message) and any(
        endings.is_set(message.get(name)) or message.get(name) == _ECHO for name in _MARKS
    )


def mark_prefills(messages: Sequence[Any], settings: Any = None, *, model: Any = None) -> list[Any]:
    """Return the messages of a request with a mark on each answer that its response or the next message continues.

    `settings` are the request or its settings, and `model` is the name of the model, or of its provider.
    """
    own = settings if isinstance(settings, dict) else {}
    holders = [own, *(own[name] for name in _HOLDERS if isinstance(own.get(name), dict))]
    named = str(model).casefold()
    is_anthropic = "claude" in named or "anthropic" in named
    if not is_anthropic and not any(endings.is_set(each.get("continue_final_message")) for each in holders):
        return list(messages)
    mark = _ECHO if any(endings.is_set(each.get("echo")) for each in holders) else True
    # Anthropic's API joins successive answers anywhere in a request.
    after = [*messages[1:], {"role": "assistant"}]
    return [
        message | {_MARKS[0]: mark}
        if is_answer(message)
        and is_answer(next_one)
        and not message.get(endings.OPEN)
        and (is_anthropic or message is messages[-1])
        else message
        for message, next_one in zip(messages, after, strict=True)
    ]


def with_prefills(messages: Sequence[Any], num_prompt: int = 0) -> tuple[list[Any], int]:
    """Join each marked answer with the answer after it. Return the messages, and how many of them are the prompt.

    Raises:
        BadValueError: reasoning is in one of them, so that the prefill is not the beginning of the turn.
    """
    done: list[Any] = []
    num_joined = 0
    for index, message in enumerate(messages):
        if done and is_prefill(done[-1]) and isinstance(message, dict) and message.get("role") == "assistant":
            done[-1] = _joined(done[-1], message)
            num_joined += index <= num_prompt
        else:
            done.append(message)
    return done, num_prompt - num_joined


def _joined(head: Message, answer: Message) -> Message:
    begun, said = _text(head), _text(answer)
    if begun and any(message.get(name) for message in (head, answer) for name in REASONING):
        raise BadValueError(f"an answer with reasoning continues the prefill {begun[:40]!r}; it is not read", _REASON)
    if head.get(_MARKS[0]) == _ECHO:
        said = said.removeprefix(begun)
    joined = {name: value for name, value in head.items() if name not in (*_MARKS, endings.PREFILL)} | answer
    # A prefill of a prefill: "{" and "7" and "}" -> "{7}" after 2 characters.
    return joined | {"content": begun + said} | ({endings.PREFILL: len(begun)} if begun else {})


def _text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in parts if part)
