"""Open a training run: data, model and options, checked before the first step.

open_run(packed, model, options, ranks) -> TrainingRun     unsuitable data, models and options are refused here
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.attention import resolve, row_multiple
from treepack.data.mixture import AnyDataset, open_packed, sources_of
from treepack.errors import TreepackError
from treepack.files.manifest import TokenizerEntry
from treepack.ingest.tokenization import load_tokenizer
from treepack.memory.shortage import memory_errors
from treepack.model.accept.compatibility import check_fits, position_limit
from treepack.model.accept.saved_tokenizer import saved_tokenizer
from treepack.model.adapters.adapter import adapter_base, assign, check_trainable, initial_weights, is_adapted
from treepack.model.adapters.four_bits import num_weights
from treepack.model.experts.replay import check_routes
from treepack.model.experts.router_balance import RouterBalance
from treepack.model.head.value_head import VALUE_FILE, has_saved_head, without_value_head
from treepack.model.layers import adapt_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.objectives.denominators import TrajectoryTable, check_columns, trainable_rows, trajectory_table
from treepack.model.weights.whole_checkpoint import check_savable, has_rest
from treepack.train.division import choose_blocks, divide_rows
from treepack.train.layer_choice import adapt, choose_layers
from treepack.train.optimiser import check_optimizer
from treepack.train.options import TrainOptions
from treepack.train.pieces import choose_piece_size, choose_pieces
from treepack.train.ranks import Ranks, find_device
from treepack.train.run import Packed, TrainingRun
from treepack.train.saving.saved_model import repair_generation_config
from treepack.train.schedule import OptimiserStep, plan_steps
from treepack.train.setup.initial_weights import find_weights
from treepack.train.setup.pass_choice import choose_pass_tokens
from treepack.train.setup.reward_sums import sum_rewards
from treepack.train.sharding import load_sharded

_log = logging.getLogger("treepack")

_NO_ROOM = (
    "while the model was loaded",
    "free the memory that other processes use there, or train on more GPUs, or under torchrun with --cpu-offload",
)


def open_run(
    packed: Packed,
    model: str | Path,
    options: TrainOptions,
    ranks: Ranks | None = None,
    *,
    held_out: Packed | None = None,
) -> TrainingRun:
    """Open the data, load the model, and check that they fit together.

    Args:
        packed: a packed directory, or several; see `TrainOptions.mix`.
        model: a model directory, hub name or config file; see `model.load.load_model`.
        options: options of the run.
        ranks: the processes over which the model is sharded; by default this process alone.
        held_out: a packed directory, or several, whose loss is computed every `options.eval_every` steps.

    Raises:
        TreepackError: the device is missing, the data is damaged, the model is not supported, the data does not fit the
            model, or the host has too little memory for `offload_checkpoints`.
    """
    ranks, device = ranks or Ranks(), find_device(options.device)
    options = options.with_dtype(device)
    check_attention(options.attention, device, torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    if options.lora is not None:
        check_trainable(model, options.lora, sharded=ranks.grouped)
    check_optimizer(options, ranks)
    # The data first: it opens in seconds, and a large model loads in minutes.
    dataset, table = _open_rows(packed, options)
    rows = trainable_rows(dataset, table)
    blocks, notes = choose_blocks(dataset, rows, options, ranks)
    options = replace(options, blocks=blocks)
    schedule = plan_steps(dataset, options, table)
    division = divide_rows(dataset, rows, blocks, ranks)
    evaluated = None if held_out is None else _open_held_out(held_out, options)
    # A machine that has opened the data before waits here for one that has not, by gloo, which waits 30 minutes. The
    # first collective of NCCL would wait 10 minutes.
    ranks.any(False)
    loaded = _load(model, options, ranks, device)
    run = TrainingRun(
        dataset=dataset,
        loaded=loaded,
        options=options,
        schedule=schedule,
        tokenizer=None,
        notes=notes,
        table=table,
        ranks=ranks,
        division=division,
    )
    if options.router_aux:
        run = replace(run, balance=RouterBalance(loaded.causal, options.router_aux, source=loaded.source))
    if evaluated is not None:
        held_dataset, held_table, held_schedule = evaluated
        # All held-out rows are one step, whatever training steps they have.
        held_rows, no_steps = np.array(held_schedule[0].rows), [None] * len(held_dataset)
        division = divide_rows(held_dataset, held_rows, blocks, ranks, steps=no_steps)
        held = replace(
            run,
            dataset=held_dataset,
            schedule=held_schedule,
            notes=(),
            table=held_table,
            balance=None,
            division=division,
        )
        _check_rows(held)
        run = replace(run, held_out=held)
    return choose_pass_tokens(choose_layers(choose_pieces(_check_fit(run))))


def _load(model: str | Path, options: TrainOptions, ranks: Ranks, device: torch.device) -> LoadedModel:
    """Load the model, whole or sharded over the ranks, with the initial weights that the options name.

    Raises:
        TreepackError: as `open_run`, about the model.
    """
    lower = torch.bfloat16 if options.dtype == "bf16" else None
    initial = None if options.init_from is None else find_weights(options.init_from, model)
    source = model if initial is None else initial.source
    with memory_errors(*_NO_ROOM):
        if ranks.grouped:
            loaded = load_sharded(source, options, device)
        else:
            loaded = load_model(
                source,
                attention=options.attention,
                autocast=lower,
                device=device,
                seed=options.seed,
                lora=options.lora,
                value_head=options.objective.has_values,
            )
            adapt(loaded.causal, options, device)
        if initial is not None:
            initial.fill(loaded.model)
            loaded = replace(loaded, source=str(model), notes=(*loaded.notes, initial.note))
            if has_rest(loaded.causal, model):
                with without_value_head(loaded.causal):
                    check_savable(loaded.causal, model)  # the names in its files may differ from those of the weights
    return loaded


def open_verification(packed: Packed, model: str | Path, options: TrainOptions) -> TrainingRun:
    """Open a run for `verify_gradients`: in float64, or in float32 if a fused kernel has no float64.

    Raises:
        TreepackError: as `open_run`.
    """
    device = find_device(options.device)
    # Only the reference implementation, and FlexAttention on a CPU, compute in float64; "auto" is one of them there.
    exact = options.attention == "reference" or (device.type == "cpu" and options.attention in ("auto", "flex"))
    exact = exact and not (options.lora is not None and options.lora.quantize)  # no products in float64
    weights = torch.float64 if exact else torch.float32
    options = options.with_dtype(device)
    check_attention(options.attention, device, weights)
    dataset, table, schedule = _open_data(packed, options)
    with memory_errors(*_NO_ROOM):
        loaded = load_model(
            model,
            attention=options.attention,
            dtype=weights,
            device=device,
            seed=options.seed,
            lora=options.lora,
            value_head=options.objective.has_values,
            random_head=True,
        )
    if options.lora is not None and options.lora.rank is not None:
        # A new adapter has B = 0, so the gradient of A is 0 and any error of it would pass.
        assign(loaded.model, initial_weights(loaded.model, options.seed, random_b=True), weights)
    options = choose_piece_size(options, loaded)
    # `verify_rows` recomputes the layers if that is needed.
    adapt_layers(loaded.causal, checkpointing=False, compiled=options.compile)
    run = TrainingRun(
        dataset=dataset, loaded=loaded, options=options, schedule=schedule, tokenizer=None, notes=(), table=table
    )
    return _check_fit(run)


def check_attention(attention: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse an implementation that cannot run on a device in a dtype, before a model is loaded.

    Raises:
        TreepackError: with the reason.
    """
    if attention != "auto":
        resolve(attention, device, dtype)  # the head dimensions are checked when the model is loaded


