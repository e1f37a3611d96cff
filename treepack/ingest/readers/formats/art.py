"""ART's logs: a group of trajectories a line, or rows of Parquet, one per trajectory.

    {"trajectories": [{"messages_and_choices": [message, choice, ..], "tools": [..], "reward": 1.0, "metrics": {..},
                       "metadata": {..}, "additional_histories": [{"messages_and_choices": [..], "tools": [..]}]}]}
    {"group_index": 0, "reward": 1.0, "tools": "json", "metrics": "json", "messages": [
       {"role": "assistant", "content": "..", "tool_calls": "json", "trainable": true}], ..}

A choice, which has a `message` in it, is what the model wrote; messages are what it was given, the assistant's too.
Where every choice has the token ids of its prompt and its own, these are taken, joined where they continue each other;
else the messages of each history are a conversation. ART's own logs keep no log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.calls import ChatCall, TokenCall, read_calls, read_chats
from treepack.ingest.readers.fields import ReadOptions, as_objects, shown
from treepack.ingest.readers.format import ANY, EVERYTHING, OBJECTS, Format, Kind, each, no
from treepack.ingest.readers.messages import is_messages
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.trajectories import without
from treepack.trajectory import Skipped, Trajectory

PREFIX = "token_id:"  # servers can write a token's id in place of its text
HISTORIES = frozenset({"messages_and_choices", "messages", "tools", "additional_histories"})
DROPPED = HISTORIES | {"metrics", "logs", "exchanges", "group_index", "group_metadata", "group_metrics", "group_logs"}


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of a group, `<record>/<place>` in a group of their own, or those of the one that there is.

    Raises:
        TreepackError: histories of another form, or what the readers of tokens and messages refuse.
    """
    value = record.value
    if isinstance(value.get("trajectories"), list):
        for place, member in enumerate(value["trajectories"]):
            named = {"trajectory_id": f"{record.label}/{place}", "group_id": record.source}
            yield from _read_trajectory(record, member, named, options)
        return
    named = {"trajectory_id": record.label}
    if value.get("group_index") is not None:
        named["group_id"] = f"{record.path}/{value['group_index']}"  # groups are counted anew in every file
    yield from _read_trajectory(record, value, named, options)


def _read_trajectory(
    record: Record, trajectory: dict[str, Any], named: dict[str, Any], options: ReadOptions
) -> Iterator[Trajectory | Skipped]:
    source = record.source
    more = as_objects(
        _parsed(trajectory.get("additional_histories"), source), source=source, name="additional_histories"
    )
    histories = [_history(each, source) for each in (trajectory, *more)]
    rest = without(trajectory, DROPPED)
    rest |= {"metadata": _parsed(rest.get("metadata"), source), "extra": _parsed(trajectory.get("metrics"), source)}
    one = replace(record, value=rest | named)
    choices = [item for items, _ in histories for item in items if "message" in item]
    if not choices:
        yield Skipped(source, "no message that the model wrote")
        return
    calls = [_token_call(choice) for choice in choices]
    if all(call is not None for call in calls):
        yield from read_calls(one, [call for call in calls if call is not None], options)
        return
    yield from read_chats(one, [call for items, tools in histories for call in _chat_calls(items, tools)], options)


def _history(held: dict[str, Any], source: str) -> tuple[list[dict[str, Any]], Any]:
    """The messages and choices of one history, and its tools; messages marked as trainable become choices."""
    if "messages_and_choices" in held:
        items = held["messages_and_choices"]
        return as_objects(items, source=source, name="messages_and_choices"), held.get("tools")
    found = []
    for message in as_objects(held.get("messages"), source=source, name="messages"):
        plain = {name: part for name, part in message.items() if name != "trainable"}
        plain["tool_calls"] = _parsed(plain.get("tool_calls"), source)
        found.append({"message": plain} if message.get("trainable") else plain)
    return found, held.get("tools")


def _chat_calls(items: list[dict[str, Any]], tools: Any) -> Iterator[ChatCall]:
    messages = [item.get("message", item) for item in items]
    for place, item in enumerate(items):
        if "message" in item:
            yield ChatCall(messages[:place], messages[place : place + 1], tools)


def _token_call(choice: dict[str, Any]) -> TokenCall | None:
    """The call of a choice by its token ids; None where it has none."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    entries = content if is_messages(content) else []
    ids = choice.get("token_ids")
    names = [str(entry.get("token")) for entry in entries]
    if ids is None and names and all(name.startswith(PREFIX) and name[len(PREFIX) :].isdecimal() for name in names):
        ids = [int(name[len(PREFIX) :]) for name in names]
    prompt = choice.get("prompt_token_ids")
    if not isinstance(ids, list) or not isinstance(prompt, list):
        return None
    return TokenCall(prompt, ids, {"rollout_log_probs": [entry.get("logprob") for entry in entries]})


def _parsed(held: Any, source: str) -> Any:
    """`held`, which Parquet has as JSON text."""
    if not isinstance(held, str):
        return held
    try:
        return json.loads(held)
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{source}: {shown(held)} is not JSON ({error}); expected what ART writes there") from None


FILLED_LIST = Kind("a list that is not empty", lambda value: isinstance(value, list) and len(value) > 0)
FORMAT = Format(
    name="art",
    program="ART (TrajectoryGroup, trajectory logs)",
    recognised_by="`trajectories` with `messages_and_choices`, or `group_index` beside `messages` that are `trainable` "
    "or not",
    requires=[
        {"trajectories": each({"messages_and_choices": ANY}, minimum=1)},
        {"trajectories": no(FILLED_LIST), "group_index": ANY, "messages": each({"trainable": ANY}, minimum=1)},
        {"trajectories": no(FILLED_LIST), "messages": no(OBJECTS), "messages_and_choices": OBJECTS},
        {"trajectories": no(FILLED_LIST), "group_index": no(ANY), "messages_and_choices": OBJECTS},
    ],
    used="""
        trajectories.messages_and_choices trajectories.messages_and_choices.message trajectories.tools
        trajectories.messages_and_choices.prompt_token_ids trajectories.messages_and_choices.token_ids
        trajectories.messages_and_choices.logprobs trajectories.reward trajectories.additional_histories
        trajectories.metrics trajectories.metadata
    """.split(),
    dropped=(
        "logs, exceptions and exchanges",
        "finish_reason and top_logprobs of a choice",
        "metadata, metrics and logs of a group",
    ),
    keeps=EVERYTHING,
    read=read,
)
