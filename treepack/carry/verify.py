"""Rows in pieces as the packed side of a comparison of gradients."""

from __future__ import annotations

from torch import Tensor

from treepack.carry.backward import CarryOptions, backward_row
from treepack.data.batch import Batch
from treepack.model.loaded import LoadedModel
from treepack.model.objectives.objective import Objective
from treepack.model.verify.gradients import RowBackward


def in_pieces(limit: int) -> RowBackward:
    """Return an argument `backward` of `verify_gradients` that runs each row in pieces of at most `limit` tokens."""

    def run(loaded: LoadedModel, batch: Batch, factors: Tensor | None, objective: Objective, chunk: int) -> Tensor:
        options = CarryOptions(limit, chunk=chunk)
        return backward_row(loaded, batch, options, objective=objective, factors=factors).loss

    return run
