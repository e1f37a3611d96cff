"""prime-rl: samples, micro batches and token exports."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import read_as, tokens_of, trajectories
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.trajectory import Skipped, Trajectory

SAMPLE: dict[str, Any] = {"token_ids": [5, 6, 7], "mask": [False, True, True], "env_name": "e"}


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as("prime-rl", value))


def test_an_export_brings_the_log_probabilities_of_sampler_and_trainer() -> None:
    export = {
        "step": 3,
        "export_sequence_idx": 0,
        "token_ids": [5, 6, 7],
        "loss_mask": [False, True, True],
        "inference_logprobs": [0.0, -0.5, -0.25],
        "trainer_logprobs": [None, -0.75, -0.5],
        "rl_weights": [None, None, None],
        "env_name": "e",
    }
    (trajectory,) = read(export)
    assert back(trajectory) == ([5, 6, 7], [1, 2], [-0.5, -0.25], None)
    content = tokens_of(trajectory)
    assert content.old_logprob is not None
    assert content.old_logprob.tolist() == [-0.75, -0.5]
    assert trajectory.step == 3


def test_a_sample_of_cross_entropy_only_is_trained_by_its_weights() -> None:
    (trajectory,) = read(SAMPLE | {"rl_weights": [0.0, 0.0, 0.0], "ce_weights": [0.0, 2.0, 0.0]})
    assert back(trajectory)[1] == [1]
    assert (tokens_of(trajectory).span_weights.tolist(), trajectory.notes) == ([2.0], ())


def test_a_sample_with_images_is_skipped() -> None:
    value = SAMPLE | {"mm_kwargs": {"pixel_values": 1}}
    items = read_as("prime-rl", value)
    assert items == [Skipped("r.jsonl:1", "images, audio and video are not read")]


def test_a_supervised_batch_whose_targets_are_not_shifted_is_refused() -> None:
    value = {"input_ids": [5, 6, 7], "target_ids": [5, 6, 7], "loss_mask": [False, True, True]}
    with pytest.raises(TreepackError, match="target_ids of sequence 1 are not its input_ids one place later"):
        read_as("prime-rl-sft", value)
