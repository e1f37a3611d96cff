"""Soft adaptive policy optimisation: a smooth gate in place of a clip (2511.20347)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treepack.objectives.loss import Loss, Preset, paper
from treepack.objectives.surrogates import Surrogate, TermNumbers, by_sign

if TYPE_CHECKING:
    from treepack.objectives.objective import Objective


def _surrogate(terms: TermNumbers, objective: Objective) -> Surrogate:
    temperature = by_sign(terms, terms.advantage > 0, "temperature", objective)
    gate = (temperature * (terms.ratio - 1)).sigmoid() * 4 / temperature
    return Surrogate(gate * terms.advantage)


LOSS = Loss(
    name="sapo",
    presets={
        "sapo": Preset(
            {"denominator": "trajectory"},
            "`-4 / tau sigmoid(tau (r - 1)) A`, with the temperature tau by the sign of A",
            paper("SAPO", "2511.20347"),
            "the same",
        )
    },
    surrogate=_surrogate,
    # Temperatures of the gate for advantages above 0, and for the others, by the names of TRL.
    constants={"temperature_pos": 1.0, "temperature_neg": 1.05},
)
