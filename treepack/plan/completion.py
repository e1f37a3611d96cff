"""What a partial plan of one subtree still costs in the whole tree: the bounds and the sums of `traversals.py`.

A row that holds leaves below node v passes through v once, a traversal of v. With k traversals of v, at least k of
every ancestor. So for each node and number of traversals there is a least cost from below and a most from above:

    below[v][k]    least tokens strictly below v in k traversals      (leaves up: exact once v is solved)
    allowed[v][k]  most tokens strictly below v in k traversals       (root down: the target less all other subtrees)

The recursion is the one of `recursive_bound`, for every k instead of the least.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treepack.plan.problem import Tree
from treepack.trajectory import Int64

IMPOSSIBLE = 1 << 50
MOST_SUMS = 1024  # more different sums than this hardly ever round anything


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree as lists by node. `room` is what a row that passes through a node has left below it.

    `children` are in the order in which they are put together: most leaves first, then most tokens.
    """

    size: list[int]
    room: list[int]
    parent: list[int]
    children: list[list[int]]
    num_leaves: int

    @classmethod
    def of(cls, tree: Tree, capacity: int) -> Shape:
        parent, end = tree.parent.tolist(), tree.end.tolist()
        first = np.searchsorted(tree.leaf, np.arange(tree.num_nodes))
        leaves = (np.searchsorted(tree.leaf, tree.end) - first).tolist()
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
class Completion:
    """Bounds for plans of at most `tokens` tokens, and of at most `rows` rows if of exactly `tokens`."""

    shape: Shape
    tokens: int
    rows: int
    lifted: list[Int64] = field(init=False)  # per node: tokens in it and below it with at most k traversals
    inner: list[Int64] = field(init=False)  # per node: sum of `lifted` over its children

    def __post_init__(self) -> None:
        shape = self.shape
        num = shape.num_leaves + 1
        self.lifted = [np.zeros(0, np.int64)] * len(shape.size)
        self.inner = [np.zeros(num, np.int64) for _ in shape.size]
        for node in range(len(shape.size) - 1, -1, -1):
            below = self._below(node)
            if not shape.children[node]:
                below[2:] = IMPOSSIBLE
            self._lift(node, below)

    def _below(self, node: int) -> Int64:
        traversals = np.arange(self.shape.num_leaves + 1)
        below = np.where(self.inner[node] <= traversals * self.shape.room[node], self.inner[node], IMPOSSIBLE)
        below[0] = IMPOSSIBLE
        return below

    def _lift(self, node: int, below: Int64) -> None:
        lifted = np.minimum.accumulate(below + np.arange(len(below)) * self.shape.size[node])
        lifted = np.minimum(lifted, IMPOSSIBLE)
        up = self.shape.parent[node]
        if up >= 0:
            old = self.lifted[node]
            self.inner[up] = self.inner[up] + lifted - (old if len(old) else 0)
        self.lifted[node] = lifted

    def settle(self, node: int, costs: list[tuple[int, int]]) -> None:
        """Take (traversals, tokens below) of all states of a solved node for its bound, and its ancestors' with it."""
        below = np.full(self.shape.num_leaves + 1, IMPOSSIBLE)
        for traversals, tokens in costs:
            below[traversals] = min(below[traversals], tokens)
        self._lift(node, below)
        while (node := self.shape.parent[node]) >= 0:
            self._lift(node, self._below(node))

    def bound(self) -> int:
        """Least tokens of the whole tree."""
        return int(self.lifted[0][-1])

    def allowed(self, node: int) -> Int64:
        """Most tokens strictly below `node` by number of traversals, negative where there can be none."""
        shape = self.shape
        path = [node]
        while path[-1]:
            path.append(shape.parent[path[-1]])
        traversals = np.arange(shape.num_leaves + 1)
        most = self.tokens - (traversals > self.rows)
        for at, below in zip(path[::-1], [*path[-2::-1], -1], strict=True):
            most = np.minimum(most - traversals * shape.size[at], traversals * shape.room[at])
            most[0] = -IMPOSSIBLE
            if below >= 0:
                most = suffix_maximum(most - (self.inner[at] - self.lifted[below]))
        return most


def suffix_maximum(values: Int64) -> Int64:
    """The greatest value at or after each place."""
    return np.maximum.accumulate(values[::-1])[::-1]


@dataclass(frozen=True, slots=True)
class Sums:
    """All that can still be added to a traversal, sorted, from 0; None where there are too many different sums.

    `after[u][j]` for a traversal of u that holds parts of the first j + 1 children: the sums of parts of the later
    children and of all that hangs off the path from the root to u. Ancestors are paid for, so they add nothing.
    """

    after: list[list[Int64 | None]]

    @classmethod
    def of(cls, shape: Shape) -> Sums:
        num = len(shape.size)
        zero = np.zeros(1, np.int64)
        whole: list[Int64 | None] = [zero] * num  # sums of a node and parts of what is below it, or nothing
        for node in range(num - 1, -1, -1):
            sums: Int64 | None = zero
            for child in shape.children[node]:
                sums = _added(sums, whole[child], shape.room[node])
            if sums is not None:
                whole[node] = np.unique(np.concatenate([zero, sums + shape.size[node]]))
            else:
                whole[node] = None
        outside: list[Int64 | None] = [zero] * num
        after: list[list[Int64 | None]] = [[] for _ in range(num)]
        for node in range(num):
            children, room = shape.children[node], shape.room[node]
            later = [outside[node]]
            for child in children[:0:-1]:
                later.append(_added(later[-1], whole[child], room))
            after[node] = later[::-1]
            earlier: Int64 | None = zero
            for child, rest in zip(children, after[node], strict=False):
                outside[child] = _added(rest, earlier, shape.room[child])
                earlier = _added(earlier, whole[child], room)
        return cls(after)


def _added(a: Int64 | None, b: Int64 | None, most: int) -> Int64 | None:
    """Sums up to `most` of one value of each."""
    if a is None or b is None:
        return None
    sums = np.unique(np.add.outer(a, b))
    sums = sums[: np.searchsorted(sums, most, side="right")]
    return sums if len(sums) <= MOST_SUMS else None
