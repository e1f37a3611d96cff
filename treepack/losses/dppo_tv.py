"""Divergence PPO in total variation: terms whose probability has moved too far are left out (2602.04879)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treepack.objectives.loss import CLIPS, Loss, Preset, paper
from treepack.objectives.surrogates import Surrogate, TermNumbers, trusted

if TYPE_CHECKING:
    from treepack.objectives.objective import Objective


def _surrogate(terms: TermNumbers, objective: Objective) -> Surrogate:
    move = terms.current.exp() - terms.old.exp()
    return trusted(terms, objective, move < -objective.clip_low, move > objective.clip_high)


LOSS = Loss(
    name="dppo_tv",
    presets={
        "dppo_tv": Preset(
            {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 20.0, "denominator": "token"},
            "`-sg(min(r, D)) A log p`, 0 if p has moved in the direction of A by more than the clip option",
            paper("DPPO", "2602.04879"),
            "the same",
        )
    },
    surrogate=_surrogate,
    options=CLIPS | {"dual_clip"},
)
