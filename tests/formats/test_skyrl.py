"""SkyRL: columns of a generator, of a batch, and dumps as text."""

from __future__ import annotations

import json
from typing import Any

from support.paths import ROLLOUTS
from support.readings import only, read_as, trajectories
from support.token_rollouts import back
from treepack.trajectory import PromptCompletion, Skipped, Trajectory

SAMPLES = ROLLOUTS / "skyrl"


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as("skyrl", value, path="r.json"))


def test_steps_up_to_the_last_one_are_one_rollout_with_the_reward_of_the_last() -> None:
    first, second = read(json.loads((SAMPLES / "generator_output.json").read_text()))
    ids = [151644, 872, 198, 17, 151645, 198, 50, 51, 2, 8, 9, 52, 2]
    assert back(first) == (ids, [6, 7, 8, 11, 12], [-0.5, -0.25, -0.125, -1.0, -0.0625], 1.0)
    assert (first.trajectory_id, first.group_id, first.metadata) == ("q7/0", "q7", {"stop_reason": "stop"})
    assert back(second) == ([*ids[:6], 50, 53, 2], [6, 7, 8], [-0.5, -2.0, -0.125], 0.0)


def test_rows_with_images_are_skipped() -> None:
    value = {"prompt_token_ids": [[1]], "response_ids": [[2]], "loss_masks": [[1]], "pixel_values": [[0.5]]}
    items = read_as("skyrl", value, path="r.json")
    assert items == [Skipped("r.json[0]", "images, audio and video are not read")]


def test_a_dump_is_text_whose_scores_are_summed() -> None:
    line = {"input_prompt": "p", "output_response": "r", "score": [0.0, 0.5], "env_extras": {"x": []}}
    trajectory = only(read_as("skyrl-dump", line))
    assert (trajectory.content, trajectory.reward, trajectory.notes) == (PromptCompletion("p", "r"), 0.5, ())
