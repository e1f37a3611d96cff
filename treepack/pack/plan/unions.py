"""Tokens, score pairs and loss terms of all rows at once, counted directly in the trie.

Take the trajectories of a row in the order of the trie. Each one adds to the row the tokens that it does not share with
the trajectory before it in this row:

    trajectories of a row   a b c d    a b x    a y         4 + (3 - 2) + (2 - 1) = 6 tokens
    shared with the one before         2        1

The number of tokens that two trajectories share is the minimum `depth` of the nodes after the end of the first, up to
and including the end of the second; it is at most the length of the first. The reason: between these two ends, the
depth-first order enters the child of the node where the paths part, but no node above this child.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from treepack.pack.plan.problem import path_pairs
from treepack.trajectory import Int64

if TYPE_CHECKING:
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
    """Return the sizes of the rows of `row_of` int64 [num_trajectories]; an empty row has size 0.

    O(n log n) for n nodes and trajectories, without a Python step for each of them.
    """
    order = np.argsort(row_of, kind="stable")
    shared = shared_in_rows(trie, row_of, order)
    lengths = trie.lengths[order]
    # row_of [0, 1, 0] -> order [0, 2, 1], sorted rows [0, 0, 1] -> stops [0, 2, 3]: row 0 is order[0:2]
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
    """Return the loss terms of each trajectory, int64 [num_trajectories]."""
    from treepack.columns import SpanView  # with Arrow, which the rest of this file does not need

    spans = SpanView.of(trie.trajectories)
    return spans.total(spans.sizes.astype(np.float64)).astype(np.int64)


def shared_in_rows(trie: Trie, row_of: Int64, order: Int64) -> Int64:
    """Return the tokens that each trajectory of `order` shares with the one before it in its row; 0 if it is the first.

    `order` sorts the trajectories by row, and inside a row by the order of the trie.
    """
    ends, rows = trie.end_node[order].astype(np.int64), row_of[order]
    shared = np.zeros(len(order), np.int64)
    # sorted rows [0, 0, 1, 1, 1] -> later [1, 3, 4]: the places whose trajectory has one before it in its row
    later = np.flatnonzero(rows[1:] == rows[:-1]) + 1
    before, after = ends[later - 1], ends[later]
    shared[later] = trie.path_length[before]
    # If both end at the same node, they are equal and share the whole path; the range of nodes would be empty.
    apart = before < after
    minima = range_minima(trie.depth, before[apart] + 1, after[apart] + 1)
    shared[later[apart]] = np.minimum(shared[later[apart]], minima)
    return shared


def range_minima(values: Int64, start: Int64, stop: Int64) -> Int64:
    """Return the minimum of `values[start:stop]` for each pair, start < stop. O((values + pairs) log values).

    A range of at least 2**k and fewer than 2**(k + 1) values is the union of two overlapping windows of 2**k values.
    The window minima of one level give the minima of the next, so the memory is linear.
    """
    # k of each length: [1, 2, 3, 4, 5, 6, 7, 8] -> [0, 1, 1, 2, 2, 2, 2, 3]
    level = np.frexp(stop - start)[1] - 1
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max(initial=-1)) + 2))
    minima = np.zeros(len(start), np.int64)
    width = 1
    for a, b in pairwise(bounds.tolist()):
        mine = by_level[a:b]
        minima[mine] = np.minimum(values[start[mine]], values[stop[mine] - width])
        # values[i] is now the minimum of 2 * width: [5, 3, 8, 1, 9] -> [3, 3, 1, 1] -> [1, 1]
        values = np.minimum(values[:-width], values[width:])
        width *= 2
    return minima
