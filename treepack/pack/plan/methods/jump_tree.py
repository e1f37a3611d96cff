"""The tree of some leaves, with jumps from every node to an ancestor, in which `anneal.py` searches.

    lengths and shared tokens of the leaves --jump_tree--> by node: parent, jump, stop, pairs; by leaf: its node

The loops run in C, see `treepack/native/jump_tree.c`.
"""

from __future__ import annotations

import numpy as np

from treepack.native.library import INT, INT64, in_c
from treepack.pack.plan.problem import path_pairs
from treepack.trajectory import Int64


def jump_tree(lengths: Int64, shared: Int64) -> tuple[Int64, Int64]:
    """Return arrays by node, int64 [4, nodes], and the node of each leaf, int64 [leaves].

    By node: the parent, an ancestor to jump to, and the tokens and score pairs from the root to its end; -1 if there is
    no such node. `lengths` are the tokens of each leaf's path, and `shared` its common tokens with the leaf before.
    """
    num = len(lengths)
    parent, stop = np.full(2 * num, -1), np.zeros(2 * num, np.int64)
    leaf, path = np.zeros(num, np.int64), np.zeros(num + 1, np.int64)
    made = split_paths(lengths, shared, parent, stop, leaf, path)
    parent, stop = parent[:made], stop[:made]
    jump, depth = np.full(made, -1), np.zeros(made, np.int64)
    set_jumps(np.argsort(stop, kind="stable"), parent, jump, depth)
    return np.stack([parent, jump, stop, path_pairs(stop)]), leaf


@in_c(INT64, INT64, INT64, INT64, INT64, INT64, returns=INT)
def split_paths(lengths: Int64, shared: Int64, parent: Int64, stop: Int64, leaf: Int64, path: Int64) -> int:
    """Write the parent of each node, the tokens from the root to its end, and the node of each leaf.

    Returns the number of nodes, at most 2 * leaves; they are in no particular order. The path to the last leaf is a
    stack. If the next leaf leaves it inside a node, this node is split in two. `path` [leaves + 1] is scratch.
    """
    # lengths [6, 9, 7], shared [0, 4, 5] -> nodes 0 (leaf 0), 1 (split at 4), 2 (leaf 1), 3 (split at 5), 4 (leaf 2):
    # parent [1, -1, 3, 1, 3], stop [6, 4, 9, 5, 7], leaf [0, 2, 4].
    depth, made = 0, 0
    for k in range(len(lengths)):
        # Leave the path down to the last node that ends within the shared tokens; `last` is the child that was left.
        last = -1
        while depth and stop[path[depth - 1]] > shared[k]:
            depth -= 1
            last = path[depth]
        above = path[depth - 1] if depth else -1
        if last >= 0 and shared[k] > (stop[above] if above >= 0 else 0):
            parent[made], stop[made] = above, shared[k]
            parent[last] = above = made
            path[depth] = made
            depth, made = depth + 1, made + 1
        parent[made], stop[made] = above, lengths[k]
        leaf[k] = path[depth] = made
        depth, made = depth + 1, made + 1
    return made


@in_c(INT64, INT64, INT64, INT64)
def set_jumps(order: Int64, parent: Int64, jump: Int64, depth: Int64) -> None:
    """Set an ancestor of each node, so that any ancestor is reached in O(log depth) jumps and steps to parents.

    `order` has parents before their children. `jump` [nodes] begins as -1, and the scratch `depth` [nodes] as 0.
    Myers (1983), An applicative random-access stack: if two jumps in a row have the same length, the jump of the next
    node covers both of them and one step more.
    """
    # A chain of 9 nodes, parents [-1, 0, 1, ..., 7] -> jumps [-1, 0, 1, 0, 3, 4, 3, 0, 7].
    for node in order:
        up = parent[node]
        if up >= 0:
            depth[node] = depth[up] + 1
            far = jump[up]
            jump[node] = up
            if far >= 0 and jump[far] >= 0 and depth[up] - depth[far] == depth[far] - depth[jump[far]]:
                jump[node] = jump[far]
