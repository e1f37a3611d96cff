"""Fine-tuning data of OpenAI for preferences: a conversation and two answers to it.

    {"input": {"messages": [..], "tools": [..]}, "preferred_output": [message, ..], "non_preferred_output": [..]}

OpenAI's data for supervised fine-tuning is in the format `chat`, with a `weight` of 0 or 1 for each assistant message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.files.records import Record
from treepack.ingest.readers.format import REWARDS, Format
from treepack.ingest.readers.kinds import OBJECTS
from treepack.ingest.readers.messages.sft_messages import read_pair
from treepack.trajectory import Skipped, Trajectory

SIDES = ("preferred_output", "non_preferred_output")


def read_openai_preference(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the two trajectories of a pair.

    Raises:
        TreepackError: messages or tools of a different form.
    """
    value = record.value
    prompt = value["input"]
    # `read_pair` reads the tools from the record itself.
    with_tools = replace(record, value=value | {"tools": prompt.get("tools") or None})
    # The common prompt is not trained; each output is.
    chosen, rejected = (value[side] for side in SIDES)
    yield from read_pair(with_tools, prompt["messages"], chosen, rejected, options, used={"input", *SIDES})


FORMAT = Format(
    name="openai-preference",
    rank=330,
    program="OpenAI fine-tuning (preferences)",
    recognised_by="`input.messages`, `preferred_output` and `non_preferred_output`",
    requires=[{"input.messages": OBJECTS, "preferred_output": OBJECTS, "non_preferred_output": OBJECTS}],
    used="input.messages input.tools preferred_output non_preferred_output".split(),
    dropped=("input.parallel_tool_calls",),
    keeps={REWARDS},
    read=read_openai_preference,
)
