"""The quantity that a policy loss maximises for each term, and its ratio; `losses` has the formulas.

log-probabilities, advantages, numbers of whole trajectories --surrogate--> ratio, quantity, terms beyond the bounds
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.objectives.objective import Objective
from treepack.objectives.trajectory_ratios import TrajectoryRatios, clip_log_ratio

_TINY = 1e-8  # keeps log(1 - p) finite for a token of probability 1


class TermRatios(NamedTuple):
    """Values of n terms, [n] each; float64, without a graph if the ratio is only a weight."""

    current: Tensor  # log-probability, with a graph
    old: Tensor
    ratio: Tensor  # of the current and the old policy
    advantage: Tensor


class Surrogate(NamedTuple):
    """The quantity of a loss for n terms, [n] each."""

    quantity: Tensor  # to maximise: minus the loss, without kl and entropy
    low: Tensor  # bool: the term is bounded because its ratio is low
    high: Tensor  # bool: the same, because its ratio is high


def surrogate(
    current: Tensor, old: Tensor, part: TermTensors, whole: TrajectoryRatios | None, objective: Objective
) -> tuple[Tensor, Surrogate]:
    """Return the ratio of each term, and what the loss makes of it.

    Args:
        current: float64 [n], log-probabilities of the terms, with a graph.
        old: float64 [n].
        part: the terms, with advantages.
        whole: numbers of the trajectories; None for an objective with `is_tokenwise`.
        objective: a policy loss.
    """
    assert part.advantage is not None
    ratio = (current - old).exp()
    if objective.loss in ("gspo", "gmpo"):
        assert whole is not None
        own, mean = current, whole.drift
        if objective.loss == "gmpo":
            own, mean = clip_log_ratio(current - old, part.advantage, objective), whole.clipped
        # own - own.detach() is 0, so the value is that of the trajectory, but the gradient goes to this token.
        ratio = (mean.index_select(0, part.trajectory) + own - own.detach()).exp()
    terms = TermRatios(current, old, ratio, part.advantage)
    if objective.loss == "vespo":
        assert whole is not None
        return ratio, _weighted(terms, _vespo_weight(whole.total.index_select(0, part.trajectory), terms, objective))
    return ratio, _SURROGATES[objective.loss](terms, objective)


def _clipped(terms: TermRatios, objective: Objective) -> Surrogate:
    ratio, advantage = terms.ratio, terms.advantage
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    smaller = torch.minimum(ratio * advantage, clipped * advantage)
    if objective.dual_clip is not None:
        # A = -1, dual_clip 3, ratio 10: max(-10, -3) = -3, a constant, so a huge ratio gets no gradient
        smaller = torch.where(advantage < 0, torch.maximum(smaller, objective.dual_clip * advantage), smaller)
    # min(r A, clip(r) A) takes the clipped value only if it is smaller: a high r if A > 0, a low r if A < 0.
    low, high = _outside(ratio, objective)
    return Surrogate(smaller, low & (advantage < 0), high & (advantage > 0))


def _cispo(terms: TermRatios, objective: Objective) -> Surrogate:
    weight = terms.ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return Surrogate(_weighted(terms, weight).quantity, *_outside(terms.ratio, objective))


def _gmpo(terms: TermRatios, objective: Objective) -> Surrogate:
    # The ratio has been clipped token by token.
    shift = terms.current - terms.old
    low, high = shift < -objective.clip_low, shift > objective.clip_high
    return Surrogate(terms.ratio * terms.advantage, low & (terms.advantage < 0), high & (terms.advantage > 0))


def _sapo(terms: TermRatios, objective: Objective) -> Surrogate:
    temperature = _by_sign(terms.advantage > 0, "temperature", objective)
    gate = torch.sigmoid(temperature * (terms.ratio - 1)) * 4 / temperature
    return Surrogate(gate * terms.advantage, *_nowhere(terms))


def _dppo_tv(terms: TermRatios, objective: Objective) -> Surrogate:
    move = terms.current.exp() - terms.old.exp()
    return _trusted(terms, objective, move < -objective.clip_low, move > objective.clip_high)


def _dppo_kl(terms: TermRatios, objective: Objective) -> Surrogate:
    p, q = terms.current.exp(), terms.old.exp()
    divergence = q * (terms.old - terms.current) + (1 - q) * torch.log((1 - q + _TINY) / (1 - p + _TINY))
    return _trusted(
        terms, objective, (divergence > objective.clip_low) & (p < q), (divergence > objective.clip_high) & (p > q)
    )


def _trusted(terms: TermRatios, objective: Objective, low: Tensor, high: Tensor) -> Surrogate:
    """Leave out the terms that have moved too far in the direction in which their advantage pushes them."""
    low, high = low & (terms.advantage <= 0), high & (terms.advantage > 0)
    cap = math.inf if objective.dual_clip is None else objective.dual_clip
    return Surrogate(_weighted(terms, terms.ratio.clamp(max=cap) * ~(low | high)).quantity, low, high)


def _dro(terms: TermRatios, objective: Objective) -> Surrogate:
    square = (terms.current - terms.old).square()
    return Surrogate(terms.current * terms.advantage - objective.beta / 2 * square, *_nowhere(terms))


def _reinforce(terms: TermRatios, objective: Objective) -> Surrogate:
    return _weighted(terms, torch.ones_like(terms.ratio))


def _weighted(terms: TermRatios, weight: Tensor) -> Surrogate:
    return Surrogate(weight.detach() * terms.advantage * terms.current, *_nowhere(terms))


def _vespo_weight(total: Tensor, terms: TermRatios, objective: Objective) -> Tensor:
    # w^k exp(lambda (1 - w)), which is 1 at w = 1, from log w
    k, rate = (_by_sign(terms.advantage >= 0, name, objective) for name in ("k", "lambda"))
    return (rate + k * total - rate * total.exp()).exp()


def _by_sign(is_positive: Tensor, name: str, objective: Objective) -> Tensor:
    """Return the constant NAME_pos for the terms that are positive, NAME_neg for the others, float64."""
    values = [objective.constants[f"{name}_{sign}"] for sign in ("pos", "neg")]
    first, second = torch.tensor(values, dtype=torch.float64, device=is_positive.device)
    return torch.where(is_positive, first, second)


def _outside(ratio: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    return ratio < 1 - objective.clip_low, ratio > 1 + objective.clip_high


def _nowhere(terms: TermRatios) -> tuple[Tensor, Tensor]:
    none = torch.zeros_like(terms.ratio, dtype=torch.bool)
    return none, none


_SURROGATES: dict[str, Callable[[TermRatios, Objective], Surrogate]] = {
    "ppo": _clipped,
    "grpo": _clipped,
    "gspo": _clipped,
    "gmpo": _gmpo,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "dro": _dro,
    "reinforce": _reinforce,
}
