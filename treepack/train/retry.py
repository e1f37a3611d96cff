"""Steps of a run whose memory may run out: the run continues with a smaller plan.

    FittingRun.step(number) -> StepMetrics       train_step, with a smaller plan if its memory is not there
    FittingRun.evaluate() -> numbers             held-out rows, whose plan is their own (`evaluation`)

    before a step     free bytes of each rank < bytes of the plan?     all ranks take the next smaller plan that fits
    in a step         an allocation fails                              the step runs again with a smaller plan

Another process, fragments or a longer row may take memory that the plan of the run counted on. Weights and optimiser
are as before the step: its gradients are dropped, random generators are restored, and an update allocates nothing
(`optimiser.prepare_states`). The smaller plan stays for the rest of the run, and run.json records it.

The ranks of a sharded model meet in every layer, so a rank cannot repeat a pass alone. If an allocation fails there,
the run ends, after this rank has recorded the smaller plan for --resume. Ranks that meet only at the end of a step
(rows in pieces) all repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch

from treepack.carry.fitting import release_memory
from treepack.carry.refusal import can_carry
from treepack.data.prefetch import Prefetch
from treepack.errors import TreepackError
from treepack.memory.shortage import is_memory_error
from treepack.model.layers import adapted_layers, set_recomputed
from treepack.train.evaluation import evaluate
from treepack.train.passes import Pass
from treepack.train.run import TrainingRun
from treepack.train.setup.run_memory import coming_bytes, spare_memory, whole_bytes
from treepack.train.setup.run_plan import PLANNED, RunPlan, gib, plan_in_words, smaller_plan
from treepack.train.sharding import forget_passes
from treepack.train.step import SharedShortageError, StepMetrics, train_step

T = TypeVar("T")


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
        # Bytes before the step, and its forecast; and bytes by which measured steps exceeded it.
        self._before, self._expected, self._excess = 0, 0, 0

    def step(self, number: int) -> StepMetrics:
        """Carry out optimiser step `number`, counted from 0; steps follow each other.

        Raises:
            TreepackError: no smaller plan is left, or the step failed for another reason.
        """

        def attempt() -> StepMetrics:
            if self._rows is None:
                pin = self.run.loaded.device.type == "cuda"
                self._rows = Prefetch(self.run.dataset, _rank_passes(self.run, number), pin=pin)
            return train_step(self.run, self._optimiser, number, self._rows)

        self._optimiser.zero_grad(set_to_none=True)
        is_first, memory = not self._optimiser.state, self.run.memory
        if memory is not None and self.run.ranks.any(memory.meter.free() < self._needed()):
            self._shrink(f"step {number + 1} lacks memory on a rank")
        self._start_measuring()
        metrics = self._until_it_fits(attempt)
        if memory is not None and not is_first:  # the first update also makes the states of the optimiser
            self._excess += max(0, memory.meter.peak() - self._before - self._expected)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate the held-out rows.

        Raises:
            TreepackError: as `step`.
        """

        def attempt() -> dict[str, float]:
            assert self.run.held_out is not None
            numbers, held_out = evaluate(self.run.held_out, self._note)
            if held_out is not self.run.held_out:
                self.run = replace(self.run, held_out=held_out)
            return numbers

        return self._until_it_fits(attempt)

    def close(self) -> None:
        """Stop to read rows."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _needed(self) -> int:
        """Return the bytes that the next step allocates on this rank."""
        memory = self.run.memory
        assert memory is not None
        coming = coming_bytes(self.run.loaded, self.run.options, states=not self._optimiser.state)
        return memory.needed + self._excess + coming

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

    def _shrink(self, reason: str) -> None:
        """Take a smaller plan before a step, if there is one; all ranks must call this."""
        self._start_measuring()
        room = self._room(agreed=True)
        smaller = smaller_run(self.run, room)
        if smaller is not None:
            self._take(smaller, f"{reason}, which has room for {gib(max(0, room or 0))}; it runs with a smaller plan")

    def _take(self, smaller: TrainingRun, reason: str) -> None:
        """Continue with a smaller plan, the same on all ranks, and record it."""
        self.close()
        if smaller.memory is not None and not smaller.memory.needed:
            self._excess = 0  # it belongs to a forecast, and there is none
        self.run = smaller
        self._start_measuring()
        self._note(f"{reason}: {plan_in_words(_plan_of(smaller))}")
        if smaller.ranks.leads:
            self._record(smaller)

    def _until_it_fits(self, attempt: Callable[[], T]) -> T:
        device = self.run.loaded.device
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        while True:
            try:
                return attempt()
            except TreepackError as error:
                if not is_memory_error(error.__cause__ or error):
                    raise
                place, smaller = str(error).partition(";")[0], self._smaller_after(error)
            # Here the error is gone, whose frames keep the tensors of the pass.
            self._optimiser.zero_grad(set_to_none=True)
            forget_passes(smaller.loaded)
            if smaller.balance is not None:
                smaller.balance.drop()
            release_memory(device)
            torch.set_rng_state(random[0])
            if random[1] is not None:
                torch.cuda.set_rng_state(random[1], device)
            self._take(smaller, f"{place}; it runs again with a smaller plan")

    def _smaller_after(self, error: TreepackError) -> TrainingRun:
        """Return the run with a smaller plan after a failed allocation.

        Raises:
            TreepackError: there is none, or other ranks wait for this one inside of a pass.
        """
        run, place = self.run, str(error).partition(";")[0]
        agreed = isinstance(error, SharedShortageError) or (run.ranks.size == 1 and run.loaded.root is None)
        smaller = smaller_run(run, self._room(agreed=agreed))
        if smaller is None:
            raise TreepackError(
                f"{place} with the smallest plan ({plan_in_words(_plan_of(run))}); pack with a smaller "
                "--capacity, or train with --lora-rank, --optimizer adamw-8bit or on more GPUs"
            ) from error
        if not agreed:
            with suppress(TreepackError):  # two ranks may record it at once
                self._record(smaller)
            raise TreepackError(
                f"{place}; ranks that meet in every layer cannot repeat a step, so continue with --resume, which takes "
                f"the smaller plan in run.json: {plan_in_words(_plan_of(smaller))}"
            ) from error
        return smaller


def smaller_run(run: TrainingRun, room: int | None = None) -> TrainingRun | None:
    """Return the run with the next smaller plan, which its model follows from now on; None if there is none.

    Args:
        run: the run.
        room: free bytes of its smallest rank beside weights, gradients and optimiser; plans that need more by their
            forecast are left out, unless all do.
    """
    loaded, runs = run.loaded, [run, *([] if run.held_out is None else [run.held_out])]
    adapted, memory = adapted_layers(loaded.causal), run.memory
    longest = max(int(each.dataset.num_tokens.max()) for each in runs)
    num_layers = 0 if adapted is None else len(adapted.modules)
    # Pieces gather the whole weights, and their gradients.
    pieces = can_carry(loaded) and (room is None or loaded.root is None or 2 * whole_bytes(loaded) <= room)
    plan, needed = None, 0
    following = smaller_plan(_plan_of(run), longest, num_layers, can_carry=pieces)
    while following is not None:
        plan = following
        needed = 0 if memory is None else memory.forecast(plan) or 0
        if room is None or needed <= room:
            break
        following = smaller_plan(plan, longest, num_layers, can_carry=pieces)
    if plan is None:
        return None
    if adapted is not None:
        set_recomputed(loaded.causal, plan.checkpoint_layers)
    carried = run.carry_memory
    if plan.carry is not None and (carried is None or room is not None):
        carried = spare_memory(loaded.device, room)
    memory = None if memory is None else replace(memory, needed=needed)
    options = replace(run.options, **plan.options)
    changed = [replace(each, options=options, carry_memory=carried, memory=memory) for each in runs]
    line = f"a smaller plan, because memory ran out: {plan_in_words(plan)}"
    return replace(changed[0], held_out=None if len(changed) == 1 else changed[1], choices=(*run.choices, line))


def _plan_of(run: TrainingRun) -> RunPlan:
    return RunPlan(**{name: getattr(run.options, name) for name in PLANNED})


def _rank_passes(run: TrainingRun, first: int) -> Iterator[Pass]:
    """Yield the passes that this rank computes, starting at optimiser step `first`."""
    for step in run.schedule[first:]:
        yield from run.passes(step.rows)
