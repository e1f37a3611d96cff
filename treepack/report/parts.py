"""Trajectories by group or by tree: their number, their shared tokens and their mean reward.

    Trie --groups_of / trees_of--> SharedParts

The size of a part's own trie is computed without building that trie. The trajectories of a trie are sorted, so a
trajectory adds to its part the tokens that it does not share with the previous one of the same part. Two trajectories
share the minimum of the tokens that neighbours between them share.

    shared with previous   -  5  2  6      trajectories 0 and 2 of one part share min(5, 2) = 2 tokens
    part                   a  b  a  b      1 and 3 share min(2, 6) = 2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.unions import shared_in_rows
from treepack.trajectory import Float64, Int64
from treepack.trie.shared_prefixes import shared_in_order
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class SharedParts:
    """A partition of the trajectories: `of` [num_trajectories] is the part of each; other fields are per part.

    `flat` and `tree` are N_flat and N_tree of the part alone; `reward` is the mean of the known rewards, or else NaN.
    """

    names: list[str]
    of: Int64
    sizes: Int64
    flat: Int64
    tree: Int64
    reward: Float64

    @property
    def overlap(self) -> Float64:
        """Return the POR of each part alone, float64 [num_parts]."""
        return 1 - self.tree / self.flat


def groups_of(trie: Trie) -> SharedParts:
    """Return the groups in order of step and name; if trajectories have steps, the step is part of the name."""
    steps, groups = trie.trajectories["step"].to_pylist(), trie.trajectories["group_id"].to_pylist()
    keys = list(zip(trie.step_rank.tolist(), groups, strict=True))
    labels = {key: key[1] if step is None else f"{key[1]} (step {step})" for key, step in zip(keys, steps, strict=True)}
    order = sorted(labels)
    rank = {key: i for i, key in enumerate(order)}
    return _parts(trie, np.array([rank[key] for key in keys], np.int64), [labels[key] for key in order])


def trees_of(trie: Trie) -> SharedParts:
    """Return the trees, in order."""
    return _parts(trie, trie.tree_id[trie.end_node].astype(np.int64), [f"tree {i + 1}" for i in range(trie.num_trees)])


def rewards_of(trie: Trie) -> Float64:
    """Return the reward of each trajectory, NaN if it has none, float64 [num_trajectories]."""
    rewards: Float64 = trie.trajectories["reward"].combine_chunks().to_numpy(zero_copy_only=False).astype(np.float64)
    return rewards


def mean_by(index: Int64, values: Float64, count: int) -> Float64:
    """Return the mean of the values that are not NaN at each of `count` indices, NaN for an index without values."""
    # index [0, 2, 2], values [1, 2, nan], count 3 -> sums [1, 0, 2], numbers [1, 0, 1] -> [1, nan, 2]
    known = ~np.isnan(values)
    sums = np.bincount(index[known], weights=values[known], minlength=count)
    numbers = np.bincount(index[known], minlength=count)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)


def _parts(trie: Trie, of: Int64, names: list[str]) -> SharedParts:
    lengths, count = trie.lengths, len(names)
    # of [0, 1, 0, 1] -> order [0, 2, 1, 3]: a stable sort keeps the order of the trie within each part.
    order = np.argsort(of, kind="stable")
    shared = shared_in_rows(shared_in_order(trie), of, order)
    return SharedParts(
        names=names,
        of=of,
        sizes=np.bincount(of, minlength=count),
        flat=_sums(of, lengths, count),
        tree=_sums(of[order], lengths[order] - shared, count),
        reward=mean_by(of, rewards_of(trie), count),
    )


def _sums(index: Int64, values: Int64, count: int) -> Int64:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, index, values)
    return sums
