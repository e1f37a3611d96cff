"""The denominators of a step as one table and one function; needs no torch.

    weights W, own weights v, groups of the step's trajectories --denominator_factors--> f of each trajectory

The loss of a step is the sum over its terms t of f_i(t) w_t l_t, see `losses`. A slow form of f:

    W_u = the sum of the weights of the terms of a unit u: of the trajectory, of its rollout, or of its group
    token, edge    f = 1 / the sum of all W
    trajectory     f = v / (W_u * the sum of all v)                            v: the trajectory's own weight
    rollout        the same of rollouts, whose trajectories have one weight v
    group          f = 1 / (W_u * the number of groups with a weight)
    global         f = 1 / (response_length * the sum of all v), over trajectories, or over rollouts

Trajectories without weight are in no sum and no number, and have f = 0 unless all f are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from treepack.trajectory import Float64, Int64


class Denominator(NamedTuple):
    """One way to divide by the weights of a step."""

    unit: Literal["step", "trajectory", "rollout", "group"] = "step"  # units that have equal weight in a step
    has_length: bool = False  # a constant for each unit, `response_length`, takes the place of its weights
    column: str | None = None  # the column of factors that multiply the weights of terms first

    @property
    def is_plain(self) -> bool:
        """True if it divides by the sum of the weights as they are, so that rows may have normalised weights."""
        return self == Denominator()


DENOMINATORS = {
    "token": Denominator(),
    "trajectory": Denominator("trajectory"),
    "rollout": Denominator("rollout"),
    "group": Denominator("group"),
    "global": Denominator("trajectory", has_length=True),
    "edge": Denominator(column="term_edge_factor"),
}


def denominator_factors(
    denominator: Denominator,
    weight: Float64,
    own: Float64,
    unit: Int64,
    *,
    response_length: int = 1,
    total_weight: float | None = None,
    total_own: float | None = None,
) -> Float64:
    """Return f of each of the K trajectories of an optimiser step, or of a part of it, float64 [K].

    Args:
        denominator: an entry of `DENOMINATORS`.
        weight: [K], the sum of the weights of each trajectory's terms, with the factors of `denominator.column`.
        own: [K], the weight v of each trajectory, a factor of the weights of its terms.
        unit: [K], equal for trajectories of one group or rollout; read by these units alone.
        response_length: of the denominator global.
        total_weight: the sum of the weights of the whole step; None if these are all of its trajectories.
        total_own: the sum of v over the trajectories with weight, or rollouts, of the whole step; None for the same.
    """
    import numpy as np  # not for the names of denominators, which the help of commands lists

    own = np.where(weight > 0, own, 0.0)
    if denominator.unit == "step":
        sums = np.full(len(weight), weight.sum() if total_weight is None else total_weight)
    else:
        # unit [7, 3, 7] -> [1, 0, 1]: dense, for bincount
        unit = np.arange(len(weight)) if denominator.unit == "trajectory" else np.unique(unit, return_inverse=True)[1]
        share = np.zeros(unit.max(initial=-1) + 1)
        np.maximum.at(share, unit, own)
        if denominator.unit == "group":
            share = (share > 0).astype(np.float64)
        if denominator.has_length:
            constant = (share.sum() if total_own is None else total_own) * response_length
            return np.full(len(weight), 1 / constant if constant else 0.0)
        # f = v_u / (W_u sum v). Relative to the largest v, equal weights give 1 / (W_u N) without rounding:
        # v [3, 3] -> [1, 1]; v [3/2, 3/4, 3/4] -> [1, 1/2, 1/2], so W is multiplied by 2, 4, 4.
        largest = share.max(initial=0) or 1
        share = share / largest
        total = share.sum() if total_own is None else total_own / largest
        per_unit = np.bincount(unit, weights=weight) * np.divide(
            total, share, out=np.zeros(len(share)), where=share > 0
        )
        sums = per_unit[unit]
    factors: Float64 = np.divide(1.0, sums, out=np.zeros(len(weight)), where=sums > 0)
    return factors
