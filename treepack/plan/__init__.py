"""Which trajectories go to which row: one function, one result type, one independent checker.

    Trie --forest_of--> Tree, ... --a method--> Solution, ... --merge_rows--> Plan --check_plan--> PlanTotals

The total of all rows, N_pack, is a sum over trees, so each tree is planned alone (`problem.py` has all that a method
sees); then rows that are not full are put together, whatever trees they hold, which costs nothing (`merge.py`).
`bounds.py` says how far any plan can be from the least possible total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.plan import bounds, cuts, exact, merge, online, single_path
from treepack.plan.problem import EFFORTS, Forest, Limits, Search, Solution, Tree, forest_of
from treepack.plan.processes import plan_trees
from treepack.trajectory import Int64
from treepack.trie import Trie

__all__ = [
    "EFFORTS",
    "FOREST_METHODS",
    "METHODS",
    "Limits",
    "Plan",
    "PlanTotals",
    "Search",
    "check_plan",
    "plan_rows",
]

Method = Callable[[Tree, Limits, Search], Solution]
ForestMethod = Callable[[Forest, Int64, Int64, Limits], Int64]

METHODS: dict[str, Method] = {
    "contiguous": cuts.contiguous,
    "heuristic": cuts.deepest_first,
    "single-path": single_path.single_path,
    "exact": exact.exact,
}

FOREST_METHODS: dict[str, ForestMethod] = {"greedy-online": online.greedy_online, "sequence": online.sequence}
"""Methods that see all trees at once and fill rows across them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`row_of` int64 [num_trajectories]: the row of each trajectory, rows numbered from 0 without a gap.

    No plan within the same capacity has fewer tokens than `lower_bound`.
    """

    method: str
    limits: Limits
    row_of: Int64
    lower_bound: int = 0

    @property
    def capacity(self) -> int:
        return self.limits.capacity

    @property
    def num_rows(self) -> int:
        return int(self.row_of.max(initial=-1)) + 1

    def members(self) -> list[Int64]:
        """Trajectories of each row, ascending."""
        order = np.argsort(self.row_of, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.row_of, minlength=self.num_rows))[:-1])


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """What a valid plan costs: `row_tokens` int64 [num_rows], the union of root-to-end paths of each row."""

    row_tokens: Int64

    @property
    def num_rows(self) -> int:
        return len(self.row_tokens)

    @property
    def tokens_packed(self) -> int:
        return int(self.row_tokens.sum())


def plan_rows(
    trie: Trie,
    *,
    capacity: int | Limits,
    method: str = "contiguous",
    search: Search = Search(),  # noqa: B008
    workers: int = 1,
) -> Plan:
    """Assign every trajectory to a row of at most `capacity` tokens; rows never mix training steps.

    Rows are numbered by step and then by the first trajectory they hold. docs/packing.md describes the methods.
    With several `workers` (processes) the plan is the same.

    Raises:
        TreepackError: a trajectory that exceeds a limit alone, or an unknown method.
    """
    if method not in METHODS and method not in FOREST_METHODS:
        raise TreepackError(f"method is {method!r}; expected one of {', '.join([*METHODS, *FOREST_METHODS])}")
    limits = Limits(capacity) if isinstance(capacity, int) else capacity
    refuse_too_long(trie, limits.capacity)
    if method in FOREST_METHODS:
        return _plan_forest(trie, limits, method)
    forest = forest_of(trie, split_ends=limits.terms is not None)
    row_of_leaf, bound = plan_trees(forest, limits, METHODS[method], search, workers=workers)
    row_of = row_of_leaf[forest.leaf_of]
    row_tokens = count_row_tokens(trie, row_of, int(row_of.max(initial=-1)) + 1)
    merged = merge.merge_rows(row_of, row_tokens, trie.step_rank, limits.capacity)
    return Plan(method, limits, _renumber(merged), bound)


def _plan_forest(trie: Trie, limits: Limits, method: str) -> Plan:
    forest = forest_of(trie, split_ends=True)
    order, steps = forest.leaf_of[online.arrival_order(trie)], np.zeros(forest.num_leaves, np.int64)
    steps[forest.leaf_of] = trie.step_rank
    row_of_leaf = FOREST_METHODS[method](forest, order, steps, limits)
    bound = sum(bounds.recursive_bound(tree, limits.capacity) for tree in forest.trees())
    return Plan(method, limits, _renumber(row_of_leaf[forest.leaf_of]), bound)


def refuse_too_long(trie: Trie, capacity: int) -> None:
    """Raise a TreepackError that names the longest trajectory if it exceeds `capacity` tokens."""
    lengths = trie.lengths
    worst = int(lengths.argmax())
    if lengths[worst] > capacity:
        name = trie.trajectories["trajectory_id"][worst].as_py()
        raise TreepackError(
            f"trajectory {name} has {lengths[worst]} tokens, capacity is {capacity} "
            f"({int((lengths > capacity).sum())} such in all); raise the capacity, or drop or truncate what is too long"
        )


def _renumber(row_of: Int64) -> Int64:
    """Rows numbered by the first trajectory they hold (trajectories are sorted by step)."""
    _, first, inverse = np.unique(row_of, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)


def check_plan(trie: Trie, plan: Plan) -> PlanTotals:
    """Check `plan` against the definition and count its tokens, sharing nothing with the methods.

    Raises:
        TreepackError: a trajectory without a row, a row over the capacity, empty, or with several training steps.
    """
    if plan.row_of.shape != (trie.num_trajectories,) or plan.row_of.min(initial=0) < 0:
        raise TreepackError(f"the plan does not give each of the {trie.num_trajectories} trajectories a row")
    totals = PlanTotals(count_row_tokens(trie, plan.row_of, plan.num_rows))
    steps = trie.step_rank
    for row, tokens in enumerate(totals.row_tokens.tolist()):
        if tokens == 0:
            raise TreepackError(f"row {row} of the plan is empty")
        if tokens > plan.capacity:
            raise TreepackError(f"row {row} of the plan has {tokens} tokens, over the capacity of {plan.capacity}")
    low = np.full(plan.num_rows, steps.max(initial=0))
    high = np.zeros(plan.num_rows, np.int64)
    np.minimum.at(low, plan.row_of, steps)
    np.maximum.at(high, plan.row_of, steps)
    if (low != high).any():
        raise TreepackError(f"row {int((low != high).argmax())} of the plan mixes training steps")
    return totals


def count_row_tokens(trie: Trie, row_of: Int64, num_rows: int) -> Int64:
    """Tokens of each row, int64 [num_rows]: a walk from every end to the root counts each (row, node) pair once."""
    parent, sizes = trie.parent.tolist(), trie.node_length.tolist()
    last_row = [-1] * trie.num_nodes
    row_tokens = [0] * num_rows
    order = np.argsort(row_of, kind="stable")
    ends = trie.end_node[order].tolist()
    for row, node in zip(row_of[order].tolist(), ends, strict=True):
        while node >= 0 and last_row[node] != row:
            last_row[node] = row
            row_tokens[row] += sizes[node]
            node = parent[node]
    return np.array(row_tokens, np.int64)
