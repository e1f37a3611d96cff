"""The second stage of opening: the packed rows of a run, and the optimiser steps that they make.

packed, options, ranks --open_data--> RunData         damaged or unsuitable data is refused here
held-out rows --open_held_out--> RunData              one step that has all of them
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from treepack.data.mixture import AnyDataset, open_packed
from treepack.errors import TreepackError
from treepack.objectives.check_loss import check_loss
from treepack.objectives.denominators import TrajectoryTable, check_columns, trainable_rows, trajectory_table
from treepack.train.division import Division, choose_blocks, divide_rows
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.run import Packed
from treepack.train.schedule import OptimiserStep, plan_steps
from treepack.trajectory import Int64

_log = logging.getLogger("treepack")


@dataclass(frozen=True)
class RunData:
    """Rows and the steps that they make, as fields of `run.TrainingRun`.

    `rows` are the indices of the rows that contribute to the loss, and `blocks` is the number of blocks of the run.
    """

    dataset: AnyDataset
    table: TrajectoryTable | None
    rows: Int64
    schedule: list[OptimiserStep]
    blocks: int
    division: Division | None = None
    notes: tuple[str, ...] = ()

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that contributes to the loss."""
        return int(self.dataset.num_tokens[self.rows].max(initial=1))

    @property
    def largest_step(self) -> int:
        """Tokens of the largest step."""
        return max((int(self.dataset.num_tokens[step.rows].sum()) for step in self.schedule), default=0)


def open_data(packed: Packed, options: TrainOptions, ranks: Ranks) -> RunData:
    """Open packed rows, and plan the steps of a run.

    Raises:
        TreepackError: the data is damaged, lacks a column of the loss, or cannot make the steps of the options.
    """
    dataset, table = _open_rows(packed, options)
    rows = trainable_rows(dataset, table)
    blocks, notes = choose_blocks(dataset, rows, options, ranks)
    schedule = plan_steps(dataset, replace(options, blocks=blocks), table)
    division = divide_rows(dataset, rows, blocks, ranks)
    return RunData(dataset, table, rows, schedule, blocks, division, notes)


def open_held_out(packed: Packed, options: TrainOptions, ranks: Ranks, *, blocks: int) -> RunData:
    """Open rows to evaluate on; `blocks` is the number of blocks of the run.

    Raises:
        TreepackError: the data is damaged, or no row has weight.
    """
    dataset, table = _open_rows(packed, options)
    rows = trainable_rows(dataset, table)
    if not len(rows):
        raise TreepackError(f"{dataset.path}: no row has a trained token; there is nothing to evaluate on")
    # All held-out rows are one step, whatever training steps they have.
    division = divide_rows(dataset, np.asarray(rows), blocks, ranks, steps=[None] * len(dataset))
    return RunData(dataset, table, rows, [OptimiserStep(0, [int(row) for row in rows])], blocks, division)


def _open_rows(packed: Packed, options: TrainOptions) -> tuple[AnyDataset, TrajectoryTable | None]:
    _log.info("opening %s", packed if isinstance(packed, str | Path) else ", ".join(map(str, packed)))
    objective = options.objective
    # A loss without terms reads loss weights of tokens.
    dataset = open_packed(packed, terms=objective.has_terms, routes=options.routes == "replay")
    check_columns(dataset, objective)
    check_loss(objective)
    return dataset, trajectory_table(dataset, objective) if objective.has_terms else None
