"""Input and output of a packing method: the shape and sizes of one tree, without its tokens.

    Trie --shapes_of_trees--> PlanForest --trees--> PlanTree, PlanTree, ...
    a method:  PlanTree, RowLimits, SearchOptions -> TreeSolution

A method assigns the leaves to rows. A trajectory that ends inside the tree goes to the row of the first leaf below its
end, which costs no token. A node with exactly one child is merged with this child, so every inner node branches.

    t0  a b c d            trie   [a b] - [c] - [d]       tree   0: size 2, leaves t0 and t2
    t1  a b c                 '- [x y]                             1: size 2 (c d), leaf 0, with t1 inside
    t2  a b x y                                                    2: size 2 (x y), leaf 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treepack.trajectory import Int64

if TYPE_CHECKING:
    from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class PlanTree:
    """Nodes in depth-first order; all arrays int64.

    Node u adds `size[u]` tokens below the `depth[u]` tokens of its ancestors. `parent[u]` is -1 at the root. The
    subtree of u is the nodes `u .. end[u] - 1`. `leaf[k]` is the node of leaf k, ascending. `terms[k]` counts the loss
    terms of all trajectories that go to the row of leaf k.
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
        # The node after leaf k - 1 is the first one on the path to leaf k that leaf k - 1 does not share, so its depth
        # is the shared length. Leaves at nodes [1, 3, 4] look at nodes [2, 4] -> [0, depth[2], depth[4]].
        return np.concatenate([[0], self.depth[self.leaf[:-1] + 1]]).astype(np.int64)

    @property
    def pairs(self) -> Int64:
        """Attention score pairs of each node: the sum of position + 1 over its tokens, [num_nodes]."""
        # A node of 2 tokens at depth 4: positions 4 and 5 -> 5 + 6 = 11 = 21 - 10.
        return path_pairs(self.depth + self.size) - path_pairs(self.depth)


def path_pairs(length: Int64) -> Int64:
    """Return the score pairs of a path of `length` tokens: [0, 1, 2, 3, 4] -> [0, 1, 3, 6, 10]."""
    return length * (length + 1) // 2


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Maximum tokens of one row, and maximum attention score pairs and loss terms unless these are None."""

    capacity: int
    pairs: int | None = None
    terms: int | None = None

    @property
    def longest(self) -> int:
        """Maximum tokens of a trajectory that is within the limits on tokens and score pairs."""
        if self.pairs is None:
            return self.capacity
        # n (n + 1) / 2 <= pairs  <=>  n <= (sqrt(8 pairs + 1) - 1) / 2; pairs 9 -> 3, pairs 10 -> 4
        return min(self.capacity, (math.isqrt(8 * self.pairs + 1) - 1) // 2)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The work that a method may do.

    `effort` limits counted work, not time, so the plan is the same on any machine.
    """

    effort: str = "normal"  # one of `options.EFFORTS`
    time_limit: float | None = None  # seconds for each tree; only the exact method uses it
    num_leaves: int = 0  # leaves of all trees that are planned together; `plan_trees` sets it


@dataclass(frozen=True, slots=True)
class TreeSolution:
    """The rows of one tree: `row_of_leaf` int64 [leaves], rows numbered from 0 without a gap.

    No plan of the tree within the capacity has fewer tokens than `lower_bound`; it is 0 if the method proves nothing.
    """

    row_of_leaf: Int64
    lower_bound: int = 0


