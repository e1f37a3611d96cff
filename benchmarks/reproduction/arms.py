"""The arms of the training curves as rows of data, and the loop that trains one of them.

    State --Arm.step--> (decoded tokens, figures of the step)        the weights of state.learner have changed
    policy, arm, seed --train--> records, one for each step

Every arm starts from the weights of the policy. Arms of one seed have the same prompts in the same order, and all runs
the same held-out prompts. Tokens of evaluations do not count.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from learner import Learner, learn, start_learner
from policies import evaluate, held_out_queries
from tasks import has_both_outcomes, pass_rates, sample_trees

from treepack.rollout.engine import derived_seed
from treepack.rollout.query import Query
from treepack.rollout.tree import Tree


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a step and of an evaluation."""

    prompts: int = 32  # groups of a step
    width: int = 16  # rollouts of a group
    rate: float = 3e-4  # learning rate
    eval_prompts: int = 256
    eval_samples: int = 4  # rollouts of each held-out prompt
    evaluations: int = 5  # of a run after the first one


@dataclass(slots=True)
class State:
    """A run: what an arm may use and change."""

    learner: Learner
    sizes: Sizes
    seed: int
    step: int = 0

    def queries(self, num: int) -> list[Query]:
        """Return the prompts of this step: the same ones for all arms of a seed."""
        return self.learner.task.queries(num, seed=self.step_seed("prompts"))

    def step_seed(self, name: str) -> int:
        """Return a seed for a purpose, which differs from step to step."""
        return derived_seed(self.seed, self.step, name) % 2**31


class Arm(Protocol):
    """A way to choose queries, sample rollouts and assign credit."""

    def step(self, state: State) -> tuple[int, dict[str, Any]]:
        """Sample, take one optimiser step, and return the decoded tokens and figures."""
        ...


@dataclass(frozen=True, slots=True)
class PlainArm:
    """New prompts in every step, each with one group of rollouts."""

    estimator: str
    trees: bool = False  # TreePO's trees of as many leaves, or independent rollouts
    narrow: bool = False  # fewer independent rollouts: about the tokens, and so the number of steps, of the trees

    def step(self, state: State) -> tuple[int, dict[str, Any]]:
        """Train on the rollouts of new prompts."""
        task, width = state.learner.task, state.sizes.width
        if self.narrow:
            width = max(2, round(task.tree_share * width))
        shape = task.tree(width) if self.trees else task.independent(width)
        queries = state.queries(state.sizes.prompts)
        trees = sample_trees(task, queries, state.learner.engine, shape, seed=state.step_seed("rollouts"))
        figures = learn(state.learner, trees, self.estimator, version=state.step)
        return sum(tree.usage.decoded for tree in trees), figures | sampled_figures(trees)


def sampled_figures(trees: list[Tree]) -> dict[str, float]:
    """Return the mean reward of an independent rollout of the step's prompts, and counts of its trees."""
    return {
        "reward": float(np.mean(pass_rates(trees))),
        "leaves": sum(len(tree.leaves) for tree in trees),
        "mixed_share": float(np.mean([has_both_outcomes([tree]) for tree in trees])),
    }


def train(
    policy: Path, name: str, arm: Arm, sizes: Sizes, *, seed: int, tokens: float, minutes: float, device: str
) -> Iterator[dict[str, Any]]:
    """Train an arm until it has decoded `tokens` or needed `minutes`, and yield a record after each step.

    Step 0 is the evaluation before the training.
    """
    begin = time.monotonic()
    learner = start_learner(policy, device=device, rate=sizes.rate)
    held_out = held_out_queries(learner.task, sizes.eval_prompts)

    def pass_rate() -> float:
        return float(np.mean(evaluate(learner.task, learner.engine, held_out, samples=sizes.eval_samples)))

    state, decoded, evaluated = State(learner, sizes, seed), 0, 0
    names = {"task": learner.task.name, "arm": name, "seed": seed}
    yield names | {"step": 0, "decoded": 0, "pass_rate": pass_rate(), "sizes": dataclasses.asdict(sizes)}
    is_last = False
    while not is_last:
        started = time.monotonic()
        state.step += 1
        spent, figures = arm.step(state)
        decoded += spent
        seconds = time.monotonic() - started
        is_last = decoded >= tokens or time.monotonic() - begin > 60 * minutes
        record = names | {"step": state.step, "decoded": decoded, "seconds": round(seconds, 4), **figures}
        # An evaluation every 100 tokens, decoded 90, 130, 250: they follow the second and the third step.
        if is_last or decoded * sizes.evaluations // tokens > evaluated:
            evaluated = int(decoded * sizes.evaluations // tokens)
            record["pass_rate"] = pass_rate()
        yield record
