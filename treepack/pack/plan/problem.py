"""What a packing method is given and what it returns: one tree's sizes and shape, no tokens.

    Trie --forest_of--> Tree, Tree, ...        a method: Tree, Limits, Search -> Solution

What must be put into rows are the leaves. A trajectory that ends inside the tree rides along with the first leaf below
its end, for free; nodes with a single child are joined with it, so every inner node branches.

    t0  a b c d            trie   [a b] - [c] - [d]       tree   0: size 2, leaves t0 and t2
    t1  a b c                 '- [x y]                             1: size 2 (c d), leaf 0, carries t1
    t2  a b x y                                                    2: size 2 (x y), leaf 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from treepack.columns import SpanView
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

EFFORTS = ("low", "normal", "high")

MOST_TOKENS = 2**31 - 1
"""The greatest capacity: columns count the tokens of a row in 32 bits."""
MOST_COUNTED = 10**18
"""The greatest budget: sums of a few fit 64 bits."""


@dataclass(frozen=True, slots=True)
class PlanTree:
    """Nodes in depth-first order; all arrays int64.

    Node u adds `size[u]` tokens below the `depth[u]` tokens of its ancestors, `parent[u]` is -1 at the root, its
    subtree is the nodes `u .. end[u] - 1`. `leaf[k]` is the node of leaf k, ascending; `terms[k]` counts the loss
    terms of the trajectories that go where leaf k goes.
    """

    size: Int64
    depth: Int64
    parent: Int64
    end: Int64
    leaf: Int64
    terms: Int64

    @property
    def num_nodes(self) -> int:
        return len(self.size)

    @property
    def num_leaves(self) -> int:
        return len(self.leaf)

    @property
    def tokens(self) -> int:
        """Tokens of the whole tree."""
        return int(self.size.sum())

    @property
    def length(self) -> Int64:
        """Tokens from the root to each leaf's end, [num_leaves]."""
        return (self.depth + self.size)[self.leaf]

    @property
    def shared(self) -> Int64:
        """Tokens that each leaf shares with the leaf before it, 0 for the first; [num_leaves]."""
        return np.concatenate([[0], self.depth[self.leaf[:-1] + 1]]).astype(np.int64)

    @property
    def pairs(self) -> Int64:
        """Attention score pairs of each node: the sum of position + 1 over its tokens, [num_nodes]."""
        return path_pairs(self.depth + self.size) - path_pairs(self.depth)


