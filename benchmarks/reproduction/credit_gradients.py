"""Gradients of the policy as vectors: the reference from independent rollouts, and those of the estimators on trees.

    independent rollouts of each prompt --reference_halves--> two vectors, whose mean is the exact gradient plus noise
    trees --estimator_gradient--> the vector of one tree for each prompt

All are gradients to ascend, of the mean over the prompts of the expected reward:

    g = 1/Q sum_q  1/n sum_i A_qi sum_t d log p(token t of rollout i)

The reference has A_qi = R_qi - b_q, with b_q the mean reward of the prompt's rollouts in the other half, which does not
depend on rollout i. An estimator gives its own A, for rollouts or tokens; `treerpo, edges` is TreeRPO's own objective
with one mean over the tokens of each edge (TRACE, equation 47). With leaf weights, rollouts are weighted in A and in
the sum over i. The rollouts are packed, so every token of a tree is computed once. Nothing is clipped, because the
policy that sampled is the one whose gradient is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from learner import trajectories_of
from tasks import pass_rates
from torch import Tensor

import treepack
from treepack.model.forward import WholeRows
from treepack.model.objectives.objective import Objective, choose_objective
from treepack.model.objectives.row_factors import row_factors
from treepack.model.objectives.row_numbers import LossPart
from treepack.rl.advantages.estimate import AdvantageEstimates, estimate_advantages, with_advantages
from treepack.rollout.tree import Tree
from treepack.trajectory import Float64
from treepack.trie.trie import Trie

SUM = choose_objective("dr_grpo", response_length=1)  # 1/N sum_i sum_t: no division by lengths
EDGES = choose_objective("grpo", denominator="edge")


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator of advantages, with the objective that takes them. `on_trees` is false for independent rollouts."""

    options: dict[str, Any]
    objective: Objective = field(default=SUM)
    on_trees: bool = True


_TREE: dict[str, Estimator] = {
    "dr-grpo": Estimator({"estimator": "dr-grpo"}),
    "grpo": Estimator({"estimator": "grpo"}),
    "treepo": Estimator({"estimator": "treepo"}),
    "treepo, size-weighted": Estimator({"estimator": "treepo", "size_weighted": True}),
    "treepo, without root": Estimator({"estimator": "treepo", "without_root": True}),
    "treepo, reject subgroups": Estimator({"estimator": "treepo", "reject_subgroups": True}),
    "treerpo": Estimator({"estimator": "treerpo"}),
    "treerpo, edges": Estimator({"estimator": "treerpo", "edges": True}, EDGES),
    "tree-grpo": Estimator({"estimator": "tree-grpo"}),
    "tree-grpo, per segment": Estimator({"estimator": "tree-grpo", "per_segment": True}),
}
ESTIMATORS: dict[str, Estimator] = {
    **_TREE,
    **{
        f"{name}, leaf weights": Estimator(each.options | {"leaf_weights": True}, each.objective)
        for name, each in _TREE.items()
        if each.objective is not EDGES  # an edge counts once, whatever its leaves weigh, so `pack` refuses both
    },
    "independent, dr-grpo": Estimator({"estimator": "dr-grpo"}, on_trees=False),
    "independent, grpo": Estimator({"estimator": "grpo"}, on_trees=False),
}


def reference_halves(
    policy: Any, batches: Iterator[tuple[list[Tree], list[Tree]]], *, capacity: int
) -> tuple[Tensor, Float64]:
    """Return two independent estimates of the gradient, and the pass rate of each prompt.

    Args:
        policy: the loaded model.
        batches: for each part of the prompts, the independent rollouts of the first half and of the second half, one
            tree for each prompt in the same order.
        capacity: tokens of a packed row.

    Returns:
        float32 [2, P] on the policy's device, and float64 [num_prompts].
    """
    sums, rates, count = None, [], 0
    for halves in batches:
        means = [pass_rates(half) for half in halves]
        parts = torch.stack(
            [
                trie_gradient(policy, _minus_baseline(half, baseline), SUM, capacity=capacity)
                for half, baseline in zip(halves, reversed(means), strict=True)
            ]
        )
        # A part is a mean over its prompts, so it counts as many times.
        sums = len(halves[0]) * parts if sums is None else sums + len(halves[0]) * parts
        rates.append(np.mean(means, axis=0))
        count += len(halves[0])
    assert sums is not None, "there are no prompts"
    return sums / count, np.concatenate(rates)


