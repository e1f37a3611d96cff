"""Build a forest of prefix tries by sorting.

    a b c d        sorted, with the length of the prefix shared with the one before      nodes, depth-first
    a b x          0: a b c d                                                            0: [a b]  1: [c d]
    a b c d e      4:         e                                                          2: [e]    3: [x]
                   2:     x

Sequences are sorted lexicographically as big-endian bytes. Then the common prefixes of neighbours determine the trie:
the tokens that a sequence does not share with the sequence before it are stored once. Sorted order is depth-first
order. The stored tokens are cut into nodes at each point where a later sequence branches off. There is no object per
token, and there are O(1) Python steps per branch.

A tree never contains several training steps, nor several groups under `share="group"`. Under `share="none"` every
trajectory is a tree of its own, as if sequences were trained one by one. The result does not depend on input order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from treepack.columns import Sequences, collect, take_rows
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.ingest.options import SHARES
from treepack.trajectory import Int32, Int64, Trajectory
from treepack.trie.trie import Trie

Partition = tuple[tuple[bool, int], str]  # ((has a step, the step), the group)


def build_trie(trajectories: Iterable[Trajectory] | Sequences, *, share: str = "all") -> Trie:
    """Build the forest of prefix tries of tokenised `trajectories`.

    `share` "all" shares prefixes between all trajectories of a training step, "group" only inside a group, and "none"
    shares nothing. Duplicates and trajectories that are prefixes of others are kept. O(N_flat), plus the comparisons of
    the sort.

    Raises:
        TreepackError: no trajectory, or one that is not tokenised.
    """
    if share not in SHARES:
        raise TreepackError(f"share is {share!r}; expected one of {', '.join(SHARES)}")
    sequences = trajectories if isinstance(trajectories, Sequences) else collect(trajectories)
    partition, _ = partitions(sequences.table, share=share)
    order = _sorted_order(sequences, partition)
    if share == "none":
        partition = np.arange(len(partition))
    shared = shared_with_previous(sequences, order, partition)
    offsets = sequences.offsets.tolist()
    tokens = np.concatenate([sequences.tokens[offsets[i] + shared[k] : offsets[i + 1]] for k, i in enumerate(order)])
    forest = forest_of(shared, array("q", np.diff(sequences.offsets)[order].tobytes()))
    table = with_places(take_rows(sequences.table, np.array(order)), forest.tree_id[forest.end_node], forest.end_node)
    return forest.trie(tokens, table, share=share)


def partitions(table: pa.Table, *, share: str) -> tuple[Int64, list[Partition]]:
    """Return the rank of each trajectory's partition, int64 [num_trajectories], and the partitions in that order.

    A partition is a training step, with `share="group"` a (step, group) pair. Prefixes are never shared across
    partitions. Trajectories without a step come first.
    """
    steps = [(step is not None, step or 0) for step in table["step"].to_pylist()]
    groups = table["group_id"].to_pylist() if share == "group" else [""] * len(steps)
    keys = list(zip(steps, groups, strict=True))
    distinct = sorted(set(keys))
    rank = {key: i for i, key in enumerate(distinct)}
    return np.array([rank[key] for key in keys], np.int64), distinct


def _sorted_order(sequences: Sequences, partition: Int64) -> list[int]:
    """Return the order of the trajectories by partition, tokens, id and source."""
    ids = list(zip(sequences.table["trajectory_id"].to_pylist(), sequences.table["source"].to_pylist(), strict=True))
    return sorted_by_tokens(sequences, partition, sorted(range(len(ids)), key=ids.__getitem__))


def sorted_by_tokens(sequences: Sequences, partition: Int64, order: Iterable[int]) -> list[int]:
    """Sort `order` by partition and tokens; equal sequences keep their order."""
    offsets = sequences.offsets.tolist()
    # Big-endian bytes compare as the numbers do: 1 -> 00 00 00 01 < 256 -> 00 00 01 00.
    prefixes = partition.astype(">i8")
    keys = [
        prefixes[i].tobytes() + sequences.tokens[offsets[i] : offsets[i + 1]].astype(">i4").tobytes()
        for i in range(len(offsets) - 1)
    ]
    return sorted(order, key=keys.__getitem__)


def common_prefix(a: Int32, b: Int32) -> int:
    """Return the length of the longest common prefix of two sequences."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size


def shared_with_previous(sequences: Sequences, order: list[int], partition: Int64) -> array[int]:
    """Return the tokens that each sorted trajectory shares with the one before it; 0 at the start of a partition.

    Sorted a b c d, a b c d e, a b x -> [0, 4, 2].
    """
    tokens, offsets, parts = sequences.tokens, sequences.offsets.tolist(), partition.tolist()
    shared = array("q", [0]) * len(order)
    for k in range(1, len(order)):
        a, b = order[k - 1], order[k]
        if parts[a] == parts[b]:
            shared[k] = common_prefix(tokens[offsets[a] : offsets[a + 1]], tokens[offsets[b] : offsets[b + 1]])
    return shared


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

    def trie(self, tokens: Int32, trajectories: pa.Table, *, share: str) -> Trie:
        """Return the trie with these nodes, their tokens and the trajectories in order."""
        nodes = {name: getattr(self, name) for name in NodeArrays.__slots__}
        return Trie(tokens=tokens, trajectories=trajectories, share=share, **nodes)


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


def with_places(table: pa.Table, tree_id: Int32, node_id: Int32) -> pa.Table:
    """Return `table` with the tree and the node where each trajectory ends."""
    columns = {name: table[name] for name in table.column_names}
    columns["tree_id"] = pa.array(tree_id, pa.int32())
    columns["node_id"] = pa.array(node_id, pa.int32())
    known = schema.trajectory_columns(columns)
    return pa.Table.from_arrays([columns[name] for name in known.names], schema=known)
