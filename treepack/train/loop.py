"""A minimal trainer: packed rows in, a directory that from_pretrained loads out.

    run.open_run(packed, model, options) -> TrainingRun     unsuitable data, models and options are refused here
    for metrics in train(run, out): ...                     one StepMetrics per optimiser step

The loss of an optimiser step is the sum over its rows of weight * nll, divided by the sum of all their weights. It is
one global mean: it does not depend on how trajectories are packed into rows, on the ranks that compute the rows, or on
the order of accumulation. The losses of reinforcement learning and preferences are in `model.objectives` and follow
the same rule. Rows are shuffled by seed and epoch. Rows of one training step (the `step` column) stay together, these
steps keep their order, and an optimiser step never mixes two of them.

A step whose loss or gradient is not finite changes no weights and is counted. `train.directory` defines the files of a
run and `train.checkpoint` saves and restores its state. The library prints nothing: notes are in `TrainingRun.notes`,
and the logger `treepack` names each part of a run that takes long.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from treepack.data.batch import Batch
from treepack.data.prefetch import Prefetch
from treepack.errors import TreepackError
from treepack.files.address import AnyPath, RemotePath
from treepack.model.forward import prepare_batch, row_loss, row_objective
from treepack.model.memory import memory_errors
from treepack.model.objectives import sum_names
from treepack.train.checkpoint import Checkpoints, SavedCheckpoint, latest, restore
from treepack.train.checkpoint_upload import CheckpointUpload
from treepack.train.directory import begin, extend, finish, is_finished, num_finished
from treepack.train.metrics import MetricsLog
from treepack.train.place import METRICS, Place, open_place
from treepack.train.run import TrainingRun
from treepack.train.schedule import deal, learning_rate
from treepack.train.sharding import whole_state

CHECKPOINTS = "checkpoints"

_log = logging.getLogger("treepack")


@dataclass(frozen=True)
class StepMetrics:
    """Measurements of one optimiser step over all ranks.

    `tokens` counts the tokens that were computed, and `tokens_flat` the tokens of the same trajectories computed one by
    one. `means` are the mean reward of the trajectories, if they have rewards, and the means of the objective.
    `seconds` is the time of this rank, and `wait_seconds` the part of it in which the rank waited for rows. A step with
    `skipped_rows` (row_id) changed no weights: if `loss` is NaN, the losses of these rows are not finite; if `loss` is
    finite, the gradient of the step is not.
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
        """Return the object of one line of metrics.jsonl: the fields, with `means` replaced by its entries."""
        record = asdict(self)
        means = record.pop("means")
        return {**record, **means}


def train(
    run: TrainingRun,
    out: str | AnyPath | Place,
    *,
    overwrite: bool = False,
    resume: bool = False,
    stop: Callable[[], bool] | None = None,
    note: Callable[[str], None] | None = None,
) -> Iterator[StepMetrics]:
    """Train the model, and yield after every optimiser step; the model in `out` is complete after the last step.

    Every rank of the run must call this function and consume the whole iterator, which yields the same on every rank.

    Args:
        run: from `open_run`.
        out: the directory of the run, see `train.directory`: a path, an address, or a place that the caller has opened.
        overwrite: replace an existing `out`.
        resume: continue from the newest whole checkpoint in `out`, or start from the first step if it has none.
        stop: called after every step; if it returns true on any rank, a checkpoint is written and the iterator ends.
        note: called with a sentence about the step from which the run continues and about each damaged checkpoint.

    Raises:
        TreepackError: `out` exists or another process trains in it, too many steps were skipped, memory is too small,
            or the disk or the store fails.
    """
    ranks, note = run.ranks, note or (lambda _: None)
    with ExitStack() as stack:
        place = out if isinstance(out, Place) else stack.enter_context(open_place(out, ranks))
        ranks.lead(lambda: begin(run, place.out, overwrite=overwrite, resume=resume))
        if num_finished(place.out) == len(run.schedule):
            note(already_finished(place.out, len(run.schedule)))
        else:
            ranks.lead(place.claim)
            yield from _steps(run, place, stop or (lambda: False), note)


