"""Training data of NeMo-RL: padding is cut, both masks count, and the step is in the name of the file."""

from __future__ import annotations

from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import read_whole, refusal_as
from treepack.trajectory import Skipped, Tokens, Trajectory

ROW: dict[str, Any] = {
    "content": ["q a"],
    "rewards": [1.0],
    "input_lengths": [5],
    "token_ids": [[5, 6, 7, 8, 2, 0, 0]],
    "token_loss_mask": [[0, 0, 1, 1, 1, 0, 0]],
    "sample_loss_mask": [1.0],
    "advantages": [[0.5] * 7],
    "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, -0.3, 0.0, 0.0]],
    "prev_logprobs": [[0.0, 0.0, -0.4, -0.5, -0.6, 0.0, 0.0]],
}


def test_a_batch_of_one_and_a_batch_of_two_are_read_in_the_step_of_the_file() -> None:
    items = list(read_trajectories([ROLLOUTS / "nemo-rl"]))
    read = [item for item in items if isinstance(item, Trajectory)]
    assert [(item.step, item.reward, item.trajectory_id.rpartition(":")[2]) for item in read] == [
        (3, 1.0, "1"),
        (3, 1.0, "3[0]"),
        (3, 0.0, "3[1]"),
    ]
    assert [item.reason for item in items if isinstance(item, Skipped)] == ["no trained token"]


def test_padding_is_cut_and_every_list_belongs_to_the_same_tokens() -> None:
    (item,) = read_whole("nemo-rl", ROW)
    content = item.content
    assert isinstance(content, Tokens)
    assert content.tokens.tolist() == [5, 6, 7, 8, 2]
    assert (content.starts.tolist(), content.ends.tolist()) == ([2], [5])
    assert content.sampling_logprob is not None
    assert content.old_logprob is not None
    assert content.advantage is not None
    assert content.sampling_logprob.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert content.old_logprob.tolist() == pytest.approx([-0.4, -0.5, -0.6])
    assert content.advantage.tolist() == [0.5] * 3


def test_the_mask_of_a_sample_is_a_factor_of_the_mask_of_its_tokens() -> None:
    (item,) = read_whole("nemo-rl", ROW | {"sample_loss_mask": [0.5]})
    assert item.content.span_weights.tolist() == [0.5]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input_lengths": [8]}, "input_lengths is 8; expected a number of tokens up to 7"),
        ({"input_lengths": ["5"]}, 'input_lengths is "5"; expected a number of tokens up to 7'),
        ({"sample_loss_mask": ["yes"]}, 'sample_loss_mask is "yes"; expected a number'),
        ({"rewards": [1.0, 2.0]}, "rewards has 2 rows, but token_ids has 1; drop the wrong column"),
    ],
)
def test_a_column_of_another_kind_is_refused(change: dict[str, Any], sentence: str) -> None:
    assert refusal_as("nemo-rl", ROW | change) == sentence
