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
        TreepackError: if no row has weight, or the shares of a mixture do not fit the directories.
    """
    trained = trainable_rows(dataset, table)
    if len(trained) == 0:
        raise TreepackError(f"{dataset.path}: no row has a trained token; nothing to train on")
    mixture = None if options.mix is None else _mixture(dataset, trained, options)
    schedule: list[OptimiserStep] = []
    epoch, size = 0, options.rows_per_step
    blocks, owners = options.blocks or 1, source_of_rows(dataset)
    while len(schedule) < options.steps if options.steps else epoch < options.epochs:
        if mixture is None:
            parts = epoch_order(dataset.steps, trained, seed=options.seed, epoch=epoch, blocks=blocks, owners=owners)
        else:  # an epoch has as many rows as the directories together
            parts = [np.fromiter(islice(mixture, len(trained)), np.int64)]
        for part in parts:
            # A part is one training step of the rollouts. size 2: [4, 0, 2] -> [4, 0], [2], and the next part starts
            # another optimiser step.
            order = part.tolist()
            schedule += [OptimiserStep(epoch, order[i : i + size]) for i in range(0, len(order), size)]
        epoch += 1
    return schedule[: options.steps]


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
    """Return the rate of `step`, from 0: linear warm-up to `lr`, then a cosine to `lr * min_lr_ratio` at the end."""
    # warmup_steps 2, min_lr_ratio 0 and 5 steps: lr * (0.5, 1, 1, 0.5, 0). Step 0 has no rate of 0, which would train
    # nothing.
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, num_steps - 1 - options.warmup_steps)
    ratio = options.min_lr_ratio
    return options.lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
