"""Advantages of whole trajectories from the rewards of their group, without looking at the tree.

    reward float64 [n], group int64 [n] (codes from 0) --grpo | dr_grpo | rloo | reinforce_pp--> float64 [n]

Every standard deviation is that of a sample (n - 1), as the papers' trainers have it, and `epsilon` is added to it.
Where it is below `ROUNDING` times the largest of the rewards compared, the values differ by rounding alone and the
advantage is 0.
"""

from __future__ import annotations

import numpy as np

from treepack.trajectory import Float64, Int64

EPSILON = 1e-6
ROUNDING = 1e-12


def dr_grpo(reward: Float64, group: Int64) -> Float64:
    """Reward less the mean of its group: Dr. GRPO (arXiv 2503.20783), which divides by nothing."""
    return reward - means(reward, group)[group]


def grpo(reward: Float64, group: Int64, *, scope: Int64 | None = None, epsilon: float = EPSILON) -> Float64:
    """Reward less the mean of its group, over a standard deviation: GRPO (TRACE, equation 44; TreePO, equation 2).

    That of the rewards of its group; or, with `scope` int64 [n], that of the differences themselves over all
    trajectories of one scope, say a training step: the baseline variant of REINFORCE++ (arXiv 2501.03262).
    """
    if scope is None:
        return standardised(dr_grpo(reward, group), group, magnitudes(reward, group), epsilon=epsilon)
    return standardised(dr_grpo(reward, group), scope, magnitudes(reward, scope), epsilon=epsilon)


def rloo(reward: Float64, group: Int64) -> Float64:
    """Reward less the mean of the others of its group: REINFORCE leave-one-out (arXiv 2402.14740).

    (n R_i - sum R) / (n - 1) is n / (n - 1) times `dr_grpo`. Groups must have two trajectories or more.
    """
    size = np.bincount(group)[group]
    return dr_grpo(reward, group) * size / (size - 1)


def reinforce_pp(reward: Float64, scope: Int64, *, epsilon: float = EPSILON) -> Float64:
    """Reward less the mean of its `scope`, over its standard deviation: REINFORCE++ (arXiv 2501.03262).

    The scope is a global batch, not a group; its trajectories count alike, whatever their number of tokens.
    """
    return grpo(reward, scope, epsilon=epsilon)


def means(values: Float64, part: Int64, *, num_parts: int = 0) -> Float64:
    """Mean of the `values` of each part, float64 [at least num_parts]; 0 where a part has none."""
    count = np.bincount(part, minlength=num_parts)
    total = np.bincount(part, weights=values, minlength=num_parts)
    return np.divide(total, count, out=np.zeros(len(count)), where=count > 0)


def magnitudes(values: Float64, part: Int64) -> Float64:
    """Largest absolute value of the `values` of each part, float64 [num_parts]."""
    found = np.zeros(int(part.max(initial=-1)) + 1)
    np.maximum.at(found, part, np.abs(values))
    return found


def deviations(values: Float64, part: Int64, within: Float64) -> Float64:
    """Standard deviation (n - 1) of the `values` of each part; 0 where it is rounding beside `within` [num_parts]."""
    count = np.bincount(part, minlength=len(within))
    apart = values - means(values, part)[part]
    squares = np.bincount(part, weights=apart**2, minlength=len(within))
    found: Float64 = np.sqrt(np.divide(squares, count - 1, out=np.zeros(len(count)), where=count > 1))
    return np.where(found > ROUNDING * within, found, 0.0)


def standardised(values: Float64, part: Int64, within: Float64, *, epsilon: float) -> Float64:
    """`values` over (standard deviation of their part + epsilon), 0 where that deviation is 0."""
    return scaled(values, deviations(values, part, within)[part], epsilon=epsilon)


def scaled(values: Float64, deviation: Float64, *, epsilon: float) -> Float64:
    """`values` over (deviation + epsilon), 0 where the deviation is 0; both float64 [n]."""
    return np.divide(values, deviation + epsilon, out=np.zeros(len(values)), where=deviation > 0)
