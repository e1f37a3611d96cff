"""Rewards less a divergence from a reference and less a punishment of length, before any estimator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Run
from support.critic_values import value_after, with_values
from support.strategies import make
from support.trie_files import saved
from treepack.errors import TreepackError
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

BETA = 0.3
# The trained tokens are 2 3 4, 2 3 and 9, after a prompt of one token; 6 of the second is an observation.
TOKENS = {"a": [1, 2, 3, 4], "b": [1, 2, 6, 3], "c": [1, 9]}
SPANS: dict[str, list[tuple[int, int, float]]] = {
    "a": [(1, 4, 1.0)],
    "b": [(1, 2, 1.0), (3, 4, 1.0)],
    "c": [(1, 2, 2.0)],
}
REWARDS = {"a": 1.0, "b": 0.0, "c": 1.0}


def trained(name: str) -> list[int]:
    return [i for start, end, _ in SPANS[name] for i in range(start, end)]


def logprob(kind: str, name: str, i: int) -> float:
    """A made-up log-probability of the token at place i, a number of float32."""
    return float(np.float32(-abs(value_after([len(kind), *TOKENS[name][: i + 1]])) - 0.1))


def made(*kinds: str) -> list[Trajectory]:
    columns: dict[str, dict[str, Any]] = {
        name: {f"{kind}_logprobs": [logprob(kind, name, i) for i in trained(name)] for kind in kinds} for name in TOKENS
    }
    return [
        make(name, TOKENS[name], spans=SPANS[name], group="g", reward=REWARDS[name], **columns[name]) for name in TOKENS
    ]


def divergence(name: str, i: int, estimator: str, policy: str) -> float:
    x = logprob("ref", name, i) - logprob(policy, name, i)
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator]


@pytest.mark.parametrize("policy", ["old", "sampling"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_of_a_rollout_is_subtracted_before_the_baseline(policy: str, estimator: str) -> None:
    kinds = ["ref", "sampling", "old"] if policy == "old" else ["ref", "sampling"]
    options = AdvantageOptions("rloo", kl_in_reward=BETA, kl_estimator=estimator)
    estimates = estimate_advantages(build_trie(made(*kinds)), options)
    shaped = [
        REWARDS[name] - BETA * sum(divergence(name, i, estimator, policy) for i in trained(name)) for name in TOKENS
    ]
    expected = [reward - (sum(shaped) - reward) / 2 for reward in shaped]
    np.testing.assert_allclose(estimates.values, expected, rtol=1e-12)


def test_with_gae_each_token_pays_for_itself() -> None:
    trie = with_values(
        build_trie([*made("ref", "old"), make("z", [8, 9], group="h", ref_logprobs=[0.0], old_logprobs=[0.0])])
    )
    estimates = estimate_advantages(trie, AdvantageOptions("gae", kl_in_reward=BETA, lam=0.9, gamma=0.8))
    expected: list[float] = []
    for name, tokens in TOKENS.items():
        later, following, advantages = 0.0, 0.0, list[float]()
        for i in reversed(trained(name)):
            reward = REWARDS[name] if i == trained(name)[-1] else 0.0
            value = value_after(tokens[:i])
            later = reward - BETA * divergence(name, i, "k1", "old") + 0.8 * following - value + 0.8 * 0.9 * later
            following = value
            advantages.insert(0, later)
        expected += advantages
    np.testing.assert_allclose(estimates.values, expected, rtol=1e-12, atol=1e-12)
    assert estimates.rejected == {"rewards missing": 1}


def test_long_answers_lose_up_to_one() -> None:
    # Lengths from the first trained token on: 3, 3 and 1. LENGTH 4 and BUFFER 2: nothing until 2, a half at 3.
    estimates = estimate_advantages(build_trie(made()), AdvantageOptions("dr-grpo", overlong=(4, 2)))
    shaped = np.array([0.5, -0.5, 1.0])
    np.testing.assert_allclose(estimates.values, shaped - shaped.mean(), rtol=1e-12)
    assert estimates.num_overlong == 2
    most = estimate_advantages(build_trie(made()), AdvantageOptions("dr-grpo", overlong=(2, 1)))
    np.testing.assert_allclose(most.values, np.array([0, -1, 1]), rtol=1e-12)


@pytest.mark.parametrize(
    ("kinds", "options", "message"),
    [
        (["old"], {"kl_in_reward": 0.1}, "not every rollout has ref_logprobs; record them with the rollouts"),
        (["ref"], {"kl_in_reward": 0.1}, "not every rollout has old_logprobs or sampling_logprobs"),
        ([], {"kl_estimator": "k3"}, "kl_estimator belongs to kl_in_reward; give that too, or neither"),
        ([], {"overlong": (4, 5)}, "overlong is 4,5; expected LENGTH,BUFFER with 1 <= BUFFER <= LENGTH"),
        ([], {"overlong": (4,)}, "overlong is 4; expected LENGTH,BUFFER"),
    ],
)
def test_options_that_cannot_be_used_are_refused(kinds: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        estimate_advantages(build_trie(made(*kinds)), AdvantageOptions("rloo", **options))


def test_the_command_counts_the_punished_rollouts(tmp_path: Path, treepack: Run) -> None:
    trie = saved(build_trie(made("ref", "old")), tmp_path / "trie")
    command = ["advantages", trie, "--estimator", "dr-grpo", "--overlong", "4,2", "--kl-in-reward", 0.1]
    result = treepack(*command, "--out", tmp_path / "out")
    assert result.status == 0, result.err
    assert "rollouts punished for their length 2" in " ".join(result.out.split())
