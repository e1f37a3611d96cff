"""A row of a batch in memory that is too long, cut into rows of fewer sequences.

    row of sequences a b c d --row_shares--> RowShare of a b, RowShare of c d
    values of each --values_of_shares--> values of the row       gradient of the row --RowShare.gradient--> of each

The new rows compute the prefixes again that they have in common. A token that several of them score has the same value
in each, so the first of them gives its value and gets its gradient, and the others get 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treepack.data.batch import Batch
from treepack.data.row_parts import RowPart, neighbours_within, restrict_row


@dataclass(frozen=True)
class RowShare:
    """A row with some sequences of a larger row: its value `chosen[k]` is the value `places[k]` of the larger row.

    `chosen` and `places` are int64 [m] on the device of the row; `count` is the number of its values.
    """

    row: Batch
    chosen: Tensor
    places: Tensor
    count: int

    def gradient(self, of_row: Tensor) -> Tensor:
        """Return the gradient of the own values, from the gradient of the larger row's values."""
        return of_row.new_zeros(self.count).index_copy(0, self.chosen, of_row.index_select(0, self.places))


def whole_row(row: Batch) -> RowShare:
    """Return the share that is the row itself."""
    assert row.terms is not None
    places = torch.arange(len(row.terms.tokens), device=row.terms.tokens.device)
    return RowShare(row, places, places, len(places))


def row_shares(row: Batch, limit: int) -> list[RowShare]:
    """Return rows of at most `limit` tokens, each with at least one sequence; one row if nothing can be cut."""
    if row.num_tokens <= limit:
        return [whole_row(row)]
    device, row = row.input_ids.device, row.to("cpu")
    terms = row.terms
    assert terms is not None
    owner, index = terms.trajectory.numpy(), terms.index.numpy()
    taken = np.zeros(len(terms.tokens), bool)
    shares = []
    for group in neighbours_within(row, limit):
        # A restricted row has the entries of its terms, ascending: index [4 2 4] of its terms -> values 2 and 4.
        places = np.unique(index[np.isin(owner, group)])
        chosen = np.flatnonzero(~taken[places])
        taken[places] = True
        own = restrict_row(row, RowPart(tuple(sorted(group)), 0, row.num_tokens)).to(device)
        here, there = (torch.from_numpy(each).long().to(device) for each in (chosen, places[chosen]))
        shares.append(RowShare(own, here, there, len(places)))
    return shares


def values_of_shares(shares: Sequence[RowShare], values: Sequence[Tensor]) -> Tensor:
    """Return the values of a row from the values of all its shares; differentiable."""
    if len(shares) == 1:
        return values[0]
    joined = torch.cat([each.index_select(0, share.chosen) for share, each in zip(shares, values, strict=True)])
    return torch.zeros_like(joined).index_copy(0, torch.cat([share.places for share in shares]), joined)
