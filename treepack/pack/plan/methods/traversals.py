"""One run of the multi-path dynamic program: the ways worth keeping in which rows can pass through each node.

A state of node u is a set of traversals: rows, as far as they are below u. The paper writes a traversal as what it
holds below u; here it is what it has *left*, its room, which stays the same on the way up, since what a row gains in
length on that way is taken from what the ancestor would have left. The cost of a state, the tokens strictly below u in
all its traversals, is the paper's cost(b): every node v is paid size(v) times its number of traversals.

    leaf l          one traversal, C - (tokens from the root to l's end) left, cost 0
    child v to u    (lift) cost grows by size(v) for every traversal
    merging         traversals of different children with x and y left can be one traversal, if what remains,
                    x + y - (what a row has left at u), is not negative

Two traversals of the same child are never merged: that would be one traversal of the child, and is one of its states.
So the children of u are put together one after the other, each of the next one's traversals joining a different one so
far or none. What keeps the number of states small, each time without losing the best plan:

- `completion.py`: a partial plan whose cheapest completion exceeds the target is dropped;
- rounding (`Sums`): what is left of a traversal is rounded down to what can still be put there, so that many states
  become equal; at the root nothing can, so all of one size and cost are;
- `dominance.py`: a state is dropped if another one is as good whatever comes;
- an exact fit: if a traversal fills up another one, x + y - room = 0, it may as well join that one. For in any plan
  where it is elsewhere, in row q, and X is what that other one, in row p, gets instead: X takes at most x, so X can go
  to q and the traversal to p. p and q pass through the same ancestors either way, so nothing is paid for
  twice, and what X shares with q saves even more.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.methods.completion import Completion, Rooms, State, SubtreeShape, Sums, added, suffix_maximum
from treepack.pack.plan.methods.packing import Target, is_small, pack
from treepack.pack.plan.problem import Search
from treepack.trajectory import Int64

# How a partial state came about: the one before, the child's state, and for each traversal of the child the place of
# the traversal that it joins in the one before, or NEW.
Step = tuple[Rooms, Rooms, tuple[int, ...]]
NEW = -1
MOST_STATES = 1_000_000  # of one run, half a gigabyte or so
_WORK = {"low": 1e5, "normal": 1e6, "high": 1e7}  # placements for one tree without a time limit
PACKED_BY_CP_SAT = 20_000  # states of the first of the root's children from which on all are packed by CP-SAT


class OutOfWorkError(Exception):
    """The work, the time or the memory allowed is used up."""


@dataclass(slots=True)
class Budget:
    """Work left, counted in placements, and the time at which to stop."""

    work: float
    deadline: float

    @classmethod
    def of(cls, search: Search) -> Budget:
        """From now on: the time limit if there is one, else work by effort."""
        if search.time_limit is None:
            return cls(_WORK[search.effort], math.inf)
        return cls(math.inf, time.monotonic() + search.time_limit)

    def spend(self, work: float) -> None:
        self.work -= work
        if self.work < 0 or time.monotonic() > self.deadline:
            raise OutOfWorkError


@dataclass(frozen=True, slots=True)
class _Level:
    """Where a child is put together with those before it: `room` below their parent, and the bounds by traversals.

    `most[k]` tokens may be in k traversals or more; `fits[k]` of room may be taken up in k traversals so that the later
    children still fit.
    """

    room: int
    rounding: _Rounding
    most: list[int]
    fits: list[int]


class _Rounding(dict[int, int]):
    """What a traversal has left, rounded down to what can be added to it."""

    def __init__(self, sums: int | None) -> None:
        super().__init__()
        self.sums = sums

    def __missing__(self, left: int) -> int:
        rounded = left if self.sums is None else (self.sums & ((2 << left) - 1)).bit_length() - 1
        self[left] = rounded
        return rounded


@dataclass(slots=True)
class Outcome:
    """The best plan within the target, if there is one, and what the run proves.

    If `exhaustive`, no plan within the target is better than `rows` (None: there is none), and plans outside of it
    have at least `excess` tokens more than the target.
    """

    rows: Int64 | None
    exhaustive: bool
    excess: int


class TraversalProgram:
    """One run of the dynamic program for the plans within the target of `completion`."""

    def __init__(self, shape: SubtreeShape, completion: Completion, budget: Budget, width: int) -> None:
        self.shape, self.completion, self.budget, self.width = shape, completion, budget, width
        self.sums = Sums(shape)
        self.exhaustive = True
        self.num_states = 0
        self.excess = 1 << 50
        self.steps: list[list[dict[Rooms, tuple[int, Step]]]] = [[] for _ in shape.size]
        self.roundings: list[list[_Rounding]] = [[] for _ in shape.size]
        self.states: list[list[State]] = [[] for _ in shape.size]

    def run(self) -> Outcome:
        shape = self.shape
        for node in range(len(shape.size) - 1, -1, -1):
            self.states[node] = self._solve(node) if shape.children[node] else [(0, (shape.room[node],))]
            if not self.states[node]:
                return Outcome(None, self.exhaustive, max(1, self.excess))
            self.sums.settle(node, {left for _, rooms in self.states[node] for left in rooms})
            if shape.children[node]:
                self.completion.settle(node, [(len(rooms), cost) for cost, rooms in self.states[node]])
        best = min(self.states[0], key=lambda state: (state[0] + len(state[1]) * shape.size[0], len(state[1])))
        return Outcome(self._rows(best[1]), self.exhaustive, 0)

    def _solve(self, node: int) -> list[State]:
        """States of an inner node, cheapest first: those of its children put together one child after another."""
        from treepack.pack.plan.methods.dominance import undominated

        shape, room = self.shape, self.shape.room[node]
        self.budget.spend(shape.num_leaves)
        allowed = self.completion.allowed(node)
        rest = self.completion.inner[node]
        partial: list[State] = [(0, ())]
        self.roundings[node] = self._roundings(node)
        children = [self._lifted(child) for child in shape.children[node]]
        for at, child in enumerate(shape.children[node]):
            rest = rest - self.completion.lifted[child]
            fits = (np.arange(len(rest)) * room - rest).tolist()
            level = _Level(room, self.roundings[node][at], suffix_maximum(allowed - rest).tolist(), fits)
            found = self._put_together(partial, children[at], level)
            self.steps[node].append(found)
            partial = undominated([(cost, rooms) for rooms, (cost, _) in found.items()])
            if len(partial) > self.width:
                partial, self.exhaustive = partial[: self.width], False
            if node == 0 and len(partial) > PACKED_BY_CP_SAT and at < len(children) - 1:
                target = Target(self.completion.tokens, self.completion.rows, int(np.flatnonzero(allowed >= 0)[-1]))
                if is_small(children, target):
                    return self._pack_root(children, target)
        return partial

    def _lifted(self, node: int) -> list[State]:
        size = self.shape.size[node]
        return sorted((cost + len(rooms) * size, rooms) for cost, rooms in self.states[node])

    def _pack_root(self, children: list[list[State]], target: Target) -> list[State]:
        """The root's best state by way of CP-SAT, written down as steps like any other."""
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
        self.steps[0].clear()
        room, total = self.shape.room[0], 0
        rooms: Rooms = ()
        order: list[int] = []  # the row of each of `rooms`
        for at, ((cost, items), rows) in enumerate(chosen):
            rounding = self.roundings[0][at]
            places = tuple(order.index(row) if row in order else NEW for row in rows)
            lefts = dict(zip(order, rooms, strict=True))
            for row, item in zip(rows, items, strict=True):
                lefts[row] = lefts.get(row, room) + item - room
            total += cost
            order = sorted(lefts, key=lambda row: rounding[lefts[row]])
            before, rooms = rooms, tuple(rounding[lefts[row]] for row in order)
            self.steps[0].append({rooms: (total, (before, items, places))})
        return total, rooms

    def _roundings(self, node: int) -> list[_Rounding]:
        """For what holds parts of the first 1, 2, ... children."""
        later = [self.sums.of_outside(node)]
        for child in self.shape.children[node][:0:-1]:
            later.append(added(later[-1], self.sums.parts[child], self.shape.room[node]))
        return [_Rounding(sums) for sums in reversed(later)]

    def _put_together(self, partial: list[State], lifted: list[State], level: _Level) -> dict[Rooms, tuple[int, Step]]:
        room, rounding, most, fits = level.room, level.rounding, level.most, level.fits
        closed = rounding.sums == 1
        found: dict[Rooms, tuple[int, Step]] = {}
        last, falling = len(most) - 1, [-tokens for tokens in most]
        for cost, rooms in partial:
            rounded = [rounding[left] for left in rooms]
            work = 1
            for extra, items in lifted:
                total = cost + extra
                widest = bisect_right(falling, -total) - 1  # most traversals there can be
                if widest < min(last, len(rooms) + len(items)):
                    self.excess = min(self.excess, total - most[widest + 1])
                if widest < max(len(rooms), len(items)):
                    if widest < 1:
                        break
                    continue
                placements = (
                    _closed(rooms, items, room)
                    if closed
                    else _placements(rooms, rounded, items, widest - len(rooms), room, rounding)
                )
                for result, places in placements:
                    work += 1
                    if work > 1000:
                        self.budget.spend(work)
                        work = 0
                    need = max(len(result), bisect_left(fits, len(result) * room - sum(result)))
                    if need > widest:
                        if need <= last:
                            self.excess = min(self.excess, total - most[need])
                        continue
                    known = found.get(result)
                    if known is None or total < known[0]:
                        found[result] = total, (rooms, items, places)
            self.budget.spend(work)
            if len(found) + self.num_states > MOST_STATES:
                raise OutOfWorkError
        self.num_states += len(found)
        return found

    def _rows(self, best: Rooms) -> Int64:
        """Row of each leaf, by following the steps back from the root's state `best`."""
        shape = self.shape
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
        holds: list[list[list[int]]] = [[] for _ in shape.size]  # leaf nodes of each traversal, in the state's order
        for node in range(len(shape.size) - 1, -1, -1):
            children = shape.children[node]
            if not children:
                holds[node] = [[node]]
                continue
            held: list[list[int]] = []
            for at, (child, (before, places)) in enumerate(zip(children, reversed(taken[node]), strict=True)):
                room, rounding = shape.room[node], self.roundings[node][at]
                lefts = list(before)
                for place, left, leaves in zip(places, chosen[child], holds[child], strict=True):
                    if place == NEW:
                        lefts.append(left)
                        held.append(leaves)
                    else:
                        lefts[place] += left - room
                        held[place] = held[place] + leaves
                order = sorted(range(len(held)), key=lambda i: rounding[lefts[i]])
                held = [held[i] for i in order]
            holds[node] = held
        row_of_node = {leaf: row for row, leaves in enumerate(holds[0]) for leaf in leaves}
        return np.array([row_of_node[node] for node in sorted(row_of_node)], np.int64)


