"""Other rows of single trees, for what is best for each tree alone may leave pieces that go badly into rows together.

    trees 1 and 2, pieces by auto       5 4 | 5 4      rows of 10   5+5   4+4+1   1
    the same trees by heuristic         9   | 9                     9+1   9+1
    tree 3                              1 1

What auto finds is finished (merged, or spread over ranks), and so are the plans of the quick methods, for all trees and
for those where they are as good as auto's. The one of fewest tokens, then fewest rows, stays. So auto never needs more
tokens than `contiguous` or `heuristic`, nor more rows where the tokens are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan.balance import steps_of
from treepack.pack.plan.methods import contiguous as cuts
from treepack.pack.plan.problem import Limits, PlanForest, Search
from treepack.pack.plan.unions import row_sizes
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

QUICK = (cuts.contiguous, cuts.deepest_first)

Finish = Callable[[Int64], Int64]


def finished_best(
    trie: Trie, forest: PlanForest, limits: Limits, pieces: Int64, finish: Finish, *, lower_bound: int, multiple_of: int
) -> Int64:
    """The final row of each trajectory, int64 [trajectories], from `pieces` or from other rows of single trees.

    `pieces` are the rows of `auto` for each tree, of at least `lower_bound` tokens together. `finish` makes final rows
    of rows of single trees, so many in each step that `multiple_of` divides them. Where no plan can be better, nothing
    is tried. O(nodes log nodes), besides finishing at most five times.

    Raises:
        TreepackError: what `finish` raises of `pieces`.
    """
    best = finish(pieces)
    tokens = _tokens_of_rows(trie, best)
    least = int(tokens.sum()), len(tokens)
    fewest = least[1] == _fewest_rows(trie, best, tokens, limits.capacity, multiple_of)
    if fewest and least[0] == lower_bound:
        return best
    for other in _others(trie, forest, limits, pieces, mixed=not fewest):
        try:
            found = finish(other)
        except TreepackError:  # more rows than trajectories in a step, unlike those of `pieces`
            continue
        tokens = _tokens_of_rows(trie, found)
        if (int(tokens.sum()), len(tokens)) < least:
            best, least = found, (int(tokens.sum()), len(tokens))
    return best


def _others(trie: Trie, forest: PlanForest, limits: Limits, pieces: Int64, *, mixed: bool) -> Iterator[Int64]:
    """Plans of the quick methods, and before each, if `mixed`, `pieces` with its rows for the trees it is as good for.

    A quick plan of more tokens can still win: pieces of one tree in one row share again.
    """
    tree_of = trie.tree_id[trie.end_node].astype(np.int64)
    tokens = _tokens_of_trees(trie, pieces, tree_of)
    for method in QUICK:
        found, num_rows = [], 0
        for tree in forest.trees():
            rows = method(tree, limits, Search()).row_of_leaf
            found.append(rows + num_rows)
            num_rows += int(rows.max()) + 1
        quick = np.concatenate(found)[forest.leaf_of]
        as_good = (_tokens_of_trees(trie, quick, tree_of) == tokens)[tree_of]
        if mixed and as_good.any() and not as_good.all():
            yield np.unique(np.where(as_good, quick, pieces + num_rows), return_inverse=True)[1].astype(np.int64)
        yield quick


def _tokens_of_rows(trie: Trie, row_of: Int64) -> Int64:
    return row_sizes(trie, row_of, int(row_of.max()) + 1).tokens


def _tokens_of_trees(trie: Trie, row_of: Int64, tree_of: Int64) -> Int64:
    """Tokens of all rows of each tree, int64 [num_trees]; rows hold one tree each."""
    tokens = _tokens_of_rows(trie, row_of)
    tree_of_row = steps_of(row_of, tree_of, len(tokens))
    return np.bincount(tree_of_row, tokens, trie.num_trees).astype(np.int64)


def _fewest_rows(trie: Trie, row_of: Int64, tokens: Int64, capacity: int, multiple_of: int) -> int:
    """Rows that the tokens of each step need at least."""
    filled = np.bincount(steps_of(row_of, trie.step_rank, len(tokens)), tokens).astype(np.int64)
    return int((-(-filled // (capacity * multiple_of))).sum()) * multiple_of
