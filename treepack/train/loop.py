"""A minimal trainer: packed rows in, a directory that from_pretrained loads out.

    run.open_run(packed, model, options) -> Run     everything that can be refused is refused there
    for metrics in train(run, out): ...             one StepMetrics per optimiser step

The loss of an optimiser step is the sum over its rows of weight * nll, divided by the sum of all their weights: one
global mean, whatever the rows, the ranks that compute them and the order they are accumulated in; `objectives` has the
losses of reinforcement learning and preferences, which hold to the same. Rows are shuffled by seed and epoch; rows of a
training step (the `step` column) stay together and in order, and an optimiser step never mixes two of them.

A step whose loss or gradient is not finite changes nothing and is counted. What a run leaves behind and how it goes on
is in `run_directory` and `checkpoint`. The library prints nothing: notes are in `Run.notes`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treepack.data.batch import Batch
from treepack.data.prefetch import Prefetch
from treepack.errors import TreepackError
from treepack.model.forward import prepare_batch, row_loss, row_objective
from treepack.model.objectives import sum_names
from treepack.train.checkpoint import Checkpoints, latest, restore
from treepack.train.directory import METRICS, begin, finish, is_finished
from treepack.train.metrics import MetricsLog
from treepack.train.run import TrainingRun
from treepack.train.schedule import deal, learning_rate
from treepack.train.sharding import whole_state

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step over all ranks.

    `tokens` are computed, `tokens_flat` those of its trajectories one by one; `means` are of its objective; `seconds`
    are this rank's, of which it waited `wait_seconds` for rows. A step with `skipped_rows` changed no weights: the loss
    of these rows (row_id) is not finite, or, where the step has a loss, the gradient of all of them.
    """

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
    wait_seconds: float
    tokens_per_second: float
    tokens_flat_per_second: float
    skipped_rows: list[int] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """The line of metrics.jsonl: all fields and means side by side."""
        record = asdict(self)
        means = record.pop("means")
        return {**record, **means}


def train(
    run: TrainingRun,
    out: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    stop: Callable[[], bool] | None = None,
    note: Callable[[str], None] | None = None,
) -> Iterator[StepMetrics]:
    """Train, yielding after every optimiser step; the model in `out` is complete when all steps are done.

    Every rank of the run must call it and take all that it yields, which is the same on each.

    Args:
        run: from `open_run`.
        out: the directory of the run; see `run_directory`.
        overwrite: replace `out` if it is there.
        resume: go on from the newest whole checkpoint in `out`; begins anew where there is none.
        stop: asked after every step; where it says yes on any rank, a checkpoint is written and the iterator ends.
        note: told where the run goes on and which checkpoints are damaged.

    Raises:
        TreepackError: `out` is in the way, too many steps were skipped, memory does not suffice, or the disk fails.
    """
    out, ranks = Path(out), run.ranks
    ranks.lead(lambda: begin(run, out, overwrite=overwrite, resume=resume))
    tell = note or (lambda _: None)
    if is_finished(out):
        tell(f"{out} is complete: nothing is left to train")
    else:
        yield from _steps(run, out, stop or (lambda: False), tell)


