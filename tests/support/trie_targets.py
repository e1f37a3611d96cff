"""TRACE's targets of the nodes of a trie, without its turns: another way to the same means."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.rl.group_tree import group_codes
from treepack.rl.leaf_weights import LeafWeights
from treepack.trajectory import Float64
from treepack.trie.trie import Trie


def trie_targets(trie: Trie, reward: Float64, weights: LeafWeights | None) -> Float64:
    """Return the share of successes among the trajectories through each node of `trie`: TRACE, equation 18.

    Float64 [num_nodes]. Nodes of the trie are runs of tokens. Groups may share them, and turns do not cut them.
    `weights` are as in `recursive_targets`; in a node of several groups, each group counts by its number of
    trajectories.
    """
    # Trajectories are sorted depth-first by end node: end_node [1 2 4 5] of 6 nodes -> ends [0 0 1 2 2 3 4]. The
    # subtree of node 0 ends before node 3, so its trajectories are ends[0] = 0 to ends[3] = 2, without 2. Their
    # successes are a difference of cumulative sums.
    ends = np.searchsorted(trie.end_node, np.arange(trie.num_nodes + 1))

    def below(values: NDArray[Any]) -> NDArray[Any]:
        sums: NDArray[Any] = np.concatenate([[0], np.cumsum(values)])[ends]
        differences: NDArray[Any] = sums[trie.node_end] - sums[:-1]
        return differences

    if weights is None:
        shares: Float64 = below(reward) / trie.num_passing
        return shares
    scaled = weights.times_size(group_codes(trie))
    # Differences of extended precision keep the digits of small weights; counts are exact.
    means = []
    for weight in (scaled.before_fallback, scaled.all, np.ones(len(reward))):
        some, extended = below((weight > 0).astype(np.int64)) > 0, weight.astype(np.longdouble)
        size = np.where(some, below(extended), 1)
        means.append((some, (below(extended * reward) / size).astype(np.float64)))
    targets: Float64 = np.select([some for some, _ in means], [mean for _, mean in means])
    return targets
