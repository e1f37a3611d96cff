"""Which trajectories go to which row: one function, one result type, one independent checker.

    Trie --forest_of--> Tree, ... --a method--> Solution, ... --merge_rows--> Plan --check_plan--> PlanTotals

The total of all rows, N_pack, is a sum over trees, so each tree is planned alone (`problem.py` has all that a method
sees); then rows that are not full are put together, whatever trees they hold, which costs nothing (`merge.py`).
`bounds.py` says how far any plan can be from the least possible total; `balance.py` makes rows for several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan import auto, balance, files
from treepack.pack.plan import fill as merge
from treepack.pack.plan.alternatives import finished_best
from treepack.pack.plan.bounds import lower_bound as bounds
from treepack.pack.plan.methods import contiguous as cuts
from treepack.pack.plan.methods import exact, online, single_path
from treepack.pack.plan.methods.groups import whole_groups
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.problem import Limits, PlanForest, PlanTree, Search, Solution, forest_of, path_pairs
from treepack.pack.plan.unions import row_sizes, trained_tokens
from treepack.pack.plan.workers import plan_trees
from treepack.trajectory import Int64
from treepack.trie.trie import Trie, unshared

Method = Callable[[PlanTree, Limits, Search], Solution]
ForestMethod = Callable[[PlanForest, Int64, Int64, Limits], Int64]

METHODS: dict[str, Method] = {
    "auto": auto.auto,
    "contiguous": cuts.contiguous,
    "heuristic": cuts.deepest_first,
    "single-path": single_path.single_path,
    "exact": exact.exact,
}

FOREST_METHODS: dict[str, ForestMethod] = {"greedy-online": online.greedy_online, "sequence": online.sequence}
"""Methods that see all trees at once and fill rows across them."""

GROUPS = "groups"
"""The method that keeps each group in one row, see `groups.py`."""


def plan_rows(
    trie: Trie,
    *,
    capacity: int | Limits,
    method: str = "auto",
    search: Search = Search(),  # noqa: B008
    multiple_of: int = 1,
    workers: int = 1,
) -> Plan:
    """Assign every trajectory to a row of at most `capacity` tokens; rows never mix training steps.

    Rows are numbered by step and then by the first trajectory they hold. docs/packing.md describes the methods.
    With `multiple_of` over 1 every step gets a multiple of so many rows, even in score pairs and numbered by step and
    then by pairs, the most first. With several `workers` (processes) the plan is the same.

    Raises:
        TreepackError: a trajectory that exceeds a limit alone, an unknown method, or a step of too few trajectories.
    """
    known = [*METHODS, *FOREST_METHODS, GROUPS]
    if method not in known:
        raise TreepackError(f"method is {method!r}; expected one of {', '.join(known)}")
    if method == GROUPS and multiple_of > 1:
        raise TreepackError("rows are made even by splitting groups, which the method groups keeps whole; ask for one")
    limits = Limits(capacity) if isinstance(capacity, int) else capacity
    refuse_too_long(trie, limits)
    laid_out = packed_trie(trie, method) if multiple_of > 1 else trie

    def finish(pieces: Int64) -> Int64:
        if multiple_of > 1:
            return balance.balanced_rows(laid_out, pieces, limits, multiple_of)
        return pieces if method in FOREST_METHODS else _merged(trie, pieces, limits)

    if method == GROUPS:
        row_of, bound = _merged(trie, whole_groups(trie, limits), limits), _bound(trie, limits)
    elif method in FOREST_METHODS:
        pieces, bound = _plan_forest(trie, limits, method), _bound(trie, limits)
        row_of = finish(pieces)
    else:
        forest = forest_of(trie, split_ends=limits.terms is not None)
        row_of_leaf, bound = plan_trees(forest, limits, METHODS[method], search, workers=workers)
        pieces = row_of_leaf[forest.leaf_of]
        if method == "auto":
            row_of = finished_best(trie, forest, limits, pieces, finish, lower_bound=bound, multiple_of=multiple_of)
        else:
            row_of = finish(pieces)
    numbered = _by_pairs(laid_out, row_of) if multiple_of > 1 else _renumber(row_of)
    return Plan(method, limits, numbered, bound, multiple_of)


def _merged(trie: Trie, row_of: Int64, limits: Limits) -> Int64:
    num_rows = int(row_of.max()) + 1
    steps = balance.steps_of(row_of, trie.step_rank, num_rows)
    return merge.merge_rows(row_sizes(trie, row_of, num_rows), steps, limits)[row_of]


def plan_lines(trie: Trie, plan: Plan, *, trie_sha256: str | None = None) -> Iterator[str]:
    """The lines of the file that `read_plan` reads; `files.py` describes it."""
    limits = plan.limits
    header = {
        **{"capacity": limits.capacity, "pairs": limits.pairs, "terms": limits.terms},
        **{"multiple_of": plan.multiple_of, "method": plan.method, "trie": trie_sha256},
        "lower_bound": plan.lower_bound,
    }
    return files.plan_lines(header, plan.row_of, trie.trajectories["trajectory_id"].to_pylist())


def plan_of_file(trie: Trie, given: files.PlanFile) -> Plan:
    """The plan that a file gives for `trie`, for `check_plan` to check.

    Raises:
        TreepackError: a trajectory that `trie` does not have, that is in two rows, in none, or exceeds a limit alone.
    """
    refuse_too_long(trie, given.limits)
    row_of = files.rows_of(given, trie)
    bound = max(_bound(trie, given.limits), given.lower_bound)
    return Plan(given.method, given.limits, row_of, bound, given.multiple_of)


def packed_trie(trie: Trie, method: str) -> Trie:
    """The trie, of the same trajectories in the same order, that the rows of a plan of `trie` by `method` lay out.

    It is `trie` itself for all methods but "sequence", whose rows share nothing.
    """
    return unshared(trie) if method == "sequence" else trie


def _bound(trie: Trie, limits: Limits) -> int:
    return sum(bounds.recursive_bound(tree, limits.capacity) for tree in forest_of(trie).trees())


def _plan_forest(trie: Trie, limits: Limits, method: str) -> Int64:
    forest = forest_of(trie, split_ends=True)
    order, steps = forest.leaf_of[online.arrival_order(trie)], np.zeros(forest.num_leaves, np.int64)
    steps[forest.leaf_of] = trie.step_rank
    row_of_leaf = FOREST_METHODS[method](forest, order, steps, limits)
    return row_of_leaf[forest.leaf_of]


def refuse_too_long(trie: Trie, limits: Limits) -> None:
    """Raise a TreepackError that names the trajectory that most exceeds a limit alone, if one does."""
    lengths = trie.lengths
    shorter = ", or drop or truncate what is too long"
    alone = (
        ("tokens", lengths, "capacity", limits.capacity, "raise the capacity" + shorter),
        (
            "score pairs",
            path_pairs(lengths),
            "the budget of pairs",
            limits.pairs,
            "raise the budget of pairs" + shorter,
        ),
        ("loss terms", trained_tokens(trie), "the budget of terms", limits.terms, "raise the budget of terms"),
    )
    for unit, values, name, limit, remedy in alone:
        worst = int(values.argmax())
        if limit is not None and values[worst] > limit:
            raise TreepackError(
                f"trajectory {trie.trajectories['trajectory_id'][worst].as_py()} has {values[worst]} {unit}, "
                f"{name} is {limit} ({int((values > limit).sum())} such in all); {remedy}"
            )


def _renumber(row_of: Int64) -> Int64:
    """Rows numbered by the first trajectory they hold (trajectories are sorted by step)."""
    _, first, inverse = np.unique(row_of, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)


def _by_pairs(trie: Trie, row_of: Int64) -> Int64:
    """Rows numbered by step, then by pairs, the most first."""
    first = _renumber(row_of)
    num_rows = int(first.max()) + 1
    steps = balance.steps_of(first, trie.step_rank, num_rows)
    order = np.lexsort([np.arange(num_rows), -row_sizes(trie, first, num_rows).pairs, steps])
    return np.argsort(order)[first].astype(np.int64)
