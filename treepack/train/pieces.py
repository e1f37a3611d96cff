"""Rows of a training run that are longer than `TrainOptions.carry` and so run in pieces (`carry`).

rows of a step --has_long_rows--> True if any row of it is longer than a piece; all ranks get the same answer
batch --runs_in_pieces--> True if the row is longer than a piece; shorter rows run as without --carry
backward_in_pieces, value_in_pieces    a row's part of a step's loss, with and without gradients
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treepack.carry.backward import CarryOptions, RowResult, backward_row, row_value
from treepack.data.batch import Batch
from treepack.model.objectives.term_objective import PassLoss

if TYPE_CHECKING:
    from treepack.train.run import TrainingRun


def has_long_rows(run: TrainingRun, rows: list[int]) -> bool:
    """Return True if any of `rows`, on whichever rank, is longer than a piece of the run."""
    return _is_longer(run, int(run.dataset.num_tokens[rows].max()))


def runs_in_pieces(run: TrainingRun, batch: Batch) -> bool:
    """Return True if the row is longer than a piece of the run."""
    return _is_longer(run, batch.num_tokens)


def _is_longer(run: TrainingRun, num_tokens: int) -> bool:
    limit = run.options.carry
    assert limit != "auto", "open_run chooses a number"
    return limit is not None and num_tokens > int(limit)


def backward_in_pieces(run: TrainingRun, batch: Batch, denominator: float, factors: Tensor | None) -> RowResult:
    """Add the gradients of a row's part of a step's loss; arguments as in `step.pass_part`."""
    return backward_row(run.loaded, batch, carry_options(run), **_loss(run, denominator, factors))


def value_in_pieces(run: TrainingRun, batch: Batch, denominator: float, factors: Tensor | None) -> PassLoss:
    """Return a row's part of a step's loss, without gradients; arguments as in `step.pass_part`."""
    loss, sums = row_value(run.loaded, batch, carry_options(run), **_loss(run, denominator, factors))
    return PassLoss(loss, loss[None], sums)


def _loss(run: TrainingRun, denominator: float, factors: Tensor | None) -> dict[str, Any]:
    return {"objective": run.options.objective, "factors": factors, "denominator": denominator}


def carry_options(run: TrainingRun) -> CarryOptions:
    """Return how a row of the run runs in pieces."""
    # A context for each pass and none around them: autocast keeps a weight that it has cast until the outermost context
    # ends. The cast of a push has no graph, and a later pass that took it would give the weight no gradient.
    autocast = functools.partial(lower_precision, run)
    limit = int(run.options.carry or 0)
    return CarryOptions(limit, chunk=run.options.loss_chunk, memory=run.carry_memory, autocast=autocast)


def lower_precision(run: TrainingRun) -> torch.autocast:
    """Return the autocast context of one forward pass."""
    return torch.autocast(run.loaded.device.type, torch.bfloat16, enabled=run.options.dtype == "bf16")
