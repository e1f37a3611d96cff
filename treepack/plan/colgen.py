"""Lower bounds by column generation: prices on nodes, a knapsack over the tree, and what no row can beat.

The rows of a plan are columns of a linear program: pay `cost(S)` for each row S, pass at least `times[u]` rows through
each node u. Any prices p >= 0 prove, with K rows at most in a best plan,

    cost of any plan  >=  sum_u p[u] times[u]  -  K * max over rows S of (p(S) - cost(S))

since each row S earns at most p(S). The dearest row S is a knapsack over the tree: in depth-first order,

    best[i][room] = max(best[end[i]][room],                              leave out i and all below it
                        p[i] - cost[i] + best[i + 1][room - size[i]])    take i, then see what follows

Good prices are found by generating rows: the prices at the analytic centre of what the rows found so far allow (a few
Newton steps, warm), then the dearest rows at those prices, until none is too dear. The centre needs far fewer rounds
than the corner that a simplex method returns. While prices move, rooms are counted in coarse units; the bound itself is
taken in whole tokens and integers, so rounding cannot spoil the proof.

Import this module only where it is called: numba takes a while to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from treepack.plan.problem import Tree
from treepack.trajectory import Float64, Int32, Int64

ROUNDS = 80
ROWS_A_ROUND = 40
NEWTON_STEPS = 12
FIRST_GAP, LAST_GAP = 0.02, 2e-4  # of the centre, relative: the prices of early rounds must stay far from any corner
GRIDS = (1024, 4096, 16384)  # units of room, from the first rounds to the last
CLOSE = 0.001  # gap to the best value of the rows found so far, at which to stop


@dataclass(frozen=True, slots=True)
class Program:
    """What is to be bounded: rows of at most `capacity` tokens through every node at least `times[u]` times.

    `cost` int64 [nodes] is what a row pays for each of its nodes; `rows` int64 [leaves] a good plan, which costs
    `upper`. A best plan has at most `most_rows` rows. Costs are multiplied by `scale` to become integers with prices.
    """

    tree: Tree
    capacity: int
    cost: Int64
    times: Int64
    rows: Int64
    upper: int
    most_rows: int
    scale: int


def lower_bound(program: Program) -> int:
    """Least cost that any plan can have, as far as this method proves it; at least the sum of `cost * times`."""
    generator = _Generator(program)
    for _ in range(ROUNDS):
        if not generator.advance():
            break
    return generator.certified()


class _Generator:
    """Rows found so far and the prices they allow."""

    def __init__(self, program: Program) -> None:
        self.program = program
        tree, times = program.tree, program.times
        self.is_leaf = tree.end == np.arange(1, tree.num_nodes + 1)
        # A node whose times a child also demands needs no price of its own: no row passes through the child only.
        below = np.zeros(tree.num_nodes, np.int64)
        np.maximum.at(below, tree.parent[1:], times[1:])
        self.priced = np.flatnonzero(self.is_leaf | (times > below))
        self.column = np.full(tree.num_nodes, -1)
        self.column[self.priced] = np.arange(len(self.priced))
        self.demand = times[self.priced].astype(np.float64)
        self.rows: list[Int64] = []
        self.costs: list[float] = []
        self.known: set[bytes] = set()
        for row in range(int(program.rows.max()) + 1):
            self._add(_union(tree.parent, tree.leaf[program.rows == row]))
        start = self._first_prices()
        self.base = int(program.cost @ times)
        self.best, self.best_prices = float(self.base), start
        self.prices = 0.95 * start + 1e-6 * start.max()
        self.gap = FIRST_GAP
        self.value = float(program.upper)
        self._use_grid(0)

    def _first_prices(self) -> Float64:
        """Each node's cost as its price, handed down to a node that is passed as often: a bound from the start."""
        tree, times = self.program.tree, self.program.times
        prices = self.program.cost.astype(np.float64)
        heir = np.full(tree.num_nodes, -1)
        for node in range(tree.num_nodes - 1, 0, -1):
            up = tree.parent[node]
            if times[node] == times[up]:
                heir[up] = node
        for node in np.flatnonzero(self.column < 0).tolist():
            prices[heir[node]] += prices[node]
        return prices[self.priced]

    def _use_grid(self, index: int) -> None:
        tree, capacity = self.program.tree, self.program.capacity
        self.grid = index
        unit = max(1, capacity // GRIDS[index])
        self.exact = unit == 1
        self.unit, self.room = unit, capacity // unit
        # Path lengths are rounded, not sizes, so that errors cancel along a path.
        self.sizes = (tree.depth + tree.size) // unit - tree.depth // unit
        self.table = np.zeros((tree.num_nodes + 1, self.room + 1), np.int32)

    def _add(self, taken: NDArray[np.bool_]) -> bool:
        key = np.packbits(taken).tobytes()
        if key in self.known:
            return False
        self.known.add(key)
        columns = self.column[taken]
        self.rows.append(columns[columns >= 0])
        self.costs.append(float(self.program.cost[taken].sum()))
        return True

    def advance(self) -> bool:
        """One round: centre, then the dearest rows; False when there is nothing left to gain."""
        self._centre()
        new, improved = self._price()
        if self.value <= self.best * (1 + CLOSE):
            return False
        if new < ROWS_A_ROUND // 8:
            last = self.grid + 1 == len(GRIDS) or self.exact
            if not last and (new == 0 or self.gap < 0.004):
                self._use_grid(self.grid + 1)
            elif new == 0 and not improved and self.gap <= LAST_GAP:
                return False
            self.gap = max(LAST_GAP, self.gap / 2)
        return True

    def _centre(self) -> None:
        """Move the prices to the centre of what the rows allow, at a distance from the optimum that `gap` sets."""
        sizes = np.array([len(row) for row in self.rows])
        starts, index = np.concatenate([[0], np.cumsum(sizes)]), np.concatenate(self.rows)
        costs, demand, prices = np.array(self.costs), self.demand, self.prices
        dearest = float((_sums(starts, index, prices) / costs).max())
        if dearest >= 1:
            prices = prices / (1.01 * dearest)
        weight = (len(costs) + len(prices)) / (self.gap * self.program.upper)
        for _ in range(NEWTON_STEPS):
            slack = costs - _sums(starts, index, prices)
            gradient = weight * demand - _spread(starts, index, 1 / slack, len(prices)) + 1 / prices
            hessian = _outer(starts, index, 1 / slack**2, 1 / prices**2)
            step = np.linalg.solve(hessian, gradient)
            prices = prices + _longest_step(_sums(starts, index, step), slack, step, prices) * step
            if gradient @ step < 0.25:
                break
        self.prices = prices
        # At the centre 1 / (weight * slack) is a nearly feasible fractional plan; scaled up, it is one.
        amount = 1 / (weight * (costs - _sums(starts, index, prices)))
        passed = _spread(starts, index, amount, len(prices))
        self.value = min(self.value, float(costs @ amount * (demand / passed).max()))

    def _price(self) -> tuple[int, bool]:
        """Add the dearest rows; each next one among the leaves that the ones before it left."""
        tree, cost, scale = self.program.tree, self.program.cost, self.program.scale
        prices = np.zeros(tree.num_nodes)
        prices[self.priced] = self.prices
        new, improved = 0, False
        for turn in range(ROWS_A_ROUND):
            _fill_table(self.sizes, np.rint((prices - cost) * scale).astype(np.int32), tree.end, self.table)
            if turn == 0:
                bound = float(_bound(self.program, self.prices @ self.demand * scale, self.table[0], self.unit))
                if bound > self.best:
                    self.best, self.best_prices, improved = bound, self.prices, True
            if self.table[0, -1] <= scale * 1e-5 * self.program.upper / self.program.most_rows:
                break
            taken = _dearest(self.sizes, tree.end, self.table)
            if int(tree.size[taken].sum()) <= self.program.capacity:
                new += self._add(taken)
            prices[taken & self.is_leaf] = 0
        return new, improved

    def certified(self) -> int:
        """The best bound, taken again with integer prices and whole tokens."""
        tree, scale, times = self.program.tree, self.program.scale, self.program.times
        prices = np.zeros(tree.num_nodes, np.int64)
        prices[self.priced] = np.floor(np.maximum(self.best_prices, 0) * scale).astype(np.int64)
        profit = prices - self.program.cost * scale
        dearest = _values(tree.size, profit.astype(np.int32), tree.end, self.program.capacity)
        return max(self.base, -int(-_bound(self.program, int(prices @ times), dearest, 1) // 1))


def _bound(program: Program, earned: Any, dearest: Int32, unit: int) -> Fraction:
    """The better of two bounds from prices that earn `earned` (times scale); `dearest[room]` is the highest excess of
    price over cost of a row of `room` units.

    Either every row may exceed its cost by the highest excess, or prices are divided by the highest ratio to a cost:
    rows that exceed theirs by dearest[room] first do so at `room` units of cost where tokens are what is paid.
    """
    scale = program.scale
    excess = int(dearest[-1])
    by_rows = (Fraction(earned) - program.most_rows * excess) / scale
    if program.cost is not program.tree.size:
        return max(by_rows, Fraction(earned) / (scale + excess))
    rooms = np.arange(1, len(dearest))
    worst = int((dearest[1:] / rooms).argmax()) + 1
    return max(by_rows, Fraction(earned) / (scale + Fraction(int(dearest[worst]), worst * unit)))


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _union(parent: Int64, leaves: Int64) -> NDArray[np.bool_]:
    """Which nodes lie on the paths of `leaves`."""
    taken = np.zeros(len(parent), np.bool_)
    for leaf in leaves:
        node = leaf
        while node >= 0 and not taken[node]:
            taken[node] = True
            node = parent[node]
    return taken


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _take_or_leave(size: int, profit: Int32, taking: Int32, leaving: Int32, out: Int32) -> None:
    """One node of the knapsack, for all rooms: `taking` and `leaving` are the values of what follows."""
    size = min(size, len(out))
    out[:size] = leaving[:size]
    rest, without, value = out[size:], leaving[size:], taking[: len(out) - size]
    for room in range(len(rest)):
        rest[room] = max(value[room] + profit, without[room])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _fill_table(sizes: Int64, profits: Int32, end: Int64, table: Int32) -> None:
    """`table` int32 [nodes + 1, room + 1]: best profit of the nodes from i on, if i's parent is taken."""
    nodes = len(sizes)
    table[nodes, :] = 0
    for i in range(nodes - 1, -1, -1):
        _take_or_leave(sizes[i], profits[i], table[i + 1], table[end[i]], table[i])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _dearest(sizes: Int64, end: Int64, table: Int32) -> NDArray[np.bool_]:
    """The nodes of a best row, read from a full table."""
    nodes = len(sizes)
    taken = np.zeros(nodes, np.bool_)
    i, room = 0, table.shape[1] - 1
    while i < nodes:
        if room >= sizes[i] and table[i, room] != table[end[i], room]:
            taken[i] = True
            room -= sizes[i]
            i += 1
        else:
            i = end[i]
    return taken


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _values(sizes: Int64, profits: Int32, end: Int64, capacity: int) -> Int32:
    """The first line of the table in whole tokens; keeps only the lines that are still needed, about one per level."""
    nodes = len(sizes)
    readers = np.zeros(nodes + 1, np.int64)
    for i in range(nodes):
        readers[end[i]] += 1
        readers[i + 1] += 1
    lines = [np.zeros(capacity + 1, np.int32)]
    free = [0]
    free.pop()
    line_of = np.zeros(nodes + 1, np.int64)
    for i in range(nodes - 1, -1, -1):
        if len(free) == 0:
            lines.append(np.zeros(capacity + 1, np.int32))
            free.append(len(lines) - 1)
        line_of[i] = free.pop()
        _take_or_leave(sizes[i], profits[i], lines[line_of[i + 1]], lines[line_of[end[i]]], lines[line_of[i]])
        for read in (i + 1, end[i]):
            readers[read] -= 1
            if readers[read] == 0:
                free.append(line_of[read])
    return lines[line_of[0]]


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _sums(starts: Int64, index: Int64, values: Float64) -> Float64:
    """Sum of `values` over each row."""
    out = np.zeros(len(starts) - 1)
    for row in range(len(out)):
        for i in range(starts[row], starts[row + 1]):
            out[row] += values[index[i]]
    return out


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _spread(starts: Int64, index: Int64, values: Float64, size: int) -> Float64:
    """Sum over the rows that hold each column."""
    out = np.zeros(size)
    for row in range(len(values)):
        for i in range(starts[row], starts[row + 1]):
            out[index[i]] += values[row]
    return out


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _outer(starts: Int64, index: Int64, weights: Float64, diagonal: Float64) -> Float64:
    """The Newton matrix: sum over rows of weight times (row outer row), plus a diagonal."""
    size = len(diagonal)
    out = np.zeros((size, size))
    for row in range(len(weights)):
        for i in range(starts[row], starts[row + 1]):
            for j in range(starts[row], starts[row + 1]):
                out[index[i], index[j]] += weights[row]
    for i in range(size):
        out[i, i] += diagonal[i]
    return out


def _longest_step(change: Float64, slack: Float64, step: Float64, prices: Float64) -> float:
    """At most a full step, and at most nine tenths of the way to a row's cost or to a price of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        to_cost = np.where(change > 0, slack / change, np.inf).min(initial=np.inf)
        to_zero = np.where(step < 0, -prices / step, np.inf).min(initial=np.inf)
    return min(1.0, 0.9 * float(min(to_cost, to_zero)))
