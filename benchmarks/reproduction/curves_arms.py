"""The arms of the training curves: functions that sample rollouts, train the policy once, and count the tokens.

    State --arm--> (decoded tokens, figures of the step)        the weights of state.learner have changed

    grpo     independent rollouts, advantages of GRPO            the others sample TreePO's trees of as many leaves,
    treepo   advantages of TreePO, equation 5                    which decode fewer tokens, so at equal decoded tokens
    treerpo  TreeRPO with its own objective (TRACE, eq. 47)      they take more steps
    grpo-narrow   fewer independent rollouts, so that it takes as many steps as treepo
    tree-grpo, tree-flat   Tree-GRPO; GRPO's advantages on trees: sampling alone

An arm of another file is a function of the same form, with a line in `curves.ARMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from learner import Learner, is_mixed, learn, publish, trajectories_of
from tasks import Task, pass_rates, sample_trees

from treepack.rollout.engine import derived_seed
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.tree import Tree

# Tokens of a leaf of TreePO's trees as a share of those of an independent rollout, before the training.
TREE_SHARE = {"steps": 9 / 16, "maze": 10 / 16}
TOKENS_OF_SEGMENT = 6  # of the task steps: a line, 1/13 of the longest response; the maze forks after turns


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a step, `prompts` groups of `width` rollouts, and of an evaluation, `eval_samples` for each prompt."""

    prompts: int = 32
    width: int = 16
    eval_prompts: int = 512
    eval_samples: int = 8


@dataclass(slots=True)
class State:
    """The argument of an arm: the policy that it trains, and its place in the run.

    `step` is 1 at the first step. `memory` is the arm's own, for values that it needs in later steps.
    """

    learner: Learner
    sizes: Sizes
    seed: int
    step: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    def queries(self, num: int | None = None) -> list[Query]:
        """Return the prompts of this step, `sizes.prompts` by default: the same ones for all arms of a seed."""
        return self.learner.task.queries(num or self.sizes.prompts, seed=self.step_seed("prompts"))

    def step_seed(self, name: str) -> int:
        """Return a seed for a purpose, which differs from step to step."""
        return derived_seed(self.seed, self.step, name) % 2**31


Arm = Callable[[State], tuple[int, dict[str, float]]]


def tree_shape(task: Task, width: int) -> TreeOptions:
    """Return the shape of TreePO's trees: two branches at each segment until there are `width` paths."""
    segment = TOKENS_OF_SEGMENT if task.max_turns == 1 else None
    return TreeOptions(width=width, max_tokens=task.max_tokens, segment=segment, depth=None, max_repeats=0)


def grpo(state: State) -> tuple[int, dict[str, float]]:
    """Train on independent rollouts."""
    return _train(state, state.learner.task.independent(state.sizes.width), "grpo")


def grpo_narrow(state: State) -> tuple[int, dict[str, float]]:
    """Train on fewer independent rollouts: about as many tokens in a step, and so as many steps, as with trees."""
    width = max(2, round(TREE_SHARE[state.learner.task.name] * state.sizes.width))
    return _train(state, state.learner.task.independent(width), "grpo")


def treepo(state: State) -> tuple[int, dict[str, float]]:
    """Train on trees with the advantages of TreePO."""
    return _train(state, tree_shape(state.learner.task, state.sizes.width), "treepo")


def treerpo(state: State) -> tuple[int, dict[str, float]]:
    """Train on trees with the advantages and the objective of TreeRPO."""
    return _train(state, tree_shape(state.learner.task, state.sizes.width), "treerpo")


def tree_grpo(state: State) -> tuple[int, dict[str, float]]:
    """Train on trees with the advantages of Tree-GRPO."""
    return _train(state, tree_shape(state.learner.task, state.sizes.width), "tree-grpo")


def tree_flat(state: State) -> tuple[int, dict[str, float]]:
    """Train on trees with the advantages of GRPO, which do not look at the tree."""
    return _train(state, tree_shape(state.learner.task, state.sizes.width), "grpo")


def _train(state: State, shape: TreeOptions, estimator: str) -> tuple[int, dict[str, float]]:
    learner = state.learner
    trees = sample_trees(learner.task, state.queries(), learner.engine, shape, seed=state.step_seed("rollouts"))
    figures = learn(learner, trajectories_of(trees), estimator)
    publish(learner, state.step)
    return sum(tree.usage.decoded for tree in trees), figures | sampled_figures(trees)


def sampled_figures(trees: list[Tree]) -> dict[str, float]:
    """Return the mean reward of an independent rollout of the step's prompts, and counts of its trees."""
    return {
        "reward": float(np.mean(pass_rates(trees))),
        "leaves": sum(len(tree.leaves) for tree in trees),
        "mixed": sum(is_mixed([leaf.reward or 0.0 for leaf in tree.leaves]) for tree in trees),
    }
