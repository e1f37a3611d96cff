"""The prefix trie as arrays, and walks along its paths.

a b c d        nodes, depth-first             node        0   1   2   3
a b c d e      0: [a b]  1: [c d]  2: [e]     parent     -1   0   1   0
a b x                    3: [x]               depth       0   2   4   2
                                              node_start  0   2   4   5   6
tokens a b c d e x                            node_end    4   3   3   4
                                              end_node    1   2   3         (per trajectory)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.files import schema
from treepack.files.metadata import parse_metadata
from treepack.sequences import STORED, SpanView, list_values
from treepack.trajectory import Float64, Int32, Int64, Routes, Tokens, Trajectory
from treepack.trie.nodes import NodeArrays, paths
from treepack.trie.storage import ArrayStorage, PageReleaser

_ROWS_AT_ONCE = 1024  # trajectories that become Python objects at a time


@dataclass(frozen=True, slots=True)
class Trie:
    """A forest in depth-first order: the nodes of a subtree, and their tokens, are contiguous.

    Attributes:
        tokens: int32 [N_tree], the tokens of all nodes one after the other.
        node_start: int64 [num_nodes + 1]; node u owns `tokens[node_start[u]:node_start[u + 1]]`.
        node_end: int32 [num_nodes]; the subtree of node u is the nodes `u .. node_end[u] - 1`.
        parent: int32 [num_nodes], -1 at a root.
        depth: int64 [num_nodes], tokens on the path before the node.
        num_passing: int32 [num_nodes], trajectories that pass through the node or end in it.
        end_node: int32 [num_trajectories]; trajectory i ends with the last token of this node. Trajectories are sorted,
            so these never decrease.
        trajectories: table of `schema.trajectory_columns`, one row per trajectory.
        share: "all", "group" or "none", see `build_trie`.
        token_values: float64 [N_tree], a critic's value after each token; None if there are none or they were not read.
        routes: [N_tree, layers, k], the experts of each token, see `trajectory.Tokens`, or None.
        storage: of the arrays that are mapped files, and of arrays that are made from the trie.
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
    token_values: Float64 | None = None
    routes: Routes | None = None
    storage: ArrayStorage = field(default=ArrayStorage(), repr=False, compare=False)

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_trajectories(self) -> int:
        return len(self.end_node)

    def source(self, index: int | np.integer[Any]) -> str:
        """Return the place that a trajectory was read from; messages about it begin with this."""
        return str(self.trajectories["source"][int(index)].as_py())

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
        # Steps [7, null, 3, 7] -> [2, 0, 1, 2].
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


def trie_of_nodes(nodes: NodeArrays, tokens: Int32, trajectories: pa.Table, *, share: str) -> Trie:
    """Return the trie with these nodes, their tokens and the trajectories in order."""
    fields = {name: getattr(nodes, name) for name in NodeArrays.__slots__}
    return Trie(tokens=tokens, trajectories=trajectories, share=share, **fields)


def unshared(trie: Trie) -> Trie:
    """Return the same trajectories in the same order, each a tree of one node, as `share="none"` builds them.

    The result has no `token_values`. The N_flat tokens are a mapped file if they are large.

    Raises:
        TreepackError: the disk fails.
    """
    lengths, each = trie.lengths, np.arange(trie.num_trajectories, dtype=np.int32)
    table = trie.trajectories
    for name in ("tree_id", "node_id"):
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), pa.array(each))
    growing = trie.storage.growing_array(np.int32, in_file=trie.storage.is_large(4 * int(lengths.sum())))
    for sequence in sequences_of(trie):
        growing.append(sequence)
    tokens, storage = growing.finish()
    routes = None
    if trie.routes is not None:
        routes = np.concatenate([trie.routes[path] for path in paths(trie.end_node, trie.node_start, trie.depth)])
    return Trie(
        tokens=tokens,
        node_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        node_end=each + np.int32(1),
        parent=np.full_like(each, -1),
        depth=np.zeros(len(each), np.int64),
        num_passing=np.ones_like(each),
        end_node=each,
        trajectories=table,
        share="none",
        routes=routes,
        storage=storage,
    )


def sequences_of(trie: Trie) -> Iterator[Int32]:
    """Yield the token ids of every trajectory, in trie order; each int32 [num_tokens]."""
    releaser = PageReleaser(trie.storage)
    for path in paths(trie.end_node, trie.node_start, trie.depth):
        yield trie.tokens[path]
        releaser.count(len(path))


def trajectories_of(trie: Trie) -> Iterator[Trajectory]:
    """Yield the trajectories that the trie was built from, in trie order: the inverse of `build_trie`."""
    table = trie.trajectories
    names = ["trajectory_id", "group_id", "step", "weight", "reward", "advantage", "metadata", "source", "temperature"]
    names += schema.ROLLOUTS.names
    scalars = table.select([name for name in names if name in table.column_names])
    rows = (row for batch in scalars.to_batches(max_chunksize=_ROWS_AT_ONCE) for row in batch.to_pylist())
    spans = SpanView.of(table)
    lists: dict[str, Any] = {name: list_values(table, stored) for name, stored in STORED.items()}
    routes: Iterator[Routes | None] = repeat(None, trie.num_trajectories)
    if trie.routes is not None:
        kept = trie.routes
        routes = (kept[path] for path in paths(trie.end_node, trie.node_start, trie.depth))
    for i, (tokens, own, row) in enumerate(zip(sequences_of(trie), routes, rows, strict=True)):
        starts, ends, weights = spans[i]
        per_token: dict[str, Any] = {name: values[i] for name, values in lists.items()} | {"routes": own}
        row["metadata"] = parse_metadata(row["metadata"], row["source"])
        yield Trajectory(content=Tokens(tokens, starts, ends, weights, **per_token), **row)
