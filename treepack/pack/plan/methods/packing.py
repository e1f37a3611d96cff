"""The last step of the multi-path program as bin packing by CP-SAT, for roots with too many states to enumerate.

No node is above the root, so only the number of rows matters, not the room left in them. Choose one state of
every child, and put all traversals of the chosen states into rows, so that the states and the
rows together have the minimum number of tokens. Two traversals of the same child are never in the same row, because
they would be one traversal.

    child 1   state {5, 3} or {9}         row 0  [5 . . 4 . .]        row 1  [3 . 7 . . . .]
    child 2   state {4, 7}
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from treepack.pack.plan.methods.completion import State

_WORK_PER_SECOND = 200_000  # placements that take as long as one deterministic second of CP-SAT
_MAX_VARIABLES = 20_000  # with more, CP-SAT is too slow to be of use


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """Plans of fewer than `tokens` tokens, or of exactly `tokens` in at most `rows` rows; all with up to `max_rows`."""

    tokens: int
    rows: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class _TraversalPacking:
    """The chosen state of each child with the row of each of its traversals, and the work of finding it.

    `chosen` is None if no packing is within the target, or if CP-SAT found none and `proven` is False. If
    `proven` is True, a packing is the best one.
    """

    chosen: list[tuple[State, tuple[int, ...]]] | None
    proven: bool
    work: float


def is_small(children: list[list[State]], target: PlanTarget) -> bool:
    """Return whether CP-SAT can solve the program: it has a variable for each state, and for each kind and row."""
    kinds = sum(len(_kinds(states)) for states in children)
    return kinds * target.max_rows + sum(map(len, children)) <= _MAX_VARIABLES


def _kinds(states: list[State]) -> list[tuple[int, int]]:
    """Return (left, n) for every traversal that is the n-th one with `left` tokens left of some state."""
    # states of rooms (3, 3) and (3, 9) -> [(3, 0), (3, 1), (9, 0)]
    kinds: set[tuple[int, int]] = set()
    for _, rooms in states:
        kinds.update((left, n) for left, count in Counter(rooms).items() for n in range(count))
    return sorted(kinds)


def pack(
    children: list[list[State]], room: int, size: int, target: PlanTarget, *, work: float, seconds: float
) -> _TraversalPacking:
    """Return the best packing into rows with `room` tokens below a root of `size` tokens.

    The costs of the states are their tokens strictly below the root.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    # Rows in use come first, which removes symmetric solutions.
    used = [model.new_bool_var("") for _ in range(target.max_rows)]
    for before, after in pairwise(used):
        model.add_implication(after, before)
    picks = [[model.new_bool_var("") for _ in states] for states in children]
    places = _add_traversals(model, children, picks, used, room)
    tokens = sum(
        pick * cost
        for some, states in zip(picks, children, strict=True)
        for pick, (cost, _) in zip(some, states, strict=True)
    )
    # One number compares tokens first and rows second: each row costs the root's tokens and 1.
    big = len(used) + 1
    total = tokens * big + sum(used) * (size * big + 1)
    model.add(total <= target.tokens * big + min(target.rows, len(used)))
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # else a later interrupt ends Python at once
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = min(work / _WORK_PER_SECOND, 1e6)
    solver.parameters.max_time_in_seconds = min(max(seconds, 0.0), 1e6)
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time * _WORK_PER_SECOND
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _TraversalPacking(None, status == cp_model.INFEASIBLE, spent)
    chosen = []
    for states, some, rows in zip(children, picks, places, strict=True):
        state = states[next(i for i, pick in enumerate(some) if solver.boolean_value(pick))]
        seen: Counter[int] = Counter()
        row_of = []
        for left in state[1]:
            row_of.append(next(i for i, place in enumerate(rows[left, seen[left]]) if solver.boolean_value(place)))
            seen[left] += 1
        chosen.append((state, tuple(row_of)))
    return _TraversalPacking(chosen, status == cp_model.OPTIMAL, spent)


def _add_traversals(
    model: Any, children: list[list[State]], picks: list[list[Any]], used: list[Any], room: int
) -> list[dict[tuple[int, int], list[Any]]]:
    """Add and return for each child a variable for each kind of traversal and each row.

    Rows are numbered by the first child in them. So the traversals of a child are in the first n rows; n is the maximum
    number of traversals of this child and the children before it together.
    """
    variables: list[dict[tuple[int, int], list[Any]]] = []
    loads: list[Any] = [0] * len(used)
    reach = 0
    for states, some in zip(children, picks, strict=True):
        model.add_exactly_one(some)
        reach = min(reach + max(len(rooms) for _, rooms in states), len(used))
        rows = {}
        for left, n in _kinds(states):
            places = [model.new_bool_var("") for _ in range(reach)]
            # A traversal of this kind is in exactly one row if the chosen state has it, else in none.
            having = [pick for pick, (_, rooms) in zip(some, states, strict=True) if rooms.count(left) > n]
            model.add(sum(places) == sum(having))
            for row, place in enumerate(places):
                loads[row] += (room - left) * place
                model.add_implication(place, used[row])
            rows[left, n] = places
        # Two traversals of one child are never in the same row.
        for row in range(reach):
            model.add_at_most_one(places[row] for places in rows.values())
        variables.append(rows)
    for load, row_used in zip(loads, used, strict=True):
        model.add(load <= room * row_used)
    return variables
