"""Logs of ART: one group of trajectories per line, or one trajectory per row of Parquet.

    {"trajectories": [{"messages_and_choices": [message, choice, ..], "tools": [..], "reward": 1.0, "metrics": {..},
                       "metadata": {..}, "additional_histories": [{"messages_and_choices": [..], "tools": [..]}]}]}
    {"group_index": 0, "reward": 1.0, "tools": "json", "metrics": "json", "messages": [
       {"role": "assistant", "content": "..", "tool_calls": "json", "trainable": true}], ..}

A choice contains a `message`, which the model wrote. A plain message is a part of the prompt, even if its role is
assistant. If every choice has the token ids of its prompt and of its response, these ids are read, and calls that
continue each other are joined. If not, the messages of each history are one conversation. The logs that ART writes
itself contain no log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from treepack.calls.served_tokens import token_call
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    TreepackError,
    as_objects,
    endings,
    objects_at,
    read_calls,
    read_chats,
    shown,
    without,
)

_HISTORIES = frozenset({"messages_and_choices", "messages", "tools", "additional_histories"})
# Fields of a group, and fields that are read under another name.
_DROPPED = _HISTORIES | {"metrics", "logs", "exchanges", "group_index", "group_metadata", "group_metrics", "group_logs"}


def _read_art(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of a group, `<record>/<index>`, which form one group; or the single trajectory of `record`.

    Raises:
        TreepackError: histories of a different form, or an error of the readers of tokens and messages.
    """
    value = record.value
    if isinstance(value.get("trajectories"), list):
        for index, member in enumerate(value["trajectories"]):
            named = {"trajectory_id": f"{record.label}/{index}", "group_id": record.source}
            yield from _read_trajectory(record, member, named, options)
        return
    # A row of a log has no id.
    named = {"trajectory_id": record.label}
    if value.get("group_index") is not None:
        named["group_id"] = f"{record.path}/{value['group_index']}"  # group_index starts at 0 in every file
    yield from _read_trajectory(record, value, named, options)


def _read_trajectory(record: Record, trajectory: JsonObject, named: JsonObject, options: ReadOptions) -> Outcomes:
    source = record.source
    more = as_objects(
        _parse(trajectory.get("additional_histories"), source), source=source, name="additional_histories"
    )
    histories = [_history(each, source) for each in (trajectory, *more)]
    rest = without(trajectory, _DROPPED)
    # The fields of `extra` become metadata.
    rest |= {"metadata": _parse(rest.get("metadata"), source), "extra": _parse(trajectory.get("metrics"), source)}
    one = replace(record, value=rest | named)
    choices = [item for items, _ in histories for item in items if "message" in item]
    if not choices:
        yield Skipped(source, "no message that the model wrote")
        return
    # Ids of some choices only would mix two tokenisations in one trajectory, so then all are read as text.
    calls = [_token_call(choice, source) for choice in choices]
    if all(call is not None for call in calls):
        yield from read_calls(one, [call for call in calls if call is not None], options)
        return
    yield from read_chats(one, [call for items, tools in histories for call in _chat_calls(items, tools)], options)


def _history(history: JsonObject, source: str) -> tuple[list[JsonObject], Any]:
    """Return the messages and choices of one history, and its tools. Messages marked as trainable become choices."""
    if "messages_and_choices" in history:
        items = history["messages_and_choices"]
        return as_objects(items, source=source, name="messages_and_choices"), history.get("tools")
    converted = []
    for message in objects_at(history, "messages", source):
        plain = {name: part for name, part in message.items() if name != "trainable"}
        plain["tool_calls"] = _parse(plain.get("tool_calls"), source)
        converted.append({"message": plain} if message.get("trainable") else plain)
    return converted, history.get("tools")


def _chat_calls(items: list[JsonObject], tools: Any) -> Iterator[ChatCall]:
    messages = [item.get("message", item) for item in items]
    # [user, choice, user, choice] -> calls with 1 and 3 messages of prompt
    for index, item in enumerate(items):
        if "message" in item:
            yield ChatCall(messages[:index], messages[index : index + 1], tools, ending=endings.raw_of(item))


def _token_call(choice: JsonObject, source: str) -> TokenCall | None:
    """Return the call of a choice by its token ids, or None if it has none."""
    for name in ("token_ids", "prompt_token_ids"):
        if choice.get(name) is not None and not isinstance(choice[name], list):
            raise TreepackError(f"{source}: {name} is {shown(choice[name])}; expected a list of token ids")
    return token_call({}, choice)


def _parse(value: Any, source: str) -> Any:
    """Parse a value that Parquet stores as JSON text; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise TreepackError(
            f"{source}: {shown(value)} is not JSON ({error}); expected a list or an object as JSON text"
        ) from None


# Rows of ART's Parquet logs have `group_index` and `messages`; single trajectories have neither.
FORMAT = Format(
    name="art",
    rank=460,
    program="ART (TrajectoryGroup, trajectory logs)",
    recognised_by="`trajectories` with `messages_and_choices`, or `group_index` beside `messages` that are `trainable` "
    "or not",
    requires="""
        trajectories:filled(messages_and_choices);
        trajectories:!filled_list, group_index, messages:filled(trainable);
        trajectories:!filled_list, messages:!objects, messages_and_choices:objects;
        trajectories:!filled_list, group_index:!, messages_and_choices:objects
    """,
    used="""
        trajectories.messages_and_choices trajectories.messages_and_choices.message trajectories.tools
        trajectories.messages_and_choices.prompt_token_ids trajectories.messages_and_choices.token_ids
        trajectories.reward trajectories.metrics trajectories.metadata
        trajectories.messages_and_choices.logprobs.content.token
        trajectories.messages_and_choices.logprobs.content.logprob
        trajectories.additional_histories=trajectories messages.* metadata metrics.* tools.*
    """,
    dropped="""
        logs, exceptions and exchanges;
        top_logprobs of a choice;
        metadata, metrics and logs of a group
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    read=_read_art,
)
