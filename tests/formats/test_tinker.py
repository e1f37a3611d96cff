"""Tinker: groups of trajectories, and datums that are shifted already."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import only, read_as, trajectories
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.trajectory import Skipped, Trajectory


def read(name: str, value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as(name, value))


def model_input(*parts: list[int]) -> dict[str, Any]:
    return {"chunks": [{"tokens": part, "type": "encoded_text"} for part in parts]}


def transition(ob: Any, tokens: list[int], logprobs: list[float], **more: Any) -> dict[str, Any]:
    return {"ob": ob, "ac": {"tokens": tokens, "maybe_logprobs": logprobs}, "reward": 0.25} | more


def test_a_turn_that_could_not_be_parsed_is_not_trained() -> None:
    steps = [
        transition(model_input([1, 2]), [3], [-0.5], metrics={"parse_error_masked": 1.0}),
        transition([1, 2, 3, 4], [5], [-0.25]),
    ]
    (trajectory,) = read("tinker", {"transitions": steps})
    assert back(trajectory) == ([1, 2, 3, 4, 5], [4], [-0.25], 0.5)


def test_a_trajectory_with_images_is_skipped() -> None:
    image = {"chunks": [{"type": "image", "data": ".."}]}
    value = {"transitions": [transition(image, [3], [-0.5])]}
    items = read_as("tinker", value)
    assert items == [Skipped("r.jsonl:1", "images, audio and video are not read")]


def test_rewards_of_another_group_are_refused() -> None:
    value = {"trajectories_G": [{"transitions": []}], "final_rewards_G": [1.0, 2.0]}
    with pytest.raises(TreepackError, match="expected one for each of 1 trajectories"):
        read("tinker", value)


def test_a_datum_whose_targets_are_not_its_input_shifted_is_refused() -> None:
    for targets in ([5, 6], [6], [7, 7]):
        value = {"model_input": model_input([5, 6]), "loss_fn_inputs": {"target_tokens": targets}}
        with pytest.raises(TreepackError, match="target_tokens are not the tokens of model_input one place later"):
            read("tinker-datum", value)
    value = {"model_input": model_input([5, 6]), "loss_fn_inputs": {"target_tokens": [6, 7]}}
    assert back(read("tinker-datum", value)[0])[:2] == ([5, 6, 7], [1, 2])


def test_a_group_that_is_null_is_a_single_trajectory_and_an_empty_one_is_counted() -> None:
    transition = {"ob": [1, 2], "ac": {"tokens": [3], "maybe_logprobs": [-0.5]}, "reward": 0.0}
    for fields in ({"transitions": [transition]}, {"transitions": [transition], "trajectories_G": None}):
        only(read_as("tinker", fields))
    assert read_as("tinker", {"trajectories_G": []}) == [Skipped("r.jsonl:1", "group without a trajectory")]