def _minus_baseline(trees: Sequence[Tree], baseline: Float64) -> Trie:
    """Return the rollouts of `trees` with their reward minus the `baseline` of their tree as advantage."""
    trie = trie_of(trees)
    of_group = {tree.query.group_id: value for tree, value in zip(trees, baseline.tolist(), strict=True)}
    groups = trie.trajectories["group_id"].to_pylist()
    advantage = trie.trajectories["reward"].to_numpy() - np.array([of_group[group] for group in groups])
    kept = np.arange(trie.num_trajectories)
    return with_advantages(trie, AdvantageEstimates(kept, advantage, None, Counter(), len(trees), None))


def trie_of(trees: Sequence[Tree]) -> Trie:
    """Return the trie of the rollouts of trees."""
    return treepack.build_trie(trajectories_of(trees))


def estimator_gradient(policy: Any, trie: Trie, estimator: Estimator, *, segment: str, capacity: int) -> Tensor:
    """Return the gradient that an estimator takes from one tree for each prompt, float32 [P].

    A tree with equal rewards has advantages of 0 and counts among the prompts; a whole step of such trees gives 0.

    Args:
        policy: the loaded model.
        trie: the rollouts of one tree for each prompt, as `trie_of` returns them.
        estimator: the estimator.
        segment: segments of estimators on the tree, as in `AdvantageOptions`.
        capacity: tokens of a packed row.
    """
    reward = trie.trajectories["reward"].to_numpy()
    groups = trie.trajectories["group_id"].to_pylist()
    outcomes: dict[str, set[float]] = {}
    for group, value in zip(groups, reward.tolist(), strict=True):
        outcomes.setdefault(group, set()).add(value)
    if all(len(values) == 1 for values in outcomes.values()):
        return torch.zeros_like(_flat(policy))
    more: dict[str, Any] = {} if estimator.options["estimator"] in ("grpo", "dr-grpo") else {"segment": segment}
    options = treepack.AdvantageOptions(**estimator.options, **more, rejected="zero", reject_equal=False)
    trie = with_advantages(trie, estimate_advantages(trie, options), rejected="zero")
    weighted = options.leaf_weights
    return trie_gradient(policy, trie, estimator.objective, capacity=capacity, leaf_weights=weighted)


def trie_gradient(
    policy: Any, trie: Trie, objective: Objective, *, capacity: int, leaf_weights: bool = False
) -> Tensor:
    """Return minus the gradient of an objective on a trie with advantages, float32 [P]; parameters in model order."""
    # A search for a better plan would take longer than the passes of so small a model.
    packing = treepack.PackOptions(capacity=capacity, effort="low", leaf_weights=leaf_weights)
    rows = list(treepack.plan_packing(trie, packing))
    policy.model.zero_grad(set_to_none=False)
    for row, factors in zip(rows, row_factors(rows, objective), strict=True):
        batch = treepack.make_batch(row).to(policy.device)
        WholeRows(policy).backward(batch, LossPart(objective, factors))
    gradient = _flat(policy).neg_()
    policy.model.zero_grad(set_to_none=True)
    return gradient


def _flat(policy: Any) -> Tensor:
    """Return a copy of the gradients of all parameters in one vector, 0 for those without one."""
    parts = [
        torch.zeros_like(weights) if weights.grad is None else weights.grad for weights in policy.model.parameters()
    ]
    return torch.cat([part.flatten() for part in parts])
