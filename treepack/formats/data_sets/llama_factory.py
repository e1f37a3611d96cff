"""Records of LLaMA-Factory since version 1: messages of typed parts, each message with a weight.

    {"messages": [{"role": "assistant", "content": [{"type": "text", "value": "4"}], "loss_weight": 1.0}], "tools": ..}
    {"chosen_messages": [..], "rejected_messages": [..]}      a pair; the messages that differ are trained

Parts of type `reasoning` and `tool_call` (JSON text) belong to the turn that contains them. Older data sets of
LLaMA-Factory are in the formats `alpaca` and `sharegpt`.
"""

from __future__ import annotations

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    TreepackError,
    is_messages,
    shown,
    without,
)
from treepack.ingest.readers.messages.sft_messages import Message, calls_of_text, read_conversation, read_whole_pair

_PAIR = ("chosen_messages", "rejected_messages")


def _read_llama_factory(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one conversation of `record`, or the two of a pair.

    Raises:
        TreepackError: a message whose content is not made of parts, or a call that is not JSON.
    """
    value, source = record.value, record.source
    if all(value.get(name) is not None for name in _PAIR):
        chosen, rejected = (_messages(value[name], f"{source}: {name}") for name in _PAIR)
        yield from read_whole_pair(record, chosen, rejected, options, used=_PAIR)
        return
    yield read_conversation(record, _messages(value["messages"], source), options, used={"messages"})


def _messages(messages: list[JsonObject], source: str) -> list[Message]:
    """Return `messages` with their parts under the names of chat."""
    done = []
    for number, message in enumerate(messages, 1):
        where = f"{source}: message {number}"
        parts = message.get("content")
        if not is_messages(parts):
            raise TreepackError(f"{where} has the content {shown(parts)}; expected parts with type and value")
        # `normalise_messages` reads the marks among the other fields, such as `loss_weight`.
        chat: Message = without(message, ("role", "content")) | {"role": message.get("role"), "content": []}
        # [reasoning "a", text "b", tool_call '{..}'] -> reasoning_content "a", content ["b"], tool_calls [{..}]
        for part in parts:
            kind, value = part.get("type"), part.get("value")
            if kind == "tool_call":
                chat.setdefault("tool_calls", []).extend(calls_of_text(value, where=where))
            elif kind == "reasoning" and isinstance(value, str):
                chat["reasoning_content"] = chat.get("reasoning_content", "") + value
            else:
                chat["content"].append({"type": kind, "text": value})
        done.append(chat)
    return done


# The first message decides: plain chat has text there, or parts with `text` in place of `value`.
FORMAT = Format(
    name="llama-factory",
    rank=320,
    program="LLaMA-Factory (version 1)",
    recognised_by="`messages`, or `chosen_messages` and `rejected_messages`, whose content is parts with a `value`",
    requires="""
        chosen_messages:first(content:first(type, value)), rejected_messages:first(content:first(type,
            value));
        chosen_messages|rejected_messages:!set, messages:first(content:first(type, value))
    """,
    used="""
        messages.content.value messages.loss_weight tools chosen_messages rejected_messages messages.role
        messages.content.type
    """,
    dropped="parts that are not text (records that have some are skipped)",
    keeps="masks, rewards",
    read=_read_llama_factory,
)
