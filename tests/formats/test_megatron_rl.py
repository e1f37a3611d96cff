"""Megatron-RL: turns with their whole prompts, and which log-probability belongs to which token."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import Items, read_as, trajectories
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.formats.trainers.megatron_rl import LAST_NOTE
from treepack.trajectory import Skipped, Trajectory

TURN: dict[str, Any] = {"trajectory": [[1, 2, 3, 4]], "generation_mask": [[False, False, True, True]], "reward": 1.0}


def items(value: dict[str, Any]) -> Items:
    return read_as("megatron-rl", value)


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(items(value))


def test_an_end_token_without_a_log_probability_is_not_trained_and_said() -> None:
    (trajectory,) = read(TURN | {"logprobs": [[-0.5]]})
    assert back(trajectory) == ([1, 2, 3, 4], [2], [-0.5], 1.0)
    assert trajectory.notes == (LAST_NOTE,)


def test_log_probabilities_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(TreepackError, match="turn 1 has 4 log-probabilities; expected 2 "):
        items(TURN | {"logprobs": [[-0.5, -0.5, -0.5, -0.5]]})
    with pytest.raises(TreepackError, match="has 1 turns, 2 masks"):
        items(TURN | {"generation_mask": [[True], [True]]})


def test_rollouts_that_cannot_be_trained_are_skipped() -> None:
    assert items(TURN | {"generation_mask": None}) == [Skipped("r.jsonl:1", "no mask of generated tokens")]
    text = {"trajectory": ["2+2? 4"], "prompt_length": [3], "policy_epoch": [[]]}
    assert items(text) == [Skipped("r.jsonl:1", "text without the length of its prompt")]
    empty = TURN | {"trajectory": [], "generation_mask": [], "logprobs": []}
    assert items(empty) == [Skipped("r.jsonl:1", "no call with a response")]
