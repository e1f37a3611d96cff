"""The nodes of a forest of prefix tries, from sorted sequences; numpy only, no table of trajectories.

    tokens, offsets --sort_sequences--> order, shared --forest_of--> NodeArrays

`builders.in_memory` explains the method, and `trie` the arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.trajectory import Int32, Int64


def sort_sequences(
    tokens: Int32, offsets: Int64, partition: Int64 | None = None, chosen: Iterable[int] | None = None
) -> tuple[list[int], array[int]]:
    """Sort sequences by partition and tokens, and count the tokens that each shares with the one before it.

    Args:
        tokens: of all sequences.
        offsets: int64 [num_sequences + 1], where each begins.
        partition: int64 [num_sequences], which share nothing with each other; None for one.
        chosen: the sequences to sort, None for all; equal ones keep their order.
    """
    starts = offsets.tolist()
    if partition is None:
        partition = np.zeros(len(starts) - 1, np.int64)
    # Big-endian bytes compare as the numbers do: 1 -> 00 00 00 01 < 256 -> 00 00 01 00. An array keeps the order of its
    # bytes; a number that is taken out of it does not.
    prefixes = partition.astype(">i8")
    keys = [
        prefixes[i : i + 1].tobytes() + tokens[starts[i] : starts[i + 1]].astype(">i4").tobytes()
        for i in range(len(starts) - 1)
    ]
    order = sorted(range(len(keys)) if chosen is None else chosen, key=keys.__getitem__)
    return order, shared_with_previous(tokens, offsets, partition, order)


def common_prefix(a: Int32, b: Int32) -> int:
    """Return the length of the longest common prefix of two sequences."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size


def shared_with_previous(tokens: Int32, offsets: Int64, partition: Int64, order: list[int]) -> array[int]:
    """Return the tokens that each sorted trajectory shares with the one before it; 0 at the start of a partition.

    Sorted a b c d, a b c d e, a b x -> [0, 4, 2].
    """
    starts, parts = offsets.tolist(), partition.tolist()
    shared = array("q", [0]) * len(order)
    for k in range(1, len(order)):
        a, b = order[k - 1], order[k]
        if parts[a] == parts[b]:
            shared[k] = common_prefix(tokens[starts[a] : starts[a + 1]], tokens[starts[b] : starts[b + 1]])
    return shared


def path_to(parent: NDArray[Any], node: int) -> Int64:
    """Return the nodes, or the tokens of a row, from the root to `node`, by their parents; int64, ascending."""
    # parent [-1, 0, 1, 0, 3], node 4 -> [0, 3, 4]
    path = []
    while node >= 0:
        path.append(node)
        node = int(parent[node])
    return np.array(path[::-1], np.int64)


def path_in_row(subtree_end: NDArray[Any], token: int) -> Int64:
    """Return the tokens of a row from the root to `token`, faster than `path_to`; int64, ascending."""
    # They are the earlier tokens whose subtree has not ended: subtree_end [5, 3, 3, 5, 5], token 3 -> [0, 3]
    return np.flatnonzero(subtree_end[: token + 1] > token)


def _cuts(shared: array[int]) -> tuple[array[int], array[int]]:
    """Return the depths where later trajectories branch off the new tokens of each one, and how many each has.

    A later trajectory branches off at depth d inside the new tokens of trajectory k if d is a running minimum of the
    following `shared` values and exceeds `shared[k]`. From right to left, a stack keeps these minima, largest on top.
    """
    # shared [0, 4, 2] -> cuts [2, 4], counts [2, 0, 0]: two later ones leave a b c d, at depths 2 and 4.
    cuts, counts = array("q"), array("q", [0]) * len(shared)
    stack: list[int] = []
    for k in range(len(shared) - 1, -1, -1):
        while stack and stack[-1] > shared[k]:
            cuts.append(stack.pop())
            counts[k] += 1
        if not stack or stack[-1] < shared[k]:
            stack.append(shared[k])
    cuts.reverse()
    return cuts, counts


@dataclass(frozen=True, slots=True)
class NodeArrays:
    """The fields of a `Trie` that describe its nodes, without tokens and trajectories."""

    node_start: Int64
    node_end: Int32
    parent: Int32
    depth: Int64
    num_passing: Int32
    end_node: Int32

    @property
    def tree_id(self) -> Int32:
        """Tree of each node, int32 [num_nodes]."""
        return (np.cumsum(self.parent < 0) - 1).astype(np.int32)


