"""The last step of the multi-path program as a bin packing for CP-SAT, for roots where enumerating it is too much.

Above the root there is nothing, so only how many rows there are counts, not what they have left: choose one state of
every child, and put all traversals of the chosen states into as few rows as pay off, two of the same child never into
the same row (they would be one traversal).

    child 1   state {5, 3} or {9}         row 0  [5 . . 4 . .]        row 1  [3 . 7 . . . .]
    child 2   state {4, 7}
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from treepack.pack.plan.methods.completion import State

WORK_PER_SECOND = 200_000  # placements that take as long as one of CP-SAT's deterministic seconds
_MOST_VARIABLES = 20_000


@dataclass(frozen=True, slots=True)
class Target:
    """Plans of at most `tokens` tokens, and at most `rows` rows if of exactly that; never more than `most_rows`."""

    tokens: int
    rows: int
    most_rows: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The chosen state of each child and the row of each of its traversals; `work` is what finding it took.

    None if there is none within the target, or, unless `proven`, none was found; the best one if `proven`.
    """

    chosen: list[tuple[State, tuple[int, ...]]] | None
    proven: bool
    work: float


def is_small(children: list[list[State]], target: Target) -> bool:
    """Whether CP-SAT can be expected to do it."""
    kinds = sum(len(_kinds(states)) for states in children)
    return kinds * target.most_rows + sum(map(len, children)) <= _MOST_VARIABLES


def _kinds(states: list[State]) -> list[tuple[int, int]]:
    """(left, n) for every traversal with `left` tokens left that is the n-th such one of some state."""
    found: set[tuple[int, int]] = set()
    for _, rooms in states:
        found.update((left, n) for left, count in Counter(rooms).items() for n in range(count))
    return sorted(found)


def pack(children: list[list[State]], room: int, size: int, target: Target, *, work: float, seconds: float) -> Packing:
    """The best packing into rows of `room` tokens below a root of `size`; costs of states are up to the root's end."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    used = [model.new_bool_var("") for _ in range(target.most_rows)]
    for before, after in pairwise(used):
        model.add_implication(after, before)
    picks = [[model.new_bool_var("") for _ in states] for states in children]
    places = _add_traversals(model, children, picks, used, room)
    tokens = sum(
        pick * cost
        for some, states in zip(picks, children, strict=True)
        for pick, (cost, _) in zip(some, states, strict=True)
    )
    big = len(used) + 1
    total = tokens * big + sum(used) * (size * big + 1)
    model.add(total <= target.tokens * big + min(target.rows, len(used)))
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # else an interrupt after this one ends Python on the spot
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = min(work / WORK_PER_SECOND, 1e6)
    solver.parameters.max_time_in_seconds = min(max(seconds, 0.0), 1e6)
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time * WORK_PER_SECOND
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Packing(None, status == cp_model.INFEASIBLE, spent)
    chosen = []
    for states, some, rows in zip(children, picks, places, strict=True):
        state = states[next(i for i, pick in enumerate(some) if solver.boolean_value(pick))]
        seen: Counter[int] = Counter()
        row_of = []
        for left in state[1]:
            row_of.append(next(i for i, place in enumerate(rows[left, seen[left]]) if solver.boolean_value(place)))
            seen[left] += 1
        chosen.append((state, tuple(row_of)))
    return Packing(chosen, status == cp_model.OPTIMAL, spent)


def _add_traversals(
    model: Any, children: list[list[State]], picks: list[list[Any]], used: list[Any], room: int
) -> list[dict[tuple[int, int], list[Any]]]:
    """For each child, a variable for each kind of traversal and row.

    Rows are numbered by the first child in them, so that a child's traversals are in one of the first rows: as many as
    it and the children before it have traversals.
    """
    added: list[dict[tuple[int, int], list[Any]]] = []
    loads: list[Any] = [0] * len(used)
    reach = 0
    for states, some in zip(children, picks, strict=True):
        model.add_exactly_one(some)
        reach = min(reach + max(len(rooms) for _, rooms in states), len(used))
        rows = {}
        for left, n in _kinds(states):
            places = [model.new_bool_var("") for _ in range(reach)]
            having = [pick for pick, (_, rooms) in zip(some, states, strict=True) if rooms.count(left) > n]
            model.add(sum(places) == sum(having))
            for row, place in enumerate(places):
                loads[row] += (room - left) * place
                model.add_implication(place, used[row])
            rows[left, n] = places
        for row in range(reach):
            model.add_at_most_one(places[row] for places in rows.values())
        added.append(rows)
    for load, row_used in zip(loads, used, strict=True):
        model.add(load <= room * row_used)
    return added
