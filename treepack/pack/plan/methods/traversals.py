"""One run of the multi-path dynamic program: the useful ways in which rows can pass through each node.

A traversal of node u is the part of a row below u. A state of u is a set of traversals that together contain all leaves
below u. The paper describes a traversal by the tokens it has below u. Here it is described by its room, the tokens that
its row has left. The room already counts the path from the root, so it does not change on the way up. The cost of a
state is the number of tokens strictly below u in all its traversals. It is cost(b) of the paper: every node v is paid
size(v) times its number of traversals.

    leaf l          one traversal with room C - (tokens from the root to the end of l), cost 0
    child v to u    (lift) the cost grows by size(v) for every traversal
    merging         traversals of different children with rooms x and y can be one traversal, if its room,
                    x + y - (C - tokens from the root to the end of u), is not negative: both count the path to u

Two traversals of one child are never merged: they would be one traversal of the child, in another state of it. Children
of u are merged one after another: each traversal of the next child joins a different traversal so far, or none. Four
rules keep the number of states small, and none of them loses the best plan:

- Completion (`completion.py`): a partial plan is dropped if its cheapest completion exceeds the target.
- Rounding (`TokenSums`): the room of a traversal is rounded down to the largest sum that can still be added, so
  that many states become equal. At the root nothing can be added, so all states of the same number of traversals are
  equal.
- Dominance (`dominance.py`): a state is dropped if another one is at least as good in every plan.
- Exact fit: if traversal t fills up traversal r exactly, t joins r or an earlier one. In a plan with t in another row
  q, and r in row p with other tokens X, X needs at most the room of r. So X fits into q in place of t, and t into p.
  Rows p and q pass through the same ancestors as before, so nothing is paid twice; X may even share tokens with q.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.methods.completion import (
    CompletionBounds,
    Rooms,
    State,
    SubtreeShape,
    TokenSums,
    add_sums,
    suffix_maximum,
)
from treepack.pack.plan.methods.packing import PlanTarget, is_small, pack
from treepack.pack.plan.methods.placements import NEW, RoundedRooms, placements, placements_of_closed
from treepack.pack.plan.problem import SearchOptions
from treepack.trajectory import Int64

# The origin of a partial state: the partial state before it, the state of the child, and the placement of the latter.
_Step = tuple[Rooms, Rooms, tuple[int, ...]]
_MAX_STATES = 1_000_000  # of one run, about half a gigabyte
_WORK = {"low": 1e5, "normal": 1e6, "high": 1e7}  # placements for one tree without a time limit
_STATES_FOR_CP_SAT = 20_000  # of the first children of the root; with more, CP-SAT packs all of its children


class OutOfWorkError(Exception):
    """The work, the time or the memory allowed is used up."""


@dataclass(slots=True)
class PlacementBudget:
    """The work that is left, counted in placements, and the time at which to stop."""

    work: float
    deadline: float

    @classmethod
    def of(cls, search: SearchOptions) -> PlacementBudget:
        """Return a budget that begins now: the time limit if there is one, else the work of the effort."""
        if search.time_limit is None:
            return cls(_WORK[search.effort], math.inf)
        return cls(math.inf, time.monotonic() + search.time_limit)

    def spend(self, work: float) -> None:
        """Take `work` off the budget.

        Raises:
            OutOfWorkError: the budget is used up.
        """
        self.work -= work
        if self.work < 0 or time.monotonic() > self.deadline:
            raise OutOfWorkError


@dataclass(frozen=True, slots=True)
class _ChildLimits:
    """Limits for merging a child with the children before it: `room` below their parent, and bounds by traversals.

    `max_tokens[k]` tokens may be in k traversals or more. In k traversals, `fits[k]` tokens of room may be used, so
    that the later children still fit.
    """

    room: int
    rounding: RoundedRooms
    max_tokens: list[int]
    fits: list[int]


@dataclass(slots=True)
class SearchOutcome:
    """The best plan within the target, if there is one, and the proof of the run.

    `rows` int64 [leaves] is None if the run has no plan. If `exhaustive` is True, no plan within the target is better
    than `rows`, and plans outside the target have at least `excess` tokens more than the target.
    """

    rows: Int64 | None
    exhaustive: bool
    excess: int


class TraversalProgram:
    """One run of the dynamic program for the plans within the target of `completion`."""

    def __init__(self, shape: SubtreeShape, completion: CompletionBounds, budget: PlacementBudget, width: int) -> None:
        self.shape, self.completion, self.budget, self.width = shape, completion, budget, width
        self.sums = TokenSums(shape)
        self.exhaustive = True
        self.num_states = 0
        self.excess = 1 << 50  # no plan outside the target has been dropped yet
        self.steps: list[list[dict[Rooms, tuple[int, _Step]]]] = [[] for _ in shape.size]
        self.roundings: list[list[RoundedRooms]] = [[] for _ in shape.size]
        self.states: list[list[State]] = [[] for _ in shape.size]

    def run(self) -> SearchOutcome:
        """Solve all nodes from the last to the root, and return the best plan of the root.

        Raises:
            OutOfWorkError: the budget or the memory is used up.
        """
        shape = self.shape
        for node in range(len(shape.size) - 1, -1, -1):
            self.states[node] = self._solve(node) if shape.children[node] else [(0, (shape.room[node],))]
            if not self.states[node]:
                return SearchOutcome(None, self.exhaustive, max(1, self.excess))
            self.sums.settle(node, {left for _, rooms in self.states[node] for left in rooms})
            if shape.children[node]:
                self.completion.settle(node, [(len(rooms), cost) for cost, rooms in self.states[node]])
        best = min(self.states[0], key=lambda state: (state[0] + len(state[1]) * shape.size[0], len(state[1])))
        return SearchOutcome(self._rows(best[1]), self.exhaustive, 0)

    def _solve(self, node: int) -> list[State]:
        """Return the states of an inner node, cheapest first, by merging the states of one child after another."""
        from treepack.pack.plan.methods.dominance import drop_dominated

        shape, room = self.shape, self.shape.room[node]
        self.budget.spend(shape.num_leaves)
        allowed = self.completion.allowed(node)
        rest = self.completion.inner[node]
        partial: list[State] = [(0, ())]
        self.roundings[node] = self._roundings(node)
        children = [self._lift(child) for child in shape.children[node]]
        for at, child in enumerate(shape.children[node]):
            # The minimum tokens of the children that are still to come.
            rest = rest - self.completion.lifted[child]
            fits = (np.arange(len(rest)) * room - rest).tolist()
            level = _ChildLimits(room, self.roundings[node][at], suffix_maximum(allowed - rest).tolist(), fits)
            merged = self._merge_child(partial, children[at], level)
            self.steps[node].append(merged)
            partial = drop_dominated([(cost, rooms) for rooms, (cost, _) in merged.items()])
            if len(partial) > self.width:
                partial, self.exhaustive = partial[: self.width], False
            if node == 0 and len(partial) > _STATES_FOR_CP_SAT and at < len(children) - 1:
                target = PlanTarget(self.completion.tokens, self.completion.rows, int(np.flatnonzero(allowed >= 0)[-1]))
                if is_small(children, target):
                    return self._pack_root(children, target)
        return partial

    def _lift(self, node: int) -> list[State]:
        """Return the states of a node with the cost up to the end of its parent, cheapest first."""
        size = self.shape.size[node]
        return sorted((cost + len(rooms) * size, rooms) for cost, rooms in self.states[node])

    def _pack_root(self, children: list[list[State]], target: PlanTarget) -> list[State]:
        """Return the best state of the root by CP-SAT, with steps as if its children had been merged one by one."""
        budget = self.budget
        seconds = budget.deadline - time.monotonic()
        packing = pack(children, self.shape.room[0], self.shape.size[0], target, work=budget.work, seconds=seconds)
        budget.work -= packing.work
        if packing.chosen is None:
            if not packing.proven:
                raise OutOfWorkError
            self.excess = 1
            return []
        self.exhaustive &= packing.proven
        return [self._replay(packing.chosen)]

    def _replay(self, chosen: list[tuple[State, tuple[int, ...]]]) -> State:
        """Write the chosen states of the children and the rows of their traversals as steps. Return the root state."""
        self.steps[0].clear()
        room, total = self.shape.room[0], 0
        rooms: Rooms = ()
        order: list[int] = []  # the row of each of `rooms`
        for at, ((cost, items), rows) in enumerate(chosen):
            rounding = self.roundings[0][at]
            places = tuple(order.index(row) if row in order else NEW for row in rows)
            lefts = dict(zip(order, rooms, strict=True))
            # A traversal with `item` left uses room - item of its row: row with 5 left, room 8, item 6 -> 3 left.
            for row, item in zip(rows, items, strict=True):
                lefts[row] = lefts.get(row, room) + item - room
            total += cost
            order = sorted(lefts, key=lambda row: rounding[lefts[row]])
            before, rooms = rooms, tuple(rounding[lefts[row]] for row in order)
            self.steps[0].append({rooms: (total, (before, items, places))})
        return total, rooms

    def _roundings(self, node: int) -> list[RoundedRooms]:
        """Return the roundings after the first, second, ... child is merged."""
        # From the last child back: outside alone, outside and the last child, ...; then reversed.
        later = [self.sums.of_outside(node)]
        for child in self.shape.children[node][:0:-1]:
            later.append(add_sums(later[-1], self.sums.parts[child], self.shape.room[node]))
        return [RoundedRooms(sums) for sums in reversed(later)]

    def _merge_child(
        self, partial: list[State], lifted: list[State], level: _ChildLimits
    ) -> dict[Rooms, tuple[int, _Step]]:
        """Return every set of rooms that merging a child can give, with its minimum cost and the step.

        `partial` are the states of the children before it, `lifted` the states of the child; both are sorted by cost.

        Raises:
            OutOfWorkError: the budget or the memory is used up.
        """
        room, rounding, max_tokens, fits = level.room, level.rounding, level.max_tokens, level.fits
        is_closed = rounding.sums == 1  # only the sum 0 can be added
        merged: dict[Rooms, tuple[int, _Step]] = {}
        # max_tokens falls with k; bisect needs rising values: [34, 30, 22] -> [-34, -30, -22], total 25 -> widest 1.
        last, rising = len(max_tokens) - 1, [-tokens for tokens in max_tokens]
        for cost, rooms in partial:
            rounded = [rounding[left] for left in rooms]
            work = 1
            for extra, items in lifted:
                total = cost + extra
                widest = bisect_right(rising, -total) - 1  # maximum number of traversals
                # Plans with more traversals are dropped: remember by how many tokens they miss the target.
                if widest < min(last, len(rooms) + len(items)):
                    self.excess = min(self.excess, total - max_tokens[widest + 1])
                if widest < max(len(rooms), len(items)):
                    if widest < 1:
                        break  # all later states of the child cost at least as much
                    continue
                tried = (
                    placements_of_closed(rooms, items, room)
                    if is_closed
                    else placements(rooms, rounded, items, widest - len(rooms), room, rounding)
                )
                for result, places in tried:
                    work += 1
                    if work > 1000:  # the clock is read once for 1000 placements
                        self.budget.spend(work)
                        work = 0
                    # The room used so far must leave enough room for the later children.
                    need = max(len(result), bisect_left(fits, len(result) * room - sum(result)))
                    if need > widest:
                        if need <= last:
                            self.excess = min(self.excess, total - max_tokens[need])
                        continue
                    known = merged.get(result)
                    if known is None or total < known[0]:
                        merged[result] = total, (rooms, items, places)
            self.budget.spend(work)
            if len(merged) + self.num_states > _MAX_STATES:
                raise OutOfWorkError
        self.num_states += len(merged)
        return merged

    def _rows(self, best: Rooms) -> Int64:
        """Return the row of each leaf, by following the steps back from the state `best` of the root."""
        shape = self.shape
        # First down: the state of every node, and how its children were merged, last child first.
        chosen: list[Rooms] = [()] * len(shape.size)
        chosen[0] = best
        taken: list[list[tuple[Rooms, tuple[int, ...]]]] = [[] for _ in shape.size]
        for node, children in enumerate(shape.children):
            rooms = chosen[node]
            for at in range(len(children) - 1, -1, -1):
                _, (before, items, places) = self.steps[node][at][rooms]
                taken[node].append((before, places))
                chosen[children[at]] = items
                rooms = before
        leaves_of: list[list[list[int]]] = [[] for _ in shape.size]  # then up: of each traversal, in the state's order
        for node in range(len(shape.size) - 1, -1, -1):
            children = shape.children[node]
            if not children:
                leaves_of[node] = [[node]]
                continue
            traversals: list[list[int]] = []
            for at, (child, (before, places)) in enumerate(zip(children, reversed(taken[node]), strict=True)):
                room, rounding = shape.room[node], self.roundings[node][at]
                lefts = list(before)
                for place, left, leaves in zip(places, chosen[child], leaves_of[child], strict=True):
                    if place == NEW:
                        lefts.append(left)
                        traversals.append(leaves)
                    else:
                        lefts[place] += left - room
                        traversals[place] = traversals[place] + leaves
                # States are sorted by rounded room, so the traversals must be too.
                order = sorted(range(len(traversals)), key=lambda i: rounding[lefts[i]])
                traversals = [traversals[i] for i in order]
            leaves_of[node] = traversals
        row_of_node = {leaf: row for row, leaves in enumerate(leaves_of[0]) for leaf in leaves}
        return np.array([row_of_node[node] for node in sorted(row_of_node)], np.int64)
