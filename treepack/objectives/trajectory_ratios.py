"""Ratios of policies over whole trajectories or rollouts, for losses and masks that are about sequences.

    log-probabilities of tokens, terms --trajectory_ratios--> TrajectoryRatios: a number of each kind per trajectory

All are over the trained tokens of a trajectory (terms with weight), and have no gradient. A slow form, for x the number
of each term t and a trajectory i:

    sum_i = the sum of x_t over the terms t of i whose weight is above 0;  mean_i = sum_i / the number of these terms

With `sequence_of` "rollout", i is a rollout, and each of its trajectories has the number of the rollout:

    rollout of each trajectory  0 0 2     sums of trajectories  a b c     numbers  a+b a+b c
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.objectives.objective import Objective
from treepack.objectives.surrogates import TermNumbers
from treepack.objectives.term_slices import term_slices


class TrajectoryRatios(NamedTuple):
    """Numbers of K trajectories, float64 [K] each."""

    own: Tensor | None  # of the loss: `Loss.whole`; None if the loss has none
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
    whole = objective.definition.whole
    # Sums over all chunks, because a trajectory may span two; the last line counts trained tokens.
    sums = torch.zeros(4, num_trajectories, dtype=torch.float64, device=logprobs.device)
    sequence = terms.rollout.long() if objective.sequence_of == "rollout" and terms.rollout is not None else None
    for part in term_slices(terms, chunk):
        current, old = gather_logprobs(logprobs, part, objective)
        assert part.advantage is not None
        own = mismatch = lag = torch.zeros_like(current)
        if whole is not None:
            own = whole.of(TermNumbers(current, old, part.advantage, part), objective)
        if part.sampling_logprob is not None:
            mismatch = old - part.sampling_logprob.double()
            lag = part.sampling_logprob.double() - current
        trained = (part.weight > 0).double()
        for line, column in zip(sums, (own, mismatch, lag, trained), strict=True):
            line.index_add_(0, part.trajectory, column * trained)
    if sequence is not None:
        sums = torch.zeros_like(sums).index_add(1, sequence, sums).index_select(1, sequence)
    own, mismatch, lag, count = sums
    count = count.clamp(min=1)
    if objective.importance_level != "sequence":
        mismatch = mismatch / count
    if whole is None:
        return TrajectoryRatios(None, mismatch, lag / count)
    own = own / count if whole.mean else own
    return TrajectoryRatios(own if whole.bounds is None else own.clamp(*whole.bounds), mismatch, lag / count)
