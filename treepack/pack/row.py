"""One training row: its columns and its counts.

    rollout a   7 8 1 2      input_ids     7  8  1  2  3  4
    rollout b   7 8 3 4      subtree_end   6  6  4  4  6  6     q sees k if k <= q < subtree_end[k]
                             parent       -1  0  1  2  1  4     token j is predicted from parent[j]

docs/format.md describes every column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.columns import BY_NAME, Axis, Column
from treepack.errors import TreepackError
from treepack.pack.child_order import tile_counts
from treepack.ragged import RaggedArray
from treepack.rl.rollout_parts import numbers_of_texts
from treepack.sequences import join_routes
from treepack.trajectory import Float32, Float64, Int32, Int64, Routes


@dataclass(frozen=True, slots=True)
class RowTerms:
    """The (trajectory, trained token) pairs of a row: arrays with one entry per pair, or None if all are unknown.

    `token` and `trajectory` are indices into the row's tokens and trajectories. The fields from `advantage` on are the
    columns of `treepack.columns`, in its order; `reward` and those after it have one entry per trajectory. `rollout` is
    the first trajectory of the row that belongs to the same rollout (-1 for a turn of several paths of a search tree),
    and `rollout_number` a number that the rollout has in other rows too; both are None if each trajectory is a rollout
    of its own. `trajectory_weight` is a factor of all term weights of a trajectory, None if every one is 1. NaN is a
    value that one trajectory lacks and others have, and so is an empty list.
    """

    token: Int32
    trajectory: Int32
    weight: Float64
    advantage: Float64 | None = None
    sampling_logprob: Float32 | None = None
    old_logprob: Float32 | None = None
    ref_logprob: Float32 | None = None
    entropy: Float32 | None = None
    temperature: Float32 | None = None
    returns: Float64 | None = None
    old_values: Float64 | None = None
    edge_factor: Float64 | None = None
    teacher_logprob: Float32 | None = None
    kept_ids: RaggedArray | None = None
    teacher_topk_ids: RaggedArray | None = None
    teacher_topk_logprobs: RaggedArray | None = None
    reward: Float64 | None = None
    rollout: Int32 | None = None
    trajectory_weight: Float64 | None = None
    rollout_number: Int64 | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One training row; the fields are the columns of `schema.ROWS`, per-token ones of length `num_tokens`.

    `routes` [num_tokens, layers, k] are the recorded experts of each token, None if the trie has none.
    """

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
    routes: Routes | None = None

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


def concatenate_rows(rows: Sequence[Row]) -> Row:
    """Return one row with the tokens, trajectories and terms of `rows`, at least one, of one training step.

    Trees of different rows stay apart, so the loss weights do not change. The row has the `row_id` of the first.
    """
    # Rows of 3 and 2 tokens, parents [-1, 0, 0] and [-1, 0] -> [-1, 0, 0, -1, 3]; ends [3, 2, 3], [2, 2] -> ..., 5, 5.
    first = rows[0]
    assert all(row.step == first.step for row in rows), "rows of several steps"
    starts = np.cumsum([0, *(row.num_tokens for row in rows[:-1])]).tolist()
    shifted = zip(rows, starts, strict=True)
    per_token = {name: np.concatenate([getattr(row, name) for row in rows]) for name in _PER_TOKEN}
    parents, ends, last = zip(
        *(
            (np.where(row.parent < 0, -1, row.parent + start), row.subtree_end + start, row.trajectory_ends + start)
            for row, start in shifted
        ),
        strict=True,
    )
    return Row(
        row_id=first.row_id,
        step=first.step,
        parent=np.concatenate(parents).astype(np.int32),
        subtree_end=np.concatenate(ends).astype(np.int32),
        trajectory_ids=[name for row in rows for name in row.trajectory_ids],
        trajectory_groups=[name for row in rows for name in row.trajectory_groups],
        trajectory_ends=np.concatenate(last).astype(np.int32),
        terms=_concatenate_terms(rows, starts),
        routes=join_routes([(row.routes, row.num_tokens) for row in rows]),
        **per_token,
    )


_PER_TOKEN = ("input_ids", "position_ids", "scale", "loss_weight")


def _concatenate_terms(rows: Sequence[Row], starts: list[int]) -> RowTerms | None:
    """Join the terms of rows that begin at `starts`; values that only some rows have are missing in the others."""
    all_terms = [row.terms for row in rows if row.terms is not None]
    if not all_terms:
        return None
    assert len(all_terms) == len(rows), "some rows have no terms"
    sizes, counts = [len(row.trajectory_ids) for row in rows], [len(terms.token) for terms in all_terms]
    owners = np.cumsum([0, *sizes[:-1]]).tolist()

    def join(column: Column) -> Any:
        parts = [getattr(terms, column.name) for terms in all_terms]
        if all(part is None for part in parts):
            return None
        lengths = sizes if column.axis is Axis.TRAJECTORY else counts
        return column.kind.join([column.kind.filled(part, n) for part, n in zip(parts, lengths, strict=True)])

    joined = {name: join(column) for name, column in BY_NAME.items() if not name.startswith("rollout")}
    if any(terms.rollout is not None for terms in all_terms):
        own = [rollout_places_of(row) for row in rows]
        # Rollouts [0, 0] and [0, 1] of rows with 2 trajectories each -> [0, 0, 2, 3]
        shifted = [np.where(each < 0, -1, each + owner) for each, owner in zip(own, owners, strict=True)]
        joined["rollout"] = np.concatenate(shifted).astype(np.int32)
        if all(terms.rollout is None or terms.rollout_number is not None for terms in all_terms):
            joined["rollout_number"] = np.concatenate([rollout_numbers_of(row) for row in rows])
    return RowTerms(
        token=np.concatenate([terms.token + start for terms, start in zip(all_terms, starts, strict=True)]).astype(
            np.int32
        ),
        trajectory=np.concatenate(
            [terms.trajectory + owner for terms, owner in zip(all_terms, owners, strict=True)]
        ).astype(np.int32),
        weight=np.concatenate([terms.weight for terms in all_terms]),
        **joined,
    )


def rollout_places_of(row: Row) -> Int32:
    """Return `rollout` of the terms of a row; without it, each trajectory is a rollout of its own."""
    assert row.terms is not None
    known = row.terms.rollout
    return np.arange(len(row.trajectory_ids), dtype=np.int32) if known is None else known


def rollout_numbers_of(row: Row) -> Int64:
    """Return `rollout_number` of the terms of a row; without `rollout`, each trajectory is a rollout of its own.

    Raises:
        TreepackError: an older treepack packed the row, without numbers.
    """
    assert row.terms is not None
    known = row.terms.rollout_number
    if known is None and row.terms.rollout is not None:
        raise TreepackError(
            f"row {row.row_id}: an older treepack packed it without rollout numbers; pack the trie again"
        )
    return numbers_of_texts(row.trajectory_ids) if known is None else known
