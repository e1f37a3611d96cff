"""Lower bounds by column generation: a linear program over rows, with prices on nodes and a knapsack over the tree.

Each possible row S of a plan is a column of the linear program. A row costs `cost(S)`. At least `times[u]` rows pass
through each node u, and the rows have at least `tokens[u]` tokens in the subtree of u: these are the demands. Any
prices >= 0 on the demands prove a bound. If some best plan has at most K rows,

    cost of any plan  >=  sum of price * demand  -  K * max over rows S of (earnings(S) - cost(S))

because each row S earns the price of its contribution to the demands: the price p[u] of each of its nodes, and for
each price on a subtree the price of its tokens there. All this is a sum over the nodes of S, so the row with the
highest profit, earnings - cost, is a knapsack over the tree (`knapsack.py`).

Good prices come from generating rows. Each round moves the prices to the analytic centre of the prices that the rows so
far allow (a few Newton steps from the last centre), and then adds the rows with the highest profit at these prices. It
ends when no row has a profit. The centre needs far fewer rounds than the corner that a simplex method returns. While
prices move, rooms are counted in coarse units and prices are rounded. The final bound is computed in whole tokens and
integers, so rounding cannot make it wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from treepack.native.library import FLOAT64, INT, INT64, in_c
from treepack.pack.plan.bounds.knapsack import best_profits, best_row, fill_table
from treepack.pack.plan.problem import PlanTree
from treepack.trajectory import Float64, Int32, Int64

_MAX_ROUNDS = 100  # the allowance of work usually ends the rounds earlier
_ROWS_PER_ROUND = 24  # each costs one knapsack table
_MAX_NEWTON_STEPS = 12  # per round; a round starts from the last centre, so few steps are enough
_NEWTON_ENTRIES = 20  # a Newton step with n prices takes as long as n**3 / 20 entries of a table
# Distance of the centre from the optimum, relative: the prices of early rounds must stay far from any corner.
_FIRST_GAP, _LAST_GAP = 0.02, 2e-4
_GRIDS = (1024, 4096, 16384)  # units of room, from the first rounds to the last
_RELATIVE_GAP_TO_STOP = 0.0005  # between the bound and the value of the linear program with the rows so far


@dataclass(frozen=True, slots=True)
class PricingProgram:
    """A problem to bound: rows of at most `capacity` tokens, at least `times[u]` of them through each node u.

    The rows have at least `tokens[u]` tokens in the subtree of u; both are int64 [nodes]. A row pays `cost` int64
    [nodes] for each of its nodes: either the tokens of the node, or 1 at the root and 0 elsewhere. `rows` int64
    [leaves] is a good plan, and its cost is `upper`. Some best plan has at most `max_rows` rows.
    """

    tree: PlanTree
    capacity: int
    cost: Int64
    times: Int64
    tokens: Int64
    rows: Int64
    upper: int
    max_rows: int

    @property
    def pays_tokens(self) -> bool:
        """True if the cost of a row is its tokens, False if every row costs 1."""
        return self.cost is self.tree.size


@dataclass(slots=True)
class WorkBudget:
    """The work that is left, in entries of knapsack tables."""

    left: float


def generated_bound(program: PricingProgram, allowance: WorkBudget, *, known: int) -> int:
    """Return a lower bound on the cost of any plan, at least `known`, which is already proven.

    Stops if no bound above `known` is possible, if `upper` is proven, or if the allowance is used up.
    """
    generator = _RowGenerator(program)
    for _ in range(_MAX_ROUNDS):
        if allowance.left <= 0 or not generator.advance(allowance) or generator.value <= known:
            break
        # Costs are whole numbers, so a bound over `upper - 1` proves `upper`, if it is true without rounding.
        if generator.best > program.upper - 1:
            if generator.certified() >= program.upper:
                return program.upper
            if not generator.refine():
                break
    return max(known, generator.certified()) if generator.best > known else known


class _RowGenerator:
    """The rows so far and the prices that they allow: no row may earn more than it costs.

    A demand is a node and a kind, rows or tokens. Demands for tokens and their prices are in units of `unit_of` tokens,
    so that the amounts of both kinds are about equally large.
    """

    def __init__(self, program: PricingProgram) -> None:
        self.program = program
        tree, times, tokens = program.tree, program.times, program.tokens
        self.is_leaf = tree.end == np.arange(1, tree.num_nodes + 1)
        max_times, below = np.zeros(tree.num_nodes, np.int64), np.zeros(tree.num_nodes, np.int64)
        np.maximum.at(max_times, tree.parent[1:], times[1:])
        np.add.at(below, tree.parent[1:], tokens[1:])
        # If a child demands as many rows as its parent, the parent needs no price, because every row through the child
        # passes through the parent. If the tokens of a subtree follow from its children, it needs none either.
        self.passed = np.flatnonzero(self.is_leaf | (times > max_times))
        self.spent = np.flatnonzero((tokens > below + tree.size * times) & ~self.is_leaf)
        self.unit_of = np.maximum(1, tokens[self.spent] // times[self.spent]).astype(np.float64)
        self.demand = np.concatenate([times[self.passed], tokens[self.spent] / self.unit_of])
        # column[u] is the index of the price on rows through u, -1 if it has none: passed [1, 3] -> [-1, 0, -1, 1].
        self.column = np.full(tree.num_nodes, -1)
        self.column[self.passed] = np.arange(len(self.passed))
        self.rows: list[Int64] = []
        self.amounts: list[Float64] = []
        self.costs: list[float] = []
        self.known: set[bytes] = set()
        for row in range(int(program.rows.max()) + 1):
            self._add(_union(tree, tree.leaf[program.rows == row]))
        start = self._first_prices()
        self.best_prices = start
        # Newton steps need prices strictly inside: below every cost and above 0.
        self.prices = 0.95 * start + 1e-6 * start.max()
        self.gap = _FIRST_GAP
        self.value = float(program.upper)
        self._use_grid(0)

    def _first_prices(self) -> Float64:
        """Return prices at which no row earns more than it costs.

        The cost of a node is split in two. One half becomes the price on rows through the node, or through the first
        node below it that has as many rows. The other half becomes the price on tokens of the topmost subtree with a
        demand for tokens that contains the node. Elsewhere the whole cost is the first of these prices.
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
        # A node without a price passes its share to the first child with as many rows; parents come first, so shares
        # are passed down until a node has a price.
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
        unit = max(1, capacity // _GRIDS[index])
        self.exact = unit == 1
        self.unit, self.room = unit, capacity // unit
        # Path lengths are rounded, not sizes, so that errors cancel along a path: sizes [3, 3, 3, 3] in units of 4 are
        # [0, 1, 1, 1] by path lengths, but [0, 0, 0, 0] rounded one by one.
        self.sizes = (tree.depth + tree.size) // unit - tree.depth // unit
        self.table = np.zeros((tree.num_nodes + 1, self.room + 1), np.int32)
        self.best = self._estimate(self.best_prices, self._fill(self._profits(self.best_prices)))

    def refine(self) -> bool:
        """Switch to finer units of room; return False if the units are already the finest."""
        if self.exact or self.grid + 1 == len(_GRIDS):
            return False
        self._use_grid(self.grid + 1)
        return True

    def _add(self, taken: NDArray[np.bool_]) -> bool:
        """Add the row of the nodes `taken` bool [nodes]; return False if it is not new."""
        key = np.packbits(taken).tobytes()
        if key in self.known:
            return False
        self.known.add(key)
        columns = self.column[taken]
        columns = columns[columns >= 0]
        # Tokens of the row in each subtree with a demand for tokens, as differences of a running sum.
        sums = np.concatenate([[0], np.cumsum(self.program.tree.size * taken)])
        tokens = sums[self.program.tree.end[self.spent]] - sums[self.spent]
        inside = np.flatnonzero(tokens)
        self.rows.append(np.concatenate([columns, len(self.passed) + inside]))
        self.amounts.append(np.concatenate([np.ones(len(columns)), tokens[inside] / self.unit_of[inside]]))
        self.costs.append(float(self.program.cost[taken].sum()))
        return True

    def advance(self, allowance: WorkBudget) -> bool:
        """Do one round: centre, then the rows with the highest profit. Return False if nothing is left to gain."""
        allowance.left -= self._centre() * len(self.prices) ** 3 / _NEWTON_ENTRIES
        new, improved, tables = self._price()
        allowance.left -= tables * self.table.size
        if self.value <= self.best * (1 + _RELATIVE_GAP_TO_STOP):
            return False
        # Few new rows: first finer units of room, then a centre closer to the optimum.
        if new < _ROWS_PER_ROUND // 8:
            refined = (new == 0 or self.gap < 0.004) and self.refine()
            if not refined and new == 0 and not improved and self.gap <= _LAST_GAP:
                return False
            self.gap = max(_LAST_GAP, self.gap / 2)
        return True

    def _centre(self) -> int:
        """Move the prices to the centre of the allowed prices, at a distance from the optimum that `gap` sets.

        Returns the number of Newton steps. The centre maximises

            weight * (price @ demand) + sum over rows of log(cost - earnings) + sum of log(price)
        """
        rows = _SparseRows.of(self.rows, self.amounts)
        costs, demand, prices = np.array(self.costs), self.demand, self.prices
        # New rows may earn more than they cost: scale the prices until they are strictly allowed again.
        highest = float((rows.times(prices) / costs).max())
        if highest >= 1:
            prices = prices / (1.01 * highest)
        weight = (len(costs) + len(prices)) / (self.gap * self.program.upper)
        steps = 0
        while steps < _MAX_NEWTON_STEPS:
            steps += 1
            slack = costs - rows.times(prices)
            gradient = weight * demand - rows.transposed_times(1 / slack, len(prices)) + 1 / prices
            hessian = rows.newton_matrix(1 / slack**2, 1 / prices**2)
            step = np.linalg.solve(hessian, gradient)
            prices = prices + _longest_step(rows.times(step), slack, step, prices) * step
            if gradient @ step < 0.25:  # the squared Newton decrement, which is small near the centre
                break
        self.prices = prices
        # At the centre, shares 1 / (weight * slack) of the rows nearly meet all demands. Scaled up until they do, they
        # are a solution of the linear program with the rows so far.
        share = 1 / (weight * (costs - rows.times(prices)))
        met = rows.transposed_times(share, len(prices))
        self.value = min(self.value, float(costs @ share * (demand / met).max()))
        return steps

    def _price(self) -> tuple[int, bool, int]:
        """Add the rows with the highest profit, each next one without earnings from the leaves of the rows before it.

        Returns the number of new rows, whether the bound is better, and the number of tables that were filled.
        """
        program, new = self.program, 0
        profits = self._profits(self.prices)
        scale = self._fill(profits)
        bound = self._estimate(self.prices, scale)
        improved = bound > self.best
        if improved:
            self.best, self.best_prices = bound, self.prices
        tables = 1
        while tables <= _ROWS_PER_ROUND:
            # With so small a profit, `max_rows` rows lower the bound by at most 1e-5 of the cost.
            if self.table[0, -1] <= scale * 1e-5 * program.upper / program.max_rows:
                break
            taken = best_row(self.sizes, program.tree.end, self.table)
            # Sizes in coarse units are rounded, so the row may be too long in tokens.
            if int(program.tree.size[taken].sum()) <= program.capacity:
                new += self._add(taken)
            covered = taken & self.is_leaf
            profits[covered] = np.minimum(profits[covered], -program.cost[covered])
            scale = self._fill(profits)
            tables += 1
        return new, improved, tables

    def _fill(self, profits: Float64) -> int:
        """Fill the table with `profits` times a scale, and return the scale."""
        scale = self._scale(profits, 30)  # sums fit the int32 of the table
        fill_table(self.sizes, np.rint(profits * scale).astype(np.int32), self.program.tree.end, self.table)
        return scale

    def _estimate(self, prices: Float64, scale: int) -> float:
        """Return the bound of `prices`, whose table is filled; rounding makes it inexact."""
        earned = prices @ self.demand * scale
        return float(_bound(self.program, earned, self.table[0], unit=self.unit, scale=scale))

    def _profits(self, prices: Float64) -> Float64:
        """Return the earnings of each node minus its cost, float64 [nodes]."""
        tree = self.program.tree
        earned = np.zeros(tree.num_nodes)
        earned[self.passed] = prices[: len(self.passed)]
        # The price per token of a node is the sum over all demands above it: +p at the first node of each subtree, -p
        # after its last one, summed up. Subtree 1 .. 2 at price 3 -> [0, 3, 0, -3] -> rates [0, 3, 3, 0].
        rate = np.zeros(tree.num_nodes + 1)
        per_token = prices[len(self.passed) :] / self.unit_of
        np.add.at(rate, self.spent, per_token)
        np.add.at(rate, tree.end[self.spent], -per_token)
        return earned + np.cumsum(rate)[:-1] * tree.size - self.program.cost

    def _scale(self, profits: Float64, bits: int) -> int:
        """Return a power of 2 so that sums of profits, multiplied by it and rounded, stay below 2**bits."""
        highest = max(float(profits.clip(0).sum()), float(self.program.cost.max())) + 1
        return 1 << max(0, bits - 1 - math.frexp(highest)[1])

    def certified(self) -> int:
        """Return the best bound, computed again in integers and whole tokens, so that it is proven."""
        program, spent = self.program, self.spent
        tree, prices = program.tree, self.best_prices
        scale = self._scale(self._profits(prices), 52)  # float64 is exact for integers below 2**53
        # Any prices >= 0 prove a bound, so rounding them down is allowed. From here on all numbers are exact.
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
        profits = best_profits(tree, profit, program.capacity)
        return math.ceil(_bound(program, earned, profits, unit=1, scale=scale))


def _bound(program: PricingProgram, earned: float, profits: Int32 | Int64, *, unit: int, scale: int) -> Fraction:
    """Return the better of two bounds from prices whose demands earn `earned` in total.

    `profits[room]` is the highest profit, earnings - cost, of a row of at most `room` units. `earned` and `profits` are
    multiplied by `scale`.

    The first bound assumes that each of `max_rows` rows has the highest profit. The second one divides all prices by
    the highest ratio of earnings to cost, so that no row has a profit. If the cost of a row is its tokens, a row with
    the profit `profits[room]` costs at least `room` units, because a row of fewer units has a smaller profit.
    """
    excess = int(profits[-1])
    by_rows = (Fraction(earned) - program.max_rows * excess) / scale
    if not program.pays_tokens:
        return max(by_rows, Fraction(earned) / (scale + excess))
    if not program.tree.size[0]:
        return by_rows  # a row may cost nothing
    ratio = float((profits[1:] / np.arange(1, len(profits))).max()) * (1 + 2**-50)  # rounded up: not below the true one
    return max(by_rows, Fraction(earned) / (scale + Fraction(ratio) / unit))


def _union(tree: PlanTree, leaves: Int64) -> NDArray[np.bool_]:
    """Return the nodes on the paths to the nodes `leaves`, bool [nodes]."""
    # A node is on a path if its subtree contains a leaf of the row: leaves [2], end [4, 3, 3, 4] -> sums
    # [0, 0, 0, 1, 1] -> [1 > 0, 1 > 0, 1 > 0, 1 > 1]
    sums = np.concatenate([[0], np.cumsum(np.bincount(leaves, minlength=tree.num_nodes))])
    return np.asarray(sums[tree.end] > sums[:-1])


@dataclass(frozen=True, slots=True)
class _SparseRows:
    """A sparse matrix: row r has the columns `index[starts[r]:starts[r + 1]]` and the `amounts` at the same places."""

    starts: Int64
    index: Int64
    amounts: Float64
    row_of: Int64

    @staticmethod
    def of(rows: list[Int64], amounts: list[Float64]) -> _SparseRows:
        sizes = np.array([len(row) for row in rows])
        starts = np.concatenate([[0], np.cumsum(sizes)])
        return _SparseRows(
            starts, np.concatenate(rows), np.concatenate(amounts), np.repeat(np.arange(len(rows)), sizes)
        )

    def times(self, values: Float64) -> Float64:
        """Return the sum of `values` over the columns of each row, times the amounts: A @ values."""
        products = self.amounts * values[self.index]
        return np.asarray(np.bincount(self.row_of, products, len(self.starts) - 1), np.float64)

    def transposed_times(self, values: Float64, num_columns: int) -> Float64:
        """Return the sum of `values` over the rows of each column, times the amounts: A.T @ values."""
        products = self.amounts * values[self.row_of]
        return np.asarray(np.bincount(self.index, products, num_columns), np.float64)

    def newton_matrix(self, weights: Float64, diagonal: Float64) -> Float64:
        """Return the sum over rows of weight times (row outer row), plus a diagonal."""
        matrix = np.zeros((len(diagonal), len(diagonal)))
        add_outer_products(self.starts, self.index, self.amounts, weights, matrix, len(diagonal))
        matrix.reshape(-1)[:: len(diagonal) + 1] += diagonal
        return matrix


@in_c(INT64, INT64, FLOAT64, FLOAT64, FLOAT64, INT)
def add_outer_products(
    starts: Int64, index: Int64, amounts: Float64, weights: Float64, matrix: Float64, size: int
) -> None:
    """Add weight times (row outer row) of each sparse row to `matrix` float64 [size, size]."""
    for row in range(len(weights)):
        for i in range(starts[row], starts[row + 1]):
            for j in range(starts[row], starts[row + 1]):
                matrix[index[i], index[j]] += weights[row] * amounts[i] * amounts[j]


def _longest_step(change: Float64, slack: Float64, step: Float64, prices: Float64) -> float:
    """Return a factor of the step: at most 1, and at most 0.9 of the way to the cost of a row or to a price of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        to_cost = np.where(change > 0, slack / change, np.inf).min(initial=np.inf)
        to_zero = np.where(step < 0, -prices / step, np.inf).min(initial=np.inf)
    return min(1.0, 0.9 * float(min(to_cost, to_zero)))
