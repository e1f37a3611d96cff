"""Rollouts of NeMo-RL as token ids: the training data of each step, in columns of a batch of one or of more.

    train_data_step3.jsonl
    {"token_ids": [[5, 6, 7, 2, 0]], "input_lengths": [4], "token_loss_mask": [[0, 0, 1, 1, 0]],
     "sample_loss_mask": [1.0], "rewards": [1.0], "advantages": [[..]], "generation_logprobs": [[..]],
     "prev_logprobs": [[..]], "content": [".."]}

Sequences are padded on the right up to `input_lengths`. All lists of a sequence have one value per token. A sequence
with the sample mask 0, such as one that a limit cut, is not trained.
"""

from __future__ import annotations

from dataclasses import replace

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    TreepackError,
    read_tokens,
    shown,
)
from treepack.ingest.readers.tokens.trainer_batches import rows_of

# Names of NeMo-RL, and the names of `token_fields` for the same values.
_NAMES = {
    "token_loss_mask": "loss_mask",
    "generation_logprobs": "rollout_log_probs",
    "prev_logprobs": "old_log_probs",
    "rewards": "reward",
}
_DROPPED = frozenset({"content", "filtered_rewards", "idx", "input_lengths", "sample_loss_mask"})


def _read_nemo_rl(record: Record, options: ReadOptions) -> Outcomes:
    """Read one trajectory for each row of the batch, named after the row if there are several.

    Raises:
        TreepackError: columns of different lengths, a length that is not an integer, a mask that is not numbers, or as
            `read_tokens`.
    """
    # Metrics of the whole batch stay out of the rows.
    rows = rows_of(record.with_lists().value, first="token_ids", source=record.source)
    for number, row in enumerate(rows):
        source = f"{record.source}[{number}]" if len(rows) > 1 else record.source
        yield from read_tokens(replace(record, source=source, value=_row(row, source)), options)


def _row(row: JsonObject, source: str) -> JsonObject:
    ids, length, used = row["token_ids"], row.get("input_lengths"), row.get("sample_loss_mask", 1)
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(ids):
        raise TreepackError(f"{source}: input_lengths is {shown(length)}; expected a number of tokens up to {len(ids)}")
    if isinstance(used, bool) or not isinstance(used, int | float):
        raise TreepackError(f"{source}: sample_loss_mask is {shown(used)}; expected a number")
    value = {_NAMES.get(name, name): field for name, field in row.items() if name not in _DROPPED}
    # token_ids [5, 6, 2, 0] of length 3 -> [5, 6, 2]; the reader of tokens refuses a list with a different length.
    cut = {name: field[:length] for name, field in value.items() if isinstance(field, list) and len(field) == len(ids)}
    # A mask of other values is refused by the reader of tokens.
    if used != 1 and "loss_mask" in cut and all(isinstance(each, int | float) for each in cut["loss_mask"]):
        cut["loss_mask"] = [each * used for each in cut["loss_mask"]]
    return value | cut


FORMAT = Format(
    name="nemo-rl",
    rank=265,
    program="NeMo-RL (train_data_step*.jsonl)",
    recognised_by="columns `token_ids`, `token_loss_mask` and `input_lengths`",
    requires="token_ids:column, token_loss_mask:column, input_lengths:list",
    used="""
        token_ids token_loss_mask sample_loss_mask input_lengths rewards advantages generation_logprobs prev_logprobs
    """,
    dropped="""
        content (text of the ids);
        filtered_rewards (the rewards of a batch after dynamic sampling);
        idx (the number of the line)
    """,
    keeps="token ids, masks, log-probabilities, rewards",
    read=_read_nemo_rl,
)
