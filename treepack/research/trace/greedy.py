"""Greedy allocation, each unit to the place of highest worth: loops with a heap.

    fill_roots       rollouts of prompts, the first three of a prompt as one block
    fill_prefixes    continuations of prefixes, a separate budget for each group

If two units have the same worth, the lower index gets it. The worth of later units comes from running products.
Rounding never makes such a product grow, so the heap yields the units of an anchor in order. The loops run in C, see
`treepack/native/greedy.c`.
"""

from __future__ import annotations

import heapq

import numpy as np

from treepack.native.library import FLOAT64, INT, INT64, in_c
from treepack.trajectory import Float64, Int64

_BLOCK = 3  # first rollouts of a prompt, all of the same worth, see allocation.allocate_roots


def fill_roots(value: Float64, maximum: Int64, budget: int) -> tuple[Int64, int]:
    """Return the rollouts of each prompt, int64 [num_prompts], and the rest of `budget`.

    `value` float64 and `maximum` int64, both [num_prompts]. The rest is 1 if the next best step would start a new
    prompt, which takes two. It is more than 1 only if every prompt is at its maximum.
    """
    # value [0.5, 0.9, 0.4], budget 4: worth of a first unit [0.25, 0.09, 0.24] -> counts [3, 0, 0] and 1 left.
    count = np.zeros(len(value), np.int64)
    powers, worth = np.stack([value, 1.0 - value]), np.empty_like(value)
    left = spend_on_roots(value, maximum, budget, powers, worth, np.empty_like(count), count)
    return count, left


@in_c(FLOAT64, INT64, INT, FLOAT64, FLOAT64, INT64, INT64, returns=INT)
def spend_on_roots(
    value: Float64, maximum: Int64, budget: int, powers: Float64, worth: Float64, places: Int64, count: Int64
) -> int:
    """Add the rollouts of each prompt to `count`, and return the rest of `budget`.

    `powers` float64 [2, num_prompts] are v^(m-2) and (1 - v)^(m-2) of the next unit m of each prompt; they begin as v
    and 1 - v. `worth` and `places` [num_prompts] are the scratch of a heap in C.
    """
    first, second = powers
    # heapq yields the smallest entry, so worth is negative; the index decides ties.
    heap = [(-value[i] * (1.0 - value[i]), i) for i in range(len(value)) if maximum[i] >= 2]
    heapq.heapify(heap)
    left = budget
    while left > 0 and len(heap) > 0:
        i = heap[0][1]
        if count[i] == 0 and left == 1:
            break
        units = min(_BLOCK, maximum[i], left) if count[i] == 0 else 1
        count[i] += units
        left -= units
        if count[i] == maximum[i]:
            heapq.heappop(heap)
        else:
            first[i] *= value[i]
            second[i] *= 1.0 - value[i]
            # The worth of unit m is v (1 - v) (v^(m-2) + (1 - v)^(m-2)); in exact arithmetic the sum is at most 1.
            highest = value[i] * (1.0 - value[i]) * min(1.0, first[i] + second[i])
            heapq.heapreplace(heap, (-highest, i))
    return left


def fill_prefixes(flip: Float64, start: Int64, budget: Int64) -> Int64:
    """Return the continuations of each prefix, int64 [num_prefixes].

    `flip` float64 [num_prefixes] is the chance that one continuation ends differently. Group g has the prefixes
    `start[g] .. start[g + 1] - 1`, at least one if its `budget[g]` is positive.
    """
    # flip [0.5, 0.1, 0.3], one group with budget 4: worth 0.5, 0.3, 0.25, 0.21 -> counts [2, 0, 2]
    count = np.zeros(len(flip), np.int64)
    spend_on_prefixes(flip, start, budget, flip.copy(), np.empty_like(count), count)
    return count


@in_c(FLOAT64, INT64, INT64, FLOAT64, INT64, INT64)
def spend_on_prefixes(flip: Float64, start: Int64, budget: Int64, worth: Float64, places: Int64, count: Int64) -> None:
    """Add the continuations of each prefix to `count`; `worth` begins as `flip`, `places` is scratch."""
    for g in range(len(budget)):
        heap = [(-flip[i], i) for i in range(start[g], start[g + 1])]
        heapq.heapify(heap)
        for _ in range(budget[g]):
            highest, i = heap[0]
            count[i] += 1
            heapq.heapreplace(heap, (highest * (1.0 - flip[i]), i))
