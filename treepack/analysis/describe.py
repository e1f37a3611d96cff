"""Distributions of a trie and of packed rows, as plain values ready for JSON.

Trie --describe_trie--> totals, lengths, group sizes, branching, POR by depth
rows --describe_rows--> tokens, pairs and trajectories per row, lengths, branching, ERR by depth
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl

from treepack.pack.row import Row
from treepack.trajectory import Int64
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

Report = dict[str, Any]

# First range of depths, in tokens; each further range is twice as long, so that a page of them covers any length.
FIRST_DEPTH = 256


def describe_trie(trie: Trie, *, kind: str = "trie") -> Report:
    """Return the totals and distributions of a trie; `kind` names the kind of input."""
    # Children of each node: parent [-1, 0, 0, 2] -> [2, 0, 1, 0].
    num_children = np.bincount(trie.parent[trie.parent >= 0], minlength=trie.num_nodes)
    groups = trie.trajectories.select(["step", "group_id"]).group_by(["step", "group_id"])
    return {
        "kind": kind,
        **trie_totals(trie),
        "lengths": quantiles(trie.lengths),
        "group_sizes": quantiles(groups.aggregate([([], "count_all")])["count_all"].to_numpy()),
        "branching": quantiles(num_children[num_children > 1]),
        "por_by_depth": por_by_depth(trie),
    }


def quantiles(values: Int64) -> Report:
    """Return count, minimum, median, 90th percentile, maximum and mean of `values`; only the count if it is 0."""
    if len(values) == 0:
        return {"count": 0}
    series = pl.Series(values)
    return {
        "count": len(values),
        "min": int(values.min()),
        "median": series.median(),
        "p90": series.quantile(0.9, "higher"),
        "max": int(values.max()),
        "mean": series.mean(),
    }


def _depth_ranges(longest: int) -> list[tuple[int, int]]:
    """Return ranges [start, end) of depths up to `longest` tokens: (0, 256), (256, 512), (512, 1024), ..."""
    ranges, start, end = [], 0, FIRST_DEPTH
    while start < longest:
        ranges.append((start, end))
        start, end = end, 2 * end
    return ranges


def por_by_depth(trie: Trie) -> list[Report]:
    """Return `tokens_flat`, `tokens_tree` and POR of each range of depths."""
    lengths, depth, path = trie.lengths, trie.depth, trie.path_length
    report = []
    for start, end in _depth_ranges(int(lengths.max())):
        flat = int((np.clip(lengths, start, end) - start).sum())
        tree = int((np.clip(path, start, end) - np.clip(depth, start, end)).sum())
        report.append({"start": start, "end": end, "tokens_flat": flat, "tokens_tree": tree, "por": 1 - tree / flat})
    return report


def describe_rows(rows: Iterable[Row]) -> Report:
    """Return distributions over packed rows, read once: their sizes, lengths, branching, and ERR by depth."""
    tokens, pairs, members, lengths, branching = [], [], [], [], []
    flat, packed = np.zeros(0, np.int64), np.zeros(0, np.int64)  # tokens at each depth
    for row in rows:
        tokens.append(row.num_tokens)
        pairs.append(row.num_pairs)
        members.append(len(row.trajectory_ids))
        lengths.append(row.position_ids[row.trajectory_ends] + 1)
        num_children = np.bincount(row.parent[row.parent >= 0])
        branching.append(num_children[num_children > 1])
        size = max(len(flat), int(row.position_ids.max()) + 1)
        # Positions [0, 1, 2, 2] with scales [2, 2, 1, 1] -> 1, 1, 2 tokens in the row and 2, 2, 2 one by one.
        packed = _padded(packed, size) + np.bincount(row.position_ids, minlength=size)
        flat = _padded(flat, size) + np.bincount(row.position_ids, row.scale, size).astype(np.int64)
    by_depth = []
    for start, end in _depth_ranges(len(flat)):
        counts = {"tokens_flat": int(flat[start:end].sum()), "tokens_packed": int(packed[start:end].sum())}
        by_depth.append(
            {"start": start, "end": end, **counts, "err": 1 - counts["tokens_packed"] / counts["tokens_flat"]}
        )
    return {
        "row_tokens": quantiles(np.array(tokens)),
        "row_pairs": quantiles(np.array(pairs)),
        "row_trajectories": quantiles(np.array(members)),
        "lengths": quantiles(np.concatenate(lengths).astype(np.int64)),
        "branching": quantiles(np.concatenate(branching).astype(np.int64)),
        "err_by_depth": by_depth,
    }


def _padded(values: Int64, size: int) -> Int64:
    return np.pad(values, (0, size - len(values)))
