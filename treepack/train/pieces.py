"""Rows of a training run that are longer than `TrainOptions.carry` and so run in pieces (`carry`).

options --choose_piece_size--> options with a number in place of "auto"
rows of a step --has_long_rows--> whether a step has rows for pieces; all ranks get the same answer
batch --runs_in_pieces--> whether a row is longer than a piece; shorter rows run as without --carry
backward_in_pieces, value_in_pieces    a row's part of a step's loss, with and without gradients
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treepack.carry.backward import CarryOptions, RowResult, backward_row, row_value
from treepack.carry.refusal import check_carry
from treepack.carry.routes import follow_routers
from treepack.data.batch import Batch
from treepack.model.loaded import LoadedModel
from treepack.train.options import TrainOptions

if TYPE_CHECKING:
    from treepack.train.run import TrainingRun

# On the CPU, where "auto" has no GPU memory to measure.
CPU_PIECE = 8192


def choose_piece_size(options: TrainOptions, loaded: LoadedModel) -> TrainOptions:
    """Return the options of a run with the tokens of a piece as a number.

    Raises:
        TreepackError: the model cannot run rows in pieces.
    """
    if options.carry is None:
        return options
    check_carry(loaded)
    # Now, not at the first long row: a resumed run must compile the same graphs.
    follow_routers(loaded.causal)
    return replace(options, carry=CPU_PIECE) if options.carry == "auto" else options


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
    """Add the gradients of a row's part of a step's loss; arguments as in `step.row_part`."""
    return backward_row(run.loaded, batch, carry_options(run), **_loss(run, denominator, factors))


def value_in_pieces(
    run: TrainingRun, batch: Batch, denominator: float, factors: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a row's part of a step's loss and its sums, without gradients; arguments as in `step.row_part`."""
    return row_value(run.loaded, batch, carry_options(run), **_loss(run, denominator, factors))


def _loss(run: TrainingRun, denominator: float, factors: Tensor | None) -> dict[str, Any]:
    return {"objective": run.options.objective, "factors": factors, "denominator": denominator}


def carry_options(run: TrainingRun) -> CarryOptions:
    """Return how a row of the run runs in pieces."""
    # A context for each pass and none around them: autocast keeps a weight that it has cast until the outermost context
    # ends. The cast of a push has no graph, and a later pass that took it would give the weight no gradient.
    autocast = functools.partial(lower_precision, run)
    return CarryOptions(int(run.options.carry or 0), chunk=run.options.loss_chunk, autocast=autocast)


def lower_precision(run: TrainingRun) -> torch.autocast:
    """Return the autocast context of one forward pass."""
    return torch.autocast(run.loaded.device.type, torch.bfloat16, enabled=run.options.dtype == "bf16")
