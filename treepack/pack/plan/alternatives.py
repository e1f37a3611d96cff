"""Other rows of single trees, because the best rows of each tree alone may be items that merge badly.

    trees 1 and 2, items of auto       5 4 | 5 4      capacity 10, merged   5+5   4+4+1   1
    the same trees by heuristic         9   | 9                              9+1   9+1
    tree 3                              1 1

The items of auto are finished: merged, or spread over ranks. The items of each quick method are finished twice:
once for all trees, and once for only the trees whose rows have as few tokens as the rows of auto. The rows of
`greedy-online` are finished too. The result with the minimum number of tokens, then of rows, is returned. So auto never
needs more tokens than `contiguous`, `heuristic` or `greedy-online`, and never more rows if the tokens are equal, except
that `greedy-online` is not tried if auto is proven to have minimum tokens, or if the trees are so deep that it takes
many seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan.balance import steps_of
from treepack.pack.plan.methods import online
from treepack.pack.plan.methods.contiguous import contiguous, deepest_first
from treepack.pack.plan.problem import PlanForest, RowLimits, SearchOptions
from treepack.pack.plan.unions import row_sizes
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

_QUICK_METHODS = (contiguous, deepest_first)  # O(leaves) and O(nodes log nodes)

_Finish = Callable[[Int64], Int64]


def best_final_rows(
    trie: Trie,
    forest: PlanForest,
    limits: RowLimits,
    items: Int64,
    finish: _Finish,
    *,
    lower_bound: int,
    multiple_of: int,
) -> Int64:
    """Return the final row of each trajectory, int64 [trajectories], made of `items` or of other rows of single trees.

    `items` are the rows of `auto` for each tree; any rows have at least `lower_bound` tokens together. `finish` turns
    rows of single trees into final rows, and `multiple_of` divides their number in each step. If no plan can be better,
    nothing else is tried. O(nodes log nodes) and first fit, and at most six calls of `finish`.

    Raises:
        TreepackError: `finish` raises it for `items`.
    """
    best = finish(items)
    tokens = _tokens_of_rows(trie, best)
    cost = int(tokens.sum()), len(tokens)
    has_fewest_rows = cost[1] == _min_rows(trie, best, tokens, limits.capacity, multiple_of)
    if has_fewest_rows and cost[0] == lower_bound:
        return best

    def others() -> Iterator[Int64]:
        # Exchanging the rows of single trees can only save rows, so it is left out if no row can be saved.
        yield from _alternatives(trie, forest, limits, items, mixed=not has_fewest_rows)
        if cost[0] > lower_bound:
            greedy = online.greedy_online_within(trie, limits, max_tokens=cost[0])
            if greedy is not None:
                yield greedy

    for other in others():
        try:
            rows = finish(other)
        except TreepackError:  # a step would have more rows than trajectories; with `items` it has not
            continue
        tokens = _tokens_of_rows(trie, rows)
        if (int(tokens.sum()), len(tokens)) < cost:
            best, cost = rows, (int(tokens.sum()), len(tokens))
    return best


def _alternatives(trie: Trie, forest: PlanForest, limits: RowLimits, items: Int64, *, mixed: bool) -> Iterator[Int64]:
    """Yield the rows of each quick method, and if `mixed`, first `items` with these rows for some of the trees.

    These trees are the ones for which the quick method needs as few tokens as `items`. A quick plan with more tokens
    can still win, because items of one tree that are merged share their prefix again.
    """
    tree_of = trie.tree_id[trie.end_node].astype(np.int64)
    tokens = _tokens_of_trees(trie, items, tree_of)
    for method in _QUICK_METHODS:
        rows_of_trees, num_rows = [], 0
        for tree in forest.trees():
            rows = method(tree, limits, SearchOptions()).row_of_leaf
            rows_of_trees.append(rows + num_rows)
            num_rows += int(rows.max()) + 1
        quick = np.concatenate(rows_of_trees)[forest.leaf_of]
        # tokens of the trees [9, 7] against [9, 8], trees of the trajectories [0, 0, 1] -> [True, True, False]
        as_good = (_tokens_of_trees(trie, quick, tree_of) == tokens)[tree_of]
        if mixed and as_good.any() and not as_good.all():
            yield np.unique(np.where(as_good, quick, items + num_rows), return_inverse=True)[1].astype(np.int64)
        yield quick


def _tokens_of_rows(trie: Trie, row_of: Int64) -> Int64:
    return row_sizes(trie, row_of, int(row_of.max()) + 1).tokens


def _tokens_of_trees(trie: Trie, row_of: Int64, tree_of: Int64) -> Int64:
    """Return the tokens of all rows of each tree, int64 [num_trees]. Every row belongs to one tree."""
    tokens = _tokens_of_rows(trie, row_of)
    tree_of_row = steps_of(row_of, tree_of, len(tokens))
    return np.bincount(tree_of_row, tokens, trie.num_trees).astype(np.int64)


def _min_rows(trie: Trie, row_of: Int64, tokens: Int64, capacity: int, multiple_of: int) -> int:
    """Return the minimum number of rows for the tokens of all steps."""
    step_tokens = np.bincount(steps_of(row_of, trie.step_rank, len(tokens)), tokens).astype(np.int64)
    # -(-a // b) rounds up: 25 tokens, capacity 10, a multiple of 2 -> 2 times 20 -> 4 rows
    return int((-(-step_tokens // (capacity * multiple_of))).sum()) * multiple_of
