"""The numbers of the charts of a report.

    ReportSubject --measure--> ReportFigures: overlap by depth, lengths, groups, POR and ERR over capacities, fill,
                               rewards

Page, pictures and tables show these same numbers. Plans made here, to predict the sharing that a packing keeps, take
little effort; docs/report.md describes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treepack.analysis.capacities import plan_capacities, predicted_totals
from treepack.analysis.describe import por_by_depth
from treepack.analysis.forecast import DEFAULT_DEVICE, ForecastLine, ForecastRows, read_device
from treepack.analysis.summary import conversation_summary
from treepack.analysis.trie_forecast import ForecastTarget, forecast_packed, forecast_trie
from treepack.analysis.verdict import baseline_notes
from treepack.costs.model_cost import ModelShape
from treepack.ingest.conversation_counts import Conversations
from treepack.memory.model_memory import ModelMemory, NoPieces
from treepack.pack.options import PackOptions
from treepack.pack.plan.problem import SearchOptions
from treepack.processes import ReportProgress
from treepack.report.parts import SharedParts, mean_by, rewards_of
from treepack.report.rollouts import ExplorerParts, PartOutcomes, SortedRollouts, explorer_parts, outcomes_of
from treepack.trajectory import Float64, Int64
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

Record = dict[str, Any]

_BINS = 24  # of a histogram, approximately: narrow enough to show a shape, wide enough for a column of the page
_MAX_CAPACITIES = 6  # default capacities to compare: each needs a plan
_MIN_CAPACITY = 1024  # default rows are not shorter than this, however short the rollouts are
_REWARD_BINS = 11  # ranges of mean reward in the chart of rewards
_MAX_REWARDS = 12  # different rewards that get a bar each; more are counted in ranges
MAX_BARS = 80  # groups that get a bar each in the chart of pass rates; of more, each bar is as many groups
# With this many trajectories or more, "auto" is the quickest method here: six plans of 100,000 then take a minute.
_QUICK_MIN_TRAJECTORIES = 20_000


@dataclass(frozen=True, slots=True)
class PackedFigures:
    """Figures of a packed directory: its totals, the tokens of each row, ERR by depth, and lines of its forecast.

    `rows` are its rows for the forecast of memory.
    """

    capacity: int
    row_tokens: Int64
    totals: Record
    err_by_depth: list[Record]
    lines: list[ForecastLine]
    rows: ForecastRows


@dataclass(frozen=True, slots=True)
class ReportSubject:
    """The data of a report. `rebuilt`: the trie they were packed from is missing, so `trie` was built from the rows."""

    name: str
    trie: Trie
    packed: PackedFigures | None = None
    rebuilt: bool = False
    counts: dict[str, int] | None = None
    conversations: Conversations | None = None
    skipped: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ReportFigures:
    """Totals, parts, their outcomes, and one list of records per chart; lists about rewards are empty without rewards.

    Records: `depths` start, end, tokens_flat, tokens_tree, por and, if packed, err; `lengths`, `group_overlap`,
    `group_sizes` and `fill` start, end, count; `capacities` capacity, err, fill, num_rows, num_too_long, measured;
    `rewards` depth_start, depth_end, reward_start, reward_end, nodes, tokens; `reward_counts` start, end, count, where
    start and end are equal if each reward has a bar; `pass_rates` start, end, rate, name, see `group_rates`.

    `summary` is a sentence about the input, and `forecast` the report of `treepack stats` on the gain of
    the tree; its `memory` is None if the memory of the model was not given.
    """

    totals: Record
    rollouts: SortedRollouts
    groups: SharedParts
    group_outcomes: PartOutcomes
    trees: SharedParts
    tree_outcomes: PartOutcomes
    depths: list[Record]
    lengths: list[Record]
    group_overlap: list[Record]
    group_sizes: list[Record]
    capacities: list[Record]
    method: str
    fill: list[Record]
    fill_capacity: int
    rewards: list[Record]
    reward_counts: list[Record]
    pass_rates: list[Record]
    summary: str
    forecast: Record

    @property
    def explorer(self) -> ExplorerParts:
        """The lists of the explorer."""
        return ExplorerParts(self.rollouts, self.groups, self.group_outcomes, self.trees, self.tree_outcomes)

    @property
    def is_pass_or_fail(self) -> bool:
        """True if every known reward of a rollout is 0 or 1, so that a mean is a pass rate."""
        known = self.rollouts.reward[~np.isnan(self.rollouts.reward)]
        return set(known.tolist()) <= {0.0, 1.0}


def measure(
    subject: ReportSubject,
    shape: ModelShape,
    *,
    capacities: Sequence[int] | None = None,
    method: str = "auto",
    search: SearchOptions | None = None,
    memory: ModelMemory | NoPieces | None = None,
    progress: ReportProgress | None = None,
) -> ReportFigures:
    """Compute all numbers of the charts.

    Args:
        subject: the data of the report.
        shape: the model of the verdict.
        capacities: capacities at which ERR is compared; default: powers of two that every trajectory fits.
        method: method of the plans, as in `plan_rows`; "auto" means "contiguous" for many trajectories.
        search: effort of the method; low by default.
        memory: of the model; without it the sentence about memory is left out.
        progress: called with the trees planned so far.
    """
    trie, packed, search = subject.trie, subject.packed, search or SearchOptions("low")
    if method == "auto" and trie.num_trajectories >= _QUICK_MIN_TRAJECTORIES:
        method = "contiguous"
    sizes = capacities or _default_capacities(trie)
    planned = list(plan_capacities(trie, sizes, method=method, too_long="drop", search=search, progress=progress))
    points = [point | {"measured": False} for point in predicted_totals(planned)]
    row_tokens, fill_capacity = planned[0].totals.row_tokens, planned[0].plan.capacity
    if packed is not None:
        row_tokens, fill_capacity = packed.row_tokens, packed.capacity
        points = [point for point in points if point["capacity"] != packed.capacity]
        points.append(packed.totals | {"capacity": packed.capacity, "num_too_long": 0, "measured": True})
    parts = explorer_parts(trie)
    groups, rollouts = parts.groups, parts.rollouts
    depths, totals = por_by_depth(trie), trie_totals(trie)
    if packed is not None:
        err = {part["start"]: part["err"] for part in packed.err_by_depth}
        depths = [part | ({"err": err[part["start"]]} if part["start"] in err else {}) for part in depths]
    share = np.arange(21) / 20  # ratios are counted in ranges of 5 %
    return ReportFigures(
        totals=totals,
        rollouts=rollouts,
        groups=groups,
        group_outcomes=parts.group_outcomes,
        trees=parts.trees,
        tree_outcomes=parts.tree_outcomes,
        depths=depths,
        lengths=histogram(trie.lengths, nice_edges(trie.lengths)),
        group_overlap=histogram(groups.overlap, share),
        group_sizes=histogram(parts.group_outcomes.num_rollouts, nice_edges(parts.group_outcomes.num_rollouts)),
        capacities=[{name: point[name] for name in _POINT} for point in sorted(points, key=_capacity)],
        method=method,
        fill=histogram(row_tokens / fill_capacity, share),
        fill_capacity=fill_capacity,
        rewards=reward_by_node(trie),
        reward_counts=count_rewards(rollouts.reward),
        pass_rates=group_rates(groups, rollouts),
        summary=conversation_summary(subject.conversations, totals),
        forecast=_forecast(
            subject,
            (shape, memory),
            capacities or (),
            PackOptions(method=method, effort=search.effort, time_limit=search.time_limit),
        ),
    )


_POINT = "capacity err fill num_rows num_too_long measured".split()  # fields of the records of `capacities`


def _capacity(point: Record) -> int:
    return int(point["capacity"])


def _forecast(
    subject: ReportSubject,
    model: tuple[ModelShape, ModelMemory | NoPieces | None],
    capacities: Sequence[int],
    options: PackOptions,
) -> Record:
    shape, memory = model
    target = ForecastTarget(shape, memory or NoPieces("it was not asked for"), read_device(DEFAULT_DEVICE))
    if subject.packed is not None:
        notes = baseline_notes(subject.conversations, subject.packed.totals)
        found = forecast_packed(subject.packed.lines, subject.packed.rows, target, notes)
    else:
        totals = trie_totals(subject.trie)
        found, _ = forecast_trie(
            subject.trie,
            target,
            conversations=subject.conversations,
            totals=totals,
            capacities=capacities,
            options=options,
        )
    return found if memory is not None else found | {"memory": None}


def count_rewards(rewards: Float64) -> list[Record]:
    """Return the number of rollouts by reward: start, end, count. Few different rewards are counted one by one."""
    known = rewards[~np.isnan(rewards)]
    values, counts = np.unique(known, return_counts=True)
    if len(values) > _MAX_REWARDS:
        return histogram(known, np.linspace(known.min(), known.max(), _REWARD_BINS + 1))
    return [{"start": v, "end": v, "count": n} for v, n in zip(values.tolist(), counts.tolist(), strict=True)]


def group_rates(groups: SharedParts, rollouts: SortedRollouts) -> list[Record]:
    """Return the mean reward of the groups in ascending order: start, end, rate, name, is_one.

    `start` and `end` are shares of all groups with a reward. Of more than `MAX_BARS` groups, each record is several
    groups, and its name their number. `is_one`: their rollouts have one outcome only.
    """
    outcomes = outcomes_of(groups, rollouts)
    group_of = np.zeros(len(rollouts.names), np.int64)
    group_of[rollouts.of] = groups.of
    rates = mean_by(group_of, rollouts.reward, len(groups.names))
    order = np.lexsort((np.arange(len(rates)), ~outcomes.is_one, rates))
    order = order[~np.isnan(rates[order])]
    if not len(order):
        return []
    # 5 groups, at most 2 bars -> bounds [0, 2, 5] -> bars of groups 0-1 and 2-4
    bounds = np.linspace(0, len(order), min(MAX_BARS, len(order)) + 1).astype(int).tolist()
    records = []
    for a, b in pairwise(bounds):
        own = order[a:b]
        name = groups.names[own[0]] if b - a == 1 else f"{b - a} groups"
        records.append(
            {
                "start": a / len(order),
                "end": b / len(order),
                "rate": float(rates[own].mean()),
                "name": name,
                "is_one": bool(outcomes.is_one[own].all()),
            }
        )
    return records


def _default_capacities(trie: Trie) -> list[int]:
    """Return powers of two from the first that fits the longest trajectory to the first that fits the whole trie."""
    # (1025 - 1).bit_length() = 11 -> 2048, (1024 - 1).bit_length() = 10 -> 1024
    capacity = max(_MIN_CAPACITY, 1 << (int(trie.lengths.max()) - 1).bit_length())
    capacities = [capacity]
    while capacities[-1] < trie.tokens_tree and len(capacities) < _MAX_CAPACITIES:
        capacities.append(2 * capacities[-1])
    return capacities


def nice_edges(values: Int64) -> Int64:
    """Return about `_BINS` equal ranges of whole numbers that cover `values`; 1, 2 or 5 times a power of ten wide."""
    low, high = int(values.min()), int(values.max())
    # values 130 .. 1,000, 24 bins: at least 36.3 wide -> power 10 -> width 50 -> edges 100, 150, ..., 1050
    min_width = max(1.0, (high - low + 1) / _BINS)
    power = 10 ** math.floor(math.log10(min_width))
    width = next(width for factor in (1, 2, 5, 10) if (width := factor * power) >= min_width)
    start = low // width * width
    if width == 1:  # an empty range on each side, so that a single bar does not fill the chart
        return np.arange(max(0, start - 1), high + 3, dtype=np.int64)
    return np.arange(start, high + width + 1, width, dtype=np.int64)


def histogram(values: Int64 | Float64, edges: Int64 | Float64) -> list[Record]:
    """Return the number of `values` in each range [start, end) of `edges`, the last one closed, as records."""
    counts = np.histogram(values, edges)[0].tolist()
    ranges = zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True)
    return [{"start": start, "end": end, "count": count} for start, end, count in ranges]


def _trajectory_ranges(trie: Trie) -> tuple[Int64, Int64]:
    """Return first and one past the last of the trajectories through each node, which are consecutive; [num_nodes]."""
    # end_node [1, 3, 3, 4], node 2 with subtree 2 .. 3 -> trajectories 1 .. 2
    first = np.searchsorted(trie.end_node, np.arange(trie.num_nodes), side="left")
    return first.astype(np.int64), np.searchsorted(trie.end_node, trie.node_end, side="left").astype(np.int64)


def node_means(trie: Trie, values: Float64) -> Float64:
    """Return the mean of the `values` of the trajectories through each node, without NaN; NaN if all are."""
    first, end = _trajectory_ranges(trie)
    known = ~np.isnan(values)
    # Sums of runs as differences of prefix sums: [1, 0, 2] -> [0, 1, 1, 3]; trajectories 1 .. 2 -> 3 - 1 = 2
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    num_known = counts[end] - counts[first]
    return np.where(num_known > 0, (sums[end] - sums[first]) / np.maximum(num_known, 1), np.nan)


def reward_by_node(trie: Trie) -> list[Record]:
    """Return nodes and tokens by the depth of a node's start and by the mean reward of the trajectories through it."""
    means = node_means(trie, rewards_of(trie))
    known = ~np.isnan(means)
    if not known.any():
        return []
    low, high = float(means[known].min()), float(means[known].max())
    # Means of equal rewards differ by rounding, some 1e-16, so that a difference below 1e-9 is none.
    differ = high - low > 1e-9 * max(abs(low), abs(high))
    rows = np.linspace(low, high, _REWARD_BINS + 1) if differ else np.array([low - 0.5, high + 0.5])
    columns = nice_edges(np.append(trie.depth[known], 0))
    nodes, tokens = (
        np.histogram2d(trie.depth[known], means[known], (columns, rows), weights=weights)[0].astype(np.int64)
        for weights in (None, trie.node_length[known])
    )
    return [
        {
            "depth_start": int(columns[i]),
            "depth_end": int(columns[i + 1]),
            "reward_start": float(rows[j]),
            "reward_end": float(rows[j + 1]),
            "nodes": int(nodes[i, j]),
            "tokens": int(tokens[i, j]),
        }
        for i, j in zip(*np.nonzero(nodes), strict=True)
    ]
