"""The policy that an arm trains, its sampler, and gradients of objectives on packed rollouts.

    folder of warm_up --start_learner--> Learner
    trie with advantages --accumulate--> gradients of the policy
    rollouts --learn--> new weights, from the groups in which some rollouts succeed and others fail

The sampler reads the weights that are trained, so nothing is copied after a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode import DecodeEngine, sampling_twin
from policies import load_task
from tasks import Task, has_both_outcomes

import treepack
from treepack.model.forward import WholeRows
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.objectives.row_numbers import LossPart
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.rollout.records import tree_trajectories
from treepack.rollout.tree import Tree
from treepack.trajectory import Trajectory
from treepack.trie.trie import Trie

CAPACITY = {"cuda": 16_384, "cpu": 2_048}  # tokens of a packed row
TOKENS = choose_objective("dapo")  # one mean over the tokens of a step
EDGES = choose_objective("grpo", denominator="edge")  # each edge of a tree counts once: TRACE, equation 47


@dataclass(frozen=True, slots=True)
class Learner:
    """The parts of an arm that keep a state: `policy` is trained in place, and `engine` samples from its weights."""

    task: Task
    policy: Any
    engine: DecodeEngine
    optimiser: torch.optim.Optimizer


def start_learner(folder: Path, *, device: str, rate: float) -> Learner:
    """Load the policy and the task of a warm-up; `rate` is the constant learning rate.

    Raises:
        TreepackError: the folder contains no policy.
    """
    task = load_task(folder)
    policy = treepack.load_model(folder, device=device)
    engine = DecodeEngine(sampling_twin(policy.causal), task.sampling)
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    return Learner(task, policy, engine, optimiser)


def trajectories_of(trees: Sequence[Tree]) -> list[Trajectory]:
    """Return the rollouts of trees, which may share groups."""
    return [rollout for tree in trees for rollout in tree_trajectories(tree)]


def accumulate(policy: Any, trie: Trie, objective: Objective, *, leaf_weights: bool = False) -> float:
    """Add the gradient of an objective on a trie with advantages to the policy's parameters, and return the loss."""
    # A search for a better plan would take longer than the passes of so small a model.
    options = treepack.PackOptions(capacity=CAPACITY[policy.device.type], effort="low", leaf_weights=leaf_weights)
    rows, total = list(treepack.plan_packing(trie, options)), 0.0
    for row, factors in zip(rows, row_factors(rows, objective), strict=True):
        batch = treepack.make_batch(row).to(policy.device)
        total += float(WholeRows(policy).backward(batch, LossPart(objective, factors)).loss)
    return total


def learn(learner: Learner, trees: Sequence[Tree], estimator: str, *, version: int) -> dict[str, float]:
    """Take one optimiser step on the groups with both outcomes; without such a group the weights stay as they are.

    `estimator` "treerpo" has its own objective. The policy is the one that sampled, so no ratio is clipped.

    Returns:
        The loss, the norm of the gradient before it is clipped to 1, and the tokens of the step's rollouts as
        sequences and as a tree; nothing if no group has both outcomes.
    """
    groups: dict[str, list[Tree]] = {}
    for tree in trees:
        groups.setdefault(tree.query.group_id, []).append(tree)
    chosen = [tree for group in groups.values() if has_both_outcomes(group) for tree in group]
    if not chosen:
        return {}
    trie = treepack.build_trie(trajectories_of(chosen))
    is_edge = estimator == "treerpo"
    segment = learner.task.segment if estimator.startswith("tree") else "auto"
    advantages = estimate_advantages(trie, treepack.AdvantageOptions(estimator, segment=segment, edges=is_edge))
    loss = accumulate(learner.policy, with_advantages(trie, advantages), EDGES if is_edge else TOKENS)
    norm = torch.nn.utils.clip_grad_norm_(learner.policy.model.parameters(), 1.0)
    learner.optimiser.step()
    learner.optimiser.zero_grad(set_to_none=True)
    asyncio.run(learner.engine.publish(str(version)))
    return {"loss": loss, "grad_norm": norm.item(), "shared": 1 - trie.tokens_tree / trie.tokens_flat}