def _steps(run: TrainingRun, out: Path, stop: Callable[[], bool], note: Callable[[str], None]) -> Iterator[StepMetrics]:
    options, ranks, model = run.options, run.ranks, run.loaded.model
    optimiser = make_optimiser(run)
    done, skipped = _position(run, out, optimiser, note)
    model.train()
    with (
        _closing(Checkpoints(out / CHECKPOINTS, keep=options.keep)) as checkpoints,
        closing(Prefetch(run.dataset, _own_rows(run, done), pin=run.loaded.device.type == "cuda")) as rows,
        MetricsLog(out / METRICS, keep_until=done) if ranks.leads else nullcontext() as log,
    ):
        while done < len(run.schedule):
            metrics = train_step(run, optimiser, done, rows)
            done += 1
            skipped = skipped + 1 if metrics.skipped_rows else 0
            if log is not None:
                log.write(metrics.as_record())
            if skipped > options.max_skipped:
                raise TreepackError(
                    f"{out}: the loss or gradient of {skipped} steps in a row was not finite, the last of rows "
                    f"{_listed(metrics.skipped_rows)}; inspect these rows, or begin again with a lower --lr"
                )
            stopped, last = ranks.any(stop()), done == len(run.schedule)
            position = {"step": done, "skipped": skipped}
            if last and options.checkpoint_every:  # the disk may have no room for the model, or the process no time
                with _telling(note):
                    checkpoints.save(done, model, optimiser, position)
                    checkpoints.wait()
            elif stopped or (options.checkpoint_every and done % options.checkpoint_every == 0):
                checkpoints.save(done, model, optimiser, position)
            yield metrics
            if stopped and not last:
                return
    weights = whole_state(run.loaded) if ranks.grouped else None
    ranks.lead(lambda: finish(run, out, weights))


@contextmanager
def _closing(checkpoints: Checkpoints) -> Iterator[Checkpoints]:
    """Close in the end; a checkpoint that failed does not hide what ended the run."""
    try:
        yield checkpoints
    except BaseException:
        with suppress(TreepackError):
            checkpoints.close()
        raise
    checkpoints.close()


@contextmanager
def _telling(note: Callable[[str], None]) -> Iterator[None]:
    """Say what failed and go on: the model is about to be written."""
    try:
        yield
    except TreepackError as error:
        note(str(error))


def _position(
    run: TrainingRun, out: Path, optimiser: torch.optim.Optimizer, note: Callable[[str], None]
) -> tuple[int, int]:
    """Steps done and steps skipped of late, with model and optimiser as they were then."""
    found, notes = latest(out / CHECKPOINTS)
    for each in notes:
        note(each)
    if found is None:
        return 0, 0
    position = restore(found, run.loaded.model, optimiser)
    note(f"resumed after step {position['step']} of {len(run.schedule)}")
    return position["step"], position["skipped"]


def _own_rows(run: TrainingRun, first: int) -> Iterator[int | None]:
    """The rows that this rank computes from optimiser step `first` on; see `steps.deal`."""
    costs = run.costs()
    for step in run.schedule[first:]:
        yield from deal(step.rows, costs, run.ranks.size)[run.ranks.rank]


