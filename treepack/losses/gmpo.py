"""Geometric-mean policy optimisation: the geometric mean of a trajectory's clipped ratios (2507.20673, eq. 4).

One token with x = log r and c = min(max(x, -clip_low), clip_high): min(x, c) if A >= 0, max(x, c) if A < 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treepack.objectives.loss import CLIPS, Loss, Preset, Whole, paper
from treepack.objectives.surrogates import Surrogate, TermNumbers, whole_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from treepack.objectives.objective import Objective


def _clipped_logs(terms: TermNumbers, objective: Objective) -> Tensor:
    """Return the log ratios, clipped if the advantage pushes them further away, [n]."""
    shift = terms.current - terms.old
    near = shift.clamp(-objective.clip_low, objective.clip_high)
    return shift.maximum(near).where(terms.advantage < 0, shift.minimum(near))


def _surrogate(terms: TermNumbers, objective: Objective) -> Surrogate:
    ratio, shift = whole_ratio(_clipped_logs(terms, objective), terms), terms.current - terms.old
    low, high = shift < -objective.clip_low, shift > objective.clip_high
    return Surrogate(ratio * terms.advantage, low & (terms.advantage < 0), high & (terms.advantage > 0), ratio)


LOSS = Loss(
    name="gmpo",
    presets={
        "gmpo": Preset(
            {"clip_low": 0.4, "clip_high": 0.4, "denominator": "trajectory"},
            "`-A` times the geometric mean of `exp(clip(log r))` over the trajectory, clipped as in `ppo`",
            paper("GMPO", "2507.20673"),
            "verl `geo_mean`",
        )
    },
    whole=Whole(_clipped_logs),
    surrogate=_surrogate,
    options=CLIPS,
)
