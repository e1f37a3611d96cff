"""What rows hold: tokens, score pairs and loss terms of all rows at once, straight from the trie.

For trajectories in the order of the trie, a row costs what each one does not share with the one before it in that row:

    row's trajectories   a b c d    a b x    a y         4 + (3 - 2) + (2 - 1) = 6 tokens
    shared with the one before      2        1

Two trajectories share the least `depth` of the nodes after the first one's end up to the second one's, at most the
first one's length: depth-first order passes through the child of the node where they part, and through none above it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treepack.columns import SpanView
from treepack.pack.plan.problem import path_pairs
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Tokens of the union of root-to-end paths, attention score pairs and loss terms of each row; int64 [num_rows]."""

    tokens: Int64
    pairs: Int64
    terms: Int64

    def take(self, rows: Int64) -> RowSizes:
        return RowSizes(self.tokens[rows], self.pairs[rows], self.terms[rows])


def row_sizes(trie: Trie, row_of: Int64, num_rows: int) -> RowSizes:
    """Sizes of the rows in which `row_of` int64 [num_trajectories] puts the trajectories; 0 for an empty row.

    O(n log n) for n nodes and trajectories, without a Python step per item.
    """
    order = np.argsort(row_of, kind="stable")
    shared = shared_with_previous(trie, row_of, order)
    lengths = trie.lengths[order]
    stops = np.searchsorted(row_of[order], np.arange(num_rows + 1))

    def per_row(values: Int64) -> Int64:
        sums: Int64 = np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
        return sums[stops[1:]] - sums[stops[:-1]]

    return RowSizes(
        per_row(lengths - shared),
        per_row(path_pairs(lengths) - path_pairs(shared)),
        per_row(trained_tokens(trie)[order]),
    )


def trained_tokens(trie: Trie) -> Int64:
    """Loss terms of each trajectory, int64 [num_trajectories]."""
    spans = SpanView.of(trie.trajectories)
    return spans.total(spans.sizes.astype(np.float64)).astype(np.int64)


def shared_with_previous(trie: Trie, row_of: Int64, order: Int64) -> Int64:
    """Tokens that each trajectory of `order` shares with the one before it in its row, 0 for the first of a row.

    `order` sorts the trajectories by row and then as the trie does.
    """
    ends, rows = trie.end_node[order].astype(np.int64), row_of[order]
    shared = np.zeros(len(order), np.int64)
    later = np.flatnonzero(rows[1:] == rows[:-1]) + 1
    before, after = ends[later - 1], ends[later]
    shared[later] = trie.path_length[before]
    apart = before < after
    least = range_minima(trie.depth, before[apart] + 1, after[apart] + 1)
    shared[later[apart]] = np.minimum(shared[later[apart]], least)
    return shared


def range_minima(values: Int64, start: Int64, stop: Int64) -> Int64:
    """The least of `values[start:stop]` for each pair, start < stop. O((values + pairs) log values), memory linear.

    A range of 2**k to 2**(k + 1) values is two overlapping windows of 2**k, whose minima double from level to level.
    """
    level = np.frexp(stop - start)[1] - 1
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max(initial=-1)) + 2))
    least = np.zeros(len(start), np.int64)
    width = 1
    for a, b in pairwise(bounds.tolist()):
        mine = by_level[a:b]
        least[mine] = np.minimum(values[start[mine]], values[stop[mine] - width])
        values = np.minimum(values[:-width], values[width:])
        width *= 2
    return least
