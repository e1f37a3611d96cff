"""Trees, forests and tries from the sizes of their nodes, without tokens.

(parent, size) --tree_of--> PlanTree, ... --forest_of_trees--> PlanForest --trie_of--> Trie whose tokens are all 0
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from treepack.files import schema
from treepack.pack.plan.problem import PlanForest, PlanTree
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


def tree_of(parent: Int64, size: Int64) -> PlanTree:
    """Return the tree of nodes in any order with parents first; only children are merged with their parents.

    Siblings keep their order. Every token is a loss term, except the tokens of the root. O(nodes).
    """
    up = np.asarray(parent, np.int64).tolist()
    num = len(up)
    below = [1] * num
    for node in range(num - 1, 0, -1):
        below[up[node]] += below[node]
    # parents [-1, 0, 0, 1] -> nodes in the subtrees [4, 2, 1, 1] -> depth-first positions [0, 1, 3, 2]
    at, free = [0] * num, [1] * num  # position of each node, and of its next child
    for node in range(1, num):
        at[node] = free[up[node]]
        free[up[node]] += below[node]
        free[node] = at[node] + 1
    order = np.argsort(at)
    parents = np.array([-1] + [at[u] for u in up[1:]])[order]
    sizes = np.asarray(size, np.int64)[order]
    end = np.arange(num) + np.array(below)[order]
    return _merge_chains(parents, sizes, end)


def _merge_chains(parent: Int64, size: Int64, end: Int64) -> PlanTree:
    """Return the tree of nodes in depth-first order; a chain of only children becomes one node."""
    # parent [-1, 0, 1, 0] -> children per node [2, 1, 0, 0] -> bottoms [0, 2, 3], tops [0, 1, 3]
    bottoms = np.flatnonzero(np.bincount(parent[1:], minlength=len(parent)) != 1)
    tops = np.concatenate([[0], bottoms[:-1] + 1])
    up = np.where(parent[tops] < 0, -1, np.searchsorted(bottoms, parent[tops]))
    sizes = np.add.reduceat(size, tops)
    ends = np.searchsorted(bottoms, end[bottoms])
    depth = _depths(up, sizes)
    leaf = np.flatnonzero(ends == np.arange(1, len(ends) + 1))
    return PlanTree(sizes, depth, up, ends, leaf, (depth + sizes)[leaf] - sizes[0])


def _depths(parent: Int64, size: Int64) -> Int64:
    sizes, depth = size.tolist(), [0] * len(size)
    for node, up in enumerate(parent.tolist()):
        if up >= 0:
            depth[node] = depth[up] + sizes[up]
    return np.array(depth, np.int64)


def forest_of_trees(trees: list[PlanTree]) -> PlanForest:
    """Return all `trees` as one forest whose trajectories are its leaves."""
    nodes = np.concatenate([[0], np.cumsum([tree.num_nodes for tree in trees])]).astype(np.int64)
    leaves = np.concatenate([[0], np.cumsum([tree.num_leaves for tree in trees])]).astype(np.int64)
    starts = nodes[:-1].tolist()
    joined = PlanTree(
        np.concatenate([tree.size for tree in trees]),
        np.concatenate([tree.depth for tree in trees]),
        np.concatenate([np.where(tree.parent < 0, -1, tree.parent + a) for tree, a in zip(trees, starts, strict=True)]),
        np.concatenate([tree.end + a for tree, a in zip(trees, starts, strict=True)]),
        np.concatenate([tree.leaf + a for tree, a in zip(trees, starts, strict=True)]),
        np.concatenate([tree.terms for tree in trees]),
    )
    return PlanForest(joined, nodes, leaves, np.arange(leaves[-1]))


def trie_of(forest: PlanForest, *, shuffle: int | None = None) -> Trie:
    """Return a trie of this shape. Its tokens are all 0, and a trajectory ends at each leaf, trained from token 1 on.

    It can only be planned, because siblings begin with the same token. The trajectories arrive in depth-first order, or
    shuffled inside each tree with the seed `shuffle`.
    """
    joined = forest.joined
    tree_id = np.repeat(np.arange(forest.num_trees), np.diff(forest.leaf_start))
    arrived = np.arange(len(tree_id))
    # Names carry the order of arrival: sorting random numbers inside each tree shuffles the names there.
    if shuffle is not None:
        arrived[np.lexsort((np.random.default_rng(shuffle).random(len(tree_id)), tree_id))] = np.arange(len(tree_id))
    length, end_node = joined.length, joined.leaf.astype(np.int32)
    names = [f"t{i}" for i in arrived.tolist()]
    spans = [np.ones(len(length), np.int32), length.astype(np.int32), np.ones(len(length))]
    structs = pa.StructArray.from_arrays(spans, fields=list(schema.SPAN))
    columns = {
        "trajectory_id": names,
        "group_id": tree_id.astype(str),
        "tree_id": tree_id,
        "node_id": end_node,
        "num_tokens": length,
        "trained": pa.ListArray.from_arrays(np.arange(len(length) + 1, dtype=np.int32), structs),
        "weight": np.ones(len(length)),
        "metadata": ["{}"] * len(length),
        "source": [f"made:{name}" for name in names],
    }
    arrays = [
        pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(len(length), field.type)
        for field in schema.TRAJECTORIES
    ]
    first = np.searchsorted(joined.leaf, np.arange(joined.num_nodes))
    return Trie(
        tokens=np.zeros(joined.tokens, np.int32),
        node_start=np.concatenate([[0], np.cumsum(joined.size)]).astype(np.int64),
        node_end=joined.end.astype(np.int32),
        parent=joined.parent.astype(np.int32),
        depth=joined.depth,
        num_passing=(np.searchsorted(joined.leaf, joined.end) - first).astype(np.int32),
        end_node=end_node,
        trajectories=pa.Table.from_arrays(arrays, schema=schema.TRAJECTORIES),
        share="all",
    )
