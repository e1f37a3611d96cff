"""Where to spend rollouts, by TRACE (arXiv 2606.11119): how many each prompt gets, then how many each prefix gets.

    value float64 [num_prompts], budget M --allocate_roots--> rollouts int64 [num_prompts], 0 or at least 2 each
    value, reward, group [num_prefixes], budgets --allocate_prefixes--> continuations int64 [num_prefixes]

Both maximise the expected number of anchors, prompts or prefixes, below which rollouts both succeed and fail, and are
exact. A value is the predicted chance of success from an anchor on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.trajectory import Float64, Int64

MOST_BUDGET = 10**9  # rollouts, spent one by one: some minutes


def root_utility(value: Float64, count: Int64) -> Float64:
    """Chance that `count` rollouts of a prompt both succeed and fail, 1 - v^m - (1 - v)^m: TRACE, equation 12.

    0 for fewer than two. Accurate to rounding also where it is tiny.
    """
    rare = np.minimum(value, 1.0 - value)
    mixed = -np.expm1(count * np.log1p(-rare)) - rare ** np.maximum(count, 1)
    return np.where(count < 2, 0.0, mixed)


def prefix_utility(value: Float64, reward: Float64, count: Int64) -> Float64:
    """Chance that one of `count` continuations of a prefix does not end in the `reward` seen: TRACE, equation 15.

    1 - q^k, where q = r v + (1 - r)(1 - v) is the chance that one continuation agrees.
    """
    with np.errstate(divide="ignore"):
        flipped = -np.expm1(np.maximum(count, 1) * np.log1p(-flip_chance(value, reward)))
    return np.where(count > 0, flipped, 0.0)


def flip_chance(value: Float64, reward: Float64) -> Float64:
    """Chance that one continuation does not end in the `reward` seen, 1 - q of equation 15."""
    return np.where(reward > 0.5, 1.0 - value, value)


def allocate_roots(value: Float64, budget: int, *, maximum: Int64 | None = None) -> Int64:
    """Rollouts of each prompt that maximise the sum of `root_utility`, summing to `budget`: TRACE, equation 13.

    `value` float64 [num_prompts] in [0, 1]; `maximum` int64 [num_prompts] bounds each count (1 is as good as 0). Of
    equally good prompts the first ones get more. O((num_prompts + budget) log num_prompts).

    Why it is exact. Let f be the utility of a prompt and c = v (1 - v). Its second rollout adds 2c, the third c, the
    m-th c (v^(m-2) + (1 - v)^(m-2)), which falls with m. Spread the first pair, as c and c: the result g is concave,
    and f but at a count of 1. So the best counts under g come from always taking the unit of most worth, and if none of
    them is 1 they are the best under f too. A prompt opens with three units of worth c, or with two if its maximum or
    the rest of the budget is 2; a count of 1 is due only where a single unit is left and the next best prompt is
    closed.

    Let w be the worth of that one, and the loss of a count y the most that any g(x) - w x is above g(y) - w y. It is
    never below 0, and is 0 for all counts so far, which sum to the budget less 1. A solution differs from them by 1 in
    sum, and all prompts but those with three or more can change by pairs only, or open with an odd number. So it has

        a prompt with three or more above its count     a loss of at least w less the worth of its next unit
        or one below its count                          at least the worth of its last unit less w
        or else a closed prompt at three or more, and, to make up for these, one with a maximum of 2 at none
                                                        at least 3 (w - c) of the former and 2 (c - w) of the latter

    Each bound is met: by one unit more; by one less, and two for the next best prompt; by three for the one and none
    for the other. The least of the three is taken.

    Raises:
        TreepackError: a value outside [0, 1], a budget below 2, above `MOST_BUDGET` or above what the maxima allow, or
            an odd one where all maxima are 2.
    """
    _check_values(value)
    if budget > MOST_BUDGET:
        raise TreepackError(f"a budget of {budget:,} is more than {MOST_BUDGET:,}; give a smaller one")
    limit = np.full(len(value), budget) if maximum is None else np.minimum(maximum, budget)
    if budget < 2:
        raise TreepackError(f"a budget of {budget} is too small for one group; give at least 2 rollouts")
    if len(value) == 0:
        raise TreepackError("there is no prompt to give rollouts to; predict at least one")
    from treepack.rl.trace.greedy import fill_roots

    count: Int64
    count, left = fill_roots(value, limit.astype(np.int64), budget)
    if left == 1 and ((count == 0) & (limit >= 2)).any():
        _place_last(value, limit, count)
    elif left:
        raise TreepackError(
            f"a budget of {budget:,} is more than the {int(limit[limit >= 2].sum()):,} rollouts that the maxima allow; "
            "lower it or raise them"
        )
    return count


def _place_last(value: Float64, limit: Int64, count: Int64) -> None:
    """Spend the one unit that is left, in place, though the next best prompt would need two."""
    first = value * (1.0 - value)
    closed = (count == 0) & (limit >= 2)
    wide, narrow = count >= 3, count == 2
    following = _first(np.where(closed, first, -np.inf))
    worth = first[following]
    more = np.where(wide & (count < limit), _unit_worth(value, count + 1), -np.inf)
    less = np.where(wide, _unit_worth(value, count), np.inf)
    opened = np.where(closed & (limit >= 3), first, -np.inf)
    shut = np.where(narrow, first, np.inf)
    losses = (
        worth - more.max(),
        less.min() - worth,
        3 * (worth - opened.max()) + 2 * (shut.min() - worth),
    )
    best = int(np.argmin(losses))
    if not np.isfinite(losses[best]):
        raise TreepackError("an odd budget cannot be spent two by two; give an even one or a maximum of 3 or more")
    if best == 0:
        count[_first(more)] += 1
    elif best == 1:
        count[_first(-less)] -= 1
        count[following] = 2
    else:
        count[_first(-shut)] = 0
        count[_first(opened)] = 3


def _first(worth: Float64) -> int:
    return int(np.argmax(worth))


def _unit_worth(value: Float64, number: Int64) -> Float64:
    """What rollout `number` >= 3 of a prompt adds to its utility."""
    power = np.maximum(number - 2, 1)
    return value * (1.0 - value) * np.minimum(1.0, value**power + (1.0 - value) ** power)


def allocate_prefixes(value: Float64, reward: Float64, group: Int64, budget: Int64) -> Int64:
    """Continuations of each prefix that maximise the sum of `prefix_utility` in each group: TRACE, equation 16.

    `value` and `reward` (0 or 1, how the rollout seen ended) float64 and `group` int64, codes that never descend, all
    [num_prefixes]; `budget` int64 [num_groups] is what each group spends, nothing where it has no prefix. The k-th
    continuation adds (1 - q) q^(k-1), which falls, so taking the best one each time is exact. Of equally good prefixes
    the first gets more. O((num_prefixes + sum of budget) log num_prefixes).

    Raises:
        TreepackError: a value outside [0, 1] or a reward that is not 0 or 1.
    """
    _check_values(value)
    if not ((reward == 0) | (reward == 1)).all():
        raise TreepackError("TRACE needs rewards of 0 or 1; give binary ones")
    assert (np.diff(group) >= 0).all()
    from treepack.rl.trace.greedy import fill_prefixes

    start = np.searchsorted(group, np.arange(len(budget) + 1)).astype(np.int64)
    spent = np.where(np.diff(start) > 0, budget, 0).astype(np.int64)
    found: Int64 = fill_prefixes(flip_chance(value, reward), start, spent)
    return found


def _check_values(value: Float64) -> None:
    wrong: NDArray[np.bool_] = ~((value >= 0) & (value <= 1))
    if wrong.any():
        raise TreepackError(f"a predicted value is {value[wrong][0]:g}; expected a chance of success in 0 .. 1")
