"""A training run, checked before its first step: data, model and options that fit together.

open_run(packed, model, options, ranks) -> Run      everything that can be refused is refused here
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treepack.attention import row_multiple
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.ingest.tokenization import load_tokenizer
from treepack.model.compatibility import check_fits, position_limit, saved_tokenizer
from treepack.model.denominators import TrajectoryTable, check_columns, step_factors, trainable_rows, trajectory_table
from treepack.model.layers import adapt_layers
from treepack.model.load import LoadedModel, load_model
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks, find_device
from treepack.train.schedule import OptimiserStep, plan_steps
from treepack.train.sharding import load_sharded
from treepack.trajectory import Float64


@dataclass(frozen=True)
class TrainingRun:
    """A checked training run: data, model, options, and the rows of every optimiser step."""

    dataset: PackedDataset
    loaded: LoadedModel
    options: TrainOptions
    schedule: list[OptimiserStep]
    tokenizer: Any
    notes: tuple[str, ...]
    table: TrajectoryTable | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def trainable_rows(self) -> list[int]:
        """Rows (indices into the dataset) that give a loss."""
        return [int(row) for row in trainable_rows(self.dataset, self.table)]

    def factors(self, rows: list[int]) -> list[Tensor | None]:
        """What the terms of each of the `rows` of one optimiser step are multiplied by; None for sft."""
        if self.table is None:
            return [None] * len(rows)
        return [torch.from_numpy(own) for own in step_factors(self.table, rows, self.options.objective)]

    def costs(self) -> Float64:
        """Floating-point operations of the layers, forward, for every row of the dataset; float64 [num_rows]."""
        config = self.loaded.model.config.get_text_config()
        weights = sum(p.numel() for p in self.loaded.model.base_model.parameters())
        weights -= self.loaded.model.get_input_embeddings().weight.numel()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        pairs = 4.0 * config.num_hidden_layers * heads * size
        costs: Float64 = 2.0 * weights * self.dataset.num_tokens + pairs * self.dataset.num_pairs
        return costs


def open_run(packed: str | Path, model: str | Path, options: TrainOptions, ranks: Ranks | None = None) -> TrainingRun:
    """Open the data, load the model, and refuse what does not fit together.

    Args:
        packed: a packed directory.
        model: a model directory, hub name or config file; see `model.load_model`.
        options: how to train.
        ranks: this process among others, over which the model is sharded; by default alone.

    Raises:
        TreepackError: for a missing device, damaged data, an unsuitable model, or a model that the data does not suit.
    """
    ranks, device = ranks or Ranks(), find_device(options.device)
    dataset, table, schedule = _open_data(packed, options)
    if ranks.grouped:
        loaded = load_sharded(model, options, device)
    else:
        lower = torch.bfloat16 if options.dtype == "bf16" else None
        loaded = load_model(model, attention=options.attention, autocast=lower, device=device, seed=options.seed)
        adapt_layers(loaded.model, checkpointing=options.gradient_checkpointing, compiled=options.compile)
    return _checked(TrainingRun(dataset, loaded, options, schedule, None, (), table, ranks))


def open_verification(packed: str | Path, model: str | Path, options: TrainOptions) -> TrainingRun:
    """`open_run` for `verify.verify_gradients`: in float64, or in float32 where a fused kernel has nothing better.

    Raises:
        TreepackError: as `open_run`.
    """
    device = find_device(options.device)
    exact = options.attention == "reference" or (device.type == "cpu" and options.attention in ("auto", "flex"))
    weights = torch.float64 if exact else torch.float32
    dataset, table, schedule = _open_data(packed, options)
    loaded = load_model(model, attention=options.attention, dtype=weights, device=device, seed=options.seed)
    adapt_layers(loaded.model, checkpointing=options.gradient_checkpointing, compiled=options.compile)
    return _checked(TrainingRun(dataset, loaded, options, schedule, None, (), table))


def _open_data(
    packed: str | Path, options: TrainOptions
) -> tuple[PackedDataset, TrajectoryTable | None, list[OptimiserStep]]:
    objective = options.objective
    dataset = PackedDataset(packed, terms=objective.loss != "sft")
    check_columns(dataset, objective)
    table = None if objective.loss == "sft" else trajectory_table(dataset, objective)
    return dataset, table, plan_steps(dataset, options, table)


def _checked(run: TrainingRun) -> TrainingRun:
    """The run with its tokenizer and notes, if model and data suit each other."""
    dataset, loaded, objective = run.dataset, run.loaded, run.options.objective
    dataset.multiple = row_multiple(loaded.attention)
    positions = dataset.max_position() if position_limit(loaded.model) else 0
    check_fits(loaded, dataset.manifest, max_position=positions)
    tokenizer, notes = _tokenizer(loaded, dataset.manifest.get("tokenizer"))
    notes = (*notes, *_savable_generation(loaded.model))
    idle = len(dataset) - len(run.trainable_rows)
    if idle:
        lacking = "pairs to compare" if objective.loss == "dpo" else "trained tokens"
        notes = (*notes, f"{idle} rows without {lacking} are left out")
    if objective.loss not in ("sft", "dpo") and "term_old_logprob" not in dataset.term_columns:
        notes = (*notes, "no old log-probabilities: every update counts as on-policy, with ratios of 1")
    return TrainingRun(
        dataset, loaded, run.options, run.schedule, tokenizer, (*loaded.notes, *notes), run.table, run.ranks
    )


def _tokenizer(loaded: LoadedModel, made_by: dict[str, Any] | None) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer to save with the weights: the model's own, else the one that made the data, else none."""
    try:
        own = saved_tokenizer(loaded.source)
        return load_tokenizer(made_by["name"]) if own is None and made_by is not None else own, ()
    except TreepackError as error:
        return None, (f"no tokenizer is saved with the model: {error}",)


def _savable_generation(model: Any) -> tuple[str, ...]:
    """Settings of generation that transformers loads and would refuse to save, at the end of training, are mended."""
    config = model.generation_config
    if config is None or _is_savable(config):
        return ()
    config.do_sample = True  # what is missing where a temperature is given
    if _is_savable(config):
        return ("generation_config.json has settings of sampling without do_sample, so do_sample is set",)
    model.generation_config = type(config).from_model_config(model.config)
    return ("generation_config.json has settings that transformers does not save: the model gets its defaults",)


def _is_savable(config: Any) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            config.save_pretrained(folder)
        except ValueError:
            return False
    return True
