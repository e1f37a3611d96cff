"""Trajectories to a forest of prefix tries, by sorting; and back.

    a b c d        sorted, with the length of the prefix shared with the one before      nodes, depth-first
    a b x          0: a b c d                                                            0: [a b]  1: [c d]
    a b c d e      4:         e                                                          2: [e]    3: [x]
                   2:     x

Sequences are sorted lexicographically as big-endian bytes; the common prefixes of neighbours then say everything.
What a sequence does not share with the one before it is laid down once, in sorted order, which is depth-first
order; it is cut into nodes where a later sequence leaves it. No object per token, O(1) Python steps per branch.

Trees never span training steps, nor groups under `share="group"`; under `share="none"` every trajectory is a tree of
its own, as where sequences are trained one by one. The result does not depend on input order.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.columns import Sequences, SpanView, collect, list_values
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.trajectory import Int32, Int64, Tokens, Trajectory

SHARES = ("all", "group", "none")

Partition = tuple[tuple[bool, int], str]  # whether there is a step, the step, the group


@dataclass(frozen=True, slots=True)
class Trie:
    """A forest in depth-first order: the nodes of a subtree, and their tokens, are contiguous.

    `tokens` int32 [N_tree]; node u owns `tokens[node_start[u]:node_start[u + 1]]`, `depth[u]` tokens come before it
    on its path, its subtree is the nodes `u .. node_end[u] - 1`, `parent[u]` is -1 at a root. Trajectory i ends with
    the last token of node `end_node[i]`; trajectories are sorted, so `end_node` never decreases. `trajectories` is a
    table of `schema.TRAJECTORIES`.
    """

    tokens: Int32
    node_start: Int64
    node_end: Int32
    parent: Int32
    depth: Int64
    num_passing: Int32
    end_node: Int32
    trajectories: pa.Table
    share: str

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_trajectories(self) -> int:
        return len(self.end_node)

    @property
    def num_trees(self) -> int:
        return int((self.parent < 0).sum())

    @property
    def tree_id(self) -> Int32:
        """Tree of each node, int32 [num_nodes]."""
        return (np.cumsum(self.parent < 0) - 1).astype(np.int32)

    @property
    def step_rank(self) -> Int64:
        """Training step of each trajectory as a rank from 0, missing steps first; int64 [num_trajectories]."""
        steps = self.trajectories["step"].combine_chunks()
        known = np.unique(steps.drop_null().to_numpy())
        ranks = np.searchsorted(known, steps.fill_null(0).to_numpy()) + (steps.null_count > 0)
        return np.where(steps.is_null().to_numpy(zero_copy_only=False), 0, ranks).astype(np.int64)

    @property
    def node_length(self) -> Int64:
        return np.diff(self.node_start)

    @property
    def path_length(self) -> Int64:
        """Tokens from the root to the end of each node, int64 [num_nodes]."""
        return self.depth + self.node_length

    @property
    def lengths(self) -> Int64:
        """Tokens of each trajectory, int64 [num_trajectories]."""
        return self.path_length[self.end_node]

    @property
    def tokens_flat(self) -> int:
        return int(self.lengths.sum())

    @property
    def tokens_tree(self) -> int:
        return len(self.tokens)


def build_trie(trajectories: Iterable[Trajectory] | Sequences, *, share: str = "all") -> Trie:
    """Build the forest of prefix tries of tokenised `trajectories`.

    `share` "all" shares prefixes between all trajectories of a training step, "group" only inside a group, "none" not
    at all. Duplicates and trajectories that are prefixes of others are kept. O(N_flat) plus the sort's comparisons.

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
    return forest.trie(tokens, with_places(sequences.table.take(pa.array(order)), forest), share=share)


def partitions(table: pa.Table, *, share: str) -> tuple[Int64, list[Partition]]:
    """Rank of each trajectory's (step, group) pair, or of its step alone, and these pairs, sorted.

    Sharing never crosses from one to another. No step comes first.
    """
    steps = [(step is not None, step or 0) for step in table["step"].to_pylist()]
    groups = table["group_id"].to_pylist() if share == "group" else [""] * len(steps)
    keys = list(zip(steps, groups, strict=True))
    found = sorted(set(keys))
    rank = {key: i for i, key in enumerate(found)}
    return np.array([rank[key] for key in keys], np.int64), found


def _sorted_order(sequences: Sequences, partition: Int64) -> list[int]:
    """Trajectories by partition, tokens, id and source."""
    ids = list(zip(sequences.table["trajectory_id"].to_pylist(), sequences.table["source"].to_pylist(), strict=True))
    return sorted_by_tokens(sequences, partition, sorted(range(len(ids)), key=ids.__getitem__))


def sorted_by_tokens(sequences: Sequences, partition: Int64, order: Iterable[int]) -> list[int]:
    """`order` by partition and tokens; equal ones stay as they are. Big-endian bytes compare as the ids do."""
    offsets = sequences.offsets.tolist()
    prefixes = partition.astype(">i8")
    keys = [
        prefixes[i].tobytes() + sequences.tokens[offsets[i] : offsets[i + 1]].astype(">i4").tobytes()
        for i in range(len(offsets) - 1)
    ]
    return sorted(order, key=keys.__getitem__)