def make_optimiser(run: TrainingRun) -> torch.optim.AdamW:
    """AdamW over all parameters; biases and norms, which have one dimension, do not decay."""
    options, parameters = run.options, list(run.loaded.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    fused = run.loaded.device.type == "cuda" and not options.cpu_offload
    return torch.optim.AdamW(kept, lr=options.lr, betas=options.betas, fused=fused)


def train_step(run: TrainingRun, optimiser: torch.optim.Optimizer, number: int, rows: Prefetch) -> StepMetrics:
    """Optimiser step `number`, counted from 0, from the rows that come next."""
    began, waited = time.perf_counter(), rows.waited
    step = run.schedule[number]
    lr = learning_rate(run.options, number, len(run.schedule))
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.zero_grad(set_to_none=True)
    denominator = float(run.dataset.total_weight[step.rows].sum())
    report = _Report(run, step.rows)
    factors = dict(zip(step.rows, run.factors(step.rows), strict=True))
    for row in deal(step.rows, run.costs(), run.ranks.size)[run.ranks.rank]:
        batch = next(rows)
        with _memory_errors(batch):
            _accumulate(run, batch, row, denominator, factors, report)
    losses, tokens_flat, sums = report.over_ranks()
    bad = [row for row, loss in zip(step.rows, losses, strict=True) if not math.isfinite(loss)]
    norm = math.nan if bad else _clip(run)
    if math.isfinite(norm):
        with _memory_errors():
            optimiser.step()
    else:
        bad = bad or step.rows
    tokens = int(run.dataset.num_tokens[step.rows].sum())
    weight = sums.pop("weight", 1.0)
    seconds = time.perf_counter() - began
    return StepMetrics(
        step=number + 1,
        epoch=step.epoch,
        loss=math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan,
        lr=lr,
        grad_norm=norm,
        num_rows=len(step.rows),
        tokens=tokens,
        tokens_flat=tokens_flat,
        total_weight=denominator,
        seconds=seconds,
        wait_seconds=rows.waited - waited,
        tokens_per_second=tokens / seconds,
        tokens_flat_per_second=tokens_flat / seconds,
        skipped_rows=[int(run.dataset.row_ids[row]) for row in bad],
        means={name: value / weight for name, value in sums.items()},
    )


class _Report:
    """What the ranks tell each other about a step: the loss of every row, and the sums that means are made from."""

    def __init__(self, run: TrainingRun, rows: list[int]) -> None:
        self.ranks, self.device, self.names = run.ranks, run.loaded.device, sum_names(run.options.objective)
        self.places = {row: place for place, row in enumerate(rows)}
        self.losses = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        self.tokens_flat = 0

    def add(self, row: int, batch: Batch, loss: Tensor, sums: dict[str, Tensor]) -> None:
        self.losses[self.places[row]] = loss.detach()
        self.tokens_flat += batch.tokens_flat
        if sums:
            self.sums += torch.stack([sums[name] for name in self.names])

    def over_ranks(self) -> tuple[list[float], int, dict[str, float]]:
        """Losses, tokens_flat and sums of the step; waits for the GPU."""
        flat = self.losses.new_tensor([self.tokens_flat])
        *values, tokens = self.ranks.sum(torch.cat([self.losses, self.sums, flat])).tolist()
        losses, sums = values[: len(self.losses)], values[len(self.losses) :]
        return losses, int(tokens), dict(zip(self.names, sums, strict=True))


def _accumulate(
    run: TrainingRun,
    batch: Batch,
    row: int | None,
    denominator: float,
    factors: dict[int, Tensor | None],
    report: _Report,
) -> None:
    """Forward and backward of one micro-batch; `row` is None for one of padding, which every layer still computes."""
    loaded, chunk = run.loaded, run.options.loss_chunk
    batch = prepare_batch(loaded, batch)
    own = None if row is None else factors[row]

    def part() -> tuple[Tensor, dict[str, Tensor]]:
        if own is None:
            return row_loss(loaded, batch, chunk=chunk) / denominator, {}
        return row_objective(loaded, batch, own.to(loaded.device), run.options.objective, chunk=chunk)

    with torch.autocast(loaded.device.type, torch.bfloat16, enabled=run.options.dtype == "bf16"):
        loss, sums = loaded.compute(part)
    torch.autograd.backward(loss)
    if row is not None:
        report.add(row, batch, loss, sums)


def _clip(run: TrainingRun) -> float:
    """Norm of the gradient over all ranks; gradients are scaled down to the limit, if there is one."""
    limit = run.options.clip or math.inf
    norm: Any = torch.nn.utils.clip_grad_norm_(run.loaded.model.parameters(), limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@contextmanager
def _memory_errors(batch: Batch | None = None) -> Iterator[None]:
    """Turn a lack of memory into one sentence: in the forward and backward of a row, or without one in the update."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if batch is None:
            raise TreepackError(
                "out of memory in the update of the weights; train on more GPUs, or under torchrun with --cpu-offload"
            ) from error
        terms = f" and {len(batch.terms.index):,} terms" if batch.terms is not None else ""
        raise TreepackError(
            f"out of memory in row {batch.row_id} of {batch.num_tokens:,} tokens{terms}; pack with "
            f"--capacity {max(128, batch.num_tokens // 256 * 128)}, or train with --gradient-checkpointing, "
            "--dtype bf16, a smaller --loss-chunk or on more GPUs"
        ) from error


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
