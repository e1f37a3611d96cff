"""Tokens that any two trajectories of a trie have in common, from the tokens that neighbours have in common.

    a b c d    a b x    a y         shared with the one before: 0 2 1
    a b c d             a y         the minimum of 2 and 1

In the order of the trie, the longest common prefix of two trajectories is the minimum over all neighbours between them.
Only numpy is imported.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from treepack.trajectory import Int64

if TYPE_CHECKING:
    from treepack.trie.trie import Trie


def shared_in_order(trie: Trie) -> Int64:
    """Return the tokens that each trajectory shares with the one before it, 0 for the first; [num_trajectories]."""
    # Nodes are depth-first, so the node after the end of a trajectory is the first new one of the next trajectory, and
    # its depth is the number of shared tokens. Equal ends are equal trajectories, which share everything.
    ends = trie.end_node.astype(np.int64)
    first_new = np.minimum(ends[:-1] + 1, trie.num_nodes - 1)
    shared = np.where(ends[1:] > ends[:-1], trie.depth[first_new], trie.path_length[ends[1:]])
    return np.concatenate([np.zeros(min(1, len(ends)), np.int64), shared])


def range_minima(values: Int64, start: Int64, stop: Int64) -> Int64:
    """Return the minimum of `values[start:stop]` for each pair, start < stop. O((values + pairs) log values).

    A range of at least 2**k and fewer than 2**(k + 1) values is the union of two overlapping windows of 2**k values.
    The window minima of one level give the minima of the next, so the memory is linear.
    """
    # k of each length: [1, 2, 3, 4, 5, 6, 7, 8] -> [0, 1, 1, 2, 2, 2, 2, 3]
    level = np.frexp(stop - start)[1] - 1
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max(initial=-1)) + 2))
    minima = np.zeros(len(start), np.int64)
    width = 1
    for a, b in pairwise(bounds.tolist()):
        mine = by_level[a:b]
        minima[mine] = np.minimum(values[start[mine]], values[stop[mine] - width])
        # values[i] is now the minimum of 2 * width: [5, 3, 8, 1, 9] -> [3, 3, 1, 1] -> [1, 1]
        values = np.minimum(values[:-width], values[width:])
        width *= 2
    return minima
