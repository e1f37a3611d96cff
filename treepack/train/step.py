"""One optimiser step: forward and backward of its rows, the update of the weights, and the measurements.

    run, optimiser, number of the step, rows --train_step--> StepMetrics

`train.loop` calls it for every step of a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from treepack.carry.pieces import ALIGNMENT
from treepack.data.batch import Batch
from treepack.data.mixture import source_names, source_of_rows
from treepack.data.prefetch import Prefetch
from treepack.data.transfers import sent
from treepack.errors import TreepackError
from treepack.fit.repeat import SharedShortageError
from treepack.fit.rung import smaller_piece
from treepack.memory.shortage import is_memory_error, memory_errors
from treepack.model.experts.over_ranks import sum_over_replicas
from treepack.model.experts.router_balance import RouterBalance
from treepack.model.experts.weights import cast_once
from treepack.objectives.losses import step_means, sum_names
from treepack.objectives.row_numbers import LossPart, RowResult
from treepack.train.optimiser import prepare_states
from treepack.train.passes import Pass
from treepack.train.pieces import has_long_rows, row_runner, runs_apart
from treepack.train.run import TrainingRun
from treepack.train.schedule import learning_rate
from treepack.train.sharding import can_repeat, summing_gradients, whole_weights
from treepack.train.teacher import taught
from treepack.train.watch.pass_times import PassTimes, slowest_pass


@dataclass(frozen=True)
class StepMetrics:
    """Measurements of one optimiser step over all ranks.

    `tokens` counts the tokens that were computed, and `tokens_flat` the tokens of the same trajectories computed one by
    one. `means` are the mean reward of the trajectories, if they have rewards, and the means of the objective.
    `seconds` is the time of this rank, and `wait_seconds` the part of it in which the rank waited for rows. A step with
    `skipped_rows` (row_id) changed no weights: if `loss` is NaN, the losses of these rows are not finite; if `loss` is
    finite, the gradient of the step is not. `slowest_pass` has the `seconds` of the slowest pass of any rank, its
    `tokens`, and the `rows` (row_id, at most 8) that it computed together. `evaluation` has the numbers of
    `evaluation.evaluate` if the held-out rows were evaluated after the step. `passes` has `tokens_forward` and
    `tokens_backward`, the tokens that ran forward and backward, if the run has an option `carry`: then some tokens run
    forward twice.
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
    slowest_pass: dict[str, Any] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """Return the object of one line of metrics.jsonl: the fields, with the last four replaced by their entries."""
        record = asdict(self)
        parts = [record.pop(name) for name in ("means", "evaluation", "passes", "memory")]
        return {**record, **{name: value for part in parts for name, value in part.items()}}


def train_step(run: TrainingRun, optimiser: torch.optim.Optimizer, number: int, rows: Prefetch) -> StepMetrics:
    """Carry out optimiser step `number`, counted from 0, with the next rows of `rows`."""
    start, waited, device = time.perf_counter(), rows.waited, run.loaded.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = run.schedule[number]
    lr = learning_rate(run.options, number, len(run.schedule))
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.zero_grad(set_to_none=True)  # frees the memory of gradients until the first backward pass
    report = Report(run, step.rows)
    balancing = _compute_rows(run, step.rows, rows, report)
    losses, counts, sums = report.over_ranks()
    tokens_flat = counts.pop("tokens_flat")
    # Losses are the same on every rank here, so all ranks agree to skip and none waits in `_clip` for another.
    bad = _not_finite(step.rows, losses)
    if bad:
        # A value that is not finite spreads over a pass, so the rows are computed again, each alone.
        alone = replace(run, options=replace(run.options, pass_tokens=1))
        bad = _not_finite(bad, forward_rows(alone, bad).over_ranks()[0]) or bad
    with step_memory_errors():
        norm = math.nan if bad else _clip(run)
        if math.isfinite(norm):
            prepare_states(optimiser)
            optimiser.step()
    if not math.isfinite(norm):
        bad = bad or step.rows  # every loss is finite and their gradient is not, so any of the rows may be the cause
    sizes = run.dataset.num_tokens[step.rows].tolist()
    row_ids = run.dataset.row_ids[step.rows].tolist()
    tokens = sum(sizes)
    means = step_means(sums, run.constant_means)
    reward, weight = run.mean_reward(step.rows), _total_weight(run, step.rows)
    means = {**(means if reward is None else {"reward": reward, **means}), **balancing}
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
        total_weight=weight,
        seconds=seconds,
        wait_seconds=rows.waited - waited,
        tokens_per_second=tokens / seconds,
        tokens_flat_per_second=tokens_flat / seconds,
        skipped_rows=[int(run.dataset.row_ids[row]) for row in bad],
        slowest_pass=slowest_pass(report.seconds, sizes, row_ids),
        means={**means, **_means_by_source(run, step.rows, losses, weight)},
        passes={} if run.options.carry is None else counts,
        memory={} if device.type != "cuda" else {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30},
    )


