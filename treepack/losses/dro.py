"""Direct reward optimisation: the log-probability, and a penalty on the square of the log ratio (2405.19107)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treepack.objectives.loss import Loss, Preset, paper
from treepack.objectives.surrogates import Surrogate, TermNumbers

if TYPE_CHECKING:
    from treepack.objectives.objective import Objective


def _surrogate(terms: TermNumbers, objective: Objective) -> Surrogate:
    square = (terms.current - terms.old).square()
    return Surrogate(terms.current * terms.advantage - objective.beta / 2 * square)


LOSS = Loss(
    name="dro",
    presets={
        "dro": Preset(
            {"denominator": "token"},
            "`-(A log p - beta / 2 (log r)^2)`",
            paper("DRO", "2405.19107"),
            "the same",
        )
    },
    surrogate=_surrogate,
    options=frozenset({"beta"}),
)
