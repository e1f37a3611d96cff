"""The numbers that the surrogate of a policy loss reads for each term, its result, and formulas that losses share.

    log-probabilities, advantages, numbers of whole trajectories --Loss.surrogate--> quantity, terms beyond the bounds

A slow form of the commonest formula, `clipped`, for one term with ratio r and advantage A:

    value = min(r A, min(max(r, 1 - clip_low), 1 + clip_high) A)
    if A < 0 and dual_clip is given: value = max(value, dual_clip A)
    low = A < 0 and r < 1 - clip_low;  high = A > 0 and r > 1 + clip_high

Everything calls methods of tensors, so that a loss can be imported without torch. `losses` has the formulas around it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from treepack.data.batch import TermTensors
    from treepack.objectives.objective import Objective


@dataclass(frozen=True)
class TermNumbers:
    """Numbers of n terms, [n] each.

    Attributes:
        current: float64, the log-probability, with a graph.
        old: float64, the old log-probability; equal to `current`, without a graph, if the data has none.
        advantage: float32 or float64.
        columns: the terms with all of their columns, such as `ref_logprob` for a loss that reads term_ref_logprob.
        whole: float64, `Loss.whole` of the trajectory of each term; None for a loss that has none.
    """

    current: Tensor
    old: Tensor
    advantage: Tensor
    columns: TermTensors
    whole: Tensor | None = None

    @cached_property
    def ratio(self) -> Tensor:
        """Probability under the current policy, divided by that under the old one."""
        return (self.current - self.old).exp()


class Surrogate(NamedTuple):
    """The result of a policy loss for n terms, [n] each."""

    quantity: Tensor  # to maximise, float64: minus the loss, without kl and entropy
    low: Tensor | None = None  # bool: the term is bounded because its ratio is low; None for no term
    high: Tensor | None = None  # bool: the same, because its ratio is high
    ratio: Tensor | None = None  # the ratio that metrics report; None for that of the token


def clipped(ratio: Tensor, terms: TermNumbers, objective: Objective) -> Surrogate:
    """Return min(r A, clip(r) A) for the ratios r, with the bounds of the objective; PPO, 1707.06347, eq. 7."""
    advantage = terms.advantage
    smaller = (ratio * advantage).minimum(ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantage)
    if objective.dual_clip is not None:
        # A = -1, dual_clip 3, ratio 10: max(-10, -3) = -3, a constant, so a huge ratio gets no gradient
        smaller = smaller.maximum(objective.dual_clip * advantage).where(advantage < 0, smaller)
    # min(r A, clip(r) A) takes the clipped value only if it is smaller: a high r if A > 0, a low r if A < 0.
    low, high = outside(ratio, objective)
    return Surrogate(smaller, low & (advantage < 0), high & (advantage > 0), ratio)


def weighted(weight: Tensor | float, terms: TermNumbers) -> Tensor:
    """Return sg(weight) A log p: the gradient is that of the log-probability, times weight and advantage."""
    constant = weight if isinstance(weight, float) else weight.detach()
    return constant * terms.advantage * terms.current


def trusted(terms: TermNumbers, objective: Objective, low: Tensor, high: Tensor) -> Surrogate:
    """Leave out the terms that have moved too far, down (low) or up (high), as their advantage pushes them: DPPO."""
    low, high = low & (terms.advantage <= 0), high & (terms.advantage > 0)
    cap = math.inf if objective.dual_clip is None else objective.dual_clip
    return Surrogate(weighted(terms.ratio.clamp(max=cap) * ~(low | high), terms), low, high)


def whole_ratio(own: Tensor, terms: TermNumbers) -> Tensor:
    """Return exp(`terms.whole`), the ratio of the trajectory, whose gradient goes to the token itself through `own`."""
    assert terms.whole is not None
    # own - own.detach() is 0, so the value is that of the trajectory.
    return (terms.whole + own - own.detach()).exp()


def outside(ratio: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return which ratios are below, and which are above the bounds of the objective."""
    return ratio < 1 - objective.clip_low, ratio > 1 + objective.clip_high


def by_sign(terms: TermNumbers, is_positive: Tensor, name: str, objective: Objective) -> Tensor:
    """Return the constant NAME_pos for the terms that are positive, NAME_neg for the others, float64 [n]."""
    first, second = (terms.current.new_full((), objective.constants[f"{name}_{sign}"]) for sign in ("pos", "neg"))
    return first.where(is_positive, second)
