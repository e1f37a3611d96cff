"""Ratios of policies over whole trajectories, for losses and masks that are about sequences.

    log-probabilities of tokens, terms --trajectory_ratios--> TrajectoryRatios: a number of each kind per trajectory

All are over the trained tokens of a trajectory (terms with weight), and have no gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.objectives.objective import Objective
from treepack.objectives.term_slices import term_slices

# VESPO: bounds of the log ratio of a token, and of that of a trajectory.
_TOKEN_BOUND, _LOWEST, _HIGHEST = 20.0, math.log(1e-8), 20.0


class TrajectoryRatios(NamedTuple):
    """Numbers of K trajectories, float64 [K] each."""

    drift: Tensor  # mean of logp - old
    clipped: Tensor  # the same of the log ratios that gmpo clips
    total: Tensor  # sum of logp - old, with old - sampling if the sampler is corrected, within bounds
    mismatch: Tensor  # log(old / sampling): sum or mean, see `importance_level`
    lag: Tensor  # mean of sampling - logp


def gather_logprobs(logprobs: Tensor, part: TermTensors, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return current and old log-probabilities of the terms, float64; old equals current if the data has none."""
    # logprobs [-1, -2, -3] of 3 tokens, index [0, 1, 0, 2] -> [-1, -2, -1, -3] of 4 terms
    current = logprobs.index_select(0, part.index).double()
    old = part.sampling_logprob if objective.old_logprobs == "sampler" else part.old_logprob
    return current, current.detach() if old is None else old.double()


@torch.no_grad()
def trajectory_ratios(
    logprobs: Tensor, terms: TermTensors, num_trajectories: int, objective: Objective, chunk: int
) -> TrajectoryRatios | None:
    """Return the ratios of the trajectories of a row; None for an objective that reads none.

    Args:
        logprobs: [n], of `terms.tokens`.
        terms: all terms of the row.
        num_trajectories: K.
        objective: a policy loss.
        chunk: terms whose values are in memory at a time.
    """
    if not objective.reads_trajectories:
        return None
    # Sums over all chunks, because a trajectory may span two; the last line counts trained tokens.
    sums = torch.zeros(6, num_trajectories, dtype=torch.float64, device=logprobs.device)
    for part in term_slices(terms, chunk):
        current, old = gather_logprobs(logprobs, part, objective)
        assert part.advantage is not None
        shift = current - old
        mismatch, lag = torch.zeros_like(shift), torch.zeros_like(shift)
        if part.sampling_logprob is not None:
            mismatch = old - part.sampling_logprob.double()
            lag = part.sampling_logprob.double() - current
        total = shift.clamp(-_TOKEN_BOUND, _TOKEN_BOUND)
        if objective.importance_cap is not None:
            total = total + mismatch.exp().clamp(objective.importance_floor, objective.importance_cap).log()
        trained = (part.weight > 0).double()
        columns = [shift, clip_log_ratio(shift, part.advantage, objective), total, mismatch, lag, trained]
        for line, column in zip(sums, columns, strict=True):
            line.index_add_(0, part.trajectory, column * trained)
    drift, clipped, total, mismatch, lag, count = sums
    count = count.clamp(min=1)
    if objective.importance_level != "sequence":
        mismatch = mismatch / count
    return TrajectoryRatios(drift / count, clipped / count, total.clamp(_LOWEST, _HIGHEST), mismatch, lag / count)


def clip_log_ratio(shift: Tensor, advantage: Tensor, objective: Objective) -> Tensor:
    """Return the log ratios of gmpo: clipped where the advantage pushes them further away, [n]."""
    # A > 0: min(x, clip(x)); A < 0: max(x, clip(x)); A = 0 contributes nothing anyway
    clipped = shift.clamp(-objective.clip_low, objective.clip_high)
    return torch.where(advantage < 0, torch.maximum(shift, clipped), torch.minimum(shift, clipped))
