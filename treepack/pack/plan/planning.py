"""Assign every trajectory to a row: `plan_rows`, the entry point of this folder, and its table of methods.

    Trie --shapes_of_trees--> PlanTree, ... --a method--> TreeSolution, ...
    TreeSolution, ... --merge_rows--> Plan --check_plan--> PlanTotals

N_pack, the tokens of all rows together, is a sum over trees, so each tree is planned alone:

    problem.py        input and output of a method            methods/         the methods, one file for each idea
    workers.py        all trees, in one process or several    auto.py          the default: it combines several methods
    bounds/           lower bounds on N_pack                  unions.py        sizes of given rows

These rows are items: they are merged into full rows by their sizes alone, whatever trees
they contain, by `merge_rows`. This costs no token, and it is bin packing:

    fill.py           merge rows                              balance.py       the same for R ranks, with even rows
    alternatives.py   other rows that merge better            check.py         check a plan against its definition
    plan.py           the result                              files.py         a plan as a file
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from treepack.pack.plan.unions import row_sizes, trained_tokens
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
    item_of, bound = _items(trie, limits, method, search, workers=workers, progress=progress)
    # Balancing counts score pairs, and the rows of the method sequence are rows of the unshared trie.
    source = packed_trie(trie, method) if multiple_of > 1 else trie

    def finish(item_of: Int64) -> Int64:
        if multiple_of > 1:
            return balance.balanced_rows(source, item_of, limits, multiple_of, token_pairs=token_pairs)
        if method in FOREST_METHODS:
            return item_of
        num_items = int(item_of.max()) + 1
        steps = balance.steps_of(item_of, trie.step_rank, num_items)
        return merge_rows(row_sizes(trie, item_of, num_items), steps, limits)[item_of]

    if progress is not None and method in METHODS:
        progress(Progress("merging rows", 0, None, ""))
    if method == "auto":
        forest = shapes_of_trees(trie, split_ends=limits.terms is not None)
        row_of = best_final_rows(trie, forest, limits, item_of, finish, lower_bound=bound, multiple_of=multiple_of)
    else:
        row_of = finish(item_of)
    row_of = _renumber_by_cost(source, row_of, token_pairs) if multiple_of > 1 else _renumber(row_of)
    return Plan(method, limits, row_of, bound, multiple_of, token_pairs)


def _items(
    trie: Trie,
    limits: RowLimits,
    method: str,
    search: SearchOptions,
    *,
    workers: int,
    progress: ReportProgress | None,
) -> tuple[Int64, int]:
    """Return the item of each trajectory, int64 [num_trajectories], and a lower bound on the tokens of any plan.

    An item is a row of one tree, which need not be full. Items of "greedy-online" and "sequence" are rows of all trees
    of a step, and items of "groups" are whole groups.

    Raises:
        TreepackError: a trajectory that exceeds a limit alone, or an unknown method.
    """
    names = [*METHODS, *FOREST_METHODS, GROUPS]
    if method not in names:
        raise TreepackError(f"method is {method!r}; expected one of {', '.join(names)}")
    _refuse_excesses(trie, limits)
    if method == GROUPS:
        return whole_groups(trie, limits), _lower_bound(trie, limits)
    if method in FOREST_METHODS:
        return online.plan_first_fit(trie, limits, FOREST_METHODS[method]), _lower_bound(trie, limits)
    forest = shapes_of_trees(trie, split_ends=limits.terms is not None)
    row_of_leaf, bound = plan_trees(forest, limits, METHODS[method], search, workers=workers, progress=progress)
    # rows of the leaves [0, 0, 1], leaves of the trajectories [0, 1, 1, 2] -> items [0, 0, 0, 1]
    return row_of_leaf[forest.leaf_of], bound


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
    _refuse_excesses(trie, file.limits)
    row_of = files.rows_of_plan_file(file, trie)
    bound = max(_lower_bound(trie, file.limits), file.lower_bound)
    return Plan(file.method, file.limits, row_of, bound, file.multiple_of)


def packed_trie(trie: Trie, method: str) -> Trie:
    """Return the trie whose nodes the rows contain: `trie` itself, or its unshared copy for the method "sequence".

    Both have the same trajectories in the same order.
    """
    return unshared(trie) if method == "sequence" else trie


def _lower_bound(trie: Trie, limits: RowLimits) -> int:
    """Return a lower bound on the tokens of all rows, whatever plan made them."""
    return sum(recursive_bound(tree, limits.capacity) for tree in shapes_of_trees(trie).trees())


def _refuse_excesses(trie: Trie, limits: RowLimits) -> None:
    """Refuse trajectories that exceed a limit alone; the message names the one with the largest excess."""
    shorter = "raise the budget of pairs, or drop or truncate longer trajectories"
    lengths = trie.lengths
    alone = (
        ("tokens", lengths, "capacity", limits.capacity, f"raise the capacity: {ANY_LENGTH}"),
        ("score pairs", path_pairs(lengths), "the budget of pairs", limits.pairs, shorter),
        ("loss terms", trained_tokens(trie), "the budget of terms", limits.terms, "raise the budget of terms"),
    )
    for unit, values, name, limit, remedy in alone:
        if limit is not None and (values > limit).any():
            worst = int(values.argmax())
            raise TreepackError(
                f"trajectory {trie.trajectories['trajectory_id'][worst].as_py()} has {values[worst]} {unit}, {name} is "
                f"{limit} ({int((values > limit).sum())} such in total); {remedy}"
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