def already_finished(out: AnyPath, num_steps: int) -> str:
    """Return the note about a run whose model is complete."""
    return f"{out} is already finished, with {num_steps} steps; --steps with a larger number trains on"


def _steps(
    run: TrainingRun, place: Place, stop: Callable[[], bool], note: Callable[[str], None]
) -> Iterator[StepMetrics]:
    """Carry out the remaining steps with checkpoints and metrics, and write the model.

    Raises:
        TreepackError: too many steps were skipped, memory is too small, or the disk or the store fails.
    """
    options, ranks, model = run.options, run.ranks, run.loaded.model
    optimiser = make_optimiser(run)
    done, skipped = _restore_position(run, place, optimiser, note)
    upload = None if place.uploads is None else CheckpointUpload(place.uploads, CHECKPOINTS)
    model.train()
    _log.info(_first_step(run, done))
    with (
        _close_after(Checkpoints(place.folder / CHECKPOINTS, keep=options.keep, upload=upload)) as checkpoints,
        closing(Prefetch(run.dataset, _rank_rows(run, done), pin=run.loaded.device.type == "cuda")) as rows,
        MetricsLog(place.folder / METRICS, keep_until=done) if ranks.leads else nullcontext() as log,
    ):
        while done < len(run.schedule):
            metrics = train_step(run, optimiser, done, rows)
            done += 1
            # Only consecutive skips count: one bad row per epoch is tolerable, a diverged model skips every step.
            skipped = skipped + 1 if metrics.skipped_rows else 0
            if log is not None:
                log.write(metrics.as_record())
            if skipped > options.max_skipped:
                raise TreepackError(
                    f"{place.out}: the loss or gradient of {skipped} steps in a row was not finite, the last in rows "
                    f"{_join_ids(metrics.skipped_rows)}; inspect these rows, or start again with a lower --lr"
                )
            stopped, last = ranks.any(stop()), done == len(run.schedule)
            position = {"step": done, "skipped": skipped}
            if last and options.checkpoint_every:
                # Writing the model can fail (full disk, time limit of the job). With this checkpoint --resume writes
                # it again without training. If the checkpoint fails instead, the model is still worth writing.
                _log.info("writing the checkpoint of step %d", done)
                with _note_errors(note):
                    checkpoints.save(done, model, optimiser, position)
                    checkpoints.wait()
            elif stopped or (options.checkpoint_every and done % options.checkpoint_every == 0):
                checkpoints.save(done, model, optimiser, position)
            yield metrics
            if stopped and not last:
                return
    # All ranks take part in the gathering of the shards; only the first rank writes.
    _log.info("writing the model")
    weights = whole_state(run.loaded) if ranks.grouped else None
    ranks.lead(lambda: finish(run, place, weights))


@contextmanager
def _close_after(checkpoints: Checkpoints) -> Iterator[Checkpoints]:
    """Close `checkpoints` at the end; the error of a failed save does not hide an error that ended the run."""
    try:
        yield checkpoints
    except BaseException:
        with suppress(TreepackError):
            checkpoints.close()
        raise
    checkpoints.close()


@contextmanager
def _note_errors(note: Callable[[str], None]) -> Iterator[None]:
    """Pass an error to `note` instead of raising it."""
    try:
        yield
    except TreepackError as error:
        note(str(error))


def _first_step(run: TrainingRun, done: int) -> str:
    """Return the line before the first step of this process, which takes longer than the others."""
    compiles = ["the layers"] if run.options.compile else []
    compiles += ["the kernels of attention"] if run.loaded.attention != "reference" else []
    details = f", which compiles {' and '.join(compiles)} if this machine has not done so before" if compiles else ""
    return f"step {done + 1}{details}"


