"""Calls of Anthropic's Messages API, logged as requests and responses (forms in `exchanges`).

    {"request": {"model": "..", "system": "..", "messages": [..], "tools": [{"name", "description", "input_schema"}]},
     "response": {"id": "msg_1", "type": "message", "role": "assistant", "content": [block, ..], "stop_reason": ".."}}

Calls of one session that continue each other are joined. `content_blocks` splits the blocks. Lines of a message batch
have no requests, so they are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treepack.calls.apis.exchanges import ApiExchange, description, read_exchanges
from treepack.formats.kit import (
    ChatCall,
    Format,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    endings,
    mark_prefills,
    read_chats,
    skip_reason,
    temperature_of,
)
from treepack.ingest.readers.messages.content_blocks import split_blocks

# A response, in a separate field or, as some proxies log it, in the "body" of that field.


def _read_anthropic_messages(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the calls of one file. Calls without a session come first, sessions at the end.

    Raises:
        TreepackError: a record is not a call, or an error of `calls`.
    """
    sessions: dict[str, list[ApiExchange]] = {}
    for exchange in read_exchanges(records, asks="messages", answers="content"):
        if isinstance(exchange, Skipped):
            yield exchange
        elif (reason := _skip_reason(exchange)) is not None:
            yield Skipped(exchange.record.source, reason)
        else:
            sessions.setdefault(exchange.session or exchange.record.source, []).append(exchange)
    for exchanges in sessions.values():
        name = exchanges[0].session or exchanges[0].name
        yield from read_chats(description(exchanges, name), [_call(each) for each in exchanges], options)


def _skip_reason(exchange: ApiExchange) -> str | None:
    call = _call(exchange)
    messages = [*call.prompt, *call.response]
    return skip_reason([message for message in messages if isinstance(message, dict)])


def _call(exchange: ApiExchange) -> ChatCall:
    request = exchange.request
    system: list[Any] = [{"role": "system", "content": request["system"]}] if request.get("system") else []
    messages = request["messages"] if isinstance(request["messages"], list) else [request["messages"]]
    response = [{"role": "assistant", "content": exchange.response["content"]}]
    tools = request.get("tools") or None
    ending = endings.raw_of(exchange.response)
    prompt = [*system, *mark_prefills(split_blocks(messages), request, model="claude")]
    heat, name = temperature_of(request), exchange.response.get("id")
    return ChatCall(prompt, response, tools, temperature=heat, ending=ending, name=name)


FORMAT = Format(
    name="anthropic-messages",
    rank=560,
    program="Anthropic's Messages API, its clients and proxies",
    recognised_by="`request.messages` and a `response` of `type` message with `content`",
    requires="""
        request:object, request.messages:objects,
            response.type:=message, response.role:=assistant, response.content:objects;
        request.body.messages:objects,
            response.body.type:=message, response.body.role:=assistant, response.body.content:objects
    """,
    checked="none",
    used="""
        request.system request.messages request.tools request.temperature response.content
        response.stop_reason response.id response.model
        session_id group_id reward
    """,
    also=("response.stop_sequence",),
    dropped="""
        the other settings of request and response (usage);
        encrypted reasoning (a note counts it)
    """,
    keeps="rewards, lineage",
    read_file=_read_anthropic_messages,
)
