"""Passes without gradients, of a length that fits: scores of rows, values of a critic, and the loss of held-out rows.

    options, device --forward_plan--> RunPlan        how long a pass may be, before anything has run
    rows --ForwardPasses.results--> (row, result)    consecutive rows are one pass
    run --while_it_fits--> result, run               rows of a training run, which keeps its plan for training

If memory runs out, the plan gets smaller by the rule of training (`run_plan.smaller_plan`): half of the tokens of a
pass, then pieces of rows, then smaller chunks of logits. It stays smaller for later passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from treepack.carry.refusal import can_carry
from treepack.data.joined import consecutive, usual_pass
from treepack.model.fitting import until_it_fits
from treepack.model.loaded import LoadedModel
from treepack.train.options import CHUNK
from treepack.train.scoring_options import CriticOptions, ScoreOptions
from treepack.train.setup.run_memory import spare_memory
from treepack.train.setup.run_plan import RunPlan, plan_in_words, smaller_plan

if TYPE_CHECKING:
    from treepack.train.run import TrainingRun

_log = logging.getLogger("treepack")

Row = TypeVar("Row")
T = TypeVar("T")

_REMEDY = "compute with --dtype bf16, on a device with more free memory, or from rows with a smaller --capacity"


def forward_plan(options: ScoreOptions | CriticOptions, device: torch.device) -> RunPlan:
    """Return the plan of the first pass: a pass has at most the tokens of a piece, if there are pieces."""
    size = usual_pass(device) if isinstance(options.pass_tokens, str) else options.pass_tokens
    size = size if options.piece_size is None else min(size, options.piece_size)
    chunk = options.loss_chunk if isinstance(options, ScoreOptions) else CHUNK
    return RunPlan(False, 0, False, options.piece_size, size, chunk)


class ForwardPasses:
    """Passes of a model, whose `plan` is that of the next one, and `memory` that of tensors that pieces carry."""

    def __init__(self, loaded: LoadedModel, plan: RunPlan) -> None:
        """Start before any pass."""
        self.loaded, self.plan = loaded, plan
        self.memory = None if plan.carry is None else spare_memory(loaded.device)

    def results(
        self,
        rows: Iterable[Row],
        tokens: Callable[[Row], int],
        name: Callable[[Sequence[Row]], str],
        compute: Callable[[Sequence[Row], RunPlan], Sequence[T]],
    ) -> Iterator[tuple[Row, T]]:
        """Yield each row with its result.

        Args:
            rows: in their order.
            tokens: returns the tokens of a row.
            name: names rows in messages.
            compute: returns a result for each row of a pass.

        Raises:
            TreepackError: memory is too small for the smallest plan, or as `compute`.
        """
        for waiting in consecutive(rows, tokens, self.plan.pass_tokens):
            while waiting:
                joined, found = self._next_pass(waiting, tokens, name, compute)
                yield from zip(joined, found, strict=True)
                waiting = waiting[len(joined) :]

    def _next_pass(
        self,
        waiting: list[Row],
        tokens: Callable[[Row], int],
        name: Callable[[Sequence[Row]], str],
        compute: Callable[[Sequence[Row], RunPlan], Sequence[T]],
    ) -> tuple[Sequence[Row], Sequence[T]]:
        def joined(plan: RunPlan) -> list[Row]:
            return next(consecutive(waiting, tokens, plan.pass_tokens))

        def smaller(plan: RunPlan) -> RunPlan | None:
            less = _smaller(plan, [tokens(row) for row in joined(plan)], self.loaded)
            if less is not None and less.carry is not None and self.memory is None:
                self.memory = spare_memory(self.loaded.device)
            return less

        first = joined(self.plan)
        found, self.plan = until_it_fits(
            lambda plan: compute(joined(plan), plan),
            self.plan,
            smaller,
            self.loaded,
            place=f"in {name(first)} of {sum(map(tokens, first)):,} tokens",
            remedy=_REMEDY,
            words=_words,
        )
        return joined(self.plan), found


def while_it_fits(
    run: TrainingRun,
    attempt: Callable[[TrainingRun], T],
    rows: Sequence[int],
    note: Callable[[str], None] = _log.info,
) -> tuple[T, TrainingRun]:
    """Return what a function without gradients returns for a run, and the run with the plan that fitted.

    Gradients of the model are dropped if memory runs out.

    Raises:
        TreepackError: memory is too small for the smallest plan, or as `attempt`.
    """

    def smaller(tried: TrainingRun) -> TrainingRun | None:
        less = _smaller(_plan_of(tried), tried.dataset.num_tokens[list(rows)].tolist(), tried.loaded)
        if less is None:
            return None
        memory = tried.carry_memory
        if less.carry is not None and memory is None:
            memory = spare_memory(tried.loaded.device)
        changed = {name: getattr(less, name) for name in ("carry", "pass_tokens", "loss_chunk")}
        return replace(tried, options=replace(tried.options, **changed), carry_memory=memory)

    return until_it_fits(
        attempt,
        run,
        smaller,
        run.loaded,
        place=f"in {len(rows):,} rows without gradients",
        remedy=_REMEDY,
        words=lambda tried: _words(_plan_of(tried)),
        note=note,
    )


def _plan_of(run: TrainingRun) -> RunPlan:
    options = run.options
    carry = None if options.carry is None else int(options.carry)
    return RunPlan(False, 0, False, carry, int(options.pass_tokens), int(options.loss_chunk))


def _smaller(plan: RunPlan, sizes: Sequence[int], loaded: LoadedModel) -> RunPlan | None:
    """Return the plan to try after a pass over rows of these tokens has failed; None if `plan` is the smallest one."""
    # No longer than the pass that failed: half of 1,000,000 would be the same pass.
    tried = replace(plan, pass_tokens=min(plan.pass_tokens, sum(sizes)))
    return smaller_plan(tried, max(sizes), 0, can_carry=can_carry(loaded))


def _words(plan: RunPlan) -> str:
    return plan_in_words(plan).partition(", ")[2]  # without the layers that a backward pass computes again
