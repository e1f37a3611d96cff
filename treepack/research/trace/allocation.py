"""Allocation of rollouts by TRACE (arXiv 2606.11119): first a count for each prompt, then one for each prefix.

    value float64 [num_prompts], budget M --allocate_roots--> rollouts int64 [num_prompts], 0 or at least 2 each
    value, reward, group [num_prefixes], budgets --allocate_prefixes--> continuations int64 [num_prefixes]

An anchor is a prompt or a prefix. Both functions maximise the expected number of anchors below which some rollouts
succeed and others fail, and both are exact. A value is the predicted chance that a rollout from an anchor succeeds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.research.trace.greedy import fill_prefixes, fill_roots
from treepack.trajectory import Float64, Int64

MAX_BUDGET = 10**9  # rollouts; the loop spends them one by one, which takes minutes at this size


def root_utility(value: Float64, count: Int64) -> Float64:
    """Chance that `count` rollouts of a prompt have both outcomes, 1 - v^m - (1 - v)^m: TRACE, equation 12.

    0 for fewer than two rollouts. Accurate to rounding even if the chance is tiny.
    """
    # value [0.5, 0.9, 0.4], count [2, 2, 3] -> [0.5, 0.18, 0.72]. With the rarer outcome, 1 - (1 - v)^m does not
    # cancel: for v = 1e-20, 1 - v is 1, but log1p(-v) is -1e-20.
    rare = np.minimum(value, 1.0 - value)
    mixed = -np.expm1(count * np.log1p(-rare)) - rare ** np.maximum(count, 1)
    return np.where(count < 2, 0.0, mixed)


def prefix_utility(value: Float64, reward: Float64, count: Int64) -> Float64:
    """Chance that one of `count` continuations of a prefix does not end in the recorded `reward`: TRACE, equation 15.

    1 - q^k, with the chance q = r v + (1 - r)(1 - v) that one continuation ends as the rollout did.
    """
    # value [0.5, 0.3], reward [1, 0], count [2, 2] -> q [0.5, 0.7] -> [0.75, 0.51]
    with np.errstate(divide="ignore"):
        flipped = -np.expm1(np.maximum(count, 1) * np.log1p(-_flip_chance(value, reward)))
    return np.where(count > 0, flipped, 0.0)


def _flip_chance(value: Float64, reward: Float64) -> Float64:
    """Chance that one continuation does not end in the recorded `reward`, 1 - q of equation 15."""
    return np.where(reward > 0.5, 1.0 - value, value)


def allocate_roots(value: Float64, budget: int, *, maximum: Int64 | None = None) -> Int64:
    """Rollouts of each prompt that maximise the sum of `root_utility`, summing to `budget`: TRACE, equation 13.

    `value` float64 [num_prompts] in [0, 1]; `maximum` int64 [num_prompts] limits each count (1 has the effect of 0). Of
    equally good prompts the first ones get more. O((num_prompts + budget) log num_prompts).

    Proof that it is exact. Let f be the utility of a prompt as a function of its count, and c = v (1 - v). The second
    rollout adds 2c, the third c, and the m-th c (v^(m-2) + (1 - v)^(m-2)), which decreases with m. Let g be f with the
    first pair split into c and c. Then g is concave, and it equals f at every count except 1. So taking the unit of
    highest worth each time maximises the sum of g, and if no count is 1, it maximises the sum of f too. A prompt starts
    with three units of worth c, or with two if its maximum or the rest of the budget is 2. A count of 1 can only result
    if a single unit is left and the next best prompt has no rollout yet.

    In this case, let w be the worth of a unit of that prompt. The loss of a count y is the maximum over x of
    (g(x) - w x) - (g(y) - w y). For counts of one sum, the sum of g is a constant minus the sum of the losses, so the
    best counts have the smallest loss in total. A loss is never negative. It is 0 for all counts so far, whose sum is
    the budget minus 1. The counts of a solution must add one unit in total. Only prompts with three or more can change
    by a single unit. All others change by pairs, or start with an odd number. So a solution contains one of these:

        a prompt with three or more, now above its count    a loss of at least w minus the worth of its next unit
        a prompt with three or more, now below its count    at least the worth of its last unit minus w
        else a new prompt with three or more and, because   at least 3 (w - c) of the new prompt and 2 (c - w) of
        the sum must fit, a prompt of maximum 2 with none   the other one

    Each bound is reached: by one unit more; by one unit less and two units for the next best prompt; by three units for
    the new prompt and none for the other. The code takes the smallest of the three.

    Raises:
        TreepackError: a value outside [0, 1], a budget below 2, above `MAX_BUDGET` or above what the maxima allow, or
            an odd budget if all maxima are 2.
    """
    _check_values(value)
    if budget > MAX_BUDGET:
        raise TreepackError(f"a budget of {budget:,} is more than {MAX_BUDGET:,}; give a smaller one")
    limit = np.full(len(value), budget) if maximum is None else np.minimum(maximum, budget)
    if budget < 2:
        raise TreepackError(f"a budget of {budget} is too small for one group; give at least 2 rollouts")
    if len(value) == 0:
        raise TreepackError("there is no prompt to give rollouts to; predict at least one")
    # value [0.5, 0.9, 0.4]: a budget of 4 -> [3, 0, 0] and 1 left, which becomes [2, 0, 2]; a budget of 5 -> [3, 0, 2].
    count, left = fill_roots(value, limit.astype(np.int64), budget)
    if left == 1 and ((count == 0) & (limit >= 2)).any():
        _spend_last_unit(value, limit, count)
    elif left:
        raise TreepackError(
            f"a budget of {budget:,} is more than the {int(limit[limit >= 2].sum()):,} rollouts that the maxima allow; "
            "lower it or raise them"
        )
    return count


def _spend_last_unit(value: Float64, limit: Int64, count: Int64) -> None:
    """Spend the single unit that is left, in place, although the next best prompt would need two.

    Raises:
        TreepackError: no count can change by one.
    """
    # The names of the proof in `allocate_roots`: `first` is c of every prompt, `worth` is w. All arrays [num_prompts].
    first = value * (1.0 - value)
    unused = (count == 0) & (limit >= 2)
    wide, pair = count >= 3, count == 2
    following = _argmax(np.where(unused, first, -np.inf))
    worth = first[following]
    # An infinite entry marks a prompt that cannot make the change.
    more = np.where(wide & (count < limit), _unit_worth(value, count + 1), -np.inf)
    less = np.where(wide, _unit_worth(value, count), np.inf)
    to_three = np.where(unused & (limit >= 3), first, -np.inf)
    to_none = np.where(pair, first, np.inf)
    # [3, 0, 0] of v [0.5, 0.9, 0.4]: w = 0.24, losses [0.24 - 0.125, 0.25 - 0.24, inf], so the second: [2, 0, 2].
    losses = (
        worth - more.max(),
        less.min() - worth,
        3 * (worth - to_three.max()) + 2 * (to_none.min() - worth),
    )
    best = int(np.argmin(losses))
    if not np.isfinite(losses[best]):
        raise TreepackError("an odd budget cannot be spent two by two; give an even one or a maximum of 3 or more")
    if best == 0:
        count[_argmax(more)] += 1
    elif best == 1:
        count[_argmax(-less)] -= 1
        count[following] = 2
    else:
        count[_argmax(-to_none)] = 0
        count[_argmax(to_three)] = 3


def _argmax(worth: Float64) -> int:
    return int(np.argmax(worth))


def _unit_worth(value: Float64, number: Int64) -> Float64:
    """Utility that rollout `number` >= 3 of a prompt adds."""
    # value 0.5, number 3, 4, 5 -> 0.25, 0.125, 0.0625. The minimum keeps rounding from making a later unit worth more.
    power = np.maximum(number - 2, 1)
    return value * (1.0 - value) * np.minimum(1.0, value**power + (1.0 - value) ** power)


def allocate_prefixes(value: Float64, reward: Float64, group: Int64, budget: Int64) -> Int64:
    """Continuations of each prefix that maximise the sum of `prefix_utility` in each group: TRACE, equation 16.

    `value` and `reward` (0 or 1, the outcome of the recorded rollout) are float64, `group` is int64 with codes that
    never descend, all [num_prefixes]. `budget` int64 [num_groups] is the number that each group spends; a group without
    prefixes spends nothing. The k-th continuation adds (1 - q) q^(k-1), which decreases with k, so taking the best one
    each time is exact. Of equally good prefixes the first gets more.
    O((num_prefixes + sum of budget) log num_prefixes).

    Raises:
        TreepackError: a value outside [0, 1] or a reward that is not 0 or 1.
    """
    _check_values(value)
    if not ((reward == 0) | (reward == 1)).all():
        raise TreepackError("TRACE needs rewards of 0 or 1; give binary ones")
    assert (np.diff(group) >= 0).all()
    # Prefixes of group g are start[g] .. start[g + 1] - 1: group [0, 0, 2] of 3 -> start [0, 2, 2, 3].
    start = np.searchsorted(group, np.arange(len(budget) + 1)).astype(np.int64)
    spent = np.where(np.diff(start) > 0, budget, 0).astype(np.int64)
    return fill_prefixes(_flip_chance(value, reward), start, spent)


def _check_values(value: Float64) -> None:
    wrong: NDArray[np.bool_] = ~((value >= 0) & (value <= 1))
    if wrong.any():
        raise TreepackError(f"a predicted value is {value[wrong][0]:g}; expected a chance of success in 0 .. 1")
