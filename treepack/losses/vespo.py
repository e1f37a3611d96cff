"""VESPO: a smooth weight of the ratio of a whole trajectory (2602.10693).

One trajectory with the ratios r_t and bounded sampler's ratios m_t of its tokens: w = product of r_t m_t, then the
weight of each of its tokens is w^k exp(lambda (1 - w)), which is 1 at w = 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from treepack.objectives.loss import Loss, Preset, Whole, paper
from treepack.objectives.surrogates import Surrogate, TermNumbers, by_sign, weighted

if TYPE_CHECKING:
    from torch import Tensor

    from treepack.objectives.objective import Objective

_TOKEN_BOUND = 20.0  # of the log ratio of a token


def _log_ratio(terms: TermNumbers, objective: Objective) -> Tensor:
    """Return log r_t + log m_t of each term, [n]; m_t is 1 if the sampler is not corrected."""
    log_ratio = (terms.current - terms.old).clamp(-_TOKEN_BOUND, _TOKEN_BOUND)
    if objective.importance_cap is None:
        return log_ratio
    assert terms.columns.sampling_logprob is not None
    mismatch = terms.old - terms.columns.sampling_logprob.double()
    return log_ratio + mismatch.exp().clamp(objective.importance_floor, objective.importance_cap).log()


def _surrogate(terms: TermNumbers, objective: Objective) -> Surrogate:
    assert terms.whole is not None
    k, rate = (by_sign(terms, terms.advantage >= 0, name, objective) for name in ("k", "lambda"))
    # From log w: w^k exp(lambda (1 - w)) = exp(lambda + k log w - lambda w)
    weight = (rate + k * terms.whole - rate * terms.whole.exp()).exp()
    return Surrogate(weighted(weight, terms))


LOSS = Loss(
    name="vespo",
    presets={
        "vespo": Preset(
            {"denominator": "token"},
            "`-sg(w^k exp(lambda (1 - w))) A log p`, with w the product of r over the trajectory, k and lambda by the "
            "sign of A",
            paper("VESPO", "2602.10693"),
            "the same",
        )
    },
    whole=Whole(_log_ratio, mean=False, bounds=(math.log(1e-8), 20.0)),
    surrogate=_surrogate,
    # For advantages from 0 on, and below, by the names of TRL.
    constants={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    weighs_sampler=True,
)
