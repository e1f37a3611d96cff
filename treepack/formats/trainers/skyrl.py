"""Rollouts of SkyRL as token ids: the output of a generator, and batches ready for training; both consist of columns.

    {"prompt_token_ids": [[..], ..], "response_ids": [[..], ..], "rewards": [1.0, ..], "loss_masks": [[..], ..],
     "rollout_logprobs": [[..], ..], "trajectory_ids": [{"instance_id", "repetition_id"}, ..], "is_last_step": [..]}
    {"sequences": [[..], ..], "attention_mask": [[..], ..], "loss_mask": [[..], ..], "response_mask": [[..], ..], ..}

In the output of a generator, the mask, the log-probabilities and rewards that are lists belong to the response. If
there is an `is_last_step`, an element is one call; the calls up to a last step are one rollout, whose reward is the
reward of the last step. In a batch, rows are padded, and the values of responses belong to the last tokens of the row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treepack.formats.kit import (
    MEDIA_REASON,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    TreepackError,
    as_flag,
    mask_values,
    read_calls,
    read_tokens,
    shown,
    without,
)
from treepack.ingest.readers.fields.token_fields import number_values
from treepack.ingest.readers.kinds import COLUMN
from treepack.ingest.readers.tokens.route_fields import kept_routes, rows_of_all
from treepack.ingest.readers.tokens.trainer_batches import rows_of

_MEDIA = ("pixel_values", "image_grid_thw")
# Values of a batch's responses, under the names of the reader of tokens.
_OF_RESPONSE = tuple(
    """
    loss_mask response_mask rollout_logprobs action_log_probs base_action_log_probs advantages
    """.split()
)
# Fields that describe the whole batch, so they are not columns.
_WHOLE_BATCH = frozenset({"rollout_metrics", "trajectory_time_splits", "trajectory_generation_times", "env_metrics"})
_DROPPED = frozenset({"rollout_expert_indices", "router_padding_mask", "values", "returns", "kl", *_MEDIA})


def _read_skyrl(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of all rows, `<instance>/<repetition>`, or `<record>[<row>]` if rows have no names.

    Raises:
        TreepackError: columns of different lengths, or an error of the `tokens` reader.
    """
    value = record.value
    is_batch = not COLUMN.test(value.get("prompt_token_ids"))
    columns = without(value, _WHOLE_BATCH)
    rows = rows_of(columns, first="sequences" if is_batch else "prompt_token_ids", source=record.source)
    if isinstance(value.get("is_last_step"), str | dict):
        raise TreepackError(
            f"{record.source}: is_last_step is {shown(value['is_last_step'])}; expected true or false for each call"
        )
    steps: list[tuple[Record, JsonObject]] = []
    for number, row in enumerate(rows):
        one = replace(record, source=f"{record.source}[{number}]", value=_facts(row, record, number))
        # A row with images has ids of placeholders, which no reader of text can train.
        if any(row.get(name) is not None for name in _MEDIA):
            yield Skipped(one.source, MEDIA_REASON)
        elif is_batch:
            fields = _of_batch(row, one.source) | _routes(row, one.source, options)
            yield from read_tokens(replace(one, value=one.value | fields), options)
        else:
            # is_last_step [F, T, T] -> rollouts [0, 1] and [2]; without it every row is a rollout.
            steps.append((one, row))
            if as_flag(row.get("is_last_step")) is not False or number == len(rows) - 1:
                yield from read_calls(steps[-1][0], [_call(each) for _, each in steps], options)
                steps = []


def _facts(row: JsonObject, record: Record, number: int) -> JsonObject:
    """Return the facts of a row besides its tokens, under the names that every reader uses."""
    _read_skyrl = {
        *"prompt_token_ids response_ids loss_masks sequences attention_mask loss_mask".split(),
        *_OF_RESPONSE,
        "rewards",
        "trajectory_ids",
        "is_last_step",
        "stop_reasons",
        "uids",
    }
    rest = without(row, {*_read_skyrl, *_DROPPED})
    name = row.get("trajectory_ids")
    group, index = row.get("uids"), f"{record.label}[{number}]"
    if isinstance(name, dict):
        group = name.get("instance_id")
        # {"instance_id": "q7", "repetition_id": 2} -> "q7/2" in the group "q7"
        name = f"{group}/{name.get('repetition_id')}"
    return rest | {
        "trajectory_id": index if name is None else name,
        "group_id": group,
        "reward": row.get("rewards"),
        "stop_reason": row.get("stop_reasons"),
    }


def _routes(row: JsonObject, source: str, options: ReadOptions) -> JsonObject:
    """Return the routes of a row of a batch; SkyRL fills unrecorded ones up, and marks them."""
    fields, mask = kept_routes(row, options), row.get("router_padding_mask")
    if mask is None:
        return fields
    num_tokens = len(row["sequences"])
    is_filled = mask_values(mask, source=source, name="router_padding_mask") != 0
    if len(is_filled) != num_tokens:
        raise TreepackError(
            f"{source}: router_padding_mask has {len(is_filled)} values; expected {num_tokens}, the row's tokens"
        )
    for name, value in fields.items():
        rows = rows_of_all(value, source=source, name=name, num_tokens=num_tokens)
        rows[is_filled] = -1
        fields[name] = rows
    return fields


def _call(row: JsonObject) -> TokenCall:
    values = {"loss_mask": row["loss_masks"], "rollout_log_probs": row.get("rollout_logprobs")}
    return TokenCall(row["prompt_token_ids"], row["response_ids"], values, row.get("rollout_expert_indices"))


def _of_batch(row: JsonObject, source: str) -> JsonObject:
    """Return the fields of a row of a batch, each over the whole row, with 0 before the responses."""
    num_tokens = len(row["sequences"])
    fields: JsonObject = {"sequences": row["sequences"], "attention_mask": row["attention_mask"]}
    for name in _OF_RESPONSE:
        if (column := row.get(name)) is None:
            continue
        if not isinstance(column, list | np.ndarray):
            raise TreepackError(f"{source}: {name} is {shown(column)}; expected one number per token of the responses")
        numbers = number_values(column, source=source, name=name)
        if len(numbers) > num_tokens:
            raise TreepackError(
                f"{source}: {name} has {len(numbers)} values; expected at most {num_tokens}, the row's tokens"
            )
        # 4 tokens and the values [0.5, 0.25] -> [0, 0, 0.5, 0.25]
        fields[name] = np.concatenate([np.zeros(num_tokens - len(numbers)), numbers])
    return fields


FORMAT = Format(
    name="skyrl",
    rank=410,
    program="SkyRL (GeneratorOutput, TrainingInputBatch)",
    recognised_by="`prompt_token_ids`, `response_ids` and `loss_masks`, or `sequences`, `attention_mask` and "
    "`loss_mask`, all as columns of lists",
    requires="""
        prompt_token_ids:column, response_ids:column, loss_masks:column;
        sequences:column, attention_mask:column, loss_mask:column
    """,
    used="""
        prompt_token_ids response_ids loss_masks rewards rollout_logprobs trajectory_ids stop_reasons
        is_last_step trajectory_ids.instance_id trajectory_ids.repetition_id sequences attention_mask loss_mask
        response_mask action_log_probs base_action_log_probs advantages uids
    """,
    dropped="""
        values, returns and kl (a critic's and the trainer's own);
        rollout_expert_indices (kept by --keep-routes);
        router_padding_mask (used with --keep-routes);
        pixel_values and image_grid_thw (rows that have some are skipped);
        rollout_metrics, env_metrics and times;
        rewards of steps but the last
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    failed="stop_reason",
    read=_read_skyrl,
)
