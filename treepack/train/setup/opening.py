"""Open a training run: data, model and options, checked before the first step, in five stages.

    options                   --choose_compute-->  ComputeSetting    device and dtype
    packed, options           --open_data-->       RunData           rows, steps, blocks; the same for held-out rows
    model, RunData            --choose_ranks-->    TrainOptions      ranks of a row and of experts, if there are several
    model, options            --load_run_model-->  LoadedModel       its layers as in the options
    RunData, LoadedModel      --check_fit-->       RunFit            files to save and notes
    all of these              --choose_memory-->   MemoryChoices     one plan for all options that are "auto"
    everything                --open_run-->        TrainingRun       built once, here

Unsuitable data, models and options are refused, the cheap checks first: data opens in seconds, and a large model loads
in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from treepack.carry.refusal import check_carry
from treepack.files.remote.address import AnyPath
from treepack.memory.device_memory import MemoryMeter, gpu_meter
from treepack.memory.shortage import memory_errors
from treepack.model.adapters.adapter import assign, initial_weights
from treepack.model.experts.router_balance import RouterBalance
from treepack.model.layers import adapt_layers
from treepack.model.load import load_model
from treepack.model.stored_weights import check_types
from treepack.sequence.share import share_rows
from treepack.train.input_checks import check_expert_ranks
from treepack.train.optimiser import check_optimizer
from treepack.train.options import CHUNK, TrainOptions
from treepack.train.ranks import Ranks, find_device
from treepack.train.run import Packed, TrainingRun
from treepack.train.saving.choices import recorded_memory, with_recorded
from treepack.train.saving.run_record import files_sha256, package_entry
from treepack.train.setup.compute import choose_compute
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.rank_choice import choose_ranks
from treepack.train.setup.run_data import RunData, choose_old_logprobs, open_data, open_held_out
from treepack.train.setup.run_memory import choose_memory
from treepack.train.setup.run_model import NO_ROOM, check_fit, check_stored_use, load_run_model
from treepack.train.setup.run_teacher import load_teacher


def open_run(
    packed: Packed,
    model: str | Path,
    options: TrainOptions,
    ranks: Ranks | None = None,
    *,
    held_out: Packed | None = None,
    meter: MemoryMeter | None = None,
    recorded: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingRun:
    """Open the data, load the model, and check that they fit together.

    Args:
        packed: a packed directory, or several; see `TrainOptions.mix`.
        model: a model directory, hub name or config file; see `model.load.load_model`.
        options: options of the run.
        ranks: the processes over which the model is sharded; by default this process alone.
        held_out: a packed directory, or several, whose loss is computed every `options.eval_every` steps.
        meter: memory and clock to measure, by default of the GPU; on a CPU nothing is measured.
        recorded: measurements of the run that this one continues, from `choices.recorded_memory`.

    Raises:
        TreepackError: the device is missing, the data is damaged, the model is not supported, the data does not fit the
            model, or memory is too small.
    """
    ranks, compute = (ranks or Ranks()).sharing(options.ranks_of_row), choose_compute(options)
    check_expert_ranks(options.ranks_of_experts, ranks.size, grouped=ranks.grouped)
    check_optimizer(options, ranks.size)
    data = open_data(packed, options, ranks)
    evaluated = None if held_out is None else open_held_out(held_out, options, ranks, blocks=data.blocks)
    options, data = choose_old_logprobs(options, data, evaluated)
    check_stored_use(model, options, compute.device)
    # A machine that has opened the data before waits here for one that has not, by gloo, which waits 30 minutes. The
    # first collective of NCCL would wait 10 minutes. Ranks may name different devices.
    same = {name: value for name, value in options.as_record().items() if name != "device"}
    ranks.require_same({**same, **package_entry(options), "data": files_sha256(data.dataset.manifest["files"])})
    if meter is None and compute.device.type == "cuda":
        meter = gpu_meter(compute.device)
    options = replace(options, dtype=compute.dtype, blocks=data.blocks)
    options, chosen = choose_ranks(model, options, data, ranks, meter)
    ranks = ranks.sharing(options.ranks_of_row)
    loaded = load_run_model(model, options, compute, ranks)
    balance = RouterBalance(loaded.causal, options.router_aux, source=loaded.source) if options.router_aux else None
    fit = check_fit(data, loaded, options, balance=balance, held_out=evaluated)
    teacher = load_teacher(options, compute.device, compute.autocast or torch.float32, data.dataset, loaded)
    memory = choose_memory(MemoryInput(data, evaluated, loaded, options, compute, ranks, meter, recorded))
    make = partial(
        TrainingRun,
        loaded=loaded,
        options=replace(options, **memory.plan.options),
        ranks=ranks,
        memory=memory.memory,
        carry_memory=memory.carry_memory,
        choices=(*chosen, *memory.lines),
        teacher=teacher,
    )
    return make(
        **_rows_of(data),
        files=fit.files,
        notes=(*fit.notes, *chosen, *memory.lines, *memory.notes),
        rewards=fit.rewards,
        balance=balance,
        held_out=None if evaluated is None else make(**_rows_of(evaluated)),
    )


def _rows_of(data: RunData) -> dict[str, Any]:
    return {name: getattr(data, name) for name in ("dataset", "schedule", "table", "division")}


def resume_run(
    packed: Packed,
    model: str | Path,
    options: TrainOptions,
    out: AnyPath,
    ranks: Ranks,
    *,
    held_out: Packed | None = None,
    meter: MemoryMeter | None = None,
) -> TrainingRun:
    """Open the run that continues the one in `out`, as `open_run`.

    The numbers that the run in `out` has chosen replace "auto".

    Raises:
        TreepackError: as `open_run`, or the store of `out` cannot be reached.
    """
    options = with_recorded(options, out, ranks)
    recorded = recorded_memory(options, out, ranks)
    return open_run(packed, model, options, ranks, held_out=held_out, meter=meter, recorded=recorded)


def open_verification(packed: Packed, model: str | Path, options: TrainOptions) -> TrainingRun:
    """Open a run for `verify_gradients`: in float64, or in float32 if a fused kernel has no float64.

    With `sequence_ranks`, all processes of the process group compute every row together; each has the whole model.

    Raises:
        TreepackError: as `open_run`.
    """
    check_expert_ranks(options.ranks_of_experts, 1, grouped=False)
    device = find_device(options.device)
    is_stored = check_stored_use(model, options, device)
    # Only the reference implementation, and FlexAttention on a CPU, compute in float64; "auto" is one of them there.
    exact = options.attention == "reference" or (device.type == "cpu" and options.attention in ("auto", "flex"))
    exact = exact and not is_stored and not (options.lora is not None and options.lora.quantize)  # no float64 products
    weights = torch.float64 if exact else torch.float32
    compute = choose_compute(options, weights=weights)
    options, data = choose_old_logprobs(options, open_data(packed, options, Ranks()))
    with memory_errors(*NO_ROOM):
        loaded = load_model(
            model,
            attention=options.attention,
            dtype=weights,
            device=device,
            seed=options.seed,
            lora=options.lora,
            value_head=options.objective.has_values,
            random_head=True,
            dequantize=options.dequantize,
        )
    check_types(loaded.source, loaded.causal)
    if options.lora is not None and options.lora.rank is not None:
        # A new adapter has B = 0, so the gradient of A is 0 and any error of it would pass.
        assign(loaded.model, initial_weights(loaded.model, options.seed, random_b=True), weights)
    if options.ranks_of_row > 1:
        share_rows(loaded.causal, torch.distributed.group.WORLD)
    # `verify_rows` recomputes the layers if that is needed.
    adapt_layers(loaded.causal, checkpointing=False, compiled=options.compile is True)
    fit = check_fit(data, loaded, options)
    if options.piece_limit is not None:
        check_carry(loaded)
    usual: dict[str, Any] = {"carry": None, "loss_chunk": CHUNK, "pass_tokens": 1}
    chosen = {name: value for name, value in usual.items() if getattr(options, name) == "auto"}
    return TrainingRun(
        **_rows_of(data),
        loaded=loaded,
        options=replace(options, dtype=compute.dtype, **chosen),
        files=fit.files,
        notes=fit.notes,
        rewards=fit.rewards,
        teacher=load_teacher(options, device, weights, data.dataset, loaded),
    )
