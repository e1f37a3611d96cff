"""One training row: its columns and its counts.

    rollout a   7 8 1 2      input_ids     7  8  1  2  3  4
    rollout b   7 8 3 4      subtree_end   6  6  4  4  6  6     q sees k if k <= q < subtree_end[k]
                             parent       -1  0  1  2  1  4     token j is predicted from parent[j]

docs/format.md describes every column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from treepack.pack.child_order import tile_counts
from treepack.ragged import RaggedArray, join_lists
from treepack.sequences import join_routes
from treepack.trajectory import Float32, Float64, Int32, Routes


@dataclass(frozen=True, slots=True)
class RowTerms:
    """The (trajectory, trained token) pairs of a row: arrays with one entry per pair, or None if all are unknown.

    `token` and `trajectory` are indices into the row's tokens and trajectories. `trajectory_rewards`,
    `trajectory_rollouts` and `trajectory_weights` have one entry per trajectory: its reward; the first trajectory of
    the row that belongs to the same rollout (-1 for a turn of several paths of a search tree; None if each is a rollout
    of its own); and its weight, a factor of all of its term weights (None if every weight is 1). NaN is a value that
    one trajectory lacks and others have, and so is an empty list of `kept_ids` (`trajectory.Tokens`).
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
    returns: Float64 | None = None
    old_values: Float64 | None = None
    edge_factor: Float64 | None = None
    kept_ids: RaggedArray | None = None
    trajectory_rollouts: Int32 | None = None
    trajectory_weights: Float64 | None = None
    teacher_logprob: Float32 | None = None
    teacher_topk_ids: RaggedArray | None = None
    teacher_topk_logprobs: RaggedArray | None = None


PER_TRAJECTORY = ("trajectory_rewards", "trajectory_rollouts", "trajectory_weights")
"""Fields of `RowTerms` with one entry per trajectory."""


def term_field(column: str) -> str:
    """Return the field of `RowTerms` for a column of `schema.TERMS`."""
    # "return" is a word of Python.
    plural = {"term_return": "returns", "term_old_value": "old_values"}
    return plural.get(column, column.removeprefix("term_"))


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
    """Join the terms of rows that begin at `starts`; values that only some rows have are NaN in the others."""
    all_terms = [row.terms for row in rows if row.terms is not None]
    if not all_terms:
        return None
    assert len(all_terms) == len(rows), "some rows have no terms"
    sizes = [len(row.trajectory_ids) for row in rows]
    owners = np.cumsum([0, *sizes[:-1]]).tolist()

    def join(name: str) -> Any:
        parts = [getattr(terms, name) for terms in all_terms]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        counts = sizes if name in PER_TRAJECTORY else [len(terms.token) for terms in all_terms]
        if isinstance(known[0], RaggedArray):
            empty = (RaggedArray.empty(count, known[0].values.dtype) for count in counts)
            return join_lists([none if lists is None else lists for lists, none in zip(parts, empty, strict=True)])
        value = 1.0 if name == "trajectory_weights" else np.nan  # it is only missing if every weight is 1
        missing = (np.full(count, value, known[0].dtype) for count in counts)
        return np.concatenate([nan if part is None else part for part, nan in zip(parts, missing, strict=True)])

    indices = ("token", "trajectory", "trajectory_rollouts")
    others = [field.name for field in fields(RowTerms) if field.name not in indices]
    rollouts = None
    if any(terms.trajectory_rollouts is not None for terms in all_terms):
        own = (
            np.arange(size) if terms.trajectory_rollouts is None else terms.trajectory_rollouts
            for terms, size in zip(all_terms, sizes, strict=True)
        )
        # Rollouts [0, 0] and [0, 1] of rows with 2 trajectories each -> [0, 0, 2, 3]
        shifted_rollouts = [np.where(each < 0, -1, each + owner) for each, owner in zip(own, owners, strict=True)]
        rollouts = np.concatenate(shifted_rollouts).astype(np.int32)
    return RowTerms(
        trajectory_rollouts=rollouts,
        token=np.concatenate([terms.token + start for terms, start in zip(all_terms, starts, strict=True)]).astype(
            np.int32
        ),
        trajectory=np.concatenate(
            [terms.trajectory + owner for terms, owner in zip(all_terms, owners, strict=True)]
        ).astype(np.int32),
        **{name: join(name) for name in others},
    )
