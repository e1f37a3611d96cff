"""Lower bounds by column generation: prices on nodes, a knapsack over the tree, and what no row can beat.

The rows of a plan are columns of a linear program: pay `cost(S)` for each row S; pass at least `times[u]` rows through
each node u; spend at least `tokens[u]` tokens in the subtree of u. Any prices >= 0 on these demands prove, with K rows
at most in a best plan,

    cost of any plan  >=  sum of price * demand  -  K * max over rows S of (what S earns - cost(S))

since each row S earns the price of what it adds to the demands: p[u] for each node of it, and for each price on a
subtree its tokens there. All this is a sum over its nodes, so the dearest row is a knapsack over the tree
(`knapsack.py`).

Good prices are found by generating rows: the prices at the analytic centre of what the rows found so far allow (a few
Newton steps, warm), then the dearest rows at those prices, until none is too dear. The centre needs far fewer rounds
than the corner that a simplex method returns. While prices move, rooms are counted in coarse units and prices are
rounded; the bound itself is taken in whole tokens and integers, so rounding cannot spoil the proof.

Import this module only where it is called: numba takes a while to load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numba
import numpy as np
from numpy.typing import NDArray

from treepack.pack.plan.bounds.knapsack import dearest_row, fill_table, most_profit
from treepack.pack.plan.problem import PlanTree
from treepack.trajectory import Float64, Int32, Int64

ROUNDS = 100
ROWS_A_ROUND = 24
NEWTON_STEPS = 12
NEWTON_ENTRIES = 20  # a Newton step with n prices takes as long as n**3 / 20 entries of a table
FIRST_GAP, LAST_GAP = 0.02, 2e-4  # of the centre, relative: the prices of early rounds must stay far from any corner
GRIDS = (1024, 4096, 16384)  # units of room, from the first rounds to the last
CLOSE = 0.0005  # gap to the best value of the rows found so far, at which to stop


@dataclass(frozen=True, slots=True)
class PricingProgram:
    """What is to be bounded: rows of at most `capacity` tokens, at least `times[u]` of them through node u.

    They spend at least `tokens[u]` tokens in its subtree; both int64 [nodes]. `cost` int64 [nodes] is what a row pays
    for each of its nodes, either its tokens or 1 at the root alone; `rows` int64 [leaves] a good plan, which costs
    `upper`. Some best plan has at most `most_rows` rows.
    """

    tree: PlanTree
    capacity: int
    cost: Int64
    times: Int64
    tokens: Int64
    rows: Int64
    upper: int
    most_rows: int

    @property
    def pays_tokens(self) -> bool:
        """Whether the cost of a row is its tokens."""
        return self.cost is self.tree.size


@dataclass(slots=True)
class Allowance:
    """Work that may still be done, in entries of knapsack tables."""

    left: float


def lower_bound(program: PricingProgram, allowance: Allowance, *, known: int) -> int:
    """Least cost that any plan can have, as far as this method proves it; at least `known`.

    Stops when nothing above `known` can come of it, when `upper` is proven, or when the allowance is used up.
    """
    generator = _Generator(program)
    for _ in range(ROUNDS):
        if allowance.left <= 0 or not generator.advance(allowance) or generator.value <= known:
            break
        if generator.best > program.upper - 1:
            if generator.certified() >= program.upper:
                return program.upper
            if not generator.refine():
                break
    return max(known, generator.certified()) if generator.best > known else known


class _Generator:
    """Rows found so far and the prices they allow.

    A demand is a node and a kind; its prices and rows are in units of `unit_of` tokens where tokens are demanded, so
    that all amounts are about as large.
    """

    def __init__(self, program: PricingProgram) -> None:
        self.program = program
        tree, times, tokens = program.tree, program.times, program.tokens
        self.is_leaf = tree.end == np.arange(1, tree.num_nodes + 1)
        most, below = np.zeros(tree.num_nodes, np.int64), np.zeros(tree.num_nodes, np.int64)
        np.maximum.at(most, tree.parent[1:], times[1:])
        np.add.at(below, tree.parent[1:], tokens[1:])
        # A node whose times a child also demands needs no price of its own: no row passes through the child only. Nor
        # does a subtree whose tokens follow from its children's.
        self.passed = np.flatnonzero(self.is_leaf | (times > most))
        self.spent = np.flatnonzero((tokens > below + tree.size * times) & ~self.is_leaf)
        self.unit_of = np.maximum(1, tokens[self.spent] // times[self.spent]).astype(np.float64)
        self.demand = np.concatenate([times[self.passed], tokens[self.spent] / self.unit_of])
        self.column = np.full(tree.num_nodes, -1)
        self.column[self.passed] = np.arange(len(self.passed))
        self.rows: list[Int64] = []
        self.amounts: list[Float64] = []
        self.costs: list[float] = []
        self.known: set[bytes] = set()
        for row in range(int(program.rows.max()) + 1):
            self._add(_union(tree.parent, tree.leaf[program.rows == row]))
        start = self._first_prices()
        self.best_prices = start
        self.prices = 0.95 * start + 1e-6 * start.max()
        self.gap = FIRST_GAP
        self.value = float(program.upper)
        self._use_grid(0)

    def _first_prices(self) -> Float64:
        """Prices that no row exceeds: half of each node's cost on the node itself, or on the one below it that is
        passed as often; the other half on the highest demand for tokens, if one holds the node.
        """
        tree, times = self.program.tree, self.program.times
        whole = self.program.cost.astype(np.float64)
        halved, spent = whole.copy(), np.zeros(len(self.spent))
        if self.program.pays_tokens:
            stop = 0
            for i, node in enumerate(self.spent.tolist()):
                if node >= stop:
                    spent[i], stop = self.unit_of[i] / 2, int(tree.end[node])
                    halved[node:stop] = whole[node:stop] / 2
        heir = np.full(tree.num_nodes, -1)
        for node in range(tree.num_nodes - 1, 0, -1):
            up = tree.parent[node]
            if times[node] == times[up]:
                heir[up] = node
        for node in np.flatnonzero(self.column < 0).tolist():
            halved[heir[node]] += halved[node]
        return np.concatenate([halved[self.passed], spent])

    def _use_grid(self, index: int) -> None:
        tree, capacity = self.program.tree, self.program.capacity
        self.grid = index
        unit = max(1, capacity // GRIDS[index])
        self.exact = unit == 1
        self.unit, self.room = unit, capacity // unit
        # Path lengths are rounded, not sizes, so that errors cancel along a path.
        self.sizes = (tree.depth + tree.size) // unit - tree.depth // unit
        self.table = np.zeros((tree.num_nodes + 1, self.room + 1), np.int32)
        self.best = self._estimate(self.best_prices, self._fill(self._profits(self.best_prices)))

    def refine(self) -> bool:
        """Count rooms in finer units from now on; False if they are as fine as they get."""
        if self.exact or self.grid + 1 == len(GRIDS):
            return False
        self._use_grid(self.grid + 1)
        return True

    def _add(self, taken: NDArray[np.bool_]) -> bool:
        key = np.packbits(taken).tobytes()
        if key in self.known:
            return False
        self.known.add(key)
        columns = self.column[taken]
        columns = columns[columns >= 0]
        held = np.concatenate([[0], np.cumsum(self.program.tree.size * taken)])
        tokens = held[self.program.tree.end[self.spent]] - held[self.spent]
        inside = np.flatnonzero(tokens)
        self.rows.append(np.concatenate([columns, len(self.passed) + inside]))
        self.amounts.append(np.concatenate([np.ones(len(columns)), tokens[inside] / self.unit_of[inside]]))
        self.costs.append(float(self.program.cost[taken].sum()))
        return True

    def advance(self, allowance: Allowance) -> bool:
        """One round: centre, then the dearest rows; False when there is nothing left to gain."""
        allowance.left -= self._centre() * len(self.prices) ** 3 / NEWTON_ENTRIES
        new, improved, tables = self._price()
        allowance.left -= tables * self.table.size
        if self.value <= self.best * (1 + CLOSE):
            return False
        if new < ROWS_A_ROUND // 8:
            refined = (new == 0 or self.gap < 0.004) and self.refine()
            if not refined and new == 0 and not improved and self.gap <= LAST_GAP:
                return False
            self.gap = max(LAST_GAP, self.gap / 2)
        return True

    def _centre(self) -> int:
        """Move the prices to the centre of what the rows allow, at a distance from the optimum that `gap` sets.

        Returns the number of Newton steps.
        """
        sizes = np.array([len(row) for row in self.rows])
        starts, index = np.concatenate([[0], np.cumsum(sizes)]), np.concatenate(self.rows)
        amounts = np.concatenate(self.amounts)
        costs, demand, prices = np.array(self.costs), self.demand, self.prices
        dearest = float((_sums(starts, index, amounts, prices) / costs).max())
        if dearest >= 1:
            prices = prices / (1.01 * dearest)
        weight = (len(costs) + len(prices)) / (self.gap * self.program.upper)
        steps = 0
        while steps < NEWTON_STEPS:
            steps += 1
            slack = costs - _sums(starts, index, amounts, prices)
            gradient = weight * demand - _spread(starts, index, amounts, 1 / slack, len(prices)) + 1 / prices
            hessian = _outer(starts, index, amounts, 1 / slack**2, 1 / prices**2)
            step = np.linalg.solve(hessian, gradient)
            prices = prices + _longest_step(_sums(starts, index, amounts, step), slack, step, prices) * step
            if gradient @ step < 0.25:
                break
        self.prices = prices
        # At the centre 1 / (weight * slack) is a nearly feasible fractional plan; scaled up, it is one.
        share = 1 / (weight * (costs - _sums(starts, index, amounts, prices)))
        met = _spread(starts, index, amounts, share, len(prices))
        self.value = min(self.value, float(costs @ share * (demand / met).max()))
        return steps

    def _price(self) -> tuple[int, bool, int]:
        """Add the dearest rows; each next one among the leaves that the ones before it left.

        Returns how many are new, whether the bound is better, and how many tables were filled.
        """
        program, new = self.program, 0
        profits = self._profits(self.prices)
        scale = self._fill(profits)
        bound = self._estimate(self.prices, scale)
        improved = bound > self.best
        if improved:
            self.best, self.best_prices = bound, self.prices
        tables = 1
        while tables <= ROWS_A_ROUND:
            if self.table[0, -1] <= scale * 1e-5 * program.upper / program.most_rows:
                break
            taken = dearest_row(self.sizes, program.tree.end, self.table)
            if int(program.tree.size[taken].sum()) <= program.capacity:
                new += self._add(taken)
            covered = taken & self.is_leaf
            profits[covered] = np.minimum(profits[covered], -program.cost[covered])
            scale = self._fill(profits)
            tables += 1
        return new, improved, tables

    def _fill(self, profits: Float64) -> int:
        """Fill the table with `profits`, times a scale that is returned."""
        scale = self._scale(profits, 30)
        fill_table(self.sizes, np.rint(profits * scale).astype(np.int32), self.program.tree.end, self.table)
        return scale

    def _estimate(self, prices: Float64, scale: int) -> float:
        """The bound from `prices`, whose table is filled, but for rounding."""
        earned = prices @ self.demand * scale
        return float(_bound(self.program, earned, self.table[0], unit=self.unit, scale=scale))

    def _profits(self, prices: Float64) -> Float64:
        """What each node earns a row, less its cost."""
        tree = self.program.tree
        earned = np.zeros(tree.num_nodes)
        earned[self.passed] = prices[: len(self.passed)]
        rate = np.zeros(tree.num_nodes + 1)
        per_token = prices[len(self.passed) :] / self.unit_of
        np.add.at(rate, self.spent, per_token)
        np.add.at(rate, tree.end[self.spent], -per_token)
        return earned + np.cumsum(rate)[:-1] * tree.size - self.program.cost

    def _scale(self, profits: Float64, bits: int) -> int:
        """A power of 2: profits times that, rounded, and all sums of them stay below 2**bits."""
        highest = max(float(profits.clip(0).sum()), float(self.program.cost.max())) + 1
        return 1 << max(0, bits - 1 - math.frexp(highest)[1])

    def certified(self) -> int:
        """The best bound, taken again in integers and whole tokens."""
        program, spent = self.program, self.spent
        tree, prices = program.tree, self.best_prices
        scale = self._scale(self._profits(prices), 52)
        passed = np.floor(prices[: len(self.passed)] * scale).astype(np.int64)
        per_token = np.floor(prices[len(self.passed) :] / self.unit_of * scale).astype(np.int64)
        earned = sum(
            price * demand
            for kind, demands in ((passed, program.times[self.passed]), (per_token, program.tokens[spent]))
            for price, demand in zip(kind.tolist(), demands.tolist(), strict=True)
        )
        profit = -program.cost * scale
        profit[self.passed] += passed
        for node, rate in zip(spent.tolist(), per_token.tolist(), strict=True):
            profit[node : tree.end[node]] += rate * tree.size[node : tree.end[node]]
        dearest = most_profit(tree, profit, program.capacity)
        return math.ceil(_bound(program, earned, dearest, unit=1, scale=scale))


def _bound(program: PricingProgram, earned: float, dearest: Int32 | Int64, *, unit: int, scale: int) -> Fraction:
    """The better of two bounds from prices that earn `earned`; `dearest[room]` is the highest excess of price over cost
    of a row of `room` units. Both are `scale` times too large.

    Either every row may exceed its cost by the highest excess, or prices are divided by the highest ratio to a cost:
    rows that exceed theirs by dearest[room] first do so at `room` units of cost where tokens are what is paid.
    """
    excess = int(dearest[-1])
    by_rows = (Fraction(earned) - program.most_rows * excess) / scale
    if not program.pays_tokens:
        return max(by_rows, Fraction(earned) / (scale + excess))
    if not program.tree.size[0]:
        return by_rows  # a row may cost nothing
    ratio = float((dearest[1:] / np.arange(1, len(dearest))).max()) * (1 + 2**-50)  # not below the true one
    return max(by_rows, Fraction(earned) / (scale + Fraction(ratio) / unit))


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
def _sums(starts: Int64, index: Int64, amounts: Float64, values: Float64) -> Float64:
    """Sum of `values` over each row."""
    out = np.zeros(len(starts) - 1)
    for row in range(len(out)):
        for i in range(starts[row], starts[row + 1]):
            out[row] += amounts[i] * values[index[i]]
    return out


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _spread(starts: Int64, index: Int64, amounts: Float64, values: Float64, size: int) -> Float64:
    """Sum over the rows that hold each column."""
    out = np.zeros(size)
    for row in range(len(values)):
        for i in range(starts[row], starts[row + 1]):
            out[index[i]] += amounts[i] * values[row]
    return out


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _outer(starts: Int64, index: Int64, amounts: Float64, weights: Float64, diagonal: Float64) -> Float64:
    """The Newton matrix: sum over rows of weight times (row outer row), plus a diagonal."""
    size = len(diagonal)
    out = np.zeros((size, size))
    for row in range(len(weights)):
        for i in range(starts[row], starts[row + 1]):
            for j in range(starts[row], starts[row + 1]):
                out[index[i], index[j]] += weights[row] * amounts[i] * amounts[j]
    for i in range(size):
        out[i, i] += diagonal[i]
    return out


def _longest_step(change: Float64, slack: Float64, step: Float64, prices: Float64) -> float:
    """At most a full step, and at most nine tenths of the way to a row's cost or to a price of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        to_cost = np.where(change > 0, slack / change, np.inf).min(initial=np.inf)
        to_zero = np.where(step < 0, -prices / step, np.inf).min(initial=np.inf)
    return min(1.0, 0.9 * float(min(to_cost, to_zero)))
