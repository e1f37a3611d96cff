"""The factors of an optimiser step whose rows are in memory, for loops that write no packed directory.

    rows of plan_packing, Objective --row_factors--> f of every trajectory of each row --LossPart--> loss

`denominators` has the same for the rows of a packed directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treepack.columns import BY_PACKED
from treepack.errors import TreepackError
from treepack.objectives.denominators import TrajectoryTable, step_factors, with_rollouts
from treepack.objectives.needed_columns import optional_columns
from treepack.objectives.objective import Objective
from treepack.pack.row import Row, rollout_numbers_of
from treepack.trajectory import Float64


def row_factors(rows: Sequence[Row], objective: Objective) -> list[Tensor]:
    """Return the factors f of an optimiser step of `rows`, one float64 [trajectories of the row] for each row.

    They are the `factors` of `LossPart`, `objective_loss` and `backward_row`, and divide by the denominator of the
    whole step: give all rows of the step, in any order. Trajectories without weight are ignored.

    Args:
        rows: from `plan_packing` or `pack_rows`, with `normalize` "token"; a group is a name in a training step.
        objective: over terms or values. The denominator of sft is a sum of weights, and dpo compares pairs.

    Raises:
        TreepackError: another loss, a column of the objective that a trajectory lacks, or a rollout that
            `with_rollouts` refuses.
    """
    if not objective.has_terms or objective.has_pairs:
        raise TreepackError(
            f"row_factors: the loss {objective.loss} has no factors of trajectories; choose a policy loss, or write "
            "the rows with write_packed and open them with PackedDataset"
        )
    weights = [_trajectory_weights(row, objective) for row in rows]
    # Groups of several rows in the order of the rows: "x" "y" | "x" -> 0 1 0.
    names = [(row.step, name) for row in rows for name in row.trajectory_groups]
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    table = TrajectoryTable(
        first=np.array([*accumulate((len(each) for each in weights), initial=0)], np.int64),
        group=np.array([codes[name] for name in names], np.int64),
        weight=np.concatenate([*weights, np.zeros(0)]),
        own=np.concatenate([*map(_own_weights, rows), np.zeros(0)]),
        pairs=None,
    )
    if objective.is_by_rollout:
        numbers = np.concatenate([*map(rollout_numbers_of, rows), np.zeros(0, np.int64)])
        row_ids = np.array([row.row_id for row in rows], np.int64)
        table = with_rollouts(table, numbers, np.zeros_like(numbers), (row_ids, "row_factors: "), objective)
    return [torch.from_numpy(factors) for factors in step_factors(table, list(range(len(rows))), objective)]


def _own_weights(row: Row) -> Float64:
    """Return the weight of each trajectory, float64 [trajectories of the row]."""
    assert row.terms is not None
    known = row.terms.trajectory_weight
    return np.ones(len(row.trajectory_groups)) if known is None else known


def _trajectory_weights(row: Row, objective: Objective) -> Float64:
    """Return the sum of the weights of each trajectory's terms, float64 [trajectories of the row].

    Raises:
        TreepackError: naming the column of the objective that the row lacks.
    """
    optional = [name for name in optional_columns(objective) if _column(row, name) is not None]
    for column in (*objective.columns, *optional):
        values = _column(row, column)
        if values is None or BY_PACKED[column].kind.is_missing(values).any():
            raise TreepackError(
                f"row_factors: row {row.row_id} has no {column} for some trajectories, which the loss {objective.name} "
                "needs; give every trajectory a value, or leave it out of the trie"
            )
    assert row.terms is not None
    factor = objective.weighing.column
    weight = row.terms.weight if factor is None else row.terms.weight * _column(row, factor)
    sums = np.bincount(row.terms.trajectory, weight, len(row.trajectory_groups))
    return sums.astype(np.float64, copy=False)


def _column(row: Row, column: str) -> Any:
    """Return a column of `schema.TERMS`; None if the row does not have it."""
    return None if row.terms is None else getattr(row.terms, BY_PACKED[column].name)
