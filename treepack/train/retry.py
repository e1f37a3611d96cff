"""Steps of a run whose memory may run out: the step runs again with a smaller plan.

    FittingRun.step(number) -> StepMetrics       train_step, again and again until a plan fits
    FittingRun.evaluate() -> numbers             held-out rows, whose plan is their own (`evaluation`)

Another process, fragments or a longer row may take memory that the plan of the run counted on. Weights and optimiser
are as before the step: its gradients are dropped, random generators are restored, and an update allocates nothing
(`optimiser.prepare_states`). The smaller plan stays for the rest of the run, and run.json records it.

The ranks of a sharded model meet in every layer, so a rank cannot repeat a pass alone: there the run ends with the
error, the launcher stops the other ranks, and --resume continues.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from treepack.carry.refusal import can_carry
from treepack.data.prefetch import Prefetch
from treepack.errors import TreepackError
from treepack.memory.shortage import is_memory_error
from treepack.model.layers import adapted_layers, set_recomputed
from treepack.train.evaluation import evaluate
from treepack.train.passes import Pass
from treepack.train.run import TrainingRun
from treepack.train.setup.run_memory import spare_memory
from treepack.train.setup.run_plan import PLANNED, RunPlan, plan_in_words, smaller_plan
from treepack.train.step import StepMetrics, train_step

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
            record: called with the run that has the smaller plan.
        """
        self.run, self._optimiser = run, optimiser
        self._note, self._record = note, record
        self._rows: Prefetch | None = None

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

        return self._until_it_fits(attempt)

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

    def _until_it_fits(self, attempt: Callable[[], T]) -> T:
        device, before = self.run.loaded.device, self.run
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        while True:
            try:
                result = attempt()
                break
            except TreepackError as error:
                if not is_memory_error(error.__cause__ or error) or self.run.loaded.root is not None:
                    raise
                place, smaller = str(error).partition(";")[0], smaller_run(self.run)
                if smaller is None:
                    raise TreepackError(
                        f"{place} with the smallest plan ({plan_in_words(_plan_of(self.run))}); pack with a smaller "
                        "--capacity, or train with --lora-rank, --optimizer adamw-8bit or on more GPUs"
                    ) from error
            # Here the error is gone, whose frames keep the tensors of the pass.
            self.close()
            self._optimiser.zero_grad(set_to_none=True)
            if smaller.balance is not None:
                smaller.balance.drop()
            gc.collect()
            torch.set_rng_state(random[0])
            if random[1] is not None:
                torch.cuda.empty_cache()
                torch.cuda.set_rng_state(random[1], device)
            self.run = smaller
            self._note(f"{place}; it runs again with a smaller plan: {plan_in_words(_plan_of(smaller))}")
        if self.run is not before:
            self._record(self.run)
        return result


def smaller_run(run: TrainingRun) -> TrainingRun | None:
    """Return the run with the next smaller plan, which its model follows from now on; None if there is none."""
    loaded, runs = run.loaded, [run, *([] if run.held_out is None else [run.held_out])]
    adapted = adapted_layers(loaded.causal)
    plan = smaller_plan(
        _plan_of(run),
        max(int(each.dataset.num_tokens.max()) for each in runs),
        0 if adapted is None else len(adapted.modules),
        can_carry=can_carry(loaded),
    )
    if plan is None:
        return None
    if adapted is not None:
        set_recomputed(loaded.causal, plan.checkpoint_layers)
    memory = run.carry_memory
    if plan.carry is not None and memory is None:
        memory = spare_memory(loaded.device)
    changed = [replace(each, options=replace(run.options, **plan.options), carry_memory=memory) for each in runs]
    line = f"a smaller plan, because memory ran out: {plan_in_words(plan)}"
    return replace(changed[0], held_out=None if len(changed) == 1 else changed[1], choices=(*run.choices, line))


def _plan_of(run: TrainingRun) -> RunPlan:
    return RunPlan(**{name: getattr(run.options, name) for name in PLANNED})


def _rank_passes(run: TrainingRun, first: int) -> Iterator[Pass]:
    """Yield the passes that this rank computes, starting at optimiser step `first`."""
    for step in run.schedule[first:]:
        yield from run.passes(step.rows)
