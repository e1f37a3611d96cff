"""Bounds on the cost of a partial plan of one subtree in the whole tree, and sums for rounding, for `traversals.py`.

A row that contains leaves below node v passes through v once; this is a traversal of v. If v has k traversals, every
ancestor of v has at least k. So there are two limits for each node and each number of traversals:

    below[v][k]    minimum tokens strictly below v in k traversals    (from the leaves: exact when v is solved)
    allowed[v][k]  maximum tokens strictly below v in k traversals    (from the root: target - all other subtrees)

The recursion is that of `recursive_bound`, but for every k and not only for the minimum k.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treepack.pack.plan.problem import PlanTree
from treepack.trajectory import Int64

Rooms = tuple[int, ...]  # the room of each traversal, ascending: the tokens that it has left
State = tuple[int, Rooms]  # tokens strictly below a node, or up to the end of its parent, and the traversals

IMPOSSIBLE = 1 << 50  # more tokens than any plan has; sums of a few thousand still fit int64
_MAX_SUMS = 1024  # with more different sums, rounding hardly ever changes a room


@dataclass(frozen=True, slots=True)
class SubtreeShape:
    """A tree as lists by node. `room` is the number of tokens that a row through a node has left below it.

    `children` are in the order in which they are merged: by falling number of leaves, then by falling tokens.
    """

    size: list[int]
    room: list[int]
    parent: list[int]
    children: list[list[int]]
    num_leaves: int

    @classmethod
    def of(cls, tree: PlanTree, capacity: int) -> SubtreeShape:
        parent, end = tree.parent.tolist(), tree.end.tolist()
        first = np.searchsorted(tree.leaf, np.arange(tree.num_nodes))
        leaves = (np.searchsorted(tree.leaf, tree.end) - first).tolist()
        # Tokens of each subtree, which is a range of nodes: sizes [4, 2, 1], ends [3, 2, 3] -> [7, 2, 1].
        tokens = np.concatenate([[0], np.cumsum(tree.size)])
        total = (tokens[tree.end] - tokens[:-1]).tolist()
        children: list[list[int]] = [[] for _ in end]
        for node in range(1, tree.num_nodes):
            children[parent[node]].append(node)
        for some in children:
            some.sort(key=lambda node: (-leaves[node], -total[node], node))
        room = (capacity - tree.depth - tree.size).tolist()
        return cls(tree.size.tolist(), room, parent, children, tree.num_leaves)


@dataclass(slots=True)
class CompletionBounds:
    """Bounds for plans of fewer than `tokens` tokens, or of exactly `tokens` tokens and at most `rows` rows."""

    shape: SubtreeShape
    tokens: int
    rows: int
    lifted: list[Int64] = field(init=False)  # per node: minimum tokens in it and below it with at most k traversals
    inner: list[Int64] = field(init=False)  # per node: sum of `lifted` over its children

    def __post_init__(self) -> None:
        shape = self.shape
        num = shape.num_leaves + 1
        self.lifted = [np.zeros(0, np.int64)] * len(shape.size)
        self.inner = [np.zeros(num, np.int64) for _ in shape.size]
        for node in range(len(shape.size) - 1, -1, -1):
            below = self._below(node)
            if not shape.children[node]:
                below[2:] = IMPOSSIBLE  # a leaf is in one row
            self._lift(node, below)

    def _below(self, node: int) -> Int64:
        # The tokens below must fit into k traversals: inner [7, 7, 7, 7], room 4 -> impossible for k 0 and 1.
        traversals = np.arange(self.shape.num_leaves + 1)
        below = np.where(self.inner[node] <= traversals * self.shape.room[node], self.inner[node], IMPOSSIBLE)
        below[0] = IMPOSSIBLE
        return below

    def _lift(self, node: int, below: Int64) -> None:
        # Every traversal pays for the node: below [X, X, 7, 7], size 4 -> [X, X, 15, 19]; at most k: [X, X, 15, 15].
        lifted = np.minimum.accumulate(below + np.arange(len(below)) * self.shape.size[node])
        lifted = np.minimum(lifted, IMPOSSIBLE)
        up = self.shape.parent[node]
        if up >= 0:
            # Replace the part of this node in the sum of its parent.
            old = self.lifted[node]
            self.inner[up] = self.inner[up] + lifted - (old if len(old) else 0)
        self.lifted[node] = lifted

    def settle(self, node: int, costs: list[tuple[int, int]]) -> None:
        """Set the exact bound of a solved node, from (traversals, tokens below) of its states; update its ancestors."""
        below = np.full(self.shape.num_leaves + 1, IMPOSSIBLE)
        for traversals, tokens in costs:
            below[traversals] = min(below[traversals], tokens)
        self._lift(node, below)
        while (node := self.shape.parent[node]) >= 0:
            self._lift(node, self._below(node))

    def bound(self) -> int:
        """Return the minimum tokens of the whole tree."""
        return int(self.lifted[0][-1])

    def allowed(self, node: int) -> Int64:
        """Return the maximum tokens strictly below `node` for each number of traversals, negative if impossible."""
        shape = self.shape
        path = [node]
        while path[-1]:
            path.append(shape.parent[path[-1]])
        traversals = np.arange(shape.num_leaves + 1)
        # With more rows than the target, a plan needs a token less: tokens 34, rows 3 -> [34, 34, 34, 34, 33, 33].
        maximum = self.tokens - (traversals > self.rows)
        for at, below in zip(path[::-1], [*path[-2::-1], -1], strict=True):
            # Each traversal of `at` pays for it and has only its room left below it.
            maximum = np.minimum(maximum - traversals * shape.size[at], traversals * shape.room[at])
            maximum[0] = -IMPOSSIBLE
            if below >= 0:
                # The siblings of the next node need their minimum, and it may have fewer traversals than `at`.
                maximum = suffix_maximum(maximum - (self.inner[at] - self.lifted[below]))
        return maximum


def suffix_maximum(values: Int64) -> Int64:
    """Return the maximum of the values from each place on: [1, 5, 2, 4, 3] -> [5, 5, 4, 4, 3]."""
    return np.maximum.accumulate(values[::-1])[::-1]


class TokenSums:
    """Sets of token sums that can be added to a traversal, as bit masks; None if almost every sum can.

    Bit s is set if s tokens can be added. If x is the room of a traversal, and y <= x is the largest sum that can be
    added, the traversal is as good with room y. It then counts as longer by x - y tokens. The program rounds rooms in
    this way, one node after another in reverse depth-first order. A solved node adds the tokens that its rounded
    traversals count, not the tokens that they contain: it would be wrong to round two subtrees each by the true sums of
    the other one. Subtrees beside the path to the root add no tokens of the path.
    """

    def __init__(self, shape: SubtreeShape) -> None:
        self.shape = shape
        num = len(shape.size)
        self.parts: list[int | None] = [1] * num  # of the subtree of each node; bit 0: nothing of it
        self.solved: list[int | None] = [1] * num  # of the solved children of each node
        self.earlier: list[int | None] = [1] * num  # of the siblings before each node, which are solved after it
        self.outside: dict[int, int | None] = {0: 1}
        for node in range(num - 1, -1, -1):
            below: int | None = 1
            for child in sorted(shape.children[node]):
                self.earlier[child] = below
                below = add_sums(below, self.parts[child], shape.room[node])
            # Anything below the node comes with the node: sums {0, 3} below, size 2 -> {0, 2, 5}, 0b1001 -> 0b100101.
            self.parts[node] = None if below is None else below << shape.size[node] | 1

    def of_outside(self, node: int) -> int | None:
        """Return the sums that can be added to a traversal of `node`, which is the next node to solve."""
        path = [node]
        while path[-1] not in self.outside:
            path.append(self.shape.parent[path[-1]])
        for at in path[-2::-1]:  # the sums beside an ancestor stay the same while nodes below it are solved
            up = self.shape.parent[at]
            beside = add_sums(self.earlier[at], self.solved[up], self.shape.room[up])
            self.outside[at] = add_sums(self.outside[up], beside, self.shape.room[at])
        return self.outside[node]

    def settle(self, node: int, rooms: set[int]) -> None:
        """Replace the sums of a solved node by the sums of its traversals, whose rooms over all states are `rooms`."""
        up = self.shape.parent[node]
        if up < 0:
            return
        parts = 1
        for left in rooms:
            # A traversal with `left` tokens left takes up the rest of the room below the parent.
            parts |= 1 << (self.shape.room[up] - left)
        self.parts[node] = parts
        self.solved[up] = add_sums(self.solved[up], parts, self.shape.room[up])


def add_sums(a: int | None, b: int | None, most: int) -> int | None:
    """Return the sums up to `most` of one value of each set; O(size of the smaller set * `most`).

    None if a set is None or has more than `_MAX_SUMS` values.
    """
    # {0, 3} and {0, 2}: 0b1001, 0b101 -> {0, 2, 3, 5}: 0b101101
    if a is None or b is None:
        return None
    few, many = (a, b) if a.bit_count() < b.bit_count() else (b, a)
    if few.bit_count() > _MAX_SUMS:
        return None
    mask = (1 << (most + 1)) - 1
    sums = 0
    for value in _values(few):
        sums |= many << value & mask
    return sums


def _values(bits: int) -> list[int]:
    """Return the set bits, ascending: 0b1101001 -> [0, 3, 5, 6]."""
    packed = np.frombuffer(bits.to_bytes(bits.bit_length() // 8 + 1, "little"), np.uint8)
    values: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return values