def _placements(
    rooms: Rooms, rounded: list[int], items: Rooms, most_new: int, room: int, rounding: _Rounding
) -> Iterator[tuple[Rooms, tuple[int, ...]]]:
    """Every way for a child's traversals to join different ones of `rooms` or, at most `most_new`, to be new.

    Equal ones count as one. `rounded` are `rooms` as they are if nothing joins them.
    """
    item = items[0]
    if len(items) == 1:
        previous = -1
        for place, left in enumerate(rooms):
            if left == previous or left + item < room:
                continue
            previous = left
            result = rounded[:place] + rounded[place + 1 :]
            insort(result, rounding[left + item - room])
            yield tuple(result), (place,)
            if left + item == room:
                return
        if most_new:
            result = rounded.copy()
            insort(result, rounding[item])
            yield tuple(result), (NEW,)
        return
    yield from _placements_of_many(rooms, rounded, items, most_new, room, rounding)


def _placements_of_many(
    rooms: Rooms, rounded: list[int], items: Rooms, most_new: int, room: int, rounding: _Rounding
) -> Iterator[tuple[Rooms, tuple[int, ...]]]:
    num, end = len(items), len(rooms)
    places: list[int] = []
    free = [True] * end

    def place_next(most_new: int) -> Iterator[tuple[Rooms, tuple[int, ...]]]:
        at = len(places)
        if at == num:
            result = [rounded[i] for i in range(end) if free[i]]
            result += [
                rounding[item if place == NEW else rooms[place] + item - room]
                for item, place in zip(items, places, strict=True)
            ]
            result.sort()
            yield tuple(result), tuple(places)
            return
        item = items[at]
        begin = 0
        if at and items[at - 1] == item:  # equal ones in ascending places, new ones last
            begin = places[-1] + 1 if places[-1] != NEW else end
        previous = -1
        for place in range(begin, end):
            left = rooms[place]
            if not free[place] or left == previous or left + item < room:
                continue
            previous = left
            free[place] = False
            places.append(place)
            yield from place_next(most_new)
            places.pop()
            free[place] = True
            if left + item == room:
                return
        if most_new:
            places.append(NEW)
            yield from place_next(most_new - 1)
            places.pop()

    yield from place_next(most_new)


def _closed(rooms: Rooms, items: Rooms, room: int) -> Iterator[tuple[Rooms, tuple[int, ...]]]:
    """Where nothing can be added any more only the number of traversals counts: as many as possible join."""
    places = [NEW] * len(items)
    widest = len(items) - 1
    for place, left in enumerate(rooms):
        if widest < 0:
            break
        if left + items[widest] >= room:
            places[widest] = place
            widest -= 1
    num = len(rooms) + places.count(NEW)
    yield (0,) * num, tuple(places)
