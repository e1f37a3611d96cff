"""Conversations of OpenHands: events in the output of a benchmark, in a trajectory file, or one file per event.

    {"instance_id": "task-7", "instruction": "..", "history": [event, ..], "report": {"resolved": true}, ..}
    [event, ..]                                  a trajectory file, also as JSONL
    <conversation>/events/event-00000-<id>.json  one event each, read together with the first of them

Before version 1, an event is an action or an observation (`openhands_actions`); since then it has a `kind`
(`openhands_events`). The prompt of a response of the model is the view of the events before it (`event_views`). If the
output of a benchmark has no message of the user at its start, `instruction` is that message. A missing system prompt is
counted by a note. A conversation from 2024, whose actions do not contain the responses of the model, is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from treepack.calls.event_views import EventView
from treepack.formats.agents.openhands.openhands_actions import add_action_event
from treepack.formats.agents.openhands.openhands_events import add_events
from treepack.formats.kit import (
    STDIN,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    as_text,
    folder_and_document,
    object_or_empty,
    objects_at,
    read_document,
    temperature_of,
)

Event = JsonObject
_EVENT_FILE = re.compile(r"event-(\d+)-.*\.json")
_SYSTEM_NOTE = "system prompt is not in the file"
NO_CALL = "conversation without a response of the model"
# An event before version 1, and one since then. Actions that start a conversation have no result yet.


def _read_openhands(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read each record with a `history` as a conversation, and all other records of the file as the events of one.

    Raises:
        TreepackError: an event or message of a different kind.
    """
    events: list[Event] = []
    last = None
    for record in records:
        if "history" in record.value:
            history = objects_at(record.value, "history", record.source)
            yield from _read(record, history, options)
        else:
            events.append(record.value)
            last = record
    if last is None:
        return
    others = _event_files(last)
    if others and Path(last.path) != others[0]:
        yield Skipped(last.source, f"read with {others[0].name[:11]}", is_rollout=False)
        return
    if others:
        events = [read_document(path) for path in others]
    folder, stem = folder_and_document(last)
    # <conversation>/events/event-00000-<id>.json and <folder>/<conversation>.json
    name = Path(last.path).parent.parent.name if others else f"{folder}/{stem}" if folder else stem
    yield from _read(replace(last, source=last.path, value={"trajectory_id": name}), events, options)


def _event_files(record: Record) -> list[Path]:
    """Return the files of a conversation with one file per event, in their order; empty if `record` is not in one."""
    path = Path(record.path)
    if record.path == STDIN or _EVENT_FILE.fullmatch(path.name) is None:
        return []
    # "event-00010-x.json" -> 10
    matches = [match for each in path.parent.iterdir() if (match := _EVENT_FILE.fullmatch(each.name)) is not None]
    return [path.parent / match[0] for match in sorted(matches, key=lambda match: (int(match[1]), match[0]))]


def _read(record: Record, events: Sequence[Event], options: ReadOptions) -> Outcomes:
    view = EventView()
    before = list(takewhile(lambda event: not _is_response(event), events))
    if not any(event.get("action") == "system" or event.get("kind") == "SystemPromptEvent" for event in before):
        view.log.note(_SYSTEM_NOTE)
    description = _description(record)
    group, instruction = description.get("group_id"), record.value.get("instruction")
    instruction = as_text(instruction, source=record.source, name="instruction", default="")
    if instruction and not any(event.get("source") == "user" for event in before):
        view.add(None, {"role": "user", "content": instruction})
    actions = [event for event in events if event.get("kind") == "ActionEvent"]
    for action in actions:
        objects_at(action, "thought", record.source)
    if not all(isinstance(name := action.get("llm_response_id"), str) and name for action in actions):
        yield Skipped(record.source, "llm_response_id of an action is not text", group_id=group)
        return
    for event in events:
        place = event.get("summary_offset", object_or_empty(event.get("args")).get("summary_offset"))
        if isinstance(place, bool) or not isinstance(place, int | None):
            yield Skipped(record.source, "summary_offset is not a number", group_id=group)
            return
    if any("kind" in event for event in events):
        add_events(view, events, record.source)
    else:
        for event in events:
            if (reason := add_action_event(view, event)) is not None:
                yield Skipped(record.source, reason, group_id=group)
                return
    if view.log.calls:
        yield from view.log.read(replace(record, value=description), options, context=())
    else:
        yield Skipped(record.source, view.log.fault or NO_CALL, group_id=group)


def _is_response(event: Event) -> bool:
    is_system = event.get("action") == "system" or event.get("kind") == "SystemPromptEvent"
    return event.get("source") == "agent" and not is_system


def _description(record: Record) -> JsonObject:
    value = record.value
    if "history" not in value:
        return value
    folder, stem = folder_and_document(record)
    metadata, instance = object_or_empty(value.get("metadata")), value.get("instance_id")
    model = object_or_empty(metadata.get("llm_config") or metadata.get("llm"))
    return {
        "trajectory_id": "/".join(part for part in (folder, stem, str(instance or record.label)) if part),
        "group_id": None if instance is None else str(instance),
        "reward": _reward(value),
        "model": model.get("model"),
        "temperature": temperature_of(model),
        "error": value.get("error") if isinstance(value.get("error"), str) else None,
    }


def _reward(value: JsonObject) -> float | None:
    """Return 1 or 0 if an evaluation contains `resolved`, else the share of points; None without an evaluation."""
    result = object_or_empty(value.get("test_result"))
    for report in (value, value.get("report"), result, result.get("report")):
        if isinstance(resolved := object_or_empty(report).get("resolved"), bool):
            return float(resolved)
    score = object_or_empty(result.get("final_score"))
    total, points = score.get("total"), score.get("result")
    is_score = isinstance(total, int | float) and isinstance(points, int | float) and total > 0
    return points / total if is_score else None  # type: ignore[operator]


FORMAT = Format(
    name="openhands",
    rank=180,
    program="OpenHands",
    recognised_by="`history` with events, or events: `action` or `observation` with `source`, or `kind` with `source`",
    requires="""
        history:first(action:text, source:text; observation:text, source:text; kind:text, source:text,
            timestamp:text);
        action:text, source:text;
        observation:text, source:text;
        kind:text, source:text, timestamp:text
    """,
    checked="first",
    used="""
        history instance_id instruction report.resolved test_result.final_score metadata.llm_config.model
        metadata.llm_config.temperature history.id history.action history.args history.source
        history.observation history.content history.extras history.tool_call_metadata kind llm_message thought
        reasoning_content tool_call llm_response_id tool_call_id system_prompt tools forgotten_event_ids
        summary metadata.llm.model history.kind history.llm_message observation.kind observation.content
    """,
    dropped="""
        git_patch, metrics, instance;
        message, timestamp, cause, llm_metrics;
        history.action of the SDK (repeats tool_call)
    """,
    keeps="masks, rewards",
    links="kind id",
    failed="error",
    needs_folder=True,
    read_file=_read_openhands,
)
