"""Rows that TRL packed for supervised training: several consecutive sequences, with their lengths.

    {"input_ids": [..], "seq_lengths": [3, 2], "labels": [..]}        or `completion_mask`, `assistant_masks`

Each sequence is a trajectory. TRL may have cut long sequences, and does not mark the cuts.
"""

from __future__ import annotations

from dataclasses import replace

from treepack.formats.kit import Format, Outcomes, ReadOptions, Record, without
from treepack.ingest.readers.tokens.packed_rows import lengths_of, read_packed


def _read_trl_packed(record: Record, options: ReadOptions) -> Outcomes:
    """Read one trajectory per sequence of the row.

    Raises:
        TreepackError: lengths that do not fit the row, or an error of the `tokens` reader.
    """
    value = record.value
    # input_ids [5, 6, 7, 8, 9] and seq_lengths [3, 2] -> 5 6 7 and 8 9
    num_tokens = len(value["input_ids"])
    lengths = lengths_of(value["seq_lengths"], name="seq_lengths", num_tokens=num_tokens, source=record.source)
    rest = without(value, {"seq_lengths"})
    yield from read_packed(replace(record, value=rest), lengths, options)


FORMAT = Format(
    name="trl-packed",
    rank=360,
    program="TRL (SFTTrainer with packing)",
    recognised_by="`input_ids` and `seq_lengths`",
    requires="input_ids:array, seq_lengths:array",
    used="input_ids seq_lengths labels completion_mask assistant_masks",
    keeps="token ids, masks",
    read=_read_trl_packed,
)
