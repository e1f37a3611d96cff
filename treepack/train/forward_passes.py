"""Passes without gradients, of a length that fits: scores of rows, and values of a critic.

    model, options --load_frozen--> LoadedModel      its weights are not trained
    options, device --forward_plan--> RunPlan        how long a pass may be, before anything has run
    rows --ForwardPasses.results--> (row, result)    consecutive rows are one pass

If memory runs out, the plan gets smaller by the rule of training (`fit.rung`): half of the tokens of a pass,
then pieces of rows, then smaller chunks of logits. It stays smaller for later passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from treepack.carry.offload import CarryMemory, spare_memory
from treepack.carry.refusal import can_carry
from treepack.data.batch import names_of
from treepack.data.joined import consecutive, usual_pass
from treepack.fit.repeat import ranks_wait, until_it_fits
from treepack.fit.rung import RunPlan, smaller_plan
from treepack.memory.shortage import LOADING, memory_errors
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.train.options import CHUNK
from treepack.train.scoring_options import CriticOptions, ScoreOptions, piece_size
from treepack.train.setup.compute import ComputeSetting
from treepack.train.setup.smaller_run import FORWARD_REMEDY


class _SizedRow(Protocol):
    """A row that has a number, and a number of tokens."""

    @property
    def row_id(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


_Row = TypeVar("_Row", bound=_SizedRow)
_T = TypeVar("_T")


def load_frozen(
    model: str | Path, options: ScoreOptions | CriticOptions, compute: ComputeSetting, **further: Any
) -> LoadedModel:
    """Load a model whose weights are not trained; the last arguments are those of `load_model`.

    Raises:
        TreepackError: as `load_model`, or memory is too small.
    """
    with memory_errors(*LOADING):
        loaded = load_model(
            model, attention=options.attention, autocast=compute.autocast, device=compute.device, **further
        )
        loaded.model.requires_grad_(False)
        compute.lower_products(loaded.causal)
    return loaded


def forward_plan(options: ScoreOptions | CriticOptions, device: torch.device) -> RunPlan:
    """Return the plan of the first pass: a pass has at most the tokens of a piece, if there are pieces."""
    size = usual_pass(device) if isinstance(options.pass_tokens, str) else options.pass_tokens
    pieces = piece_size(options.carry)
    size = size if pieces is None else min(size, pieces)
    chunk = options.loss_chunk if isinstance(options, ScoreOptions) else CHUNK
    return RunPlan(False, 0, False, pieces, size, chunk)


class ForwardPasses:
    """Passes over rows; `plan` is the plan of today, which gets smaller if memory runs out."""

    def __init__(self, loaded: LoadedModel, plan: RunPlan) -> None:
        """Start with a plan."""
        self.loaded, self.plan = loaded, plan

    def results(
        self,
        rows: Iterable[_Row],
        compute: Callable[[Sequence[_Row], RunPlan, CarryMemory | None], Sequence[_T]],
    ) -> Iterator[tuple[_Row, _T]]:
        """Yield each row with its result.

        Args:
            rows: in their order.
            compute: returns a result for each row of a pass; the last argument is memory of tensors that pieces carry.

        Raises:
            TreepackError: memory is too small for the smallest plan, or as `compute`.
        """
        waiting: list[_Row] = []
        loaded, memory = self.loaded, None

        def joined(plan: RunPlan) -> list[_Row]:
            return next(consecutive(waiting, _size, plan.pass_tokens))

        def attempt(plan: RunPlan) -> Sequence[_T]:
            nonlocal memory
            if plan.carry is not None and memory is None:
                memory = spare_memory(loaded.device)
            return compute(joined(plan), plan, memory)

        def smaller(plan: RunPlan, _: Exception) -> RunPlan | None:
            sizes = [_size(row) for row in joined(plan)]
            return smaller_plan(plan, max(sizes), 0, can_carry=can_carry(loaded), tokens=sum(sizes))

        for waiting in consecutive(rows, _size, self.plan.pass_tokens):
            while waiting:
                first = joined(self.plan)
                place = f"in {names_of([row.row_id for row in first])} of {sum(map(_size, first)):,} tokens"
                results, self.plan = until_it_fits(
                    attempt,
                    self.plan,
                    smaller,
                    loaded.device,
                    place=place,
                    remedy=FORWARD_REMEDY,
                    waits=partial(ranks_wait, loaded),
                )
                yield from zip(joined(self.plan), results, strict=True)
                waiting = waiting[len(results) :]


def _size(row: _SizedRow) -> int:
    return row.num_tokens
