"""The text that verl's trainer writes beside its metrics: `<step>.jsonl` of `rollout_data_dir`.

    {"input": "..", "output": "..", "gts": "42", "score": 1.0, "step": 5, "acc": true}

Both texts were decoded from ids without their special tokens, so ends of turns are lost and neither the ids nor the
text that the model saw can be made again; in an agent's output what tools wrote cannot be told from what the model
wrote. Where exact ids were kept, give those instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.about import REWARDS, About
from treepack.ingest.readers.fields import ReadOptions, describe
from treepack.ingest.readers.records import Record
from treepack.trajectory import Skipped, Text, Trajectory

DECODED_NOTE = "text of verl's dump, decoded without special tokens"

ABOUT = About(
    program="verl (rollout_data_dir, validation_data_dir)",
    recognised_by="`input` and `output` as text beside `score` and `step`",
    used=("input", "output", "gts", "score", "step"),
    keeps=frozenset({REWARDS}),
)


def matches(record: dict[str, Any]) -> bool:
    """Whether `record` is a line of verl's dump."""
    texts = isinstance(record.get("input"), str) and isinstance(record.get("output"), str)
    return texts and "score" in record and "step" in record


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The one trajectory of `record`: all of its output is trained."""
    value = record.value
    if not matches(value):
        raise TreepackError(f"{record.source}: has no input, output, score or step; expected a line of verl's dump")
    if not value["output"]:
        yield Skipped(record.source, "empty response")
        return
    content = Text(value["input"], value["output"])
    yield describe(record, content, used={"input", "output"}, options=options, notes=(DECODED_NOTE,))
