"""A run with a smaller plan, after its memory ran out or before it would.

run, room --smaller_run--> run      the next plan of `fit.rung` that fits into `room`
run, attempt --fit_forward--> result, run      rows without gradients, which have a plan of their own
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from treepack.carry.offload import spare_memory
from treepack.carry.refusal import can_carry
from treepack.fit.repeat import ranks_wait, until_it_fits
from treepack.fit.rung import PLANNED, RunPlan, plan_in_words, smaller_plan
from treepack.memory.shortage import gib
from treepack.model.layers import num_adapted, set_recomputed
from treepack.train.run import TrainingRun
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.sharding import forget_passes, whole_bytes

_log = logging.getLogger("treepack")

_T = TypeVar("_T")

FORWARD_REMEDY = "compute with --dtype bf16, on a device with more free memory, or from rows with a smaller --capacity"


def smaller_run(run: TrainingRun, room: int | None = None, rows: Sequence[int] | None = None) -> TrainingRun | None:
    """Return the run with the next smaller plan, which its model follows from now on, or None.

    Args:
        run: the run.
        room: free bytes of its smallest rank beside weights, gradients and optimiser; plans that need more by their
            forecast are left out, unless all do.
        rows: the rows to compute without gradients, so that layers stay as they are; None for a run that trains.
    """
    loaded, memory = run.loaded, run.memory
    plan = first = plan_of(run)
    whole = 0 if loaded.root is None else whole_bytes(loaded)  # pieces gather the whole weights
    if rows is None:
        longest = max(int(each.dataset.num_tokens.max()) for each in (run, run.held_out) if each is not None)
        num_layers, tokens = num_adapted(loaded.causal), None
        whole *= 2  # and their gradients
    else:
        sizes = run.dataset.num_tokens[list(rows)]
        longest, num_layers, tokens = int(sizes.max()), first.checkpoint_layers, int(sizes.sum())
    pieces = can_carry(loaded) and (room is None or whole <= room)
    needed = 0
    while (following := smaller_plan(plan, longest, num_layers, can_carry=pieces, tokens=tokens)) is not None:
        plan, needed = following, _forecast(run, following, rows)
        if room is None or needed <= room:
            break
    if plan is first:
        return None
    if num_layers and rows is None:
        set_recomputed(loaded.causal, plan.checkpoint_layers)
    carried, held_out = run.carry_memory, run.held_out
    if plan.carry is not None and (carried is None or room is not None):
        carried = spare_memory(loaded.device, room)
    if memory is not None:
        memory = replace(memory, needed=needed, excess=memory.excess if needed else 0)  # it belongs to a forecast
    options = replace(run.options, **plan.options)
    if held_out is not None and rows is None:
        held_out = replace(held_out, options=options, carry_memory=carried, memory=memory)
    choices = (*run.choices, f"a smaller plan, because memory ran out: {plan_in_words(plan)}")
    return replace(run, options=options, carry_memory=carried, memory=memory, held_out=held_out, choices=choices)


def fit_forward(
    run: TrainingRun,
    attempt: Callable[[TrainingRun], _T],
    rows: Sequence[int],
    note: Callable[[str], None] = _log.info,
) -> tuple[_T, TrainingRun]:
    """Run a function without gradients; return its result, and the run with the plan that fitted.

    Gradients of the model are dropped if memory runs out. All ranks must call this.

    Raises:
        TreepackError: memory is too small for the smallest plan, or as `attempt`.
    """
    loaded = run.loaded

    def undo() -> None:
        forget_passes(loaded)
        loaded.model.zero_grad(set_to_none=True)

    if run.memory is not None:
        room = run.ranks.smallest(run.memory.meter.free() - run.memory.margin)
        if _forecast(run, plan_of(run), rows) > room and (less := smaller_run(run, room, rows)) is not None:
            run, words = less, run_in_words(less)
            note(f"a rank has room for {gib(max(0, room))}; {len(rows):,} rows run with a smaller plan: {words}")
    return until_it_fits(
        attempt,
        run,
        lambda tried, _: smaller_run(tried, rows=rows),
        loaded.device,
        place=f"in {len(rows):,} rows without gradients",
        remedy=FORWARD_REMEDY,
        undo=undo,
        waits=partial(ranks_wait, loaded),
        words=run_in_words,
        note=note,
    )


def plan_of(run: TrainingRun | MemoryInput) -> RunPlan:
    """Return the plan in the options of a run; `offload_optimizer` and `whole_weights` are off if they are "auto"."""
    options, loaded = run.options, run.loaded
    values: dict[str, Any] = {name: getattr(options, name) for name in PLANNED}
    values["offload_optimizer"] = options.offload_optimizer is True
    values["whole_weights"] = options.whole_weights is True and loaded.root is not None
    if options.checkpoint_layers == "all":
        values["checkpoint_layers"] = num_adapted(loaded.causal)
    return RunPlan(**values)


def run_in_words(run: TrainingRun) -> str:
    """Return the plan of a run in words."""
    return plan_in_words(plan_of(run))


def _forecast(run: TrainingRun, plan: RunPlan, rows: Sequence[int] | None) -> int:
    """Return the peak of a plan in bytes, 0 if it is not known; without gradients no layer keeps its activations."""
    if run.memory is None:
        return 0
    if rows is None:
        return run.memory.forecast(plan, None) or 0
    forward = replace(plan, checkpoint_layers=num_adapted(run.loaded.causal))
    return run.memory.forecast(forward, int(run.dataset.num_tokens[list(rows)].max())) or 0
