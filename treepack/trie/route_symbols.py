"""Recorded routes and prefixes: tries that split where routes differ, and the routes of tries that do not.

    trajectory 1   a  b  c        routes  1  1  2        split   a b --- c       first   a b c --- d
    trajectory 2   a  b  c  d     routes  1  1  3  3              |                     routes  1 1 2   3
                                                                  '---- c d

Two trajectories of one prefix may have been sampled with other experts for it: engines compute the prefix in other
batches. A trie that splits there keeps the routes of each trajectory, so training is exact. Sharing is cheaper: the
first trajectory with recorded experts, in the order of the trie, gives a token its routes, and the others are counted.

Rows of routes are equal if each layer has the same set of experts; their order changes no result but rounding. A row
that was not recorded differs from one that was, because its token routes freely.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from treepack.trajectory import Int32, Int64, Routes, is_recorded, missing_route, positions
from treepack.trie.nodes import NodeArrays, paths
from treepack.trie.storage import ArrayStorage, PageReleaser

if TYPE_CHECKING:
    from treepack.trie.trie import Trie


ROUTES_AT_ONCE = 1 << 17  # tokens whose routes are written or read before mapped pages are released: some 50 MB


@dataclass(frozen=True, slots=True)
class RouteCosts:
    """The costs of conflicts between recorded routes.

    Attributes:
        layers: recorded layers.
        experts: experts of each token in a layer.
        recorded: tokens of trajectories with a recorded expert.
        without: trajectories of which no token has one.
        differing: the tokens whose experts differ from the experts of the first trajectory that shares the token.
        tokens_shared: tokens of the trie if all equal prefixes are shared.
        tokens_split: tokens of the trie if it splits where routes differ.
    """

    layers: int
    experts: int
    recorded: int
    without: int
    differing: int
    tokens_shared: int
    tokens_split: int

    def as_record(self, conflicts: str) -> dict[str, int | str]:
        """Return the entry of the manifest of a trie that was built with `conflicts` "split" or "first"."""
        names = ("layers", "experts", "recorded", "without", "differing", "tokens_shared", "tokens_split")
        return {"conflicts": conflicts, **{name: getattr(self, name) for name in names}}


def route_symbols(tokens: Int32, routes: Routes) -> Int32:
    """Return a number for each token, equal for equal tokens with equal experts; ascending by token; int32 [N].

    O(N log N) comparisons of rows.
    """
    layers, experts = routes.shape[1:]
    rows = np.sort(routes, axis=-1).reshape(len(tokens), layers * experts).view(np.uint8)
    # Big-endian bytes compare as the numbers do, so the order of tokens stays.
    names = np.concatenate([tokens.astype(">i4").view(np.uint8).reshape(-1, 4), rows], axis=1)
    keys = np.ascontiguousarray(names).view(np.dtype((np.void, names.shape[1]))).reshape(-1)
    symbols: NDArray[np.int64] = np.unique(keys, return_inverse=True)[1]
    return symbols.astype(np.int32)


def splits_by_routes(trie: Trie) -> bool:
    """Return True if two nodes of `trie` have equal tokens before them and begin with the same one.

    Only recorded routes make such nodes; roots count if trajectories of one group begin in both.
    """
    if trie.routes is None:
        return False
    first = trie.tokens[trie.node_start[:-1]].astype(np.int64)
    below = trie.parent >= 0
    # Parent and first token as one number: (3, 5) -> 3 * 2^32 + 5.
    pairs = np.sort((trie.parent[below].astype(np.int64) << 32) | first[below])
    if (pairs[1:] == pairs[:-1]).any():
        return True
    root = np.flatnonzero(~below)[trie.tree_id[trie.end_node]]
    groups = zip(trie.step_rank.tolist(), trie.trajectories["group_id"].to_pylist(), first[root].tolist(), strict=True)
    trees: dict[object, int] = {}
    return any(trees.setdefault(key, tree) != tree for key, tree in zip(groups, root.tolist(), strict=True))


def new_positions(offsets: Int64, order: list[int], shared: array[int]) -> Int64:
    """Return the flat position of each tree token, which its trajectory does not share with the one before it."""
    # offsets [0, 4, 9], order [1, 0], shared [0, 3] -> 4 5 6 7 8, 3
    return positions(offsets[:-1][order] + np.array(shared), offsets[1:][order])


def shared_routes(
    routes: Routes, offsets: Int64, order: list[int], forest: NodeArrays, storage: ArrayStorage
) -> tuple[Routes, int, ArrayStorage]:
    """Return the routes of each tree token, of the first trajectory with recorded experts, and the rows that differ.

    The result is in a mapped file if it is large for `storage`, which is returned with the map.

    Args:
        routes: [N_flat, layers, k], of all trajectories in arrival order.
        offsets: int64 [num_trajectories + 1], of the trajectories in `routes`.
        order: the order of the trajectories in the trie.
        forest: the nodes of the trie.
        storage: of the result, and with the map of `routes` if they are in a file.
    """
    missing = missing_route(routes)
    shape = (int(forest.node_start[-1]), *routes.shape[1:])
    flat, storage = storage.zeros(int(np.prod(shape)), routes.dtype.type)
    tree = flat.reshape(shape)
    for begin in range(0, len(tree), ROUTES_AT_ONCE):
        tree[begin : begin + ROUTES_AT_ONCE] = missing
        storage.release()
    differing, releaser = 0, PageReleaser(storage, ROUTES_AT_ONCE)
    for i, path in zip(order, paths(forest.end_node, forest.node_start, forest.depth), strict=True):
        own, there = routes[offsets[i] : offsets[i + 1]], tree[path]
        known = is_recorded(own)
        tree[path] = there = np.where((known & ~is_recorded(there))[..., None], own, there)
        # Few rows differ at all, and only these need to be sorted.
        apart = np.flatnonzero((own != there).any(axis=(1, 2)))
        others = (np.sort(own[apart], axis=-1) != np.sort(there[apart], axis=-1)).any(axis=-1) & known[apart]
        differing += int(others.any(axis=-1).sum())
        releaser.count(len(path))
    storage.release()
    return tree, differing, storage
