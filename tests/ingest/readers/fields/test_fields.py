"""Fields that every record may have besides its content: rewards, ids, groups, steps, weights, metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.readings import only, read_as, refusal_as
from treepack.trajectory import Trajectory

MASKED = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}


def read(value: dict[str, Any], **options: Any) -> Trajectory:
    return only(read_as("tokens", value, **options))


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        ({"reward": 1}, 1.0),
        ({"score": -0.5, "reward": None}, -0.5),
        ({"rm_scores": [0.0, 0.25, 0.5]}, 0.75),
        ({"reward_info": {"reward": 2.0}}, 2.0),
        ({"rewards": {"a": {"score": 1.0, "weight": 0.5}, "b": {"score": 3}}}, 3.5),
        ({"rewards": {}}, None),
        ({"reward": [], "rm_scores": [0.0, 2.0]}, 2.0),
        ({"reward": "0.5"}, 0.5),
        ({"reward": True}, 1.0),
        ({}, None),
    ],
)
def test_rewards_come_in_many_forms(value: dict[str, Any], reward: float | None) -> None:
    assert read(MASKED | value).reward == reward


def test_a_reward_key_picks_one_of_several() -> None:
    assert read(MASKED | {"reward": {"a": 1, "b": {"score": 2}}}, reward_key="b").reward == 2.0
    reward = {"a": 1, "b": 2}
    assert (
        refusal_as("tokens", MASKED | {"reward": reward})
        == "reward is a dict with the keys a, b; choose one with --reward-key"
    )
    expected = "reward has no key 'c'; expected one of a, b"
    assert refusal_as("tokens", MASKED | {"reward": reward}, reward_key="c") == expected


@pytest.mark.parametrize("offsets", [[1], list(range(1, 3000)), np.arange(1, 3000)])
def test_the_segments_of_a_sampler_are_metadata_however_many(offsets: Any) -> None:
    trajectory = read(MASKED | {"segments": offsets})
    assert trajectory.metadata == {"segments": list(offsets)}
    assert trajectory.notes == ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (MASKED | {"reward": {}, "score": "x"}, 'score is "x"; expected a finite number'),
        (MASKED | {"reward": "one"}, 'reward is "one"; expected a finite number'),
        (MASKED | {"reward": float("nan")}, "reward is NaN; expected a finite number"),
        (MASKED | {"rewards": [1, float("inf")]}, "a value of rewards is Infinity; expected a finite number"),
        (MASKED | {"advantage": float("inf")}, "advantage is inf; expected a finite number"),
        (MASKED | {"weight": -1}, "weight is -1.0; expected 0 or a number in [1e-12, 1e+12]"),
        (MASKED | {"weight": float("nan")}, "weight is NaN; expected a finite number"),
        (MASKED | {"step": 1.5}, "step is 1.5; expected an integer in [-2**63, 2**63)"),
        (MASKED | {"step": True}, "step is true; expected an integer in [-2**63, 2**63)"),
        (MASKED | {"step": 2**63}, "step is 9223372036854775808; expected an integer in [-2**63, 2**63)"),
        (MASKED | {"step": 2.0**70}, "step is 1.1805916207174113e+21; expected an integer in [-2**63, 2**63)"),
        (MASKED | {"weight": 1e-320}, "weight is 1e-320; expected 0 or a number in [1e-12, 1e+12]"),
        (MASKED | {"weight": 1e31}, "weight is 1e+31; expected 0 or a number in [1e-12, 1e+12]"),
        (MASKED | {"uid": 1.5}, "uid is 1.5; expected a string or an integer of 64 bits"),
        (MASKED | {"id": ["a"]}, 'id is ["a"]; expected a string or an integer of 64 bits'),
    ],
)
def test_a_bad_field_is_refused_in_one_sentence(value: dict[str, Any], expected: str) -> None:
    assert refusal_as("tokens", value) == expected