def forest_of(shared: array[int], lengths: array[int]) -> NodeArrays:
    """Return the nodes of sorted trajectories with `lengths` tokens; `shared` of them are shared with the one before.

    The path from the root to the current node is kept on a stack. Integers are in arrays, about 100 bytes a trajectory.
    """
    # shared [0, 4, 2], lengths [4, 5, 3] (a b c d, a b c d e, a b x) -> nodes [a b], [c d], [e], [x]:
    # parent [-1, 0, 1, 0], depth [0, 2, 4, 2], node_end [4, 3, 3, 4], num_passing [3, 2, 1, 1], end_node [1, 2, 3].
    parent, depth, node_end, passing, first, end_node = (array("q") for _ in range(6))
    path: list[int] = []  # nodes from the root to the current one
    path_end: list[int] = []  # tokens from the root to the end of each of them

    def close(until: int, k: int) -> None:
        while path and path_end[-1] > until:
            node = path.pop()
            path_end.pop()
            node_end[node] = len(parent)
            passing[node] = k - first[node]

    cuts, counts = _cuts(shared)
    at_cut = 0
    for k, at in enumerate(shared):
        close(at, k)
        for stop in (*cuts[at_cut : at_cut + counts[k]], lengths[k]):
            if stop > at:
                node = len(parent)
                parent.append(path[-1] if path else -1)
                depth.append(at)
                first.append(k)
                node_end.append(0)
                passing.append(0)
                path.append(node)
                path_end.append(stop)
                at = stop
        at_cut += counts[k]
        end_node.append(path[-1])
    close(-1, len(shared))
    depths = np.array(depth)
    return NodeArrays(
        node_start=_node_starts(depths, np.array(shared), np.array(lengths), np.array(first)),
        node_end=np.array(node_end, np.int32),
        parent=np.array(parent, np.int32),
        depth=depths,
        num_passing=np.array(passing, np.int32),
        end_node=np.array(end_node, np.int32),
    )


def _node_starts(depth: Int64, shared: Int64, lengths: Int64, first: Int64) -> Int64:
    """Return the offset of each node's tokens, int64 [num_nodes + 1].

    A node is part of the new tokens of the first trajectory that passes through it.
    """
    new = lengths - shared
    # Offsets of the new tokens: shared [0, 4, 2], lengths [4, 5, 3] -> new [4, 1, 1] -> begins [0, 4, 5, 6].
    begins = np.concatenate([[0], np.cumsum(new)])
    # first [0, 0, 1, 2], depth [0, 2, 4, 2] -> 0 + 0 - 0, 0 + 2 - 0, 4 + 4 - 4, 5 + 2 - 2 -> [0, 2, 4, 5], then 6.
    return np.append(begins[first] + depth - shared[first], begins[-1]).astype(np.int64)


def paths(ends: Int32 | Int64, starts: Int64, depth: Int64) -> Iterator[Int64]:
    """Yield for each node of `ends` the token positions from the root to its end; a view, valid until the next one.

    `ends` must be in ascending order. `starts` [nodes + 1] are the offsets of the nodes' tokens and `depth` [nodes] the
    tokens before each on its path. One array contains the current path. In depth-first order, a node that is entered
    only replaces positions at its depths and deeper ones, which belong to branches that are finished.
    """
    # Nodes [a b], [c d], [e], [x] of the header, ends [1, 2, 3] -> [0 1 2 3], [0 1 2 3 4], [0 1 5].
    path = np.zeros(int((depth + np.diff(starts)).max(initial=0)), np.int64)
    # Integers of array.array are read faster than integers of numpy, and need 8 bytes instead of 40 in a list.
    begins, depths, last = (array("q", values.astype(np.int64).tobytes()) for values in (starts, depth, ends))
    node = -1
    for end in last:
        while node < end:
            node += 1
            a, b = begins[node], begins[node + 1]
            path[depths[node] : depths[node] + b - a] = np.arange(a, b)
        yield path[: depths[end] + begins[end + 1] - begins[end]]


def subtree_ends(parent: Int32) -> Int32:
    """Return one past the last node of each subtree: parent [-1, 0, 1, 0, -1] -> [4, 3, 3, 4, 5]."""
    # Integers of array.array are read faster than integers of numpy, and need 4 bytes instead of 36 in a list.
    parents, ends = array("i", parent.astype(np.int32).tobytes()), array("i", range(1, len(parent) + 1))
    # From the last node to the first, each node is complete before it extends its parent.
    for node in range(len(parents) - 1, -1, -1):
        up = parents[node]
        if up >= 0 and ends[up] < ends[node]:
            ends[up] = ends[node]
    return np.array(ends, np.int32)
