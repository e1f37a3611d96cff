"""Order trajectories with recorded routes for a trie that splits where routes differ.

    tokens, routes --_route_letters--> one number for each token     equal for equal tokens with equal experts
    letters        --sort, routed_order--> order, shared tokens     siblings by token and routes

A letter ranks a token and a hash of its experts, so rows of some hundred bytes are neither sorted nor copied, and may
stay in a mapped file. Children of a node that begin with the same token are then put into the order of their routes,
which only the first row of each decides.

    before   a b --+-- c     last token of trajectory 1, which no sampler computes      after   a b c -- d
                   '-- c d   trajectory 2, which has recorded experts for c

No token comes after the last one of a trajectory, so its experts change no log-probability. If they were not recorded,
the token is shared with the first child that has the same token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from treepack.trajectory import Int32, Int64, Routes, missing_route
from treepack.trie.nodes import NodeArrays, forest_of, sort_sequences

ROWS_AT_ONCE = 1 << 14  # rows that are copied at a time, some MB


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Trajectories in arrival order: tokens int32 [N_flat], offsets int64 [num + 1], routes [N_flat, layers, k].

    `partition` int64 [num]: prefixes are shared only inside a partition.
    """

    tokens: Int32
    offsets: Int64
    routes: Routes
    partition: Int64

    def row(self, position: int) -> bytes:
        """Return the experts of a token in ascending order, as bytes that compare as rows do."""
        return np.sort(self.routes[position], axis=-1).tobytes()


def routed_order(
    given: RoutedTokens, by_id: Sequence[int], *, shares_last: bool = True
) -> tuple[list[int], array[int]]:
    """Return the order of the trajectories in a trie that splits, and the tokens that each shares with the one before.

    Args:
        given: the trajectories.
        by_id: their numbers in the order that decides among trajectories with equal tokens and experts; others are
            left out.
        shares_last: share last tokens that were not recorded, see above.
    """
    letters = _route_letters(given.tokens, given.routes)
    order, shared = sort_sequences(letters, given.offsets, given.partition, by_id)
    lengths = np.diff(given.offsets)[order]
    forest = forest_of(shared, array("q", lengths.tobytes()))
    firsts = _first_positions(given, order, forest)
    groups = _conflicts(given, order, forest, firsts)
    if not groups:
        return order, shared
    rank = {number: i for i, number in enumerate(by_id)}
    return _Arrangement(given, order, lengths, forest, rank).arranged(groups, firsts, shares_last=shares_last)


def _route_letters(tokens: Int32, routes: Routes) -> Int32:
    """Return a number for each token, equal for equal tokens with equal experts, ascending by token; int32 [N].

    Equal means equal 64-bit hashes of the experts, which other experts of one token never have in practice.
    """
    hashes = np.zeros(len(tokens), np.uint64)
    for begin in range(0, len(tokens), ROWS_AT_ONCE):
        rows = np.sort(routes[begin : begin + ROWS_AT_ONCE], axis=-1)
        digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
        hashes[begin : begin + len(rows)] = np.frombuffer(digests, "<u8")
    # Tokens 7 7 5 with the hashes 3 9 3 -> in order 5/3, 7/3, 7/9 -> letters 1 2 0.
    order = np.lexsort((hashes, tokens))
    changes = (np.diff(tokens[order]) != 0) | (np.diff(hashes[order]) != 0)
    letters = np.zeros(len(tokens), np.int32)
    letters[order] = np.concatenate([np.zeros(min(len(tokens), 1), np.int32), np.cumsum(changes, dtype=np.int32)])
    return letters


def _first_positions(given: RoutedTokens, order: list[int], forest: NodeArrays) -> Int64:
    """Return the flat position of the first token of each node, in the first trajectory through it."""
    # Trajectories end in the nodes [1, 1, 3] -> the first ones through nodes 0 to 3 are 0, 0, 2, 2.
    first = np.searchsorted(forest.end_node, np.arange(len(forest.parent)))
    positions: Int64 = given.offsets[:-1][np.array(order, np.int64)[first]] + forest.depth
    return positions


def _conflicts(given: RoutedTokens, order: list[int], forest: NodeArrays, firsts: Int64) -> list[list[int]]:
    """Return the groups of siblings that begin with the same token; each is consecutive among its siblings."""
    first = np.searchsorted(forest.end_node, np.arange(len(forest.parent)))
    # Roots of a partition are siblings, too: the partitions 0 and 2 -> parents -1 and -3.
    parent = np.where(forest.parent < 0, -1 - given.partition[np.array(order, np.int64)[first]], forest.parent)
    by_sibling = np.lexsort((np.arange(len(parent)), given.tokens[firsts], parent))
    keys = zip(parent[by_sibling].tolist(), given.tokens[firsts[by_sibling]].tolist(), by_sibling.tolist(), strict=True)
    groups = ([node for _, _, node in same] for _, same in groupby(keys, key=lambda key: key[:2]))
    return [group for group in groups if len(group) > 1]


class _Arrangement:
    """The nodes of a trie of letters while their siblings change places."""

    def __init__(
        self, given: RoutedTokens, order: list[int], lengths: Int64, forest: NodeArrays, rank: dict[int, int]
    ) -> None:
        self.given, self.order, self.lengths, self.rank = given, order, lengths.tolist(), rank
        count = len(forest.parent)
        self.parent, self.depth = forest.parent.tolist(), forest.depth.tolist()
        self.end = (forest.depth + np.diff(forest.node_start)).tolist()
        bounds = np.searchsorted(forest.end_node, np.arange(count + 1)).tolist()
        self.ends = [list(range(bounds[v], bounds[v + 1])) for v in range(count)]
        self.moved: dict[int, list[int]] = {}  # trajectories that end after the first token of a node

    def arranged(self, groups: list[list[int]], firsts: Int64, *, shares_last: bool) -> tuple[list[int], array[int]]:
        """Return the new order of the trajectories, and the tokens that each shares with the one before."""
        place = list(range(len(self.parent)))  # among siblings, that of a node in the order of tokens and routes
        missing = np.full(self.given.routes.shape[1:], missing_route(self.given.routes), self.given.routes.dtype)
        for group in groups:
            rows = {node: self.given.row(int(firsts[node])) for node in group}
            ordered = sorted(group, key=rows.__getitem__)
            # Experts that were not recorded are the largest, so their node is the last one.
            last = ordered[-1]
            if shares_last and rows[last] == missing.tobytes() and self.end[last] == self.depth[last] + 1:
                self.moved[ordered[0]], self.ends[last] = self.ends[last], []
            for node, number in zip(ordered, group, strict=True):
                place[node] = number
        children: list[list[int]] = [[] for _ in self.parent]
        roots: list[int] = []
        for node in sorted(range(len(place)), key=place.__getitem__):
            (roots if self.parent[node] < 0 else children[self.parent[node]]).append(node)
        order, shared, common = [], array("q"), 0
        stack = roots[::-1]
        while stack:
            node = stack.pop()
            common = min(common, 0 if self.parent[node] < 0 else self.end[self.parent[node]])
            for k in self._ending(node):
                order.append(self.order[k])
                shared.append(common)
                common = self.lengths[k]
            stack += reversed(children[node])
        return order, shared

    def _ending(self, node: int) -> list[int]:
        """Return the trajectories that end in a node, shorter ones first, and equal ones by their ids."""
        moved, own = self.moved.get(node, []), self.ends[node]
        if self.end[node] > self.depth[node] + 1:
            return [*moved, *own]
        return sorted([*moved, *own], key=lambda k: self.rank[self.order[k]])
