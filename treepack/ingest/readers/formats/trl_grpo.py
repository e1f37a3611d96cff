"""Rollouts of TRL's GRPO trainers as token ids, in the rows of a batch and as the asynchronous trainer's samples.

    {"prompt_ids": [0, ..], "prompt_mask": [0, 1, ..], "completion_ids": [..], "completion_mask": [1, .., 0],
     "tool_mask": [..], "old_per_token_logps": [..], "sampling_per_token_logps": [..], "advantages": 0.5}
    {"input_ids": [..], "completion_mask": [..], "old_log_probs": [..], "advantage": 0.5, "group_id": 3,
     "model_version": 7}

In a batch prompts are padded on the left and completions on the right. In the samples of the asynchronous trainer the
mask and the log-probabilities are of the whole sequence, and the log-probabilities, which it takes as the old ones,
are those of the sampler: they are kept as both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers import token_fields as tf
from treepack.ingest.readers.about import LOGPROBS, MASKS, TOKEN_IDS, About
from treepack.ingest.readers.fields import ReadOptions
from treepack.ingest.readers.formats import tokens
from treepack.ingest.readers.records import Record
from treepack.trajectory import Skipped, Trajectory

BATCH = ("completion_mask", "tool_mask", "env_mask", "old_per_token_logps", "sampling_per_token_logps")
DROPPED = frozenset({"prompt", "completion", "metrics", "num_items_in_batch"})
PADDING_NOTE = "right padding removed"

ABOUT = About(
    program="TRL (GRPOTrainer, AsyncGRPOTrainer)",
    recognised_by="`prompt_ids` and `completion_ids` beside a mask or log-probabilities of TRL, or `input_ids`, "
    "`completion_mask` and `old_log_probs`",
    used=(
        *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps"),
        *("sampling_per_token_logps", "ref_per_token_logps", "advantages"),
        *("input_ids", "old_log_probs", "advantage", "group_id", "model_version"),
    ),
    dropped=("prompt and completion (text of the ids)", "metrics", "num_items_in_batch"),
    keeps=frozenset({TOKEN_IDS, MASKS, LOGPROBS}),
)


def matches(record: dict[str, Any]) -> bool:
    """Whether `record` is a row of a batch or an asynchronous trainer's sample."""
    return _is_row(record) or _is_sample(record)


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The one trajectory of `record`.

    Raises:
        TreepackError: neither kind of record, or what the `tokens` reader refuses.
    """
    if not matches(record.value):
        raise TreepackError(
            f"{record.source}: has neither prompt_ids and completion_ids nor input_ids, completion_mask and "
            "old_log_probs; expected a rollout of TRL's GRPO"
        )
    value = {name: held for name, held in record.value.items() if name not in DROPPED}
    if _is_sample(record.value):
        value["rollout_log_probs"] = value["old_log_probs"]
        yield from tokens.read(replace(record, value=value), options)
        return
    value, is_padded = _without_padding(value, record.source)
    for item in tokens.read(replace(record, value=value), options):
        if is_padded and isinstance(item, Trajectory):
            item = replace(item, notes=(*item.notes, PADDING_NOTE))
        yield item


def _is_row(record: dict[str, Any]) -> bool:
    fields = tf.sort_fields({name: record.get(name) for name in ("prompt_ids", "completion_ids")})
    return tf.PROMPT in fields and tf.RESPONSE in fields and any(_is_list(record.get(name)) for name in BATCH)


def _is_sample(record: dict[str, Any]) -> bool:
    return all(_is_list(record.get(name)) for name in ("input_ids", "completion_mask", "old_log_probs"))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | np.ndarray)


def _without_padding(value: dict[str, Any], source: str) -> tuple[dict[str, Any], bool]:
    """`value` without what the completion's mask, which is 1 on tools' tokens too, leaves out at the end."""
    name, num = "completion_mask", len(value["completion_ids"])
    if not _is_list(mask := value.get(name, [])):
        return value, False
    used = np.flatnonzero(tf.mask_values(mask, source=source, name=name))
    end = int(used[-1]) + 1 if len(used) else num
    if len(mask) != num or end == num:
        return value, False
    belongs = (name for name, held in value.items() if _is_list(held) and not name.startswith("prompt_"))
    return value | {name: value[name][:end] for name in belongs if len(value[name]) == num}, True
