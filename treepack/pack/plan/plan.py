"""The plan, which gives each trajectory its row, and the totals of its rows.

`planning.py` makes plans, `check.py` checks them and counts their totals, `files.py` reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.problem import RowLimits
from treepack.trajectory import Int64


@dataclass(frozen=True, slots=True)
class Plan:
    """`row_of` int64 [num_trajectories]: the row of each trajectory. Rows are numbered from 0 without a gap.

    No plan with the same capacity has fewer tokens than `lower_bound`. The number of rows of every training step is a
    multiple of `multiple_of`. `tree_bounds` int64 [num_trees] are the lower bounds for the trees; their sum is
    `lower_bound`, unless the plan comes from a file. A token counted as `token_pairs` score pairs when rows were made
    even; a plan from a file does not have this number.
    """

    method: str
    limits: RowLimits
    row_of: Int64
    lower_bound: int = 0
    multiple_of: int = 1
    tree_bounds: Int64 | None = None
    token_pairs: int = 0

    @property
    def capacity(self) -> int:
        return self.limits.capacity

    @property
    def num_rows(self) -> int:
        return int(self.row_of.max(initial=-1)) + 1

    def members(self) -> list[Int64]:
        """Return the trajectories of each row, ascending."""
        # row_of [1, 0, 1, 0] -> order [1, 3, 0, 2], cut after the 2 of row 0 -> [1, 3], [0, 2]
        order = np.argsort(self.row_of, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.row_of, minlength=self.num_rows))[:-1])


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """Tokens, attention score pairs and loss terms of each row of a valid plan; int64 [num_rows] each."""

    row_tokens: Int64
    row_pairs: Int64
    row_terms: Int64

    @property
    def num_rows(self) -> int:
        return len(self.row_tokens)

    @property
    def tokens_packed(self) -> int:
        return int(self.row_tokens.sum())
