"""Assign the sequences of a batch to rows, from their sorted order alone.

    sorted      a b    a b c    a b d    x y        leaves   a b c    a b d    x y
    shared      0      2        2        0          shared   0        2        0

A sequence that is a prefix of the next one costs nothing in its row, so only the others, the leaves, are planned. A
leaf that is longer than the capacity gets a row of its own.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from treepack.online.options import OnlineOptions
from treepack.online.sequences import FlatSequences
from treepack.pack.plan.fill import merge_rows
from treepack.pack.plan.methods.contiguous import cut_in_order
from treepack.pack.plan.problem import RowLimits, SearchOptions, path_pairs
from treepack.pack.plan.unions import RowSizes, row_tokens
from treepack.trajectory import Int32, Int64, Routes
from treepack.trie.builders.route_order import RoutedTokens, routed_order
from treepack.trie.nodes import NodeArrays, forest_of, sort_sequences
from treepack.trie.route_symbols import shared_routes
from treepack.trie.storage import ArrayStorage


@dataclass(frozen=True)
class SortedForest:
    """The trie of a batch: the fields of `Trie` that rows need, and the sequences in its order.

    `order` int64 [num_sorted] are the sequences that are not empty, sorted by their tokens. `shared` int64 [num_sorted]
    are the tokens that each shares with the one before, and `lengths` int64 [num_sorted] its tokens. `routes` are the
    recorded experts of `tokens`, or None.
    """

    tokens: Int32
    nodes: NodeArrays
    order: Int64
    shared: Int64
    lengths: Int64
    routes: Routes | None = None

    @property
    def node_start(self) -> Int64:
        return self.nodes.node_start

    @property
    def parent(self) -> Int32:
        return self.nodes.parent

    @property
    def depth(self) -> Int64:
        return self.nodes.depth

    @property
    def end_node(self) -> Int32:
        return self.nodes.end_node


def sort_forest(sequences: FlatSequences, *, route_conflicts: str = "split") -> SortedForest:
    """Build the trie of the sequences, which may be empty. O(N_flat), plus the comparisons of the sort."""
    tokens, offsets, routes = sequences.tokens, sequences.offsets, sequences.routes
    filled = np.flatnonzero(np.diff(offsets)).tolist()
    if routes is None or route_conflicts == "first":
        order, shared = sort_sequences(tokens, offsets, chosen=filled)
    else:
        order, shared = routed_order(
            RoutedTokens(tokens, offsets, routes, np.zeros(len(offsets) - 1, np.int64)), filled
        )
    starts = offsets.tolist()
    parts = [tokens[starts[i] + shared[k] : starts[i + 1]] for k, i in enumerate(order)]
    ranks = np.array(order, np.int64)
    lengths = np.diff(offsets)[ranks]
    lists = array("q", lengths.tobytes())
    nodes = forest_of(shared, lists)
    return SortedForest(
        np.concatenate(parts) if parts else tokens[:0],
        nodes,
        ranks,
        np.array(shared, np.int64),
        lengths,
        None if routes is None else shared_routes(routes, offsets, order, nodes, ArrayStorage())[0],
    )


def plan_forest(forest: SortedForest, options: OnlineOptions, capacity: int) -> list[Int64]:
    """Return the places in `forest.order` of the sequences of each row, ascending; rows by falling number of tokens."""
    if not len(forest.order):
        return []
    # shared [0, 2, 2, 0], lengths [2, 3, 3, 2] of the header -> is_leaf [F, T, T, T] -> leaf_of [0, 0, 1, 2]
    is_leaf = np.append(forest.shared[1:] < forest.lengths[:-1], True)
    leaves = np.flatnonzero(is_leaf)
    leaf_of = np.cumsum(is_leaf) - is_leaf
    # Two leaves share the tokens that the first sequence after the earlier leaf shares with it.
    # shared[[0, 2, 3]] -> [0, 2, 0]
    shared = forest.shared[np.append(0, leaves[:-1] + 1)]
    row_of, num_rows = _plan_leaves(forest, leaves, shared, options, capacity)
    rows = row_of[leaf_of]
    # A row has the tokens of each of its sequences that the one before it in this row does not share.
    sizes = row_tokens(forest.lengths[leaves], shared, row_of, num_rows)
    rank = np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")
    by_row = np.argsort(rank[rows], kind="stable")
    # Rows [1, 0, 1, 0] of the sequences -> order [1, 3, 0, 2], cut after 2 -> [1, 3], [0, 2]
    return np.split(by_row, np.cumsum(np.bincount(rank[rows], minlength=num_rows))[:-1])


def _plan_leaves(
    forest: SortedForest, leaves: Int64, shared: Int64, options: OnlineOptions, capacity: int
) -> tuple[Int64, int]:
    """Return the row of each leaf, and the number of rows."""
    lengths = forest.lengths[leaves]
    row_of = np.zeros(len(leaves), np.int64)
    short, long = np.flatnonzero(lengths <= capacity), np.flatnonzero(lengths > capacity)
    num_short = 0
    if len(short):
        # Without the long leaf between them, two leaves share the minimum: leaves 0, 2 of shared [0, 5, 3] -> [0, 3].
        between = np.minimum.reduceat(shared, np.append(0, short[:-1] + 1))
        if len(between) > 1:
            between[0] = 0
        if options.method == "contiguous":
            rows = _merge(cut_in_order(lengths[short], between, capacity), lengths[short], between, capacity)
        else:
            rows = _search(forest, leaves[short], options, capacity)
        row_of[short] = rows
        num_short = int(rows.max()) + 1
    row_of[long] = num_short + np.arange(len(long))
    return row_of, num_short + len(long)


def _merge(row_of: Int64, lengths: Int64, shared: Int64, capacity: int) -> Int64:
    """Merge rows of consecutive leaves that fit into one row together."""
    num_rows = int(row_of[-1]) + 1
    tokens = row_tokens(lengths, shared, row_of, num_rows)
    sizes = RowSizes(tokens, path_pairs(tokens), np.zeros_like(tokens))
    return merge_rows(sizes, np.zeros(num_rows, np.int64), RowLimits(capacity))[row_of]


def _search(forest: SortedForest, leaves: Int64, options: OnlineOptions, capacity: int) -> Int64:
    """Return the row of each leaf, from `plan_rows` with the method of the options."""
    # With Arrow and the planner's other methods, which the usual method does not need.
    from treepack.pack.plan.planning import plan_rows
    from treepack.trajectory import Tokens, Trajectory
    from treepack.trie.builders.in_memory import build_trie
    from treepack.trie.nodes import paths

    none: Int32 = np.zeros(0, np.int32)
    trajectories = []
    for number, path in enumerate(paths(forest.end_node[leaves], forest.node_start, forest.depth)):
        routes = None if forest.routes is None else forest.routes[path]
        content = Tokens(forest.tokens[path], none, none, np.zeros(0), routes=routes)
        trajectories.append(Trajectory(str(number), "batch", content))
    trie = build_trie(trajectories)
    plan = plan_rows(trie, capacity=capacity, method=options.method, search=SearchOptions(options.effort))
    rows = np.zeros(len(leaves), np.int64)
    rows[[int(name) for name in trie.trajectories["trajectory_id"].to_pylist()]] = plan.row_of
    return rows
