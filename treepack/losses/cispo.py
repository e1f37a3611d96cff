"""Clipped importance sampling: the clipped ratio is a constant weight, so each token keeps a gradient (2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treepack.objectives.loss import CLIPS, Loss, Preset, paper
from treepack.objectives.surrogates import Surrogate, TermNumbers, outside, weighted

if TYPE_CHECKING:
    from treepack.objectives.objective import Objective


def _surrogate(terms: TermNumbers, objective: Objective) -> Surrogate:
    weight = terms.ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return Surrogate(weighted(weight, terms), *outside(terms.ratio, objective))


LOSS = Loss(
    name="cispo",
    presets={
        "cispo": Preset(
            # 1 - clip_low = 0: no lower bound, because a ratio is positive.
            {"clip_low": 1.0, "clip_high": 0.2, "denominator": "token"},
            "`-sg(clip(r)) A log p`",
            paper("CISPO", "2506.13585"),
            "the same",
        )
    },
    surrogate=_surrogate,
    options=CLIPS,
)
