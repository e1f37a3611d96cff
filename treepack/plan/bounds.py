"""Certified lower bounds on the tokens of all rows of a tree: no plan of any method can need fewer.

    recursive_bound   counting from the leaves up; exact for many trees, and fast for any
    lower_bound       the same with stronger parts: exact programs for small subtrees, column generation for larger ones

Whatever a plan does, its rows are rows of each subtree too, with less capacity: the path above is paid first. So a
bound on the tokens of a subtree, or on the rows that must pass through its root, holds for the whole tree, and the
counting goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from treepack.plan.problem import Limits, Tree
from treepack.trajectory import Int64

MOST_PROGRAMS = 24  # programs of row counts for each larger subtree: the nodes where a plan may repeat most


def recursive_bound(tree: Tree, capacity: int) -> int:
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


def _count(tree: Tree, capacity: int, known: _Known) -> _Known:
    """`known` carried up from the leaves to the root."""
    from treepack.plan.counting import count

    return _Known(*count(tree.parent, tree.size, tree.depth + tree.size, capacity, known.tokens, known.times))


def lower_bound(tree: Tree, capacity: int, rows: Int64, *, largest: int) -> int:
    """Fewest tokens of any plan, as far as it can be proven with programs for subtrees of up to `largest` leaves.

    `rows` int64 [leaves] is a good plan: it says where the bound may be loose, and the programs start from its rows.
    """
    from treepack.plan.counting import passes

    known = _count(tree, capacity, _small_subtrees(tree, capacity, most_leaves=min(largest, 12)))
    used = passes(tree.parent, tree.leaf, rows)
    paid = _below(tree, tree.size * used)
    leaves = np.bincount(tree.leaf, minlength=tree.num_nodes)
    leaves = _below(tree, leaves)
    for node in _maximal(tree, leaves, largest).tolist():
        if leaves[node] > 12 and paid[node] > known.tokens[node]:
            part = slice(node, int(tree.end[node]))
            better = _by_programs(tree, node, capacity, rows, known, used)
            known.tokens[part], known.times[part] = better.tokens, better.times
    return int(_count(tree, capacity, known).tokens[0])


def _below(tree: Tree, values: Int64) -> Int64:
    """Sum of `values` over each subtree."""
    sums = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(sums[tree.end] - sums[:-1])


def _maximal(tree: Tree, leaves: Int64, largest: int) -> Int64:
    """Nodes with at most `largest` leaves below them whose parents have more."""
    above = np.where(tree.parent < 0, largest + 1, leaves[tree.parent])
    return np.flatnonzero((leaves <= largest) & (above > largest))


def subtree(tree: Tree, node: int) -> Tree:
    """The subtree of `node` alone; its rows may hold the capacity less `tree.depth[node]`."""
    part = slice(node, int(tree.end[node]))
    first, stop = np.searchsorted(tree.leaf, [part.start, part.stop])
    parent = tree.parent[part] - node
    parent[0] = -1
    depth, end = tree.depth[part] - tree.depth[node], tree.end[part] - node
    return Tree(tree.size[part], depth, parent, end, tree.leaf[first:stop] - node, tree.terms[first:stop])


def _small_subtrees(tree: Tree, capacity: int, *, most_leaves: int) -> _Known:
    """Exact tokens of every largest subtree of at most `most_leaves` leaves; exact row counts of all nodes in it."""
    from treepack.plan.subsets import fewest

    known = _Known(np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64))
    leaves = _below(tree, np.bincount(tree.leaf, minlength=tree.num_nodes))
    first = np.searchsorted(tree.leaf, np.arange(tree.num_nodes))
    for node in _maximal(tree, leaves, most_leaves).tolist():
        if leaves[node] < 3 and _fits(tree, node, capacity):
            continue
        part = subtree(tree, node)
        tokens, rows = fewest(part, Limits(capacity - int(tree.depth[node])))
        known.tokens[node] = tokens[-1]
        inside = np.arange(node, int(tree.end[node]))
        low = first[inside] - first[node]
        known.times[inside] = rows[((1 << leaves[inside]) - 1) << low]
    return known


def _fits(tree: Tree, node: int, capacity: int) -> bool:
    return bool(tree.depth[node] + tree.size[node : tree.end[node]].sum() <= capacity)


def _by_programs(tree: Tree, node: int, capacity: int, rows: Int64, known: _Known, used: Int64) -> _Known:
    """What column generation adds for the subtree of `node`: first row counts, where they matter most, then tokens."""
    from treepack.plan.colgen import Program, lower_bound

    part, inside = subtree(tree, node), slice(node, int(tree.end[node]))
    room = capacity - int(tree.depth[node])
    first, stop = np.searchsorted(tree.leaf, [inside.start, inside.stop])
    plan = np.unique(rows[first:stop], return_inverse=True)[1].astype(np.int64)
    here, times = used[inside], known.times[inside].copy()
    leaves = _below(part, np.bincount(part.leaf, minlength=part.num_nodes))
    tokens = known.tokens[inside].copy()
    counted = _Known(tokens, times)
    for _ in range(MOST_PROGRAMS):
        loose = part.size * (here - counted.times) * (leaves > 12)
        if not loose.any():
            break
        inner = int(loose.argmax())
        here = here.copy()
        better = _fewest_rows(part, inner, room, plan, counted.times)
        here[inner] = better  # not asked again
        if better > counted.times[inner]:
            counted.times[inner] = better
            counted = _count(part, room, counted)
    upper = int(part.size @ used[inside])
    base = int(counted.tokens[0])
    most_rows = min(2 * upper // room + 1, int(counted.times[0]) + (upper - base) // max(1, int(part.size[0])))
    program = Program(part, room, part.size, counted.times, plan, upper, most_rows, 64)
    counted.tokens[0] = max(base, lower_bound(program))
    return counted


def _fewest_rows(tree: Tree, node: int, capacity: int, plan: Int64, times: Int64) -> int:
    """Rows that must pass through `node`."""
    from treepack.plan.colgen import Program, lower_bound

    part = subtree(tree, node)
    first = int(np.searchsorted(tree.leaf, node))
    own = np.unique(plan[first : first + part.num_leaves], return_inverse=True)[1].astype(np.int64)
    cost = np.zeros(part.num_nodes, np.int64)
    cost[0] = 1
    most = int(own.max()) + 1
    room = capacity - int(tree.depth[node])
    return lower_bound(Program(part, room, cost, times[node : tree.end[node]], own, most, most, 1_000_000))
