"""The loss of a policy over some terms, and the sums for the step's means; `objectives` has the formulas.

log-probabilities and entropies of tokens, terms of these tokens --term_sums--> sum of f w l, sums of w times each mean
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.model.objectives.objective import Objective

# Names of the sums that `objectives.objective_loss` returns besides "weight"; `term_sums` computes them in this order.
TERM_MEANS = ("ratio", "clip_fraction_low", "clip_fraction_high", "old_kl", "kl", "entropy", "importance", "truncated")


def gather_logprobs(logprobs: Tensor, part: TermTensors) -> tuple[Tensor, Tensor]:
    """Return current and old log-probabilities of the terms, float64; old equals current if the data has none."""
    # logprobs [-1, -2, -3] of 3 tokens, index [0, 1, 0, 2] -> [-1, -2, -1, -3] of 4 terms
    current = logprobs.index_select(0, part.index).double()
    return current, current.detach() if part.old_logprob is None else part.old_logprob.double()


def term_sums(
    logprobs: Tensor,
    entropies: Tensor,
    part: TermTensors,
    factors: Tensor,
    log_ratios: Tensor | None,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """Return the sum of f w l over some terms, and the sums of w times each value of `TERM_MEANS`."""
    # All tensors of this function are [number of terms] until the sums at the end.
    current, old = gather_logprobs(logprobs, part)
    entropy = entropies.index_select(0, part.index).double()
    if log_ratios is None:
        ratio = (current - old).exp()
    else:
        # gspo: current - current.detach() is 0, so the value is s_i, but the gradient goes to the log-probability here.
        ratio = (log_ratios.index_select(0, part.trajectory) + current - current.detach()).exp()
    assert part.advantage is not None
    loss = -_surrogate(ratio, current, part.advantage, objective)
    importance = torch.ones_like(old)
    if objective.importance_cap is not None:
        assert part.sampling_logprob is not None
        importance = (old - part.sampling_logprob.double()).exp()
        loss = loss * importance.clamp(max=objective.importance_cap)
    kl = torch.zeros_like(current)
    if objective.kl:
        assert part.ref_logprob is not None
        kl = _kl(part.ref_logprob.double() - current, objective.kl_estimator)
        loss = loss + objective.kl * kl
    if objective.entropy:
        loss = loss - objective.entropy * entropy
    with torch.no_grad():
        low, high = ratio < 1 - objective.clip_low, ratio > 1 + objective.clip_high
        # min(r A, clip(r) A) takes the clipped value only if it is smaller: a high r if A > 0, a low r if A < 0.
        if objective.loss != "cispo":
            low, high = low & (part.advantage < 0), high & (part.advantage > 0)
        drift = current - old  # x of old_kl = exp(x) - 1 - x, which is k3
        cap = math.inf if objective.importance_cap is None else objective.importance_cap
        columns = [ratio, low, high, drift.exp() - 1 - drift, kl, entropy, importance.clamp(max=cap), importance > cap]
        sums = torch.stack([(part.weight * column).sum() for column in columns])
    return (factors.index_select(0, part.trajectory) * part.weight * loss).sum(), sums


def _surrogate(ratio: Tensor, current: Tensor, advantage: Tensor, objective: Objective) -> Tensor:
    """Return the quantity to maximise for each term: -l without kl and entropy."""
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.loss == "cispo":
        return clipped.detach() * advantage * current
    smaller = torch.minimum(ratio * advantage, clipped * advantage)
    if objective.dual_clip is None:
        return smaller
    # A = -1, dual_clip 3, ratio 10: max(-10, -3) = -3, a constant, so a huge ratio gets no gradient
    return torch.where(advantage < 0, torch.maximum(smaller, objective.dual_clip * advantage), smaller)


def _kl(x: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.exp() - 1 - x
