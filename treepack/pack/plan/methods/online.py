"""How rows are filled elsewhere: first fit as rollouts arrive, and whole sequences that share nothing.

    greedy-online   each trajectory, in order of arrival, to the first row whose union with it fits
    sequence        each trajectory alone, longest first, to the first row that has room for all of it

Both see all trees at once and fill rows across them, so nothing is left to merge. In the forests given here every
trajectory is a leaf of its own (`forest_of(trie, split_ends=True)`).
"""

from __future__ import annotations

import re
import sys

import numpy as np

from treepack.pack.plan.problem import Limits, PlanForest, PlanTree, path_pairs
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


def greedy_online(forest: PlanForest, order: Int64, steps: Int64, limits: Limits) -> Int64:
    """Row of each leaf, int64 [num_leaves], by first fit in the `order` of arrival, a permutation of the leaves.

    `steps` int64 [num_leaves] is each leaf's training step; rows never mix steps. The baseline of online trainers
    such as AReaL, which look for the first row that the next rollout fits with what it shares.
    """
    tree = forest.joined
    pairs = path_pairs(tree.depth + tree.size)
    return fill_rows(tree, pairs, order, steps, limits)


def sequence(forest: PlanForest, order: Int64, steps: Int64, limits: Limits) -> Int64:
    """Row of each leaf, int64 [num_leaves], by first fit decreasing over whole lengths: N_pack is N_flat.

    Rows of a trie that shares prefixes share them all the same; `trie.unshared` gives the trie whose rows do not.
    """
    length, nothing = forest.joined.length, np.full(forest.num_leaves, -1)
    alone = np.arange(forest.num_leaves)
    tree = PlanTree(length, np.zeros_like(length), nothing, alone + 1, alone, forest.joined.terms)
    longest_first = order[np.argsort(-length[order], kind="stable")]
    return fill_rows(tree, path_pairs(length), longest_first, steps, limits)


def fill_rows(tree: PlanTree, pairs: Int64, order: Int64, steps: Int64, limits: Limits) -> Int64:
    """Row of each leaf by first fit in `order`; `pairs` [nodes] score pairs of a path down to the end of each node."""
    from treepack.pack.plan.methods.first_fit import first_fit

    path = tree.depth + tree.size
    terms = np.zeros_like(path)
    terms[tree.leaf] = tree.terms
    given = [(path, limits.capacity), (pairs, limits.pairs), (terms, limits.terms)]
    loads = np.stack([load for load, most in given if most is not None])
    most = np.array([most for _, most in given if most is not None])
    assert (loads[:, tree.leaf] <= most[:, None]).all(), "a trajectory exceeds a limit alone"
    head = np.full(tree.num_nodes, -1)
    least = _least_below(tree)
    row_of, num_rows = np.empty(len(order), np.int64), 0
    by_step = order[np.argsort(steps[order], kind="stable")]
    for arrived in np.split(by_step, np.flatnonzero(np.diff(steps[by_step])) + 1):
        row_of[arrived] = num_rows + first_fit(arrived, tree.leaf, tree.parent, loads, least, most, head)
        num_rows = int(row_of[arrived].max()) + 1
    return row_of


def _least_below(tree: PlanTree) -> Int64:
    """Fewest tokens between the end of each node and the end of a leaf below it, int64 [num_nodes]."""
    path = tree.depth + tree.size
    first, last = np.searchsorted(tree.leaf, np.arange(tree.num_nodes)), np.searchsorted(tree.leaf, tree.end)
    bounds = np.stack([first, last], axis=1).ravel()
    lengths = np.append(path[tree.leaf], np.iinfo(np.int64).max)  # so that the last bound has an entry
    return np.asarray(np.minimum.reduceat(lengths, bounds)[::2] - path, np.int64)


def arrival_order(trie: Trie) -> Int64:
    """Trajectories in the order of the file and line they were read from, then by id, int64 [num_trajectories].

    Numbers in names count as numbers: part-2 comes before part-10. Trajectories that tie keep the order of the trie.
    """
    table = trie.trajectories
    keys = [
        (_natural(source), _natural(name))
        for source, name in zip(table["source"].to_pylist(), table["trajectory_id"].to_pylist(), strict=True)
    ]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _natural(text: str) -> str:
    """`text` with the number of its digits, as a character, before each number: compares as people count."""
    return re.sub(r"0*([0-9]+)", lambda found: chr(min(len(found[1]), sys.maxunicode)) + found[1], text)
