"""The part that all arms have in common: the policy, its sampler, one optimiser step, an evaluation.

    folder of warm_up.py --start_learner--> Learner
    Learner, rollouts --learn--> new weights, from the groups in which some rollouts succeed and others fail
    Learner, held-out prompts --evaluate--> pass rate of each prompt

The engine samples from the weights that are trained, so nothing is copied after a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import DecodeEngine
from policy import MAX_POSITIONS
from tasks import Task, pass_rates, sample_trees
from warm_up import EVALUATION_SEED, load_task

import treepack
from treepack.model.forward import row_logprobs
from treepack.model.objectives.losses import objective_loss
from treepack.model.objectives.objective import choose_objective
from treepack.model.objectives.row_factors import row_factors
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.rollout.query import Query
from treepack.rollout.records import tree_trajectories
from treepack.rollout.tree import Tree
from treepack.trajectory import Float64, Trajectory

CAPACITY = {"cuda": 16_384, "cpu": 2_048}  # tokens of a packed row
EVALUATION_SAMPLES_SEED = 11


@dataclass(frozen=True, slots=True)
class Learner:
    """The parts of an arm that keep a state: `policy` is trained in place, and `engine` samples from its weights."""

    task: Task
    policy: Any
    engine: DecodeEngine
    optimiser: torch.optim.Optimizer

    @property
    def capacity(self) -> int:
        """Tokens of a packed row."""
        return CAPACITY[self.policy.device.type]

    @property
    def segment(self) -> str:
        """Segments of a rollout: turns, or the lines of a single turn, which have 6 tokens each in the task steps."""
        return "turn" if self.task.max_turns > 1 else "6"


def start_learner(folder: Path, *, device: str, rate: float, rows: int) -> Learner:
    """Load the policy and the task of a warm-up.

    Args:
        folder: written by warm_up.py.
        device: of the weights.
        rate: learning rate of the policy, constant.
        rows: sequences that the engine decodes at once.

    Raises:
        TreepackError: the folder has no policy.
    """
    task = load_task(folder)
    policy = treepack.load_model(folder, device=device)
    # A group may continue a prefix, so prompt and rollout are at most one whole rollout.
    longest = min(MAX_POSITIONS, 64 + task.max_tokens)
    engine = DecodeEngine(policy.causal, task.sampling, rows=rows, longest=longest)
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    return Learner(task, policy, engine, optimiser)


def evaluation_queries(task: Task, num: int) -> list[Query]:
    """Return the held-out prompts, which no arm trains."""
    return task.queries(num, seed=EVALUATION_SEED)


def evaluate(learner: Learner, queries: Sequence[Query], *, samples: int) -> Float64:
    """Return the pass rate of independent rollouts of each query, float64 [n], with the same seeds every time."""
    options = learner.task.independent(samples)
    return pass_rates(sample_trees(learner.task, queries, learner.engine, options, seed=EVALUATION_SAMPLES_SEED))


def trajectories_of(trees: Sequence[Tree]) -> list[Trajectory]:
    """Return the rollouts of trees, which may share groups."""
    return [rollout for tree in trees for rollout in tree_trajectories(tree)]


def is_mixed(rewards: Sequence[float]) -> bool:
    """Return True if some rewards are above 0 and others are not."""
    passed = np.asarray(rewards) > 0
    return bool(passed.any() and not passed.all())


def mixed_groups(rollouts: Sequence[Trajectory]) -> set[str]:
    """Return the groups in which some rollouts succeed and others fail."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(str(rollout.group_id), []).append(rollout.reward or 0.0)
    return {group for group, values in rewards.items() if is_mixed(values)}


def learn(learner: Learner, rollouts: Sequence[Trajectory], estimator: str) -> dict[str, float]:
    """Take one optimiser step on the groups with both outcomes; without such a group the weights stay as they are.

    `estimator` "treerpo" has its own objective, in which each edge of a tree counts once (TRACE, equation 47); the
    others have one mean over the tokens of the step. The policy is the one that sampled, so no ratio is clipped.

    Returns:
        The loss, the norm of the gradient before it is clipped to 1, and the mean distance between log-probabilities of
        the trainer and of the sampler; nothing if no group has both outcomes.
    """
    groups = mixed_groups(rollouts)
    chosen = [rollout for rollout in rollouts if rollout.group_id in groups]
    if not chosen:
        return {}
    trie = treepack.build_trie(chosen)
    is_edge = estimator == "treerpo"
    segment = learner.segment if estimator.startswith("tree") else "auto"
    advantages = estimate_advantages(trie, treepack.AdvantageOptions(estimator, segment=segment, edges=is_edge))
    objective = choose_objective("grpo" if is_edge else "dapo", denominator="edge" if is_edge else "token")
    # A search for a better plan would take longer than the passes of so small a model.
    packing = treepack.PackOptions(capacity=learner.capacity, effort="low")
    rows = list(treepack.plan_packing(with_advantages(trie, advantages), packing))
    loss = gap = terms = 0.0
    for row, factors in zip(rows, row_factors(rows, objective), strict=True):
        batch = treepack.make_batch(row).to(learner.policy.device)
        assert batch.terms is not None
        assert batch.terms.sampling_logprob is not None
        scores = row_logprobs(learner.policy, batch, batch.terms.tokens)
        value, _ = objective_loss(*scores, batch.terms, factors.to(learner.policy.device), objective)
        torch.autograd.backward(value)
        gaps = (scores[0].detach()[batch.terms.index] - batch.terms.sampling_logprob).abs()
        loss, gap, terms = loss + value.item(), gap + gaps.sum().item(), terms + len(gaps)
    norm = torch.nn.utils.clip_grad_norm_(learner.policy.model.parameters(), 1.0)
    learner.optimiser.step()
    learner.optimiser.zero_grad(set_to_none=True)
    return {"loss": loss, "grad_norm": norm.item(), "sampler_gap": gap / max(1.0, terms)}


def publish(learner: Learner, version: int) -> None:
    """Name the policy of the rollouts to come."""
    asyncio.run(learner.engine.publish(str(version)))
