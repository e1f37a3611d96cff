"""Rows of an optimiser step joined into passes, and the passes of each rank.

    rows of a step --plan_passes--> passes, tuples of rows that the model computes together (`data.joined`)
    rows of a step --deal--> for each rank its passes; () is a pass of padding

A pass costs the processor as much time as any other, however few tokens it has, so short rows are joined up to `limit`
tokens. A row of more tokens becomes a pass by itself. Losses and metrics are still computed row by row. All ranks run
the same number of passes, because they communicate in every layer. The passes have about equal costs:

    limit 10, rows of 6 4 4 3 3 2 tokens      1 rank: (6 4) (4 3 3) (2)  -> balanced (6 2) (4 3) (4 3)
                                              2 ranks: 4 passes instead of 3, so that no rank runs padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np

from treepack.train.division import Division
from treepack.trajectory import Float64, Int64

Pass: TypeAlias = tuple[int, ...]  # rows, indices into the dataset


@dataclass(frozen=True)
class Joining:
    """Rows that may be joined: their tokens, int64 [num_rows], and their kind; only rows of one kind are joined."""

    limit: int
    tokens: Int64
    kinds: Int64


def plan_passes(rows: Sequence[int], costs: Float64, joining: Joining, *, ranks: int = 1) -> list[Pass]:
    """Join rows into passes, whose number is a multiple of `ranks` if there are enough rows.

    Args:
        rows: indices into the dataset; one may occur several times.
        costs: float64, of every row of the dataset, in any unit of time.
        joining: sizes and limit.
        ranks: number of ranks that share the rows.
    """
    order = np.array(sorted(rows, key=lambda row: -costs[row]), np.int64)
    groups = [order[joining.kinds[order] == kind] for kind in np.unique(joining.kinds[order])]
    # Without costs each row, the longest first, joins the first pass that has room, so few passes are enough.
    free = np.zeros_like(costs)
    first = [
        _join(group[np.argsort(-joining.tokens[group], kind="stable")], free, joining, len(group)) for group in groups
    ]
    extra = -sum(map(len, first)) % ranks
    passes: list[Pass] = []
    for group, fitted in zip(groups, first, strict=True):
        more = min(extra, len(group) - len(fitted))
        extra -= more
        passes += _join(group, costs, joining, len(fitted) + more) or fitted
    return passes


def _join(rows: Int64, costs: Float64, joining: Joining, count: int) -> list[Pass]:
    """Return at most `count` passes of about equal cost, none if the rows do not fit in this way.

    Each row, in the order given, joins the cheapest pass that has room, and of several the first one.
    """
    passes: list[list[int]] = [[] for _ in range(count)]
    loads, room = np.zeros(count), np.full(count, joining.limit, np.int64)
    is_empty = np.ones(count, bool)
    for row in rows.tolist():
        size = int(joining.tokens[row])
        fits = (room >= size) | is_empty  # an empty pass takes any row
        if not fits.any():
            return []
        place = int(np.argmin(np.where(fits, loads, np.inf)))
        passes[place].append(row)
        loads[place] += costs[row]
        room[place] -= size
        is_empty[place] = False
    return [tuple(each) for each in passes if each]


def deal(
    rows: Sequence[int], costs: Float64, size: int, joining: Joining, division: Division | None = None
) -> list[list[Pass]]:
    """Deal the rows of an optimiser step to `size` ranks: the passes of each rank, () for a pass of padding.

    4 ranks, passes by cost      pass 0   1   2
      9 9 8 7 | 5 5 4 4 | 2     rank 0  9   4   .      A pass takes as long as its most expensive rank, so passes of
                                rank 1  9   4   .      similar cost run side by side: 9 + 5 + 2, the minimum. The rank
                                rank 2  8   5   .      with the smallest sum so far gets the most expensive of the next
                                rank 3  7   5   2      passes. A "." is padding, because ranks meet in every layer.

    If the machines have blocks of their own (`division`), the rows are divided among the machines first, and then dealt
    in this way on each of them.

    Args:
        rows: indices into the dataset, in any order.
        costs: float64, of every row of the dataset, in any unit of time.
        size: number of ranks.
        joining: sizes and limit.
        division: the machines of the rows; None if every rank may take every row.

    Returns:
        one list per rank, all of the same length, most expensive pass first: a pass too long for memory fails at once.
    """
    if division is not None:
        # 5 rows on 2 machines of 2 ranks: 2 passes of one row for each rank, so each machine has room for 4 rows.
        local = size // division.machines
        own = division.divide(rows, -(-len(rows) // size) * local)
        dealt = [share for each in own for share in deal(each, costs, local, joining)]
        most = max(map(len, dealt))
        return [share + [()] * (most - len(share)) for share in dealt]
    passes = plan_passes(rows, costs, joining, ranks=size)
    prices = [float(costs[list(each)].sum()) for each in passes]
    order = sorted(range(len(passes)), key=lambda place: -prices[place])
    # Passes 0 to 4 of costs [4, 9, 5, 2, 7] on 2 ranks: order [1, 4, 2, 0, 3] -> shares [1, 0, ()], [4, 2, 3].
    shares: list[list[Pass]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for start in range(0, len(order), size):
        ranks = sorted(range(size), key=loads.__getitem__)
        for rank, place in zip_longest(ranks, order[start : start + size]):
            shares[rank].append(() if place is None else passes[place])
            loads[rank] += 0.0 if place is None else prices[place]
    return shares
