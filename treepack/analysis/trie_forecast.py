"""The forecast of a trie for a model: plans for several capacities, the best one, and the gain of trees there.

    model, device --read_target--> ForecastTarget
    Trie, ForecastTarget --compare_capacities--> ComparedCapacities     time and memory of each, and the choice
    Trie, ForecastTarget --forecast_trie--> the forecast of `stats` and of the report, as plain values

`stats`, `report`, `pack` and `prepare` choose by this file, so that they name the same capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from treepack.analysis.capacities import PlannedCapacity, forecast_lines, plan_capacity
from treepack.analysis.capacity_choice import (
    CapacityEstimate,
    RowCosts,
    candidate_capacities,
    choice_sentence,
    choose_estimate,
    estimate_time,
    waiting,
)
from treepack.analysis.carried_report import (
    GIB,
    USABLE,
    RowsToCarry,
    carried_report,
    rows_of_plans,
    sizes_of_pieces,
)
from treepack.analysis.forecast import MFU, ForecastLine, TrainingDevice, read_device
from treepack.analysis.needed_memory import DESCRIBING, refuse_too_large
from treepack.analysis.verdict import baseline_notes, forecast_report
from treepack.costs.limits import LAUNCH_SECONDS
from treepack.costs.model_cost import ModelShape, operations, pairs_of_token, read_shape
from treepack.files.remote.address import AnyPath, as_path
from treepack.files.remote.cache import local_copy, naming_addresses
from treepack.ingest.conversations import Conversations
from treepack.memory.model_memory import PARAMETER_BYTES, ModelMemory, NoPieces, read_memory
from treepack.pack.options import MAX_CAPACITY, PackOptions
from treepack.pack.plan import balance
from treepack.pack.plan.methods.groups import whole_groups
from treepack.pack.plan.planning import GROUPS
from treepack.pack.plan.problem import RowLimits, SearchOptions
from treepack.pack.plan.unions import row_sizes
from treepack.processes import ReportProgress
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie

_QUICK = "contiguous"  # the method of plans that the user did not ask for: one pass over the leaves
# Methods whose rows are like the rows of no other method, so a quick plan does not estimate them.
_OWN_METHODS = (GROUPS, "sequence", "greedy-online")
_MAX_GPUS = 4096
# Rows that fit only because they are short may take at most this many times as long as the fastest rows; if they take
# longer, the model needs more GPUs.
_MAX_SLOWER = 1.35  # more than 4 / 3, the cost of recomputing all layers
_WEIGHT_BYTES = 4  # of a float32 weight


@dataclass(frozen=True, slots=True)
class ForecastTarget:
    """The model and the devices of a forecast.

    Attributes:
        shape: operations of the model.
        memory: its memory on one GPU, or why it is not estimated.
        device: one of the devices.
        ranks: number of devices.
        pieces: sizes of a piece to choose from.
    """

    shape: ModelShape
    memory: ModelMemory | NoPieces
    device: TrainingDevice
    ranks: int
    pieces: tuple[int, ...]

    @property
    def where(self) -> str:
        """The model and the devices in words: "qwen3-8b on 2 h200"."""
        device = self.device.name or f"device of {self.device.rate / 1e12:.0f} TFLOP/s"
        return f"{self.shape.name} on {'one' if self.ranks == 1 else self.ranks} {device}"


def read_target(model: str, device: str, *, ranks: int = 1, carry: int | None = None) -> ForecastTarget:
    """Return the target of a model and a device, named as in `StatsOptions`.

    Raises:
        TreepackError: no such model or device, or a size of a piece that is not positive.
    """
    return ForecastTarget(read_shape(model), read_memory(model), read_device(device), ranks, sizes_of_pieces(carry))


@dataclass(frozen=True, slots=True)
class ComparedCapacities:
    """The plans of several capacities, their estimates in the same order, and the chosen one.

    `num_gpus` is the number of GPUs over which weights and optimiser must be divided: a multiple of the ranks. `carry`
    has the lines of `carried_report` with this division, whole trees first.
    """

    planned: list[PlannedCapacity]
    estimates: list[CapacityEstimate]
    chosen: CapacityEstimate
    num_gpus: int
    carry: dict[str, Any]

    @property
    def chosen_plan(self) -> PlannedCapacity:
        """The plan of the chosen capacity."""
        return self.planned[self.estimates.index(self.chosen)]


def quick(options: PackOptions) -> PackOptions:
    """Return `options` with a quick method, unless their own lays out rows in another way than trees."""
    own = options.method in _OWN_METHODS
    return replace(options, method=options.method if own else _QUICK, effort="low", too_long="drop")


def compare_capacities(
    trie: Trie,
    target: ForecastTarget,
    *,
    capacities: Sequence[int] = (),
    options: PackOptions = PackOptions(),  # noqa: B008 (immutable)
    progress: ReportProgress | None = None,
) -> ComparedCapacities:
    """Plan `trie` for each of `capacities`, by default the candidates, and choose one by expected time and memory.

    Args:
        trie: the rollouts.
        target: the model and the devices.
        capacities: capacities to compare; longer trajectories are left out.
        options: limits, balance and search of the plans; see `quick`.
        progress: called with the trees planned so far.

    Raises:
        TreepackError: a step has too few trajectories for the ranks, or no trajectory fits.
    """
    if options.balance > 1 and not options.token_pairs:
        options = replace(options, token_pairs=pairs_of_token(target.shape))
    options = replace(options, too_long="drop")
    planned = [
        plan_capacity(trie, capacity, options, progress=progress)
        for capacity in capacities or candidate_capacities(trie, smallest=_largest_group(trie, options))
    ]
    rows = rows_of_plans(trie, planned, target.pieces)
    waits = [_waiting(each, row, target) for each, row in zip(planned, rows[1:], strict=True)]
    num_gpus, carry, estimates = _estimate_rows(rows, waits, target)
    return ComparedCapacities(planned, estimates, choose_estimate(estimates), num_gpus, carry)


@naming_addresses()
def choose_options(
    trie: str | AnyPath,
    options: PackOptions,
    *,
    model: str,
    device: str,
    memory: int | None = None,
    progress: ReportProgress | None = None,
) -> tuple[PackOptions, str]:
    """Return `options` of packing a trie directory for a model, and a sentence about the time of the rows.

    A missing capacity becomes the one that trains in the shortest expected time. With a balance, rows become even in
    the time of the model.

    Args:
        trie: the directory, or its address.
        options: limits and balance of the rows; the balance is the number of GPUs.
        model: see `StatsOptions`.
        device: see `StatsOptions`.
        memory: bytes to use, None for `usual_memory`.
        progress: called with the trees planned so far.

    Raises:
        TreepackError: no such model or device, a trie that cannot be read, or one that does not fit into `memory`.
    """
    target = read_target(model, device, ranks=options.balance)
    if options.balance > 1:
        options = replace(options, token_pairs=pairs_of_token(target.shape))
    read = read_trie(local_copy(as_path(trie)), memory=memory)
    refuse_too_large(read, DESCRIBING, memory=memory)
    capacities = () if options.capacity is None else (options.capacity,)
    compared = compare_capacities(read, target, capacities=capacities, options=quick(options), progress=progress)
    entries = _capacity_entries(compared, target)
    sentence: str = entries["choice"]
    if compared.num_gpus > target.ranks:
        sentence += f"; {entries['carry']['verdict']}"
    return replace(options, capacity=compared.chosen.capacity), sentence


def _largest_group(trie: Trie, options: PackOptions) -> int | None:
    """Return the tokens of the largest group if each must be whole in one row, else None."""
    if options.method != GROUPS:
        return None
    items = whole_groups(trie, RowLimits(MAX_CAPACITY))
    return int(row_sizes(trie, items, int(items.max()) + 1).tokens.max())


def _estimate_rows(
    rows: Sequence[RowsToCarry], waits: Sequence[float], target: ForecastTarget
) -> tuple[int, dict[str, Any], list[CapacityEstimate]]:
    """Return the number of GPUs over which the weights must be divided, the report of pieces, and the estimates.

    Rows of whole trees, without a capacity, are in the report alone; `waits` belong to the others.
    """
    num_gpus = target.ranks
    while True:
        carry = carried_report(rows, target.shape, divided(target.memory, num_gpus), target.device)
        lines = carry["lines"] or [None] * len(rows)
        pairs = [(each, line) for each, line in zip(rows, lines, strict=True) if each.capacity is not None]
        estimates = [_estimate(*pair, wait, target) for pair, wait in zip(pairs, waits, strict=True)]
        chosen = choose_estimate(estimates)
        fastest = min(each.seconds for each in estimates if each.num_left_out == chosen.num_left_out)
        is_enough = chosen.fits is not False and chosen.seconds <= _MAX_SLOWER * fastest
        if is_enough or num_gpus >= _MAX_GPUS:
            return num_gpus, carry, estimates
        num_gpus *= 2


def divided(memory: ModelMemory | NoPieces, num_gpus: int) -> ModelMemory | NoPieces:
    """Return the memory of one of `num_gpus` GPUs that divide weights, gradients and the optimiser."""
    if isinstance(memory, NoPieces):
        return memory
    return replace(memory, state=-(-memory.state // num_gpus))


def _estimate(
    rows: RowsToCarry, line: Mapping[str, Any] | None, wait: float, target: ForecastTarget
) -> CapacityEstimate:
    assert rows.capacity is not None
    flops = operations(target.shape, rows.work)
    seconds = flops / (target.device.rate * MFU)
    piece, num_bytes, fits = None, None, None
    if line is not None:
        seconds, piece, num_bytes, fits = estimate_time(line)
    return CapacityEstimate(
        capacity=rows.capacity,
        num_left_out=rows.num_left_out,
        num_rows=rows.num_rows,
        tokens_packed=rows.work.tokens,
        flops=flops,
        seconds=seconds / target.ranks * wait,
        waiting=wait,
        carry=piece,
        num_bytes=num_bytes,
        fits=fits,
    )


def _waiting(planned: PlannedCapacity, rows: RowsToCarry, target: ForecastTarget) -> float:
    shape, totals = target.shape, planned.totals
    # The targets of a row are in proportion to its tokens, because only their sum over all rows is known.
    tokens, pairs = totals.row_tokens, totals.row_pairs
    per_token = shape.per_token + shape.output * rows.work.targets / rows.work.tokens
    seconds = 6 * (per_token * tokens + shape.attention(tokens, pairs)) / (target.device.rate * MFU)
    steps = balance.steps_of(planned.plan.row_of, planned.trie.step_rank, totals.num_rows)
    costs = RowCosts(tokens, np.asarray(seconds, np.float64), steps)
    return waiting(costs, ranks=target.ranks, launch_seconds=shape.layers * LAUNCH_SECONDS)


def forecast_trie(
    trie: Trie,
    target: ForecastTarget,
    *,
    conversations: Conversations | None,
    totals: Mapping[str, Any],
    capacities: Sequence[int] = (),
    options: PackOptions = PackOptions(),  # noqa: B008 (immutable)
    progress: ReportProgress | None = None,
) -> tuple[dict[str, Any], list[PlannedCapacity]]:
    """Return the forecast of `stats` and of the report as plain values, and the plans that it compares.

    Args:
        trie: the rollouts.
        target: the model and the devices.
        conversations: the source of the trie, which gives the append-only baseline.
        totals: of the trie.
        capacities: see `compare_capacities`.
        options: see `compare_capacities`.
        progress: see `compare_capacities`.

    Raises:
        TreepackError: as `compare_capacities`.
    """
    options = options if capacities else quick(options)
    compared = compare_capacities(trie, target, capacities=capacities, options=options, progress=progress)
    shown = compared.planned if capacities else [compared.chosen_plan]
    search = SearchOptions(options.effort, options.time_limit)
    lines = forecast_lines(trie, shown, method=options.method, search=search, conversations=conversations)
    notes = baseline_notes(conversations, totals)
    report = forecast_report(lines, target.shape, target.device, notes, capacity=compared.chosen.capacity)
    return report | _capacity_entries(compared, target), compared.planned


def forecast_packed(
    lines: Sequence[ForecastLine], rows: RowsToCarry, target: ForecastTarget, notes: Sequence[str]
) -> dict[str, Any]:
    """Return the forecast of packed `rows`, whose lines are in `lines`; `notes` are about the baselines.

    The rows are known only by their sums, so no rank waits for another one.
    """
    num_gpus, carry, (estimate,) = _estimate_rows([rows], [1.0], target)
    compared = ComparedCapacities([], [estimate], estimate, num_gpus, carry)
    report = forecast_report(lines, target.shape, target.device, notes, capacity=rows.capacity)
    return report | _capacity_entries(compared, target)


def _capacity_entries(compared: ComparedCapacities, target: ForecastTarget) -> dict[str, Any]:
    """Return the entries of a forecast about capacities and memory."""
    estimates, chosen = compared.estimates, compared.chosen
    sentence = memory_sentence(chosen, target, num_gpus=compared.num_gpus)
    return {
        "ranks": target.ranks,
        "num_gpus": compared.num_gpus,
        "capacities": [asdict(each) for each in estimates],
        "choice": choice_sentence(estimates, chosen, where=target.where),
        "carry": compared.carry | {"verdict": sentence},
    }


def memory_sentence(rows: CapacityEstimate, target: ForecastTarget, *, num_gpus: int) -> str:
    """Return whether training fits: the memory of one GPU, or what to use if the weights have to be divided."""
    name, memory, device = target.shape.name, target.memory, target.device
    if isinstance(memory, NoPieces):
        return f"the memory of {name} is not estimated: {memory.reason}"
    assert rows.num_bytes is not None
    trained = f"{name} with AdamW in fp32"
    if device.memory is None:
        return f"{_memory_of(rows)} for {trained}; the memory of the device is not known"
    gpus = f"{'one' if target.ranks == 1 else target.ranks} {device.name}"
    if num_gpus == target.ranks:
        verb = "fits" if target.ranks == 1 else "fits, divided over"
        return f"{trained} {verb} {gpus}: {_memory_of(rows)} of {device.memory / GIB:.0f}"
    # Frozen weights have no gradient and no moments: 4 of 16 bytes.
    frozen = memory.state * _WEIGHT_BYTES // PARAMETER_BYTES
    others = rows.num_bytes - -(-memory.state // num_gpus)
    lora = " or LoRA" if frozen + others <= USABLE * device.memory else ""
    return f"{trained} does not fit {gpus}; use {num_gpus} GPUs{lora}"


def _memory_of(rows: CapacityEstimate) -> str:
    assert rows.num_bytes is not None
    pieces = "" if rows.carry is None else f" with train --carry {rows.carry}"
    return f"rows of {rows.capacity:,} tokens{pieces} need {rows.num_bytes / GIB:.1f} GiB"
