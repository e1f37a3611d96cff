"""The best rows of a tree of few leaves, by a dynamic program over sets of leaves, compiled.

    best[S] = min over rows T in S that hold S's lowest leaf of  tokens(T) + best[S - T]

Sets are bit masks; every sum over the union of T's paths (tokens, score pairs, terms) is computed for all sets first:
in depth-first order the highest leaf of T brings what it does not share with the next lower leaf of T. O(3^leaves)
time, O(2^leaves) memory. Import this module only where it is called: numba takes a while to load.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from treepack.pack.plan.problem import Limits, PlanTree, Search, Solution, path_pairs
from treepack.trajectory import Int64

MOST_LEAVES = 13


def subsets(tree: PlanTree, limits: Limits, search: Search) -> Solution:
    """The plan of fewest tokens, then fewest rows, within all limits; its own proof.

    For trees of at most `MOST_LEAVES` leaves, each of which fits alone.
    """
    num = tree.num_leaves
    tokens, fits = _tokens_of_sets(tree, limits)
    best, first_row = _best_of_sets(tokens * (num + 1) + 1, fits)
    rows = np.zeros(num, np.int64)
    left, row = (1 << num) - 1, 0
    while left:
        inside = int(first_row[left])
        rows[[leaf for leaf in range(num) if inside >> leaf & 1]] = row
        left, row = left & ~inside, row + 1
    return Solution(rows, int(best[-1]) // (num + 1))


def fewest(tree: PlanTree, limits: Limits) -> tuple[Int64, Int64]:
    """For each node the least tokens of its subtree and the least rows through it, each on its own; int64 [nodes]."""
    tokens, fits = _tokens_of_sets(tree, limits)
    rows = _best_of_sets(np.ones_like(tokens), fits)[0]
    low, high = np.searchsorted(tree.leaf, np.arange(tree.num_nodes)), np.searchsorted(tree.leaf, tree.end)
    least = tree.size.copy()
    for node in np.flatnonzero(high - low > 1).tolist():
        sets = np.arange(1 << (high[node] - low[node])) << low[node]
        own = tokens[sets] - tree.depth[node]
        own[0] = 0
        least[node] = _best_of_sets(own, fits[sets])[0][-1]
    return least, rows[((1 << (high - low)) - 1) << low]


def _tokens_of_sets(tree: PlanTree, limits: Limits) -> tuple[Int64, NDArray[np.bool_]]:
    """Tokens of a row of each set of leaves, and whether it keeps the limits."""
    num = tree.num_leaves
    assert num <= MOST_LEAVES, f"{num} leaves are too many for a program over subsets"
    shared = tree.shared
    common = np.zeros((num, num), np.int64)  # tokens that leaves i < j share
    for i in range(num - 1):
        common[i, i + 1 :] = np.minimum.accumulate(shared[i + 1 :])
    tokens = _sum_of_sets(tree.length, common)
    fits = tokens <= limits.capacity
    if limits.pairs is not None:
        fits &= _sum_of_sets(path_pairs(tree.length), path_pairs(common)) <= limits.pairs
    if limits.terms is not None:
        fits &= _sum_of_sets(tree.terms, np.zeros_like(common)) <= limits.terms
    return tokens, fits


def _sum_of_sets(alone: Int64, common: Int64) -> Int64:
    """Sum over the union of the paths of every set of leaves, int64 [2^leaves]."""
    sums = np.zeros(1, np.int64)
    highest = np.zeros(0, np.int64)
    for leaf, own in enumerate(alone.tolist()):
        repeated = np.concatenate([[0], common[highest, leaf]])
        highest = np.concatenate([highest, np.full(len(sums), leaf)])
        sums = np.concatenate([sums, sums + own - repeated])
    return sums


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _best_of_sets(cost: Int64, fits: NDArray[np.bool_]) -> tuple[Int64, Int64]:
    """Least total cost of rows for every set, and the row that holds its lowest leaf; both int64 [2^leaves]."""
    best = np.zeros(len(cost), np.int64)
    first_row = np.zeros(len(cost), np.int64)
    for whole in range(1, len(cost)):
        lowest = whole & -whole
        others = whole ^ lowest
        least = np.int64(2**62)
        rest = others
        while True:
            row = whole ^ rest
            if fits[row] and cost[row] + best[rest] < least:
                least = cost[row] + best[rest]
                first_row[whole] = row
            if rest == 0:
                break
            rest = (rest - 1) & others
        best[whole] = least
    return best, first_row
