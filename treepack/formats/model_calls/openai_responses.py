"""Calls of OpenAI's Responses API, logged with their input (forms in `exchanges`), also by batch jobs.

    {"id": "r1", "input": "Hi", "output": [item, ..]}                                       call 1 of "r1"
    {"id": "r2", "input": [item, ..], "output": [..], "previous_response_id": "r1"}         call 2 of "r1"

If a call names its predecessor, or the conversation that it continues, all messages up to there are its prompt, before
its own input; its instructions are not inherited. If several calls have one predecessor, the second and later ones
start new rollouts in the same group, which do not train the earlier messages again. Calls that name one session are one
rollout too. `response_items` reads the items; reasoning with a summary only is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from treepack.calls.apis.exchanges import ApiExchange, description, read_exchanges, request_and_response
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    as_id,
    as_text,
    endings,
    is_messages,
    messages_of_items,
    read_chats,
    skip_reason,
    temperature_of,
    with_notes,
)
from treepack.ingest.readers.fields.unread import below
from treepack.ingest.readers.messages.response_items import Item, ItemMessages

_Messages = list[JsonObject]


def _is_responses_exchange(record: JsonObject) -> bool:
    """Return whether `record` is a request with input, a response with output items, or both."""
    request, response = request_and_response(record)
    # A line of a batch's input has no response yet.
    if "custom_id" in record and not response:
        return "input" in request
    output = response.get("output")
    if not is_messages(output) or not all("type" in item for item in output):
        return False
    return "input" in request or record.get("object") == "response"


@dataclass(slots=True)
class _ResponseRollout:
    """The calls of a rollout so far and the notes on it. `root` is the rollout that it branches off, or itself."""

    root: str
    exchanges: list[ApiExchange] = field(default_factory=list)
    calls: list[ChatCall] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _CallTranscript:
    """All messages up to the end of a call, without instructions, and the name of their rollout."""

    rollout: str
    messages: _Messages
    is_continued: bool = False


def _read_openai_responses(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the calls of one file, rollout by rollout in the order of their first calls.

    Raises:
        TreepackError: a record is not a call, or an error of `response_items`.
    """
    rollouts: dict[str, _ResponseRollout] = {}
    transcripts: dict[str, _CallTranscript] = {}  # by the ids of responses and conversations
    items: dict[str, Item] = {}
    for exchange in read_exchanges(records, asks="input", answers="output"):
        if isinstance(exchange, Skipped):
            yield exchange
            continue
        # A response whose predecessor is unknown has an unknown prompt.
        before = _identifier(exchange, "previous_response_id")
        if before is not None and before not in transcripts:
            yield Skipped(exchange.record.source, "response whose previous_response_id is not in the file")
            continue
        input_items = _resolve(exchange.request["input"], items)
        if input_items is None:
            yield Skipped(exchange.record.source, "response whose input refers to an item that is not in the file")
            continue
        question = _items(exchange, "input", input_items)
        output = _items(exchange, "output", exchange.response["output"])
        if (reason := skip_reason([*question.messages, *output.messages])) is not None:
            yield Skipped(exchange.record.source, reason)
            continue
        conversation = _identifier(exchange, "conversation")
        earlier = transcripts.get(before or conversation or "")
        if earlier is None:
            name = root = exchange.session or exchange.name
        elif earlier.is_continued:
            # r1 <- r2 <- r3 is the rollout "r1"; a second continuation r1 <- r4 starts the rollout "r4" with root "r1".
            name, root = exchange.name, rollouts[earlier.rollout].root
        else:
            name, root = earlier.rollout, rollouts[earlier.rollout].root
            earlier.is_continued = True
        rollout = rollouts.setdefault(name, _ResponseRollout(root))
        now = _CallTranscript(name, _add(rollout, exchange, question, output, earlier.messages if earlier else []))
        # A later input may refer to any item of this call by its id.
        for item_list in filter(is_messages, (input_items, exchange.response["output"])):
            items |= {item["id"]: item for item in item_list if isinstance(item.get("id"), str)}
        transcripts |= {known: now for known in (exchange.response.get("id"), conversation) if isinstance(known, str)}
    # Only a rollout with branches needs a group; a single one keeps the group of its record.
    branched = {rollout.root for name, rollout in rollouts.items() if rollout.root != name}
    for name, rollout in rollouts.items():
        record = description(rollout.exchanges, name)
        if rollout.root in branched:
            record = replace(record, value={"group_id": rollout.root} | record.value)
        yield from with_notes(read_chats(record, rollout.calls, options), tuple(rollout.notes))


def _resolve(items: Any, known: dict[str, Item]) -> Any:
    """Return `items` with the items that they refer to in their places; None if one of these is not known."""
    if not is_messages(items):
        return items
    resolved = [known.get(str(item.get("id"))) if item.get("type") == "item_reference" else item for item in items]
    return None if any(item is None for item in resolved) else resolved


def _items(exchange: ApiExchange, name: str, items: Any) -> ItemMessages:
    return messages_of_items(items, source=f"{exchange.record.source}: {name}")


def _add(
    rollout: _ResponseRollout, exchange: ApiExchange, question: ItemMessages, output: ItemMessages, earlier: _Messages
) -> _Messages:
    """Add the call of `exchange` to `rollout`, and return all messages up to its end, without instructions.

    `question` are the messages of its input, and `earlier` the messages of the calls that it continues.
    """
    request, response = exchange.request, exchange.response
    instructions = request.get("instructions") or response.get("instructions")
    instructions = as_text(instructions, source=exchange.record.source, name="instructions", default="")
    system = [{"role": "system", "content": instructions}] if instructions else []
    prompt = [*earlier, *question.messages]
    # The response repeats the tools of its request, which a log may lack.
    tools = request.get("tools") or response.get("tools") or None
    rollout.exchanges.append(exchange)
    temperature = temperature_of(request if request.get("temperature") is not None else response)
    ending = endings.raw_of_response(response)
    about: JsonObject = {"temperature": temperature, "ending": ending, "name": response.get("id")}
    rollout.calls.append(ChatCall([*system, *prompt], output.messages, tools, **about))
    rollout.notes |= dict.fromkeys((*question.notes, *output.notes))
    return [*prompt, *output.messages]


def _identifier(exchange: ApiExchange, name: str) -> str | None:
    """Return the field `name` of the response, or of the request: an id, or an object that has one."""
    for part in (exchange.response.get(name), exchange.request.get(name)):
        identifier = part.get("id") if isinstance(part, dict) else part
        if identifier is not None:
            return str(as_id(identifier, source=exchange.record.source, name=name))
    return None


_USED = """
    id input instructions tools temperature previous_response_id conversation.id model group_id reward
    output.type output.role output.content output.name output.arguments output.call_id output.summary
    output.id output.status status
""".split()
FORMAT = Format(
    name="openai-responses",
    rank=550,
    program="OpenAI's Responses API and servers that speak it, OpenAI batch jobs",
    recognised_by="`input` and `output`, a list of items, in one object or as request and response",
    requires=_is_responses_exchange,
    checked="none",
    used=_USED,
    # In one object, or as request and response, which a batch has in a body.
    also=below(("request", "response", "request.body", "response.body", "body"), [*_USED, "output.input"]),
    dropped="""
        the other settings of request and response (usage);
        reasoning.summary, reasoning.encrypted_content;
        logprobs (without token ids);
        hosted tools but mcp_call (named in a note)
    """,
    keeps="masks, rewards, lineage",
    links="id conversation.id previous_response_id session_id",
    read_file=_read_openai_responses,
)
