"""The best rows of a tree with few leaves, by a dynamic program over sets of leaves.

    best[S] = min over rows T in S that contain the lowest leaf of S of  tokens(T) + best[S - T]

Sets are bit masks. The sums over the union of the paths of T (tokens, score pairs, terms) are computed for all sets
first: in depth-first order, the highest leaf of T adds the tokens that it does not share with the next lower leaf of T.
O(3^leaves) time, O(2^leaves) memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.native.library import BOOL, INT64, in_c
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, path_pairs
from treepack.trajectory import Int64

MAX_LEAVES = 13  # 3^13 is 1.6 million steps, a few milliseconds; each further leaf takes three times as long


def subsets(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Return the plan with minimum tokens, then minimum rows, within all limits; its bound proves the tokens.

    The tree has at most `MAX_LEAVES` leaves, and each of them fits alone.
    """
    num = tree.num_leaves
    tokens, fits = _tokens_of_sets(tree, limits)
    # One number compares tokens first and rows second, because there are at most `num` rows: with 5 leaves, 34 tokens
    # in 3 rows are 34 * 6 + 3 = 207.
    best, first_row = _best_of_sets(tokens * (num + 1) + 1, fits)
    rows = np.zeros(num, np.int64)
    left, row = (1 << num) - 1, 0
    while left:
        # left 0b11110, its first row 0b01010 -> leaves 1 and 3 -> left 0b10100
        inside = int(first_row[left])
        rows[[leaf for leaf in range(num) if inside >> leaf & 1]] = row
        left, row = left & ~inside, row + 1
    return TreeSolution(rows, int(best[-1]) // (num + 1))


def fewest(tree: PlanTree, limits: RowLimits) -> tuple[Int64, Int64]:
    """Return the minimum tokens of each subtree and the minimum rows through each node; int64 [nodes] each.

    The two minima of a node may belong to different plans.
    """
    tokens, fits = _tokens_of_sets(tree, limits)
    rows = _best_of_sets(np.ones_like(tokens), fits)[0]
    # The leaves of node v are low[v] .. high[v] - 1: leaf [1, 2], end [3, 2, 3] -> low [0, 0, 1], high [2, 1, 2].
    low, high = np.searchsorted(tree.leaf, np.arange(tree.num_nodes)), np.searchsorted(tree.leaf, tree.end)
    min_tokens = tree.size.copy()
    for node in np.flatnonzero(high - low > 1).tolist():
        # All sets of the leaves low .. high - 1: low 1, high 3 -> [0b000, 0b010, 0b100, 0b110].
        sets = np.arange(1 << (high[node] - low[node])) << low[node]
        inside = tokens[sets] - tree.depth[node]
        inside[0] = 0
        min_tokens[node] = _best_of_sets(inside, fits[sets])[0][-1]
    # The set of all leaves of a node: low 1, high 3 -> ((1 << 2) - 1) << 1 = 0b110.
    return min_tokens, rows[((1 << (high - low)) - 1) << low]


def _tokens_of_sets(tree: PlanTree, limits: RowLimits) -> tuple[Int64, NDArray[np.bool_]]:
    """Return the tokens of a row for each set of leaves, and whether the row is within the limits; [2^leaves] each."""
    num = tree.num_leaves
    assert num <= MAX_LEAVES, f"{num} leaves are too many for a program over subsets"
    shared = tree.shared
    common = np.zeros((num, num), np.int64)  # tokens that leaves i < j share
    # Leaves i and j share the minimum over all neighbours from i to j: shared [0, 4, 5, 4, 8] -> row 0 of `common` is
    # [0, 4, 4, 4, 4], row 1 is [0, 0, 5, 4, 4].
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
    """Return the amount that each set of leaves uses, int64 [2^leaves].

    Leaf a uses `alone[a]`. For a < b, `common[a, b]` of it also belongs to leaf b, and counts once.
    """
    # highest[s - 1] is the highest leaf of set s, since the empty set has none: after leaf 1 it is [0, 1, 1]. Each leaf
    # doubles the sets: lengths [6, 9] that share 4 -> sums [0] -> [0, 6] -> [0, 6, 9, 11].
    sums = np.zeros(1, np.int64)
    highest = np.zeros(0, np.int64)
    for leaf, length in enumerate(alone.tolist()):
        repeated = np.concatenate([[0], common[highest, leaf]])
        highest = np.concatenate([highest, np.full(len(sums), leaf)])
        sums = np.concatenate([sums, sums + length - repeated])
    return sums


def _best_of_sets(cost: Int64, fits: NDArray[np.bool_]) -> tuple[Int64, Int64]:
    """Return the minimum cost of rows for every set, and the row of its lowest leaf; int64 [2^leaves] each."""
    best, first_row = np.zeros_like(cost), np.zeros_like(cost)
    best_of_sets(cost, fits, best, first_row)
    return best, first_row


@in_c(INT64, BOOL, INT64, INT64)
def best_of_sets(cost: Int64, fits: NDArray[np.bool_], best: Int64, first_row: Int64) -> None:
    """Write the results of `_best_of_sets`; the arrays begin as 0."""
    for whole in range(1, len(cost)):
        lowest = whole & -whole
        others = whole ^ lowest
        minimum = np.int64(2**62)
        # All subsets of `others`, descending: 0b101 -> 0b101, 0b100, 0b001, 0.
        rest = others
        while True:
            row = whole ^ rest
            if fits[row] and cost[row] + best[rest] < minimum:
                minimum = cost[row] + best[rest]
                first_row[whole] = row
            if rest == 0:
                break
            rest = (rest - 1) & others
        best[whole] = minimum
