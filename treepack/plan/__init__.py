"""Which trajectories go to which row: one function, one result type, one independent checker.

    Trie --plan_rows--> Plan --check_plan--> PlanTotals

Every method orders the leaves and cuts the order into rows of at most `capacity` tokens (`cuts.py`); a trajectory
that ends inside the tree rides along with the first leaf below it, for free. Afterwards rows that are not full are
put together, whatever trees they hold. `bounds.py` says how far any plan can be from the least possible total.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.plan import cuts
from treepack.trajectory import Int64
from treepack.trie import Trie

METHODS = {"contiguous": cuts.contiguous, "heuristic": cuts.deepest_first}


@dataclass(frozen=True, slots=True)
class Plan:
    """`row_of` int64 [num_trajectories]: the row of each trajectory, rows numbered from 0 without a gap."""

    method: str
    capacity: int
    row_of: Int64

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


def plan_rows(trie: Trie, *, capacity: int, method: str = "contiguous") -> Plan:
    """Assign every trajectory to a row of at most `capacity` tokens; rows never mix training steps.

    `method` "contiguous" cuts the leaves in depth-first order where that repeats the fewest tokens (the optimum of
    all contiguous cuts); "heuristic" is the Tree Training paper's (arXiv 2511.00413, section 2.2.2): deepest leaves
    first, similar depths together, depth-first, a new row when full. Rows are numbered by step and then by the first
    trajectory they hold.

    Raises:
        TreepackError: a trajectory longer than the capacity, or an unknown method.
    """
    if method not in METHODS:
        raise TreepackError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
    refuse_too_long(trie, capacity)
    leaves = cuts.leaf_nodes(trie)
    row_of_leaf = METHODS[method](trie, leaves, capacity)
    first_leaf = np.searchsorted(leaves, trie.end_node)
    raw = row_of_leaf[first_leaf]
    row_tokens = count_row_tokens(trie, raw, int(raw.max(initial=-1)) + 1)
    merged = cuts.merge_rows(raw, row_tokens, trie.step_rank, capacity)
    return Plan(method, capacity, _renumber(merged))


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
