"""Certified lower bounds on the tokens of all rows of a tree: no plan of any method needs fewer.

    recursive_bound   counting from the leaves to the root; exact for many trees, and fast for all
    lower_bound       the same with stronger parts: exact programs for small subtrees, column generation for larger ones

The rows of a plan are also rows of each subtree, with less capacity, because the path to the subtree takes its tokens
first. So a bound on the tokens of a subtree, or on the rows that must pass through its root, is true in the whole tree,
and counting continues from there. `counting.py`, `column_generation.py` and `knapsack.py` are its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from treepack.pack.plan.bounds import column_generation
from treepack.pack.plan.bounds.column_generation import PricingProgram, WorkBudget
from treepack.pack.plan.bounds.counting import count, passes
from treepack.pack.plan.methods.exact import exact
from treepack.pack.plan.methods.subsets import fewest
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions
from treepack.trajectory import Int64

_MIN_GAIN_DIVISOR = 2000  # rows through a node get a program if they may add at least 1 / 2000 of the tokens
_MAX_ROW_PROGRAMS = 24  # of these programs for each larger subtree, at the nodes whose repeats may cost most tokens


@dataclass(frozen=True, slots=True)
class ProofEffort:
    """Work for a bound: the maximum leaves of subtrees for each kind of program, and the work of column generation.

    `sets` is for the program over sets of leaves, `exact` for the multi-path program, and each of `programs` for one
    round of column generation. `entries` limits the work of all column generation together, in entries of knapsack
    tables; an entry takes about a nanosecond.
    """

    sets: int
    exact: int
    programs: tuple[int, ...]
    entries: float


def recursive_bound(tree: PlanTree, capacity: int) -> int:
    """Return a lower bound on the tokens of all rows of `tree`, by counting from the leaves to the root. O(nodes).

    A row that passes through node u has `left = capacity - (depth[u] + size[u])` tokens left for the nodes below u. If
    these need at least D tokens in total, at least ceil(D / left) rows pass through u. At least as many rows pass
    through u as through each child, and each row pays for u once.
    """
    return int(count_tree(tree, capacity).tokens[0])


def count_tree(tree: PlanTree, capacity: int) -> NodeBounds:
    """Return the bounds of `recursive_bound` for every node."""
    return _count(tree, capacity, NodeBounds(np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64)))


@dataclass(frozen=True, slots=True)
class NodeBounds:
    """Lower bounds for each node, int64 [nodes]: tokens of its subtree over all rows, and rows that pass through it."""

    tokens: Int64
    times: Int64


def _count(tree: PlanTree, capacity: int, known: NodeBounds) -> NodeBounds:
    """Return `known` improved by counting from the leaves to the root."""
    stop = tree.depth + tree.size
    return NodeBounds(*count(tree.end, tree.size, stop, capacity, known.tokens, known.times))


def lower_bound(tree: PlanTree, capacity: int, rows: Int64, proof: ProofEffort) -> int:
    """Return the best lower bound on the tokens of any plan that the programs of `proof` prove.

    `rows` int64 [leaves] is a good plan. If it needs more tokens in a subtree than the bound of this subtree, the bound
    may be loose, and programs are run there. They start from the rows of the plan.
    """
    known = _count(tree, capacity, _small_subtrees(tree, capacity, most_leaves=proof.sets))
    used = passes(tree.parent, tree.leaf, rows)
    # paid[u]: tokens of the plan `rows` in the subtree of u, over all rows. If the bound of u is equal, it is tight.
    paid = _subtree_sums(tree, tree.size * used)
    leaves = _subtree_sums(tree, np.bincount(tree.leaf, minlength=tree.num_nodes))
    for node in _maximal_nodes(tree, leaves, proof.exact).tolist():
        if leaves[node] > proof.sets and paid[node] > known.tokens[node]:
            limits = RowLimits(capacity - int(tree.depth[node]))
            bound = exact(subtree(tree, node), limits, SearchOptions("low")).lower_bound
            known.tokens[node] = max(known.tokens[node], bound)
    for max_leaves in proof.programs:
        known = _count(tree, capacity, known)
        loose = _maximal_nodes(tree, leaves, max_leaves)
        loose = loose[(leaves[loose] > proof.exact) & (paid[loose] > known.tokens[loose])]
        for node in loose[np.argsort(known.tokens[loose] - paid[loose], kind="stable")].tolist():
            part = slice(node, int(tree.end[node]))
            # The subtrees share the work of a round in proportion to their leaves.
            entries = proof.entries / len(proof.programs) * int(leaves[node]) / int(leaves[loose].sum())
            better = _by_programs(tree, node, capacity, rows, known, replace(proof, entries=entries))
            known.tokens[part], known.times[part] = better.tokens, better.times
    return int(_count(tree, capacity, known).tokens[0])


def _subtree_sums(tree: PlanTree, values: Int64) -> Int64:
    """Return the sum of `values` over each subtree, int64 [nodes]."""
    # A subtree is a range of nodes: values [4, 2, 1], end [3, 2, 3] -> sums [0, 4, 6, 7] -> [7 - 0, 6 - 4, 7 - 6]
    sums = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(sums[tree.end] - sums[:-1])


def _maximal_nodes(tree: PlanTree, leaves: Int64, max_leaves: int) -> Int64:
    """Return the nodes with at most `max_leaves` leaves below them whose parents have more."""
    # leaves [5, 1, 2, 1, 1, 2, 1, 1], at most 2 -> nodes [1, 2, 5]: they are disjoint and contain all leaves
    above = np.where(tree.parent < 0, max_leaves + 1, leaves[tree.parent])
    return np.flatnonzero((leaves <= max_leaves) & (above > max_leaves))


def subtree(tree: PlanTree, node: int) -> PlanTree:
    """Return the subtree of `node` as a tree; the capacity of its rows is smaller by `tree.depth[node]`."""
    part = slice(node, int(tree.end[node]))
    first, stop = np.searchsorted(tree.leaf, [part.start, part.stop])
    parent = tree.parent[part] - node
    parent[0] = -1
    depth, end = tree.depth[part] - tree.depth[node], tree.end[part] - node
    return PlanTree(tree.size[part], depth, parent, end, tree.leaf[first:stop] - node, tree.terms[first:stop])


def _small_subtrees(tree: PlanTree, capacity: int, *, most_leaves: int) -> NodeBounds:
    """Return exact minimum tokens and rows of all nodes with at most `most_leaves` leaves; 0 and 1 for other nodes."""
    known = NodeBounds(np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64))
    leaves = _subtree_sums(tree, np.bincount(tree.leaf, minlength=tree.num_nodes))
    for node in _maximal_nodes(tree, leaves, most_leaves).tolist():
        # A subtree that fits into one row needs no program: counting finds its tokens.
        if tree.depth[node] + tree.size[node : tree.end[node]].sum() > capacity:
            part = slice(node, int(tree.end[node]))
            limits = RowLimits(capacity - int(tree.depth[node]))
            known.tokens[part], known.times[part] = fewest(subtree(tree, node), limits)
    return known


def _by_programs(
    tree: PlanTree, node: int, capacity: int, rows: Int64, known: NodeBounds, proof: ProofEffort
) -> NodeBounds:
    """Improve the bounds of the subtree of `node` by column generation: first rows through its nodes, then its tokens.

    Rows are bounded at the nodes whose rows may add the largest number of tokens.
    """
    part, inside = subtree(tree, node), slice(node, int(tree.end[node]))
    room = capacity - int(tree.depth[node])
    first, stop = np.searchsorted(tree.leaf, [inside.start, inside.stop])
    # rows [7, 2, 7, 9] of these leaves -> plan [1, 0, 1, 2]
    plan = np.unique(rows[first:stop], return_inverse=True)[1].astype(np.int64)
    counted = NodeBounds(known.tokens[inside].copy(), known.times[inside].copy())
    leaves = _subtree_sums(part, np.bincount(part.leaf, minlength=part.num_nodes))
    used = passes(part.parent, part.leaf, plan)
    upper = int(part.size @ used)
    # A third of the work goes to the rows, the rest and anything left over to the tokens.
    for_rows = WorkBudget(proof.entries / 3)
    open_at = leaves > proof.sets
    for _ in range(_MAX_ROW_PROGRAMS):
        # Tokens that a tight bound on the rows through each node could add.
        loose = part.size * (used - counted.times) * open_at
        inner = int(loose.argmax())
        if for_rows.left <= 0 or loose[inner] * _MIN_GAIN_DIVISOR < upper:
            break
        open_at[inner] = False
        counted.times[inner] = _min_rows(part, inner, room, plan, counted, for_rows)
        counted = _count(part, room, counted)
    base = int(counted.tokens[0])
    max_rows = _max_rows(part, room, upper, counted)
    program = PricingProgram(part, room, part.size, counted.times, counted.tokens, plan, upper, max_rows)
    allowance = WorkBudget(proof.entries * 2 / 3 + max(0.0, for_rows.left))
    counted.tokens[0] = column_generation.generated_bound(program, allowance, known=base)
    return counted


def _max_rows(tree: PlanTree, capacity: int, upper: int, known: NodeBounds) -> int:
    """Return an upper bound on the rows of some plan with minimum tokens; `upper` is the tokens of any plan.

    Of all plans with minimum tokens, take one with minimum rows. Any two of its rows have together more tokens
    than `capacity` plus the tokens they share, else they could be one row. And the plan pays for the root in every row,
    and at least `known` below it.
    """
    root = int(tree.size[0])
    # n rows in pairs: their tokens are at least n / 2 * (capacity + root + 1), and at most `upper`.
    max_rows = max(1, 2 * upper // (capacity + root + 1))
    below = int(known.tokens[tree.parent == 0].sum())
    return min(max_rows, (upper - below) // root) if root else max_rows


def _min_rows(tree: PlanTree, node: int, capacity: int, plan: Int64, known: NodeBounds, allowance: WorkBudget) -> int:
    """Return a lower bound on the rows that pass through `node`, by column generation in its subtree."""
    part, inside = subtree(tree, node), slice(node, int(tree.end[node]))
    first = int(np.searchsorted(tree.leaf, node))
    part_plan = np.unique(plan[first : first + part.num_leaves], return_inverse=True)[1].astype(np.int64)
    # A row costs 1 at the root and nothing below it, so the cost of a plan is its number of rows.
    cost = np.zeros(part.num_nodes, np.int64)
    cost[0] = 1
    upper, room = int(part_plan.max()) + 1, capacity - int(tree.depth[node])
    program = PricingProgram(part, room, cost, known.times[inside], known.tokens[inside], part_plan, upper, upper)
    return column_generation.generated_bound(program, allowance, known=int(known.times[node]))
