"""A plan: the row of each trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.problem import Limits
from treepack.trajectory import Int64


@dataclass(frozen=True, slots=True)
class Plan:
    """`row_of` int64 [num_trajectories]: the row of each trajectory, rows numbered from 0 without a gap.

    No plan within the same capacity has fewer tokens than `lower_bound`. Every step has a multiple of `multiple_of`
    rows.
    """

    method: str
    limits: Limits
    row_of: Int64
    lower_bound: int = 0
    multiple_of: int = 1

    @property
    def capacity(self) -> int:
        return self.limits.capacity

    @property
    def num_rows(self) -> int:
        return int(self.row_of.max(initial=-1)) + 1

    def members(self) -> list[Int64]:
        """Trajectories of each row, ascending."""
        order = np.argsort(self.row_of, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.row_of, minlength=self.num_rows))[:-1])


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What a valid plan costs: tokens, attention score pairs and loss terms of each row, int64 [num_rows]."""

    row_tokens: Int64
    row_pairs: Int64
    row_terms: Int64

    @property
    def num_rows(self) -> int:
        return len(self.row_tokens)

    @property
    def tokens_packed(self) -> int:
        return int(self.row_tokens.sum())