def _restore_position(
    run: TrainingRun, place: Place, optimiser: torch.optim.Optimizer, note: Callable[[str], None]
) -> tuple[int, int]:
    """Restore model and optimiser from the newest checkpoint; return steps done and consecutive steps skipped.

    Raises:
        TreepackError: the run has fewer steps than are done, or is complete and has no checkpoint to continue from.
    """
    out, num_steps = place.out, len(run.schedule)
    checkpoint, notes = _latest(place)
    for each in notes:
        note(each)
    if checkpoint is None:
        if is_finished(out):
            raise TreepackError(
                f"{out}: has no checkpoint of the finished run to continue from; train the model in it with a new --out"
            )
        extend(run, out, 0)
        return 0, 0
    if checkpoint.step > num_steps:
        raise TreepackError(
            f"{out}: {checkpoint.step} steps are done and this run has {num_steps}; give --steps of at least "
            f"{checkpoint.step}, or start a new --out"
        )
    _log.info("reading the checkpoint of step %d", checkpoint.step)
    with _memory_errors():
        position = restore(checkpoint, run.loaded.model, optimiser)
    change = extend(run, out, position["step"])
    run.ranks.any(False)  # no rank continues before the first one has recorded the change and all have read the files
    if isinstance(out, RemotePath):
        shutil.rmtree(checkpoint.path.parent, ignore_errors=True)
    note(f"resumed after step {position['step']} of {num_steps}")
    if change:
        note(change)
    return position["step"], position["skipped"]


