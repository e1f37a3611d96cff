"""SkyRL: columns of a generator, of a batch, and dumps as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROLLOUTS
from support.readings import only, read_as, trajectories
from support.token_rollouts import Rollout, back, rollouts
from treepack.errors import TreepackError
from treepack.trajectory import PromptCompletion, Skipped, Tokens, Trajectory

SAMPLES = ROLLOUTS / "skyrl"


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as("skyrl", value, path="r.json"))


@given(st.lists(rollouts(), min_size=1, max_size=3))
def test_the_rows_of_a_generator_come_back(batch: list[Rollout]) -> None:
    items = read(
        {
            "prompt_token_ids": [rollout.prompt for rollout in batch],
            "response_ids": [rollout.response for rollout in batch],
            "rewards": [rollout.reward for rollout in batch],
            "loss_masks": [rollout.mask for rollout in batch],
            "rollout_logprobs": [rollout.logprobs for rollout in batch],
            "trajectory_ids": [{"instance_id": "q", "repetition_id": k} for k in range(len(batch))],
            "rollout_metrics": {"a": 1.0},
        }
    )
    assert [back(item) for item in items] == [
        (each.ids, each.trained, each.at_trained(each.logprobs), each.reward) for each in batch
    ]
    assert [(item.trajectory_id, item.group_id) for item in items] == [(f"q/{k}", "q") for k in range(len(batch))]


@given(st.lists(rollouts(), min_size=1, max_size=3))
def test_the_rows_of_a_batch_come_back_from_the_right(batch: list[Rollout]) -> None:
    num = max(len(rollout.ids) for rollout in batch)
    # The window of the responses may reach into the prompts and into the padding of shorter rows.
    window = max(len(rollout.response) for rollout in batch)

    def padded(values: list[Any], size: int) -> list[Any]:
        return [0] * (size - len(values)) + values

    rewards = [[0.0] * (len(each.response) - 1) + [each.reward] for each in batch]
    trajectory = read(
        {
            "sequences": [padded(rollout.ids, num) for rollout in batch],
            "attention_mask": [padded([1] * len(rollout.ids), num) for rollout in batch],
            "loss_mask": [padded([float(flag) for flag in rollout.mask], window) for rollout in batch],
            "response_mask": [padded([1] * len(rollout.response), window) for rollout in batch],
            "rollout_logprobs": [padded(rollout.logprobs, window) for rollout in batch],
            "action_log_probs": [padded([2 * each for each in rollout.logprobs], window) for rollout in batch],
            "advantages": [[0.5] * window for _ in batch],
            "rewards": [padded(each, window) for each in rewards],
            "returns": [[9.0] * window for _ in batch],
            "values": None,
        }
    )
    assert [back(item) for item in trajectory] == [
        (each.ids, each.trained, each.at_trained(each.logprobs), each.reward) for each in batch
    ]
    for item, rollout in zip(trajectory, batch, strict=True):
        assert isinstance(item.content, Tokens)
        assert item.content.old_logprobs is not None
        assert item.content.advantages is not None
        assert item.content.old_logprobs.tolist() == [2 * each for each in rollout.at_trained(rollout.logprobs)]
        assert item.content.advantages.tolist() == [0.5] * len(rollout.trained)


def test_steps_up_to_the_last_one_are_one_rollout_with_the_reward_of_the_last() -> None:
    first, second = read(json.loads((SAMPLES / "generator_output.json").read_text()))
    ids = [151644, 872, 198, 17, 151645, 198, 50, 51, 2, 8, 9, 52, 2]
    assert back(first) == (ids, [6, 7, 8, 11, 12], [-0.5, -0.25, -0.125, -1.0, -0.0625], 1.0)
    assert (first.trajectory_id, first.group_id, first.metadata) == ("q7/0", "q7", {"stop_reason": "stop"})
    assert back(second) == ([*ids[:6], 50, 53, 2], [6, 7, 8], [-0.5, -2.0, -0.125], 0.0)


def test_a_generator_and_the_batch_made_of_it_hold_the_same() -> None:
    of_generator = read(json.loads((SAMPLES / "generator_output.json").read_text()))
    of_batch = read(json.loads((SAMPLES / "batch.json").read_text()))
    assert [back(item) for item in of_batch] == [back(item) for item in of_generator]


def test_columns_of_different_lengths_are_refused() -> None:
    value = {"prompt_token_ids": [[1]], "response_ids": [[2], [3]], "loss_masks": [[1], [1]]}
    with pytest.raises(TreepackError, match="response_ids has 2 rows, but prompt_token_ids has 1; drop"):
        read(value)


def test_rows_with_images_are_skipped() -> None:
    value = {"prompt_token_ids": [[1]], "response_ids": [[2]], "loss_masks": [[1]], "pixel_values": [[0.5]]}
    items = read_as("skyrl", value, path="r.json")
    assert items == [Skipped("r.json[0]", "images, audio and video are not read")]


def test_a_dump_is_text_whose_scores_are_summed() -> None:
    line = {"input_prompt": "p", "output_response": "r", "score": [0.0, 0.5], "env_extras": {"x": []}}
    trajectory = only(read_as("skyrl-dump", line))
    assert (trajectory.content, trajectory.reward, trajectory.notes) == (PromptCompletion("p", "r"), 0.5, ())
