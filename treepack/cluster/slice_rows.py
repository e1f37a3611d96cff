"""The later stages of packing by slices: write the rows of a slice, and rows that join open rows of several slices.

TrieSlice, its plan --write_slice--> parts of the output     kept: open rows, whose rest is in other slices
open rows of several slices --write_joined--> parts of the output
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.cluster.slice_plan import PackJob, fitted_slice, group_numbers, shared_nodes
from treepack.cluster.trie_slices import TrieSlice
from treepack.files.task_output import TaskOutput
from treepack.pack.child_order import tile_counts
from treepack.pack.files import WrittenRows, row_of_table, write_rows
from treepack.pack.placement import RowPlacer, unordered_tiles_of_row
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import packed_trie
from treepack.pack.row import Row, concatenate_rows
from treepack.pack.row_group import RowGroup, packed_columns
from treepack.pack.rows import pack_rows
from treepack.pack.weights import WholeTrie, times_trained
from treepack.trajectory import Float64, Int32, Int64
from treepack.trie.trie import Trie

_UNORDERED = "unordered_end"
"""Column of open rows: `subtree_end` of each token if children keep the order of the trie, to count unordered tiles."""

_SLICE = 1 << 32  # an open row has the `row_id` slice * _SLICE + row of the slice


@dataclass(frozen=True)
class SliceFacts:
    """Facts about all slices that one of them needs to write its rows.

    Attributes:
        known: columns of the trajectories that have a value in any slice.
        groups: `step`, `group_id` and `weight` of each group of the slice, summed over all slices; only for normalize
            "group".
        times_trained: as `SlicePlan.times_trained`, summed over all slices.
        first_row: number of rows before the slice.
        first_part: number of parts before the slice.
        open_rows: rows of the slice, ascending, that are joined with rows of other slices.
    """

    known: frozenset[str]
    groups: pa.Table | None
    times_trained: dict[int, Int32]
    first_row: int
    first_part: int
    open_rows: Int64


SliceRows = tuple[WrittenRows, int]
"""Rows that a task has written, and the partial tiles if their children kept the order of the trie."""


def write_slice(
    job: PackJob, part: TrieSlice, plan: pa.Table, facts: SliceFacts, output: TaskOutput
) -> tuple[pa.Table, SliceRows]:
    """Write the rows of a slice, except its open rows, which are returned as a table of packed rows.

    `plan` is the table that `plan_slice` returned.

    Raises:
        TreepackError: the slice cannot be read, or the output cannot be written.
    """
    columns = packed_columns(facts.known)
    open_group, unordered_ends = RowGroup(columns), list[Int32]()
    trie, _ = fitted_slice(job, part, tokens=True)
    rows: Iterator[Row] = iter(())
    tiles = 0
    if trie is not None:
        row_of = plan["row"].to_numpy()
        whole = WholeTrie(facts.known, _group_weights(trie, facts), _all_times_trained(trie, part, job, facts))
        nodes = packed_trie(trie, job.options.method)
        row_plan = Plan(job.options.method, job.limits, row_of)
        options = job.options
        rows = pack_rows(nodes, row_plan, semantics=options.semantics, normalize=options.normalize, whole=whole)
        placer, members = RowPlacer(nodes), row_plan.members()
        is_open = np.isin(np.arange(row_plan.num_rows), facts.open_rows)
        for row, own in enumerate(members):
            offsets, stops = placer.unordered_row(nodes, own)
            if is_open[row]:
                unordered_ends.append(np.repeat(stops, np.diff(offsets)).astype(np.int32))
            else:
                tiles += unordered_tiles_of_row(offsets, stops)

    def complete_rows() -> Iterator[Row]:
        for row in rows:
            if is_open[row.row_id]:
                open_group.append(replace(row, row_id=part.number * _SLICE + row.row_id))
            else:
                yield row

    written = write_rows(complete_rows(), output, columns, first_row=facts.first_row, first_part=facts.first_part)
    ends = pa.array(unordered_ends, pa.list_(pa.int32()))
    return open_group.table().append_column(_UNORDERED, ends), (written, tiles)


def _group_weights(trie: Trie, facts: SliceFacts) -> Float64 | None:
    """Return the weight of the group of each trajectory."""
    if facts.groups is None:
        return None
    numbers, own = group_numbers([facts.groups, trie.trajectories])
    # Numbers of the groups [2, 0, 1], weights [5., 6., 7.] -> by number [6., 7., 5.].
    by_number = np.zeros(len(numbers))
    by_number[numbers] = facts.groups["weight"].to_numpy()
    return by_number[own]


def _all_times_trained(trie: Trie, part: TrieSlice, job: PackJob, facts: SliceFacts) -> Int32 | None:
    """Return how many trajectories of all slices train each token of the slice."""
    if job.options.semantics != "once":
        return None
    counts = times_trained(trie)
    if facts.times_trained:
        for node, i in shared_nodes(part):
            counts[trie.node_start[i] : trie.node_start[i + 1]] = facts.times_trained[node]
    return counts


def write_joined(
    joins: Sequence[Sequence[tuple[int, int]]], facts: SliceFacts, output: TaskOutput, *tables: pa.Table
) -> SliceRows:
    """Write rows that join open rows. `joins` are (slice, row of the slice) of each, all of them in `tables`.

    Raises:
        TreepackError: the output cannot be written.
    """
    table = pa.concat_tables(tables)
    place = {divmod(row_id, _SLICE): i for i, row_id in enumerate(table["row_id"].to_pylist())}
    tiles = 0
    for open_rows in joins:
        ends: list[Any] = [table[_UNORDERED][place[each]].values.to_numpy() for each in open_rows]
        starts = np.cumsum([0, *(len(each) for each in ends[:-1])]).tolist()
        tiles += tile_counts(np.concatenate([each + start for each, start in zip(ends, starts, strict=True)]))[0]
    rows = (concatenate_rows([row_of_table(table, place[each]) for each in open_rows]) for open_rows in joins)
    columns = packed_columns(facts.known)
    written = write_rows(rows, output, columns, first_row=facts.first_row, first_part=facts.first_part)
    return written, tiles
