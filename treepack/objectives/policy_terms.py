"""The loss of a policy over some terms, and the sums for the step's means; `losses` has the formulas.

log-probabilities and entropies of tokens, terms of these tokens --term_sums--> sum of f w l, sums of w times each mean
"""

from __future__ import annotations

import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.objectives.objective import Objective
from treepack.objectives.surrogates import Surrogate, TermNumbers
from treepack.objectives.trajectory_ratios import TrajectoryRatios, gather_logprobs

# Upper bounds of the positions of tokens for `sampler_kl`, and the names of its parts; the last part has no bound.
POSITIONS = (256, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
_PARTS = ("to_256", "to_1k", "to_4k", "to_16k", "to_64k", "beyond_64k")
SAMPLER_KL = tuple(f"sampler_kl_{part}" for part in _PARTS)
SAMPLER_WEIGHT = tuple(f"sampler_weight_{part}" for part in _PARTS)
# Names of the sums that `losses.objective_loss` returns besides "weight"; `term_sums` computes them in this order.
TERM_MEANS = (
    *("ratio", "clip_fraction_low", "clip_fraction_high", "old_kl", "kl", "entropy", "zero_advantage"),
    *("importance", "importance_square", "truncated", "masked", "divergence", "teacher_kl"),
    *(*SAMPLER_KL, *SAMPLER_WEIGHT),
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
    current, old = gather_logprobs(logprobs, part, objective)
    entropy = entropies.index_select(0, part.index).double()
    loss, numbers = objective.definition, _term_numbers(current, old, part, whole)
    assert loss.surrogate is not None
    bounded: Surrogate = loss.surrogate(numbers, objective)
    ratio = numbers.ratio if bounded.ratio is None else bounded.ratio
    low, high = (_or_nowhere(each, ratio) for each in (bounded.low, bounded.high))
    mismatch = _mismatch(old, part, whole, objective)
    is_kept = _kept_terms(mismatch, part, whole, objective)
    importance = is_kept.double()
    if objective.importance_cap is not None:
        importance = importance * mismatch.exp().clamp(objective.importance_floor, objective.importance_cap)
    # A surrogate that has the sampler's ratio is masked, but not weighed once more.
    total = -bounded.quantity * (is_kept if loss.weighs_sampler else importance)
    kl = torch.zeros_like(current)
    if objective.kl:
        assert part.ref_logprob is not None
        kl = _kl(part.ref_logprob.double() - current, objective.kl_estimator)
        if objective.kl_estimator == "unbiased":
            kl = kl * (current - old).exp()
        total = total + objective.kl * kl
    if objective.entropy:
        total = total - objective.entropy * entropy
    divergence = torch.zeros_like(current)
    if divergences is not None:
        divergence = divergences.index_select(0, part.index).double()
        total = total + objective.distill * divergence
    with torch.no_grad():
        cap = objective.importance_cap
        truncated = torch.zeros_like(is_kept)
        if cap is not None:
            truncated = (mismatch.exp() > cap) | (mismatch.exp() < objective.importance_floor)
        columns = [ratio, low, high, _kl(current - old, "k3"), kl, entropy, part.advantage == 0]
        known = part.teacher_logprob
        columns += [importance, importance.square(), truncated, ~is_kept, divergence]
        columns.append(divergence if known is None else old - known.double())
        sums = torch.stack([(part.weight * column).sum() for column in columns])
        # With the ratios of the sampler, `old` is the sampler and the trainer is the current policy.
        trainer = current if objective.old_logprobs == "sampler" else old
        sums = torch.cat([sums, *_sampler_kl(trainer, part)])
    return (factors.index_select(0, part.trajectory) * part.weight * total).sum(), sums


def _term_numbers(current: Tensor, old: Tensor, part: TermTensors, whole: TrajectoryRatios | None) -> TermNumbers:
    assert part.advantage is not None
    own = None if whole is None or whole.own is None else whole.own.index_select(0, part.trajectory)
    return TermNumbers(current, old, part.advantage, part, own)


def _or_nowhere(bounded: Tensor | None, ratio: Tensor) -> Tensor:
    return torch.zeros_like(ratio, dtype=torch.bool) if bounded is None else bounded


def _sampler_kl(trainer: Tensor, part: TermTensors) -> tuple[Tensor, Tensor]:
    """Return the sums over `SAMPLER_KL` of w times k3 between sampler and trainer, and of w, for known values."""
    of_parts, weights = trainer.new_zeros(2, len(SAMPLER_KL)).unbind()
    if part.sampling_logprob is None or part.position is None:
        return of_parts, weights
    # position [0 255 256 70000] -> place [0 0 1 5]
    bounds = torch.tensor(POSITIONS, dtype=part.position.dtype, device=part.position.device)
    place = torch.bucketize(part.position, bounds, right=True)
    kl = _kl(trainer - part.sampling_logprob.double(), "k3")
    is_known = ~kl.isnan()
    weight = part.weight * is_known
    return of_parts.index_add(0, place, torch.where(is_known, weight * kl, 0.0)), weights.index_add(0, place, weight)


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
