"""Names and groups of the trajectories that one rollout has become."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

from treepack.files.input_files.records import Record
from treepack.trajectory import (
    MAX_INSIDE,
    Outcome,
    Outcomes,
    PromptCompletion,
    Skipped,
    Tokens,
    Trajectory,
    derived_group,
    prompt_messages,
    prompt_tokens,
)

SPLIT_NOTE = "split where the prompt of a call does not continue the calls before it"
EMPTY_NOTE = "call without a response not used"
MAX_AGENTS = 1_000_000  # sub-agents of a session that get different numbers


def with_rollout_names(
    record: Record, items: Sequence[Outcome], calls: Sequence[tuple[int, ...]], *, num_calls: int
) -> Outcomes:
    """Yield `items`, each named after its first call if there are several; each note of the rollout occurs once."""
    if not items:
        yield Skipped(record.source, "no call with a response")
        return
    general: tuple[str, ...] = () if len(items) == 1 else (SPLIT_NOTE,)
    if sum(map(len, calls)) < num_calls:
        general += (EMPTY_NOTE,)
    group = _group(items)
    seen: set[str] = set()
    for item, numbers in zip(items, calls, strict=True):
        if isinstance(item, Skipped):
            yield item
            continue
        if len(items) > 1:
            item = in_rollout(item, numbers[0])
        notes = tuple(note for note in item.notes + general if note not in seen)
        seen.update(notes)
        yield replace(item, group_id=item.group_id or group, notes=notes)


def within(item: Outcome, rollout: str, number: int) -> Outcome:
    """Return `item` as a part of conversation `number`, from 0, of several of a `rollout`."""
    if isinstance(item, Skipped):
        return item
    return replace(item, rollout_id=rollout, rollout_part=number * MAX_INSIDE + (item.rollout_part or 0))


def of_agent(item: Outcome, rollout: str, agent: str) -> Outcome:
    """Return `item` as a part of the conversation of the sub-agent `agent` in the session `rollout`."""
    # The number only has to differ from the numbers of other sub-agents; the session itself is 0.
    return within(item, rollout, 1 + zlib.crc32(agent.encode()) % MAX_AGENTS)


def in_rollout(item: Trajectory, first_call: int) -> Trajectory:
    """Return `item`, named after its rollout, as the trajectory of this rollout that begins with call `first_call`."""
    name = item.trajectory_id
    return replace(item, trajectory_id=f"{name}/turn-{first_call + 1}", rollout_id=name, rollout_part=first_call)


def _group(items: Sequence[Outcome]) -> str | None:
    """Return the group for the trajectories of a rollout without a group: it is derived from the first prompt."""
    # One trajectory gets its group later, from the tokenised prompt; several must share one, although prompts differ.
    first = next((item for item in items if isinstance(item, Trajectory)), None)
    return None if len(items) == 1 or first is None else group_of_first(first)


def group_of_first(item: Trajectory) -> str | None:
    """Return the group for a rollout of several trajectories without one, by the prompt of its first, `item`."""
    content = item.content
    if isinstance(content, PromptCompletion):
        return None
    return derived_group(
        prompt_tokens(content) if isinstance(content, Tokens) else prompt_messages(content, content.tools)
    )
