"""The second stage of opening: the packed rows of a run, and the optimiser steps that they make.

packed, options, ranks --open_data--> RunData         damaged or unsuitable data is refused here
held-out rows --open_held_out--> RunData              one step that has all of them
options, RunData --choose_old_logprobs--> options     old log-probabilities: recorded, or those of the sampler
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from treepack.data.mixture import AnyDataset, open_packed
from treepack.errors import TreepackError
from treepack.objectives.check_loss import check_loss
from treepack.objectives.denominators import (
    TrajectoryTable,
    check_columns,
    has_whole_column,
    trainable_rows,
    trajectory_table,
)
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
    if table is not None and table.rollout is not None:
        notes += _notes_on_rollouts(table.rollout, schedule, options.rows_per_step)
    return RunData(dataset, table, rows, schedule, blocks, division, notes)


def _notes_on_rollouts(rollouts: Int64, schedule: list[OptimiserStep], rows_per_step: int) -> tuple[str, ...]:
    if len(np.unique(rollouts)) == len(rollouts):
        return ("no rollout became several trajectories, so each trajectory counts as a rollout",)
    if (largest := max(len(step.rows) for step in schedule)) <= rows_per_step:
        return ()
    return (
        f"rows that share a rollout are in one step, so the largest step has {largest:,} rows; pack with "
        "--method groups, which keeps each rollout in one row, for steps of --rows-per-step",
    )


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


def choose_old_logprobs(
    options: TrainOptions, data: RunData, held_out: RunData | None = None
) -> tuple[TrainOptions, RunData]:
    """Return options that name the old log-probabilities of a policy loss, and the data with a note if auto chose them.

    Auto is the sampler's if no others are recorded, and a later update of the same batch of rollouts would otherwise
    count as on-policy. A batch is a training step of the rows, or all rows if they have no steps.
    """
    objective = options.objective
    if objective.old_logprobs != "auto" or not objective.is_policy:
        return options, data
    datasets = [each.dataset for each in (data, held_out) if each is not None]
    num_batches = len({data.dataset.steps[step.rows[0]] for step in data.schedule})
    takes_sampler = (
        objective.has_ratio
        and not objective.corrects_sampler
        and num_batches < len(data.schedule)
        and not any("term_old_logprob" in each.term_columns for each in datasets)
        and all(has_whole_column(each, "term_sampling_logprob") for each in datasets)
    )
    if takes_sampler:
        note = (
            "several updates use one batch of rollouts, whose only log-probabilities are the sampler's: ratios are to "
            "them, as with --old-logprobs sampler; with --old-logprobs recorded every ratio is 1"
        )
        data = replace(data, notes=(*data.notes, note))
    chosen = replace(objective, old_logprobs="sampler" if takes_sampler else "recorded")
    return replace(options, objective=chosen), data


def _open_rows(packed: Packed, options: TrainOptions) -> tuple[AnyDataset, TrajectoryTable | None]:
    _log.info("opening %s", packed if isinstance(packed, str | Path) else ", ".join(map(str, packed)))
    objective = options.objective
    # A loss without terms reads loss weights of tokens.
    dataset = open_packed(packed, terms=objective.has_terms, routes=options.routes == "replay")
    check_columns(dataset, objective)
    check_loss(objective)
    return dataset, trajectory_table(dataset, objective) if objective.has_terms else None