def common_prefix(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix of two sequences."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size


def shared_with_previous(sequences: Sequences, order: list[int], partition: Int64) -> array[int]:
    """Tokens that each sorted trajectory shares with the one before it; 0 across partitions."""
    tokens, offsets, parts = sequences.tokens, sequences.offsets.tolist(), partition.tolist()
    shared = array("q", [0]) * len(order)
    for k in range(1, len(order)):
        a, b = order[k - 1], order[k]
        if parts[a] == parts[b]:
            shared[k] = common_prefix(tokens[offsets[a] : offsets[a + 1]], tokens[offsets[b] : offsets[b + 1]])
    return shared


def _cuts(shared: array[int]) -> tuple[array[int], array[int]]:
    """For each sorted trajectory, the depths inside its own new tokens where a later one branches off, ascending.

    All of them in one array, and how many each has. They are the running minima of the following `shared` values that
    exceed its own, kept on a stack from the right.
    """
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
class Forest:
    """The nodes of a `Trie`, whose fields these are, without their tokens."""

    node_start: Int64
    node_end: Int32
    parent: Int32
    depth: Int64
    num_passing: Int32
    end_node: Int32

    def trie(self, tokens: Int32, trajectories: pa.Table, *, share: str) -> Trie:
        """The trie of this forest, with the tokens of its nodes and its trajectories in order."""
        nodes = {name: getattr(self, name) for name in Forest.__slots__}
        return Trie(tokens=tokens, trajectories=trajectories, share=share, **nodes)


def forest_of(shared: array[int], lengths: array[int]) -> Forest:
    """The forest of sorted trajectories of `lengths` tokens, which share `shared` with the one before.

    Integers are kept in arrays: about 100 bytes a trajectory.
    """
    parent, depth, node_end, passing, first, end_node = (array("q") for _ in range(6))
    path: list[int] = []  # open nodes, root first
    path_end: list[int] = []  # tokens up to the end of each open node

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
    return Forest(
        node_start=_node_starts(depths, np.array(shared), np.array(lengths), np.array(first)),
        node_end=np.array(node_end, np.int32),
        parent=np.array(parent, np.int32),
        depth=depths,
        num_passing=np.array(passing, np.int32),
        end_node=np.array(end_node, np.int32),
    )


def _node_starts(depth: Int64, shared: Int64, lengths: Int64, first: Int64) -> Int64:
    """Offset of each node's tokens: where the new tokens of its first trajectory begin, plus its depth in them."""
    new = lengths - shared
    begins = np.concatenate([[0], np.cumsum(new)])
    return np.append(begins[first] + depth - shared[first], begins[-1]).astype(np.int64)


def with_places(table: pa.Table, forest: Forest, first: int = 0) -> pa.Table:
    """`table`, trajectories in order from number `first` on, with the tree and the node where each ends."""
    end_node = forest.end_node[first : first + table.num_rows]
    tree_id = (np.cumsum(forest.parent < 0) - 1)[end_node]
    columns = {name: table[name] for name in table.column_names}
    columns["tree_id"] = pa.array(tree_id, pa.int32())
    columns["node_id"] = pa.array(end_node, pa.int32())
    return pa.Table.from_arrays([columns[name] for name in schema.TRAJECTORIES.names], schema=schema.TRAJECTORIES)


def paths(ends: Int32 | Int64, starts: Int64, depth: Int64) -> Iterator[Int64]:
    """Token positions from the root to the end of each node of `ends`, which ascend; each valid until the next.

    `starts` [nodes + 1] are the offsets of the nodes' tokens and `depth` [nodes] the tokens before each on its path, in
    depth-first order. When a node is entered, its own positions replace what lay at its depths before.
    """
    path = np.zeros(int((depth + np.diff(starts)).max(initial=0)), np.int64)
    begins, depths = starts.tolist(), depth.tolist()
    node = -1
    for end in ends.tolist():
        while node < end:
            node += 1
            a, b = begins[node], begins[node + 1]
            path[depths[node] : depths[node] + b - a] = np.arange(a, b)
        yield path[: depths[end] + begins[end + 1] - begins[end]]


def unshared(trie: Trie) -> Trie:
    """The same trajectories in the same order, each a tree of one node: what `share="none"` builds."""
    lengths, each = trie.lengths, np.arange(trie.num_trajectories, dtype=np.int32)
    table = trie.trajectories
    for name in ("tree_id", "node_id"):
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), pa.array(each))
    return Trie(
        tokens=np.concatenate(list(sequences_of(trie))),
        node_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        node_end=each + np.int32(1),
        parent=np.full_like(each, -1),
        depth=np.zeros(len(each), np.int64),
        num_passing=np.ones_like(each),
        end_node=each,
        trajectories=table,
        share="none",
    )


def sequences_of(trie: Trie) -> Iterator[Int32]:
    """Token ids of every trajectory, in trie order; each int32 [num_tokens]."""
    for path in paths(trie.end_node, trie.node_start, trie.depth):
        yield trie.tokens[path]


def trajectories_of(trie: Trie) -> Iterator[Trajectory]:
    """The trajectories that the trie was built from, in trie order: the inverse of `build_trie`."""
    table = trie.trajectories.combine_chunks()
    scalars = table.select(["trajectory_id", "group_id", "step", "weight", "reward", "advantage", "metadata", "source"])
    spans = SpanView.of(table)
    lists: dict[str, list[Any]] = {
        name: list_values(table, name) for name in ("advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs")
    }
    for i, (tokens, row) in enumerate(zip(sequences_of(trie), scalars.to_pylist(), strict=True)):
        starts, ends, weights = spans[i]
        content = Tokens(tokens, starts, ends, weights, **{name: values[i] for name, values in lists.items()})
        row["metadata"] = json.loads(row["metadata"])
        yield Trajectory(content=content, **row)
