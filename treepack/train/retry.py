"""Steps of a run whose memory may run out: the run continues with a smaller plan.

    FittingRun.step(number) -> StepMetrics       train_step, with a smaller plan if its memory is not there
    FittingRun.evaluate() -> numbers             held-out rows, whose plan is their own (`evaluation`)

    before a step     free bytes of each rank < bytes of the plan?     all ranks take the next smaller plan that fits
    in a step         an allocation fails                              the step runs again with a smaller plan

Another process, fragments or a longer row may take memory that the plan of the run counted on. Weights and optimiser
are as before the step: its gradients are dropped, and an update allocates nothing (`optimiser.prepare_states`). The
smaller plan stays for the rest of the run, and run.json records it.

The ranks of a sharded model meet in every layer, so a rank cannot repeat a pass alone. If an allocation fails there,
the run ends, after this rank has recorded the smaller plan for --resume. Ranks that meet only at the end of a step
(rows in pieces) all repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from treepack.data.prefetch import Prefetch
from treepack.errors import TreepackError
from treepack.fit.repeat import SharedShortageError, until_it_fits
from treepack.memory.device_memory import StepMemory
from treepack.memory.shortage import gib
from treepack.train.evaluation import evaluate
from treepack.train.run import TrainingRun
from treepack.train.setup.run_memory import coming_bytes
from treepack.train.setup.smaller_run import run_in_words, smaller_run
from treepack.train.sharding import forget_passes
from treepack.train.step import StepMetrics, train_step

_REMEDY = "pack with a smaller --capacity, or train with --lora-rank, --offload-optimizer or on more GPUs"


class FittingRun:
    """A run with a plan that fits: `run` is the run with the plan of today."""

    def __init__(
        self,
        run: TrainingRun,
        optimiser: torch.optim.Optimizer,
        *,
        note: Callable[[str], None],
        record: Callable[[TrainingRun], None],
    ) -> None:
        """Start before any step.

        Args:
            run: the run.
            optimiser: of its model.
            note: called with a sentence when the plan gets smaller.
            record: called with the run that has the smaller plan, by one rank.
        """
        self.run, self._optimiser = run, optimiser
        self._note, self._record = note, record
        self._rows: Prefetch | None = None
        self._before, self._expected = 0, 0  # bytes before the step, and its forecast

    def step(self, number: int) -> StepMetrics:
        """Carry out optimiser step `number`, counted from 0; steps follow each other.

        Raises:
            TreepackError: no smaller plan is left, or the step failed for another reason.
        """

        def attempt(run: TrainingRun) -> StepMetrics:
            if run is not self.run:
                self._take(run)
            if self._rows is None:
                passes = (each for step in run.schedule[number:] for each in run.passes(step.rows))
                self._rows = Prefetch(run.dataset, passes, pin=run.loaded.device.type == "cuda")
            return train_step(run, self._optimiser, number, self._rows)

        self._optimiser.zero_grad(set_to_none=True)
        is_first, memory = not self._optimiser.state, self.run.memory
        if memory is not None and self.run.ranks.any(memory.meter.free() < self._needed()):
            self._shrink(number)
        self._start_measuring()
        metrics, _ = until_it_fits(
            attempt,
            self.run,
            self._smaller_after,
            self.run.loaded.device,
            place=f"in step {number + 1}",
            remedy=_REMEDY,
            undo=self._undo,
            words=run_in_words,
            note=self._note,
        )
        if self.run.memory is not None and not is_first:  # the first update also makes the states of the optimiser
            self._correct(self.run.memory)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate the held-out rows.

        Raises:
            TreepackError: as `step`.
        """
        assert self.run.held_out is not None
        numbers, held_out = evaluate(self.run.held_out, self._note)
        self.run = replace(self.run, held_out=held_out)
        return numbers

    def close(self) -> None:
        """Stop to read rows."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _correct(self, memory: StepMemory) -> None:
        """Keep the bytes by which a step exceeded its forecast, and record them for --resume if they are many."""
        grown = memory.meter.peak() - self._before - self._expected
        if grown > 0:
            self.run = replace(self.run, memory=replace(memory, excess=memory.excess + grown))
            if grown > memory.margin // 8 and self.run.ranks.leads:
                self._record(self.run)

    def _needed(self) -> int:
        """Return the bytes that the next step allocates on this rank."""
        memory = self.run.memory
        assert memory is not None
        coming = coming_bytes(self.run.loaded, self.run.options, states=not self._optimiser.state)
        return memory.needed + memory.excess + coming

    def _room(self, *, agreed: bool) -> int | None:
        """Return the bytes for a plan beside weights, gradients and optimiser; None if they are not known.

        With `agreed`, of the smallest rank; all ranks must call this.
        """
        memory = self.run.memory
        if memory is None:
            return None
        # Tensors of a failed pass are still there.
        free = memory.meter.free() + max(0, memory.meter.allocated() - self._before)
        room = free - (self._expected - memory.needed) - memory.margin
        return self.run.ranks.smallest(room) if agreed else room

    def _start_measuring(self) -> None:
        if self.run.memory is not None:
            self.run.memory.meter.reset()
            self._before, self._expected = self.run.memory.meter.allocated(), self._needed()

    def _shrink(self, number: int) -> None:
        """Take a smaller plan before a step, if there is one; all ranks must call this."""
        self._start_measuring()
        room = self._room(agreed=True)
        smaller = smaller_run(self.run, room)
        if smaller is not None:
            start = f"step {number + 1} lacks memory on a rank, which has room for {gib(max(0, room or 0))}"
            self._note(f"{start}; it runs with a smaller plan: {run_in_words(smaller)}")
            self._take(smaller)

    def _take(self, smaller: TrainingRun) -> None:
        """Continue with a smaller plan, the same on all ranks, and record it."""
        self.close()
        self.run = smaller
        self._start_measuring()
        if smaller.ranks.leads:
            self._record(smaller)

    def _undo(self) -> None:
        """Drop gradients and counts of a failed step."""
        self._optimiser.zero_grad(set_to_none=True)
        forget_passes(self.run.loaded)
        if self.run.balance is not None:
            self.run.balance.drop()

    def _smaller_after(self, run: TrainingRun, error: Exception) -> TrainingRun | None:
        """Return the run with a smaller plan after a failed allocation, or None.

        Raises:
            TreepackError: other ranks wait for this one inside of a pass.
        """
        agreed = isinstance(error, SharedShortageError) or (run.ranks.size == 1 and run.loaded.root is None)
        smaller = smaller_run(run, self._room(agreed=agreed))
        if smaller is None or agreed:
            return smaller
        with suppress(TreepackError):  # two ranks may record it at once
            self._record(smaller)
        raise TreepackError(
            f"{str(error).partition(';')[0]}; ranks that meet in every layer cannot repeat a step, so continue with "
            f"--resume, which takes the smaller plan in run.json: {run_in_words(smaller)}"
        ) from error
