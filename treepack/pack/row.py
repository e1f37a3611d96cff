"""One training row: its columns and its counts.

    rollout a   7 8 1 2      input_ids     7  8  1  2  3  4
    rollout b   7 8 3 4      subtree_end   6  6  4  4  6  6     q sees k if k <= q < subtree_end[k]
                             parent       -1  0  1  2  1  4     token j is predicted from parent[j]

docs/format.md describes every column.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from treepack.pack.child_order import tile_counts
from treepack.trajectory import Float32, Float64, Int32


@dataclass(frozen=True, slots=True)
class RowTerms:
    """The (trajectory, trained token) pairs of a row: arrays with one entry per pair, or None if all are unknown.

    `token` and `trajectory` are indices into the row's tokens and trajectories. `trajectory_rewards` has one entry per
    trajectory. NaN is a value that one trajectory lacks and others have.
    """

    token: Int32
    trajectory: Int32
    weight: Float64
    advantage: Float64 | None
    sampling_logprob: Float32 | None
    old_logprob: Float32 | None
    ref_logprob: Float32 | None
    entropy: Float32 | None
    trajectory_rewards: Float64 | None
    temperature: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One training row; the fields are the columns of `schema.ROWS`, per-token ones of length `num_tokens`."""

    row_id: int
    step: int | None
    input_ids: Int32
    position_ids: Int32
    parent: Int32
    subtree_end: Int32
    scale: Int32
    loss_weight: Float64
    trajectory_ids: list[str]
    trajectory_groups: list[str]
    trajectory_ends: Int32
    terms: RowTerms | None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_pairs(self) -> int:
        return int(self.position_ids.sum(dtype=np.int64)) + self.num_tokens

    @property
    def total_weight(self) -> float:
        return float(self.loss_weight.sum())

    @property
    def tiles(self) -> tuple[int, int]:
        """Partial and full tiles of its attention mask; see `child_order`."""
        return tile_counts(self.subtree_end)


def row_counts(row: Row) -> dict[str, int]:
    """Return the numbers that a row adds to the counts of its directory."""
    tiles_partial, tiles_full = row.tiles
    return {
        "num_rows": 1,
        "num_trajectories": len(row.trajectory_ids),
        "num_pairs": row.num_pairs,
        "tokens_packed": row.num_tokens,
        "tokens_flat": int(row.scale.sum(dtype=np.int64)),
        "tiles_partial": tiles_partial,
        "tiles_full": tiles_full,
    }


def row_totals(counted: Counter[str], *, capacity: int) -> dict[str, float]:
    """Return summed `row_counts` with their ratios: token_ratio = N_pack / N_flat, err = 1 - token_ratio, and fill."""
    ratio = counted["tokens_packed"] / counted["tokens_flat"]
    fill = counted["tokens_packed"] / (counted["num_rows"] * capacity)
    return {**counted, "token_ratio": ratio, "err": 1 - ratio, "fill": fill}