@dataclass(frozen=True, slots=True)
class PlanForest:
    """All trees of a trie in the arrays of one `PlanTree`, and the leaf of each trajectory.

    Tree i is the nodes `node_start[i] .. node_start[i + 1] - 1`, and the same with `leaf_start` for its leaves.
    Trajectory i goes to the row of the leaf `leaf_of[i]`, counted over all trees; int64 [num_trajectories].
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
        """Yield each tree alone, with its nodes numbered from 0."""
        joined = self.joined
        nodes, leaves = self.node_start.tolist(), self.leaf_start.tolist()
        for a, b, first, last in zip(nodes[:-1], nodes[1:], leaves[:-1], leaves[1:], strict=True):
            parent = joined.parent[a:b] - a
            parent[0] = -1
            leaf, terms = joined.leaf[first:last] - a, joined.terms[first:last]
            yield PlanTree(joined.size[a:b], joined.depth[a:b], parent, joined.end[a:b] - a, leaf, terms)


def shapes_of_trees(trie: Trie, *, split_ends: bool = False) -> PlanForest:
    """Return the shapes of all trees of `trie`. O(nodes + trajectories), vectorised.

    With `split_ends` every trajectory gets a separate leaf. The leaf has no tokens if another trajectory passes
    through the same end or ends there too. Limits on loss terms need this, because then duplicates and prefixes of
    other trajectories are no longer free.
    """
    from treepack.sequences import SpanView  # with Arrow, which the rest of this file does not need

    parent, end, ends = (array.astype(np.int64) for array in (trie.parent, trie.node_end, trie.end_node))
    nodes = _NodeLists(trie.depth, trie.path_length, parent, end)
    if split_ends:
        nodes, ends = _add_end_leaves(nodes, ends)
    joined = _merge_chains(nodes)
    # A leaf's subtree is the leaf alone: ends [3, 2, 3] against [1, 2, 3] -> leaves [1, 2].
    is_leaf = joined.end == np.arange(1, len(joined.end) + 1)
    leaf = np.flatnonzero(is_leaf)
    bottoms = _bottoms(nodes)
    # An end belongs to the first chain whose bottom is at or after it, and goes with the first leaf at or after this
    # chain: bottoms [0, 2, 3], ends [1, 2, 3] -> chains [1, 1, 2]; leaves [1, 2] -> leaf_of [0, 0, 1].
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
    """Nodes in depth-first order; `depth` and `stop` are the tokens from the root to the start and end of each node."""

    depth: Int64
    stop: Int64
    parent: Int64
    end: Int64


def _bottoms(nodes: _NodeLists) -> Int64:
    """Return the last node of each chain of only children: every node that does not have exactly one child."""
    # parent [-1, 0, 1, 0] -> children per node [2, 1, 0, 0] -> bottoms [0, 2, 3]
    return np.flatnonzero(np.bincount(nodes.parent[nodes.parent >= 0], minlength=len(nodes.parent)) != 1)


def _merge_chains(nodes: _NodeLists) -> _NodeLists:
    """Merge each node that has exactly one child with this child."""
    # An only child comes right after its parent in depth-first order, so a chain is a run of nodes up to its bottom:
    # bottoms [0, 2, 3] -> tops [0, 1, 3]; parents of the tops [-1, 0, 0] -> chains of these [-1, 0, 0].
    bottoms = _bottoms(nodes)
    tops = np.concatenate([[0], bottoms[:-1] + 1])
    above = nodes.parent[tops]
    parent = np.where(above < 0, -1, np.searchsorted(bottoms, above))
    return _NodeLists(nodes.depth[tops], nodes.stop[bottoms], parent, np.searchsorted(bottoms, nodes.end[bottoms]))


def _add_end_leaves(nodes: _NodeLists, ends: Int64) -> tuple[_NodeLists, Int64]:
    """Add a leaf of no tokens below each end, unless it is the only end of a childless node. Return the new ends too.

    The new leaves are the first children of their nodes, so the order stays depth-first.
    """
    num_nodes = len(nodes.parent)
    childless = nodes.end == np.arange(1, num_nodes + 1)
    alone = childless & (np.bincount(ends, minlength=num_nodes) == 1)
    extra = np.flatnonzero(~alone[ends])
    above = ends[extra]
    # The example of the header has ends [1, 2, 3], and node 1 has a child, so one leaf is added below node 1:
    # above [1] -> shift [0, 0, 1, 1, 1]; the old nodes move to [0, 1, 3, 4], the new leaf is node 2.
    shift = np.concatenate([[0], np.cumsum(np.bincount(above, minlength=num_nodes))])
    old_at = np.arange(num_nodes) + shift[:-1]
    extra_at = above + np.arange(len(extra)) + 1
    new_ends = old_at[ends]
    new_ends[extra] = extra_at
    size = num_nodes + len(extra)

    def merge(old: Int64, added: Int64) -> Int64:
        out = np.zeros(size, np.int64)
        out[old_at], out[extra_at] = old, added
        return out

    parent = np.where(nodes.parent < 0, -1, old_at[nodes.parent])
    stop = nodes.stop[above]
    end = nodes.end + shift[nodes.end]
    return _NodeLists(
        merge(nodes.depth, stop), merge(nodes.stop, stop), merge(parent, old_at[above]), merge(end, extra_at + 1)
    ), new_ends
