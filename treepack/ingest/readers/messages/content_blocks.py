"""Anthropic's content blocks to messages in OpenAI's form.

    assistant [thinking, text, tool_use, tool_use]  ->  assistant {reasoning_content, content, tool_calls: 2}
    user [tool_result, tool_result, text]           ->  tool, tool, user
    assistant [text, tool_use, tool_result, text]   ->  assistant {content, tool_calls}, tool, assistant
    assistant [thinking, text, thinking, text]      ->  assistant {.., OPEN}, assistant: two turns of one answer

Blocks keep their order: text before a result becomes a user message before the tool message. A message without such
blocks stays as it is. Encrypted reasoning becomes the field `redacted_thinking`, and the mark of a failed call becomes
`is_error`: `normalise_messages` does not read these fields, so it counts them. The text of the error is in the result.

A block that is not text, such as an image, stays in the content, even if it was in a result. `skip_reason` finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, object_or_empty, shown
from treepack.ingest.readers.messages.prefills import with_prefills
from treepack.ingest.readers.messages.reasoning import REASONING

_THINKING = frozenset("thinking redacted_thinking reasoning reasoning_content reasoningContent thought think".split())
# Fields of such a block that contain its text.
_THOUGHTS = ("thinking", "text", "reasoning", "think", "reasoningText", "content", "summary")
_BLOCKS = _THINKING | {"tool_use", "tool_result"}
_CALLS = frozenset({"tool_calls", "function_call"})
# Fields of the block of a result, and other names of its text.
_OF_RESULTS = frozenset("type role tool_use_id id content is_error cache_control".split())
_RESULT_TEXTS = ("text", "output", "result", "value")
MEDIA_REASON = "images, audio and video are not read"
# Content parts with an image, sound or video, in the forms of several APIs.
MEDIA_PARTS = frozenset(
    "image image_url input_image image_file input_audio audio audio_url video video_url input_video".split()
)
_NAMES_OF_PARTS = frozenset({"type", "text", "functionCall", "functionResponse"})

Message = JsonObject


def split_blocks(messages: Sequence[Any], *, between: str = "\n\n") -> list[Any]:
    """Return `messages` with Anthropic's blocks as fields and messages of OpenAI's form; the rest stays as it is.

    Thoughts of one message are joined with `between`, and marked prefills with their answers (`prefills`).
    """
    # [user, assistant [tool_use], user [tool_result, text]] -> [user, assistant, tool, user]
    split = [part for each in messages for part in (_split(each, between) if _has_blocks(each) else [each])]
    return with_prefills(split)[0]


def plain_content(parts: list[Any]) -> str | list[Any]:
    """Return the text of a content that consists of text only; the parts of any other."""
    is_text = all(
        isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text" for part in parts
    )
    return (
        "".join(part["text"] for part in parts)
        if is_text and all(isinstance(part["text"], str) for part in parts)
        else parts
    )


def skip_reason(messages: Sequence[Message]) -> str | None:
    """Return the reason why text cannot represent `messages`: a part of a different type; None if it can.

    A part without a type counts as text here, because `normalise_messages` refuses it with a message.
    """
    contents = [message.get("content") for message in split_blocks(messages)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    kinds = dict.fromkeys(
        part["type"] for part in parts if isinstance(part.get("type"), str) and part["type"] not in ("text", "refusal")
    )
    # A conversation with an image and a document is skipped because of the image, whichever comes first.
    if any(kind in MEDIA_PARTS for kind in kinds):
        return MEDIA_REASON
    return f"content parts of type '{next(iter(kinds))[:40]}' are not read" if kinds else None


def plain_part(text: str, where: str) -> str:
    """Return `text`, a content part that is not an object.

    Raises:
        TreepackError: it is such an object as JSON text.
    """
    if object_or_empty(parsed_json(text)).keys() & _NAMES_OF_PARTS:
        raise TreepackError(f"{where} has the content part {shown(text)}; expected text, or an object in place of JSON")
    return text


def _has_blocks(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(_kind(part) in _BLOCKS for part in content)


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _split(message: Message, between: str) -> Iterator[Message]:
    rest: list[Any] = []
    for part in [*message["content"], None]:
        if part is not None and _kind(part) != "tool_result":
            rest.append(part)
            continue
        if rest and message.get("role") == "assistant":
            yield from _turns(message, rest, between)
        elif rest:
            yield message | {"content": rest}
        if part is not None:
            yield _result(part)
            # The calls beside the content are before the first result, and only there.
            message = {name: value for name, value in message.items() if not rest or name not in _CALLS}
            rest = []


def _turns(message: Message, parts: list[Any], between: str) -> Iterator[Message]:
    """Yield `parts` of the assistant as turns: a thought after a text or a call, or a text after a call, begins one."""
    # thought text call | thought text -> two turns; the model wrote them as one, so the first has no end token.
    turns: list[list[Any]] = [[]]
    for part in parts:
        if turns[-1] and _rank(part) < max(map(_rank, turns[-1])):
            turns.append([])
        turns[-1].append(part)
    for number, own in enumerate(turns):
        fields = message if number == 0 else {name: message[name] for name in message if name not in REASONING}
        if number < len(turns) - 1:
            ended = endings.without_fields(fields)
            fields = {name: ended[name] for name in ended if name not in _CALLS} | {endings.OPEN: True}
        yield _assistant(fields, own, between)


def _rank(part: Any) -> int:
    kind = _kind(part)
    return 2 if kind == "tool_use" else 0 if kind in _THINKING else 1


def _assistant(message: Message, parts: list[Any], between: str) -> Message:
    texts = [text for part in parts if _kind(part) in _THINKING and (text := _thought(part))]
    calls = [
        {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}
        for part in parts
        if _kind(part) == "tool_use"
    ]
    split = message | {"content": plain_content([part for part in parts if _kind(part) not in _BLOCKS])}
    # `normalise_messages` refuses a list with anything else than text.
    wrong = [part["thinking"] for part in parts if _kind(part) == "thinking" and not _is_thought(part.get("thinking"))]
    if texts or wrong:
        split["reasoning_content"] = wrong or between.join(texts)
    if calls:
        split["tool_calls"] = [*(message.get("tool_calls") or []), *calls]
    # The API may return a signature only, in place of the text of the reasoning.
    if any(_kind(part) in _THINKING and not _thought(part) for part in parts):
        split["redacted_thinking"] = True
    return split


def _is_thought(value: Any) -> bool:
    """Return whether the value of a block of reasoning may contain text."""
    return value is None or isinstance(value, str | list | dict)


def _thought(part: Any) -> str:
    """Return the text of a block of reasoning, or of a list of such blocks; empty if it is encrypted."""
    if isinstance(part, list):
        return "\n\n".join(filter(None, map(_thought, part)))
    if isinstance(part, dict):
        return _thought(next((part[name] for name in _THOUGHTS if part.get(name)), ""))
    return part if isinstance(part, str) else ""


def _result(part: JsonObject) -> Message:
    """Return the result in a block; a text under another name than content is its text, or is refused later."""
    rest = {name: value for name, value in part.items() if name not in _OF_RESULTS}
    content = part.get("content")
    if is_empty(content):
        content = rest.pop(next((name for name in _RESULT_TEXTS if not is_empty(rest.get(name))), ""), content)
    result = rest | {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content}
    return result | ({"is_error": True} if part.get("is_error") else {})
