"""A minimal trainer: packed rows in, a directory that from_pretrained loads out.

    open_run(packed, model, options) -> Run       everything that can be refused is refused here
    for metrics in train(run, out): ...           one StepMetrics per optimiser step

    out/    weights, config, tokenizer   train.json (options and inputs)   metrics.jsonl (a line per step)

The loss of an optimiser step is the sum over its rows of weight * nll, divided by the sum of all their weights: one
global mean, whatever the rows and however they are accumulated; `objectives` has the losses of reinforcement learning
and preferences, which hold to the same. Rows are shuffled by seed and epoch; rows of a training
step (the `step` column) stay together and in order, and an optimiser step never mixes two of them.

`out` appears when training is complete and not before. The library prints nothing: notes are in `Run.notes`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treepack import __version__
from treepack.attention import IMPLEMENTATIONS, row_multiple
from treepack.batch import Batch
from treepack.dataset import PackedDataset
from treepack.denominators import TrajectoryTable, check_columns, step_factors, trainable_rows, trajectory_table
from treepack.directory import finished_directory, refuse_existing
from treepack.errors import TreepackError
from treepack.loss import CHUNK
from treepack.model import (
    LoadedModel,
    adapt_layers,
    check_fits,
    load_model,
    placed,
    position_limit,
    row_loss,
    row_objective,
    saved_tokenizer,
    without_bars,
)
from treepack.objectives import Objective
from treepack.tokenization import load_tokenizer

TRAIN_FORMAT = "treepack-train"
TRAIN_VERSION = 1


@dataclass(frozen=True)
class TrainOptions:
    """How to train; see the command line for the same names.

    `steps`, where given, overrides `epochs`. `clip` is the greatest gradient norm, 0 for none. `dtype` "bf16" keeps
    float32 weights under autocast. `device` "auto" is the GPU where there is one. `objective` is what is minimised.
    """

    steps: int | None = None
    epochs: int = 1
    rows_per_step: int = 8
    lr: float = 1e-5
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    dtype: str = "fp32"
    gradient_checkpointing: bool = False
    compile: bool = False
    attention: str = "auto"
    loss_chunk: int = CHUNK
    device: str = "auto"
    seed: int = 0
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        at_least = {"steps": 1, "epochs": 1, "rows_per_step": 1, "loss_chunk": 1, "warmup_steps": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise TreepackError(f"{name} is {value}; expected at least {least}")
        for name in ("lr", "min_lr_ratio", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TreepackError(f"{name} is {value}; expected a finite number of at least 0")
        if not 0 <= self.seed < 2**63:
            raise TreepackError(f"seed is {self.seed}; expected 0 to 2**63 - 1")
        for name, known in (("dtype", ("fp32", "bf16")), ("attention", tuple(IMPLEMENTATIONS))):
            if getattr(self, name) not in known:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")


@dataclass(frozen=True)
class OptimiserStep:
    """Rows (indices into the dataset) whose gradients are summed for one update."""

    epoch: int
    rows: list[int]


@dataclass(frozen=True)
class Run:
    """A checked training run: data, model, options, and the rows of every optimiser step."""

    dataset: PackedDataset
    loaded: LoadedModel
    options: TrainOptions
    schedule: list[OptimiserStep]
    tokenizer: Any
    notes: tuple[str, ...]
    table: TrajectoryTable | None = None

    @property
    def trainable_rows(self) -> list[int]:
        """Rows (indices into the dataset) that give a loss."""
        return [int(row) for row in trainable_rows(self.dataset, self.table)]

    def factors(self, rows: list[int]) -> list[Tensor | None]:
        """What the terms of each of the `rows` of one optimiser step are multiplied by; None for sft."""
        if self.table is None:
            return [None] * len(rows)
        factors = step_factors(self.table, rows, self.options.objective)
        return [torch.from_numpy(own).to(self.loaded.device) for own in factors]


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step: `tokens` computed, `tokens_flat` of its trajectories one by one, `means` of its objective."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    num_rows: int
    tokens: int
    tokens_flat: int
    total_weight: float
    seconds: float
    tokens_per_second: float
    tokens_flat_per_second: float
    means: dict[str, float] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """The line of metrics.jsonl: all fields and means side by side."""
        record = asdict(self)
        means = record.pop("means")
        return {**record, **means}


def open_run(packed: str | Path, model: str | Path, options: TrainOptions) -> Run:
    """Open the data, load the model, and refuse what does not fit together.

    Args:
        packed: a packed directory.
        model: a model directory, hub name or config file; see `model.load_model`.
        options: how to train.

    Raises:
        TreepackError: for a missing device, damaged data, an unsuitable model, or a model that the data does not suit.
    """
    lower = torch.bfloat16 if options.dtype == "bf16" else None
    return _open(packed, model, options, torch.float32, lower)


def open_verification(packed: str | Path, model: str | Path, options: TrainOptions) -> Run:
    """`open_run` for `verify.verify_gradients`: in float64, or in float32 where a fused kernel has nothing better.

    Raises:
        TreepackError: as `open_run`.
    """
    on_cpu = find_device(options.device).type == "cpu"
    exact = options.attention == "reference" or (on_cpu and options.attention in ("auto", "flex"))
    return _open(packed, model, options, torch.float64 if exact else torch.float32, None)


def _open(
    packed: str | Path, model: str | Path, options: TrainOptions, weights: torch.dtype, autocast: torch.dtype | None
) -> Run:
    device = find_device(options.device)
    objective = options.objective
    dataset = PackedDataset(packed, terms=objective.loss != "sft")
    check_columns(dataset, objective)
    table = None if objective.loss == "sft" else trajectory_table(dataset, objective)
    schedule = plan_steps(dataset, options, table)
    loaded = load_model(
        model, attention=options.attention, dtype=weights, autocast=autocast, device=device, seed=options.seed
    )
    dataset.multiple = row_multiple(loaded.attention)
    positions = dataset.max_position() if position_limit(loaded.model) else 0
    check_fits(loaded, dataset.manifest, max_position=positions)
    adapt_layers(loaded.model, checkpointing=options.gradient_checkpointing, compiled=options.compile)
    tokenizer, notes = _tokenizer(loaded, dataset.manifest.get("tokenizer"))
    idle = len(dataset) - len(trainable_rows(dataset, table))
    if idle:
        lacking = "pairs to compare" if objective.loss == "dpo" else "trained tokens"
        notes = (*notes, f"{idle} rows without {lacking} are left out")
    if objective.loss not in ("sft", "dpo") and "term_old_logprob" not in dataset.term_columns:
        notes = (*notes, "no old log-probabilities: every update counts as on-policy, with ratios of 1")
    return Run(dataset, loaded, options, schedule, tokenizer, (*loaded.notes, *notes), table)


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU if there is one.

    Raises:
        TreepackError: if it is neither a CPU nor a GPU that torch sees.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    known = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", name)
    if known is None:
        raise TreepackError(f"device is {name!r}; expected cpu, cuda or cuda:N")
    if name != "cpu" and int(known[1] or 0) >= count:
        raise TreepackError(f"device is {name!r} and torch sees {count} GPUs; expected one of those, or cpu")
    return torch.device(name)


def _tokenizer(loaded: LoadedModel, made_by: dict[str, Any] | None) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer to save with the weights: the model's own, else the one that made the data, else none."""
    try:
        own = saved_tokenizer(loaded.source)
        return load_tokenizer(made_by["name"]) if own is None and made_by is not None else own, ()
    except TreepackError as error:
        return None, (f"no tokenizer is saved with the model: {error}",)


