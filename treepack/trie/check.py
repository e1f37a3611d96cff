"""Check the invariants of a trie: its nodes, its trajectories and their trained spans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.columns import COLUMNS, Column, Lists
from treepack.errors import TreepackError
from treepack.sequences import SpanView, values_of
from treepack.trajectory import Int64, Routes, is_recorded, missing_route, positions
from treepack.trie.route_symbols import route_symbols
from treepack.trie.shape import check_nodes, check_trained
from treepack.trie.token_ranges import ranges_of_nodes, ranges_of_trajectories
from treepack.trie.trie import Trie, sequences_of


def check_trie(trie: Trie) -> None:
    """Check the invariants of a trie.

    Raises:
        TreepackError: naming the node or trajectory.
    """
    check_nodes(trie)
    _check_routes(trie)
    _refuse_equal_siblings(trie)
    _check_trained(trie)
    _check_values(trie)
    _check_lists(trie)


def _check_routes(trie: Trie) -> None:
    """Refuse recorded experts of a token and layer of which two are equal, or some are missing."""
    if trie.routes is None:
        return
    missing = missing_route(trie.routes)
    for a, b in ranges_of_nodes(trie):
        routes: Routes = trie.routes[trie.node_start[a] : trie.node_start[b]].copy()
        routes.sort(axis=-1)
        # All k are missing, or none is, and then sorted neighbours differ. In uint8, one of several may be expert 255.
        some = np.asarray(np.equal(routes, missing).any(axis=-1) & (routes.dtype != np.uint8))
        equal = np.equal(routes[..., 1:], routes[..., :-1]).any(axis=-1)
        wrong = np.asarray(((some | equal) & is_recorded(routes)).any(axis=-1))
        if wrong.any():
            token = int(trie.node_start[a]) + int(wrong.argmax())
            node = int(np.searchsorted(trie.node_start, token, "right")) - 1
            raise TreepackError(f"node {node}: has a token with impossible routes; build the trie again")


def _check_trained(trie: Trie) -> None:
    """Refuse spans that are outside their trajectory or overlap, and per-token lists of a wrong length."""
    lengths, names = trie.lengths, trie.trajectories["trajectory_id"]
    for first, end in ranges_of_trajectories(trie):
        table = trie.trajectories.slice(first, end - first)
        check_trained(table, lengths[first:end])
        for column in COLUMNS:
            impossible = _impossible(table, column)
            if impossible.any():
                name = names[first + int(impossible.argmax())]
                remedy = "write them" if column.is_computed else "build the trie"
                raise TreepackError(f"trajectory {name}: has impossible {column.stored}; {remedy} again")


def _check_values(trie: Trie) -> None:
    """Refuse values of a critic that are not numbers, at nodes, and old values of trajectories without returns."""
    if trie.token_values is not None:
        for a, b in ranges_of_nodes(trie):
            values = trie.token_values[trie.node_start[a] : trie.node_start[b]]
            if not np.isfinite(values).all():
                token = int(trie.node_start[a]) + int((~np.isfinite(values)).argmax())
                node = int(np.searchsorted(trie.node_start, token, "right")) - 1
                raise TreepackError(f"node {node}: has a token value that is not finite; write the values again")
    table = trie.trajectories
    known = [
        table[name].is_valid().to_numpy() if name in table.column_names else np.zeros(table.num_rows, np.bool_)
        for name in ("old_values", "returns")
    ]
    alone = known[0] & ~known[1]
    if alone.any():
        i = int(alone.argmax())
        raise TreepackError(f"trajectory {table['trajectory_id'][i]}: has old_values and no returns; write them again")


def _check_lists(trie: Trie) -> None:
    """Refuse impossible lists of numbers, such as sets of token ids that lack the sampled id."""
    table, spans = trie.trajectories, SpanView.of(trie.trajectories)
    views = {column: values_of(table, column) for column in COLUMNS if isinstance(column.kind, Lists) and column.wrong}
    known = {column: view for column, view in views.items() if not view.is_missing}
    if not known:
        return
    for i, sequence in enumerate(sequences_of(trie)):
        starts, ends, _ = spans[i]
        trained = sequence[positions(starts, ends)]
        for column, view in known.items():
            if (lists := view[i]) is not None and column.wrong is not None and column.wrong(lists, trained).any():
                raise TreepackError(
                    f"trajectory {table['trajectory_id'][i]}: has impossible {column.stored}; build the trie again"
                )


def _impossible(table: pa.Table, column: Column) -> NDArray[np.bool_]:
    """Return True for each trajectory of `table` with an impossible number in a column of numbers."""
    # A trajectory has a list or one number; if it has both, the list counts.
    impossible = np.zeros(table.num_rows, np.bool_)
    if column.wrong is None or isinstance(column.kind, Lists):
        return impossible
    if column.whole in table.column_names:
        with np.errstate(over="ignore"):  # rows may contain the numbers as float32
            numbers = table[column.whole].to_numpy().astype(column.kind.dtype)
        impossible = column.wrong(numbers, numbers)
    if column.stored not in table.column_names:
        return impossible
    first = 0
    for chunk in table[column.stored].chunks:
        each = slice(first, first + len(chunk))
        impossible[each] &= chunk.is_null().to_numpy(zero_copy_only=False)
        # Lists of 2, null and 1 values, flattened [0.5, -1, 2] -> owners [0, 0, 2].
        owner = chunk.value_parent_indices().to_numpy()
        values = chunk.flatten().to_numpy(zero_copy_only=False)
        # A computed column has all numbers of a trajectory, and NaN marks a missing one in the others.
        wrong = column.wrong(values, values) | (np.isnan(values) & column.is_computed)
        impossible[each][owner[wrong]] = True
        first += len(chunk)
    return impossible


def _refuse_equal_siblings(trie: Trie) -> None:
    """Refuse siblings that start with the same token, because their common prefix would be stored twice.

    Two siblings may have different recorded routes for the token.
    """
    first = np.zeros(trie.num_nodes, np.int64)
    for a, b in ranges_of_nodes(trie):
        first[a:b] = trie.tokens[trie.node_start[a:b]]
    if trie.routes is not None:
        first = route_symbols(first.astype(np.int32), trie.routes[trie.node_start[:-1]]).astype(np.int64)
    # Parent and first token as one number: (3, 5) -> 3 * 2^32 + 5.
    below = trie.parent >= 0
    pairs = np.sort((trie.parent[below].astype(np.int64) << 32) | (first[below] & 0xFFFFFFFF))
    if (pairs[1:] == pairs[:-1]).any():
        raise TreepackError("two sibling nodes begin with the same token; build the trie again")
    if trie.share != "none":
        _refuse_equal_roots(trie, first[~below])


def _refuse_equal_roots(trie: Trie, first: Int64) -> None:
    """Refuse trees of one training step, or group of a step, that begin with the same token, int64 [num_trees]."""
    # Trajectories are sorted by tree: trees 0 0 1 -> 0 2, one trajectory of each.
    tree = trie.tree_id[trie.end_node]
    one = np.searchsorted(tree, np.arange(len(first)))
    names = trie.trajectories["group_id"].take(pa.array(one)).to_pylist() if trie.share == "group" else [""] * len(one)
    steps = trie.step_rank[one].tolist()
    keys = list(zip(steps, names, first.tolist(), strict=True))
    if len(set(keys)) < len(keys):
        raise TreepackError("two trees of one group begin with the same token; build the trie again")
    if any(before[:2] > after[:2] for before, after in pairwise(keys)):
        raise TreepackError("its trees are not in the order of steps and groups; build the trie again")
