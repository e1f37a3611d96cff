"""The forecast of a trie for a model: plans for several capacities, their memory, and the gain of trees there.

    model, device --read_target--> ForecastTarget
    Trie, ForecastTarget --forecast_trie--> the forecast of `stats` and of the report, as plain values
    packed rows, ForecastTarget --forecast_packed--> the same

The verdict is about the capacity that `pack` takes by default. Memory is that of whole rows, with as few recomputed
layers as the device demands. Rows that do not fit then run in pieces, whose carried path waits in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treepack.analysis.capacities import (
    PlannedCapacity,
    candidate_capacities,
    forecast_lines,
    plan_capacity,
    rows_work,
    usual_plan,
)
from treepack.analysis.forecast import ForecastLine, ForecastRows, TrainingDevice, read_device
from treepack.analysis.verdict import baseline_notes, forecast_report
from treepack.costs.model_cost import FlopCount, ModelShape, operations, pairs_of_token, read_shape
from treepack.ingest.conversation_counts import Conversations
from treepack.memory.model_memory import PARAMETER_BYTES, ModelMemory, NoPieces, read_memory
from treepack.pack.options import PackOptions
from treepack.pack.plan.planning import GROUPS
from treepack.pack.plan.problem import SearchOptions
from treepack.processes import ReportProgress
from treepack.trie.trie import Trie

_QUICK = "contiguous"  # the method of plans that the user did not ask for: one pass over the leaves
# Methods whose rows are like the rows of no other method, so a quick plan does not estimate them.
_OWN_METHODS = (GROUPS, "sequence", "greedy-online")
_MAX_GPUS = 4096
_WEIGHT_BYTES = 4  # of a float32 weight
# Sizes of a piece to choose from: shorter ones do not keep a GPU busy, and longer ones gain little.
PIECES = (65_536, 32_768, 16_384, 8_192, 4_096)
# Share of the device's memory that a plan may use; the rest is for fragments and the error of the estimate.
USABLE = 0.9
_GIB = 1 << 30

_Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ForecastTarget:
    """The model and the devices of a forecast.

    Attributes:
        shape: operations of the model.
        memory: its memory on one GPU, or why it is not estimated.
        device: one of the devices.
        ranks: number of devices.
    """

    shape: ModelShape
    memory: ModelMemory | NoPieces
    device: TrainingDevice
    ranks: int = 1


def read_target(model: str, device: str, *, ranks: int = 1) -> ForecastTarget:
    """Return the target of a model and a device, named as in `StatsOptions`.

    Raises:
        TreepackError: no such model or device.
    """
    return ForecastTarget(read_shape(model), read_memory(model), read_device(device), ranks)


def quick(options: PackOptions) -> PackOptions:
    """Return `options` with a quick method, unless their own lays out rows in another way than trees."""
    own = options.method in _OWN_METHODS
    return replace(options, method=options.method if own else _QUICK, effort="low", too_long="drop")


def forecast_trie(
    trie: Trie,
    target: ForecastTarget,
    *,
    conversations: Conversations | None,
    totals: Mapping[str, Any],
    capacities: Sequence[int] = (),
    options: PackOptions = PackOptions(),  # noqa: B008 (immutable)
    progress: ReportProgress | None = None,
) -> tuple[_Entry, list[PlannedCapacity]]:
    """Return the forecast of `stats` and of the report as plain values, and the plans that it compares.

    Args:
        trie: the rollouts.
        target: the model and the devices.
        conversations: the source of the trie, which gives the append-only baseline.
        totals: of the trie.
        capacities: capacities to compare, by default the candidates; longer trajectories are left out.
        options: limits, balance and search of the plans; see `quick`.
        progress: called with the trees planned so far.

    Raises:
        TreepackError: a step has too few trajectories for the ranks, or no trajectory fits.
    """
    options = replace(options, too_long="drop") if capacities else quick(options)
    if options.balance > 1 and not options.token_pairs:
        options = replace(options, token_pairs=pairs_of_token(target.shape))
    planned = [
        plan_capacity(trie, capacity, options, progress=progress)
        for capacity in capacities or candidate_capacities(trie, options.method)
    ]
    usual = usual_plan(trie, planned)
    shown = planned if capacities else [planned[usual]]
    search = SearchOptions(options.effort, options.time_limit)
    lines = forecast_lines(trie, shown, method=options.method, search=search, conversations=conversations)
    notes = baseline_notes(conversations, totals)
    report = forecast_report(lines, target.shape, target.device, notes, capacity=planned[usual].plan.capacity)
    return report | _memory_entries([_rows_of(each) for each in planned], usual, target), planned


def forecast_packed(
    lines: Sequence[ForecastLine], rows: ForecastRows, target: ForecastTarget, notes: Sequence[str]
) -> _Entry:
    """Return the forecast of packed `rows`, whose lines are in `lines`; `notes` are about the baselines."""
    report = forecast_report(lines, target.shape, target.device, notes, capacity=rows.capacity)
    return report | _memory_entries([rows], 0, target)


def _rows_of(planned: PlannedCapacity) -> ForecastRows:
    totals = planned.totals
    return ForecastRows(
        planned.plan.capacity,
        rows_work(planned),
        totals.num_rows,
        int(totals.row_tokens.max()),
        int(planned.trie.lengths.max()),
        planned.num_too_long,
    )


def row_forecast(target: ForecastTarget, tokens: int) -> _Entry:
    """Return the forecast of one row that is one path of `tokens` trained tokens: its work, memory and sentence."""
    work = FlopCount(tokens, tokens * (tokens + 1) // 2, tokens)
    return _memory_entries([ForecastRows(tokens, work, 1, tokens, tokens)], 0, target)


def _memory_entries(rows: Sequence[ForecastRows], usual: int, target: ForecastTarget) -> _Entry:
    """Return the entries of a forecast about capacities and memory; the sentence is about `rows[usual]`.

    `num_gpus` is the number of GPUs over which weights and optimiser must be divided: a multiple of the ranks.
    """
    num_gpus = target.ranks
    while _entry(rows[usual], target, num_gpus)["fits"] is False and num_gpus < _MAX_GPUS:
        num_gpus *= 2
    entries = [_entry(each, target, num_gpus) for each in rows]
    sentence = memory_sentence(entries[usual], target, num_gpus=num_gpus)
    return {"ranks": target.ranks, "num_gpus": num_gpus, "capacities": entries, "memory": sentence}


def _entry(rows: ForecastRows, target: ForecastTarget, num_gpus: int) -> _Entry:
    """Return the work of `rows`, and their memory on each of `num_gpus` GPUs that divide weights and optimiser."""
    num_bytes, piece, fits = None, None, None
    if isinstance(target.memory, ModelMemory):
        memory = replace(target.memory, state=-(-target.memory.state // num_gpus))
        limit = None if target.device.memory is None else USABLE * target.device.memory
        num_bytes, piece = _row_bytes(rows, memory, limit)
        fits = None if limit is None else num_bytes <= limit
    return {
        "capacity": rows.capacity,
        "num_left_out": rows.num_left_out,
        "num_rows": rows.num_rows,
        "tokens_packed": rows.work.tokens,
        "flops": operations(target.shape, rows.work),
        "carry": piece,
        "num_bytes": num_bytes,
        "fits": fits,
    }


def _row_bytes(rows: ForecastRows, memory: ModelMemory, limit: float | None) -> tuple[int, int | None]:
    """Return the bytes of whole rows if they fit into `limit`, else of rows in pieces, and the size of a piece.

    It is the largest size that fits, or the smallest of all. Without a limit all layers are recomputed.
    """
    if limit is None:
        return memory.in_rows(rows.row_tokens, memory.num_layers), None
    whole = memory.in_rows(rows.row_tokens, memory.fewest_recomputed(rows.row_tokens, limit))
    # The carried path has at most the tokens of the longest trajectory.
    pieces = [(memory.in_pieces(rows.row_tokens, piece, rows.longest), piece) for piece in PIECES]
    return next((way for way in [(whole, None), *pieces] if way[0] <= limit), pieces[-1])


def memory_sentence(rows: _Entry, target: ForecastTarget, *, num_gpus: int) -> str:
    """Return whether training fits: the memory of one GPU, or what to use if the weights have to be divided."""
    name, memory, device = target.shape.name, target.memory, target.device
    if isinstance(memory, NoPieces):
        return f"the memory of {name} is not estimated: {memory.reason}"
    trained = f"{name} with AdamW in fp32"
    pieces = "" if rows["carry"] is None else f" with train --carry {rows['carry']}"
    need = f"rows of {rows['capacity']:,} tokens{pieces} need {rows['num_bytes'] / _GIB:.1f} GiB"
    if device.memory is None:
        return f"{need} for {trained}; the memory of the device is not known"
    gpus = f"{'one' if target.ranks == 1 else target.ranks} {device.name}"
    if num_gpus == target.ranks:
        verb = "fits" if target.ranks == 1 else "fits, divided over"
        return f"{trained} {verb} {gpus}: {need} of {device.memory / _GIB:.0f}"
    if rows.get("fits") is False:  # on any number of GPUs
        return f"{trained} does not fit any number of {device.name}: {need} of {device.memory / _GIB:.0f} on each"
    # Frozen weights have no gradient and no moments: 4 of 16 bytes.
    frozen = memory.state * _WEIGHT_BYTES // PARAMETER_BYTES
    others = rows["num_bytes"] - -(-memory.state // num_gpus)
    lora = " or LoRA" if frozen + others <= USABLE * device.memory else ""
    return f"{trained} does not fit {gpus}; use {num_gpus} GPUs{lora}"
