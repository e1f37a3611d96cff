"""Trajectories by group or by tree: how many each part holds, what they share, how they were rewarded.

    Trie --groups_of / trees_of--> Parts

What a part would be as a trie of its own needs no trie: sorted as they are, a trajectory adds to its part what it does
not share with the one of the same part before it, and what two trajectories share is the least that any two neighbours
between them share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class SharedParts:
    """A partition of the trajectories: `of` [num_trajectories] is the part of each, the rest has one value per part.

    `flat` and `tree` are N_flat and N_tree of the part alone, `reward` the mean of the known rewards or else NaN.
    """

    names: list[str]
    of: Int64
    sizes: Int64
    flat: Int64
    tree: Int64
    reward: Float64

    @property
    def overlap(self) -> Float64:
        """POR of each part alone, float64 [num_parts]."""
        return 1 - self.tree / self.flat


def groups_of(trie: Trie) -> SharedParts:
    """The groups, in order of step and name; where trajectories have steps, the step is part of the name."""
    steps, groups = trie.trajectories["step"].to_pylist(), trie.trajectories["group_id"].to_pylist()
    keys = list(zip(trie.step_rank.tolist(), groups, strict=True))
    shown = {key: key[1] if step is None else f"{key[1]} (step {step})" for key, step in zip(keys, steps, strict=True)}
    order = sorted(shown)
    rank = {key: i for i, key in enumerate(order)}
    return _parts(trie, np.array([rank[key] for key in keys], np.int64), [shown[key] for key in order])


def trees_of(trie: Trie) -> SharedParts:
    """The trees, in order."""
    return _parts(trie, trie.tree_id[trie.end_node].astype(np.int64), [f"tree {i + 1}" for i in range(trie.num_trees)])


def rewards_of(trie: Trie) -> Float64:
    """Reward of each trajectory, NaN where there is none, float64 [num_trajectories]."""
    rewards: Float64 = trie.trajectories["reward"].combine_chunks().to_numpy(zero_copy_only=False).astype(np.float64)
    return rewards


def mean_by(index: Int64, values: Float64, count: int) -> Float64:
    """Mean of the values that are not NaN at each of `count` indices, NaN where there is none."""
    known = ~np.isnan(values)
    sums = np.bincount(index[known], weights=values[known], minlength=count)
    numbers = np.bincount(index[known], minlength=count)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)


def _parts(trie: Trie, of: Int64, names: list[str]) -> SharedParts:
    lengths, count = trie.lengths, len(names)
    order = np.argsort(of, kind="stable")
    same = of[order[1:]] == of[order[:-1]]
    shared = np.zeros(len(order), np.int64)
    shared[1:][same] = _least_between(_shared_with_previous(trie), order[:-1][same], order[1:][same])
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


def _shared_with_previous(trie: Trie) -> Int64:
    """Tokens that each trajectory shares with the one before it: the node that follows its end is the first new one."""
    ends = trie.end_node.astype(np.int64)
    first_new = np.minimum(ends[:-1] + 1, trie.num_nodes - 1)
    shared = np.where(ends[1:] > ends[:-1], trie.depth[first_new], trie.lengths[1:])
    return np.concatenate([[0], shared]).astype(np.int64)


def _least_between(values: Int64, after: Int64, until: Int64) -> Int64:
    """The least of `values[after + 1 .. until]` for each pair, by minima over runs of 1, 2, 4, ... values."""
    least = np.zeros(len(after), np.int64)
    span = until - after
    run, size = values, 1
    while True:  # run[i] is the least of the `size` values from i on
        now = (span >= size) & (span < 2 * size)
        least[now] = np.minimum(run[after[now] + 1], run[until[now] - size + 1])
        if 2 * size > span.max(initial=0):
            return least
        run = np.minimum(run[:-size], run[size:])
        size *= 2
