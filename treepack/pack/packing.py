"""A trie to training rows in memory: limits, the plan, and the rows themselves.

Trie --weigh_leaves, fit_capacity--> Trie --plan_rows--> Plan --check_plan--> Packing --iterate--> Row, Row, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError
from treepack.memory.budget import usual_memory
from treepack.option_fields import expect_type
from treepack.pack.capacity import fit_capacity, usual_capacities
from treepack.pack.leaf_weights import weigh_leaves
from treepack.pack.options import PackOptions
from treepack.pack.placement import unordered_tiles
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.files import PlanFile
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import packed_trie, plan_of_file, plan_rows
from treepack.pack.plan.problem import RowLimits, SearchOptions
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.pack.totals import packed_totals
from treepack.processes import ReportProgress
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

# Peak memory of the trie's nodes and of planning by any method but "exact", which has no limit. Measured over groups
# of 16, one tree of all trajectories, and trees of one: at most 460 bytes for a trajectory and its one or two nodes.
_NODE_BYTES, _TRAJECTORY_BYTES = 150, 400


@dataclass(frozen=True)
class Packing:
    """A checked plan of a trie, ready to yield its rows.

    Attributes:
        trie: the trie whose trajectories are planned; trajectories that are too long are cut or left out, and so are
            trajectories of leaf weight 0, if the options use leaf weights.
        plan: the row of each trajectory of `trie`.
        totals: `trie_totals` and `packed_totals` together.
        counts: trajectories that were dropped, left out or truncated.
        options: the options it was made with; the capacity of the rows is `plan.capacity`.
    """

    trie: Trie
    plan: Plan
    totals: dict[str, Any]
    counts: dict[str, int]
    options: PackOptions

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.plan.num_rows

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order, made one at a time."""
        nodes = packed_trie(self.trie, self.plan.method)
        yield from pack_rows(nodes, self.plan, semantics=self.options.semantics, normalize=self.options.normalize)


def plan_packing(
    trie: Trie,
    options: PackOptions = PackOptions(),  # noqa: B008 (immutable)
    *,
    plan_file: PlanFile | None = None,
    memory: int | None = None,
    progress: ReportProgress | None = None,
) -> Packing:
    """Plan the rows of `trie`; nothing is written.

    The limits and the rows come from `plan_file` if it is given, else `options` defines how they are planned. Without a
    capacity, the first of `usual_capacities` is used. `memory` is in bytes, None for `usual_memory`; tokens that do not
    fit are mapped files (`Trie.storage`), but nodes and trajectories must fit. `progress` is called with the trees
    planned so far.

    Raises:
        TreepackError: a trajectory that is too long, a plan that does not suit, no leaf weights if the options need
            them, or nodes and trajectories that do not fit into `memory`.
    """
    expect_type(trie, Trie, "plan_packing: trie", "read_to_trie or build_trie")
    expect_type(options, PackOptions, "plan_packing: options", "PackOptions(capacity=4096)")
    refuse_too_many(trie.num_nodes, trie.num_trajectories, memory=memory)
    options.check_method(plan_file.method if plan_file else options.method)
    left_out: Counter[str] = Counter()
    if options.leaf_weights:
        # First, because the weights of continuations depend on rollouts that may be too long.
        trie, left_out = weigh_leaves(trie, fallback_leaves=options.fallback_leaves)
    limits = _limits(trie, options, plan_file)
    fitted, counts = fit_capacity(trie, limits.longest, too_long=options.too_long)
    counts += left_out
    plan = plan_of_file(fitted, plan_file) if plan_file else plan_within(fitted, limits, options, progress=progress)
    nodes = packed_trie(fitted, plan.method)
    totals = trie_totals(fitted) | packed_totals(fitted, plan, check_plan(nodes, plan))
    totals["tiles_partial_unordered"] = unordered_tiles(nodes, plan)
    return Packing(fitted, plan, totals, dict(sorted(counts.items())), options)


def planning_bytes(num_nodes: int, num_trajectories: int) -> int:
    """Return about how much memory packing needs besides the tokens: the nodes, the trajectories and their plan."""
    return _NODE_BYTES * num_nodes + _TRAJECTORY_BYTES * num_trajectories


def refuse_too_many(num_nodes: int, num_trajectories: int, *, memory: int | None) -> None:
    """Refuse a trie whose plan does not fit into `memory` bytes, None for `usual_memory`.

    Raises:
        TreepackError: naming the memory that is needed.
    """
    memory = usual_memory() if memory is None else memory
    needed = planning_bytes(num_nodes, num_trajectories)
    if needed > memory:
        size = f"{num_trajectories:,} trajectories with {num_nodes:,} nodes"
        partitions = min(-(-needed // memory), max(1, num_trajectories))  # each has a trajectory
        raise TreepackError(
            f"packing {size} needs about {-(-needed >> 20):,} MB of memory, and {memory >> 20:,} MB may be used; give "
            f"--memory {-(-needed >> 20)}M, or --partitions {partitions} or more"
        )


def _limits(trie: Trie, options: PackOptions, plan_file: PlanFile | None) -> RowLimits:
    if plan_file is not None:
        return plan_file.limits
    capacity = options.capacity or usual_capacities(trie)[0]
    return RowLimits(capacity, options.pairs_budget, options.terms_budget)


def plan_within(trie: Trie, limits: RowLimits, options: PackOptions, *, progress: ReportProgress | None = None) -> Plan:
    """Return a plan of `trie` within `limits` by the method, the search and the balance of `options`."""
    return plan_rows(
        trie,
        capacity=limits,
        method=options.method,
        search=SearchOptions(options.effort, options.time_limit),
        multiple_of=options.balance,
        token_pairs=options.token_pairs,
        workers=options.workers,
        progress=progress,
    )
