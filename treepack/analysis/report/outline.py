"""Places of the nodes of some trajectories in a drawing of their tree, with the root at the left.

    Trie, trajectories --outline--> Block, Block, ...

A block is as wide as its tokens and as tall as the leaves below it. A chain of nodes of the trie is one block if none
of these trajectories branches or ends inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from treepack.analysis.report.parts import rewards_of
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class Block:
    """One node: tokens `start` to `end` from the root, `rows` rows from `row` on, `count` trajectories through it."""

    start: int
    end: int
    row: int
    rows: int
    count: int
    reward: float


def outline(trie: Trie, members: Int64) -> list[Block]:
    """Return the blocks of the nodes on the paths of the trajectories `members`, depth-first."""
    # New numbers for the nodes on the paths: nodes [0, 2, 5] of 7 -> place [0, -1, 1, -1, -1, 2, -1]
    nodes = np.flatnonzero(_on_paths(trie, members))
    place = np.full(trie.num_nodes, -1, np.int64)
    place[nodes] = np.arange(len(nodes))
    parent = np.where(trie.parent[nodes] < 0, -1, place[trie.parent[nodes]]).tolist()
    ends = place[trie.end_node[members]]
    counts = np.bincount(ends, minlength=len(nodes)).tolist()
    rewards = rewards_of(trie)[members]
    known = np.bincount(ends, ~np.isnan(rewards), len(nodes)).tolist()
    sums = np.bincount(ends, np.nan_to_num(rewards), len(nodes)).tolist()
    leaf = np.ones(len(nodes), np.int64)
    # Sums over subtrees: children come after their parents, so one pass from the back adds each to its parent.
    leaf[[up for up in parent if up >= 0]] = 0
    rows = leaf.tolist()
    for node in range(len(nodes) - 1, -1, -1):
        if (up := parent[node]) >= 0:
            for values in (counts, known, sums, rows):
                values[up] += values[node]
    first = np.cumsum(leaf) - leaf  # leaves before each node, depth-first: leaf [0, 1, 0, 1, 1] -> [0, 0, 1, 1, 2]
    starts, stops = trie.depth[nodes].tolist(), trie.path_length[nodes].tolist()
    children = np.bincount([up for up in parent if up >= 0], minlength=len(nodes))
    continues = (children == 1) & ~np.isin(np.arange(len(nodes)), ends)
    blocks: list[Block] = []
    for i, up in enumerate(parent):
        if up >= 0 and continues[up]:  # depth-first, so the block of its parent is the last one
            blocks[-1] = replace(blocks[-1], end=stops[i])
        else:
            reward = sums[i] / known[i] if known[i] else float("nan")
            blocks.append(Block(starts[i], stops[i], int(first[i]), rows[i], counts[i], reward))
    return blocks


def _on_paths(trie: Trie, members: Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the nodes on the paths of `members`: an end is in the subtree of every node of its path."""
    # Nodes 0 to 3, node_end [4, 3, 3, 4], ends [2]: before each node [0, 0, 0, 1] ends, before its end [1, 1, 1, 1]
    # -> on the paths [1, 1, 1, 0].
    ends = np.sort(trie.end_node[members])
    first = np.searchsorted(ends, np.arange(trie.num_nodes), side="left")
    return np.asarray(first < np.searchsorted(ends, trie.node_end, side="left"))
