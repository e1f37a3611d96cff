"""Which rows each optimiser step takes, at which learning rate, and which rank computes which of them.

    dataset, options --plan_steps--> [OptimiserStep, ...]      known in full before the first row is loaded
    rows of a step, costs --deal--> a list of rows per rank    equally many micro-batches on every rank

    4 ranks, rows by cost      micro-batch 0   1   2
      9 9 8 7 | 5 5 4 4 | 2     rank 0     9   4   2      a micro-batch lasts as long as its dearest row, so rows of
                                rank 1     9   4   .      like cost run side by side: 9 + 5 + 2, the least there is;
                                rank 2     8   5   .      who had the least so far gets the dearest of the next
                                rank 3     7   5   .      . is a row of padding, for ranks meet in every layer

A run is a function of its options and data alone: resumed at step n, it goes on with the rows of step n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from treepack.data.dataset import PackedDataset
from treepack.data.epochs import epoch_order
from treepack.errors import TreepackError
from treepack.model.denominators import TrajectoryTable, trainable_rows
from treepack.train.options import TrainOptions
from treepack.trajectory import Float64


@dataclass(frozen=True)
class OptimiserStep:
    """Rows (indices into the dataset) whose gradients are summed for one update."""

    epoch: int
    rows: list[int]


def plan_steps(
    dataset: PackedDataset, options: TrainOptions, table: TrajectoryTable | None = None
) -> list[OptimiserStep]:
    """The rows of every optimiser step of the run; rows that give no loss are left out.

    Raises:
        TreepackError: if no row has weight.
    """
    trained = trainable_rows(dataset, table)
    if len(trained) == 0:
        raise TreepackError(f"{dataset.path}: no row has a trained token; nothing to train on")
    found: list[OptimiserStep] = []
    epoch, size = 0, options.rows_per_step
    while len(found) < options.steps if options.steps else epoch < options.epochs:
        for part in epoch_order(dataset.steps, trained, seed=options.seed, epoch=epoch):
            order = part.tolist()
            found += [OptimiserStep(epoch, order[i : i + size]) for i in range(0, len(order), size)]
        epoch += 1
    return found[: options.steps]


def learning_rate(options: TrainOptions, step: int, num_steps: int) -> float:
    """Linear warm-up to `lr`, then a cosine to `lr * min_lr_ratio` at the last step; `step` counts from 0."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, num_steps - 1 - options.warmup_steps)
    least = options.min_lr_ratio
    return options.lr * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def deal(rows: Sequence[int], costs: Float64, size: int) -> list[list[int | None]]:
    """The micro-batches of each of `size` ranks: one row each, None for a row of padding.

    Args:
        rows: of one optimiser step.
        costs: float64, of every row of the dataset, in any unit of time.
        size: number of ranks.

    Returns:
        as many entries for one rank as for another, the dearest row first: what does not fit in memory fails at once.
    """
    order = sorted(rows, key=lambda row: -costs[row])
    shares: list[list[int | None]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for start in range(0, len(order), size):
        ranks = sorted(range(size), key=loads.__getitem__)
        for rank, row in zip_longest(ranks, order[start : start + size]):
            shares[rank].append(row)
            loads[rank] += 0.0 if row is None else float(costs[row])
    return shares
