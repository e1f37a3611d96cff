"""Losses of pairs, such as dpo: of the shift of the chosen rollout minus that of the rejected one.

    terms --sum of logp - ref per rollout--> shifts [K] --preference_pairs--> differences [P] --Loss.surrogate--> loss

Source: Rafailov et al. 2023 (2305.18290), eq. 7.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treepack.data.batch import TermTensors
from treepack.objectives.objective import Objective
from treepack.objectives.term_slices import term_slices

# Names of the sums of `pair_loss` besides "weight", in the order in which it computes them.
PAIR_MEANS = ("accuracy", "margin", "chosen_reward", "rejected_reward")


def preference_pairs(
    group: Tensor, reward: Tensor, trained: Tensor, rollout: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return chosen and rejected rollouts, int64 [P] each: all pairs within a group with different rewards.

    A rollout is named by its first trajectory. O(K^2) in the K trajectories.

    Args:
        group: [K] integers.
        reward: [K]; a rollout with the reward NaN is in no pair.
        trained: bool [K]; a rollout without trained tokens is in no pair.
        rollout: [K] integers, the first trajectory of the rollout of each; None if each is a separate rollout.
    """
    if rollout is not None:
        # rollout [0, 0, 2], trained [F, T, F] -> [T, F, F]: only the first trajectory of a rollout is in pairs
        trained = torch.zeros_like(trained).index_put((rollout[trained].long(),), trained.new_tensor(True))
    # better[i, j]: i is chosen over j. Rewards [1, 0, 1, 2] of groups [0, 0, 0, 1] -> (0, 1), (2, 1)
    better = (group[:, None] == group) & (reward[:, None] > reward) & trained[:, None] & trained
    chosen, rejected = better.nonzero(as_tuple=True)
    return chosen, rejected


def pair_loss(
    logprobs: Tensor, terms: TermTensors, factors: Tensor, objective: Objective, *, chunk: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the sums of `losses.objective_loss` for a loss of pairs; "weight" is the number of pairs."""
    assert terms.reward is not None
    assert objective.definition.surrogate is not None
    num, beta = len(factors), objective.beta
    # h of each trajectory, [K]: the shift of its log-probability from that of the reference policy
    shifts = torch.zeros(num, dtype=torch.float64, device=logprobs.device) + logprobs.sum(dtype=torch.float64) * 0
    trained = torch.zeros(num, dtype=torch.bool, device=logprobs.device)
    for part in term_slices(terms, chunk):
        shifts = shifts + checkpoint(_shift_sums, logprobs, part, num, use_reentrant=False)
        trained[part.trajectory[part.weight > 0]] = True
    if terms.rollout is not None:  # the shift of a rollout is the sum over its trajectories
        shifts = torch.zeros_like(shifts).index_add(0, terms.rollout.long(), shifts)
    chosen, rejected = preference_pairs(terms.group, terms.reward, trained, terms.rollout)
    differences = shifts.index_select(0, chosen) - shifts.index_select(0, rejected)
    # Both trajectories of a pair have the same factor, 1 / number of pairs of the step.
    loss = -(objective.definition.surrogate(differences, objective) * factors.index_select(0, chosen)).sum()
    with torch.no_grad():
        implied_rewards = [beta * shifts.index_select(0, side).sum() for side in (chosen, rejected)]
        margins = beta * differences
        sums = [(margins > 0).double().sum(), margins.sum(), *implied_rewards]
    # The weight of a pair is 1, so "weight" is the number of pairs.
    return loss, {"weight": margins.new_tensor(len(margins)), **dict(zip(PAIR_MEANS, sums, strict=True))}


def _shift_sums(logprobs: Tensor, part: TermTensors, num_trajectories: int) -> Tensor:
    """Return the sum over each trajectory's trained tokens of logp - ref, float64 [num_trajectories]."""
    assert part.ref_logprob is not None
    # trajectory [0, 0, 1], shift [a, b, c] -> [a + b, c]; terms of weight 0 add nothing
    shift = logprobs.index_select(0, part.index).double() - part.ref_logprob.double()
    zeros = torch.zeros(num_trajectories, dtype=torch.float64, device=logprobs.device)
    return zeros.index_add(0, part.trajectory, shift * (part.weight > 0))