def plan_steps(
    dataset: PackedDataset, options: TrainOptions, table: TrajectoryTable | None = None
) -> list[OptimiserStep]:
    """The rows of every optimiser step of the run; rows that give no loss are left out.

    Raises:
        TreepackError: if no row has weight.
    """
    trained = trainable_rows(dataset, table)
    if len(trained) == 0:
        raise TreepackError(f"{dataset.path}: no row has a trained token; nothing to train on")
    by_step: dict[tuple[bool, int], list[int]] = {}
    for row in trained.tolist():
        step = dataset.steps[row]
        by_step.setdefault((step is not None, step or 0), []).append(row)
    parts = [rows for _, rows in sorted(by_step.items())]
    found: list[OptimiserStep] = []
    epoch = 0
    while len(found) < options.steps if options.steps else epoch < options.epochs:
        generator = np.random.default_rng([options.seed, epoch])
        for part in parts:
            order = generator.permutation(part).tolist()
            size = options.rows_per_step
            found += [OptimiserStep(epoch, order[i : i + size]) for i in range(0, len(order), size)]
        epoch += 1
    return found[: options.steps]


def learning_rate(options: TrainOptions, step: int, num_steps: int) -> float:
    """Linear warm-up to `lr`, then a cosine to `lr * min_lr_ratio` at the last step; `step` counts from 0."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, num_steps - 1 - options.warmup_steps)
    least = options.min_lr_ratio
    return options.lr * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def train(run: Run, out: str | Path, *, overwrite: bool = False) -> Iterator[StepMetrics]:
    """Train, yielding after every optimiser step; `out` is complete when the iterator is exhausted.

    An iterator that is closed early, or a process that dies, leaves no `out`.

    Raises:
        TreepackError: if `out` exists and is not to be overwritten, or the loss or gradient is not finite.
    """
    out = Path(out)
    refuse_existing(out, overwrite=overwrite)
    optimiser = make_optimiser(run)
    with finished_directory(out, overwrite=overwrite) as directory:
        with (directory / "metrics.jsonl").open("w", encoding="utf-8") as log:
            run.loaded.model.train()
            for number, step in enumerate(run.schedule):
                metrics = train_step(run, optimiser, number, step)
                log.write(json.dumps(metrics.as_record()) + "\n")
                log.flush()
                yield metrics
        save(run, directory)


def make_optimiser(run: Run) -> torch.optim.AdamW:
    """AdamW over all parameters; biases and norms, which have one dimension, do not decay."""
    options, parameters = run.options, list(run.loaded.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    return torch.optim.AdamW(kept, lr=options.lr, betas=options.betas, fused=run.loaded.device.type == "cuda")


def train_step(run: Run, optimiser: torch.optim.Optimizer, number: int, step: OptimiserStep) -> StepMetrics:
    """One update from the rows of `step`."""
    began = time.perf_counter()
    lr = learning_rate(run.options, number, len(run.schedule))
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.zero_grad(set_to_none=True)
    denominator = float(run.dataset.total_weight[step.rows].sum())
    losses, parts, tokens, tokens_flat = [], [], 0, 0
    for index, factors in zip(step.rows, run.factors(step.rows), strict=True):
        batch = placed(run.loaded, run.dataset[index])
        with torch.autocast(run.loaded.device.type, torch.bfloat16, enabled=run.options.dtype == "bf16"):
            loss, sums = _row_part(run, batch, factors, denominator)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        parts.append(sums)
        tokens += batch.num_tokens
        tokens_flat += batch.tokens_flat
    grad_norm = _clip(run, losses, step)
    optimiser.step()
    total = float(torch.stack(losses).sum())
    seconds = time.perf_counter() - began
    return StepMetrics(
        step=number + 1,
        epoch=step.epoch,
        loss=total,
        lr=lr,
        grad_norm=grad_norm,
        num_rows=len(step.rows),
        tokens=tokens,
        tokens_flat=tokens_flat,
        total_weight=denominator,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        tokens_flat_per_second=tokens_flat / seconds,
        means=_means(parts),
    )


def _row_part(run: Run, batch: Batch, factors: Tensor | None, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    """A row's part of the loss of its step, and of the sums that the step's means are made from."""
    chunk = run.options.loss_chunk
    if factors is None:
        return row_loss(run.loaded, batch, chunk=chunk) / denominator, {}
    return row_objective(run.loaded, batch, factors, run.options.objective, chunk=chunk)


def _means(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    sums = {name: float(torch.stack([part[name] for part in parts]).sum()) for name in parts[0]}
    weight = sums.pop("weight", 1.0)
    return {name: value / weight for name, value in sums.items()}


def _clip(run: Run, losses: list[Tensor], step: OptimiserStep) -> float:
    """Norm of the gradient, clipped if asked; stops the run before a bad update reaches the weights."""
    ids = run.dataset.row_ids[step.rows]
    bad = [int(row) for row, loss in zip(ids, torch.stack(losses).tolist(), strict=True) if not math.isfinite(loss)]
    if bad:
        raise TreepackError(f"the loss of rows {_listed(bad)} is not finite; lower --lr or inspect these rows")
    limit = run.options.clip or math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(run.loaded.model.parameters(), limit))
    if not math.isfinite(norm):
        raise TreepackError(
            f"the gradient of rows {_listed(ids.tolist())} is not finite; lower --lr or inspect these rows"
        )
    return norm


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")


def save(run: Run, directory: Path) -> None:
    """Write weights, config, tokenizer and `train.json`, which comes last and marks the directory as complete."""
    run.loaded.model.eval()
    with without_bars():
        run.loaded.model.save_pretrained(directory)
    if run.tokenizer is not None:
        run.tokenizer.save_pretrained(directory)
    record = {
        "format": TRAIN_FORMAT,
        "version": TRAIN_VERSION,
        "treepack": __version__,
        "packed": str(run.dataset.path),
        "model": run.loaded.source,
        "attention": run.loaded.attention,
        "num_steps": len(run.schedule),
        "options": asdict(run.options),
        "notes": list(run.notes),
    }
    (directory / "train.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