def _not_finite(rows: list[int], losses: list[float]) -> list[int]:
    return [row for row, loss in zip(rows, losses, strict=True) if not math.isfinite(loss)]


def forward_rows(run: TrainingRun, rows: list[int]) -> Report:
    """Compute the losses of rows as in one step, without gradients; all ranks must call this.

    Raises:
        TreepackError: memory is too small, or a row cannot be read.
    """
    share, report, loaded = run.passes(rows), Report(run, rows), run.loaded
    part_of, apart = _loss_parts(run, rows), runs_apart(run, rows)
    with (
        torch.no_grad(),
        whole_weights(loaded) if apart else nullcontext(),
        closing(Prefetch(run.dataset, share, pin=loaded.device.type == "cuda")) as batches,
        _meeting(run, apart=apart),
    ):
        for own, batch in zip(share, batches, strict=True):
            if not own and apart:
                continue  # no rank waits for another one
            with step_memory_errors(batch, limit=run.options.piece_limit):
                result = row_runner(run, batch).loss(taught(run, batch), part_of(own))
            if own:
                report.add(own, batch, result)
    if loaded.root is not None:
        # A forward without a backward leaves the root gathered, and a checkpoint would save that, not the shards.
        loaded.root.reshard()
    return report


def _means_by_source(run: TrainingRun, rows: list[int], losses: list[float], total: float) -> dict[str, float]:
    """Return the mean loss (of sft only) and the mean reward of each packed directory; empty if there is only one."""
    names = source_names(run.dataset)
    if len(names) == 1:
        return {}
    owners = source_of_rows(run.dataset)[rows]
    means = {}
    for place, name in enumerate(names):
        own = [row for row, owner in zip(rows, owners, strict=True) if owner == place]
        weight = _total_weight(run, own)
        if not run.options.objective.has_terms and weight:
            loss = math.fsum(loss for loss, owner in zip(losses, owners, strict=True) if owner == place)
            means[f"loss/{name}"] = loss * total / weight
        reward = run.mean_reward(own)
        if reward is not None:
            means[f"reward/{name}"] = reward
    return means


