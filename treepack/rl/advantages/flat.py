"""Advantages of whole trajectories from the rewards of their group, without the tree.

    reward float64 [n], group int64 [n] (codes from 0) --grpo | dr_grpo | rloo | reinforce_pp--> float64 [n]

        reward  1  0 | 2  2  5        dr_grpo   0.5  -0.5 | -1    -1    2          reward minus the mean of the group
        group   0  0 | 1  1  1        rloo      1    -1   | -1.5  -1.5  3          reward minus the mean of the others

Every standard deviation is the sample deviation (n - 1), as in the trainers of the papers, and `epsilon` is added to
it. With a `weight` float64 [n] of each trajectory, means are weighted, and the deviation has the denominator of
reliability weights, sum w - sum w^2 / sum w, which is n - 1 for weights of 1. If a deviation is below `_ROUNDING` times
the largest of the compared rewards, the values differ only by rounding, and the advantage is 0.
"""

from __future__ import annotations

import numpy as np

from treepack.rl.advantages.advantage_options import EPSILON
from treepack.trajectory import Float64, Int64

# Relative to the largest reward. Sums of n float64 values are off by up to n * 1e-16, so this covers 10^4 trajectories.
_ROUNDING = 1e-12


def dr_grpo(reward: Float64, group: Int64, *, weight: Float64 | None = None) -> Float64:
    """Reward minus the mean of its group: Dr. GRPO (arXiv 2503.20783), which divides by nothing."""
    return reward - means(reward, group, weight)[group]


def grpo(
    reward: Float64,
    group: Int64,
    *,
    scope: Int64 | None = None,
    weight: Float64 | None = None,
    epsilon: float = EPSILON,
) -> Float64:
    """Reward minus the mean of its group, over a standard deviation: GRPO (TRACE, equation 44; TreePO, equation 2).

    The deviation is that of the rewards in the group. With `scope` int64 [n], it is the deviation of the differences
    themselves over all trajectories of one scope, for example a training step. This is the baseline variant of
    REINFORCE++ (arXiv 2501.03262).
    """
    part = group if scope is None else scope
    apart = dr_grpo(reward, group, weight=weight)
    return standardise(apart, part, magnitudes(reward, part), weight=weight, epsilon=epsilon)


def rloo(reward: Float64, group: Int64, *, weight: Float64 | None = None) -> Float64:
    """Reward minus the mean of the others of its group: REINFORCE leave-one-out (arXiv 2402.14740).

    (n R_i - sum R) / (n - 1) is n / (n - 1) times `dr_grpo`, and W / (W - w_i) times with weights whose sum is W.
    Groups must have two trajectories or more, of positive weight.
    """
    if weight is None:
        size = np.bincount(group)[group]
        return dr_grpo(reward, group) * size / (size - 1)
    # Weights [2, 1, 1], rewards [1, 0, 0]: mean 1/2, so 1/2 * 4 / 2 = 1 - 0 and -1/2 * 4 / 3 = 0 - 2/3.
    total = np.bincount(group, weights=weight)[group]
    others = total - weight
    apart = dr_grpo(reward, group, weight=weight)
    return np.divide(apart * total, others, out=np.zeros(len(reward)), where=others > 0)


def reinforce_pp(reward: Float64, scope: Int64, *, weight: Float64 | None = None, epsilon: float = EPSILON) -> Float64:
    """Reward minus the mean of its `scope`, over its standard deviation: REINFORCE++ (arXiv 2501.03262).

    The scope is a global batch, not a group. Every trajectory counts once, independent of its number of tokens.
    """
    return grpo(reward, scope, weight=weight, epsilon=epsilon)


def means(values: Float64, part: Int64, weight: Float64 | None = None) -> Float64:
    """Mean of the `values` of each part, float64 [num_parts]; 0 for a part without values."""
    count = np.bincount(part, weight)
    total = np.bincount(part, values if weight is None else weight * values)
    return np.divide(total, count, out=np.zeros(len(count)), where=count > 0)


def magnitudes(values: Float64, part: Int64) -> Float64:
    """Largest absolute value of the `values` of each part, float64 [num_parts]."""
    # values [-1, 0, -2, -2, -5], part [0, 0, 1, 1, 1] -> [1, 5]
    largest = np.zeros(int(part.max(initial=-1)) + 1)
    np.maximum.at(largest, part, np.abs(values))
    return largest


def deviations(values: Float64, part: Int64, magnitude: Float64, weight: Float64 | None = None) -> Float64:
    """Standard deviation (n - 1) of the `values` of each part; 0 if it is only rounding.

    `magnitude` float64 [num_parts] is the largest reward that the values were computed from. A part with fewer than
    two values of positive weight has 0.
    """
    # Two passes: the difference of large sums of squares would lose the digits that _ROUNDING relies on.
    apart = values - means(values, part, weight)[part]
    if weight is None:
        count = np.bincount(part, minlength=len(magnitude))
        freedom: Float64 | Int64 = count - 1
    else:
        count = np.bincount(part, weight > 0, minlength=len(magnitude)).astype(np.int64)
        total = np.bincount(part, weight, minlength=len(magnitude))
        squared = np.bincount(part, weight**2, minlength=len(magnitude))
        # Weights of 1: n - n / n = n - 1. Weights [2, 1, 1]: 4 - 6 / 4 = 2.5.
        freedom = total - np.divide(squared, total, out=np.zeros_like(total), where=total > 0)
    squares = np.bincount(part, apart**2 if weight is None else weight * apart**2, minlength=len(magnitude))
    deviation: Float64 = np.sqrt(np.divide(squares, freedom, out=np.zeros(len(count)), where=count > 1))
    return np.where(deviation > _ROUNDING * magnitude, deviation, 0.0)


def standardise(
    values: Float64, part: Int64, magnitude: Float64, *, weight: Float64 | None = None, epsilon: float
) -> Float64:
    """Divide `values` by (standard deviation of their part + epsilon); 0 if that deviation is 0."""
    return divide_by_deviation(values, deviations(values, part, magnitude, weight)[part], epsilon=epsilon)


def divide_by_deviation(values: Float64, deviation: Float64, *, epsilon: float) -> Float64:
    """Divide `values` by (deviation + epsilon); 0 if the deviation is 0. Both are float64 [n]."""
    return np.divide(values, deviation + epsilon, out=np.zeros(len(values)), where=deviation > 0)
