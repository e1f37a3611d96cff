"""The last stage of opening: values for the options that are "auto", chosen together from measured bytes and seconds.

    MemoryInput: data, model and options --choose_memory--> MemoryChoices

    fit.measure    passes over whole rows, with layers as they are; compiled too, if the run is long enough
    fit.climb      the first rung that fits
    host_memory    pinned for layers that offload their inputs

All ranks choose the same values, and no value changes the result of a run except for rounding. Without a meter, as on a
CPU, nothing is measured: rows run whole, no layer is recomputed or compiled. Options with values are kept; the memory
that they need is reserved or refused here.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from treepack.carry.offload import CarryMemory, spare_memory
from treepack.carry.pieces import align
from treepack.carry.refusal import can_carry, check_carry
from treepack.data.joined import usual_pass
from treepack.errors import TreepackError
from treepack.fit.climb import HOST_RATE, ClimbInput, PlanForecast, RunRoom, climb, climb_error
from treepack.fit.measure import TrialPasses, cast_bytes, probe_compiled, probe_model
from treepack.fit.pass_memory import ModelProbe
from treepack.fit.rung import PLANNED, SMALLEST_PIECE, RunPlan
from treepack.memory.device_memory import StepMemory, update_bytes
from treepack.memory.offload import LayerOffload
from treepack.memory.shortage import memory_errors
from treepack.model.layers import adapted_layers, compiler_errors, find_layers, has_compiled_layers, set_recomputed
from treepack.model.loaded import LoadedModel
from treepack.train.options import CHUNK, STATE_BYTES, TrainOptions
from treepack.train.setup.choice_lines import choice_lines
from treepack.train.setup.host_memory import host_room, moved_tensors, reserve_host
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.probe_record import keep_probes, known_probes, pays
from treepack.train.setup.smaller_run import plan_of
from treepack.train.sharding import adapt, whole_bytes

_log = logging.getLogger("treepack")

_NO_ROOM = (
    "while the memory of a pass was measured",
    "train with a smaller --loss-chunk, --dtype bf16, --lora-rank, or on more GPUs",
)


@dataclass(frozen=True)
class MemoryChoices:
    """The values of the options that are planned, with their memory, lines about the choices, and notes."""

    plan: RunPlan
    memory: StepMemory | None
    carry_memory: CarryMemory | None
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose_memory(given: MemoryInput) -> MemoryChoices:
    """Measure the memory and the time that a run needs, and choose; all ranks must call this.

    Raises:
        TreepackError: memory is too small on any rank, or the model cannot run rows in pieces.
    """
    loaded, options = given.loaded, given.options
    if options.piece_limit is not None:
        check_carry(loaded)
    lines: tuple[str, ...] = ()
    memory = None if given.meter is None else StepMemory(given.meter)
    if memory is None:
        plan = _unmeasured(given)
        _log.info("plan: whole rows and no measurement, because torch counts no memory on a CPU")
    elif all(getattr(options, name) != "auto" for name in PLANNED if name != "offload_optimizer"):
        plan = plan_of(given)
        memory = _with_recorded(given, plan, memory)
    else:
        plan, lines, memory = _measured(given, memory)
    _apply_plan(loaded, options, plan)
    adapted, notes = adapted_layers(loaded.causal), tuple[str, ...]()
    if plan.offload_checkpoints and adapted is not None and adapted.recomputed > 0:
        lower = given.compute.dtype == "bf16"
        notes = (reserve_host(loaded, adapted, _longest_pass(given, plan), lower=lower),)
    carried = None
    if memory is not None and plan.carry is not None and given.rows().longest_of_all > plan.carry:
        room = _room(replace(given, options=replace(options, **plan.options)), memory)
        carried = spare_memory(loaded.device, room.gpu - room.whole - memory.margin, room.host)
    return MemoryChoices(plan, memory, carried, lines, notes)


def coming_bytes(loaded: LoadedModel, options: TrainOptions, *, states: bool = True) -> int:
    """Return the bytes that the next update allocates on this rank: gradients, and with `states` the moments."""
    on_gpu = states and options.offload_optimizer is not True
    return update_bytes(loaded.model, state_bytes=options.state_bytes if on_gpu else 0)


def _may_keep_whole(given: MemoryInput) -> bool:
    """Return True if each rank may keep all weights and gradients in a step: ranks divide neither rows nor experts."""
    options = given.options
    divided = given.ranks.sequence > 1 or options.ranks_of_experts > 1
    return given.loaded.root is not None and not divided and options.whole_weights is not False


def _apply_plan(loaded: LoadedModel, options: TrainOptions, plan: RunPlan) -> None:
    """Compile and recompute the layers of the model as in the plan."""
    adapted = adapted_layers(loaded.causal)
    if has_compiled_layers(loaded.causal) != plan.compile:
        adapt(loaded.causal, replace(options, **plan.options), loaded.device)
    elif adapted is not None:
        set_recomputed(loaded.causal, plan.checkpoint_layers)
        if plan.offload_checkpoints != (adapted.offload is not None):
            adapted.offload = LayerOffload(loaded.device) if plan.offload_checkpoints else None


def _with_recorded(given: MemoryInput, plan: RunPlan, memory: StepMemory) -> StepMemory:
    """Return the memory with the forecast of the run that this one continues, if there is one."""
    record = given.recorded
    with suppress(KeyError, TypeError):  # no forecast, or a different version of it
        forecast = PlanForecast(ModelProbe.from_record(record["probe"]), given.rows(), record["moved"], record["whole"])
        needed = forecast.num_bytes(plan) or 0
        memory = replace(memory, needed=needed, record=forecast.as_record(), forecast=forecast.num_bytes)
    return replace(memory, excess=record.get("excess", 0))


def _unmeasured(given: MemoryInput) -> RunPlan:
    """Return the plan of a device whose memory is not counted."""
    options = given.options
    usual: dict[str, Any] = {
        "compile": False,
        # Layers whose inputs are offloaded are recomputed.
        "checkpoint_layers": "all" if options.offload_checkpoints is True else 0,
        "offload_checkpoints": False,
        "carry": None,
        "pass_tokens": usual_pass(given.loaded.device),
        "loss_chunk": CHUNK,
    }
    auto = {name: value for name, value in usual.items() if getattr(options, name) == "auto"}
    return plan_of(replace(given, options=replace(options, **auto)))


def _longest_pass(given: MemoryInput, plan: RunPlan) -> int:
    """Return the tokens of the longest row, piece, or pass of the run that has gradients, with padding."""
    longest = max(given.data.longest_row, min(plan.pass_tokens, given.rows().step_tokens))
    return align(min(longest, plan.carry or longest))


def _measured(given: MemoryInput, memory: StepMemory) -> tuple[RunPlan, tuple[str, ...], StepMemory]:
    """Return the first rung that fits by measurements, a line for every choice, and the memory of the rung."""
    try:
        probe, about_compilation = _probe(given, memory)
        plan, room = _climbed(given, memory, probe)
    finally:
        given.loaded.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    rows, whole, wanted = given.rows(), 2 * whole_bytes(given.loaded), given.options.whole_weights is True
    if wanted and _may_keep_whole(given):
        room = replace(room, gpu=room.gpu + whole)
    # Rows in pieces gather the whole weights in any case, and one pass a step gathers them once.
    cut = plan.carry is not None and rows.longest_of_all > plan.carry
    repeated = not cut and rows.step_tokens > max(plan.pass_tokens, rows.longest_of_all)
    if _may_keep_whole(given) and (wanted or (repeated and plan.num_bytes + whole <= room.gpu)):
        plan = replace(plan, whole_weights=True, num_bytes=plan.num_bytes + whole)
    lines = choice_lines(plan, probe, rows, room, given, about_compilation)
    forecast = PlanForecast(probe, rows, room.moved, whole)
    memory = replace(memory, needed=plan.num_bytes, record=forecast.as_record(), forecast=forecast.num_bytes)
    return plan, lines, memory


def _climbed(given: MemoryInput, memory: StepMemory, probe: ModelProbe) -> tuple[RunPlan, RunRoom]:
    """Return the first rung that fits, and its room.

    Ranks that meet in every layer cannot repeat a step that lacks memory, so the whole margin stays free. One
    process can, so half of the margin is left if all layers run again.

    Raises:
        TreepackError: no rung fits.
    """
    options = given.options
    values = {name: getattr(options, name) for name in PLANNED if getattr(options, name) != "auto"}
    if values.get("checkpoint_layers") == "all":
        values["checkpoint_layers"] = probe.num_layers
    measured, room = ClimbInput(probe, given.rows(), values), _room(given, memory)
    may_carry = options.carry is not None and measured.rows.longest_of_all > (options.piece_limit or SMALLEST_PIECE)
    for part in (1, 0.5, 0.25, 0):
        margin = int(part * memory.margin)
        less = margin if given.ranks.grouped else margin // 2
        own = replace(room, gpu=room.gpu - less, spare=less)
        plan = climb(measured, own)
        if plan is None and may_carry and can_carry(given.loaded):
            measured = replace(measured, carries=True)
            plan = climb(measured, own)
        if plan is not None:
            return plan, own.without_moments() if plan.offload_optimizer and room.moments else own
    raise climb_error(measured, room)


def _room(given: MemoryInput, memory: StepMemory) -> RunRoom:
    """Return the free memory of the smallest rank beside gradients and moments."""
    loaded, ranks, options = given.loaded, given.ranks, given.options
    torch.cuda.empty_cache()
    gpu, whole = memory.meter.free() - coming_bytes(loaded, options), 2 * whole_bytes(loaded)
    if options.whole_weights is True and _may_keep_whole(given):
        gpu -= whole
    lower, layers = given.compute.dtype == "bf16", len(find_layers(loaded.causal))
    moved = sum(moved_tensors(loaded, recomputed=layers, lower=lower)) // max(1, layers) if layers else 0
    # A checkpoint copies weights and moments to host memory, which it keeps for the next one.
    copied = 4 + options.state_bytes if options.checkpoint_every else 0
    saved = update_bytes(loaded.model, state_bytes=copied, gradients=False)
    host = ranks.smallest(max(0, host_room() - saved))
    moments = ranks.smallest(update_bytes(loaded.model, state_bytes=STATE_BYTES, gradients=False))
    if options.offload_optimizer != "auto":  # nothing moves, but host memory may have them already
        host, moments = max(0, host - moments) if options.offload_optimizer else host, 0
    cost = moments / HOST_RATE * len(given.data.schedule) / max(1.0, given.tokens)
    moments, whole = moments if moments <= host else 0, 0 if loaded.root is None else whole
    return RunRoom(ranks.smallest(max(0, gpu)), host, moved, moments, cost, whole=whole)


def _probe(given: MemoryInput, memory: StepMemory) -> tuple[ModelProbe, str]:
    """Return the faster of layers as they are and compiled, measured now or in an earlier run, and the reason."""
    wanted, chunk, ranks = given.options.compile, given.options.loss_chunk, given.ranks
    chunk, autocast = CHUNK if chunk == "auto" else int(chunk), given.compute.lower_precision
    batch = given.longest_batch()
    passes = TrialPasses(given.loaded, batch, min(chunk, CHUNK), autocast, memory.meter, ranks.largest)
    # The first rank decides, because machines have records of their own.
    known = ranks.lead(lambda: known_probes(given, chunk))
    plain, fused = known or (_plain_probe(given, passes), None)
    about, seconds = "in an earlier run", given.tokens * plain.seconds_kept
    if wanted is False:
        about, fused = "", None
    elif not plain.num_layers and wanted == "auto":
        about, fused = "off: the model has no layers to compile", None
    elif wanted == "auto" and not pays(seconds, plain, fused):
        about, fused = f"off: it would take longer than the run, which needs about {seconds:.0f} s without it", None
    else:
        if fused is None:
            fused, about = _compiled_probe(given, memory, passes, plain)
        if fused is None:
            if wanted is True:
                raise TreepackError(f"torch.compile failed ({about}); train with --no-compile")
            about = f"off: torch.compile failed ({about})"
        else:
            about = f"{1e6 * fused.seconds_kept:.1f} us for a token instead of {1e6 * plain.seconds_kept:.1f}, {about}"
    if known is None or (known[1] is None and fused is not None):
        ranks.lead(lambda: keep_probes(given, chunk, plain, fused))
    faster = fused is not None and (wanted is True or fused.seconds_kept < plain.seconds_kept)
    return fused if fused is not None and faster else plain, about


def _plain_probe(given: MemoryInput, passes: TrialPasses) -> ModelProbe:
    """Measure layers as they are."""
    _log.info("measuring memory and time of a pass")
    if has_compiled_layers(given.loaded.causal):
        adapt(given.loaded.causal, replace(given.options, compile=False), given.loaded.device)
    with memory_errors(*_NO_ROOM):
        return probe_model(passes)


def _compiled_probe(
    given: MemoryInput, memory: StepMemory, passes: TrialPasses, plain: ModelProbe
) -> tuple[ModelProbe | None, str]:
    """Compile and measure the layers; return the probe and its time in words, or None and the problem of a rank."""
    causal, start, fused, problem = given.loaded.causal, memory.meter.clock(), None, ""
    kept, layers = 0, plain.num_layers
    with suppress(TreepackError):
        kept = layers - _climbed(given, memory, plain)[0].checkpoint_layers
    # Compiled layers keep about half as much, so a plan that keeps half of them may keep all when they are compiled.
    # The layers of a hybrid differ, and mostly repeat after four.
    kept = layers if 2 * kept >= layers else min(layers, -(-kept // 4) * 4)
    # With bf16 sent between ranks, the weights of layers are the casts themselves, and are dropped after the layer.
    lower = given.compute.dtype == "bf16" and not (given.loaded.root and given.options.gather_dtype == "bf16")
    _log.info("compiling the layers")
    try:
        adapt(causal, replace(given.options, compile=True), given.loaded.device)
        with memory_errors(*_NO_ROOM):
            fused = probe_compiled(passes, plain, layers - kept, casts=cast_bytes(causal) if lower else 0)
    except compiler_errors() as error:
        problem = str(error).strip().partition("\n")[0]
    if given.ranks.any(fused is None):
        adapt(causal, replace(given.options, compile=False), given.loaded.device)
        return None, problem or "on another rank"
    return fused, f"after {memory.meter.clock() - start:.0f} s of compilation and measurement"
