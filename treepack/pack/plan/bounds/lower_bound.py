"""Certified lower bounds on the tokens of all rows of a tree: no plan of any method can need fewer.

    recursive_bound   counting from the leaves up; exact for many trees, and fast for any
    lower_bound       the same with stronger parts: exact programs for small subtrees, column generation for larger ones

Whatever a plan does, its rows are rows of each subtree too, with less capacity: the path above is paid first. So a
bound on the tokens of a subtree, or on the rows that must pass through its root, holds for the whole tree, and the
counting goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from treepack.pack.plan.problem import Limits, PlanTree, Search
from treepack.trajectory import Int64

if TYPE_CHECKING:
    from treepack.pack.plan.bounds.column_generation import Allowance

WORTH = 2000  # a row count is asked for where it may add a 2000th of the tokens
MOST_PROGRAMS = 24  # programs of row counts for each larger subtree: the nodes where a plan may repeat most


@dataclass(frozen=True, slots=True)
class ProofEffort:
    """How hard to look for a bound.

    Most leaves of subtrees for which a program over sets, the multi-path program and, one after the other, column
    generation are run; and the work of all column generation, in entries of knapsack tables of a nanosecond or so.
    """

    sets: int
    exact: int
    programs: tuple[int, ...]
    entries: float


def recursive_bound(tree: PlanTree, capacity: int) -> int:
    """Fewest tokens that rows of `capacity` can hold for `tree`, by counting from the leaves up. O(nodes).

    A row that passes through node u has `capacity - (depth[u] + size[u])` tokens left for what is below it. If
    everything below u needs at least D tokens in total, then at least ceil(D / left) rows pass through u, at least as
    many as through any child, and each of them pays u once.
    """
    known = _Known(np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64))
    return int(_count(tree, capacity, known).tokens[0])


@dataclass(frozen=True, slots=True)
class _Known:
    """For each node, int64 [nodes]: tokens that its subtree needs at least, and rows that must pass through it."""

    tokens: Int64
    times: Int64


def _count(tree: PlanTree, capacity: int, known: _Known) -> _Known:
    """`known` carried up from the leaves to the root."""
    from treepack.pack.plan.bounds.counting import count

    return _Known(*count(tree.parent, tree.end, tree.size, tree.depth + tree.size, capacity, known.tokens, known.times))


def lower_bound(tree: PlanTree, capacity: int, rows: Int64, proof: ProofEffort) -> int:
    """Fewest tokens of any plan, as far as it can be proven with the programs that `proof` allows.

    `rows` int64 [leaves] is a good plan: it says where the bound may be loose, and the programs start from its rows.
    """
    from treepack.pack.plan.bounds.counting import passes
    from treepack.pack.plan.methods.exact import exact

    known = _count(tree, capacity, _small_subtrees(tree, capacity, most_leaves=proof.sets))
    used = passes(tree.parent, tree.leaf, rows)
    paid = _below(tree, tree.size * used)
    leaves = _below(tree, np.bincount(tree.leaf, minlength=tree.num_nodes))
    for node in _maximal(tree, leaves, proof.exact).tolist():
        if leaves[node] > proof.sets and paid[node] > known.tokens[node]:
            limits = Limits(capacity - int(tree.depth[node]))
            least = exact(subtree(tree, node), limits, Search("low")).lower_bound
            known.tokens[node] = max(known.tokens[node], least)
    for most in proof.programs:
        known = _count(tree, capacity, known)
        loose = _maximal(tree, leaves, most)
        loose = loose[(leaves[loose] > proof.exact) & (paid[loose] > known.tokens[loose])]
        for node in loose[np.argsort(known.tokens[loose] - paid[loose], kind="stable")].tolist():
            part = slice(node, int(tree.end[node]))
            entries = proof.entries / len(proof.programs) * int(leaves[node]) / int(leaves[loose].sum())
            better = _by_programs(tree, node, capacity, rows, known, replace(proof, entries=entries))
            known.tokens[part], known.times[part] = better.tokens, better.times
    return int(_count(tree, capacity, known).tokens[0])


def _below(tree: PlanTree, values: Int64) -> Int64:
    """Sum of `values` over each subtree."""
    sums = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(sums[tree.end] - sums[:-1])


def _maximal(tree: PlanTree, leaves: Int64, largest: int) -> Int64:
    """Nodes with at most `largest` leaves below them whose parents have more."""
    above = np.where(tree.parent < 0, largest + 1, leaves[tree.parent])
    return np.flatnonzero((leaves <= largest) & (above > largest))


def subtree(tree: PlanTree, node: int) -> PlanTree:
    """The subtree of `node` alone; its rows may hold the capacity less `tree.depth[node]`."""
    part = slice(node, int(tree.end[node]))
    first, stop = np.searchsorted(tree.leaf, [part.start, part.stop])
    parent = tree.parent[part] - node
    parent[0] = -1
    depth, end = tree.depth[part] - tree.depth[node], tree.end[part] - node
    return PlanTree(tree.size[part], depth, parent, end, tree.leaf[first:stop] - node, tree.terms[first:stop])


def _small_subtrees(tree: PlanTree, capacity: int, *, most_leaves: int) -> _Known:
    """Exact tokens and row counts of all nodes with at most `most_leaves` leaves below them."""
    from treepack.pack.plan.methods.subsets import fewest

    known = _Known(np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64))
    leaves = _below(tree, np.bincount(tree.leaf, minlength=tree.num_nodes))
    for node in _maximal(tree, leaves, most_leaves).tolist():
        if not _fits(tree, node, capacity):
            part = slice(node, int(tree.end[node]))
            limits = Limits(capacity - int(tree.depth[node]))
            known.tokens[part], known.times[part] = fewest(subtree(tree, node), limits)
    return known


def _fits(tree: PlanTree, node: int, capacity: int) -> bool:
    return bool(tree.depth[node] + tree.size[node : tree.end[node]].sum() <= capacity)


def _by_programs(tree: PlanTree, node: int, capacity: int, rows: Int64, known: _Known, proof: ProofEffort) -> _Known:
    """What column generation adds for the subtree of `node`: first row counts, where they matter most, then tokens."""
    from treepack.pack.plan.bounds.column_generation import Allowance, PricingProgram, lower_bound
    from treepack.pack.plan.bounds.counting import passes

    part, inside = subtree(tree, node), slice(node, int(tree.end[node]))
    room = capacity - int(tree.depth[node])
    first, stop = np.searchsorted(tree.leaf, [inside.start, inside.stop])
    plan = np.unique(rows[first:stop], return_inverse=True)[1].astype(np.int64)
    counted = _Known(known.tokens[inside].copy(), known.times[inside].copy())
    leaves = _below(part, np.bincount(part.leaf, minlength=part.num_nodes))
    used = passes(part.parent, part.leaf, plan)
    upper = int(part.size @ used)
    for_rows = Allowance(proof.entries / 3)
    open_at = leaves > proof.sets
    for _ in range(MOST_PROGRAMS):
        loose = part.size * (used - counted.times) * open_at
        inner = int(loose.argmax())
        if for_rows.left <= 0 or loose[inner] * WORTH < upper:
            break
        open_at[inner] = False
        counted.times[inner] = _fewest_rows(part, inner, room, plan, counted, for_rows)
        counted = _count(part, room, counted)
    base = int(counted.tokens[0])
    most_rows = _most_rows(part, room, upper, counted)
    program = PricingProgram(part, room, part.size, counted.times, counted.tokens, plan, upper, most_rows)
    counted.tokens[0] = lower_bound(program, Allowance(proof.entries * 2 / 3 + max(0.0, for_rows.left)), known=base)
    return counted


def _most_rows(tree: PlanTree, capacity: int, upper: int, known: _Known) -> int:
    """Rows of some plan of fewest tokens, at most; `upper` are the tokens of any plan.

    Of these plans take one of fewest rows. Two of its rows hold more than `capacity` and what they share, or they would
    be one. And it pays the root for every row, with at least `known` below it.
    """
    root = int(tree.size[0])
    most = max(1, 2 * upper // (capacity + root + 1))
    below = int(known.tokens[tree.parent == 0].sum())
    return min(most, (upper - below) // root) if root else most


def _fewest_rows(tree: PlanTree, node: int, capacity: int, plan: Int64, known: _Known, allowance: Allowance) -> int:
    """Rows that must pass through `node`."""
    from treepack.pack.plan.bounds.column_generation import PricingProgram, lower_bound

    part, inside = subtree(tree, node), slice(node, int(tree.end[node]))
    first = int(np.searchsorted(tree.leaf, node))
    own = np.unique(plan[first : first + part.num_leaves], return_inverse=True)[1].astype(np.int64)
    cost = np.zeros(part.num_nodes, np.int64)
    cost[0] = 1
    most, room = int(own.max()) + 1, capacity - int(tree.depth[node])
    program = PricingProgram(part, room, cost, known.times[inside], known.tokens[inside], own, most, most)
    return lower_bound(program, allowance, known=int(known.times[node]))
