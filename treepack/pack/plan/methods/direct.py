"""The packing problem as one integer program for CP-SAT: for budgets of pairs and terms, and to test exact methods.

    on[v, r]  1 if row r contains node v; row r is named after its lowest leaf, so only leaves >= r can be in it

    every leaf in exactly one row                     on[v, r] <= on[parent of v, r]
    on[root, r] = on[leaf r, r]: row r is in use      below each v: sum of size * on[., r] <= room below v * on[v, r]

At the root, the last constraint is the capacity. At other nodes it follows from that, but there it makes the linear
relaxation as strong as `recursive_bound`. Because rows are named after their lowest leaf, each partition of the leaves
has exactly one assignment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution
from treepack.trajectory import Int64

# Work for one tree without a time limit, in units of CP-SAT's own deterministic count, about a second each.
_WORK = {"low": 5.0, "normal": 30.0, "high": 300.0}


def direct(tree: PlanTree, limits: RowLimits, search: SearchOptions, *, incumbent: Int64) -> TreeSolution:
    """Return the best plan that CP-SAT finds, never worse than `incumbent` int64 [leaves], and the bound it proves.

    The plan has minimum tokens, then minimum rows, within all limits. It is the same on any machine, unless
    `search.time_limit` ends the search. O(nodes x leaves) variables.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    on = _variables(model, tree)
    _add_constraints(model, on, tree, limits)
    # One number compares tokens first and rows second; v == 0 adds 1 for each row in use.
    big = tree.num_leaves + 1
    sizes = tree.size.tolist()
    cost = {(v, r): sizes[v] * big + (v == 0) for v, r in on}
    total = cp_model.LinearExpr.weighted_sum(list(on.values()), list(cost.values()))
    start = _nodes_of_rows(tree, incumbent)
    # Several (v, r) share a variable, and CP-SAT refuses a second hint for it.
    for place, variable in {variable.index: (place, variable) for place, variable in on.items()}.values():
        model.add_hint(variable, place in start)
    model.add(total <= sum(cost[place] for place in start))
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # else a later interrupt ends Python at once
    solver.parameters.random_seed = 0
    if search.time_limit is None:
        solver.parameters.max_deterministic_time = _WORK[search.effort]
    else:
        solver.parameters.max_time_in_seconds = search.time_limit
    status = solver.solve(model)
    # The bound is a float of a whole number; 1e-6 keeps an error upwards from rounding up. Rows are fewer than `big`.
    bound = max(0, int(np.ceil(solver.best_objective_bound - 1e-6))) // big
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return TreeSolution(incumbent, bound)
    name = [next(r for r in range(k + 1) if solver.boolean_value(on[v, r])) for k, v in enumerate(tree.leaf.tolist())]
    return TreeSolution(np.unique(name, return_inverse=True)[1].astype(np.int64), bound)


def _variables(model: Any, tree: PlanTree) -> dict[tuple[int, int], Any]:
    """Return a variable for each node and each row that may contain it.

    The lowest leaf of a row and its ancestors share one variable, because the row contains all of them or none.
    """
    # The leaves below v are first[v] .. stop[v] - 1. Row r has leaves >= r only, so v can be in it if r < stop[v]. If
    # also first[v] <= r, v is its lowest leaf or above it. A root 0 with the leaves 1 and 2: first [0, 0, 1],
    # stop [2, 1, 2] -> row 0 may contain all three, row 1 the nodes 0 and 2, both with the variable used[1].
    first = np.searchsorted(tree.leaf, np.arange(tree.num_nodes)).tolist()
    stop = np.searchsorted(tree.leaf, tree.end).tolist()
    used = [model.new_bool_var("") for _ in range(tree.num_leaves)]
    return {
        (v, r): used[r] if first[v] <= r else model.new_bool_var("")
        for v in range(tree.num_nodes)
        for r in range(stop[v])
    }


def _add_constraints(model: Any, on: dict[tuple[int, int], Any], tree: PlanTree, limits: RowLimits) -> None:
    from ortools.sat.python.cp_model import LinearExpr

    weighted_sum = LinearExpr.weighted_sum
    leaves = tree.leaf.tolist()
    parent, ends, sizes = tree.parent.tolist(), tree.end.tolist(), tree.size.tolist()
    for k, v in enumerate(leaves):
        model.add_exactly_one(on[v, r] for r in range(k + 1))
    for (v, r), variable in on.items():
        if v:
            model.add_implication(variable, on[parent[v], r])
    room = (limits.capacity - tree.depth - tree.size).tolist()
    for (v, r), variable in on.items():
        if ends[v] > v + 1:
            below = [w for w in range(v + 1, ends[v]) if (w, r) in on]
            model.add(weighted_sum([on[w, r] for w in below], [sizes[w] for w in below]) <= room[v] * variable)
    pairs, terms = tree.pairs.tolist(), tree.terms.tolist()
    for r in range(tree.num_leaves):
        if limits.pairs is not None:
            nodes = [w for w in range(tree.num_nodes) if (w, r) in on]
            model.add(weighted_sum([on[w, r] for w in nodes], [pairs[w] for w in nodes]) <= limits.pairs * on[0, r])
        if limits.terms is not None:
            model.add(weighted_sum([on[v, r] for v in leaves[r:]], terms[r:]) <= limits.terms * on[0, r])


def _nodes_of_rows(tree: PlanTree, rows: Int64) -> set[tuple[int, int]]:
    """Return pairs of a node and a row that contains it, the rows named after their lowest leaves."""
    # rows [1, 0, 1, 2] of the leaves -> lowest [1, 0, 3] of the rows -> names [0, 1, 0, 3] of the leaves' rows
    lowest = np.full(tree.num_leaves, tree.num_leaves)
    np.minimum.at(lowest, rows, np.arange(tree.num_leaves))
    parent = tree.parent.tolist()
    pairs = set()
    for leaf, r in zip(tree.leaf.tolist(), lowest[rows].tolist(), strict=True):
        v = leaf
        while v >= 0 and (v, r) not in pairs:
            pairs.add((v, r))
            v = parent[v]
    return pairs
