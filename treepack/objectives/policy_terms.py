"""The loss of a policy over some terms, and the sums for the step's means; `losses` has the formulas.

log-probabilities and entropies of tokens, terms of these tokens --term_sums--> sum of f w l, sums of w times each mean
"""

from __future__ import annotations

import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.objectives.objective import Objective
from treepack.objectives.surrogates import surrogate
from treepack.objectives.trajectory_ratios import TrajectoryRatios, gather_logprobs

# Names of the sums that `losses.objective_loss` returns besides "weight"; `term_sums` computes them in this order.
TERM_MEANS = (
    *("ratio", "clip_fraction_low", "clip_fraction_high", "old_kl", "kl", "entropy"),
    *("importance", "importance_square", "truncated", "sampler_kl", "masked"),
    *("divergence", "teacher_kl"),
)


def term_sums(
    logprobs: Tensor,
    entropies: Tensor,
    part: TermTensors,
    factors: Tensor,
    whole: TrajectoryRatios | None,
    objective: Objective,
    divergences: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of f w l over some terms, and the sums of w times each value of `TERM_MEANS`.

    `divergences` [n] are from the teacher; None if the objective reads none. `whole` has the ratios of the row's
    trajectories, None for an objective with `is_tokenwise`.
    """
    # All tensors of this function are [number of terms] until the sums at the end.
    current, old = gather_logprobs(logprobs, part)
    entropy = entropies.index_select(0, part.index).double()
    ratio, bounded = surrogate(current, old, part, whole, objective)
    mismatch = _mismatch(old, part, whole, objective)
    is_kept = _kept_terms(mismatch, part, whole, objective)
    importance = is_kept.double()
    if objective.importance_cap is not None:
        importance = importance * mismatch.exp().clamp(max=objective.importance_cap)
    # vespo has the sampler's ratio in the weight of the trajectory already.
    loss = -bounded.quantity * (is_kept if objective.loss == "vespo" else importance)
    kl = torch.zeros_like(current)
    if objective.kl:
        assert part.ref_logprob is not None
        kl = _kl(part.ref_logprob.double() - current, objective.kl_estimator)
        loss = loss + objective.kl * kl
    if objective.entropy:
        loss = loss - objective.entropy * entropy
    divergence = torch.zeros_like(current)
    if divergences is not None:
        divergence = divergences.index_select(0, part.index).double()
        loss = loss + objective.distill * divergence
    with torch.no_grad():
        cap = objective.importance_cap
        truncated = torch.zeros_like(is_kept) if cap is None else mismatch.exp() > cap
        sampler_kl = torch.zeros_like(old)
        if part.sampling_logprob is not None:
            sampler_kl = _kl(old - part.sampling_logprob.double(), "k3")
        columns = [ratio, bounded.low, bounded.high, _kl(current - old, "k3"), kl, entropy]
        columns += [importance, importance.square(), truncated, sampler_kl, ~is_kept, divergence]
        known = part.teacher_logprob
        columns.append(divergence if known is None else old - known.double())
        sums = torch.stack([(part.weight * column).sum() for column in columns])
    return (factors.index_select(0, part.trajectory) * part.weight * loss).sum(), sums


def _mismatch(old: Tensor, part: TermTensors, whole: TrajectoryRatios | None, objective: Objective) -> Tensor:
    """Return log(old / sampling probability) at the level of the objective; 0 if the sampler is not corrected."""
    if not objective.corrects_sampler:
        return torch.zeros_like(old)
    if objective.importance_level == "token":
        assert part.sampling_logprob is not None
        return old - part.sampling_logprob.double()
    assert whole is not None
    return whole.mismatch.index_select(0, part.trajectory)


def _kept_terms(mismatch: Tensor, part: TermTensors, whole: TrajectoryRatios | None, objective: Objective) -> Tensor:
    """Return which terms no mask leaves out, bool."""
    is_kept = torch.ones_like(mismatch, dtype=torch.bool)
    if objective.importance_mask is not None:
        low, high = objective.importance_mask
        is_kept = (mismatch.exp() >= low) & (mismatch.exp() <= high)
    if objective.sequence_mask is not None:
        assert whole is not None
        assert part.advantage is not None
        is_stale = whole.lag.index_select(0, part.trajectory) > objective.sequence_mask
        is_kept = is_kept & ~(is_stale & (part.advantage < 0))
    return is_kept


def _kl(x: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.exp() - 1 - x
