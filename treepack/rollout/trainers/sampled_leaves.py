"""Trees inside a trainer's loop: sampling, and leaves as trainers take rollouts, lists of one entry per token.

prompt [7 8] -- A [1 2], tool [5] -+- B [3 0]    response [1 2 5 3 0]   mask [1 1 0 1 1]   segments [2 5]
                                   +- C [4 0]    response [1 2 5 4 0]   mask [1 1 0 1 1]   segments [2 5]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.rollout.engine import Engine
from treepack.rollout.environment import EnvironmentFactory, start_episode
from treepack.rollout.episode import Episode, SingleTurn
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.records import path_routes, tree_records
from treepack.rollout.sampler import sample_tree
from treepack.rollout.tree import Tree, TreeNode


@dataclass(frozen=True, slots=True)
class TrainerWorld:
    """The part of the rollouts that no engine samples: the environment, if there is one, and its tokenizer.

    `seed` is that of all choices and requests.
    """

    environment: EnvironmentFactory | None
    tokenizer: Any
    seed: int


async def sample_query(query: Query, engine: Engine, options: TreeOptions, world: TrainerWorld) -> Tree:
    """Sample the tree of `query`, whose prompt may get longer or come from the environment.

    Raises:
        TreepackError: the engine or the environment fails.
    """
    episode: Episode = SingleTurn()
    if world.environment is not None:
        stops = engine.sampling.stop_token_ids
        prompt, episode = await start_episode(world.environment, query, world.tokenizer, stop_token_ids=stops)
        query = replace(query, prompt=prompt)
    return await sample_tree(query, engine, options, episode=episode, seed=world.seed)


@dataclass(frozen=True, slots=True)
class SampledLeaf:
    """One rollout of a tree.

    `response` are its token ids after the prompt, `mask` is 1 for each sampled one and 0 for each one of the
    environment. `logprobs` are nats at the temperature of the sampling, 0 for tokens of the environment, and None if
    the engine gives none. `routes` [n, layers, k] are the experts of all tokens of prompt and response but the last
    one, None if the engine gives none. `versions` names the policy of each of its segments, in their order. `fields`
    are plain numbers, strings and lists, the same names for every leaf:

    - segments: tokens of prompt and response before each segment, the first one is the length of the prompt
    - segment_ids: one number per segment, equal in two leaves of a tree if it is the same sampled segment
    - leaf_weight: the product of 1 / forks on its path; the weights of a tree sum to 1
    - leaf_weight_before_fallback: the weight before the first fallback, 0 for leaves that a fallback added
    - finish: the reason for its end (answer, stop, length, depth, repetition)
    """

    response: list[int]
    mask: list[int]
    logprobs: list[float] | None
    reward: float | None
    num_turns: int
    versions: list[str]
    fields: dict[str, Any]
    routes: NDArray[np.integer[Any]] | None = None


def read_leaves(tree: Tree) -> list[SampledLeaf]:
    """Return the leaves of `tree` in its order."""
    bare = replace(tree, query=replace(tree.query, fields={}))  # trainers keep the columns of a prompt themselves
    return [_read_leaf(record, leaf) for record, leaf in zip(tree_records(bare), tree.leaves, strict=True)]


def _read_leaf(record: dict[str, Any], leaf: TreeNode) -> SampledLeaf:
    nodes = leaf.path()[1:]
    logprobs = record.get("rollout_log_probs")
    return SampledLeaf(
        response=record["response_ids"].tolist(),
        mask=record["response_mask"].tolist(),
        logprobs=None if logprobs is None else logprobs.tolist(),
        reward=leaf.reward,
        num_turns=1 + sum(len(node.observation) > 0 for node in nodes[:-1]),
        versions=[node.version for node in nodes],
        fields={
            "segments": record["segments"],
            "segment_ids": record["segment_ids"],
            "leaf_weight": record["leaf_weight"],
            "leaf_weight_before_fallback": record.get("leaf_weight_before_fallback", record["leaf_weight"]),
            "finish": record["finish"],
        },
        routes=path_routes(leaf),
    )


def check_width(options: TreeOptions, *, caller: str, name: str) -> None:
    """Check that every tree of `options` has its width of leaves, whenever its paths end.

    Raises:
        TreepackError: a tree may have fewer; `name` is the setting of the trainer that the width comes from.
    """
    if options.fallback == "none" and options.forks_of_prompt[0] < options.width:
        raise TreepackError(
            f"{caller}: fallback is 'none', so a tree may have fewer leaves than {name}, which is {options.width}; use "
            "fallback='random', or first_forks=None for independent rollouts"
        )
