"""Calls of OpenAI's Responses API, logged with their input (forms in `exchanges`), also of batch jobs.

    {"id": "r1", "input": "Hi", "output": [item, ..]}                                       call 1 of "r1"
    {"id": "r2", "input": [item, ..], "output": [..], "previous_response_id": "r1"}         call 2 of "r1"

A call that names its predecessor, or the conversation that it goes on with, is asked with all of it before its own
input; its instructions are its own. Of several calls with one predecessor, all but the first begin a rollout of the
same group, in which what came before is not trained again. Calls that name a session are one rollout as well. Items
are read by `response_items`: reasoning that is known by its summary only is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from treepack.ingest.readers.calls import ChatCall, read_chats
from treepack.ingest.readers.exchanges import Exchange, description, read_exchanges, request_and_response
from treepack.ingest.readers.fields import ReadOptions
from treepack.ingest.readers.format import LINEAGE, MASKS, REWARDS, Format
from treepack.ingest.readers.messages import MEDIA_REASON, is_messages, is_text
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.response_items import Item, ItemMessages, messages_of_items
from treepack.ingest.readers.trajectories import with_notes
from treepack.trajectory import Skipped, Trajectory

Messages = list[dict[str, Any]]


def is_exchange(record: dict[str, Any]) -> bool:
    """Whether `record` is a request with input, a response with output items, or both."""
    request, response = request_and_response(record)
    if "custom_id" in record and not response:
        return "input" in request
    output = response.get("output")
    if not is_messages(output) or not all("type" in item for item in output):
        return False
    return "input" in request or record.get("object") == "response"


@dataclass(slots=True)
class _ResponseRollout:
    """The calls of a rollout so far, and what is said of it; `root` is what it branches off, or itself."""

    root: str
    exchanges: list[Exchange] = field(default_factory=list)
    calls: list[ChatCall] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Said:
    """All messages up to the end of a call, without instructions, and the rollout that they are of."""

    rollout: str
    messages: Messages
    is_continued: bool = False


def read_file(records: Iterator[Record], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of the calls of one file, rollout by rollout in the order of their first calls.

    Raises:
        TreepackError: a record is no call, or items that `response_items` refuses.
    """
    rollouts: dict[str, _ResponseRollout] = {}
    said: dict[str, _Said] = {}  # by the ids of responses and conversations
    items: dict[str, Item] = {}
    for found in read_exchanges(records, asks="input", answers="output"):
        if isinstance(found, Skipped):
            yield found
            continue
        before = _named(found, "previous_response_id")
        if before is not None and before not in said:
            yield Skipped(found.record.source, "response whose previous_response_id is not in the file")
            continue
        given = _resolved(found.request["input"], items)
        if given is None:
            yield Skipped(found.record.source, "response whose input refers to an item that is not in the file")
            continue
        own, output = (_items(found, "input", given), _items(found, "output", found.response["output"]))
        if not is_text([*own.messages, *output.messages]):
            yield Skipped(found.record.source, MEDIA_REASON)
            continue
        conversation = _named(found, "conversation")
        earlier = said.get(before or conversation or "")
        if earlier is None:
            name = root = found.session or found.name
        elif earlier.is_continued:
            name, root = found.name, rollouts[earlier.rollout].root
        else:
            name, root = earlier.rollout, rollouts[earlier.rollout].root
            earlier.is_continued = True
        rollout = rollouts.setdefault(name, _ResponseRollout(root))
        now = _Said(name, _add(rollout, found, own, output, earlier.messages if earlier else []))
        for held in filter(is_messages, (given, found.response["output"])):
            items |= {item["id"]: item for item in held if isinstance(item.get("id"), str)}
        said |= {known: now for known in (found.response.get("id"), conversation) if isinstance(known, str)}
    branched = {rollout.root for name, rollout in rollouts.items() if rollout.root != name}
    for name, rollout in rollouts.items():
        record = description(rollout.exchanges, name)
        if rollout.root in branched:
            record = replace(record, value={"group_id": rollout.root} | record.value)
        yield from with_notes(read_chats(record, rollout.calls, options), tuple(rollout.notes))


def _resolved(given: Any, known: dict[str, Item]) -> Any:
    """`given` with the items that it refers to in their places; None if one of them is not known."""
    if not is_messages(given):
        return given
    items = [known.get(str(item.get("id"))) if item.get("type") == "item_reference" else item for item in given]
    return None if any(item is None for item in items) else items


def _items(exchange: Exchange, name: str, items: Any) -> ItemMessages:
    return messages_of_items(items, source=f"{exchange.record.source}: {name}")


def _add(
    rollout: _ResponseRollout, exchange: Exchange, own: ItemMessages, output: ItemMessages, earlier: Messages
) -> Messages:
    """Add the call of `exchange`, asked with its `own` input; all messages up to its end, without instructions."""
    request, response = exchange.request, exchange.response
    instructions = request.get("instructions") or response.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    prompt = [*earlier, *own.messages]
    tools = request.get("tools") or response.get("tools") or None
    rollout.exchanges.append(exchange)
    rollout.calls.append(ChatCall([*system, *prompt], output.messages, tools))
    rollout.notes |= dict.fromkeys((*own.notes, *output.notes))
    return [*prompt, *output.messages]


def _named(exchange: Exchange, name: str) -> str | None:
    """What the response, or else the request, gives as `name`: an id, or an object that has one."""
    for held in (exchange.response.get(name), exchange.request.get(name)):
        found = held.get("id") if isinstance(held, dict) else held
        if isinstance(found, str):
            return found
    return None


FORMAT = Format(
    name="openai-responses",
    program="OpenAI's Responses API and servers that speak it, OpenAI batch jobs",
    recognised_by="`input` and `output`, a list of items, in one object or as request and response",
    requires=is_exchange,
    checked="none",
    used="""
        id input output instructions tools previous_response_id conversation.id model group_id reward
    """.split(),
    dropped=(
        "the other settings of request and response (sampling, usage)",
        "reasoning.summary, reasoning.encrypted_content",
        "logprobs (without token ids)",
        "hosted tools but mcp_call (named in a note)",
    ),
    keeps={MASKS, REWARDS, LINEAGE},
    read_file=read_file,
)
