"""Plans for several capacities, without writing anything, and the work that they save.

Trie --candidate_capacities--> longest trajectory, powers of two, largest tree
Trie --plan_capacities--> PlannedCapacity, ... --usual_plan--> the one nearest the default of `pack`
PlannedCapacity, ... --predicted_totals--> N_pack, ERR, fill and gap of each
--forecast_lines--> operations on rows against one by one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treepack.analysis.describe import Report
from treepack.analysis.forecast import (
    APPEND_ONLY,
    SAMPLES,
    TRAJECTORIES,
    TURNS,
    ForecastLine,
    append_only_line,
    flat_work,
    once_work,
    plan_work,
    tree_work,
    turns_work,
    usable_conversations,
    ways_to_cut,
    whole_work,
)
from treepack.analysis.turns import SortedTurns, cut_to_turns, turns_of
from treepack.costs.model_cost import FlopCount
from treepack.ingest.conversation_counts import Conversations
from treepack.pack.capacity import fit_capacity, usual_capacities_of
from treepack.pack.options import MAX_CAPACITY, PackOptions
from treepack.pack.packing import plan_within
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.methods.groups import whole_groups
from treepack.pack.plan.plan import Plan, PlanTotals
from treepack.pack.plan.planning import GROUPS, packed_trie
from treepack.pack.plan.problem import RowLimits, SearchOptions
from treepack.pack.plan.unions import row_sizes
from treepack.pack.totals import packed_totals
from treepack.processes import ReportProgress
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

_SHORTEST = 1024  # the first power of two that is a candidate


@dataclass(frozen=True, slots=True)
class PlannedCapacity:
    """A checked plan for one capacity.

    All trajectories of `trie` fit the capacity; `num_too_long` others do not and were left out. `packed_nodes` is the
    trie whose nodes the rows contain: `trie` itself, or its unshared copy for the method "sequence".
    """

    trie: Trie
    packed_nodes: Trie
    plan: Plan
    totals: PlanTotals
    num_too_long: int


def candidate_capacities(trie: Trie, method: str) -> list[int]:
    """Return the capacities to compare, ascending: longest trajectory, powers of two above it, and largest tree.

    A row of the largest tree shares all that can be shared, so no larger capacity computes fewer tokens. The default of
    `pack` is always among the capacities. The largest group replaces the longest trajectory if `method` is "groups".
    """
    starts = trie.node_start[:-1][trie.parent < 0]
    longest = int(trie.lengths.max())
    if method == GROUPS:
        items = whole_groups(trie, RowLimits(MAX_CAPACITY))
        longest = int(row_sizes(trie, items, int(items.max()) + 1).tokens.max())
    largest = max(int(np.diff(np.append(starts, trie.tokens_tree)).max()), longest)
    last = max(largest, usual_capacities_of(longest)[0])
    # longest 2,369 and largest 36,708 -> 2,369, 4,096, 8,192, 16,384, 32,768, 36,708
    powers = [1 << k for k in range(last.bit_length()) if max(longest + 1, _SHORTEST) <= 1 << k]
    return sorted({longest, *powers, largest})


def usual_plan(trie: Trie, planned: Sequence[PlannedCapacity]) -> int:
    """Return the index of the plan with the fewest trajectories left out, and a capacity nearest the default of `pack`.

    A larger capacity than the default precedes a smaller one.
    """
    usual = usual_capacities_of(int(trie.lengths.max()))[0]

    def distance(i: int) -> tuple[int, bool, int]:
        capacity = planned[i].plan.capacity
        return planned[i].num_too_long, capacity < usual, abs(capacity - usual)

    return min(range(len(planned)), key=distance)


def plan_capacities(
    trie: Trie,
    capacities: Iterable[int],
    *,
    method: str,
    too_long: str,
    search: SearchOptions = SearchOptions(),  # noqa: B008
    progress: ReportProgress | None = None,
) -> Iterator[PlannedCapacity]:
    """Yield a checked plan for each capacity, without the trajectories that do not fit it.

    `progress` is called with the trees planned so far for the capacity.

    Raises:
        TreepackError: a trajectory does not fit and `too_long` is "error".
    """
    options = PackOptions(method=method, effort=search.effort, time_limit=search.time_limit, too_long=too_long)
    for capacity in capacities:
        yield plan_capacity(trie, capacity, options, progress=progress)


def plan_capacity(
    trie: Trie, capacity: int, options: PackOptions, *, progress: ReportProgress | None = None
) -> PlannedCapacity:
    """Return a checked plan for `capacity` by the budgets, the search and the balance of `options`.

    Raises:
        TreepackError: a trajectory that does not fit, unless `options.too_long` is "drop", or a step that has too few
            trajectories for its ranks.
    """
    num_too_long = int((trie.lengths > capacity).sum())
    fitted, _ = fit_capacity(trie, capacity, too_long=options.too_long)
    limits = RowLimits(capacity, options.pairs_budget, options.terms_budget)
    plan = plan_within(fitted, limits, options, progress=_named(progress, f"for {capacity:,}"))
    nodes = packed_trie(fitted, options.method)
    return PlannedCapacity(fitted, nodes, plan, check_plan(nodes, plan), num_too_long)


def _named(progress: ReportProgress | None, suffix: str) -> ReportProgress | None:
    """Return a function that reports to `progress` under stages with `suffix`: "planning for 8,192"."""
    if progress is None:
        return None
    report = progress
    return lambda state: report(replace(state, stage=f"{state.stage} {suffix}"))


def predicted_totals(planned: Iterable[PlannedCapacity]) -> list[Report]:
    """Return the `packed_totals` of each plan, with the number of trajectories that do not fit its capacity."""
    return [packed_totals(one.trie, one.plan, one.totals) | {"num_too_long": one.num_too_long} for one in planned]


def forecast_lines(
    trie: Trie,
    planned: list[PlannedCapacity],
    *,
    method: str,
    search: SearchOptions = SearchOptions(),  # noqa: B008
    conversations: Conversations | None = None,
) -> list[ForecastLine]:
    """Return the work of `trie` without a capacity, and then of each plan, against each baseline.

    The samples of `trie` come first, then one append-only sequence per rollout of `conversations`, if they are known,
    then the other way to cut rollouts into samples. If turns are derived from whole trajectories, each capacity gets a
    second plan for them by `method` and `search`, unless cutting to turns changes nothing; turns that do not fit are
    left out. Whole trajectories are derived from turns only if all turns fit. A turn that several paths of a search
    tree have counts once.
    """
    name, *others = ways_to_cut(trie)
    baseline, work_alone = (TURNS, once_work) if name == "turns" else (SAMPLES, flat_work)
    works = [rows_work(each) for each in planned]
    lines = [ForecastLine(name, None, work_alone(trie), tree_work(trie), baseline=baseline)]
    lines += [
        ForecastLine(name, each.plan.capacity, work_alone(each.trie), work, each.num_too_long, baseline)
        for each, work in zip(planned, works, strict=True)
    ]
    # The other baselines have only the sums over all samples.
    whole = [line for line in lines if line.num_left_out == 0]
    known = usable_conversations(conversations, trie_totals(trie))
    if known is not None:
        lines += [append_only_line(line, known) for line in whole]
    if "trajectories" in others:
        flat = whole_work(trie)
        # A rollout of token ids whose turns continue each other is one append-only sequence.
        alone = TRAJECTORIES if conversations is not None else APPEND_ONLY
        lines += [replace(line, samples="trajectories", flat=flat, baseline=alone) for line in whole]
    elif "turns" in others:
        turns = turns_of(trie)
        cut = cut_to_turns(trie, turns)
        flat = turns_work(trie, turns.distinct(trie))
        lines.append(ForecastLine("turns", None, flat, tree_work(cut), baseline=TURNS))
        lines += [
            _turns_line(trie, turns, (each, work), method=method, search=search)
            for each, work in zip(planned, works, strict=True)
        ]
    return lines


def rows_work(planned: PlannedCapacity) -> FlopCount:
    """Return the work of the rows of a plan."""
    totals = planned.totals
    tokens, pairs = totals.tokens_packed, int(totals.row_pairs.sum())
    return plan_work(planned.packed_nodes, planned.plan.row_of, num_tokens=tokens, num_pairs=pairs)


def _turns_line(
    trie: Trie, turns: SortedTurns, whole: tuple[PlannedCapacity, FlopCount], *, method: str, search: SearchOptions
) -> ForecastLine:
    """Return the line of the turns that fit the capacity of `whole`; its rows are used if turns change nothing."""
    planned, work = whole
    capacity = planned.plan.capacity
    fitting = turns.within(capacity)
    cut = cut_to_turns(trie, fitting)
    if cut is not planned.trie:
        (planned,) = plan_capacities(cut, [capacity], method=method, too_long="error", search=search)
        work = rows_work(planned)
    distinct = turns.distinct(trie)
    once = distinct.within(capacity)
    left_out = len(distinct.ends) - len(once.ends)
    return ForecastLine("turns", capacity, turns_work(trie, once), work, left_out, TURNS)
