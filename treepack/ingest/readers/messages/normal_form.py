"""Chat messages in the forms of various logs, converted to the one form that chat templates read.

    {role, content: str | parts | null, tool_calls: flat | nested, function_call, reasoning, ...}
        --normalise_messages-->  {role, content: str, tool_calls: nested, tool_call_id, name, reasoning_content}

Readers call `content_blocks.split_blocks` before, because it changes the number of messages.

Tool-call arguments stay a string or an object, as they are in the log; `template.forms` converts them to the form that
a template prints. A call without an id gets an id of nine letters and digits, because Mistral's templates accept no
other form. Errors count messages from 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.unread import ANSWER, MASK, danger, is_empty
from treepack.ingest.readers.fields.values import BadValueError, JsonObject, quoted, shown
from treepack.ingest.readers.messages.content_blocks import plain_part
from treepack.ingest.readers.messages.reasoning import REASONING, reasoning_of
from treepack.ingest.readers.messages.tool_calls import (
    CALLS,
    checked_name,
    has_calls,
    id_of_last_call,
    normalise_calls,
    note_rest,
)
from treepack.ingest.readers.messages.turn_weights import WEIGHT_FIELDS, as_flag, weight_of
from treepack.trajectory import AnswerBounds, Chat

ROLES = frozenset({"system", "user", "assistant", "tool"})
RENAMED_ROLES = {"developer": "system", "function": "tool", "human": "user", "model": "assistant", "ai": "assistant"}
_KEPT = ("name", "tool_call_id")  # copied as they are
# Fields of a message that are read; every other field becomes a note.
READ = frozenset(
    [
        *_KEPT,
        *REASONING,
        *"role content refusal tool_calls function_call".split(),
        *WEIGHT_FIELDS,
        endings.PREFILL,
        endings.OPEN,
    ]
)
_READ_ALWAYS = READ - {"refusal"}  # a refusal is read only in place of the content
# Fields of parts and calls that have no text.
_OF_PARTS = frozenset({"type", "text"})
# Marks of a turn to be left out, and names of calls that are not read.
_LEFT_OUT = frozenset("skip skipped ignore ignored exclude excluded".split())
_OTHER_CALLS = frozenset(
    "toolCalls tool_call toolCall function_calls functionCall functionCalls calls tool_uses toolUses "
    "tool_invocations toolInvocations".split()
)
_TEXTS = frozenset("text value body said parts".split())  # usual names of a content
_NO_CONTENT = "message without content"
EMPTY_NOTE = "message of role 'assistant' without text, not trained"
_EMPTY = frozenset({EMPTY_NOTE, endings.EMPTY_NOTE})
_OPEN_NOTE = "answer in several turns, because its blocks are not in the order thought, text, calls"
MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, slots=True)
class NormalMessages:
    """Normalised messages, the loss weight of each (0 for every role but assistant), and remarks to be counted.

    `cuts` and `bounds` become `Chat.message_cuts` and `Chat.message_bounds`.
    """

    messages: list[JsonObject]
    weights: list[float]
    notes: tuple[str, ...]
    cuts: list[bool]
    bounds: list[AnswerBounds | None]

    def chat(self, num_prompt: int = 0, tools: Any = None, variables: Any = None) -> Chat:
        """Return the conversation with schemas of tools and variables of the chat template.

        Its first `num_prompt` messages are not trained.
        """
        # num_prompt 2: weights [1, 0, 1] -> [0, 0, 1]
        weights = [0.0] * num_prompt + self.weights[num_prompt:]
        bounds = self.bounds if any(self.bounds) else None
        return Chat(self.messages, weights, tools, variables, message_cuts=self.cuts, message_bounds=bounds)


def has_media(record: JsonObject) -> bool:
    """Return True if `record` has images, videos or sounds in a separate field; messages then have placeholders."""
    # An empty list is not media: exporters write the field for every record of a mixed data set.
    values = (record.get(name) for name in MEDIA)
    # So do tables, with null or with a list as text.
    return any(
        isinstance(value, list | str | dict)
        and len(value) > 0
        and value not in ("[]", "null", "None")
        and not (isinstance(value, list) and all(each is None for each in value))
        for value in values
    )


def normalise_messages(messages: Sequence[Any], *, source: str, before: NormalMessages | None = None) -> NormalMessages:
    """Return the messages of one conversation in normal form; with `before`, the messages of `before` come first.

    Raises:
        TreepackError: a role is unknown, content is not text, or a tool call is malformed; the message names the place.
    """
    done: list[JsonObject] = list(before.messages) if before else []
    weights: list[float] = list(before.weights) if before else []
    cuts: list[bool] = list(before.cuts) if before else []
    bounds = list(before.bounds) if before else []
    # A dict without values is an ordered set: each note once, in the order of the messages.
    notes: dict[str, None] = dict.fromkeys(before.notes if before else ())
    for index, message in enumerate(messages, len(done)):
        where = f"{source}: message {index + 1}"
        if not isinstance(message, dict):
            raise TreepackError(f"{where} is {shown(message)}; expected an object with role and content")
        role = _role(message, where)
        if message["role"] in RENAMED_ROLES and message["role"] != "function":
            notes[f"role '{message['role']}' read as '{role}'"] = None
        content = message.get("content")
        # {"ok": true}, the result of a tool as an object, is not a part of a content
        if role == "tool" and isinstance(content, dict) and not content.keys() & {"type", "text"}:
            content = json.dumps(content, ensure_ascii=False, default=str)
        normal: JsonObject = {"role": role, "content": _content(content, where, notes)}
        reasoning, unread = reasoning_of(message, where)
        used = _READ_ALWAYS - unread if unread else _READ_ALWAYS
        # SWE-agent writes the text of a turn twice, as content and as thought.
        if reasoning and reasoning.strip() == normal["content"].strip():
            reasoning = None
            notes["reasoning not used, because it repeats the content"] = None
        if reasoning is not None:
            normal["reasoning_content"] = reasoning
        others = () if message.get(CALLS[0]) else CALLS[1:]
        named = next((name for name in others if has_calls(message.get(name))), CALLS[0])
        used |= {named}
        if calls := normalise_calls(message, named, index, where, notes):
            if role != "assistant":
                raise TreepackError(f"{where} has role '{role}' and tool calls; only the assistant can call a tool")
            normal["tool_calls"] = calls
        # A refusal is text that the model wrote in place of the content.
        if message.get("content") is None and isinstance(message.get("refusal"), str):
            normal["content"] = message["refusal"]
            used |= {"refusal"}
        is_cut, bound, more = _ending(message, normal) if role == "assistant" else (False, None, ())
        if not is_cut:  # a filter may leave nothing
            _check_content(message, normal, where, notes)
        normal.update({key: checked_name(message[key], key, where) for key in _KEPT if message.get(key) is not None})
        # OpenAI's older form has no ids: a message of role "function" is the result of the call just before it.
        if message["role"] == "function" and "tool_call_id" not in normal and done:
            normal.update(id_of_last_call(done))
        done.append(normal)
        weight, remarks = weight_of(message, where) if role == "assistant" else (0.0, ())
        weights.append(0.0 if _EMPTY & set(more) else weight)
        cuts.append(is_cut)
        bounds.append(bound)
        notes |= dict.fromkeys((*remarks, *more))
        if role != "assistant" and any(message.get(name) is True for name in ("loss", "trainable", "train")):
            notes[f"role '{role}' marked as trained, not trained"] = None
        unused = [key for key, value in message.items() if key not in used and not is_empty(value)]
        if role == "assistant":
            unused = [key for key in unused if not _is_ending(key, message[key])]
        for key in unused:
            if danger(key, message[key]) == MASK or (key in _LEFT_OUT and message[key] is True):
                is_flag = as_flag(message[key]) is not None
                obey = f"add --columns mask={key} if it chooses the trained turns, or " if is_flag else ""
                raise TreepackError(
                    f"{where} has the field '{key}', which can be a mask and is not read; {obey}leave it out with "
                    f"--columns ignore={key}"
                )
        if role == "assistant":
            _refuse_parts(message, normal, unused, where)
        notes.update({f"message field '{key}' not used": None for key in unused})
    return NormalMessages(done, weights, tuple(notes), cuts, bounds)


def _refuse_parts(message: JsonObject, normal: JsonObject, unused: list[str], where: str) -> None:
    """Refuse an answer with a text or calls in fields that are not read: it would be trained in part."""
    for key in unused:
        value, key_of_columns = message[key], "calls" if key in _OTHER_CALLS else "content"
        parts = value if isinstance(value, list) else [value]
        said = [each.strip() for each in parts if isinstance(each, str)]
        is_text = bool(said) and danger(key, value) == ANSWER and not _repeats(said, normal)
        if is_text or (key in _OTHER_CALLS and not normal.get("tool_calls")):
            raise TreepackError(
                f"{where} has the field '{key}' beside its content; it may be a part of the answer, so say what it is "
                f"with --columns {key_of_columns}={key}, or leave it out with --columns ignore=messages[].{key}"
            )


def _repeats(texts: list[str], normal: JsonObject) -> bool:
    """Return whether the content of a message contains `texts`, or one of them contains the content."""
    content = normal["content"].strip()
    return all(text in content for text in texts) or bool(content and any(content in text for text in texts))


def _is_ending(key: str, value: Any) -> bool:
    kind = endings.kind_of(key)
    return kind in (endings.REASON, endings.FLAG, endings.STOP) or (
        kind == endings.STATE and endings.is_cut_state(value)
    )


def _ending(message: JsonObject, normal: JsonObject) -> tuple[bool, AnswerBounds | None, tuple[str, ...]]:
    """Return whether the answer `message` was cut, its other bounds, and notes; `normal` is its normal form."""
    ending, notes, stop = endings.ending_of(message)
    is_open = bool(message.get(endings.OPEN))
    bounds = AnswerBounds(message.get(endings.PREFILL, 0), stop if ending == endings.STOPPED else None, is_open)
    if is_open:
        notes = (*notes, _OPEN_NOTE)
    said = normal | {"content": normal["content"][bounds.prefill :]}
    if not endings.has_text(said):
        notes = (*notes, EMPTY_NOTE if ending == endings.ENDED else endings.EMPTY_NOTE)
    return ending in (endings.CUT, endings.FILTERED), bounds if bounds != AnswerBounds() else None, notes


def _check_content(message: JsonObject, normal: JsonObject, where: str, notes: dict[str, None]) -> None:
    """Refuse a message without content that nothing explains; note an empty result.

    Raises:
        BadValueError: the content is missing, or null in a turn without reasoning and calls.
        TreepackError: another field may have the text.
    """
    if normal["content"] or (normal["role"] == "assistant" and normal.keys() & {"tool_calls", "reasoning_content"}):
        return
    texts = [key for key, value in message.items() if key not in READ and isinstance(value, str | list) and value]
    if message.get("content") is None and (texts or "content" not in message or normal["role"] == "assistant"):
        if texts:
            raise TreepackError(
                f"{where} has no content, but {', '.join(texts[:3])}; name the field of the text with "
                f"--columns content={next((key for key in texts if key in _TEXTS), 'FIELD')}"
            )
        raise BadValueError(f"{where} has no content; expected text, or the calls of a turn", _NO_CONTENT)
    # The result of a tool may be empty.
    if normal["role"] == "tool" or message.get("content") is None:
        notes[f"message of role '{normal['role']}' without text"] = None


def _role(message: JsonObject, where: str) -> str:
    role = message.get("role")
    if role is None:
        raise TreepackError(f"{where} has no role; expected system, user, assistant or tool")
    role = RENAMED_ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise TreepackError(f"{where} has role {quoted(role)}; expected system, user, assistant or tool")
    return role


def _content(content: Any, where: str, notes: dict[str, None]) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    # One part in place of a list of parts means the same.
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        raise TreepackError(f"{where} has the content {shown(content)}; expected text or a list of text parts")
    return "".join(_part(part, where, notes) for part in parts)


def _part(part: Any, where: str, notes: dict[str, None]) -> str:
    if isinstance(part, str):
        return plain_part(part, where)
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])  # the model wrote it in place of the content
    if kind != "text" or not isinstance(part.get("text"), str):
        raise TreepackError(f"{where} has a content part of type {quoted(kind)}; expected text parts only")
    note_rest(part, _OF_PARTS, "content part", notes)
    return str(part["text"])
