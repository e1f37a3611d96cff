"""Methods of other trainers, for comparison: first fit as rollouts arrive, and whole sequences that share nothing.

    greedy-online   each trajectory, in order of arrival, to the first row whose union with it fits
    sequence        each trajectory alone, longest first, to the first row that has room for all of it

Both plan all trees at once, so no rows are left to merge. In their forests every trajectory is a separate leaf
(`shapes_of_trees(trie, split_ends=True)`). `first_fit.py` is the loop.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np

from treepack.pack.plan.methods.first_fit import NO_LIMIT, first_fit
from treepack.pack.plan.problem import PlanForest, PlanTree, RowLimits, path_pairs, shapes_of_trees
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

MAX_FIRST_FIT_STEPS = 10**9  # nodes on the paths to all leaves, in methods that may do without: a few seconds


ForestMethod = Callable[[PlanForest, Int64, Int64, RowLimits], Int64]


def plan_first_fit(trie: Trie, limits: RowLimits, method: ForestMethod) -> Int64:
    """Return the row of each trajectory by a method of this file, int64 [num_trajectories]."""
    forest, order, steps = _arriving_leaves(trie)
    return method(forest, order, steps, limits)[forest.leaf_of]


def greedy_online_within(trie: Trie, limits: RowLimits, *, max_tokens: int) -> Int64 | None:
    """Return the row of each trajectory by `greedy_online`, or None if all rows together need more than `max_tokens`.

    None as well if first fit would take too long.
    """
    forest, order, steps = _arriving_leaves(trie)
    tree = forest.joined
    if num_first_fit_steps(tree) > MAX_FIRST_FIT_STEPS:
        return None
    rows = rows_within(tree, path_pairs(tree.depth + tree.size), order, steps, limits, max_tokens=max_tokens)
    return None if rows is None else rows[forest.leaf_of]


def _arriving_leaves(trie: Trie) -> tuple[PlanForest, Int64, Int64]:
    """Return a forest with a leaf for every trajectory, the leaves by arrival, and the training step of each leaf."""
    forest = shapes_of_trees(trie, split_ends=True)
    steps = np.zeros(forest.num_leaves, np.int64)
    steps[forest.leaf_of] = trie.step_rank
    return forest, forest.leaf_of[arrival_order(trie)], steps


def greedy_online(forest: PlanForest, order: Int64, steps: Int64, limits: RowLimits) -> Int64:
    """Return the row of each leaf, int64 [num_leaves], by first fit in the `order` of arrival.

    `order` is a permutation of the leaves, and `steps` int64 [num_leaves] the training step of each leaf; rows never
    mix steps. This is the baseline of online trainers such as AReaL, which put the next rollout into the first row that
    has room for the tokens that it does not share with the row.
    """
    tree = forest.joined
    pairs = path_pairs(tree.depth + tree.size)
    return fill_rows(tree, pairs, order, steps, limits)


def sequence(forest: PlanForest, order: Int64, steps: Int64, limits: RowLimits) -> Int64:
    """Return the row of each leaf, int64 [num_leaves], by first fit decreasing over whole lengths: N_pack is N_flat.

    If the trie shares prefixes, its rows still share them. The function `unshared` makes a trie whose rows do not.
    """
    # Every trajectory becomes a tree of one node: parent -1, end i + 1, leaf i.
    length, nothing = forest.joined.length, np.full(forest.num_leaves, -1)
    alone = np.arange(forest.num_leaves)
    tree = PlanTree(length, np.zeros_like(length), nothing, alone + 1, alone, forest.joined.terms)
    longest_first = order[np.argsort(-length[order], kind="stable")]
    return fill_rows(tree, path_pairs(length), longest_first, steps, limits)


def fill_rows(tree: PlanTree, pairs: Int64, order: Int64, steps: Int64, limits: RowLimits) -> Int64:
    """Return the row of each leaf, int64 [num_leaves], by first fit in `order`.

    `pairs` int64 [nodes] is the number of score pairs of the path from the root to the end of each node.
    """
    rows = rows_within(tree, pairs, order, steps, limits, max_tokens=NO_LIMIT)
    assert rows is not None
    return rows


def rows_within(
    tree: PlanTree, pairs: Int64, order: Int64, steps: Int64, limits: RowLimits, *, max_tokens: int
) -> Int64 | None:
    """Return the rows of `fill_rows`, or None, and sooner, if all rows together need more than `max_tokens`."""
    path = tree.depth + tree.size
    # Terms are at the leaves only: whatever a leaf shares with a row, it adds all of its terms.
    terms = np.zeros_like(path)
    terms[tree.leaf] = tree.terms
    loads_and_limits = [(path, limits.capacity), (pairs, limits.pairs), (terms, limits.terms)]
    loads = np.stack([load for load, limit in loads_and_limits if limit is not None])  # [limits, nodes]
    maxima = np.array([limit for _, limit in loads_and_limits if limit is not None])
    assert (loads[:, tree.leaf] <= maxima[:, None]).all(), "a trajectory exceeds a limit alone"
    # The blocks of a node belong to one step.
    tree_of = np.searchsorted(np.flatnonzero(tree.parent < 0), tree.leaf, side="right")
    assert (np.diff(steps)[np.diff(tree_of) == 0] == 0).all(), "a tree contains several steps"
    head = np.full(tree.num_nodes, -1)
    min_below = _min_below(tree)
    row_of, num_rows = np.empty(len(order), np.int64), 0
    # order [2, 0, 1], steps [1, 0, 1] -> by_step [1, 2, 0]: first leaf 1 of step 0, then leaves 2 and 0 of step 1.
    by_step = order[np.argsort(steps[order], kind="stable")]
    for arrived in np.split(by_step, np.flatnonzero(np.diff(steps[by_step])) + 1):
        rows, tokens = first_fit(arrived, tree.leaf, tree.parent, loads, min_below, maxima, head, max_tokens=max_tokens)
        max_tokens -= tokens
        if max_tokens < 0:
            return None
        row_of[arrived] = num_rows + rows
        num_rows = int(row_of[arrived].max()) + 1
    return row_of


def num_first_fit_steps(tree: PlanTree) -> int:
    """Return the nodes on the paths to all leaves: first fit visits each of them at least once."""
    return int((np.searchsorted(tree.leaf, tree.end) - np.searchsorted(tree.leaf, np.arange(tree.num_nodes))).sum())


def _min_below(tree: PlanTree) -> Int64:
    """Return the minimum tokens from the end of each node to the end of a leaf below it, int64 [num_nodes]."""
    path = tree.depth + tree.size
    first, last = np.searchsorted(tree.leaf, np.arange(tree.num_nodes)), np.searchsorted(tree.leaf, tree.end)
    # The leaves of node u are first[u] .. last[u] - 1. reduceat takes the range from each entry to the next one, so
    # every second result belongs to a node: first [0, 0, 1], last [3, 1, 3] -> bounds [0, 3, 0, 1, 1, 3].
    bounds = np.stack([first, last], axis=1).ravel()
    lengths = np.append(path[tree.leaf], np.iinfo(np.int64).max)  # so that the last bound has an entry
    return np.asarray(np.minimum.reduceat(lengths, bounds)[::2] - path, np.int64)


def arrival_order(trie: Trie) -> Int64:
    """Return the trajectories by their source, which is a file and a line, and then by id, int64 [num_trajectories].

    Numbers in names are compared as numbers: part-2 comes before part-10. Equal names keep the order of the trie.
    """
    table = trie.trajectories
    keys = [
        (_natural_key(source), _natural_key(name))
        for source, name in zip(table["source"].to_pylist(), table["trajectory_id"].to_pylist(), strict=True)
    ]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _natural_key(text: str) -> str:
    """Return `text` with the number of digits, as a character, before each number, so that strings sort by numbers."""
    # "part-2" -> "part-\x012", "part-10" -> "part-\x0210", and "\x01" sorts before "\x02"
    return re.sub(r"0*([0-9]+)", lambda match: chr(min(len(match[1]), sys.maxunicode)) + match[1], text)
