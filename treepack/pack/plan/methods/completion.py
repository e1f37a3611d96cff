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

from treepack.pack.plan.problem import PlanTree
from treepack.trajectory import Int64

Rooms = tuple[int, ...]  # what each traversal has left, ascending
State = tuple[int, Rooms]  # tokens strictly below a node, or up to its parent's end, and its traversals

IMPOSSIBLE = 1 << 50
MOST_SUMS = 1024  # more different sums than this hardly ever round anything


@dataclass(frozen=True, slots=True)
class SubtreeShape:
    """A tree as lists by node. `room` is what a row that passes through a node has left below it.

    `children` are in the order in which they are put together: most leaves first, then most tokens.
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

    shape: SubtreeShape
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


class Sums:
    """What can be added to a traversal: sets of sums of tokens, as bit masks, None where almost every sum occurs.

    A traversal with x tokens left is as good as one with the greatest possible sum <= x left, and then takes up as much
    as if it were longer by the difference. So the program rounds, one node after the other in reverse depth-first
    order, and what it has solved adds what its rounded traversals take up, not what they hold: rounding two subtrees
    each by the true sums of the other would be wrong. What hangs off the path to the root adds nothing of the path.
    """

    def __init__(self, shape: SubtreeShape) -> None:
        self.shape = shape
        num = len(shape.size)
        self.parts: list[int | None] = [1] * num  # of each node with what is below it, or nothing of it
        self.solved: list[int | None] = [1] * num  # of the solved children of each node
        self.earlier: list[int | None] = [1] * num  # of the children of its parent before it, unsolved while it is
        self.outside: dict[int, int | None] = {0: 1}
        for node in range(num - 1, -1, -1):
            below: int | None = 1
            for child in sorted(shape.children[node]):
                self.earlier[child] = below
                below = added(below, self.parts[child], shape.room[node])
            self.parts[node] = None if below is None else below << shape.size[node] | 1

    def of_outside(self, node: int) -> int | None:
        """What can be added to a traversal of `node`, which is the next to solve."""
        path = [node]
        while path[-1] not in self.outside:
            path.append(self.shape.parent[path[-1]])
        for at in path[-2::-1]:  # what is beside an ancestor stays the same while nodes below it are solved
            up = self.shape.parent[at]
            beside = added(self.earlier[at], self.solved[up], self.shape.room[up])
            self.outside[at] = added(self.outside[up], beside, self.shape.room[at])
        return self.outside[node]

    def settle(self, node: int, rooms: set[int]) -> None:
        """Take what the traversals of all states of a solved node have left."""
        up = self.shape.parent[node]
        if up < 0:
            return
        parts = 1
        for left in rooms:
            parts |= 1 << (self.shape.room[up] - left)
        self.parts[node] = parts
        self.solved[up] = added(self.solved[up], parts, self.shape.room[up])


def added(a: int | None, b: int | None, most: int) -> int | None:
    """Sums up to `most` of one value of each; O(least number of values * `most`)."""
    if a is None or b is None:
        return None
    few, many = (a, b) if a.bit_count() < b.bit_count() else (b, a)
    if few.bit_count() > MOST_SUMS:
        return None
    mask = (1 << (most + 1)) - 1
    sums = 0
    for value in _values(few):
        sums |= many << value & mask
    return sums


def _values(bits: int) -> list[int]:
    packed = np.frombuffer(bits.to_bytes(bits.bit_length() // 8 + 1, "little"), np.uint8)
    values: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return values
