"""Traces that Harbor exports: data sets of terminal agents with one row per call; each row has all messages.

    {"conversations": [{"role": "user", "content": ".."}, .., {"role": "assistant", "content": ".."}],
     "task": "hello-world", "trial_name": "hello-world__a1", "episode": "episode-2", "result": "1.0",
     "agent": "terminus-2", "model": "..", "tool_definitions": [..], ..}

The rows of a trial are its calls, in order. The last message of a row is the response of its call, and calls that
continue each other are joined. If only the last call of a trial was exported, every answer in it is trained. Rows of
sub-agents have a `trace_source` other than "main". They are parts of the rollout of their trial, and have its reward.
Tool calls are text in the messages, and so are the tools if the export embedded them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from treepack.calls.rollout_names import within
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcome,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    TreepackError,
    as_text,
    endings,
    quoted,
    read_chats,
    without,
)

_FIRST = "episode-0"
_MAIN = "main"
_POSITION = re.compile(r"(:\d+|\[\d+\])$")  # of a row in its file
_TOOLS_MARK = "<tools>"  # the first message starts with it if the export embedded the tools
# Fields that are read under another name, or that `FORMAT.dropped` lists.
_KNOWN = frozenset(
    """
    conversations conversations_sharegpt task trial_name episode result tool_definitions trace_source run_id date
    model_provider instruction verifier_output
    """.split()
)


def _read_harbor_traces(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of each trial, `<trial>` or `<trial>/<trace_source>`, in the group of its task.

    Raises:
        TreepackError: the name of a trial is not text, or the rows of a trial are not together.
    """
    # groupby joins neighbours only: a name that appears again would silently become a second rollout.
    seen: set[str] = set()
    rewards: dict[str, list[float | None]] = {}  # of the agents of each trial so far
    for name, together in groupby(records, _agent):
        rows = list(together)
        if name in seen:
            where = rows[0].source
            raise TreepackError(f"{where}: rows of the trial {quoted(name)} are apart; sort them by trial_name")
        seen.add(name)
        items = list(_read_agent(name, rows, options))
        if rows[0].value.get("trace_source") is None:
            yield from items
            continue
        # Rows of the sub-agents of a trial may be anywhere in the file, so each agent is a part of the trial.
        trial = _trial(rows[0])
        known = rewards.setdefault(trial, [])
        for item in items:
            yield _in_trial(item, trial, len(known), known[0] if known else None)
        known += [item.reward for item in items[:1] if isinstance(item, Trajectory)]


def _in_trial(item: Outcome, trial: str, number: int, reward: float | None) -> Outcome:
    """Return `item` of agent `number` as a part of the rollout `trial`, with the `reward` of agents before it."""
    part = within(item, trial, number)
    if not isinstance(part, Trajectory):
        return part
    # "runs/rows.jsonl:17" -> "runs/rows.jsonl", "runs/rows.parquet[3]" -> "runs/rows.parquet"
    return replace(part, reward=part.reward if number == 0 else reward, source=_POSITION.sub("", part.source))


def _trial(record: Record) -> str:
    return as_text(record.value["trial_name"], source=record.source, name="trial_name")


def _agent(record: Record) -> str:
    name, origin = _trial(record), record.value.get("trace_source")
    return name if origin in (None, _MAIN) else f"{name}/{origin}"


def _read_agent(name: str, rows: list[Record], options: ReadOptions) -> Outcomes:
    last = rows[-1]
    value = last.value
    talks = [row.value["conversations"] for row in rows]
    # An export of last calls has one row, of a later episode, per trial; its earlier answers are in no other row.
    if len(rows) == 1 and value["episode"] != _FIRST and value.get("trace_source") in (None, _MAIN):
        calls = [_call(value, end) for end, message in enumerate(talks[0], 1) if message.get("role") == "assistant"]
    else:
        calls = [_call(row.value, len(talk)) for row, talk in zip(rows, talks, strict=True) if talk]
    if not calls:
        yield Skipped(rows[0].source, "no message that the model wrote")
        return
    # The error that ended the trial; of all limits only this one cuts an answer, the others come between two answers.
    calls[-1] = replace(calls[-1], ending=result if endings.is_cut(result := value.get("result")) else None)
    # Only the last row has the result of the trial.
    facts = {
        **without(value, _KNOWN),
        "trajectory_id": name,
        "group_id": value["task"],
        **_result(value.get("result")),
    }
    yield from read_chats(replace(rows[0], value=facts), calls, options)


def _call(row: JsonObject, end: int) -> ChatCall:
    """Return the call that wrote the message before `end`."""
    messages = row["conversations"][:end]
    # Tools in the first message and in `tools` would appear twice in the prompt.
    embedded = any(str(message.get("content")).startswith(_TOOLS_MARK) for message in messages[:1])
    return ChatCall(messages[:-1], messages[-1:], None if embedded else row.get("tool_definitions") or None)


def _result(result: Any) -> JsonObject:
    """Return the reward, or the name of the error that ended the trial."""
    # "1.0" -> reward 1.0, "AgentTimeoutError" -> error "AgentTimeoutError"
    try:
        return {"reward": float(result)}
    except (TypeError, ValueError):
        return {} if result is None else {"error": result}


FORMAT = Format(
    name="harbor-traces",
    rank=210,
    program="Harbor (exported traces)",
    recognised_by="`conversations` beside `task`, `trial_name` and `episode`",
    requires="conversations:objects, task, trial_name, episode",
    used="""
        conversations.role conversations.content task trial_name episode result tool_definitions trace_source
        agent model
    """,
    dropped="""
        run_id, date and model_provider;
        instruction and verifier_output;
        conversations_sharegpt (the same)
    """,
    keeps="masks, rewards, lineage",
    failed="error",
    read_file=_read_harbor_traces,
)
