"""Tokens, score pairs and loss terms of all rows at once, counted without making the rows.

Take the trajectories of a row in the order of the trie. Each one adds to the row the tokens that it does not share with
the trajectory before it in this row:

    trajectories of a row   a b c d    a b x    a y         4 + (3 - 2) + (2 - 1) = 6 tokens
    shared with the one before         2        1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treepack.pack.plan.problem import path_pairs
from treepack.trajectory import Int64
from treepack.trie.shared_prefixes import range_minima, shared_in_order

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
    shared = shared_in_rows(shared_in_order(trie), row_of, order)
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


def row_tokens(lengths: Int64, shared: Int64, row_of: Int64, num_rows: int) -> Int64:
    """Return the tokens of each row, int64 [num_rows], of sequences in the order of their trie.

    `lengths` int64 [n] are the tokens of each sequence, and `shared` int64 [n] its common tokens with the
    sequence before it.
    """
    order = np.argsort(row_of, kind="stable")
    new = lengths[order] - shared_in_rows(shared, row_of, order)
    return np.bincount(row_of[order], weights=new, minlength=num_rows).astype(np.int64)


def trained_tokens(trie: Trie) -> Int64:
    """Return the loss terms of each trajectory, int64 [num_trajectories]."""
    from treepack.sequences import SpanView  # with Arrow, which the rest of this file does not need

    spans = SpanView.of(trie.trajectories)
    return spans.total(spans.sizes.astype(np.float64)).astype(np.int64)


def shared_in_rows(shared: Int64, row_of: Int64, order: Int64) -> Int64:
    """Return the tokens that each sequence of `order` shares with the one before it in its row; 0 if it is the first.

    `shared` are the tokens that each sequence shares with the one before it in the trie. `order` sorts the sequences by
    row, and inside a row by the order of the trie.
    """
    rows, again = row_of[order], np.zeros(len(order), np.int64)
    # sorted rows [0, 0, 1, 1, 1] -> later [1, 3, 4]: the sequences that have one before them in their row
    later = np.flatnonzero(rows[1:] == rows[:-1]) + 1
    again[later] = range_minima(shared, order[later - 1] + 1, order[later] + 1)
    return again
