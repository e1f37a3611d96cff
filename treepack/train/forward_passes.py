"""Passes without gradients, of a length that fits: scores of rows, values of a critic, and the loss of held-out rows.

    options, device --forward_plan--> RunPlan        how long a pass may be, before anything has run
    rows --forward_results--> (row, result)          consecutive rows are one pass
    run --while_it_fits--> result, run               rows of a training run, which keeps its plan for training

If memory runs out, the plan gets smaller by the rule of training (`run_plan.smaller_plan`): half of the tokens of a
pass, then pieces of rows, then smaller chunks of logits. It stays smaller for later passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from treepack.carry.fitting import until_it_fits
from treepack.carry.offload import CarryMemory
from treepack.carry.refusal import can_carry
from treepack.data.batch import names_of
from treepack.data.joined import consecutive, usual_pass
from treepack.model.loaded import LoadedModel
from treepack.train.options import CHUNK
from treepack.train.scoring_options import CriticOptions, ScoreOptions
from treepack.train.setup.run_memory import spare_memory
from treepack.train.setup.run_plan import RunPlan, plan_in_words, smaller_plan

if TYPE_CHECKING:
    from treepack.train.run import TrainingRun

_log = logging.getLogger("treepack")

_REMEDY = "compute with --dtype bf16, on a device with more free memory, or from rows with a smaller --capacity"


class SizedRow(Protocol):
    """A row that has a number, and a number of tokens."""

    @property
    def row_id(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


Row = TypeVar("Row", bound=SizedRow)
T = TypeVar("T")


def forward_plan(options: ScoreOptions | CriticOptions, device: torch.device) -> RunPlan:
    """Return the plan of the first pass: a pass has at most the tokens of a piece, if there are pieces."""
    size = usual_pass(device) if isinstance(options.pass_tokens, str) else options.pass_tokens
    size = size if options.piece_size is None else min(size, options.piece_size)
    chunk = options.loss_chunk if isinstance(options, ScoreOptions) else CHUNK
    return RunPlan(False, 0, False, options.piece_size, size, chunk)


def forward_results(
    loaded: LoadedModel,
    plan: RunPlan,
    rows: Iterable[Row],
    compute: Callable[[Sequence[Row], RunPlan, CarryMemory | None], Sequence[T]],
) -> Iterator[tuple[Row, T]]:
    """Yield each row with its result.

    Args:
        loaded: the model.
        plan: of the first pass.
        rows: in their order.
        compute: returns a result for each row of a pass; the last argument is memory of tensors that pieces carry.

    Raises:
        TreepackError: memory is too small for the smallest plan, or as `compute`.
    """
    waiting: list[Row] = []
    memory = None

    def joined(plan: RunPlan) -> list[Row]:
        return next(consecutive(waiting, _size, plan.pass_tokens))

    def attempt(plan: RunPlan) -> Sequence[T]:
        nonlocal memory
        if plan.carry is not None and memory is None:
            memory = spare_memory(loaded.device)
        return compute(joined(plan), plan, memory)

    def smaller(plan: RunPlan) -> tuple[RunPlan, str] | None:
        return _smaller(plan, [_size(row) for row in joined(plan)], loaded)

    for waiting in consecutive(rows, _size, plan.pass_tokens):
        while waiting:
            first = joined(plan)
            place = f"in {names_of([row.row_id for row in first])} of {sum(map(_size, first)):,} tokens"
            results, plan = until_it_fits(attempt, plan, smaller, loaded, place=place, remedy=_REMEDY)
            yield from zip(joined(plan), results, strict=True)
            waiting = waiting[len(results) :]


def _size(row: SizedRow) -> int:
    return row.num_tokens


def while_it_fits(
    run: TrainingRun,
    attempt: Callable[[TrainingRun], T],
    rows: Sequence[int],
    note: Callable[[str], None] = _log.info,
) -> tuple[T, TrainingRun]:
    """Return what a function without gradients returns for a run, and the run with the plan that fitted.

    Gradients of the model are dropped if memory runs out. Several ranks have one attempt.

    Raises:
        TreepackError: memory is too small for the smallest plan, or as `attempt`.
    """
    if run.ranks.size > 1:
        return attempt(run), run
    names = ("carry", "pass_tokens", "loss_chunk")

    def smaller(tried: TrainingRun) -> tuple[TrainingRun, str] | None:
        plan = RunPlan(False, 0, False, *(getattr(tried.options, name) for name in names))
        less = _smaller(plan, tried.dataset.num_tokens[list(rows)].tolist(), tried.loaded)
        if less is None:
            return None
        memory = tried.carry_memory
        if less[0].carry is not None and memory is None:
            memory = spare_memory(tried.loaded.device)
        options = replace(tried.options, **{name: getattr(less[0], name) for name in names})
        return replace(tried, options=options, carry_memory=memory), less[1]

    place = f"in {len(rows):,} rows without gradients"
    return until_it_fits(attempt, run, smaller, run.loaded, place=place, remedy=_REMEDY, note=note)


def _smaller(plan: RunPlan, sizes: Sequence[int], loaded: LoadedModel) -> tuple[RunPlan, str] | None:
    """Return the plan to try after a pass over rows of these tokens has failed, in words too; None if there is none."""
    # No longer than the pass that failed: half of 1,000,000 would be the same pass.
    tried = replace(plan, pass_tokens=min(plan.pass_tokens, sum(sizes)))
    less = smaller_plan(tried, max(sizes), 0, can_carry=can_carry(loaded))
    # Without the layers that a backward pass computes again.
    return None if less is None else (less, plan_in_words(less).partition(", ")[2])
