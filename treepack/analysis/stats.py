"""What the trajectories share, what a packing keeps of it, and where the sharing lies.

trie_totals      counts, N_flat, N_tree, POR           packed_totals   N_pack, ERR, fill, bound, gap
describe         totals, POR by depth, lengths, branching, group sizes
plan_capacities  plans for capacities, without writing anything; predict gives their packed_totals, and
forecast_lines   the work that they and the tries save (`forecast`)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from treepack.analysis.forecast import (
    Line,
    Trained,
    flat_work,
    plan_work,
    trained_of,
    tree_work,
    turns_work,
    ways_to_cut,
    whole_work,
)
from treepack.analysis.model_cost import FlopCount
from treepack.analysis.turns import Turns, cut_to_turns, turns_of
from treepack.columns import num_trained
from treepack.pack.capacity import fit_capacity
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.plan import Plan, PlanTotals
from treepack.pack.plan.planning import packed_trie, plan_rows
from treepack.pack.plan.problem import Search
from treepack.pack.row import Row
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

Report = dict[str, Any]

FIRST_DEPTH = 256
USUAL_CAPACITIES = (16_384, 65_536)


def trie_totals(trie: Trie) -> Report:
    """Counts of a trie and its potential overlap ratio, 1 - N_tree / N_flat."""
    groups = pl.DataFrame({"step": trie.step_rank, "group": pl.from_arrow(trie.trajectories["group_id"])})
    return {
        "num_trajectories": trie.num_trajectories,
        "num_groups": groups.n_unique(),
        "num_trees": trie.num_trees,
        "num_nodes": trie.num_nodes,
        "tokens_flat": trie.tokens_flat,
        "tokens_tree": trie.tokens_tree,
        "tokens_trained": num_trained(trie.trajectories),
        "por": 1 - trie.tokens_tree / trie.tokens_flat,
    }


def packed_totals(trie: Trie, plan: Plan, totals: PlanTotals) -> Report:
    """What a plan of `trie` costs, beside a lower bound that holds for every plan.

    ERR is 1 - N_pack / N_flat, fill the tokens over rows times capacity, gap N_pack over the bound less 1. For several
    ranks, which take the rows in order and wait for each other, `group_pairs_max_over_mean` is how much longer they are
    at it than if all rows had the same number of score pairs.
    """
    bound = max(plan.lower_bound, trie.tokens_tree)
    pairs = totals.row_pairs
    groups = pairs.reshape(-1, plan.multiple_of)
    waiting = {"group_pairs_max_over_mean": float(groups.max(axis=1).sum() * plan.multiple_of / pairs.sum())}
    return {
        "capacity": plan.capacity,
        "num_rows": totals.num_rows,
        "tokens_packed": totals.tokens_packed,
        "err": 1 - totals.tokens_packed / trie.tokens_flat,
        "token_ratio": totals.tokens_packed / trie.tokens_flat,
        "fill": totals.tokens_packed / (totals.num_rows * plan.capacity),
        "lower_bound": bound,
        "gap": totals.tokens_packed / bound - 1,
        "pairs_max_over_mean": float(pairs.max() / pairs.mean()),
        **(waiting if plan.multiple_of > 1 else {}),
    }


def describe(trie: Trie, *, kind: str = "trie") -> Report:
    """Totals and distributions of a trie, as plain values ready for JSON."""
    inner = np.bincount(trie.parent[trie.parent >= 0], minlength=trie.num_nodes)
    sizes = pl.DataFrame({"step": trie.step_rank, "group": trie.trajectories["group_id"].to_pylist()})
    return {
        "kind": kind,
        **trie_totals(trie),
        "lengths": quantiles(trie.lengths),
        "group_sizes": quantiles(sizes.group_by("step", "group").len()["len"].to_numpy()),
        "branching": quantiles(inner[inner > 1]),
        "por_by_depth": por_by_depth(trie),
    }


def quantiles(values: Int64) -> Report:
    """Count, minimum, median, 90th percentile, maximum and mean of `values`; only the count if there is none."""
    if len(values) == 0:
        return {"count": 0}
    series = pl.Series(values)
    return {
        "count": len(values),
        "min": int(values.min()),
        "median": series.median(),
        "p90": series.quantile(0.9, "higher"),
        "max": int(values.max()),
        "mean": series.mean(),
    }


def depth_ranges(longest: int) -> list[tuple[int, int]]:
    """Ranges [start, end) of depths up to `longest`, doubling from 256 tokens on."""
    ranges, start, end = [], 0, FIRST_DEPTH
    while start < longest:
        ranges.append((start, end))
        start, end = end, 2 * end
    return ranges


def por_by_depth(trie: Trie) -> list[Report]:
    """Overlap of the tokens at each range of depths."""
    lengths, depth, path = trie.lengths, trie.depth, trie.path_length
    report = []
    for start, end in depth_ranges(int(lengths.max())):
        flat = int((np.clip(lengths, start, end) - start).sum())
        tree = int((np.clip(path, start, end) - np.clip(depth, start, end)).sum())
        report.append({"start": start, "end": end, "tokens_flat": flat, "tokens_tree": tree, "por": 1 - tree / flat})
    return report


def describe_packed(rows: Iterable[Row], manifest: Report) -> Report:
    """Totals of a packed directory and distributions over its rows, as plain values ready for JSON."""
    tokens, pairs, held, lengths, branching = [], [], [], [], []
    flat, packed = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for row in rows:
        tokens.append(row.num_tokens)
        pairs.append(row.num_pairs)
        held.append(len(row.trajectory_ids))
        lengths.append(row.position_ids[row.trajectory_ends] + 1)
        children = np.bincount(row.parent[row.parent >= 0])
        branching.append(children[children > 1])
        size = max(len(flat), int(row.position_ids.max()) + 1)
        packed = _grown(packed, size) + np.bincount(row.position_ids, minlength=size)
        flat = _grown(flat, size) + np.bincount(row.position_ids, row.scale, size).astype(np.int64)
    by_depth = []
    for start, end in depth_ranges(len(flat)):
        counts = {"tokens_flat": int(flat[start:end].sum()), "tokens_packed": int(packed[start:end].sum())}
        by_depth.append(
            {"start": start, "end": end, **counts, "err": 1 - counts["tokens_packed"] / counts["tokens_flat"]}
        )
    return {
        "kind": "packed",
        **manifest["totals"],
        "options": manifest.get("options", {}),
        "counts": manifest["counts"],
        "row_tokens": quantiles(np.array(tokens)),
        "row_pairs": quantiles(np.array(pairs)),
        "row_trajectories": quantiles(np.array(held)),
        "lengths": quantiles(np.concatenate(lengths).astype(np.int64)),
        "branching": quantiles(np.concatenate(branching).astype(np.int64)),
        "err_by_depth": by_depth,
    }


def _grown(values: Int64, size: int) -> Int64:
    return np.pad(values, (0, size - len(values)))


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for one capacity: of the trajectories of `trie`, which all fit, laid out as `laid_out` has them."""

    trie: Trie
    laid_out: Trie
    plan: Plan
    totals: PlanTotals
    num_too_long: int


