"""Paths through a trie, and the small tree that one group's trajectories form in it.

    Trie --group_codes--> group of each trajectory, as a number
    Trie --node_paths--> NodePaths        ancestor of any node by token offset, lowest common ancestors
    Trie, group of each trajectory --group_tree--> _GroupTree       end nodes and branch nodes of the group, no others
    _GroupTree, first trained tokens --find_origins--> TrajectoryOrigins  the trajectory that each trajectory continues

        1 - 2 - 3 4 - 5 6   a, group g        The trie has 7 nodes, a node for each run of tokens between branches.
        |   |     '-- 7     b, group g        The tree of g omits the node `1`: only h leaves g there.
        |   '-- 8           c, group g
        '-- 9               d, group h

A trie that several groups share also has branches at which one group leaves another. A `_GroupTree` has only the
branches of its own group. Time and memory are O(n log n) in the number of trajectories plus O(nodes of the trie), for
any path length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treepack.sequences import text_codes
from treepack.trajectory import Int64
from treepack.trie.shared_prefixes import range_minima
from treepack.trie.trie import Trie


def group_codes(trie: Trie) -> Int64:
    """Code of each trajectory's group (its `group_id` in its training step), from 0; int64 [num_trajectories]."""
    # One number for step and name: step_rank [0, 0, 1], names [0, 1, 0] -> keys [0, 1, 2] -> three groups.
    names = text_codes(trie.trajectories["group_id"])
    keys = trie.step_rank * (int(names.max(initial=0)) + 1) + names
    codes: Int64 = np.unique(keys, return_inverse=True)[1].astype(np.int64)
    return codes


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Paths of a forest, searched upwards in O(log depth): `jumps[k]` leads 2^k nodes up, or from a root to itself.

    `path_length` int64 [num_nodes] is the number of tokens from the root to the end of each node.
    """

    path_length: Int64
    jumps: list[Int64]

    @classmethod
    def of(cls, parent: NDArray[np.integer], path_length: Int64) -> NodePaths:
        """Build the paths of the forest with this `parent` [num_nodes], -1 at a root."""
        # parent [-1, 0, 1, 2, 2, 1, 0] -> jumps [0, 0, 1, 2, 2, 1, 0], [0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]
        jump = np.where(parent < 0, np.arange(len(parent)), parent)
        jumps = [jump]
        while not np.array_equal(jump, further := jump[jump]):
            jump = further
            jumps.append(jump)
        return cls(path_length, jumps)

    def node_at(self, node: Int64, offset: Int64) -> Int64:
        """Return the node that contains token `offset`, counted from 0, of the path to each `node`."""
        # Jump as far as the ancestor still reaches past `offset`: from node `5 6` of the header to offset 1, node `2`.
        for jump in reversed(self.jumps):
            above = jump[node]
            node = np.where(self.path_length[above] > offset, above, node)
        return node

    def common_ancestor(self, a: Int64, b: Int64) -> Int64:
        """Return the lowest common ancestor of `a` <= `b`, numbered depth-first.

        If the nodes have no common ancestor, the result is some other node on the path of b.
        """
        # An ancestor of b with a number above a is below the branch, so climb while the number stays above a. Its
        # parent is the answer.
        for jump in reversed(self.jumps):
            above = jump[b]
            b = np.where(above > a, above, b)
        return np.where(b > a, self.jumps[0][b], b)


def node_paths(trie: Trie) -> NodePaths:
    """Build the paths of the nodes of `trie`."""
    return NodePaths.of(trie.parent, trie.path_length)


def token_places(trie: Trie, paths: NodePaths, trajectory: Int64, token: Int64) -> Int64:
    """Return the index in `trie.tokens` of token number `token` of each `trajectory`, all int64 [n].

    It identifies the whole prefix that ends with this token.
    """
    node = paths.node_at(trie.end_node[trajectory].astype(np.int64), token)
    return trie.node_start[node] + token - trie.depth[node]


@dataclass(frozen=True, slots=True)
class _GroupTree:
    """The trie nodes where trajectories of a group end or two of them branch, as one forest of all groups.

    All arrays are int64. Nodes are sorted by group and then depth-first. Each has its trie `node`, the index `up` of
    the next node towards the root (-1 at a root), and its trajectories [`first`, `last`), which are places in `order`.
    `order` lists all trajectories group by group and depth-first. `end` is the index of the node where each trajectory
    ends. `paths` are the paths of this forest, not of the trie.
    """

    paths: NodePaths
    node: Int64
    up: Int64
    first: Int64
    last: Int64
    order: Int64
    end: Int64


def group_tree(trie: Trie, paths: NodePaths, members: Int64, group: Int64) -> _GroupTree:
    """Build the trees of the trajectories `members` of `trie` (ascending), whose groups are `group`, codes from 0.

    The nodes are the end nodes of each group's trajectories, and the common ancestors of neighbours among them. `paths`
    are the paths of `trie`.
    """
    tree, size = trie.tree_id.astype(np.int64), trie.num_nodes
    # One number for group and node: groups [0, 0, 0, 1], end nodes [3, 4, 5, 6] of 7 nodes -> [3, 4, 5, 13].
    key = group * size + trie.end_node[members]
    ends = np.unique(key)
    # Depth-first neighbours suffice: the ancestors of [3, 4, 5] are [2, 1], so the keys become [1, 2, 3, 4, 5, 13].
    keys = np.unique(np.concatenate([ends, _common_ancestors(ends, tree, paths)[1]]))
    # After that, the common ancestor of a node and the one before it is its parent: up = [-1, 0, 1, 1, 0, -1].
    near, ancestors = _common_ancestors(keys, tree, paths)
    up = np.full(len(keys), -1)
    up[1:][near] = np.searchsorted(keys, ancestors)
    order = np.argsort(key, kind="stable")
    key_group, node = np.divmod(keys, size)
    return _GroupTree(
        paths=NodePaths.of(up, paths.path_length[node]),
        node=node,
        up=up,
        # Trajectories below a node end at keys from its key up to the end of its subtree: first = [0, 0, 0, 1, 2, 3],
        # last = [3, 2, 1, 2, 3, 4].
        first=np.searchsorted(key[order], keys),
        last=np.searchsorted(key[order], key_group * size + trie.node_end[node]),
        order=order,
        end=np.searchsorted(keys, key),
    )


def _common_ancestors(keys: Int64, tree: Int64, paths: NodePaths) -> tuple[NDArray[np.bool_], Int64]:
    """Mark each key that has the same group and tree as the key before, and return the common ancestors of these pairs.

    A key combines group and node in one number. The mark is bool [len(keys) - 1]; the ancestors are keys too.
    """
    # keys [3, 4, 5, 13] of 7 nodes -> near [True, True, False], ancestors [2, 1]
    key_group, node = np.divmod(keys, len(tree))
    near = (key_group[1:] == key_group[:-1]) & (tree[node[1:]] == tree[node[:-1]])
    return near, key_group[1:][near] * len(tree) + paths.common_ancestor(node[:-1][near], node[1:][near])


class TrajectoryOrigins(NamedTuple):
    """The trajectory `origin` that each trajectory continues, -1 if none, and their common tokens `shared`; int64 [n].

    `shared` stops at the first trained token of the trajectory that continues.
    """

    origin: Int64
    shared: Int64


def find_origins(tree: _GroupTree, first: Int64, rank: Int64) -> TrajectoryOrigins:
    """Find the trajectory of its group that each one continues, from their `first` trained tokens, int64 [n].

    Trajectory i may continue d if both are the same up to and including token `first[d]`, and that token is before
    `first[i]`. It continues the trajectory with which it has the longest common prefix before `first[i]`. If several
    have the same, the smallest `first` decides, and then the smallest `rank`, int64 [n].
    """
    # place [n]: position of each trajectory in the order of preference, so that a minimum finds the preferred one.
    preferred = np.lexsort((rank, first))
    place = np.empty_like(preferred)
    place[preferred] = np.arange(len(preferred))
    # best [num_nodes]: the preferred trajectory among all that pass through the node.
    best = preferred[range_minima(place[tree.order], tree.first, tree.last)]
    earliest = first[best]
    # From each node up to the nearest node, itself included, that already contains a trained token of its best one.
    above = np.where(earliest < tree.paths.path_length, np.arange(len(tree.node)), tree.up)
    above = np.append(above, -1)  # so that -1 leads to -1
    while not np.array_equal(above, further := above[above]):
        above = further
    # Every trajectory that shares the token before first[i] passes through this node, whatever follows there.
    last = tree.paths.node_at(tree.end, first - 1)
    node = np.where(earliest[last] < first, last, above[tree.up[last]])
    none = node < 0
    shared = np.minimum(tree.paths.path_length[node], first)
    return TrajectoryOrigins(np.where(none, -1, best[node]), np.where(none, 0, shared))
