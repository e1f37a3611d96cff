"""Rows for R ranks: every training step has a multiple of R rows, none of them empty, with even costs.

    items of a step --_split_cheapest--> at least as many items as rows --_spread--> row of each item

The cost of a row is its score pairs, or with `token_pairs` the time of a model: its score pairs plus that many pairs
for each token. Ranks take R rows at a time, in order, and wait for the slowest rank. So `plan_rows` sorts the rows of a
step by cost. Then R consecutive rows are nearly equal even if not all rows of the step can be.

The number of rows is the number that `fill.py` needs, rounded up to a multiple of R. If there are fewer items than
rows, items are split at the cuts that repeat the minimum of tokens. With the trajectories of a item in the order of
the trie, a cut before one of them repeats the tokens that it shares with the one before it.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan.fill import by_step, merge_rows
from treepack.pack.plan.problem import RowLimits, path_pairs
from treepack.pack.plan.unions import RowSizes, row_sizes, shared_in_rows
from treepack.trajectory import Int64
from treepack.trie.shared_prefixes import shared_in_order
from treepack.trie.trie import Trie

_ROWS_TO_TRY = 32  # rows checked for room before the assignment by cost gives up
_SAMPLED_ROWS = 512  # rows from which the partners of a move are taken
_PARTNERS = 24  # rows with which a row may trade items in one move; 8 of them have the lowest costs
_ITEMS_PER_ROW = 12  # items of a row that one move considers: at most 1 + 12 + 66 bundles of up to two
_MOVES_PER_ROW = 4  # moves tried for each row of a step
_MAX_MOVES = 2000  # moves tried for all rows of a step, to bound the time of steps with many rows
_EVEN_RATIO = 1.005  # cost of a row over the mean of all rows, at which the row is even enough


def balanced_rows(trie: Trie, row_of: Int64, limits: RowLimits, multiple_of: int, *, token_pairs: int = 0) -> Int64:
    """Return the final row of each trajectory, int64 [num_trajectories], from the rows `row_of` of single trees.

    The cost of a token is that of `token_pairs` score pairs.

    Raises:
        TreepackError: a step has fewer trajectories than rows.
    """
    steps = trie.step_rank
    num_items = int(row_of.max()) + 1
    item_steps = steps_of(row_of, steps, num_items)
    num_rows = _num_rows(row_sizes(trie, row_of, num_items), item_steps, limits, multiple_of)
    _refuse_small_steps(trie, num_rows, multiple_of)
    lacking = num_rows - np.bincount(item_steps)
    if (lacking > 0).any():
        row_of = _split_cheapest(trie, row_of, lacking)
        num_items = int(row_of.max()) + 1
        item_steps = steps_of(row_of, steps, num_items)
    sizes = row_sizes(trie, row_of, num_items)
    return _spread_steps(_Items.of(sizes, token_pairs), item_steps, limits, num_rows)[row_of]


def _num_rows(sizes: RowSizes, steps: Int64, limits: RowLimits, multiple_of: int) -> Int64:
    """Return the number of rows of each step, int64 [steps], from its items."""
    merged = merge_rows(sizes, steps, limits)
    merged_rows = [len(np.unique(merged[mine])) for mine in by_step(steps)]
    # 5 rows, a multiple of 4 -> 8 rows
    return np.array([-(-rows // multiple_of) * multiple_of for rows in merged_rows])


def row_costs(sizes: RowSizes, token_pairs: int) -> Int64:
    """Return the cost of each row in score pairs, int64 [num_rows]."""
    return sizes.pairs + token_pairs * sizes.tokens


@dataclass(frozen=True, slots=True)
class _Items:
    """The sizes and costs of items."""

    sizes: RowSizes
    costs: Int64

    @classmethod
    def of(cls, sizes: RowSizes, token_pairs: int = 0) -> _Items:
        return cls(sizes, row_costs(sizes, token_pairs))

    def take(self, items: Int64) -> _Items:
        return _Items(self.sizes.take(items), self.costs[items])


def _spread_steps(items: _Items, steps: Int64, limits: RowLimits, num_rows: Int64) -> Int64:
    row_of, first = np.zeros(len(steps), np.int64), 0
    for mine, rows in zip(by_step(steps), num_rows.tolist(), strict=True):
        row_of[mine] = first + _spread(items.take(mine), limits, rows)
        first += rows
    return row_of


def steps_of(row_of: Int64, steps: Int64, num_rows: int) -> Int64:
    """Return the step of each row, from the step of each trajectory; `check_plan` refuses rows of several steps."""
    row_steps = np.zeros(num_rows, np.int64)
    row_steps[row_of] = steps
    return row_steps


def _refuse_small_steps(trie: Trie, num_rows: Int64, multiple_of: int) -> None:
    counts = np.bincount(trie.step_rank)
    small = np.flatnonzero(counts < num_rows)
    if len(small):
        step = trie.trajectories["step"][int((trie.step_rank == small[0]).argmax())].as_py()
        where = "the input" if step is None else f"training step {step}"
        raise TreepackError(
            f"{where} has {counts[small[0]]} trajectories, too few for {num_rows[small[0]]} rows, a multiple of "
            f"{multiple_of} ({len(small)} such steps in total); give --balance a smaller number, or add rollouts"
        )


def _split_cheapest(trie: Trie, row_of: Int64, lacking: Int64) -> Int64:
    """Return `row_of` with `lacking[s]` more rows in step s, if positive, by cuts that repeat the minimum of tokens.

    Of cuts that repeat equally many tokens, the cuts with the highest pairs on the smaller side come first.
    """
    order = np.argsort(row_of, kind="stable")
    rows = row_of[order]
    shared = shared_in_rows(shared_in_order(trie), row_of, order)
    stop = np.cumsum(path_pairs(trie.lengths[order]) - path_pairs(shared))
    # rows [0, 0, 1, 1, 1] -> begins [1, 0, 1, 0, 0]; a cut is possible at the indices [1, 3, 4].
    begins = np.concatenate([[True], rows[1:] != rows[:-1]])
    # start[k], stop[k]: pairs of all rows before and after trajectory k. `before` counts the pairs of its row before k,
    # and `after` the pairs from k on, with the shared prefix that a cut before k repeats.
    start = np.concatenate([[0], stop[:-1]])
    before = start - start[begins][rows]
    after = stop[np.append(begins[1:], True)][rows] - start + path_pairs(shared)
    cuts = np.flatnonzero(~begins)
    steps = trie.step_rank[order][cuts]
    by_cost = np.lexsort([-np.minimum(before, after)[cuts], shared[cuts], steps])
    first = np.searchsorted(steps[by_cost], np.arange(len(lacking)))
    for begin, more in zip(first.tolist(), lacking.tolist(), strict=True):
        begins[cuts[by_cost[begin : begin + max(0, more)]]] = True
    # The cuts so far and a new one: begins [1, 0, 1, 1, 0] -> rows [0, 0, 1, 2, 2], put back into input order.
    new_row_of = np.zeros(len(order), np.int64)
    new_row_of[order] = np.cumsum(begins) - 1
    return new_row_of


def _spread(items: _Items, limits: RowLimits, num_rows: int) -> Int64:
    """Assign the items of one step to exactly `num_rows` rows, none empty, with even costs."""
    row_of = _assign_by_cost(items, limits, num_rows)
    if row_of is None:
        merged = merge_rows(items.sizes, np.zeros(len(items.costs), np.int64), limits)
        row_of = _split_rows(items.costs, merged, num_rows)
    return _improve(_CostSpread.of(items, limits, row_of))


def _assign_by_cost(items: _Items, limits: RowLimits, num_rows: int) -> Int64 | None:
    """Assign each item, by falling cost, to the row with the lowest cost that has room; None if a row is missing.

    A item gives up after `_ROWS_TO_TRY` rows without room.
    """
    left = [list(_row_limits(items.sizes, limits)) for _ in range(num_rows)]
    # A heap of (cost, row). The first `num_rows` items open a row each, so no row stays empty.
    rows = [(0, row) for row in range(num_rows)]
    row_of = np.zeros(len(items.costs), np.int64)
    columns = items.sizes
    sizes = list(zip(columns.tokens.tolist(), columns.pairs.tolist(), columns.terms.tolist(), strict=True))
    costs = items.costs.tolist()
    for item in np.lexsort([np.arange(len(sizes)), -columns.tokens, -items.costs]).tolist():
        size = sizes[item]
        refused: list[tuple[int, int]] = []
        while rows and len(refused) < _ROWS_TO_TRY:
            cost, row = heapq.heappop(rows)
            if all(a <= b for a, b in zip(size, left[row], strict=True)):
                break
            refused.append((cost, row))
        else:
            return None
        left[row] = [b - a for a, b in zip(size, left[row], strict=True)]
        row_of[item] = row
        for entry in (*refused, (cost + costs[item], row)):
            heapq.heappush(rows, entry)
    return row_of


def _row_limits(items: RowSizes, limits: RowLimits) -> tuple[int, int, int]:
    """Return the maximum tokens, pairs and terms of a row; without a limit, the sum over all items."""
    return (
        limits.capacity,
        int(items.pairs.sum()) if limits.pairs is None else limits.pairs,
        int(items.terms.sum()) if limits.terms is None else limits.terms,
    )


def _split_rows(costs: Int64, row_of: Int64, num_rows: int) -> Int64:
    """Split the row with the highest cost in two, again and again, until there are `num_rows` rows."""
    members: list[list[int]] = [[] for _ in range(num_rows)]
    for item, row in enumerate(row_of.tolist()):
        members[row].append(item)
    cost = costs.tolist()
    count = int(row_of.max()) + 1
    # heapq is a heap of minima, so costs are negative. A row of one item cannot be split.
    heap = [(-sum(cost[i] for i in ids), row) for row, ids in enumerate(members[:count]) if len(ids) > 1]
    heapq.heapify(heap)
    while count < num_rows:
        _, row = heapq.heappop(heap)
        halves: list[list[int]] = [[], []]
        sums = [0, 0]
        # Each item, the largest first, goes to the smaller half: costs 9, 6, 5, 2 -> 9 + 2 and 6 + 5.
        for item in sorted(members[row], key=lambda i: (-cost[i], i)):
            side = 0 if sums[0] <= sums[1] else 1
            halves[side].append(item)
            sums[side] += cost[item]
        for at, half, total in ((row, halves[0], sums[0]), (count, halves[1], sums[1])):
            members[at] = half
            if len(half) > 1:
                heapq.heappush(heap, (-total, at))
        count += 1
    new_row_of = np.zeros(len(costs), np.int64)
    for row, ids in enumerate(members):
        new_row_of[ids] = row
    return new_row_of


@dataclass(slots=True)
class _CostSpread:
    """The items of each row, while items move from row to row.

    `sizes` int64 [items, 4] are the tokens, pairs, terms and costs of items, `used` int64 [rows, 4] their sums over
    each row, and `maxima` int64 [3] the limits of a row, which has none for its cost.
    """

    sizes: Int64
    maxima: Int64
    row_of: Int64
    members: list[list[int]]
    used: Int64

    @classmethod
    def of(cls, items: _Items, limits: RowLimits, row_of: Int64) -> _CostSpread:
        columns = items.sizes
        sizes = np.stack([columns.tokens, columns.pairs, columns.terms, items.costs], axis=1)
        num_rows = int(row_of.max()) + 1
        used = np.zeros((num_rows, 4), np.int64)
        np.add.at(used, row_of, sizes)
        members: list[list[int]] = [[] for _ in range(num_rows)]
        for item, row in enumerate(row_of.tolist()):
            members[row].append(item)
        return cls(sizes, np.array(_row_limits(columns, limits)), row_of.copy(), members, used)

    @property
    def costs(self) -> Int64:
        """The cost of each row, int64 [rows]."""
        return self.used[:, 3]

    def move(self, item: int, row: int) -> None:
        old = int(self.row_of[item])
        self.members[old].remove(item)
        self.members[row].append(item)
        self.used[old] -= self.sizes[item]
        self.used[row] += self.sizes[item]
        self.row_of[item] = row


def _improve(spread: _CostSpread) -> Int64:
    """Let the row with the highest cost give or trade items, while this lowers the maximum of the two rows."""
    num_rows = len(spread.used)
    even = _EVEN_RATIO * spread.costs.mean()
    settled = np.zeros(num_rows, bool)  # rows for which no trade helps
    for _ in range(min(_MOVES_PER_ROW * num_rows, _MAX_MOVES)):
        row = int(np.where(settled, -1, spread.costs).argmax())
        if settled[row] or spread.costs[row] <= even:
            break
        trade = _best_trade(spread, row, together=1) or _best_trade(spread, row, together=2)
        if trade is None:
            settled[row] = True
            continue
        outgoing, other, incoming = trade
        for item in outgoing:
            spread.move(item, other)
        for item in incoming:
            spread.move(item, row)
    return spread.row_of


def _best_trade(spread: _CostSpread, row: int, *, together: int) -> tuple[list[int], int, list[int]] | None:
    """Return up to `together` items to give away, the row to give them to, and the items to take back.

    None if no trade helps. Trades are the rows of one array, so that numpy checks all of them at once.
    """
    stride = -(-len(spread.used) // _SAMPLED_ROWS)
    sample = np.arange(row % stride, len(spread.used), stride)
    others = sample[np.argsort(spread.costs[sample], kind="stable")]
    others = others[others != row]
    # A third of the partners are the rows with the lowest costs, the others are spread evenly over the rest.
    evenly = _evenly_spaced(others[_PARTNERS // 3 :], _PARTNERS - _PARTNERS // 3)
    partners = np.concatenate([others[: _PARTNERS // 3], evenly])
    bundles = [_bundles(spread.members[other], together) for other in partners.tolist()]
    owner = np.repeat(partners, [len(of_partner) for of_partner in bundles])
    # incoming [n, 2], outgoing [m, 2]: items, -1 for none. Bundle 0 of a row is empty: to give nothing is not a trade.
    incoming, outgoing = np.concatenate(bundles), _bundles(spread.members[row], together)[1:]
    # gain [n, 4], loss [m, 4]: tokens, pairs, terms and cost of each bundle
    gain, loss = (np.where(b[:, :, None] < 0, 0, spread.sizes[b]).sum(axis=1) for b in (incoming, outgoing))
    change = loss[:, None, :] - gain[None, :, :]  # [m, n, 4]
    after_row, after_other = spread.used[row] - change, spread.used[owner] + change
    allowed = (after_row[:, :, :3] <= spread.maxima).all(axis=2) & (after_other[:, :, :3] <= spread.maxima).all(axis=2)
    # A row without tokens would be empty.
    allowed &= (after_row[:, :, 0] > 0) & (after_other[:, :, 0] > 0)
    before = int(spread.costs[row])
    maximum = np.where(allowed, np.maximum(after_row[:, :, 3], after_other[:, :, 3]), before)  # [m, n]
    best = int(maximum.argmin())
    if maximum.flat[best] >= before:
        return None
    # flat index 7 with n = 3 -> outgoing 2, incoming 1
    a, b = divmod(best, len(incoming))
    return [i for i in outgoing[a].tolist() if i >= 0], int(owner[b]), [i for i in incoming[b].tolist() if i >= 0]


def _bundles(members: list[int], together: int) -> Int64:
    """Return no item, each single item, and with `together` 2 each pair of items; int64 [bundles, 2], -1 for none.

    Of a row with more than `_ITEMS_PER_ROW` items only so many are used, evenly spaced.
    """
    # members [7, 9], together 2 -> [[-1, -1], [7, -1], [9, -1], [7, 9]]
    items = np.array([-1, *_evenly_spaced(np.array(members), _ITEMS_PER_ROW)])
    return items[_choices(len(items), together)]


@functools.cache
def _choices(count: int, together: int) -> Int64:
    """Return indices below `count`, int64 [pairs, 2]: each with 0, and with `together` 2 also all pairs without 0."""
    # count 3 -> [[0, 0], [1, 0], [2, 0]], and with `together` 2 also [1, 2]
    alone = np.stack([np.arange(count), np.zeros(count, np.int64)], axis=1)
    if together == 1:
        return alone
    return np.concatenate([alone, np.stack(np.triu_indices(count - 1, 1), axis=1) + 1])


def _evenly_spaced(values: Int64, count: int) -> Int64:
    """Return at most `count` of `values`, evenly spaced."""
    if len(values) <= count:
        return values
    # 10 values, count 4 -> indices [0, 3, 6, 9]
    return values[np.linspace(0, len(values) - 1, count).astype(np.int64)]
