"""Records of ms-swift that are more than chat: pairs, the roles of agents, and rounds of query and response.

    {"messages": [..., assistant], "rejected_response": "..."}    a pair; or rejected_messages, a whole conversation
    {"messages": [...], "label": true}                            the label is the reward of the last answer
    {"query": "3 + 3?", "response": "6", "history": [["2 + 2?", "4"]], "system": "Be brief."}
    {"conversation": [{"human": "2 + 2?", "assistant": "4"}], "system": "Be brief."}

A message of role `tool_call` contains a call as JSON text. Consecutive calls, and assistant messages before them, are
one turn. A rejected response replaces all messages after the last message of the user. Of a pair, the messages that
differ are trained, and the messages that both sides begin with are not.
"""

from __future__ import annotations

from typing import Any

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    endings,
    is_messages,
    shown,
)
from treepack.ingest.readers.messages.sft_messages import calls_of_text, read_conversation, read_whole_pair, rounds
from treepack.ingest.readers.messages.turn_weights import WEIGHT_FIELDS

# Roles that ms-swift adds to chat.
_CALL, _RESULTS = "tool_call", ("tool_response", "tool")
# Fields that become messages; without `messages`, also the others. `label` is the reward, which `sft_messages` reads.
_USED = frozenset({"messages", "rejected_response", "rejected_messages", "system"})
_ROUNDS = frozenset({"query", "response", "history", "conversation"})


def _read_ms_swift(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one conversation of `record`, or the two of a pair.

    Raises:
        TreepackError: a rejected response without a chosen one, or text and calls of a different form.
    """
    value, source = record.value, record.source
    messages = _messages(value, source)
    used = _USED if is_messages(value.get("messages")) else _USED | _ROUNDS
    rejected = _rejected_side(value, messages, source)
    sides = [messages] if rejected is None else [messages, rejected]
    sides_in_turns = [done for side in sides if (done := _merge_turns(side, source)) is not None]
    if len(sides_in_turns) < len(sides):
        yield Skipped(source, "turn in parts of different weights")
    elif rejected is None:
        yield read_conversation(record, sides_in_turns[0], options, used=used)
    else:
        yield from read_whole_pair(record, sides_in_turns[0], sides_in_turns[1], options, used=used)


def _messages(value: JsonObject, source: str) -> list[JsonObject]:
    system, history = value.get("system"), value.get("history")
    if is_messages(value.get("messages")):
        return _with_system(system, value["messages"])
    if isinstance(value.get("query"), str):
        return rounds(system, history, value["query"], value["response"], source=source)
    pairs = [[turn.get("human"), turn.get("assistant")] for turn in value["conversation"]]
    *earlier, last = pairs
    if not all(isinstance(text, str) for text in last):
        raise TreepackError(f"{source}: conversation ends with {shown(last)}; expected human and assistant as text")
    return rounds(system, earlier, *last, source=source)


def _with_system(system: Any, messages: list[JsonObject]) -> list[JsonObject]:
    """Return a copy of `messages`, with the text of the field `system` as the first if they have no system message."""
    has_system = not messages or messages[0].get("role") == "system"
    return [*([] if has_system or not system else [{"role": "system", "content": system}]), *messages]


def _rejected_side(value: JsonObject, messages: list[JsonObject], source: str) -> list[JsonObject] | None:
    """Return the rejected conversation: the whole one, or the prompt with the rejected response."""
    if (whole := value.get("rejected_messages")) is not None:
        if not is_messages(whole):
            raise TreepackError(f"{source}: rejected_messages is {shown(whole)}; expected a list of messages")
        return _with_system(value.get("system"), whole)
    if (answer := value.get("rejected_response")) is None:
        return None
    answers = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not is_messages(answers):
        raise TreepackError(f"{source}: rejected_response is {shown(answer)}; expected text or a list of messages")
    # roles [user, assistant, user, assistant] -> 2, so the rejected side keeps 3 messages
    last_user = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    if last_user == len(messages) - 1:
        raise TreepackError(
            f"{source}: has a rejected_response but no chosen one; end messages with a message of the assistant"
        )
    return [*messages[: last_user + 1], *answers]


def _merge_turns(messages: list[JsonObject], source: str) -> list[JsonObject] | None:
    """Return `messages` with one message for each turn, and with the results of tools under the role `tool`.

    None if the parts of a turn have different weights; of consecutive calls, the weight of the first is used.
    """
    # roles [user, assistant, tool_call, tool_call, tool_response] -> [user, assistant with 2 calls, tool]
    done: list[JsonObject] = []
    before = None
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if role == _CALL:
            calls = calls_of_text(message.get("content"), where=f"{source}: message {number}")
            part: JsonObject = {"role": "assistant", "content": "", "tool_calls": calls}
            part |= _marks(message) | {name: message[name] for name in message if endings.kind_of(name)}
        else:
            part = message | {"role": "tool"} if role in _RESULTS else message
        last = done[-1] if done and part.get("role") == done[-1].get("role") == "assistant" else None
        if last is None:
            done.append(part)
        # Parts of one turn become one message, which has one weight.
        elif not role == _CALL == before and _marks(last) != _marks(part):
            return None
        else:
            # "I look. " and "" with a call -> "I look. " with this call
            texts = [each.get("content") or "" for each in (last, part)]
            if not all(isinstance(text, str) for text in texts):
                raise TreepackError(
                    f"{source}: message {number} continues a turn, but its content is a list; expected text"
                )
            calls = [*(last.get("tool_calls") or []), *(part.get("tool_calls") or [])]
            ended = {name: part[name] for name in part if endings.kind_of(name)}
            done[-1] = last | {"content": "".join(texts)} | ({"tool_calls": calls} if calls else {}) | ended
        before = role
    return done


def _marks(message: JsonObject) -> JsonObject:
    return {name: message[name] for name in WEIGHT_FIELDS if message.get(name) is not None}


FORMAT = Format(
    name="ms-swift",
    rank=310,
    program="ms-swift",
    recognised_by="`messages` with `rejected_response`, `rejected_messages`, a `label` that is true or false, or the "
    "role `tool_call`; "
    "`query` and `response`; or `conversation` of `human` and `assistant`",
    requires="""
        messages:filled, rejected_response|rejected_messages:set;
        messages:filled, label|kto_tag:flag;
        messages:some(role:=tool_call|tool_response);
        messages:!filled, query:text, response:text;
        messages:!filled, conversation:first(human, assistant)
    """,
    used="""
        messages.loss messages.loss_scale tools rejected_response rejected_messages label kto_tag query response
        history system conversation.human conversation.assistant messages!
    """,
    dropped="images, videos, audios (records that have some are skipped)",
    keeps="masks, rewards",
    read=_read_ms_swift,
)