def count_steps(packed: Packed, options: TrainOptions) -> int:
    """Return the number of optimiser steps of a run, without its model.

    Raises:
        TreepackError: as `open_run`, about the data.
    """
    return len(_open_data(packed, options)[2])


def _open_data(packed: Packed, options: TrainOptions) -> tuple[AnyDataset, TrajectoryTable | None, list[OptimiserStep]]:
    dataset, table = _open_rows(packed, options)
    return dataset, table, plan_steps(dataset, options, table)


def _open_held_out(
    packed: Packed, options: TrainOptions
) -> tuple[AnyDataset, TrajectoryTable | None, list[OptimiserStep]]:
    """Open rows to evaluate on; their schedule is one step with all of them.

    Raises:
        TreepackError: the data is damaged, or no row has weight.
    """
    dataset, table = _open_rows(packed, options)
    rows = [int(row) for row in trainable_rows(dataset, table)]
    if not rows:
        raise TreepackError(f"{dataset.path}: no row has a trained token; there is nothing to evaluate on")
    return dataset, table, [OptimiserStep(0, rows)]


def _open_rows(packed: Packed, options: TrainOptions) -> tuple[AnyDataset, TrajectoryTable | None]:
    _log.info("opening %s", packed if isinstance(packed, str | Path) else ", ".join(map(str, packed)))
    objective = options.objective
    # sft reads loss weights of tokens, not terms
    dataset = open_packed(packed, terms=objective.loss != "sft", routes=options.routes == "replay")
    check_columns(dataset, objective)
    return dataset, None if objective.loss == "sft" else trajectory_table(dataset, objective)


