"""Assign every trajectory to a row: `plan_rows`, the entry point of this folder, and its table of methods.

    Trie --shapes_of_trees--> PlanTree, ... --a method--> TreeSolution, ...
    TreeSolution, ... --merge_rows--> Plan --check_plan--> PlanTotals

N_pack, the tokens of all rows together, is a sum over trees, so each tree is planned alone:

    problem.py        input and output of a method            methods/         the methods, one file for each idea
    workers.py        all trees, in one process or several    auto.py          the default: it combines several methods
    bounds/           lower bounds on N_pack                  unions.py        sizes of given rows

These rows are items, the result of `plan_items`: they are merged into full rows by their sizes alone, whatever trees
they contain, by `merge_rows`. This costs no token, and it is bin packing:

    fill.py           merge rows                              balance.py       the same for R ranks, with even rows
    alternatives.py   other rows that merge better            check.py         check a plan against its definition
    plan.py           the result                              files.py         a plan as a file
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.options import ANY_LENGTH
from treepack.pack.plan import auto, balance, files
from treepack.pack.plan.alternatives import best_final_rows
from treepack.pack.plan.bounds.lower_bound import recursive_bound
from treepack.pack.plan.fill import merge_rows
from treepack.pack.plan.methods import contiguous, exact, online, single_path
from treepack.pack.plan.methods.groups import whole_groups
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, path_pairs, shapes_of_trees
from treepack.pack.plan.unions import RowSizes, row_sizes, trained_tokens
from treepack.pack.plan.workers import plan_trees
from treepack.processes import Progress, ReportProgress
from treepack.trajectory import Int64
from treepack.trie.trie import Trie, unshared

_Method = Callable[[PlanTree, RowLimits, SearchOptions], TreeSolution]

METHODS: dict[str, _Method] = {
    "auto": auto.auto,
    "contiguous": contiguous.contiguous,
    "heuristic": contiguous.deepest_first,
    "single-path": single_path.single_path,
    "exact": exact.exact,
}

FOREST_METHODS: dict[str, online.ForestMethod] = {"greedy-online": online.greedy_online, "sequence": online.sequence}
"""Methods that plan all trees at once, so their rows need no merging."""

GROUPS = "groups"
"""The method that puts each group into one row, see `groups.py`."""


def plan_rows(
    trie: Trie,
    *,
    capacity: int | RowLimits,
    method: str = "auto",
    search: SearchOptions = SearchOptions(),  # noqa: B008
    multiple_of: int = 1,
    token_pairs: int = 0,
    workers: int = 1,
    progress: ReportProgress | None = None,
) -> Plan:
    """Assign every trajectory to a row of at most `capacity` tokens; rows never mix training steps.

    Rows are numbered by step and then by their first trajectory. docs/packing.md describes the methods. If
    `multiple_of` is over 1, the number of rows of every step is a multiple of it, rows of a step have about equal
    costs, and they are numbered by step and then by falling cost. The cost of a row is its score pairs, plus
    `token_pairs` for each token. The plan does not depend on `workers`, the number of processes. `progress` is called
    with the trees planned so far.

    Raises:
        TreepackError: a trajectory that exceeds a limit alone, an unknown method, or a step of too few trajectories.
    """
    if method == GROUPS and multiple_of > 1:
        raise TreepackError(
            "--balance splits groups to make rows even, but the method groups keeps each group in one row; choose one"
        )
    limits = RowLimits(capacity) if isinstance(capacity, int) else capacity
    items = plan_items(trie, capacity=limits, method=method, search=search, workers=workers, progress=progress)
    bound = int(items.tree_bounds.sum())
    # Balancing counts score pairs, and the rows of the method sequence are rows of the unshared trie.
    source = packed_trie(trie, method) if multiple_of > 1 else trie

    def finish(item_of: Int64) -> Int64:
        if multiple_of > 1:
            return balance.balanced_rows(source, item_of, limits, multiple_of, token_pairs=token_pairs)
        if method in FOREST_METHODS:
            return item_of
        merging = items if item_of is items.item_of else _items(trie, item_of, items.tree_bounds)
        return merge_rows(merging.sizes, merging.steps, limits)[item_of]

    if progress is not None and method in METHODS:
        progress(Progress("merging rows", 0, None, ""))
    if method == "auto":
        forest = shapes_of_trees(trie, split_ends=limits.terms is not None)
        row_of = best_final_rows(
            trie, forest, limits, items.item_of, finish, lower_bound=bound, multiple_of=multiple_of
        )
    else:
        row_of = finish(items.item_of)
    row_of = _renumber_by_cost(source, row_of, token_pairs) if multiple_of > 1 else _renumber(row_of)
    return Plan(method, limits, row_of, bound, multiple_of, items.tree_bounds, token_pairs)


@dataclass(frozen=True, slots=True)
class _TreeRows:
    """The first half of a plan: rows of single trees. Their sizes alone decide how they are merged.

    Attributes:
        item_of: item of each trajectory, int64 [num_trajectories].
        sizes: tokens, score pairs and loss terms of each item.
        steps: training step of each item as a rank from 0, int64 [items].
        tree_bounds: a lower bound on the tokens of all items of each tree, for any plan; int64 [num_trees].
    """

    item_of: Int64
    sizes: RowSizes
    steps: Int64
    tree_bounds: Int64


def plan_items(
    trie: Trie,
    *,
    capacity: int | RowLimits,
    method: str = "auto",
    search: SearchOptions = SearchOptions(),  # noqa: B008
    workers: int = 1,
    progress: ReportProgress | None = None,
) -> _TreeRows:
    """Assign every trajectory to a item of at most `capacity` tokens: a row of one tree, which need not be full.

    Items of "greedy-online" and "sequence" are rows of all trees of a step, and items of "groups" are whole groups.
    `merge_rows` is the second half. For "auto", `plan_rows` also tries other items, which may merge better.

    Raises:
        TreepackError: a trajectory that exceeds a limit alone, or an unknown method.
    """
    names = [*METHODS, *FOREST_METHODS, GROUPS]
    if method not in names:
        raise TreepackError(f"method is {method!r}; expected one of {', '.join(names)}")
    limits = RowLimits(capacity) if isinstance(capacity, int) else capacity
    refuse_excesses(excesses(trie, limits), limits)
    if method == GROUPS:
        return _items(trie, whole_groups(trie, limits), tree_bounds(trie, limits))
    if method in FOREST_METHODS:
        items = online.plan_first_fit(trie, limits, FOREST_METHODS[method])
        return _items(trie, items, tree_bounds(trie, limits))
    forest = shapes_of_trees(trie, split_ends=limits.terms is not None)
    row_of_leaf, bounds = plan_trees(forest, limits, METHODS[method], search, workers=workers, progress=progress)
    # rows of the leaves [0, 0, 1], leaves of the trajectories [0, 1, 1, 2] -> items [0, 0, 0, 1]
    return _items(trie, row_of_leaf[forest.leaf_of], bounds)


def _items(trie: Trie, item_of: Int64, bounds: Int64) -> _TreeRows:
    num_items = int(item_of.max()) + 1
    steps = balance.steps_of(item_of, trie.step_rank, num_items)
    return _TreeRows(item_of, row_sizes(trie, item_of, num_items), steps, bounds)


def plan_lines(trie: Trie, plan: Plan, *, trie_sha256: str | None = None) -> Iterator[str]:
    """Yield the lines of a plan file, see `files.py`; `plan_of_file` is the inverse."""
    header = {
        "capacity": plan.limits.capacity,
        "pairs": plan.limits.pairs,
        "terms": plan.limits.terms,
        "multiple_of": plan.multiple_of,
        "method": plan.method,
        "trie": trie_sha256,
        "lower_bound": plan.lower_bound,
    }
    return files.lines_of_file(header, plan.row_of, trie.trajectories["trajectory_id"].to_pylist())


def plan_of_file(trie: Trie, file: files.PlanFile) -> Plan:
    """Return the plan of a plan file for `trie`. Check it with `check_plan`.

    Raises:
        TreepackError: a trajectory of the file is not in `trie`, is in two rows, is in none, or exceeds a limit alone.
    """
    refuse_excesses(excesses(trie, file.limits), file.limits)
    row_of = files.rows_of_plan_file(file, trie)
    bound = max(int(tree_bounds(trie, file.limits).sum()), file.lower_bound)
    return Plan(file.method, file.limits, row_of, bound, file.multiple_of)


def packed_trie(trie: Trie, method: str) -> Trie:
    """Return the trie whose nodes the rows contain: `trie` itself, or its unshared copy for the method "sequence".

    Both have the same trajectories in the same order.
    """
    return unshared(trie) if method == "sequence" else trie


def tree_bounds(trie: Trie, limits: RowLimits) -> Int64:
    """Return a lower bound on the tokens of all rows of each tree, int64 [num_trees], whatever plan made them."""
    return np.array([recursive_bound(tree, limits.capacity) for tree in shapes_of_trees(trie).trees()], np.int64)


@dataclass(frozen=True, slots=True)
class ExcessTrajectories:
    """Trajectories that exceed a limit alone: their number, and the one with the largest `value` in `unit`."""

    unit: str
    value: int
    trajectory: str
    count: int


def excesses(trie: Trie, limits: RowLimits) -> list[ExcessTrajectories]:
    """Return the trajectories that exceed each limit alone, one entry for each limit that is exceeded."""
    lengths = trie.lengths
    alone = (
        ("tokens", lengths, limits.capacity),
        ("score pairs", path_pairs(lengths), limits.pairs),
        ("loss terms", trained_tokens(trie), limits.terms),
    )
    entries = []
    for unit, values, limit in alone:
        if limit is not None and (values > limit).any():
            worst = int(values.argmax())
            name = trie.trajectories["trajectory_id"][worst].as_py()
            entries.append(ExcessTrajectories(unit, int(values[worst]), name, int((values > limit).sum())))
    return entries


def refuse_excesses(entries: Iterable[ExcessTrajectories], limits: RowLimits) -> None:
    """Refuse trajectories that exceed a limit alone, in one or several tries.

    Raises:
        TreepackError: names the trajectory that exceeds the limit by the largest amount.
    """
    shorter = "raise the budget of pairs, or drop or truncate longer trajectories"
    names = {
        "tokens": ("capacity", limits.capacity, f"raise the capacity: {ANY_LENGTH}"),
        "score pairs": ("the budget of pairs", limits.pairs, shorter),
        "loss terms": ("the budget of terms", limits.terms, "raise the budget of terms"),
    }
    every = [*entries]
    for unit, (name, limit, remedy) in names.items():
        mine = [excess for excess in every if excess.unit == unit]
        if mine:
            worst = max(mine, key=lambda excess: excess.value)
            raise TreepackError(
                f"trajectory {worst.trajectory} has {worst.value} {unit}, {name} is {limit} "
                f"({sum(excess.count for excess in mine)} such in total); {remedy}"
            )


def _renumber(row_of: Int64) -> Int64:
    """Number the rows by their first trajectory. Trajectories are sorted by step, so rows are too."""
    # row_of [5, 2, 5, 0] -> names [0, 2, 5], first [3, 1, 0], inverse [2, 1, 2, 0];
    # argsort twice ranks the first ones: [3, 1, 0] -> [2, 1, 0] -> row_of [0, 1, 0, 2]
    _, first, inverse = np.unique(row_of, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)


def _renumber_by_cost(trie: Trie, row_of: Int64, token_pairs: int) -> Int64:
    """Number the rows by step, and inside a step by falling cost."""
    first = _renumber(row_of)
    num_rows = int(first.max()) + 1
    steps = balance.steps_of(first, trie.step_rank, num_rows)
    costs = balance.row_costs(row_sizes(trie, first, num_rows), token_pairs)
    # steps [0, 0, 1], costs [3, 9, 5] -> order [1, 0, 2] -> its inverse, the new numbers of the rows, [1, 0, 2]
    order = np.lexsort([np.arange(num_rows), -costs, steps])
    return np.argsort(order)[first].astype(np.int64)


def bound_of_slice(trie: Trie, plan: Plan, num_chain: int) -> int:
    """Return a lower bound on the tokens of a slice in the rows of any plan of the whole trie, without its chain.

    The first `num_chain` nodes of `trie`, the chain, belong to another slice, which counts their tokens. The rows of
    the whole trie, reduced to the trajectories of this slice, are rows of this slice; so the bounds of all slices add
    up to a bound for the whole trie.
    """
    assert plan.tree_bounds is not None
    if num_chain == 0:
        return int(plan.tree_bounds.sum())
    # Chain 0 1, nodes 2 .. 5 of the first tree: a forest of the nodes 0 .. 3, whose roots keep their depth.
    end = int(trie.node_end[0])
    stop = int(np.searchsorted(trie.end_node, end))
    own = slice(num_chain, end)
    rest = replace(
        trie,
        node_start=trie.node_start[num_chain : end + 1],
        node_end=trie.node_end[own] - num_chain,
        parent=np.maximum(trie.parent[own] - num_chain, -1),
        depth=trie.depth[own],
        num_passing=trie.num_passing[own],
        end_node=trie.end_node[:stop] - num_chain,
        trajectories=trie.trajectories.slice(0, stop),
    )
    return int(tree_bounds(rest, plan.limits).sum() + plan.tree_bounds[1:].sum())
