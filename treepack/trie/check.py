"""Check the invariants of a trie: its nodes, its trajectories and their trained spans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.columns import PER_TOKEN, SpanView
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.trajectory import Int64, Routes, is_recorded, missing_route
from treepack.trie.pieces import node_pieces, trajectory_pieces
from treepack.trie.route_symbols import route_symbols
from treepack.trie.trie import Trie


def check_trie(trie: Trie) -> None:
    """Check the invariants of a trie.

    Raises:
        TreepackError: naming the node or trajectory.
    """
    path = trie.path_length
    below = trie.parent >= 0
    faults = {
        "has no token": trie.node_length < 1,
        "comes before its parent": trie.parent >= np.arange(trie.num_nodes),
        "does not begin where its parent ends": trie.depth != np.where(below, path[trie.parent], 0),
    }
    for fault, is_faulty in faults.items():
        if is_faulty.any():
            raise TreepackError(f"node {int(is_faulty.argmax())} {fault}; build the trie again")
    if ((trie.end_node < 0) | (trie.end_node >= trie.num_nodes)).any():
        raise TreepackError("a trajectory ends in a node that is not in the trie; build the trie again")
    # Trajectories that end before each node: end_node [1, 2, 3] -> [0, 0, 1, 2, 3]. A subtree has the difference
    # between its end and its start: node 1 with node_end 3 -> 2 - 0.
    ends = np.bincount(trie.end_node, minlength=trie.num_nodes)
    passing = np.concatenate([[0], np.cumsum(ends)])
    if (passing[trie.node_end] - passing[:-1] != trie.num_passing).any():
        raise TreepackError("num_trajectories of the nodes do not match the trajectories; build the trie again")
    table = trie.trajectories
    if (table["num_tokens"].to_numpy() != trie.lengths).any():
        raise TreepackError("num_tokens of the trajectories do not match the nodes they end in; build the trie again")
    if (table["tree_id"].to_numpy() != trie.tree_id[trie.end_node]).any():
        raise TreepackError("tree_id of the trajectories does not match the nodes they end in; build the trie again")
    _check_routes(trie)
    _refuse_equal_siblings(trie)
    _check_trained(trie)
    _check_credit(trie)


def _check_routes(trie: Trie) -> None:
    """Refuse recorded experts of a token and layer of which two are equal, or some are missing."""
    if trie.routes is None:
        return
    missing = missing_route(trie.routes)
    for a, b in node_pieces(trie):
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
    """Refuse spans that are outside their trajectory or overlap, and per-token lists of another length."""
    lengths, names = trie.lengths, trie.trajectories["trajectory_id"]
    trained = np.zeros(trie.num_trajectories, np.int64)
    for first, end in trajectory_pieces(trie):
        spans = SpanView.of(trie.trajectories.slice(first, end - first))
        wrong = _wrong_spans(spans, lengths[first:end])
        if wrong is not None:
            raise TreepackError(f"trajectory {names[first + wrong]}: its spans are wrong; build the trie again")
        trained[first:end] = spans.total(spans.sizes.astype(np.float64))
    for column in PER_TOKEN:
        if column in trie.trajectories.column_names:
            _check_sizes(trie, column, trained)
    for first, end in trajectory_pieces(trie):
        impossible = _impossible_temperatures(trie.trajectories.slice(first, end - first))
        if impossible.any():
            name = names[first + int(impossible.argmax())]
            raise TreepackError(f"trajectory {name}: has an impossible temperature; build the trie again")


def _check_credit(trie: Trie) -> None:
    """Refuse values of a critic that are no numbers, old values without returns, and wrong factors."""
    if trie.token_values is not None:
        for a, b in node_pieces(trie):
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


def _wrong_spans(spans: SpanView, lengths: Int64) -> int | None:
    """Return the first trajectory with a wrong span, None if there is none; `lengths` are their tokens."""
    owner = np.repeat(np.arange(len(lengths)), np.diff(spans.offsets))
    # A span may start where the previous span of its trajectory ends; the first may start at 1, because no token
    # predicts token 0. Owners [0, 0, 1] with ends [4, 9, 5] -> earliest starts [1, 4, 1].
    follows = np.concatenate([[False], owner[1:] == owner[:-1]])[: len(owner)]
    earliest = np.where(follows, np.concatenate([[0], spans.ends[:-1]])[: len(owner)], 1)
    good = (spans.starts >= earliest) & (spans.starts < spans.ends) & (spans.ends <= lengths[owner])
    return None if good.all() else int(owner[(~good).argmax()])


def _check_sizes(trie: Trie, column: str, trained: Int64) -> None:
    """Refuse lists of a per-token column that do not have `trained` values, int64 [num_trajectories]."""
    first = 0
    for chunk in trie.trajectories[column].chunks:
        # A null has no length, so it is like a list of the right one.
        expected = trained[first : first + len(chunk)]
        sizes = pc.if_else(chunk.is_valid(), chunk.value_lengths(), pa.array(expected)).to_numpy(zero_copy_only=False)
        if (sizes != expected).any():
            i = int((sizes != expected).argmax())
            name = trie.trajectories["trajectory_id"][first + i]
            raise TreepackError(f"trajectory {name}: {column} has {sizes[i]} values; build the trie again")
        first += len(chunk)


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

    Two siblings with other recorded routes for the token are no error.
    """
    if trie.routes is not None:
        letters = route_symbols(trie.tokens[trie.node_start[:-1]], trie.routes[trie.node_start[:-1]])
    else:
        letters = trie.tokens[:0]
    first = np.zeros(trie.num_nodes, np.int64)
    for a, b in node_pieces(trie):
        first[a:b] = trie.tokens[trie.node_start[a:b]] if trie.routes is None else letters[a:b]
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
