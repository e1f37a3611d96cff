"""Filling budgets unit by unit, always where the next one is worth most: compiled loops with a heap.

    fill_roots       rollouts of prompts, the first three of a prompt as one block
    fill_prefixes    continuations of prefixes, each group within a budget of its own

Equal worth goes to the lower index. The worth of further units is kept as running products, which rounding can never
make grow, so that the order of the heap is that of the units. Import this module only where it is called: numba takes
a second to load.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from treepack.trajectory import Float64, Int64

BLOCK = 3  # rollouts that are worth the same each, see allocation.allocate_roots


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fill_roots(value: Float64, maximum: Int64, budget: int) -> tuple[Int64, int]:
    """Rollouts of each prompt, int64 [num_prompts], and what is left of `budget`.

    `value` float64 and `maximum` int64, both [num_prompts]. Left is 1 where the next best is to open a prompt, which
    takes two, and more only where every prompt is full.
    """
    count = np.zeros(len(value), np.int64)
    first, second = value.copy(), 1.0 - value
    heap = [(0.0, -1) for _ in range(0)]
    for i in range(len(value)):
        if maximum[i] >= 2:
            heap.append((-value[i] * (1.0 - value[i]), i))
    heapq.heapify(heap)
    left = budget
    while left > 0 and len(heap) > 0:
        i = heap[0][1]
        if count[i] == 0 and left == 1:
            break
        units = min(BLOCK, maximum[i], left) if count[i] == 0 else 1
        count[i] += units
        left -= units
        if count[i] == maximum[i]:
            heapq.heappop(heap)
        else:
            first[i] *= value[i]
            second[i] *= 1.0 - value[i]
            worth = value[i] * (1.0 - value[i]) * min(1.0, first[i] + second[i])
            heapq.heapreplace(heap, (-worth, i))
    return count, left


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fill_prefixes(flip: Float64, start: Int64, budget: Int64) -> Int64:
    """Continuations of each prefix, int64 [num_prefixes].

    `flip` float64 [num_prefixes] is the chance that one continuation ends differently. Group g owns the prefixes
    `start[g] .. start[g + 1] - 1`, at least one if its `budget[g]` is positive.
    """
    count = np.zeros(len(flip), np.int64)
    for g in range(len(budget)):
        heap = [(-flip[i], i) for i in range(start[g], start[g + 1])]
        heapq.heapify(heap)
        for _ in range(budget[g]):
            worth, i = heap[0]
            count[i] += 1
            heapq.heapreplace(heap, (worth * (1.0 - flip[i]), i))
    return count