class Report:
    """The numbers of a step that are summed over ranks: the loss of every row, and the numerators of the means."""

    def __init__(self, run: TrainingRun, rows: list[int]) -> None:
        self.ranks, self.device, self.names = run.ranks, run.loaded.device, sum_names(run.options.objective)
        # rows [7, 2, 5] -> {7: 0, 2: 1, 5: 2}; a mixture may have a row twice, and its losses are added
        self.places = {row: place for place, row in enumerate(rows)}
        # Each rank fills the entries of its rows and leaves 0 elsewhere, so the sum over ranks has every loss.
        self.losses = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        self.counts = {"tokens_flat": 0, "tokens_forward": 0, "tokens_backward": 0}
        self.times = PassTimes(self.device)
        self.seconds: list[float] = []  # for each row those of its pass, on the rank that computed it

    def add(self, rows: Pass, batch: Batch, result: RowResult) -> None:
        """Add the numbers of a pass, once if several ranks compute it together."""
        if not self.ranks.counts_rows:
            return
        places = sent(torch.tensor([self.places[row] for row in rows]), self.device)
        self.losses.index_add_(0, places, result.rows.detach())
        numbers = (batch.tokens_flat, result.tokens_forward, result.tokens_backward)
        for name, number in zip(self.counts, numbers, strict=True):
            self.counts[name] += number
        if result.sums:
            self.sums += torch.stack([result.sums[name] for name in self.names])

    def over_ranks(self) -> tuple[list[float], dict[str, int], dict[str, float]]:
        """Return losses, counts and sums of the step over all ranks; waits for the GPU. Sets `seconds` too."""
        seconds = [0.0] * len(self.losses)
        for row, own in (self.times.of_rows() if self.ranks.counts_rows else {}).items():
            seconds[self.places[row]] = own
        counts = self.losses.new_tensor(list(self.counts.values()))
        # One collective and one copy to the CPU for all: [losses of the rows | sums of the means | counts | seconds]
        parts = [self.losses, self.sums, counts, self.losses.new_tensor(seconds)]
        values = self.ranks.sum(torch.cat(parts)).cpu()
        losses, sums, numbers, times = (part.tolist() for part in torch.split(values, [len(part) for part in parts]))
        self.seconds = times
        names = zip(self.counts, map(int, numbers), strict=True)
        return losses, dict(names), dict(zip(self.names, sums, strict=True))


def _compute_rows(run: TrainingRun, numbers: list[int], rows: Prefetch, report: Report) -> dict[str, float]:
    """Run forward and backward of this rank's share of a step; return the means of the routers' loss, if it is used."""
    share, part_of = run.passes(numbers), _loss_parts(run, numbers)
    batches: Iterable[Batch] = (next(rows) for _ in share)
    balancing: dict[str, float] = {}
    apart, sharded, limit = runs_apart(run, numbers), run.loaded.root is not None, run.options.piece_limit
    # In the last pass all ranks sum their gradients: a pass of whole rows, or one of padding after rows in pieces.
    num_apart = len(share) if not (apart and sharded) or has_long_rows(run, numbers) else max(0, len(share) - 1)
    # Sharded weights live only while their layer runs, so their casts are not kept.
    with whole_weights(run.loaded) if apart else nullcontext(), cast_once(keep=apart or not sharded):
        if run.balance is not None:
            batches = list(batches)
            balancing = _count_routes(run, run.balance, batches, reshard=sharded and not apart)
        passes = zip(share, batches, strict=True)
        with _meeting(run, apart=apart):
            for own, batch in islice(passes, num_apart):
                if not own and apart:
                    continue  # no rank waits for another one
                with step_memory_errors(batch, limit=limit), report.times.measure(own):
                    _accumulate(run, batch, own, part_of(own), report)
        if apart and sharded:
            own, batch = next(passes, ((), run.dataset.padding()))
            with summing_gradients(run.loaded), step_memory_errors(batch, limit=limit), report.times.measure(own):
                _accumulate(run, batch, own, part_of(own), report)
    sum_over_replicas(run.loaded.causal)
    return balancing


@contextmanager
def _meeting(run: TrainingRun, *, apart: bool) -> Iterator[None]:
    """Let the ranks meet after the block if they do not meet inside (`apart`); then all learn if memory ran out on one.

    Ranks that compute a row together meet in every layer even so.

    Raises:
        SharedShortageError: memory ran out on any rank, and each could finish the block.
    """
    shortage = None
    try:
        yield
    except TreepackError as error:
        is_alone = apart and run.ranks.sequence == 1 and can_repeat(run.loaded)
        if not is_alone or not is_memory_error(error.__cause__ or error):
            raise
        shortage = error
    # gloo waits 30 minutes for the slowest rank, and NCCL would wait 10
    if apart and run.ranks.any(shortage is not None):
        cause = torch.OutOfMemoryError() if shortage is None else shortage.__cause__
        place = getattr(shortage, "place", "on another rank")
        raise SharedShortageError(str(shortage or f"out of memory {place}"), place) from cause


