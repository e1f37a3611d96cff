"""OpenAI's fine-tuning data for preferences: a conversation and two answers to it.

    {"input": {"messages": [..], "tools": [..]}, "preferred_output": [message, ..], "non_preferred_output": [..]}

Its data for supervised fine-tuning is `chat`, with a `weight` of 0 or 1 for each message of the assistant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.about import REWARDS, About
from treepack.ingest.readers.fields import ReadOptions
from treepack.ingest.readers.messages import is_messages
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.sft_messages import read_pair
from treepack.trajectory import Skipped, Trajectory

SIDES = ("preferred_output", "non_preferred_output")

ABOUT = About(
    program="OpenAI fine-tuning (preferences)",
    recognised_by="`input.messages`, `preferred_output` and `non_preferred_output`",
    used=("input.messages", "input.tools", *SIDES),
    dropped=("input.parallel_tool_calls",),
    keeps=frozenset({REWARDS}),
)


def matches(record: dict[str, Any]) -> bool:
    """Whether `record` has messages and two answers to them."""
    given = record.get("input")
    return isinstance(given, dict) and all(
        is_messages(part) for part in (given.get("messages"), *(record.get(side) for side in SIDES))
    )


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The two trajectories of a pair.

    Raises:
        TreepackError: the fields are missing or not of the form above.
    """
    value = record.value
    if not matches(value):
        raise TreepackError(f"{record.source}: has no input.messages or not both outputs; expected a pair of answers")
    given = value["input"]
    with_tools = replace(record, value=value | {"tools": given.get("tools") or None})
    chosen, rejected = (value[side] for side in SIDES)
    yield from read_pair(with_tools, given["messages"], chosen, rejected, options, used={"input", *SIDES})
