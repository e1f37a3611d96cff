"""Build a forest of prefix tries by sorting.

    a b c d        sorted, with the length of the prefix shared with the one before      nodes, depth-first
    a b x          0: a b c d                                                            0: [a b]  1: [c d]
    a b c d e      4:         e                                                          2: [e]    3: [x]
                   2:     x

Sequences are sorted lexicographically as big-endian bytes. Then the common prefixes of neighbours determine the trie:
the tokens that a sequence does not share with the sequence before it are stored once. Sorted order is depth-first
order. The stored tokens are cut into nodes at each point at which a later sequence branches off. There is no object per
token, and there are O(1) Python steps per branch.

A tree never contains several training steps, nor several groups under `share="group"`. Under `share="none"` every
trajectory is a separate tree, as if sequences were trained one by one. The result does not depend on input order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.ingest.options import ROUTE_CONFLICTS, SHARES
from treepack.sequences import Sequences, collect, take_rows
from treepack.trajectory import Int32, Int64, Trajectory, is_recorded
from treepack.trie.builders.route_order import ROWS_AT_ONCE, RoutedTokens, routed_order
from treepack.trie.nodes import NodeArrays, forest_of, sort_sequences
from treepack.trie.route_symbols import RouteCosts, new_positions, shared_routes
from treepack.trie.storage import ArrayStorage
from treepack.trie.trie import Trie, trie_of_nodes

Partition = tuple[tuple[bool, int], str]  # ((has a step, the step), the group)


def build_trie(
    trajectories: Iterable[Trajectory] | Sequences,
    *,
    share: str = "all",
    route_conflicts: str = "split",
    storage: ArrayStorage = ArrayStorage(),  # noqa: B008 (immutable)
) -> Trie:
    """Build the forest of prefix tries of tokenised `trajectories`.

    `share` "all" shares prefixes between all trajectories of a training step, "group" only inside a group, and "none"
    shares nothing. Duplicates and trajectories that are prefixes of others are kept. With `route_conflicts` "split",
    tokens with other recorded routes are not shared, except a last token without any; with "first" they are, and the
    first routes count; see `route_order` and `route_symbols`. Routes of the trie that are large for `storage` are in a
    mapped file. O(N_flat), plus the comparisons of the sort.

    Raises:
        TreepackError: no trajectory, or one that is not tokenised.
    """
    for name, value, known in (("share", share, SHARES), ("route_conflicts", route_conflicts, ROUTE_CONFLICTS)):
        if value not in known:
            raise TreepackError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    sequences = trajectories if isinstance(trajectories, Sequences) else collect(trajectories)
    routes = sequences.routes
    order, shared, forest = _forest(sequences, share, splits=route_conflicts == "split")
    storage.release()
    if routes is None:
        offsets = sequences.offsets.tolist()
        pieces = [sequences.tokens[offsets[i] + shared[k] : offsets[i + 1]] for k, i in enumerate(order)]
        tokens = np.concatenate(pieces)
    else:
        tokens = sequences.tokens[new_positions(sequences.offsets, order, shared)]
        routes, _, storage = shared_routes(routes, sequences.offsets, order, forest, storage)
    table = with_places(take_rows(sequences.table, np.array(order)), forest.tree_id[forest.end_node], forest.end_node)
    return replace(trie_of_nodes(forest, tokens, table, share=share), routes=routes, storage=storage)


def route_costs(
    sequences: Sequences,
    *,
    share: str,
    storage: ArrayStorage = ArrayStorage(),  # noqa: B008 (immutable)
) -> RouteCosts:
    """Return the costs of conflicts between the recorded routes of `sequences`, which have some, in a trie."""
    assert sequences.routes is not None
    routes, layers = sequences.routes, sequences.routes.shape[1]
    order, _, forest = _forest(sequences, share)
    _, differing, _ = shared_routes(routes, sequences.offsets, order, forest, storage)
    _, _, split = _forest(sequences, share, splits=True)
    pieces = (routes[i : i + ROWS_AT_ONCE] for i in range(0, len(routes), ROWS_AT_ONCE))
    recorded = np.concatenate([is_recorded(rows).any(axis=1) for rows in pieces])
    storage.release()
    without = int((~np.logical_or.reduceat(recorded, sequences.offsets[:-1])).sum())
    sizes = int(forest.node_start[-1]), int(split.node_start[-1])
    return RouteCosts(layers, routes.shape[2], int(recorded.sum()), without, differing, *sizes)


def _forest(sequences: Sequences, share: str, *, splits: bool = False) -> tuple[list[int], array[int], NodeArrays]:
    """Return the order of the trajectories, the tokens that each shares with the one before it, and the nodes.

    With `splits`, tokens with other recorded routes are not shared.
    """
    partition, _ = partitions(sequences.table, share=share)
    by_id = _by_id(sequences.table)
    if splits and sequences.routes is not None:
        given = RoutedTokens(sequences.tokens, sequences.offsets, sequences.routes, partition)
        order, shared = routed_order(given, by_id, shares_last=share != "none")
    else:
        order, shared = sort_sequences(sequences.tokens, sequences.offsets, partition, by_id)
    if share == "none":
        shared = array("q", [0]) * len(order)
    return order, shared, forest_of(shared, array("q", np.diff(sequences.offsets)[order].tobytes()))


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


def _by_id(table: pa.Table) -> list[int]:
    """Return the trajectories by id and source: the order of trajectories with equal tokens."""
    ids = list(zip(table["trajectory_id"].to_pylist(), table["source"].to_pylist(), strict=True))
    return sorted(range(len(ids)), key=ids.__getitem__)


def with_places(table: pa.Table, tree_id: Int32, node_id: Int32) -> pa.Table:
    """Return `table` with the tree and the node where each trajectory ends."""
    columns = {name: table[name] for name in table.column_names}
    columns["tree_id"] = pa.array(tree_id, pa.int32())
    columns["node_id"] = pa.array(node_id, pa.int32())
    known = schema.trajectory_columns(columns)
    return pa.Table.from_arrays([columns[name] for name in known.names], schema=known)
