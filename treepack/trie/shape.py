"""Check the shape of a trie that was read from files: its nodes form trees, and its trajectories fit them.

    check_nodes(trie)                  nodes, and the nodes where trajectories end      O(nodes + trajectories)
    check_trained(table, lengths)      spans and lists of some trajectories             O(spans + lists)

Code that reads tries relies on this; `check.check_trie` checks the rest of the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.sequences import PER_TOKEN, SpanView
from treepack.trajectory import Int32, Int64
from treepack.trie.trie import Trie


def check_nodes(trie: Trie) -> None:
    """Check that the nodes are in depth-first order, with a token each, and that trajectories end in the right nodes.

    Raises:
        TreepackError: naming the node.
    """
    path = trie.path_length
    below = trie.parent >= 0
    inside = np.minimum(np.maximum(trie.parent, 0), trie.num_nodes - 1)
    order = np.arange(trie.num_nodes)
    faults = {
        "has no token": trie.node_length < 1,
        "has an impossible parent": trie.parent < -1,
        "comes before its parent": trie.parent >= order,
        "does not begin where its parent ends": trie.depth != np.where(below, path[inside], 0),
        "is not in depth-first order": ~_is_depth_first(trie.parent, trie.node_end),
    }
    for fault, is_faulty in faults.items():
        if is_faulty.any():
            raise TreepackError(f"node {int(is_faulty.argmax())} {fault}; build the trie again")
    if ((trie.end_node < 0) | (trie.end_node >= trie.num_nodes)).any():
        raise TreepackError("a trajectory ends in a node that is not in the trie; build the trie again")
    if (trie.end_node[1:] < trie.end_node[:-1]).any():
        raise TreepackError("its trajectories are not sorted by the nodes they end in; build the trie again")
    # Trajectories that end before each node: end_node [1, 2, 3] -> [0, 0, 1, 2, 3]. A subtree has the difference
    # between its end and its start: node 1 with node_end 3 -> 2 - 0.
    ends = np.bincount(trie.end_node, minlength=trie.num_nodes)
    passing = np.concatenate([[0], np.cumsum(ends)])
    if (passing[trie.node_end] - passing[:-1] != trie.num_passing).any() or (trie.num_passing < 1).any():
        raise TreepackError("num_trajectories of the nodes do not match the trajectories; build the trie again")
    table = trie.trajectories
    if (table["num_tokens"].to_numpy() != trie.lengths).any():
        raise TreepackError("num_tokens of the trajectories do not match the nodes they end in; build the trie again")
    if (table["tree_id"].to_numpy() != trie.tree_id[trie.end_node]).any():
        raise TreepackError("tree_id of the trajectories does not match the nodes they end in; build the trie again")


def _is_depth_first(parent: Int32, node_end: Int32) -> NDArray[np.bool_]:
    """Return True for each node whose parent is the innermost earlier subtree that contains it."""
    # A subtree contains a node if it began before the node and has not ended: node_end [4, 3, 3, 4] ->
    # 0 1 2 3 earlier nodes less 0 0 0 2 ended ones -> depths 0 1 2 1, each one more than that of its parent.
    num = len(parent)
    around = np.arange(num) - np.cumsum(np.bincount(node_end, minlength=num + 1))[:num]
    above = np.minimum(np.maximum(parent, 0), num - 1)
    return np.asarray(around == np.where(parent >= 0, around[above] + 1, 0))


def check_trained(table: pa.Table, lengths: Int64 | Int32) -> None:
    """Check spans and per-token lists of the trajectories `table`, which have `lengths` tokens.

    Raises:
        TreepackError: a span is outside of its trajectory or overlaps another one, or a list has another length than
            the trained tokens; naming the trajectory.
    """
    names = table["trajectory_id"]
    spans = SpanView.of(table)
    wrong = _wrong_spans(spans, lengths)
    if wrong is not None:
        raise TreepackError(f"trajectory {names[wrong]}: its spans are wrong; build the trie again")
    trained = spans.total(spans.sizes.astype(np.float64)).astype(np.int64)
    for column in PER_TOKEN:
        if column in table.column_names:
            _check_sizes(table[column], column, trained, names)


def _wrong_spans(spans: SpanView, lengths: Int64 | Int32) -> int | None:
    """Return the first trajectory with a wrong span, or None; `lengths` are their tokens."""
    owner = np.repeat(np.arange(len(lengths)), np.diff(spans.offsets))
    # A span may start at the end of the previous span of its trajectory; the first may start at 1, because no token
    # predicts token 0. Owners [0, 0, 1] with ends [4, 9, 5] -> earliest starts [1, 4, 1].
    follows = np.concatenate([[False], owner[1:] == owner[:-1]])[: len(owner)]
    earliest = np.where(follows, np.concatenate([[0], spans.ends[:-1]])[: len(owner)], 1)
    good = (spans.starts >= earliest) & (spans.starts < spans.ends) & (spans.ends <= lengths[owner])
    return None if good.all() else int(owner[(~good).argmax()])


def _check_sizes(values: pa.ChunkedArray, column: str, trained: Int64, names: Sequence[Any]) -> None:
    """Refuse lists of a per-token column that do not have `trained` values, int64 [num_trajectories]."""
    first = 0
    for chunk in values.chunks:
        # A null has no length, so it is like a list of the right one.
        expected = trained[first : first + len(chunk)]
        sizes = pc.if_else(chunk.is_valid(), chunk.value_lengths(), pa.array(expected)).to_numpy(zero_copy_only=False)
        if (sizes != expected).any():
            i = int((sizes != expected).argmax())
            raise TreepackError(f"trajectory {names[first + i]}: {column} has {sizes[i]} values; build the trie again")
        first += len(chunk)