def _latest(place: Place) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint and notes, see `checkpoint.latest`; a remote one is copied to this machine."""
    if isinstance(place.out, RemotePath):
        # A folder that the ranks of this machine share.
        return latest(place.folder.parent / CHECKPOINTS, place.out / CHECKPOINTS)
    return latest(place.out / CHECKPOINTS)


def _rank_rows(run: TrainingRun, first: int) -> Iterator[int | None]:
    """Yield the rows that this rank computes, starting at optimiser step `first`; see `schedule.deal`."""
    costs = run.costs()
    for step in run.schedule[first:]:
        yield from deal(step.rows, costs, run.ranks.size)[run.ranks.rank]


def make_optimiser(run: TrainingRun) -> torch.optim.AdamW:
    """Return AdamW over all parameters, without weight decay for parameters of one dimension (biases and norms)."""
    options, parameters = run.options, list(run.loaded.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # a model may have no parameter of one dimension
    fused = run.loaded.device.type == "cuda" and not options.cpu_offload
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused)


def train_step(run: TrainingRun, optimiser: torch.optim.Optimizer, number: int, rows: Prefetch) -> StepMetrics:
    """Carry out optimiser step `number`, counted from 0, with the next rows of `rows`."""
    start, waited = time.perf_counter(), rows.waited
    step = run.schedule[number]
    lr = learning_rate(run.options, number, len(run.schedule))
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.zero_grad(set_to_none=True)  # frees the memory of gradients until the first backward pass
    # Of the rows of all ranks. FSDP sums gradients over ranks and never averages, so no rank divides by its own rows.
    denominator = float(run.dataset.total_weight[step.rows].sum())
    report = _Report(run, step.rows)
    factors = dict(zip(step.rows, run.factors(step.rows), strict=True))
    for row in deal(step.rows, run.costs(), run.ranks.size)[run.ranks.rank]:
        batch = next(rows)
        with _memory_errors(batch):
            _accumulate(run, batch, row, denominator, factors, report)
    losses, tokens_flat, sums = report.over_ranks()
    # Losses are the same on every rank here, so all ranks agree to skip and none waits in `_clip` for another.
    bad = [row for row, loss in zip(step.rows, losses, strict=True) if not math.isfinite(loss)]
    with _memory_errors():
        norm = math.nan if bad else _clip(run)
        if math.isfinite(norm):
            optimiser.step()
    if not math.isfinite(norm):
        bad = bad or step.rows  # every loss is finite and their gradient is not, so any of the rows may be the cause
    tokens = int(run.dataset.num_tokens[step.rows].sum())
    weight = sums.pop("weight", 1.0)  # total weight of the terms, or pairs, by which the other sums are divided
    means = {name: value / weight for name, value in sums.items()}
    reward = run.mean_reward(step.rows)
    seconds = time.perf_counter() - start
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
        means=means if reward is None else {"reward": reward, **means},
    )


class _Report:
    """The numbers of a step that are summed over ranks: the loss of every row, and the numerators of the means."""

    def __init__(self, run: TrainingRun, rows: list[int]) -> None:
        self.ranks, self.device, self.names = run.ranks, run.loaded.device, sum_names(run.options.objective)
        self.places = {row: place for place, row in enumerate(rows)}  # rows [7, 2, 5] -> {7: 0, 2: 1, 5: 2}
        # Each rank fills the entries of its own rows and leaves 0 elsewhere, so the sum over ranks has every loss.
        self.losses = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        self.tokens_flat = 0

    def add(self, row: int, batch: Batch, loss: Tensor, sums: dict[str, Tensor]) -> None:
        self.losses[self.places[row]] = loss.detach()
        self.tokens_flat += batch.tokens_flat
        if sums:
            self.sums += torch.stack([sums[name] for name in self.names])

    def over_ranks(self) -> tuple[list[float], int, dict[str, float]]:
        """Return losses, tokens_flat and sums of the step over all ranks; waits for the GPU."""
        flat = self.losses.new_tensor([self.tokens_flat])
        # One collective and one copy to the CPU for all numbers: [losses of the rows | sums of the means | tokens_flat]
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
    """Run forward and backward of one micro-batch; `row` is None for padding, which every layer still computes."""
    loaded, chunk = run.loaded, run.options.loss_chunk
    batch = prepare_batch(loaded, batch)
    term_factors = None if row is None else factors[row]

    def part() -> tuple[Tensor, dict[str, Tensor]]:
        if term_factors is None:
            return row_loss(loaded, batch, chunk=chunk) / denominator, {}
        return row_objective(loaded, batch, term_factors.to(loaded.device), run.options.objective, chunk=chunk)

    with torch.autocast(loaded.device.type, torch.bfloat16, enabled=run.options.dtype == "bf16"):
        loss, sums = loaded.compute(part)
    # For padding too, whose loss is 0: FSDP gathers weights and sums gradients in the backward pass of all ranks.
    torch.autograd.backward(loss)
    if row is not None:
        report.add(row, batch, loss, sums)


def _clip(run: TrainingRun) -> float:
    """Scale gradients down to the limit, if there is one, and return their norm over all ranks before that."""
    limit = run.options.clip or math.inf
    norm: Any = torch.nn.utils.clip_grad_norm_(run.loaded.model.parameters(), limit)
    # Under FSDP2 the norm is a DTensor that holds only this rank's part until `full_tensor` adds the others.
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _memory_errors(batch: Batch | None = None) -> AbstractContextManager[None]:
    """Turn a lack of memory into a TreepackError about the row `batch`, or about the update if it is None."""
    if batch is None:
        return memory_errors("in the update of the weights", "train on more GPUs, or under torchrun with --cpu-offload")
    terms = f" and {len(batch.terms.index):,} terms" if batch.terms is not None else ""
    # The suggested capacity is half the tokens, rounded down to a multiple of 128: 5000 tokens -> 2432.
    return memory_errors(
        f"in row {batch.row_id} of {batch.num_tokens:,} tokens{terms}",
        f"pack with --capacity {max(128, batch.num_tokens // 256 * 128)}, or train with --gradient-checkpointing, "
        "--dtype bf16, a smaller --loss-chunk or on more GPUs",
    )


def _join_ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
