"""Totals of a trie: its counts, N_flat, N_tree and the potential overlap ratio."""

from __future__ import annotations

from typing import Any

import polars as pl

from treepack.columns import num_trained
from treepack.trie.trie import Trie


def trie_totals(trie: Trie) -> dict[str, Any]:
    """Return the counts of a trie and its potential overlap ratio, POR = 1 - N_tree / N_flat."""
    groups = pl.DataFrame({"step": trie.step_rank, "group": pl.from_arrow(trie.trajectories["group_id"])})
    return {
        "num_trajectories": trie.num_trajectories,
        "num_groups": groups.n_unique(),
        "num_trees": trie.num_trees,
        "num_nodes": trie.num_nodes,
        "tokens_flat": trie.tokens_flat,
        "tokens_tree": trie.tokens_tree,
        "tokens_trained": num_trained(trie.trajectories),
        "por": 1 - trie.tokens_tree / trie.tokens_flat,
    }
