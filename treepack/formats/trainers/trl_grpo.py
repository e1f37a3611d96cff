"""Rollouts of TRL's GRPO trainers as token ids: rows of a batch, and samples of the asynchronous trainer.

    {"prompt_ids": [0, ..], "prompt_mask": [0, 1, ..], "completion_ids": [..], "completion_mask": [1, .., 0],
     "tool_mask": [..], "old_per_token_logps": [..], "sampling_per_token_logps": [..], "advantages": 0.5}
    {"input_ids": [..], "completion_mask": [..], "old_log_probs": [..], "advantage": 0.5, "group_id": 3,
     "model_version": 7}

In a batch, prompts are padded on the left and completions on the right. In a sample of the asynchronous trainer, the
mask and the log-probabilities have one value per token of the whole sequence. That trainer uses the log-probabilities
of the sampler as the old ones, so they are read as both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Trajectory,
    has_fields,
    read_tokens,
    without,
)
from treepack.ingest.readers.fields import token_fields as tf
from treepack.ingest.readers.kinds import ARRAY

# One of these fields marks a batch of TRL; other programs name ids in the same way.
_DROPPED = frozenset({"prompt", "completion", "metrics", "num_items_in_batch"})
_PADDING_NOTE = "right padding removed"


def _read_trl_grpo(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of `record`.

    Raises:
        TreepackError: an error of the `tokens` reader.
    """
    value = without(record.value, _DROPPED)
    if has_fields(record.value, _SAMPLE):
        # Both names: the sampler's log-probabilities, which the trainer takes as its old ones.
        value["rollout_log_probs"] = value["old_log_probs"]
        yield from read_tokens(replace(record, value=value), options)
        return
    value, is_padded = _without_padding(value, record.source)
    for item in read_tokens(replace(record, value=value), options):
        if is_padded and isinstance(item, Trajectory):
            item = replace(item, notes=(*item.notes, _PADDING_NOTE))
        yield item


def _without_padding(value: JsonObject, source: str) -> tuple[JsonObject, bool]:
    """Return `value` without the padding after the completion, and whether there was any.

    The mask of the completion is 1 on the tokens of tools too, so its last 1 is the end.
    """
    name, num = "completion_mask", len(value["completion_ids"])
    if not ARRAY.test(mask := value.get(name, [])):
        return value, False
    # completion_mask [1, 0, 1, 0, 0] -> end 3
    used = np.flatnonzero(tf.mask_values(mask, source=source, name=name))
    end = int(used[-1]) + 1 if len(used) else num
    # The reader of tokens refuses a mask of a different length.
    if len(mask) != num or end == num:
        return value, False
    belongs = (name for name, field in value.items() if ARRAY.test(field) and not name.startswith("prompt_"))
    return value | {name: value[name][:end] for name in belongs if len(value[name]) == num}, True


_SAMPLE = "input_ids:array, completion_mask:array, old_log_probs:array"
FORMAT = Format(
    name="trl-grpo",
    rank=370,
    program="TRL (GRPOTrainer, AsyncGRPOTrainer)",
    recognised_by="`prompt_ids` and `completion_ids` beside a mask or log-probabilities of TRL, or `input_ids`, "
    "`completion_mask` and `old_log_probs`",
    requires=f"""
        prompt_ids:ids, completion_ids:ids,
            completion_mask|tool_mask|env_mask|old_per_token_logps|sampling_per_token_logps:array;
        {_SAMPLE}
    """,
    used="""
        prompt_ids prompt_mask completion_ids completion_mask tool_mask old_per_token_logps
        sampling_per_token_logps ref_per_token_logps advantages input_ids old_log_probs advantage group_id
        model_version
    """,
    dropped="""
        prompt and completion (text of the ids);
        metrics;
        num_items_in_batch
    """,
    keeps="token ids, masks, log-probabilities",
    arrays=tf.NUMBERS,
    read=_read_trl_grpo,
)
