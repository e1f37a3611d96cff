"""Paths through a trie, and the small tree that one group's trajectories make in it.

    Trie --node_paths--> Paths            any node's ancestor by token offset, lowest common ancestors
    Trie, group of each trajectory --group_tree--> GroupTree       ends and branchings of the group, nothing between
    GroupTree, first trained tokens --continued--> Continued       which trajectory each one is a continuation of

A trie that several groups share branches where groups part too; a `GroupTree` has only what its own group does. Time
and memory are O(n log n) in the number of trajectories plus O(nodes of the trie), whatever the length of the paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treepack.trajectory import Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Searches up the paths of a forest in O(log depth): `jumps[k]` leads 2^k nodes up, a root to itself.

    `path_length` int64 [num_nodes] are the tokens up to the end of each node.
    """

    path_length: Int64
    jumps: list[Int64]

    @classmethod
    def of(cls, parent: NDArray[np.integer], path_length: Int64) -> NodePaths:
        """Those of the forest with this `parent` [num_nodes], -1 at a root."""
        jump = np.where(parent < 0, np.arange(len(parent)), parent)
        jumps = [jump]
        while not np.array_equal(jump, further := jump[jump]):
            jump = further
            jumps.append(jump)
        return cls(path_length, jumps)

    def holding(self, node: Int64, offset: Int64) -> Int64:
        """The node on the path to each `node` that holds the path's token `offset`, counted from 0."""
        for jump in reversed(self.jumps):
            above = jump[node]
            node = np.where(self.path_length[above] > offset, above, node)
        return node

    def common(self, a: Int64, b: Int64) -> Int64:
        """The lowest common ancestor of `a` <= `b`, in depth-first order; some other node of b's path if none."""
        for jump in reversed(self.jumps):
            above = jump[b]
            b = np.where(above > a, above, b)
        return np.where(b > a, self.jumps[0][b], b)


def node_paths(trie: Trie) -> NodePaths:
    """The paths of the nodes of `trie`."""
    return NodePaths.of(trie.parent, trie.path_length)


@dataclass(frozen=True, slots=True)
class GroupTree:
    """The forest of the trie nodes where trajectories of a group end and where any two of them part, for all groups.

    All int64, sorted by group and then depth-first: the trie `node` of each, the index `up` of the next one towards the
    root, -1 at a root, and [`first`, `last`) its trajectories, as places in `order`, which lists all trajectories group
    by group and depth-first. `end` is the index of the node where each trajectory ends.
    """

    paths: NodePaths
    node: Int64
    up: Int64
    first: Int64
    last: Int64
    order: Int64
    end: Int64


def group_tree(trie: Trie, paths: NodePaths, members: Int64, group: Int64) -> GroupTree:
    """The trees of the trajectories `members` of `trie` (ascending), whose groups are `group`, codes from 0.

    Their nodes are those where trajectories of a group end and the common ancestors of neighbours among them. `paths`
    are those of `trie`.
    """
    tree, size = trie.tree_id.astype(np.int64), trie.num_nodes
    key = group * size + trie.end_node[members]
    ends = np.unique(key)
    keys = np.unique(np.concatenate([ends, _meetings(ends, tree, paths)[1]]))
    near, meetings = _meetings(keys, tree, paths)
    up = np.full(len(keys), -1)
    up[1:][near] = np.searchsorted(keys, meetings)
    order = np.argsort(key, kind="stable")
    whose, node = np.divmod(keys, size)
    return GroupTree(
        paths=NodePaths.of(up, paths.path_length[node]),
        node=node,
        up=up,
        first=np.searchsorted(key[order], keys),
        last=np.searchsorted(key[order], whose * size + trie.node_end[node]),
        order=order,
        end=np.searchsorted(keys, key),
    )


def _meetings(keys: Int64, tree: Int64, paths: NodePaths) -> tuple[NDArray[np.bool_], Int64]:
    """Which of `keys`, group and node in one number, lie in the group and tree of the one before; where they meet."""
    whose, node = np.divmod(keys, len(tree))
    near = (whose[1:] == whose[:-1]) & (tree[node[1:]] == tree[node[:-1]])
    return near, whose[1:][near] * len(tree) + paths.common(node[:-1][near], node[1:][near])


class Continued(NamedTuple):
    """Which trajectory each one continues, `by`, -1 if none, and how many tokens both have, `shared`; int64 [n].

    `shared` counts no further than the first trained token of the one that continues.
    """

    by: Int64
    shared: Int64


def continued(tree: GroupTree, first: Int64, rank: Int64) -> Continued:
    """Which trajectory of its group each one continues, given their `first` trained tokens, int64 [n].

    i may continue d if both are the same up to and with token `first[d]` and that is before `first[i]`. It continues
    the one with which it has most tokens in common before `first[i]`; of several, that with the smallest `first`, and
    of these that with the smallest `rank`, int64 [n].
    """
    preferred = np.lexsort((rank, first))
    place = np.empty_like(preferred)
    place[preferred] = np.arange(len(preferred))
    who = preferred[_range_minima(place[tree.order], tree.first, tree.last)]
    earliest = first[who]
    above = np.where(earliest < tree.paths.path_length, np.arange(len(tree.node)), tree.up)
    above = np.append(above, -1)  # so that -1 leads to -1
    while not np.array_equal(above, further := above[above]):
        above = further
    # All that share the token before first[i] pass through this node, whichever way they then go.
    last = tree.paths.holding(tree.end, first - 1)
    found = np.where(earliest[last] < first, last, above[tree.up[last]])
    none = found < 0
    shared = np.minimum(tree.paths.path_length[found], first)
    return Continued(np.where(none, -1, who[found]), np.where(none, 0, shared))


def _range_minima(values: Int64, start: Int64, stop: Int64) -> Int64:
    """The smallest of `values[start[i]:stop[i]]` for each i, none of them empty."""
    level = np.frexp(stop - start)[1] - 1
    found, table = np.empty(len(start), np.int64), values
    for k in range(int(level.max(initial=-1)) + 1):
        mine = np.flatnonzero(level == k)
        found[mine] = np.minimum(table[start[mine]], table[stop[mine] - 2**k])
        table = np.minimum(table[: -(2**k)], table[2**k :])
    return found
