"""The gradient of leaf-weighted advantages is that of independent rollouts; GRPO's on the same trees is not."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from support.markov_law import MarkovLaw
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import SimulatedEngine
from treepack.rollout.trainers.sampled_leaves import SampledLeaf, read_leaves
from treepack.rollout.trainers.trl_rollout import leaf_weighted

pytestmark = pytest.mark.slow  # 60,000 requests

GOES_ON = 0.6  # probability of token 1; token 0 ends the response, so lengths are geometric
TREES = 1500


def sampled_trees() -> list[list[SampledLeaf]]:
    engine = SimulatedEngine(MarkovLaw(np.array([[1 - GOES_ON, GOES_ON]] * 2), stop=0))
    options = TreeOptions(width=8, segment=1, depth=None, max_tokens=200, max_repeats=0)

    async def sample() -> list[list[SampledLeaf]]:
        queries = [Query(str(i), str(i), np.array([1], np.int32)) for i in range(TREES)]
        trees = [await sample_tree(query, engine, options, episode=SingleTurn()) for query in queries]
        return [read_leaves(tree) for tree in trees]

    return asyncio.run(sample())


def length(leaves: list[SampledLeaf]) -> list[float]:
    return [float(len(leaf.response)) for leaf in leaves]


def test_the_gradient_of_weighted_advantages_has_no_bias() -> None:
    def reward(completions: list[SampledLeaf], **_: Any) -> list[float]:
        return length(completions)

    weighted, plain = [], []
    for leaves in sampled_trees():
        columns = {name: [leaf.fields[name] for leaf in leaves] for name in leaves[0].fields}
        found = leaf_weighted(reward)(
            completions=leaves, tree=[0] * len(leaves), log_metric=lambda name, value: None, **columns
        )
        # d log p / d GOES_ON of a response: 1 / p for each token 1, and -1 / (1 - p) for the stop token.
        scores = np.array([(len(leaf.response) - 1) / GOES_ON - 1 / (1 - GOES_ON) for leaf in leaves])
        rewards = np.array(length(leaves))
        weighted.append(np.array(found) @ scores / len(leaves))
        # GRPO with the factor n / (n - 1), which makes it unbiased for independent rollouts.
        plain.append((rewards - rewards.mean()) @ scores / (len(leaves) - 1))
    exact = 1 / (1 - GOES_ON) ** 2  # the mean length is 1 / (1 - p)
    assert abs(np.mean(weighted) - exact) < 3 * np.std(weighted) / np.sqrt(TREES)
    assert abs(np.mean(plain) - exact) > 3 * np.std(plain) / np.sqrt(TREES)
