"""Places of the rows of all slices in the directory, from sizes alone, and rows that join rows of several slices.

    slice 0   step 1  1  2       slice 1   step 2  2       slice 2   step 2  3
    open                 x                   x                         x            joined: x x x -> one row of step 2

    directory   slice 0: 1 1     joined: 2     slice 1: 2     slice 2: 3

Slices are in the order of training steps. A step that several slices have is the last one of the first of them, so its
joined rows follow this slice, and the rows stay sorted by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from treepack.cluster.slice_plan import PackJob, SlicePlan, group_numbers, shared_nodes
from treepack.cluster.slice_rows import SliceFacts
from treepack.cluster.trie_slices import TrieSlice
from treepack.columns import MAKES_TERMS
from treepack.pack.files import num_parts
from treepack.pack.plan.fill import merge_rows
from treepack.pack.plan.plan import PlanTotals
from treepack.pack.plan.planning import FOREST_METHODS
from treepack.pack.plan.unions import RowSizes
from treepack.trajectory import Int32

# Open rows of a slice and a step: the emptiest ones, at most so many, and filled less than this.
_OPEN_ROWS, _OPEN_FILL = 8, 0.75


_JoinedRow = tuple[tuple[int, int], ...]  # (slice, row of the slice) of its open rows


@dataclass(frozen=True)
class _OpenRowJoin:
    """Rows that join open rows of one step, after slice number `after`; each open row is (slice, row of the slice)."""

    after: int
    rows: tuple[_JoinedRow, ...]
    facts: SliceFacts

    @property
    def slices(self) -> list[int]:
        """The slices of the open rows."""
        return sorted({number for row in self.rows for number, _ in row})


@dataclass(frozen=True)
class SliceLayout:
    """The `facts` of each slice, the `joins` by slice, the sizes of all `rows` in order, and the number of groups."""

    facts: list[SliceFacts]
    joins: list[_OpenRowJoin]
    rows: PlanTotals
    num_groups: int


def make_layout(slices: Sequence[TrieSlice], plans: Sequence[SlicePlan], job: PackJob) -> SliceLayout:
    """Return the numbers of all rows, and the facts that each slice needs of the others."""
    known = frozenset[str]().union(*(plan.known for plan in plans))
    groups, num_groups = _groups_of_all([plan.groups for plan in plans])
    shared = _times_trained(plans)
    joined = _join_open_rows(plans, job)
    has_terms = not known.isdisjoint(MAKES_TERMS)
    facts: list[SliceFacts] = []
    joins: list[_OpenRowJoin] = []
    sizes: list[RowSizes] = []
    first = 0, 0  # numbers of the next row and of the next part

    def place(rows: RowSizes) -> tuple[int, int]:
        """Add `rows`, and return the numbers of the first of them and of its part."""
        nonlocal first
        here, terms = first, rows.terms if has_terms else np.zeros_like(rows.terms)
        first = here[0] + len(rows.tokens), here[1] + num_parts(rows.tokens, terms)
        sizes.append(rows)
        return here

    for number, (part, plan) in enumerate(zip(slices, plans, strict=True)):
        open_rows = np.array(
            sorted(row for rows in joined.values() for join in rows for i, row in join if i == number), np.int64
        )
        complete = plan.sizes.take(np.setdiff1d(np.arange(plan.num_rows), open_rows))
        own = {node: shared[node] for node, _ in shared_nodes(part) if node in shared}
        table = groups[number] if job.options.normalize == "group" else None
        facts.append(SliceFacts(known, table, own, *place(complete), open_rows))
        if number in joined:
            rows = joined[number]
            of_join = SliceFacts(known, None, {}, *place(_sizes_of_joins(plans, rows)), np.zeros(0, np.int64))
            joins.append(_OpenRowJoin(number, tuple(rows), of_join))
    rows_of_all = PlanTotals(
        *(np.concatenate([getattr(each, name) for each in sizes]) for name in ("tokens", "pairs", "terms"))
    )
    return SliceLayout(facts, joins, rows_of_all, num_groups)


def _groups_of_all(tables: list[pa.Table]) -> tuple[list[pa.Table], int]:
    """Return `tables` with the weight of each group summed over all of them, and the number of groups."""
    numbers = group_numbers(tables)
    weights = np.concatenate([table["weight"].to_numpy() for table in tables])
    sums = np.bincount(np.concatenate(numbers), weights=weights)
    at = tables[0].schema.get_field_index("weight")
    summed = [
        table.set_column(at, "weight", pa.array(sums[own], pa.float64()))
        for table, own in zip(tables, numbers, strict=True)
    ]
    return summed, len(sums)


def _times_trained(plans: Sequence[SlicePlan]) -> dict[int, Int32]:
    """Return how many trajectories of all slices train each token of the nodes that several slices have."""
    total: dict[int, Int32] = {}
    for plan in plans:
        for node, counts in plan.times_trained.items():
            total[node] = total[node] + counts if node in total else counts
    return total


def _join_open_rows(plans: Sequence[SlicePlan], job: PackJob) -> dict[int, list[_JoinedRow]]:
    """Return the joined rows, by the slice that they follow."""
    # Balanced rows of a slice are a multiple already, and rows of these methods are compared as the methods make them.
    if job.options.balance > 1 or job.options.method in FOREST_METHODS:
        return {}
    slices_of: dict[int | None, list[int]] = {}
    for number, plan in enumerate(plans):
        for step in plan.steps:
            slices_of.setdefault(step, []).append(number)
    joined = {}
    for step, numbers in slices_of.items():
        if len(numbers) > 1:
            open_rows = [(number, row) for number in numbers for row in _open_rows(plans[number], step, job)]
            rows = _merge(plans, open_rows, job)
            if rows:
                joined[numbers[0]] = rows
    return joined


def _open_rows(plan: SlicePlan, step: int | None, job: PackJob) -> list[int]:
    own = np.flatnonzero(plan.row_step == plan.steps.index(step))
    own = own[plan.sizes.tokens[own] < _OPEN_FILL * job.limits.capacity]
    # Tokens [9, 2, 5] of the rows [4, 6, 7], two of them -> rows [6, 7].
    rows: list[int] = sorted(own[np.argsort(plan.sizes.tokens[own], kind="stable")[:_OPEN_ROWS]].tolist())
    return rows


def _merge(plans: Sequence[SlicePlan], open_rows: list[tuple[int, int]], job: PackJob) -> list[_JoinedRow]:
    """Merge open rows by their sizes; return the rows that consist of several."""
    if not open_rows:
        return []
    alone = [(open_row,) for open_row in open_rows]
    row_of = merge_rows(_sizes_of_joins(plans, alone), np.zeros(len(open_rows), np.int64), job.limits).tolist()
    rows: dict[int, list[tuple[int, int]]] = {}
    for open_row, row in zip(open_rows, row_of, strict=True):
        rows.setdefault(row, []).append(open_row)
    return [tuple(row) for row in rows.values() if len(row) > 1]


def _sizes_of_joins(plans: Sequence[SlicePlan], rows: Sequence[_JoinedRow]) -> RowSizes:
    """Return the sizes of rows that consist of open rows, which share no token with each other."""
    return RowSizes(
        *(
            np.array([sum(getattr(plans[i].sizes, name)[row] for i, row in join) for join in rows], np.int64)
            for name in ("tokens", "pairs", "terms")
        )
    )
