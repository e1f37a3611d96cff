"""The clipped value loss of a critic over the terms of a row.

Each trained token t has a state before it, the one after its parent token, whose value V_t the critic predicts. R_t is
the return of the term and V_old_t the value that the advantages were computed with. With
clip(V) = min(max(V, V_old_t - c), V_old_t + c):

    L_V = sum_t f_i(t) w_t / 2 max((V_t - R_t)^2, (clip(V_t) - R_t)^2)        f and w as in `objectives`

Source: the code of PPO (Schulman et al. 2017, github.com/openai/baselines, ppo2). Without old values, or with c = 0,
nothing is clipped: the loss is half the square of V_t - R_t.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treepack.data.batch import TermTensors
from treepack.objectives.term_slices import TERM_CHUNK, term_slices

# Names of the sums of `value_loss`, in the order in which it computes them. `explain_variance` makes one mean of the
# last three.
VALUE_SUMS = ("value_loss", "value_clip_fraction", "return", "return_square", "value_error", "value_error_square")


def value_loss(
    values: Tensor, terms: TermTensors, factors: Tensor, *, clip: float = 0.2, chunk: int = TERM_CHUNK
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one row's part of the value loss of an optimiser step, and its part of the sums for the step's means.

    Args:
        values: [n], the value of the state before each of `terms.tokens`.
        terms: the row's terms, with `returns`; `old_values` are optional.
        factors: float64 [K], f of the row's trajectories.
        clip: c, the maximum distance from the old value; 0 clips nothing.
        chunk: terms whose values are in memory at a time.

    Returns:
        a float64 scalar attached to `values`, and the sums of `VALUE_SUMS`, each of weight times the quantity.
    """
    total = values.sum(dtype=torch.float64) * 0  # depends on `values` even for a row without terms
    sums = torch.zeros(len(VALUE_SUMS), dtype=torch.float64, device=values.device)
    for part in term_slices(terms, chunk):
        loss, part_sums = checkpoint(_term_sums, values, part, factors, clip, use_reentrant=False)
        total, sums = total + loss, sums + part_sums
    return total, dict(zip(VALUE_SUMS, sums.unbind(), strict=True))


def _term_sums(values: Tensor, part: TermTensors, factors: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the sum of f w l over some terms, and the sums of w times each quantity of `VALUE_SUMS`."""
    assert part.returns is not None
    # values [.1, .2] of 2 tokens, index [0, 1, 0] -> [.1, .2, .1] of 3 terms
    value, target = values.index_select(0, part.index).double(), part.returns.double()
    square = (value - target).square()
    larger = square
    if clip and part.old_values is not None:
        old = part.old_values.double()
        larger = torch.maximum(square, (value.clamp(old - clip, old + clip) - target).square())
    loss = larger / 2
    with torch.no_grad():
        error = target - value
        columns = [loss, larger > square, target, target.square(), error, error.square()]
        sums = torch.stack([(part.weight * column).sum() for column in columns])
    return (factors.index_select(0, part.trajectory) * part.weight * loss).sum(), sums


def explain_variance(means: dict[str, float]) -> dict[str, float]:
    """Return the means of a step with the explained variance 1 - Var(R - V) / Var(R) in place of its moments.

    It is NaN if all returns are equal. Means without a value loss are returned as they are.
    """
    if "return_square" not in means:
        return means
    others = dict(means)
    square, error, error_square = (others.pop(name) for name in VALUE_SUMS[3:])
    variance = square - others["return"] ** 2
    rest = error_square - error**2
    return {**others, "explained_variance": 1 - rest / variance if variance > 0 else math.nan}
