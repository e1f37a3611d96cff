"""Check the invariants of a trie: its nodes, its trajectories and their trained spans."""

from __future__ import annotations

import numpy as np

from treepack.columns import PER_TOKEN, SpanView, list_values, temperatures_of
from treepack.errors import TreepackError
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
    _refuse_equal_siblings(trie)
    _check_trained(trie)


def _check_trained(trie: Trie) -> None:
    """Refuse spans that are outside their trajectory or overlap, and per-token lists of another length."""
    spans = SpanView.of(trie.trajectories)
    owner = np.repeat(np.arange(trie.num_trajectories), np.diff(spans.offsets))
    # A span may start where the previous span of its trajectory ends; the first may start at 1, because no token
    # predicts token 0. Owners [0, 0, 1] with ends [4, 9, 5] -> earliest starts [1, 4, 1].
    follows = np.concatenate([[False], owner[1:] == owner[:-1]])
    earliest = np.where(follows, np.concatenate([[0], spans.ends[:-1]]), 1)
    good = (spans.starts >= earliest) & (spans.starts < spans.ends) & (spans.ends <= trie.lengths[owner])
    names = trie.trajectories["trajectory_id"]
    if not good.all():
        raise TreepackError(
            f"trajectory {names[int(owner[(~good).argmax()])]}: its spans are wrong; build the trie again"
        )
    trained = spans.total(spans.sizes.astype(np.float64))
    for column in PER_TOKEN:
        for i, values in enumerate(list_values(trie.trajectories, column)):
            if values is not None and len(values) != trained[i]:
                raise TreepackError(f"trajectory {names[i]}: {column} has {len(values)} values; build the trie again")
    for i, temperatures in enumerate(temperatures_of(trie.trajectories)):
        # NaN marks a token whose temperature is not known.
        if temperatures is not None and ((temperatures < 0) | np.isinf(temperatures)).any():
            raise TreepackError(f"trajectory {names[i]}: has an impossible temperature; build the trie again")


def _refuse_equal_siblings(trie: Trie) -> None:
    """Refuse siblings that start with the same token, because their common prefix would be stored twice."""
    below = trie.parent >= 0
    first = trie.tokens[trie.node_start[:-1]]
    pairs = np.stack([trie.parent[below], first[below]])
    if np.unique(pairs, axis=1).shape[1] != pairs.shape[1]:
        raise TreepackError("two sibling nodes begin with the same token; build the trie again")
