"""Totals of a trie: its counts, N_flat, N_tree and the potential overlap ratio."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from treepack.sequences import num_trained
from treepack.trie.trie import Trie

COLUMNS = ["step", "group_id", "trained"]  # of the trajectories, which `totals_of` needs


def trie_totals(trie: Trie) -> dict[str, Any]:
    """Return the counts of a trie and its potential overlap ratio, POR = 1 - N_tree / N_flat."""
    sizes = {
        "num_trees": trie.num_trees,
        "num_nodes": trie.num_nodes,
        "tokens_flat": trie.tokens_flat,
        "tokens_tree": trie.tokens_tree,
    }
    return totals_of(trie.trajectories, **sizes)


def totals_of(
    trajectories: pa.Table, *, num_trees: int, num_nodes: int, tokens_flat: int, tokens_tree: int
) -> dict[str, Any]:
    """Return the totals of a trie, from its `trajectories` in any order and from the sizes of its nodes."""
    # Not polars, because importing it takes as long as reading five million tokens. A null step is a value like others.
    groups = trajectories.select(["step", "group_id"]).group_by(["step", "group_id"]).aggregate([])
    return {
        "num_trajectories": trajectories.num_rows,
        "num_groups": groups.num_rows,
        "num_trees": num_trees,
        "num_nodes": num_nodes,
        "tokens_flat": tokens_flat,
        "tokens_tree": tokens_tree,
        "tokens_trained": num_trained(trajectories),
        "por": 1 - tokens_tree / tokens_flat,
    }
