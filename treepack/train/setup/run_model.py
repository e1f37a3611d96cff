"""The fourth stage of opening: the model of a run, with the checks that it fits the data.

model, options, ranks --load_run_model--> LoadedModel      whole, or sharded over the ranks; layers as in the options
LoadedModel, RunData --check_fit--> RunFit                 data that does not fit the model is refused here
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from treepack.attention import row_multiple
from treepack.data.dataset import PackedDataset
from treepack.data.mixture import AnyDataset, sources_of
from treepack.data.packed_header import shared_origin
from treepack.files.model_source import VALUE_FILE, local_source
from treepack.memory.shortage import memory_errors
from treepack.model.accept.compatibility import check_fits, position_limit
from treepack.model.accept.vocabulary import find_config
from treepack.model.adapters.adapter import adapter_base, base_of, check_trainable, is_adapted
from treepack.model.experts.active import num_weights
from treepack.model.experts.replay import check_routes
from treepack.model.experts.router_balance import RouterBalance
from treepack.model.head.value_head import has_saved_head, without_value_head
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.stored_weights import check_stored, check_types, stored_kind
from treepack.model.verify.slope import check_stored_slope
from treepack.model.weights.whole_checkpoint import check_savable, has_rest
from treepack.train.options import TrainOptions, stored_use
from treepack.train.ranks import Ranks
from treepack.train.setup.compute import ComputeSetting
from treepack.train.setup.initial_weights import find_weights
from treepack.train.setup.run_data import RunData
from treepack.train.setup.run_files import collect_files
from treepack.train.sharding import adapt, load_sharded
from treepack.trajectory import Float64

NO_ROOM = (
    "while the model was loaded",
    "free the memory that other processes use there, or train on more GPUs",
)


@dataclass(frozen=True)
class RunFit:
    """Results of the check that model and data fit together, as fields of `run.TrainingRun`."""

    files: dict[str, bytes]
    rewards: Float64 | None
    notes: tuple[str, ...]


def check_stored_use(model: str | Path, options: TrainOptions, device: torch.device) -> bool:
    """Refuse a model that the options cannot train, by its configuration; return True if it stays quantised.

    Raises:
        TreepackError: a package is missing, there is nothing to train, or its weights are stored quantised.
    """
    if options.lora is not None:
        check_trainable(model, options.lora)
    base, adapter = base_of(model, options.lora)
    config = find_config(local_source(base)) or {}
    use = stored_use(options, adapted=adapter is not None)
    check_stored(base, config, on_gpu=device.type != "cpu", **use)
    return stored_kind(config) is not None and not options.dequantize


def load_run_model(model: str | Path, options: TrainOptions, compute: ComputeSetting, ranks: Ranks) -> LoadedModel:
    """Load the model, whole or sharded over the ranks, with the initial weights that the options name.

    Raises:
        TreepackError: the model is not supported, or memory is too small.
    """
    initial = (
        None if options.init_from is None else find_weights(options.init_from, model, dequantize=options.dequantize)
    )
    source = model if initial is None else initial.source
    with memory_errors(*NO_ROOM):
        if ranks.grouped:
            loaded = load_sharded(source, options, compute.device)
        else:
            loaded = load_model(
                source,
                attention=options.attention,
                autocast=compute.autocast,
                device=compute.device,
                seed=options.seed,
                lora=options.lora,
                value_head=options.objective.has_values,
                dequantize=options.dequantize,
            )
            check_stored_slope(loaded, compute.autocast or torch.float32, seed=options.seed)
            compute.lower_products(loaded.causal)  # of an adapter's base
            adapt(loaded.causal, options, compute.device)
        check_types(loaded.source, loaded.causal)
        if initial is not None:
            initial.fill(loaded.model)
            loaded = replace(loaded, source=str(model), notes=(*loaded.notes, initial.note))
            if has_rest(loaded.causal, model):
                with without_value_head(loaded.causal):
                    check_savable(loaded.causal, model)  # names in its files may differ from names of the weights
    return loaded


def check_rows_fit(dataset: AnyDataset, loaded: LoadedModel) -> None:
    """Check that the model has the ids, the positions and the tokenizer of rows.

    Raises:
        TreepackError: the rows do not fit the model.
    """
    # The largest position is read from all rows, which takes time: only for models whose positions end somewhere.
    positions = dataset.max_position() if position_limit(loaded.causal) else 0
    check_fits(
        loaded,
        max_token_id=dataset.manifest["max_token_id"],
        tokenizer=dataset.manifest.get("tokenizer"),
        max_position=positions,
    )


def check_fit(
    data: RunData,
    loaded: LoadedModel,
    options: TrainOptions,
    *,
    balance: RouterBalance | None = None,
    held_out: RunData | None = None,
) -> RunFit:
    """Check that model and data fit together, and pad rows as the attention of the model prefers.

    Raises:
        TreepackError: the data does not fit the model, or the model cannot replay the recorded routes.
    """
    dataset, objective = data.dataset, options.objective
    for each in (held_out, data):
        if each is not None:
            each.dataset.multiple = row_multiple(loaded.attention)
            check_rows_fit(each.dataset, loaded)
    _check_routes(dataset, loaded)
    if held_out is not None:
        shared_origin([*sources_of(dataset), *sources_of(held_out.dataset)])
    files, notes = collect_files(loaded, options, data)
    notes = (*loaded.notes, *notes, *_adapter_notes(loaded, options.seed))
    notes = (*notes, *_router_notes(loaded, options, balance), *data.notes)
    if not objective.has_values and has_saved_head(loaded.source):
        notes = (*notes, f"the model has a {VALUE_FILE}, which is neither trained nor written: the loss has no values")
    if objective.kl and objective.kl_estimator == "k1":
        notes = (
            *notes,
            "the gradient of --kl-estimator k1 is 0 in the mean, so it bounds nothing; give k2 or unbiased",
        )
    num_left_out = len(dataset) - len(data.rows)
    if num_left_out:
        lacking = "pairs to compare" if objective.has_pairs else "trained tokens"
        notes = (*notes, f"{num_left_out} rows without {lacking} are left out")
    is_recorded = objective.old_logprobs != "sampler"
    if is_recorded and objective.has_ratio and "term_old_logprob" not in dataset.term_columns:
        remedy = "write them with `treepack logprobs --column old`"
        if "term_sampling_logprob" in dataset.term_columns and not objective.corrects_sampler:
            remedy = f"for ratios to the sampler give --old-logprobs sampler, or {remedy}"
        missing = "the rows have no old log-probabilities: every update counts as on-policy, with ratios of 1"
        notes = (*notes, f"{missing}; {remedy}")
    return RunFit(files, _sum_rewards(dataset), notes)


def _check_routes(dataset: AnyDataset, loaded: LoadedModel) -> None:
    """Check that the model can replay recorded routes, by the first row of each directory that has some."""
    for source in sources_of(dataset):
        if source.routes and source.has_routes and len(source) and (routes := source[0].routes) is not None:
            check_routes(loaded.causal, loaded.source, routes)


def _adapter_notes(loaded: LoadedModel, seed: int) -> tuple[str, ...]:
    model = loaded.model
    if not is_adapted(model):
        return ()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(num_weights(parameter) for parameter in model.parameters())
    notes: tuple[str, ...] = (f"an adapter of {trained:,} weights is trained, {trained / total:.2g} of all",)
    base = adapter_base(model)
    if base.endswith(".json"):
        notes = (*notes, f"the base has random weights: the adapter fits load_model({base!r}, seed={seed})")
    return notes


def _router_notes(loaded: LoadedModel, options: TrainOptions, balance: RouterBalance | None) -> tuple[str, ...]:
    config = loaded.causal.config.get_text_config()
    if balance is not None or not getattr(config, "router_aux_loss_coef", None):
        return ()
    if options.router_aux:
        return ("the gradients are compared without the load-balancing loss of the routers",)
    return ("the load-balancing loss of the routers is left out; --router-aux adds it",)


def _sum_rewards(dataset: AnyDataset) -> Float64 | None:
    """Return `TrainingRun.rewards`; None if the directory has no rewards."""
    if "trajectory_rewards" not in dataset.term_columns:
        return None
    tables = [
        source.once_per_machine("rewards", functools.partial(_rewards_of_rows, source))
        for source in sources_of(dataset)
    ]
    columns = [np.concatenate([table[name].to_numpy() for table in tables]) for name in ("sum", "count")]
    return np.stack(columns, axis=1)


def _rewards_of_rows(source: PackedDataset) -> pa.Table:
    """Return the sum and the number of the known rewards of every row of a directory."""
    sums = []
    for table in source.tables(["trajectory_rewards"]):
        # [[0.5, None], None, [1.0]] -> (0.5, 1), (0, 0), (1, 1)
        for cell in table["trajectory_rewards"].to_pylist():
            known = [reward for reward in cell or () if reward is not None and not math.isnan(reward)]
            sums.append((math.fsum(known), len(known)))
    values = np.array(sums, np.float64).reshape(-1, 2)
    return pa.table({"sum": values[:, 0], "count": values[:, 1]})
