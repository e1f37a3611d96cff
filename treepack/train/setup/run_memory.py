"""The last stage of opening: values for the options that are "auto", chosen together from measured bytes and seconds.

    MemoryInput: data, model and options --choose_memory--> MemoryChoices

    model_probe    passes over whole rows, with layers as they are; compiled too, if the run is long enough
    piece_probe    rows in pieces, if whole rows must recompute layers
    run_plan       the fastest plan that fits
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
from treepack.fit.limit import SMALLEST_PIECE, CarryCosts
from treepack.fit.pass_memory import ModelProbe
from treepack.fit.rung import PLANNED, RunPlan
from treepack.memory.device_memory import StepMemory, update_bytes
from treepack.memory.offload import LayerOffload
from treepack.memory.shortage import memory_errors
from treepack.model.layers import (
    adapted_layers,
    compiler_errors,
    find_layers,
    has_compiled_layers,
    recomputed_layers,
    set_recomputed,
)
from treepack.model.loaded import LoadedModel
from treepack.train.options import CHUNK, STATE_BYTES, TrainOptions
from treepack.train.setup.choice_lines import choice_lines
from treepack.train.setup.host_memory import host_room, moved_tensors, reserve_host
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.model_probe import agreed, cast_bytes, probe_model
from treepack.train.setup.piece_probe import measured_pieces
from treepack.train.setup.probe_record import ProbeRecord, keep_probes, known_probes, pays
from treepack.train.setup.run_plan import (
    HOST_RATE,
    PlanForecast,
    PlanInput,
    RunRoom,
    RunRows,
    choose_plan,
    choose_room,
    layer_counts,
    pieces_may_win,
)
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
    elif _is_planned(given):
        plan = plan_of(given)
        memory = _with_recorded(given, plan, memory)
    else:
        plan, lines, memory = _Planner(given, memory).plan()
    _apply_plan(loaded, options, plan)
    adapted, notes = adapted_layers(loaded.causal), tuple[str, ...]()
    if plan.offload_checkpoints and adapted is not None and adapted.recomputed > 0:
        lower = given.compute.dtype == "bf16"
        notes = (reserve_host(loaded, adapted, _longest_pass(given, plan), lower=lower),)
    return MemoryChoices(plan, memory, _carry_memory(given, plan), lines, notes)


def coming_bytes(loaded: LoadedModel, options: TrainOptions, *, states: bool = True) -> int:
    """Return the bytes that the next update allocates on this rank: gradients, and with `states` the moments."""
    on_gpu = states and options.offload_optimizer is not True
    return update_bytes(loaded.model, state_bytes=STATE_BYTES if on_gpu else 0)


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


def _is_planned(given: MemoryInput) -> bool:
    """Return True if options of passes have values, and no row runs in pieces, whose memory would be measured."""
    options = given.options
    cut = options.piece_limit is not None and given.rows().longest_of_all > options.piece_limit
    return not cut and all(getattr(options, name) != "auto" for name in PLANNED if name != "offload_optimizer")


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


class _Planner:
    """The measurements of a run, one after the other, as far as the plan needs them."""

    def __init__(self, given: MemoryInput, memory: StepMemory) -> None:
        self.given, self.memory, self.meter = given, memory, memory.meter
        self.record: ProbeRecord  # all measurements
        self.rows: RunRows = given.rows()
        self.batch = given.longest_batch()
        self.chunk = CHUNK if given.options.loss_chunk == "auto" else int(given.options.loss_chunk)

    def plan(self) -> tuple[RunPlan, tuple[str, ...], StepMemory]:
        """Return the plan, a line for every choice, and the memory of the plan."""
        given = self.given
        try:
            probes, about_compilation = self._probes()
            plan, room, measured = self._choose(probes)
        finally:
            given.loaded.model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        probe = measured.probe_of(plan)
        whole, wanted = 2 * whole_bytes(given.loaded), given.options.whole_weights is True
        if wanted and _may_keep_whole(given):
            room = replace(room, gpu=room.gpu + whole)
        # Rows in pieces gather the whole weights in any case, and one pass a step gathers them once.
        repeated = plan.pieces is None and self.rows.step_tokens > max(plan.pass_tokens, self.rows.longest_of_all)
        if _may_keep_whole(given) and (wanted or (repeated and plan.num_bytes + whole <= room.gpu)):
            plan = replace(plan, whole_weights=True, num_bytes=plan.num_bytes + whole)
        lines = choice_lines(plan, measured, room, given, about_compilation)
        forecast = PlanForecast(probe, self.rows, room.moved, whole)
        memory = replace(self.memory, needed=plan.num_bytes, record=forecast.as_record(), forecast=forecast.num_bytes)
        return plan, lines, memory

    def _choose(self, probes: list[ModelProbe]) -> tuple[RunPlan, RunRoom, PlanInput]:
        # Ranks that meet in every layer cannot repeat a step that lacks memory, so as much as possible stays free.
        for part in (1, 0.5, 0.25):
            with suppress(TreepackError):
                return self._choose_within(int(part * self.memory.margin), probes)
        return self._choose_within(0, probes)

    def _choose_within(self, margin: int, probes: list[ModelProbe]) -> tuple[RunPlan, RunRoom, PlanInput]:
        """Return the plan, its room, and the measurements, with so much memory left.

        One process can repeat a step, so half of that may be left for a faster plan that recomputes all layers.
        """
        options, measured = self.given.options, PlanInput(probes, self.rows, self.given.options)
        rooms = [self._room(margin)]
        if not self.given.ranks.grouped:
            rooms.append(replace(self._room(margin // 2), spare=margin - margin // 2))
        found = None
        with suppress(TreepackError):
            found = choose_room(measured, rooms)
        whole = None if found is None else found[0]
        wanted = options.piece_limit is not None and self.rows.longest_of_all > options.piece_limit
        if wanted or (options.carry == "auto" and pieces_may_win(whole, measured) and self._can_carry()):
            rows = replace(self.rows, longest_path=self.given.longest_path())
            found, measured = None, replace(measured, rows=rows, pieces=self._pieces(probes[0].num_layers))
        plan, room = found or choose_room(measured, rooms)
        return plan, room.without_moments() if plan.offload_optimizer else room, measured

    def _room(self, margin: int) -> RunRoom:
        """Return the free memory of the smallest rank beside gradients and moments, and beside `margin` bytes."""
        given, loaded = self.given, self.given.loaded
        torch.cuda.empty_cache()
        gpu = self.meter.free() - coming_bytes(loaded, given.options) - margin
        if given.options.whole_weights is True and _may_keep_whole(given):
            gpu -= 2 * whole_bytes(loaded)
        lower = given.compute.dtype == "bf16"
        layers = len(find_layers(loaded.causal))
        moved = sum(moved_tensors(loaded, recomputed=layers, lower=lower)) // max(1, layers) if layers else 0
        away = given.options.offload_optimizer
        # A checkpoint copies weights and moments to host memory, which it keeps for the next one.
        copied = 4 + STATE_BYTES if given.options.checkpoint_every else 0
        saved = update_bytes(loaded.model, state_bytes=copied, gradients=False)
        host = given.ranks.smallest(max(0, host_room() - saved))
        moments = given.ranks.smallest(update_bytes(loaded.model, state_bytes=STATE_BYTES, gradients=False))
        if away != "auto":  # nothing moves, but host memory may have them already
            host, moments = max(0, host - moments) if away else host, 0
        cost = moments / HOST_RATE * len(given.data.schedule) / max(1.0, given.tokens)
        spare = margin if loaded.root is not None else 0
        return RunRoom(given.ranks.smallest(max(0, gpu)), host, moved, moments if moments <= host else 0, cost, spare)

    def _probes(self) -> tuple[list[ModelProbe], str]:
        """Return layers as they are, compiled, or both, measured now or in an earlier run, and the reason."""
        given, wanted = self.given, self.given.options.compile
        # The first rank decides, because machines have records of their own.
        self.record = given.ranks.lead(lambda: known_probes(given, self.chunk)) or self._plain_record()
        plain, fused, about = self.record.plain, self.record.fused, "in an earlier run"
        seconds = given.tokens * plain.seconds_kept
        if wanted is False:
            return [plain], ""
        if not plain.num_layers and wanted == "auto":
            return [plain], "off: the model has no layers to compile"
        if wanted == "auto" and not pays(seconds, self.record):
            return [plain], f"off: it would take longer than the run, which needs about {seconds:.0f} s without it"
        if fused is None or not self._has_graphs(fused, self.record.only):
            fused, about = self._compiled_probe(plain)
        if fused is None:
            if wanted is True:
                raise TreepackError(f"torch.compile failed ({about}); train with --no-compile")
            return [plain], f"off: torch.compile failed ({about})"
        rates = f"{1e6 * fused.seconds_kept:.1f} us for a token instead of {1e6 * plain.seconds_kept:.1f}"
        return [fused] if wanted is True else [plain, fused], f"{rates}, {about}"

    def _plain_record(self) -> ProbeRecord:
        """Measure layers as they are, and keep the numbers."""
        given = self.given
        _log.info("measuring memory and time of a pass")
        if has_compiled_layers(given.loaded.causal):
            adapt(given.loaded.causal, replace(given.options, compile=False), given.loaded.device)
        self._keep(ProbeRecord(self._probe()))
        return self.record

    def _keep(self, record: ProbeRecord) -> None:
        self.record = record
        if self.given.ranks.leads:  # the one that reads it
            keep_probes(self.given, self.chunk, record)

    def _compiled_probe(self, plain: ModelProbe) -> tuple[ModelProbe | None, str]:
        """Compile and measure the layers; return the probe and its time in words, or None and the problem of a rank."""
        given, start = self.given, self.meter.clock()
        _log.info("compiling the layers")
        record, problem = None, ""
        try:
            adapt(given.loaded.causal, replace(given.options, compile=True), given.loaded.device)
            record = self._fused_record(plain)
        except compiler_errors() as error:
            problem = str(error).strip().partition("\n")[0]
        if given.ranks.any(record is None) or record is None:
            adapt(given.loaded.causal, replace(given.options, compile=False), given.loaded.device)
            return None, problem or "on another rank"
        self._keep(record)
        return record.fused, f"after {self.meter.clock() - start:.0f} s of compilation and measurement"

    def _fused_record(self, plain: ModelProbe) -> ProbeRecord:
        """Measure compiled layers that keep their activations, or run again; both, two graphs, only if the run does."""
        planned, pieces = self._recomputed(plain), self.record.pieces
        # Compiled layers keep about half as much, so a plan that keeps few layers as they are keeps some compiled ones.
        if not plain.num_layers / 2 < planned < plain.num_layers:
            count = plain.num_layers if planned in (-1, plain.num_layers) else 0
            fused = self._probe(plain, counts=(count,))
            if self._has_graphs(fused, count):
                return ProbeRecord(plain, fused, count, pieces)
        return ProbeRecord(plain, self._probe(plain), pieces=pieces)

    def _has_graphs(self, probe: ModelProbe, only: int | None) -> bool:
        """Return True if the plan by this probe uses no graph that was not measured."""
        return only is None or self._recomputed(probe) == only

    def _recomputed(self, probe: ModelProbe) -> int:
        """Return the recomputed layers of the plan of whole rows, -1 if none fits."""
        with suppress(TreepackError):
            given = PlanInput([probe], self.rows, self.given.options)
            return choose_plan(given, self._room(self.memory.margin)).checkpoint_layers
        return -1

    def _probe(self, plain: ModelProbe | None = None, *, counts: tuple[int, ...] | None = None) -> ModelProbe:
        given = self.given

        # With bf16 sent between ranks, the weights of layers are the casts themselves, and are dropped after the layer.
        lower = given.compute.dtype == "bf16" and not (given.loaded.root and given.options.gather_dtype == "bf16")

        def fits(num_bytes: int) -> bool:
            return not given.ranks.any(num_bytes > 0.95 * self.meter.free())

        with memory_errors(*_NO_ROOM):
            probe = probe_model(
                given.loaded,
                self.batch,
                compiled=plain is not None,
                chunk=self.chunk,
                autocast=given.compute.lower_precision,
                meter=self.meter,
                fits=fits,
                on_any=given.ranks.any,
                plain=plain,
                counts=counts,
                casts=cast_bytes(given.loaded.causal) if lower and plain is not None else 0,
            )
        return agreed(probe, given.ranks)

    def _can_carry(self) -> bool:
        """Return True if rows can run in pieces; then the routers of a mixture are followed from now on."""
        given, loaded = self.given, self.given.loaded
        if self.rows.longest_of_all <= SMALLEST_PIECE:
            return False
        # Every rank gathers the whole weights, and keeps whole gradients.
        if loaded.root is not None and given.ranks.any(2 * whole_bytes(loaded) > self.meter.free()):
            return False
        return can_carry(loaded)

    def _pieces(self, num_layers: int) -> dict[int, CarryCosts]:
        """Return the costs of rows in pieces with every layer recomputed and with none, or with the given number."""
        given, loaded, record = self.given, self.given.loaded, self.record
        counts = sorted({*layer_counts(given.options, num_layers, (0, num_layers))})
        for count in (each for each in counts if each not in record.pieces):
            _log.info("measuring the memory of pieces with %d recomputed layers", count)
            # Without compilation, of whose code for such short pieces a run would use nothing; it needs less memory.
            with recomputed_layers(loaded.causal, count), torch.compiler.set_stance("force_eager"):
                costs = measured_pieces(given, self.batch, self.chunk)
            if costs is not None:
                record.pieces[count] = costs
                self._keep(record)
        return {count: record.pieces[count] for count in counts if count in record.pieces}


def _carry_memory(given: MemoryInput, plan: RunPlan) -> CarryMemory | None:
    """Return the memory of carried tensors; None on a CPU, and if no row of the run is cut."""
    device = given.loaded.device
    if device.type != "cuda" or plan.carry is None or given.rows().longest_of_all <= plan.carry:
        return None
    return spare_memory(device) if plan.pieces is None else CarryMemory(device, plan.pieces.budget)