def _check_rows(run: TrainingRun) -> None:
    """Check that model and data fit together, and pad rows as the attention of the model prefers.

    Raises:
        TreepackError: the data does not fit the model.
    """
    dataset, loaded = run.dataset, run.loaded
    dataset.multiple = row_multiple(loaded.attention)
    # The largest position is read from all rows, which takes time: only for models whose positions end somewhere.
    positions = dataset.max_position() if position_limit(loaded.causal) else 0
    check_fits(
        loaded,
        max_token_id=dataset.manifest["max_token_id"],
        tokenizer=dataset.manifest.get("tokenizer"),
        max_position=positions,
    )


def _check_fit(run: TrainingRun) -> TrainingRun:
    """Check that model and data fit together, and return the run with its tokenizer and notes.

    Raises:
        TreepackError: the data does not fit the model.
    """
    dataset, loaded, objective = run.dataset, run.loaded, run.options.objective
    _check_rows(run)
    _check_routes(run)
    tokenizer, notes = _tokenizer(loaded, dataset.manifest.get("tokenizer"))
    notes = (*notes, *repair_generation_config(loaded.causal), *_adapter_notes(run), *_router_notes(run), *run.notes)
    if not objective.has_values and has_saved_head(loaded.source):
        notes = (*notes, f"the model has a {VALUE_FILE}, which is neither trained nor written: the loss has no values")
    num_left_out = len(dataset) - len(run.trainable_rows)
    if num_left_out:
        lacking = "pairs to compare" if objective.loss == "dpo" else "trained tokens"
        notes = (*notes, f"{num_left_out} rows without {lacking} are left out")
    if objective.is_policy and "term_old_logprob" not in dataset.term_columns:
        notes = (*notes, "the rows have no old log-probabilities: every update counts as on-policy, with ratios of 1")
    return replace(run, tokenizer=tokenizer, notes=(*loaded.notes, *notes), rewards=sum_rewards(dataset))


def _check_routes(run: TrainingRun) -> None:
    """Check that the model can replay recorded routes, by the first row of each directory that has some.

    Raises:
        TreepackError: it cannot.
    """
    for source in sources_of(run.dataset):
        if source.routes and source.has_routes and len(source) and (routes := source[0].routes) is not None:
            check_routes(run.loaded.causal, run.loaded.source, routes)


def _adapter_notes(run: TrainingRun) -> tuple[str, ...]:
    model = run.loaded.model
    if not is_adapted(model):
        return ()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(num_weights(parameter) for parameter in model.parameters())
    notes: tuple[str, ...] = (f"an adapter of {trained:,} weights is trained, {trained / total:.2g} of all",)
    base = adapter_base(model)
    if base.endswith(".json"):
        notes = (*notes, f"the base has random weights: the adapter fits load_model({base!r}, seed={run.options.seed})")
    return notes


def _router_notes(run: TrainingRun) -> tuple[str, ...]:
    config, options = run.loaded.causal.config.get_text_config(), run.options
    if run.balance is not None or not getattr(config, "router_aux_loss_coef", None):
        return ()
    if options.router_aux:
        return ("the gradients are compared without the load-balancing loss of the routers",)
    reason = (
        "; --router-aux adds it" if options.objective.loss == "sft" else f", as usual with {options.objective.loss}"
    )
    return (f"the load-balancing loss of the routers is left out{reason}",)


def _tokenizer(loaded: LoadedModel, made_by: TokenizerEntry | None) -> tuple[Any, tuple[str, ...]]:
    """Return the tokenizer to save with the weights (that of the model, else that of the data, else None) and notes."""
    try:
        tokenizer = saved_tokenizer(loaded.source)
        return load_tokenizer(made_by["name"]) if tokenizer is None and made_by is not None else tokenizer, ()
    except TreepackError as error:
        return None, (f"no tokenizer is saved with the model: {error}",)
