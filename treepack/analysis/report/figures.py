"""The numbers behind the charts of a report.

    Subject --measure--> Figures: overlap by depth, lengths, groups, POR and ERR over capacities, fill, reward by node

Page, pictures and tables show these same numbers. What is planned here to see what a packing would keep is planned with
little effort; docs/report.md says how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.analysis.capacities import PlannedCapacity, forecast_lines, plan_capacities, predict
from treepack.analysis.describe import por_by_depth
from treepack.analysis.forecast import DEFAULT_DEVICE, Line, read_device
from treepack.analysis.forecast import report as forecast
from treepack.analysis.model_cost import ModelShape
from treepack.analysis.report.parts import SharedParts, groups_of, rewards_of, trees_of
from treepack.pack.plan.problem import Search
from treepack.trajectory import Float64, Int64
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

Record = dict[str, Any]

BINS = 24  # of a histogram, about
CAPACITIES = 6
FORECAST = 2  # of them, the smallest, that the verdict may take
LEAST_CAPACITY = 1024
QUICK_FROM = 20_000  # trajectories from which on capacities are compared with the quickest plan


@dataclass(frozen=True, slots=True)
class Packed:
    """What a packed directory says: its totals, the tokens of each row, ERR by depth, and the line of its forecast."""

    capacity: int
    row_tokens: Int64
    totals: Record
    err_by_depth: list[Record]
    line: Line


@dataclass(frozen=True, slots=True)
class Subject:
    """What is reported on. `rebuilt` says that the trie was built from the rows, for want of the trie they lay out."""

    name: str
    trie: Trie
    packed: Packed | None = None
    rebuilt: bool = False
    counts: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Totals, parts and one list of records per chart; `rewards` is empty where no trajectory has one.

    Records: `depths` start, end, tokens_flat, tokens_tree, por and, where packed, err; `lengths`, `group_overlap`,
    `group_sizes` and `fill` start, end, count; `capacities` capacity, err, fill, num_rows, num_too_long, measured;
    `rewards` depth_start, depth_end, reward_start, reward_end, nodes, tokens. `groups_of_one_reward` counts the groups
    of several rollouts that all have the same reward, `verdict` says whether training `model` on the tree pays.
    """

    totals: Record
    groups: SharedParts
    trees: SharedParts
    depths: list[Record]
    lengths: list[Record]
    group_overlap: list[Record]
    group_sizes: list[Record]
    capacities: list[Record]
    method: str
    fill: list[Record]
    fill_capacity: int
    rewards: list[Record]
    mean_reward: float | None
    groups_of_one_reward: int
    model: str
    verdict: str


def measure(
    subject: Subject,
    shape: ModelShape,
    *,
    capacities: Sequence[int] | None = None,
    method: str = "auto",
    search: Search | None = None,
) -> Figures:
    """Count everything that the charts show.

    Args:
        subject: what is reported on.
        shape: the model that the verdict is for.
        capacities: capacities to compare ERR at; by default doubling from the least that holds every trajectory.
        method: how rows are planned for that, as `plan_rows`; "auto" is "contiguous" for many trajectories.
        search: effort of the method; little by default.
    """
    trie, packed, search = subject.trie, subject.packed, search or Search("low")
    if method == "auto" and trie.num_trajectories >= QUICK_FROM:
        method = "contiguous"
    sizes = capacities or default_capacities(trie)
    planned = list(plan_capacities(trie, sizes, method=method, too_long="drop", search=search))
    points = [point | {"measured": False} for point in predict(planned)]
    row_tokens, fill_capacity = planned[0].totals.row_tokens, planned[0].plan.capacity
    if packed is not None:
        row_tokens, fill_capacity = packed.row_tokens, packed.capacity
        points = [point for point in points if point["capacity"] != packed.capacity]
        points.append(packed.totals | {"capacity": packed.capacity, "num_too_long": 0, "measured": True})
    groups, depths = groups_of(trie), por_by_depth(trie)
    if packed is not None:
        err = {part["start"]: part["err"] for part in packed.err_by_depth}
        depths = [part | ({"err": err[part["start"]]} if part["start"] in err else {}) for part in depths]
    share, rewards = np.arange(21) / 20, rewards_of(trie)
    known = ~np.isnan(rewards)
    return Figures(
        totals=trie_totals(trie),
        groups=groups,
        trees=trees_of(trie),
        depths=depths,
        lengths=histogram(trie.lengths, nice_edges(trie.lengths)),
        group_overlap=histogram(groups.overlap, share),
        group_sizes=histogram(groups.sizes, nice_edges(groups.sizes)),
        capacities=[{name: point[name] for name in _POINT} for point in sorted(points, key=_capacity)],
        method=method,
        fill=histogram(row_tokens / fill_capacity, share),
        fill_capacity=fill_capacity,
        rewards=reward_by_node(trie),
        mean_reward=float(rewards[known].mean()) if known.any() else None,
        groups_of_one_reward=_groups_of_one_reward(groups, rewards),
        model=shape.name,
        verdict=_verdict(subject, shape, planned[:FORECAST], method, search),
    )


