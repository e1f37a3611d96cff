"""Divergence PPO in the KL divergence of the token against all other tokens together (2602.04879)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treepack.objectives.loss import CLIPS, Loss, Preset, paper
from treepack.objectives.surrogates import Surrogate, TermNumbers, trusted

if TYPE_CHECKING:
    from treepack.objectives.objective import Objective

_TINY = 1e-8  # keeps log(1 - p) finite for a token of probability 1


def _surrogate(terms: TermNumbers, objective: Objective) -> Surrogate:
    p, q = terms.current.exp(), terms.old.exp()
    divergence = q * (terms.old - terms.current) + (1 - q) * ((1 - q + _TINY) / (1 - p + _TINY)).log()
    low, high = divergence > objective.clip_low, divergence > objective.clip_high
    return trusted(terms, objective, low & (p < q), high & (p > q))


LOSS = Loss(
    name="dppo_kl",
    presets={
        "dppo_kl": Preset(
            {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 20.0, "denominator": "token"},
            "as `dppo_tv`, moved in KL divergence of the token against the rest",
            paper("DPPO", "2602.04879"),
        )
    },
    surrogate=_surrogate,
    options=CLIPS | {"dual_clip"},
)
