"""The choices of a run in words: one line for each, with its reason."""

from __future__ import annotations

from datetime import timedelta

from treepack.fit.climb import RunRoom, RunRows
from treepack.fit.pass_memory import ModelProbe
from treepack.fit.rung import RunPlan, plan_in_words, smaller_plan
from treepack.memory.device_memory import update_bytes
from treepack.memory.shortage import gib
from treepack.train.options import CHUNK, STATE_BYTES
from treepack.train.setup.memory_input import MemoryInput


def choice_lines(
    plan: RunPlan, probe: ModelProbe, rows: RunRows, room: RunRoom, given: MemoryInput, compilation: str
) -> tuple[str, ...]:
    """Return a line for every option that was "auto", and one for memory and time.

    Args:
        plan: the plan.
        probe: the measurements from which it was chosen.
        rows: the rows of the run.
        room: the free memory.
        given: the run; options that are not "auto" get no line.
        compilation: the reason for layers that are compiled or not.
    """
    options, longest = given.options, f"the longest row has {rows.longest_of_all:,} tokens"
    kept, recomputed = (
        f"{max(probe.token_bytes(peak, count) for peak in (probe.forward, probe.backward)) / 1024:,.0f} KiB"
        for count in (0, probe.num_layers)
    )
    lines = {
        "compile": f"compile {'on: ' if plan.compile else ''}{compilation}",
        "checkpoint_layers": f"checkpoint-layers {plan.checkpoint_layers} of {probe.num_layers}: a token needs {kept} "
        f"if layers keep their activations, and {recomputed} if all run again",
        "carry": "carry off: whole rows fit"
        if plan.carry is None
        else f"carry {plan.carry}: no whole row fits, {longest}",
        "pass_tokens": f"pass-tokens {plan.pass_tokens}: {longest}, a step {rows.step_tokens:,}",
    }
    if plan.offload_checkpoints:
        lines["offload_checkpoints"] = "offload-checkpoints on: no whole row fits without it"
    if plan.offload_optimizer:
        moments = gib(update_bytes(given.loaded.model, state_bytes=STATE_BYTES, gradients=False))
        lines["offload_optimizer"] = (
            f"offload-optimizer on: the moments of AdamW, {moments}, leave room for a faster plan"
        )
    fits = "fits" if plan.loss_chunk == CHUNK else "does not fit"
    lines["loss_chunk"] = f"loss-chunk {plan.loss_chunk}: the default {fits}"
    if plan.whole_weights:
        why = "all weights and gradients fit on each rank, so ranks exchange them once a step"
        lines["whole_weights"] = f"whole-weights on: {why}"
    chosen = [line for name, line in lines.items() if getattr(options, name) == "auto"]
    return (*chosen, *_next_rungs(plan, probe, rows), expectation(plan, room, given))


def _next_rungs(plan: RunPlan, probe: ModelProbe, rows: RunRows) -> tuple[str, ...]:
    """Return the line about the next two rungs, if there are some."""
    words = list[str]()
    less: RunPlan | None = plan
    while less is not None and len(words) < 2:
        less = smaller_plan(less, rows.longest_of_all, probe.num_layers, can_carry=plan.carry is not None)
        words += [] if less is None else [plan_in_words(less)]
    return (f"if memory runs out: {'; then '.join(words)}",) if words else ()


def expectation(plan: RunPlan, room: RunRoom, given: MemoryInput) -> str:
    """Return the line about memory and time: a rate over all ranks, and the time of the whole run without saving."""
    rate = given.ranks.row_share[1] / max(plan.seconds, 1e-12)
    whole = timedelta(seconds=round(given.tokens * plan.seconds))  # 1:02:00
    return (
        f"expected: {gib(plan.num_bytes)} of {gib(room.gpu)} of GPU memory beside weights, gradients and optimiser, "
        f"about {rate:,.0f} tokens/s in {given.compute.dtype}, {whole} for all steps"
    )