def _accumulate(run: TrainingRun, batch: Batch, rows: Pass, part: LossPart, report: Report) -> None:
    """Run forward and backward of one pass; `rows` is empty for padding, which every layer still computes."""
    attached = nullcontext() if run.balance is None else run.balance.attached(batch.scale.to(run.loaded.device))
    with attached:
        # For padding too, whose loss is 0: FSDP gathers weights and sums gradients in the backward pass of all ranks.
        result = row_runner(run, batch).backward(taught(run, batch), part)
    if rows:
        report.add(rows, batch, result)


def _loss_parts(run: TrainingRun, rows: list[int]) -> Callable[[Pass], LossPart]:
    """Return a function that gives a pass over rows of a step its part of the loss: of sft and 0 for padding."""
    # Of the rows of all ranks. FSDP sums gradients over ranks and never averages, so no rank divides by its rows.
    denominator = _total_weight(run, rows)
    factors, objective = dict(zip(rows, run.factors(rows), strict=True)), run.options.objective

    def part_of(own: Pass) -> LossPart:
        known = [each for row in own if (each := factors[row]) is not None]
        if known:
            return LossPart(objective, torch.cat(known))
        if objective.has_values:
            # FSDP gathers the weights of the value head on all ranks, so padding needs values too, of 0 trajectories.
            return LossPart(objective, torch.zeros(0, dtype=torch.float64))
        return LossPart(denominator=denominator)

    return part_of


def _total_weight(run: TrainingRun, rows: list[int]) -> float:
    return float(run.dataset.total_weight[rows].sum())


def _count_routes(run: TrainingRun, balance: RouterBalance, batches: list[Batch], *, reshard: bool) -> dict[str, float]:
    """Count the routes of all rows of a step by a forward pass; return the auxiliary loss and the seconds it took."""
    start, loaded = time.perf_counter(), run.loaded
    for batch in batches:
        with balance.counting(batch.scale.to(loaded.device)), step_memory_errors(batch, limit=run.options.piece_limit):
            row_runner(run, batch).forward(batch)
    if reshard and loaded.root is not None:
        loaded.root.reshard()  # a forward without a backward leaves the root gathered
    loss = balance.finish(run.ranks.sum(balance.sums()))
    return {"router_aux": loss, "router_aux_seconds": time.perf_counter() - start}


def _clip(run: TrainingRun) -> float:
    """Scale gradients down to the limit, if there is one, and return their norm over all ranks before that."""
    limit = run.options.clip or math.inf
    norm: Any = torch.nn.utils.clip_grad_norm_(run.loaded.model.parameters(), limit)
    # Under FSDP2 the norm is a DTensor that holds only this rank's part until `full_tensor` adds the others.
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def step_memory_errors(batch: Batch | None = None, *, limit: int | None = None) -> AbstractContextManager[None]:
    """Turn a lack of memory into a TreepackError about the row `batch`, or about the update if it is None.

    Args:
        batch: the row.
        limit: the tokens of a piece; a row of more tokens runs in pieces.
    """
    if batch is None:
        return memory_errors("in the update of the weights", "train with --offload-optimizer or on more GPUs")
    terms = f" and {len(batch.terms.index):,} terms" if batch.terms is not None else ""
    place = f"in {batch.name} of {batch.num_tokens:,} tokens{terms}"
    others = "--checkpoint-layers all, --dtype bf16, a smaller --loss-chunk or on more GPUs"
    if limit is not None and batch.num_tokens > limit:
        return memory_errors(f"{place} in pieces of {limit:,}", f"train with --carry {_half(limit)}, {others}")
    if batch.edges is not None:
        shorter = f"train with --pass-tokens {_half(batch.num_tokens)}, {others}"
        return memory_errors(f"{place}, which are one pass", shorter)
    return memory_errors(place, f"pack with --capacity {_half(batch.num_tokens)}, or train with {others}")


def _half(tokens: int) -> int:
    return max(ALIGNMENT, smaller_piece(tokens))
