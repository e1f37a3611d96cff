"""Rows that TRL packed for supervised training: several sequences one behind the other, with their lengths.

    {"input_ids": [..], "seq_lengths": [3, 2], "labels": [..]}        or `completion_mask`, `assistant_masks`

Each sequence is a trajectory. TRL may have cut long ones, and the pieces of one are in no way marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treepack.ingest.readers.fields import ReadOptions
from treepack.ingest.readers.format import ARRAY, MASKS, TOKEN_IDS, Format
from treepack.ingest.readers.packed import lengths_of, read_packed
from treepack.ingest.readers.records import Record
from treepack.trajectory import Skipped, Trajectory


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """One trajectory per sequence of the row.

    Raises:
        TreepackError: lengths that are not those of the row, or what the `tokens` reader refuses.
    """
    value = record.value
    num_tokens = len(value["input_ids"])
    lengths = lengths_of(value["seq_lengths"], name="seq_lengths", num_tokens=num_tokens, source=record.source)
    rest = {name: held for name, held in value.items() if name != "seq_lengths"}
    yield from read_packed(replace(record, value=rest), lengths, options)


FORMAT = Format(
    name="trl-packed",
    program="TRL (SFTTrainer with packing)",
    recognised_by="`input_ids` and `seq_lengths`",
    requires=[{"input_ids": ARRAY, "seq_lengths": ARRAY}],
    used="input_ids seq_lengths labels completion_mask assistant_masks".split(),
    keeps={TOKEN_IDS, MASKS},
    read=read,
)
