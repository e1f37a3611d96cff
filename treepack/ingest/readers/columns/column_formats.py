"""Formats whose records only place fields: each is a line of `--columns`, by which its records are read.

    messages=traj                                                      a conversation
    prompt=input,answer=output                                         text as it was sent to the model, and its answer
    prompt=input.messages,chosen=preferred,rejected=other,tools=input.tools?        a pair of answers

`requires` of the format guarantees the kinds of the values. An ignored field is one that the format lists as dropped.
All other fields describe the rollout by their own names (`rollout_facts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from treepack.ingest.column_map import column_map
from treepack.ingest.readers.calls.conversations import conversation
from treepack.ingest.readers.fields.field_paths import MISSING, value_at
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe
from treepack.ingest.readers.files.records import Record
from treepack.ingest.readers.format import ReadRecord
from treepack.ingest.readers.messages.sft_messages import read_pair
from treepack.trajectory import PromptCompletion, Skipped, Trajectory


def by_columns(line: str, *, notes: tuple[str, ...] = ()) -> ReadRecord:
    """Return the function that reads records by the columns of `line`; each trajectory of text has the `notes`."""
    columns = column_map(line)
    used = {str(path.steps[0]) for paths in (*columns.paths.values(), columns.ignore) for path in paths}
    steps = {key: path.steps for key, (path,) in columns.paths.items()}

    def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
        values = {key: value_at(record.value, each) for key, each in steps.items()}
        found: dict[str, Any] = {key: None if value is MISSING else value for key, value in values.items()}
        if "messages" in found:
            yield conversation(record, found["messages"], options, used=used)
        elif "chosen" in found:
            # `read_pair` reads the tools from the record itself.
            record = replace(record, value=record.value | {"tools": found["tools"] or None})
            yield from read_pair(record, found["prompt"], found["chosen"], found["rejected"], options, used=used)
        elif found["answer"]:
            content = PromptCompletion(found["prompt"], found["answer"])
            yield describe(record, content, used=used, options=options, notes=notes)
        else:
            # An empty answer has no token to train.
            yield Skipped(record.source, "empty response")

    return read
