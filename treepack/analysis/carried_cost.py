"""Trunk tokens and operations of rows that run in pieces, as `train --carry N` runs them.

    Trie | plan | packed rows, sizes of pieces --trie_trunks, plan_trunks, TrunkCounter--> TrunkTokens of each size
    ModelShape, FlopCount --executed_in_rows, executed_in_pieces--> operations; recomputed ones count again

A token is trunk if more than N tokens, itself included, are in its subtree: `subtree_end[i] - i > N`. Keys and values
of the trunk of one path are carried from piece to piece. A trunk token runs forward twice, every other token once.

    N = 4    [0 1 2]-+-[3 4]       node [0 1 2] has 3 tokens and 5 below it, so subtrees of 8, 7 and 6 tokens: all trunk
                     '-[5 6 7]     the leaves have subtrees of at most 3 tokens: none

The subtree of the i-th token of a node has L + D - i tokens, for L tokens of the node and D tokens below it. So the
first `clip(L + D - N, 0, L)` tokens of a node are trunk, and no column of tokens is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treepack.costs.model_cost import FlopCount, ModelShape
from treepack.pack.plan.unions import shared_in_rows
from treepack.trajectory import Int64
from treepack.trie.nodes import NodeArrays, forest_of
from treepack.trie.shared_prefixes import shared_in_order
from treepack.trie.trie import Trie

if TYPE_CHECKING:
    from treepack.pack.row import Row

# Operations for each multiplication: 2 forward and 4 backward, and 2 for every further forward pass. The backward of
# attention computes five products of the size of a score matrix, and its forward two; its output is kept.
_FORWARD, _BACKWARD, _ATTENTION = 2, 4, 7


@dataclass(frozen=True, slots=True)
class TrunkTokens:
    """Trunk of rows in pieces of at most `piece` tokens: all its `tokens`, and the maximum on one path, `path`."""

    piece: int
    tokens: int
    path: int


def trie_trunks(nodes: Trie | NodeArrays, pieces: Sequence[int]) -> tuple[TrunkTokens, ...]:
    """Return the trunk of rows of whole trees for each size of a piece."""
    start, depth = nodes.node_start, nodes.depth
    lengths, below = np.diff(start), start[nodes.node_end] - start[1:]
    return tuple(_trunk(lengths, below, depth, piece) for piece in pieces)


def _trunk(lengths: Int64, below: Int64, depth: Int64, piece: int) -> TrunkTokens:
    """Return the trunk of nodes with `lengths` tokens after `depth` tokens, and `below` tokens below them."""
    # lengths [3, 2, 3], below [5, 0, 0], piece 4 -> trunk [clip(4, 0, 3), 0, 0] = [3, 0, 0]
    trunk = np.clip(lengths + below - piece, 0, lengths)
    # Subtrees shrink along a path, so the trunk of a path is the part above its deepest trunk token.
    path = np.where(trunk > 0, depth + trunk, 0)
    return TrunkTokens(piece, int(trunk.sum()), int(path.max(initial=0)))


def plan_trunks(trie: Trie, row_of: Int64, pieces: Sequence[int]) -> tuple[TrunkTokens, ...]:
    """Return the trunk of the rows of a plan for each size of a piece; trajectory i is in row `row_of[i]`.

    O(n log n) for n nodes and trajectories, with a Python step for each trajectory.
    """
    order = np.argsort(row_of, kind="stable")
    shared = shared_in_rows(shared_in_order(trie), row_of, order)
    # The trajectories of a row in the order of the trie are a trie of their own, and the first one shares nothing with
    # the row before: lengths [4, 5, 3] of one row and [4] of the next, shared [0, 4, 2] and [0] -> two trees.
    forest = forest_of(array("q", shared.tobytes()), array("q", trie.lengths[order].tobytes()))
    return trie_trunks(forest, pieces)


class TrunkCounter:
    """The number of packed rows, their trunk, longest path and largest row, counted while the rows are read."""

    def __init__(self, pieces: Sequence[int]) -> None:
        """Start without rows."""
        self.pieces = tuple(pieces)
        self.num_rows = self.row_tokens = self.longest = 0
        self._tokens, self._paths = [0] * len(self.pieces), [0] * len(self.pieces)

    def over(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield `rows` unchanged, and count each."""
        for row in rows:
            ends, depth = row.subtree_end.astype(np.int64), row.position_ids.astype(np.int64)
            below = ends - np.arange(len(ends)) - 1
            self.num_rows += 1
            self.row_tokens = max(self.row_tokens, len(ends))
            self.longest = max(self.longest, int(depth.max(initial=-1)) + 1)
            for i, piece in enumerate(self.pieces):
                # A token is a node of one token.
                trunk = _trunk(np.ones_like(ends), below, depth, piece)
                self._tokens[i] += trunk.tokens
                self._paths[i] = max(self._paths[i], trunk.path)
            yield row

    @property
    def trunks(self) -> tuple[TrunkTokens, ...]:
        """The trunk of all rows so far for each size of a piece."""
        return tuple(map(TrunkTokens, self.pieces, self._tokens, self._paths))


def executed_in_rows(shape: ModelShape, work: FlopCount, recomputed: float) -> float:
    """Return the operations of rows; the part `recomputed` of the layers, 0 to 1, runs forward again, but no attention.

    With all layers recomputed, and with W multiplications of a token and S of a score pair, 8 W for each token and 7 S
    for each pair.
    """
    linear = _FORWARD + _BACKWARD + _FORWARD * recomputed
    return linear * float(shape.per_token * work.tokens) + _attention_and_output(shape, work)


def executed_in_pieces(shape: ModelShape, work: FlopCount, trunk: TrunkTokens) -> float:
    """Return the operations of the same rows in pieces whose layers keep their activations.

    6 W for each token, 2 W more for each trunk token, and 7 S for each pair, because the outputs of attention over
    trunk are kept from its first forward pass to the second one.
    """
    linear = (_FORWARD + _BACKWARD) * work.tokens + _FORWARD * trunk.tokens
    return float(linear * shape.per_token) + _attention_and_output(shape, work)


def _attention_and_output(shape: ModelShape, work: FlopCount) -> float:
    # Logits are computed again in the backward pass, chunk by chunk, in rows and in pieces.
    output = (2 * _FORWARD + _BACKWARD) * shape.output * work.targets
    return _ATTENTION * float(shape.attention(work.tokens, work.pairs)) + float(output)
