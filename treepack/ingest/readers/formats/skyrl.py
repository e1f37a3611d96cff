"""SkyRL's rollouts as token ids: what a generator gives back, and batches ready for training; both hold columns.

    {"prompt_token_ids": [[..], ..], "response_ids": [[..], ..], "rewards": [1.0, ..], "loss_masks": [[..], ..],
     "rollout_logprobs": [[..], ..], "trajectory_ids": [{"instance_id", "repetition_id"}, ..], "is_last_step": [..]}
    {"sequences": [[..], ..], "attention_mask": [[..], ..], "loss_mask": [[..], ..], "response_mask": [[..], ..], ..}

Of a generator the mask, the log-probabilities and rewards that are lists belong to the response. Where `is_last_step`
is there an element is one call; the calls up to a last step are one rollout, and its reward is that of the last. In a
batch rows are padded, and what belongs to responses lies over the last tokens of the row, however many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.batches import rows_of
from treepack.ingest.readers.calls import TokenCall, read_calls
from treepack.ingest.readers.fields import ReadOptions, shown
from treepack.ingest.readers.format import COLUMN, EVERYTHING, Fields, Format
from treepack.ingest.readers.formats import tokens
from treepack.ingest.readers.messages import MEDIA_REASON
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.token_fields import number_values
from treepack.ingest.readers.trajectories import without
from treepack.trajectory import Skipped, Trajectory

GENERATOR: Fields = {"prompt_token_ids": COLUMN, "response_ids": COLUMN, "loss_masks": COLUMN}
BATCH: Fields = {"sequences": COLUMN, "attention_mask": COLUMN, "loss_mask": COLUMN}
MEDIA = ("pixel_values", "image_grid_thw")
# Values of a batch's responses, under the names of the reader of tokens.
OF_RESPONSE = tuple(
    """
    loss_mask response_mask rollout_logprobs action_log_probs base_action_log_probs advantages
    """.split()
)
WHOLE_BATCH = frozenset({"rollout_metrics", "trajectory_time_splits", "trajectory_generation_times", "env_metrics"})
DROPPED = frozenset({"rollout_expert_indices", "router_padding_mask", "values", "returns", "kl", *MEDIA})


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of all rows, `<instance>/<repetition>`, or `<record>[<row>]` where rows have no names.

    Raises:
        TreepackError: columns of different lengths, or what the `tokens` reader refuses.
    """
    value = record.value
    is_batch = not COLUMN.test(value.get("prompt_token_ids"))
    columns = without(value, WHOLE_BATCH)
    rows = rows_of(columns, first="sequences" if is_batch else "prompt_token_ids", source=record.source)
    steps: list[tuple[Record, dict[str, Any]]] = []
    for number, row in enumerate(rows):
        one = replace(record, source=f"{record.source}[{number}]", value=_described(row, record, number))
        if any(row.get(name) is not None for name in MEDIA):
            yield Skipped(one.source, MEDIA_REASON)
        elif is_batch:
            yield from tokens.read(replace(one, value=one.value | _of_batch(row, one.source)), options)
        else:
            steps.append((one, row))
            if row.get("is_last_step") is not False or number == len(rows) - 1:
                yield from read_calls(steps[-1][0], [_call(each) for _, each in steps], options)
                steps = []


def _described(row: dict[str, Any], record: Record, number: int) -> dict[str, Any]:
    """What is known of a row besides its tokens, under the names that every reader uses."""
    read = {*GENERATOR, *BATCH, *OF_RESPONSE, "rewards", "trajectory_ids", "is_last_step", "stop_reasons", "uids"}
    rest = {name: held for name, held in row.items() if name not in read and name not in DROPPED}
    name = row.get("trajectory_ids")
    group, place = row.get("uids"), f"{record.label}[{number}]"
    if isinstance(name, dict):
        group = name.get("instance_id")
        name = f"{group}/{name.get('repetition_id')}"
    return rest | {
        "trajectory_id": place if name is None else name,
        "group_id": group,
        "reward": row.get("rewards"),
        "stop_reason": row.get("stop_reasons"),
    }


def _call(row: dict[str, Any]) -> TokenCall:
    values = {"loss_mask": row["loss_masks"], "rollout_log_probs": row.get("rollout_logprobs")}
    return TokenCall(row["prompt_token_ids"], row["response_ids"], values)


def _of_batch(row: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of a row of a batch, each over the whole row, NaN or 0 in front of the responses."""
    num = len(row["sequences"])
    found: dict[str, Any] = {"sequences": row["sequences"], "attention_mask": row["attention_mask"]}
    for name in OF_RESPONSE:
        if (held := row.get(name)) is None:
            continue
        if not isinstance(held, list | np.ndarray):
            raise TreepackError(f"{source}: {name} is {shown(held)}; expected one number per token of the responses")
        numbers = number_values(held, source=source, name=name)
        if len(numbers) > num:
            raise TreepackError(f"{source}: {name} has {len(numbers)} values; expected at most {num}, the row's tokens")
        found[name] = np.concatenate([np.zeros(num - len(numbers)), numbers])
    return found


FORMAT = Format(
    name="skyrl",
    program="SkyRL (GeneratorOutput, TrainingInputBatch)",
    recognised_by="`prompt_token_ids`, `response_ids` and `loss_masks`, or `sequences`, `attention_mask` and "
    "`loss_mask`, all as columns of lists",
    requires=[GENERATOR, BATCH],
    used="""
        prompt_token_ids response_ids loss_masks rewards rollout_logprobs trajectory_ids stop_reasons
        is_last_step trajectory_ids.instance_id trajectory_ids.repetition_id sequences attention_mask loss_mask
        response_mask action_log_probs base_action_log_probs advantages uids
    """.split(),
    dropped=(
        "values, returns and kl (a critic's and the trainer's own)",
        "rollout_expert_indices and router_padding_mask",
        "pixel_values and image_grid_thw (rows that have some are skipped)",
        "rollout_metrics, env_metrics and times",
        "rewards of steps but the last",
    ),
    keeps=EVERYTHING,
    read=read,
)
