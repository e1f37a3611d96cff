"""The schedule of a run: the rows of every optimiser step, and its learning rate.

    dataset, options --plan_steps--> [OptimiserStep, ...]      known in full before the first row is loaded

`passes` joins the rows of a step and deals them to the ranks.

A run is a function of its options and data alone: resumed at step n, it continues with the rows of step n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from treepack.data.epochs import block_of_rows, epoch_order
from treepack.data.mixture import AnyDataset, mixed_blocks, mixed_rows, source_of_rows, sources_of
from treepack.errors import TreepackError
from treepack.objectives.denominators import TrajectoryTable, trainable_rows
from treepack.train.input_checks import check_mix, check_shared_rows
from treepack.train.options import TrainOptions
from treepack.trajectory import Int64


@dataclass(frozen=True)
class OptimiserStep:
    """Rows (indices into the dataset) whose gradients are summed for one update."""

    epoch: int
    rows: list[int]


def plan_steps(dataset: AnyDataset, options: TrainOptions, table: TrajectoryTable | None = None) -> list[OptimiserStep]:
    """Plan the rows of every optimiser step of the run; rows that do not contribute to the loss are left out.

    Raises:
        TreepackError: if no row has weight, the shares of a mixture do not fit the directories, or the trajectories of
            a rollout that is one unit of the loss cannot be in one step.
    """
    trained = trainable_rows(dataset, table)
    if len(trained) == 0:
        raise TreepackError(f"{dataset.path}: no row has a trained token; nothing to train on")
    mixture = None if options.mix is None else _mixture(dataset, trained, options)
    together = _rows_together(dataset, table, is_mixed=mixture is not None)
    schedule: list[OptimiserStep] = []
    epoch, size = 0, options.rows_per_step
    blocks, owners = options.blocks or 1, source_of_rows(dataset)
    while len(schedule) < options.steps if options.steps else epoch < options.epochs:
        if mixture is None:
            parts = epoch_order(dataset.steps, trained, seed=options.seed, epoch=epoch, blocks=blocks, owners=owners)
        else:  # an epoch has as many rows as the directories together
            parts = [np.fromiter(islice(mixture, len(trained)), np.int64)]
        for part in parts:
            # A part is one training step of the rollouts, and the next one starts another optimiser step.
            schedule += [OptimiserStep(epoch, rows) for rows in _cut(part.tolist(), size, together)]
        epoch += 1
    return schedule[: options.steps]


def _rows_together(dataset: AnyDataset, table: TrajectoryTable | None, *, is_mixed: bool) -> dict[int, int]:
    """Return, for each row that shares a rollout with others, the first of all rows that one step must have with it.

    Raises:
        TreepackError: these rows belong to different training steps, or a mixture takes rows one by one.
    """
    first: dict[int, int] = {}
    if table is None or table.rollout is None:
        return first

    def find(row: int) -> int:
        while first.get(row, row) != row:
            row = first[row]
        return row

    known = table.weight > 0
    pairs = np.unique(np.stack([table.rollout[known], table.row[known]]), axis=1)
    # Rollouts [0 0 1 1] of rows [4 7 2 7]: 4 and 7 are together, and 2 joins them.
    for place in np.flatnonzero(np.diff(pairs[0]) == 0).tolist():
        one, other = int(pairs[1, place]), int(pairs[1, place + 1])
        if is_mixed or dataset.steps[one] != dataset.steps[other]:
            ids = (dataset.row_ids[one], dataset.row_ids[other])
            reason = "--mix takes rows one by one" if is_mixed else "their training steps differ"
            raise TreepackError(
                f"{dataset.path}: rows {ids[0]} and {ids[1]} have trajectories of one rollout, which the denominator "
                f"rollout needs in one step, but {reason}; choose the denominator trajectory"
            )
        low, high = sorted((find(one), find(other)))
        first[low], first[high] = low, low
    return {row: find(row) for row in first}


def _cut(order: list[int], size: int, together: dict[int, int]) -> list[list[int]]:
    """Cut the rows of a part into steps of at most `size` rows; rows that are `together` are in one step."""
    # size 2: [4, 0, 2] -> [4, 0], [2]; with 4 and 2 together [4, 2], [0]. More than 2 rows together are a step.
    blocks: list[list[int]] = []
    joined: dict[int, list[int]] = {}
    for row in order:
        first = together.get(row)
        if first is None or first not in joined:
            blocks.append([])
        own = blocks[-1] if first is None else joined.setdefault(first, blocks[-1])
        own.append(row)
    steps: list[list[int]] = []
    for rows in blocks:
        if steps and len(steps[-1]) + len(rows) <= size:
            steps[-1] += rows
        else:
            steps.append([*rows])
    return steps


def _mixture(dataset: AnyDataset, trained: Int64, options: TrainOptions) -> Iterator[int]:
    """Return the rows of a run that takes its directories in shares.

    Raises:
        TreepackError: if the shares do not fit the directories.
    """
    sources = sources_of(dataset)
    assert options.mix is not None
    check_mix(options.mix, len(sources))
    check_shared_rows(dataset.path, has_steps=any(step is not None for step in dataset.steps))
    owner = source_of_rows(dataset)[trained]
    rows = [trained[owner == place] for place in range(len(sources))]
    for source, each in zip(sources, rows, strict=True):
        if len(each) == 0:
            raise TreepackError(f"{source.path}: no row has a trained token; leave this directory out")
    blocks = options.blocks or 1
    if blocks == 1:
        return mixed_rows(rows, options.mix, seed=options.seed)
    block_of = block_of_rows(dataset.steps, trained, blocks=blocks, owners=source_of_rows(dataset))
    return mixed_blocks(
        [[each[block_of[each] == block] for block in range(blocks)] for each in rows], options.mix, seed=options.seed
    )


def learning_rate(options: TrainOptions, step: int, num_steps: int) -> float:
    """Return the rate of `step`, from 0: linear warm-up to `lr`, then the schedule to `lr * min_lr_ratio` at the end.

    wsd (warm-up, stable, decay) is of MiniCPM (arXiv 2404.06395, section 4).
    """
    # warmup_steps 2, min_lr_ratio 0 and 5 steps: lr * (0.5, 1, 1, 0.5, 0). Step 0 has no rate of 0, which would train
    # nothing.
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = min((step - options.warmup_steps) / max(1, num_steps - 1 - options.warmup_steps), 1.0)
    above = {  # the part of the rate above the last one that is left
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": min(1.0, 10 * (1 - progress)),
    }[options.schedule]
    return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * above)
