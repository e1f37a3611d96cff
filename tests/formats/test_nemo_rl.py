"""Training data of NeMo-RL: padding is cut, both masks count, and the step is in the name of the file."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import refusal_as

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
