"""Batches of prime-rl for supervised training: consecutive sequences in one list, with shifted targets.

    {"input_ids": [5, 6, 8], "target_ids": [6, 7, 9], "loss_mask": [false, true, true], "position_ids": [0, 1, 0],
     "seq_lens": [2, 1]}                                                                    =>  5 6 7      8 9

A target is trained if the mask at its position is true. A sequence is its inputs and its last target. Padding after
the last sequence, where the positions start again, is removed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np

from treepack.formats.kit import (
    MEDIA_REASON,
    Format,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    mask_values,
    read_tokens,
    without,
)
from treepack.ingest.readers.tokens.packed_rows import lengths_of, num_padding
from treepack.trajectory import as_token_ids

# Fields that become sequences, and media, which are skipped.
_DROPPED = frozenset("input_ids target_ids loss_mask position_ids seq_lens mm_kwargs mm_token_type_ids".split())


def _read_prime_rl_sft(record: Record, options: ReadOptions) -> Outcomes:
    """Read one trajectory per sequence, `<record>/sequence-<k>` from 1.

    Raises:
        TreepackError: targets that are not the inputs shifted by one, or an error of the `tokens` reader.
    """
    value, source = record.value, record.source
    if value.get("mm_kwargs"):
        yield Skipped(source, MEDIA_REASON)
        return
    ids, targets = (as_token_ids(value[name], source=source, name=name) for name in ("input_ids", "target_ids"))
    mask = mask_values(value["loss_mask"], source=source, name="loss_mask").astype(np.float64)
    if not len(ids) == len(targets) == len(mask):
        raise TreepackError(
            f"{source}: has {len(ids)} input_ids, {len(targets)} target_ids and {len(mask)} values of loss_mask; "
            "expected as many of each"
        )
    sizes = value.get("seq_lens")
    lengths = lengths_of([len(ids)] if sizes is None else sizes, name="seq_lens", num_tokens=len(ids), source=source)
    # lengths [2, 1] -> ends [2, 3]
    ends = list(accumulate(lengths))
    padding = num_padding(value.get("position_ids"), lengths, source=source)
    rest = without(value, _DROPPED)
    for number, (stop, size) in enumerate(zip(ends, lengths, strict=True), 1):
        start, end = stop - size, stop - (padding if number == len(lengths) else 0)
        # An empty sequence, or padding only.
        if start == end:
            continue
        if not np.array_equal(targets[start : end - 1], ids[start + 1 : end]):
            raise TreepackError(
                f"{source}: target_ids of sequence {number} are not its input_ids one place later; "
                "expected the input_ids shifted by one"
            )
        # inputs [5, 6] and targets [6, 7] -> ids [5, 6, 7]; mask [0, 1] -> [0, 0, 1], because no target is token 5
        fields = {
            "trajectory_id": f"{record.label}/sequence-{number}",
            "input_ids": np.append(ids[start:end], targets[end - 1]),
            "loss_mask": np.append(0.0, mask[start:end]),
        }
        yield from read_tokens(replace(record, value=rest | fields), options)


FORMAT = Format(
    name="prime-rl-sft",
    rank=400,
    program="prime-rl (SFT batches)",
    recognised_by="`input_ids`, `target_ids` and `loss_mask`",
    requires="input_ids:array, target_ids:array, loss_mask:array",
    used="input_ids target_ids loss_mask position_ids seq_lens",
    dropped="""
        mm_kwargs (batches that have some are skipped);
        mm_token_type_ids
    """,
    keeps="token ids, masks",
    arrays=("input_ids", "target_ids", "loss_mask", "position_ids"),
    read=_read_prime_rl_sft,
)