def plan_capacities(
    trie: Trie,
    capacities: Iterable[int],
    *,
    method: str,
    too_long: str,
    search: Search = Search(),  # noqa: B008
) -> Iterator[Planned]:
    """A checked plan for each capacity, without the trajectories that do not fit it.

    Raises:
        TreepackError: a trajectory does not fit and `too_long` is "error".
    """
    for capacity in capacities:
        too_many = int((trie.lengths > capacity).sum())
        fitted, _ = fit_capacity(trie, capacity, too_long=too_long)
        plan = plan_rows(fitted, capacity=capacity, method=method, search=search)
        laid_out = packed_trie(fitted, method)
        yield Planned(fitted, laid_out, plan, check_plan(laid_out, plan), too_many)


def predict(planned: Iterable[Planned]) -> list[Report]:
    """`packed_totals` of each plan, with the number of trajectories that do not fit its capacity."""
    return [packed_totals(one.trie, one.plan, one.totals) | {"num_too_long": one.num_too_long} for one in planned]


def usual_capacities(trie: Trie) -> list[int]:
    """Those of 16,384 and 65,536 that hold every trajectory; the next power of two if none does."""
    longest = int(trie.lengths.max())
    return [size for size in USUAL_CAPACITIES if size >= longest] or [1 << (longest - 1).bit_length()]


def forecast_lines(trie: Trie, planned: list[Planned], *, method: str, search: Search = Search()) -> list[Line]:  # noqa: B008
    """What `trie` without a capacity, and then each plan, saves of every way to cut its rollouts into samples.

    Where turns are derived from whole trajectories, they get plans of their own by `method` and `search`, unless the
    trajectories cut to their turns are the same; turns that do not fit are left out. Whole trajectories are derived
    from turns only where all of these fit.
    """
    trained = trained_of(trie)
    name, *others = ways_to_cut(trie)
    works = [_rows_work(each, trained if each.laid_out is trie else trained_of(each.laid_out)) for each in planned]
    lines = [Line(name, None, flat_work(trie), tree_work(trie, trained))]
    lines += [
        Line(name, each.plan.capacity, flat_work(each.trie), work, each.num_too_long)
        for each, work in zip(planned, works, strict=True)
    ]
    if "trajectories" in others:
        whole = whole_work(trie, trained)
        lines += [replace(line, samples="trajectories", flat=whole) for line in lines if line.num_left_out == 0]
    elif "turns" in others:
        turns = turns_of(trie)
        cut = cut_to_turns(trie, turns)
        lines.append(Line("turns", None, turns_work(cut, turns), tree_work(cut, trained_of(cut))))
        lines += [
            _turns_line(trie, turns, (each, work), method=method, search=search)
            for each, work in zip(planned, works, strict=True)
        ]
    return lines


def _rows_work(planned: Planned, trained: Trained) -> FlopCount:
    totals = planned.totals
    tokens, pairs = totals.tokens_packed, int(totals.row_pairs.sum())
    return plan_work(trained, planned.plan.row_of, num_tokens=tokens, num_pairs=pairs)


def _turns_line(trie: Trie, turns: Turns, whole: tuple[Planned, FlopCount], *, method: str, search: Search) -> Line:
    """The line of the turns that fit the capacity of `whole`, in its rows if these hold nothing else."""
    planned, work = whole
    capacity = planned.plan.capacity
    fitting = turns.within(capacity)
    cut = cut_to_turns(trie, fitting)
    if cut is not planned.trie:
        (planned,) = plan_capacities(cut, [capacity], method=method, too_long="error", search=search)
        work = _rows_work(planned, trained_of(planned.laid_out))
    return Line("turns", capacity, turns_work(cut, fitting), work, len(turns.ends) - len(fitting.ends))