def path_pairs(length: Int64) -> Int64:
    """Score pairs of a path of `length` tokens."""
    return length * (length + 1) // 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Most that one row may hold: tokens, and, unless None, attention score pairs and loss terms."""

    capacity: int
    pairs: int | None = None
    terms: int | None = None

    @property
    def longest(self) -> int:
        """Most tokens of a trajectory that is within the limits on tokens and pairs alone."""
        if self.pairs is None:
            return self.capacity
        return min(self.capacity, (math.isqrt(8 * self.pairs + 1) - 1) // 2)


@dataclass(frozen=True, slots=True)
class Search:
    """How hard a method may try.

    `effort` is one of `EFFORTS` and measures work, so that a plan is the same on any machine; `time_limit`, in seconds
    for each tree, is for methods that prove. `num_leaves` of all trees are planned together: `plan_rows` sets it.
    """

    effort: str = "normal"
    time_limit: float | None = None
    num_leaves: int = 0


@dataclass(frozen=True, slots=True)
class Solution:
    """Rows of one tree, `row_of_leaf` int64 [leaves], numbered from 0 without a gap.

    No plan of the tree within its capacity has fewer tokens than `lower_bound`; 0 where a method proves nothing.
    """

    row_of_leaf: Int64
    lower_bound: int = 0


@dataclass(frozen=True, slots=True)
class PlanForest:
    """All trees of a trie in one `PlanTree`-like set of arrays, and where each trajectory goes.

    Tree i is the nodes `node_start[i] .. node_start[i + 1]` and the leaves `leaf_start[i] .. leaf_start[i + 1]`;
    `leaf_of` int64 [num_trajectories] is the leaf, counted over all trees, that each trajectory goes with.
    """

    joined: PlanTree
    node_start: Int64
    leaf_start: Int64
    leaf_of: Int64

    @property
    def num_trees(self) -> int:
        return len(self.node_start) - 1

    @property
    def num_leaves(self) -> int:
        return self.joined.num_leaves

    def trees(self) -> Iterator[PlanTree]:
        """Each tree alone, its nodes numbered from 0."""
        joined = self.joined
        nodes, leaves = self.node_start.tolist(), self.leaf_start.tolist()
        for a, b, first, last in zip(nodes[:-1], nodes[1:], leaves[:-1], leaves[1:], strict=True):
            parent = joined.parent[a:b] - a
            parent[0] = -1
            leaf, terms = joined.leaf[first:last] - a, joined.terms[first:last]
            yield PlanTree(joined.size[a:b], joined.depth[a:b], parent, joined.end[a:b] - a, leaf, terms)


def forest_of(trie: Trie, *, split_ends: bool = False) -> PlanForest:
    """The shapes of all trees of `trie`. O(nodes + trajectories), vectorised.

    With `split_ends` every trajectory is a leaf of its own, of no tokens where another passes through its end or ends
    there too: needed where loss terms are limited, since then duplicates and prefixes are no longer free.
    """
    parent, end, ends = (array.astype(np.int64) for array in (trie.parent, trie.node_end, trie.end_node))
    nodes = _NodeLists(trie.depth, trie.path_length, parent, end)
    if split_ends:
        nodes, ends = _with_ends_as_leaves(nodes, ends)
    joined = _chains_joined(nodes)
    is_leaf = joined.end == np.arange(1, len(joined.end) + 1)
    leaf = np.flatnonzero(is_leaf)
    bottoms = _bottoms(nodes)
    # The chain that holds an end is the first whose bottom lies at or after it; its first leaf, the first below that.
    leaf_of = np.searchsorted(leaf, np.searchsorted(bottoms, ends))
    spans = SpanView.of(trie.trajectories)
    terms = np.bincount(leaf_of, spans.total(spans.sizes.astype(np.float64)), minlength=len(leaf)).astype(np.int64)
    roots = np.flatnonzero(joined.parent < 0)
    return PlanForest(
        PlanTree(joined.stop - joined.depth, joined.depth, joined.parent, joined.end, leaf, terms),
        np.append(roots, len(joined.parent)),
        np.append(np.searchsorted(leaf, roots), len(leaf)),
        leaf_of,
    )


@dataclass(frozen=True, slots=True)
class _NodeLists:
    """Nodes in depth-first order: tokens of the path before and up to the end of each, parent, end of subtree."""

    depth: Int64
    stop: Int64
    parent: Int64
    end: Int64


def _bottoms(nodes: _NodeLists) -> Int64:
    """The last node of each chain of only children: those that do not have exactly one child."""
    return np.flatnonzero(np.bincount(nodes.parent[nodes.parent >= 0], minlength=len(nodes.parent)) != 1)


def _chains_joined(nodes: _NodeLists) -> _NodeLists:
    # The only child of a node comes next in depth-first order, so a chain is a run of nodes that ends at its bottom.
    bottoms = _bottoms(nodes)
    tops = np.concatenate([[0], bottoms[:-1] + 1])
    above = nodes.parent[tops]
    parent = np.where(above < 0, -1, np.searchsorted(bottoms, above))
    return _NodeLists(nodes.depth[tops], nodes.stop[bottoms], parent, np.searchsorted(bottoms, nodes.end[bottoms]))


def _with_ends_as_leaves(nodes: _NodeLists, ends: Int64) -> tuple[_NodeLists, Int64]:
    """A node of no tokens for every end that is not the only one of a childless node, right below that node."""
    num_nodes = len(nodes.parent)
    childless = nodes.end == np.arange(1, num_nodes + 1)
    alone = childless & (np.bincount(ends, minlength=num_nodes) == 1)
    extra = np.flatnonzero(~alone[ends])
    above = ends[extra]
    shift = np.concatenate([[0], np.cumsum(np.bincount(above, minlength=num_nodes))])  # extras before each node
    old_at = np.arange(num_nodes) + shift[:-1]
    extra_at = above + np.arange(len(extra)) + 1
    new_ends = old_at[ends]
    new_ends[extra] = extra_at
    size = num_nodes + len(extra)

    def merged(old: Int64, added: Int64) -> Int64:
        out = np.zeros(size, np.int64)
        out[old_at], out[extra_at] = old, added
        return out

    parent = np.where(nodes.parent < 0, -1, old_at[nodes.parent])
    stop = nodes.stop[above]
    end = nodes.end + shift[nodes.end]
    return _NodeLists(
        merged(nodes.depth, stop), merged(nodes.stop, stop), merged(parent, old_at[above]), merged(end, extra_at + 1)
    ), new_ends