_POINT = ("capacity", "err", "fill", "num_rows", "num_too_long", "measured")


def _capacity(point: Record) -> int:
    return int(point["capacity"])


def _verdict(subject: Subject, shape: ModelShape, planned: list[PlannedCapacity], method: str, search: Search) -> str:
    if subject.packed is not None:
        lines = [subject.packed.line]
    else:
        lines = forecast_lines(subject.trie, planned, method=method, search=search)
    return str(forecast(lines, shape, read_device(DEFAULT_DEVICE))["verdict"])


def _groups_of_one_reward(groups: SharedParts, rewards: Float64) -> int:
    least, greatest = np.full(len(groups.names), np.inf), np.full(len(groups.names), -np.inf)
    known = ~np.isnan(rewards)
    all_known = np.bincount(groups.of, known, len(groups.names)) == groups.sizes
    np.minimum.at(least, groups.of[known], rewards[known])
    np.maximum.at(greatest, groups.of[known], rewards[known])
    return int((all_known & (groups.sizes > 1) & (least == greatest)).sum())


def default_capacities(trie: Trie) -> list[int]:
    """Powers of two from the least that holds the longest trajectory to the first that holds the whole trie."""
    capacity = max(LEAST_CAPACITY, 1 << (int(trie.lengths.max()) - 1).bit_length())
    found = [capacity]
    while found[-1] < trie.tokens_tree and len(found) < CAPACITIES:
        found.append(2 * found[-1])
    return found


def nice_edges(values: Int64, bins: int = BINS) -> Int64:
    """About `bins` equal ranges of whole numbers that cover `values`, as wide as 1, 2 or 5 times a power of ten."""
    low, high = int(values.min()), int(values.max())
    least = max(1.0, (high - low + 1) / bins)
    power = 10 ** math.floor(math.log10(least))
    width = next(width for factor in (1, 2, 5, 10) if (width := factor * power) >= least)
    start = low // width * width
    if width == 1:  # a bar to each side, so that a single one does not fill the chart
        return np.arange(max(0, start - 1), high + 3, dtype=np.int64)
    return np.arange(start, high + width + 1, width, dtype=np.int64)


def histogram(values: Int64 | Float64, edges: Int64 | Float64) -> list[Record]:
    """Number of `values` in each range [start, end) of `edges`, the last one closed, as records."""
    counts = np.histogram(values, edges)[0].tolist()
    ranges = zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True)
    return [{"start": start, "end": end, "count": count} for start, end, count in ranges]


def passing(trie: Trie) -> tuple[Int64, Int64]:
    """First and one past the last of the trajectories through each node, which stand together; int64 [num_nodes]."""
    first = np.searchsorted(trie.end_node, np.arange(trie.num_nodes), side="left")
    return first.astype(np.int64), np.searchsorted(trie.end_node, trie.node_end, side="left").astype(np.int64)


def node_means(trie: Trie, values: Float64) -> Float64:
    """Mean over the trajectories through each node of those `values` that are not NaN, NaN if none is."""
    first, end = passing(trie)
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    number = counts[end] - counts[first]
    return np.where(number > 0, (sums[end] - sums[first]) / np.maximum(number, 1), np.nan)


def reward_by_node(trie: Trie) -> list[Record]:
    """Nodes and tokens by where a node begins and by the mean reward of the trajectories through it."""
    means = node_means(trie, rewards_of(trie))
    known = ~np.isnan(means)
    if not known.any():
        return []
    low, high = float(means[known].min()), float(means[known].max())
    # Means of equal rewards differ by rounding.
    differ = high - low > 1e-9 * max(abs(low), abs(high))
    rows = np.linspace(low, high, 12) if differ else np.array([low - 0.5, high + 0.5])
    columns = nice_edges(np.append(trie.depth[known], 0))
    nodes, tokens = (
        np.histogram2d(trie.depth[known], means[known], (columns, rows), weights=weights)[0].astype(np.int64)
        for weights in (None, trie.node_length[known])
    )
    return [
        {
            **{"depth_start": int(columns[i]), "depth_end": int(columns[i + 1])},
            **{"reward_start": float(rows[j]), "reward_end": float(rows[j + 1])},
            **{"nodes": int(nodes[i, j]), "tokens": int(tokens[i, j])},
        }
        for i, j in zip(*np.nonzero(nodes), strict=True)
    ]
