"""prime-rl: samples, micro batches and token exports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.readings import read_as, trajectories
from support.token_rollouts import Rollout, back, rollouts
from treepack.errors import TreepackError
from treepack.trajectory import Skipped, Tokens, Trajectory

SAMPLE: dict[str, Any] = {"token_ids": [5, 6, 7], "mask": [False, True, True], "env_name": "e"}


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as("prime-rl", value))


def columns(rollout: Rollout) -> dict[str, list[Any]]:
    """The columns of prime-rl, with one value per token of the whole sequence."""
    before = len(rollout.prompt)
    return {
        "ids": rollout.ids,
        "mask": [False] * before + [bool(flag) for flag in rollout.mask],
        "logprobs": [0.0] * before + rollout.logprobs,
        "advantages": [0.0] * before + [0.5 * flag for flag in rollout.mask],
    }


def expected(rollout: Rollout) -> tuple[list[int], list[int], list[float], None]:
    return rollout.ids, rollout.trained, rollout.at_trained(rollout.logprobs), None


@given(rollouts())
def test_a_sample_comes_back(rollout: Rollout) -> None:
    row = columns(rollout)
    sample = {"mask": row["mask"], "logprobs": row["logprobs"], "advantages": row["advantages"], "env_name": "e"}
    (trajectory,) = read({"token_ids": row["ids"], "temperatures": [1.0] * len(row["ids"]), **sample})
    assert back(trajectory) == expected(rollout)
    assert isinstance(trajectory.content, Tokens)
    assert trajectory.content.advantages is not None
    assert trajectory.content.advantages.tolist() == [0.5] * len(rollout.trained)
    assert (trajectory.metadata, trajectory.notes) == ({"env_name": "e"}, ())


@given(st.lists(rollouts(), min_size=1, max_size=3), st.integers(0, 3))
def test_the_sequences_of_a_micro_batch_come_back_without_its_padding(batch: list[Rollout], num_padding: int) -> None:
    samples = [columns(rollout) for rollout in batch]

    def joined(name: str, fill: Any) -> list[Any]:
        return [value for each in samples for value in each[name]] + [fill] * num_padding

    lengths = [len(rollout.ids) for rollout in batch]
    lengths[-1] += num_padding
    positions = [i for rollout in batch for i in range(len(rollout.ids))] + list(range(num_padding))
    found = read(
        {
            "input_ids": joined("ids", 1),
            "loss_mask": joined("mask", False),
            "inference_logprobs": joined("logprobs", 0.0),
            "advantages": joined("advantages", 0.0),
            "position_ids": positions,
            "sequence_lengths": lengths,
            "seq_lens": lengths,
            "env_names": ["e"] * (len(positions) - num_padding) + [""] * num_padding,
        }
    )
    assert [back(item) for item in found] == [expected(rollout) for rollout in batch]
    assert [item.trajectory_id for item in found] == [f"r.jsonl:1/sequence-{k + 1}" for k in range(len(batch))]
    assert {item.metadata["env_name"] for item in found} == {"e"}


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
    assert isinstance(trajectory.content, Tokens)
    assert trajectory.content.old_logprobs is not None
    assert trajectory.content.old_logprobs.tolist() == [-0.75, -0.5]
    assert trajectory.step == 3


def test_weights_of_the_policy_loss_multiply_the_mask() -> None:
    (trajectory,) = read(SAMPLE | {"rl_weights": [0.0, 0.5, 0.0], "ce_weights": [1.0, 0.0, 0.0]})
    assert back(trajectory)[1] == [1]
    assert isinstance(trajectory.content, Tokens)
    assert trajectory.content.span_weights.tolist() == [0.5]
    assert trajectory.notes == ("ce_weights not used",)


def test_a_sample_of_cross_entropy_only_is_trained_by_its_weights() -> None:
    (trajectory,) = read(SAMPLE | {"rl_weights": [0.0, 0.0, 0.0], "ce_weights": [0.0, 2.0, 0.0]})
    assert back(trajectory)[1] == [1]
    assert isinstance(trajectory.content, Tokens)
    assert (trajectory.content.span_weights.tolist(), trajectory.notes) == ([2.0], ())


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(TreepackError, match="rl_weights has 1 values; expected 3, one per token"):
        read(SAMPLE | {"rl_weights": [1.0]})


def test_a_sample_with_images_is_skipped() -> None:
    value = SAMPLE | {"mm_kwargs": {"pixel_values": 1}}
    items = read_as("prime-rl", value)
    assert items == [Skipped("r.jsonl:1", "images, audio and video are not read")]


@given(st.lists(rollouts(), min_size=1, max_size=3), st.integers(0, 3))
def test_the_sequences_of_a_supervised_batch_come_back_unshifted(batch: list[Rollout], num_padding: int) -> None:
    lengths = [len(rollout.ids) - 1 for rollout in batch]
    positions = [i for length in lengths for i in range(length)] + list(range(num_padding))
    lengths[-1] += num_padding
    flags = [[False] * (len(rollout.prompt) - 1) + [bool(flag) for flag in rollout.mask] for rollout in batch]
    value = {
        "input_ids": [token for rollout in batch for token in rollout.ids[:-1]] + [0] * num_padding,
        "target_ids": [token for rollout in batch for token in rollout.ids[1:]] + [0] * num_padding,
        "loss_mask": [flag for each in flags for flag in each] + [False] * num_padding,
        "position_ids": positions,
        "seq_lens": lengths,
        "mm_kwargs": None,
    }
    items = read_as("prime-rl-sft", value)
    assert [back(item) for item in items if isinstance(item, Trajectory)] == [
        (rollout.ids, rollout.trained, None, None) for rollout in batch
    ]


def test_a_supervised_batch_whose_targets_are_not_shifted_is_refused() -> None:
    value = {"input_ids": [5, 6, 7], "target_ids": [5, 6, 7], "loss_mask": [False, True, True]}
    with pytest.raises(TreepackError, match="target_ids of sequence 1 are not its input_ids one place later"):
        read_as("prime-rl-sft", value)
