"""The terms of a row in the order of its pieces, so that the terms of a piece are slices of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from treepack.carry.row import CarriedRow, PieceRow
from treepack.data.batch import TermTensors, select_terms
from treepack.trajectory import Int64


@dataclass(frozen=True)
class PieceTargets:
    """Tokens of a row whose log-probabilities are computed, in the order of the pieces that predict them.

    Attributes:
        order: int64 [n], indices into the tokens as the caller has them; ascending by the number of the parent.
        parents: int64 [n], the number of each one's parent, see `pieces`; ascending.
        labels: int64 [n], the token ids, on the model's device.
        sources: int64 [n], the parents, on the CPU: pieces that wait for nothing follow each other without a gap.
    """

    order: Int64
    parents: Int64
    labels: Tensor
    sources: Tensor

    @classmethod
    def of(cls, row: CarriedRow, tokens: Tensor) -> PieceTargets:
        """Return the targets `tokens`, int64 [n], row indices without roots, in any order."""
        above = row.parent[tokens.cpu().numpy()]
        assert (above >= 0).all(), "a root has no token that predicts it"
        return cls._sorted(row, tokens, row.numbers[above])

    @classmethod
    def of_states(cls, row: CarriedRow) -> PieceTargets:
        """Return targets whose parents are all tokens of the row: for values of the states after them."""
        return cls._sorted(row, torch.arange(row.batch.num_tokens), row.numbers)

    @classmethod
    def _sorted(cls, row: CarriedRow, tokens: Tensor, parent: Int64) -> PieceTargets:
        # parents [0 2 0] -> order [0 2 1], sorted [0 0 2]
        order = np.argsort(parent, kind="stable")
        device = row.batch.input_ids.device
        places = torch.from_numpy(order).to(device)
        labels = row.batch.input_ids.index_select(0, tokens.to(device).index_select(0, places))
        sorted_parents = parent[order]
        return cls(order, sorted_parents, labels, torch.from_numpy(sorted_parents))

    def of_piece(self, piece: PieceRow) -> slice:
        """Return the places of the targets that a piece predicts."""
        return span(self.parents, piece)


@dataclass(frozen=True)
class SortedTerms:
    """The terms of a row, sorted by the piece that predicts their tokens.

    Attributes:
        terms: the terms; `index` is into the sorted targets.
        parents: int64 [N], ascending: the parent of each term's token.
    """

    terms: TermTensors
    parents: Int64

    @classmethod
    def of(cls, terms: TermTensors, targets: PieceTargets) -> SortedTerms:
        """Sort terms, on the model's device, for `targets` that were made of their tokens."""
        # order [2 0 1] of the targets -> rank [1 2 0]: the caller's token 0 is now number 1
        rank = np.empty_like(targets.order)
        rank[targets.order] = np.arange(len(rank))
        index = rank[terms.index.cpu().numpy()]
        parents = targets.parents[index]
        order = np.argsort(parents, kind="stable")
        places = torch.from_numpy(order).to(terms.index.device)
        # Scores are requested for the whole row, so the terms of a piece need no temperatures and no kept sets.
        own = replace(terms, temperature=None, kept_ids=None)
        chosen = select_terms(own, places, scored=torch.from_numpy(targets.order).to(terms.tokens.device))
        return cls(replace(chosen, index=torch.from_numpy(index[order]).to(terms.index)), parents[order])

    def of_piece(self, piece: PieceRow, targets: slice) -> TermTensors:
        """Return the terms of a piece, whose `index` is into the targets of the piece."""
        cut = select_terms(self.terms, span(self.parents, piece), scored=targets)
        return replace(cut, index=cut.index - targets.start)


def span(parents: Int64, piece: PieceRow) -> slice:
    """Return the places of the tokens of a piece in ascending `parents`, int64 [n]."""
    first, last = np.searchsorted(parents, [piece.begin, piece.end])
    return slice(int(first), int(last))
