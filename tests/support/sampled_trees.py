"""Trees of a simulated engine, and their leaves as trajectories with the metadata of recorded rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.strategies import make
from treepack.rollout.engine import derived_seed
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import ContinuationLaw, SimulatedEngine
from treepack.rollout.tree import Tree, weights_of_leaves
from treepack.trajectory import Float64, Int32, Trajectory


def sample_trees(
    law: ContinuationLaw,
    options: TreeOptions,
    prompts: Sequence[list[int]],
    *,
    seed: int = 0,
    reward: Callable[[Int32], float] | None = None,
) -> list[Tree]:
    """Sample one tree per prompt; the group of prompt number i is `q<i>`."""

    async def score(response: Int32) -> float | None:
        return None if reward is None else reward(response)

    async def sample() -> list[Tree]:
        engine = SimulatedEngine(law)
        queries = [Query(f"q{i}", f"q{i}", np.array(prompt, np.int32)) for i, prompt in enumerate(prompts)]
        return [await sample_tree(query, engine, options, episode=SingleTurn(score), seed=seed) for query in queries]

    return asyncio.run(sample())


def rollouts_of_tree(tree: Tree) -> list[Trajectory]:
    """Convert the leaves of a tree to trajectories that train everything after the prompt."""
    weights, before = weights_of_leaves(tree)
    return [_rollout(tree, i, float(weights[i]), float(before[i])) for i in range(len(tree.leaves))]


def _rollout(tree: Tree, i: int, weight: float, before: float) -> Trajectory:
    leaf = tree.leaves[i]
    path, ids = leaf.path()[1:], leaf.ids().tolist()
    metadata: dict[str, Any] = {
        "segments": [node.start for node in path],
        "segment_ids": [node.number for node in path],
        "leaf_weight": weight,
    }
    if any(other.is_fallback for other in tree.nodes()):
        metadata["leaf_weight_before_fallback"] = before
    return make(
        f"{tree.query.key}/{i}",
        ids,
        spans=[(len(tree.query.prompt), len(ids), 1.0)],
        group=tree.query.group_id,
        reward=leaf.reward,
        metadata=metadata,
    )


def continuations_of(
    law: ContinuationLaw,
    parent: Trajectory,
    num_tokens: int,
    count: int,
    *,
    seed: int,
    reward: Callable[[Int32], float],
) -> list[Trajectory]:
    """Sample `count` continuations of the first `num_tokens` tokens of `parent`, as the sampler prefixes does."""
    tokens = parent.content.tokens  # type: ignore[union-attr]
    prefix, key = tokens[:num_tokens], f"{parent.trajectory_id}@{num_tokens}"
    starts, ids = parent.metadata["segments"], parent.metadata["segment_ids"]
    inherited = [k for k, start in enumerate(starts) if start < num_tokens]
    made = []
    for number in range(count):
        rng = np.random.default_rng(derived_seed(seed, key, number))
        new = law.sample(prefix, max_tokens=10**6, rng=rng)[0]
        metadata = {
            "segments": [*(starts[k] for k in inherited), num_tokens],
            "segment_ids": [*(ids[k] for k in inherited), derived_seed(key, number)],
            "leaf_weight": 1 / count,
            "parent_rollout": parent.trajectory_id,
            "parent_tokens": num_tokens,
        }
        made.append(
            make(
                f"{key}/{number}",
                np.concatenate([prefix, new]).tolist(),
                spans=[(num_tokens, num_tokens + len(new), 1.0)],
                group=str(parent.group_id),
                reward=reward(new),
                metadata=metadata,
            )
        )
    return made


def three_tokens() -> Float64:
    """Return a transition matrix whose short segments are often equal; token 0 stops."""
    return np.array([[0.2, 0.4, 0.4], [0.3, 0.5, 0.2], [0.1, 0.3, 0.6]])
