"""Check the invariants of a trie: its nodes, its trajectories and their trained spans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.kept_sets import wrong_set
from treepack.sequences import SpanView, ragged_values
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
    _check_credit(trie)
    _check_kept_sets(trie)


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
        impossible = _impossible_temperatures(table)
        if impossible.any():
            name = names[first + int(impossible.argmax())]
            raise TreepackError(f"trajectory {name}: has an impossible temperature; build the trie again")


def _check_credit(trie: Trie) -> None:
    """Refuse values of a critic that are not numbers, old values without returns, and wrong factors."""
    if trie.token_values is not None:
        for a, b in ranges_of_nodes(trie):
            values = trie.token_values[trie.node_start[a] : trie.node_start[b]]
            if not np.isfinite(values).all():
                token = int(trie.node_start[a]) + int((~np.isfinite(values)).argmax())
                node = int(np.searchsorted(trie.node_start, token, "right")) - 1
                raise TreepackError(f"node {node}: has a token value that is not finite; write the values again")
    table, known = trie.trajectories, {}
    for name in schema.CREDIT.names:
        if name not in table.column_names:
            known[name] = np.zeros(table.num_rows, np.bool_)
            continue
        known[name] = table[name].is_valid().to_numpy()
        first = 0
        for chunk in table[name].chunks:
            values = chunk.flatten().to_numpy(zero_copy_only=False)
            wrong = ~np.isfinite(values) | ((values < 0) & (name == "edge_factors"))
            if wrong.any():
                i = first + int(chunk.value_parent_indices().to_numpy()[wrong.argmax()])
                raise TreepackError(f"trajectory {table['trajectory_id'][i]}: has impossible {name}; write them again")
            first += len(chunk)
    alone = known["old_values"] & ~known["returns"]
    if alone.any():
        i = int(alone.argmax())
        raise TreepackError(f"trajectory {table['trajectory_id'][i]}: has old_values and no returns; write them again")


def _check_kept_sets(trie: Trie) -> None:
    """Refuse sets of token ids that do not ascend, or lack the sampled id."""
    sets, spans = ragged_values(trie.trajectories, "kept_ids"), SpanView.of(trie.trajectories)
    if sets.is_missing:
        return
    for i, sequence in enumerate(sequences_of(trie)):
        starts, ends, _ = spans[i]
        if (kept := sets[i]) is not None and wrong_set(kept, sequence[positions(starts, ends)]) is not None:
            name = trie.trajectories["trajectory_id"][i]
            raise TreepackError(f"trajectory {name}: has wrong kept_ids; build the trie again")


def _impossible_temperatures(table: pa.Table) -> NDArray[np.bool_]:
    """Return True for each trajectory of `table` with a temperature that is negative or infinite."""
    # A trajectory has a list or one value; if it has both, the list counts.
    impossible = np.zeros(table.num_rows, np.bool_)
    if "temperature" in table.column_names:
        with np.errstate(over="ignore"):  # rows contain temperatures as float32
            impossible = _impossible(table["temperature"].to_numpy().astype(np.float32))
    if "temperatures" not in table.column_names:
        return impossible
    first = 0
    for chunk in table["temperatures"].chunks:
        each = slice(first, first + len(chunk))
        impossible[each] &= chunk.is_null().to_numpy(zero_copy_only=False)
        # Lists of 2, null and 1 values, flattened [0.5, -1, 2] -> owners [0, 0, 2].
        owner = chunk.value_parent_indices().to_numpy()
        impossible[each][owner[_impossible(chunk.flatten().to_numpy(zero_copy_only=False))]] = True
        first += len(chunk)
    return impossible


def _impossible(temperatures: NDArray[Any]) -> NDArray[np.bool_]:
    # NaN marks a temperature that is not known.
    impossible: NDArray[np.bool_] = (temperatures < 0) | np.isinf(temperatures)
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
