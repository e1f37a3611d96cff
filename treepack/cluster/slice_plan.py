"""The first stage of packing by slices: plan the rows of one slice, and the facts for the other slices.

    TrieSlice --plan_slice--> row of each trajectory (stays in the task)      SlicePlan: sizes of rows, sums, groups

The structure of the slice is enough: its tokens are only read if trajectories are cut or left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.cluster.trie_slices import TrieSlice, read_slice
from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath
from treepack.pack.capacity import NO_TOKEN_WITHIN, TOO_LONG_DROPPED, fit_capacity
from treepack.pack.leaf_weights import weigh_leaves
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_within
from treepack.pack.plan.balance import steps_of
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.planning import ExcessTrajectories, bound_of_slice, excesses, packed_trie
from treepack.pack.plan.problem import RowLimits
from treepack.pack.plan.unions import RowSizes
from treepack.pack.weights import has_weights, times_trained, trained_weights
from treepack.sequences import SpanView, num_trained, text_codes
from treepack.trajectory import Int32, Int64
from treepack.trie.store.row_groups import OPTIONAL
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class PackJob:
    """Settings of all slices.

    Attributes:
        trie: the trie directory, as all machines see it.
        options: of packing; `options.workers` processes plan each slice.
        limits: of the rows.
        known: as `TrieFooters.known`; None if that is only known after the slices are fitted,
            because trajectories are too long or have the leaf weight 0.
        num_slices: number of slices.
    """

    trie: AnyPath
    options: PackOptions
    limits: RowLimits
    known: frozenset[str] | None
    num_slices: int


_GROUPS = pa.schema([("step", pa.int64()), ("group_id", pa.string()), ("weight", pa.float64())])


@dataclass(frozen=True)
class SlicePlan:
    """Facts about the plan of a slice that other slices and the manifest need.

    Attributes:
        counts: trajectories that were dropped, left out or truncated.
        excesses: trajectories that exceed a limit alone; if there are any, nothing is planned.
        sums: totals of the slice that add up over all slices; nodes and tokens without the chain.
        known: columns of its trajectories that have a value, and "weight" if any weight is not 1.
        groups: `step`, `group_id` and `weight` of each group of the slice; the weight is the sum of `trained_weights`.
        times_trained: how many trajectories of the slice train each token of a node that other slices have too, by the
            number of the node; only for semantics "once".
        steps: training steps of the rows, ascending, None first.
        row_step: place in `steps` of each row, int64 [num_rows], ascending.
        sizes: of each row.
    """

    counts: Counter[str] = field(default_factory=Counter)
    excesses: tuple[ExcessTrajectories, ...] = ()
    sums: Counter[str] = field(default_factory=Counter)
    known: frozenset[str] = frozenset()
    groups: pa.Table = field(default_factory=lambda: _GROUPS.empty_table())
    times_trained: dict[int, Int32] = field(default_factory=dict)
    steps: tuple[int | None, ...] = ()
    row_step: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    sizes: RowSizes = field(default_factory=lambda: RowSizes(*np.zeros((3, 0), np.int64)))

    @property
    def num_rows(self) -> int:
        return len(self.sizes.tokens)


def plan_slice(job: PackJob, part: TrieSlice) -> tuple[pa.Table, SlicePlan]:
    """Plan the rows of a slice. Return a table with the `row` of each trajectory, and the rest.

    Raises:
        TreepackError: the slice cannot be read, or does not suit the options.
    """
    trie, counts = fitted_slice(job, part, tokens=False)
    nothing = pa.table({"row": pa.array([], pa.int64())})
    if trie is None:
        return nothing, SlicePlan(counts=counts)
    too_long = excesses(trie, job.limits)
    if too_long:
        return nothing, SlicePlan(counts=counts, excesses=tuple(too_long))
    options = job.options
    _refuse_small_steps(trie, job)
    plan = plan_within(trie, job.limits, options)
    totals = check_plan(packed_trie(trie, plan.method), plan)
    num_chain = len(part.chain)
    sums = {
        "num_trajectories": trie.num_trajectories,
        "num_trees": trie.num_trees - (num_chain > 0),
        "num_nodes": trie.num_nodes - num_chain,
        "tokens_flat": trie.tokens_flat,
        "tokens_tree": trie.tokens_tree - part.repeated_tokens,
        "tokens_trained": num_trained(trie.trajectories),
        "lower_bound": bound_of_slice(trie, plan, num_chain),
        # Rows of the method sequence share no prefix, so a cut repeats none.
        "repeated_tokens": 0 if plan.method == "sequence" else part.repeated_tokens,
    }
    steps = _steps(trie)
    return pa.table({"row": plan.row_of}), SlicePlan(
        counts=counts,
        sums=Counter(sums),
        known=_known_columns(trie) if job.known is None else job.known,
        groups=_groups(trie),
        times_trained=_shared_counts(trie, part) if options.semantics == "once" else {},
        steps=steps,
        row_step=steps_of(plan.row_of, trie.step_rank, plan.num_rows),
        sizes=RowSizes(totals.row_tokens, totals.row_pairs, totals.row_terms),
    )


def _refuse_small_steps(trie: Trie, job: PackJob) -> None:
    counts = np.bincount(trie.step_rank)
    if job.num_slices > 1 and (counts < job.options.balance).any():
        raise TreepackError(
            f"a partition has {counts.min()} trajectories of a training step, too few for {job.options.balance} rows; "
            "give --balance a smaller number, or fewer --partitions"
        )


def fitted_slice(job: PackJob, part: TrieSlice, *, tokens: bool) -> tuple[Trie | None, Counter[str]]:
    """Return the trie of a slice as it is packed, None if no trajectory is left, and counts.

    Without `tokens`, they are -1 unless trajectories may be cut or left out.

    Raises:
        TreepackError: as `read_slice`, or the trie has no leaf weights that the options need.
    """
    options, longest = job.options, job.limits.longest
    if job.known is not None:
        return read_slice(job.trie, part, tokens=tokens), Counter()
    trie, counts = read_slice(job.trie, part), Counter[str]()
    if options.leaf_weights:
        trie, counts = weigh_leaves(trie, fallback_leaves=options.fallback_leaves)
    if options.too_long == "error":
        return trie, counts
    spans = SpanView.of(trie.trajectories)
    # Offsets of spans [0, 2, 3], starts [1, 9, 4] -> first trained tokens [1, 4].
    fits = trie.lengths <= longest
    if options.too_long == "truncate":
        fits |= spans.starts[spans.offsets[:-1]] < longest
    if not fits.any():
        reason = TOO_LONG_DROPPED if options.too_long == "drop" else NO_TOKEN_WITHIN
        return None, counts + Counter({reason: trie.num_trajectories})
    fitted, cut = fit_capacity(trie, longest, too_long=options.too_long)
    return fitted, counts + cut


def shared_nodes(part: TrieSlice) -> list[tuple[int, int]]:
    """Return the nodes of a slice that other slices have too, as (number in the trie, number in the slice)."""
    first, chain = part.nodes[0], part.chain
    # Chain [0, 3], nodes [4, 7), next chain [0, 5] -> (0, 0), (3, 1), (5, 3).
    own = [(node, node - first + len(chain)) for node in part.next_chain if node >= first]
    return [*((node, i) for i, node in enumerate(chain)), *own]


def _shared_counts(trie: Trie, part: TrieSlice) -> dict[int, Int32]:
    if not part.chain and not part.next_chain:
        return {}
    counts, start = times_trained(trie), trie.node_start
    return {node: counts[start[i] : start[i + 1]].copy() for node, i in shared_nodes(part)}


def _known_columns(trie: Trie) -> frozenset[str]:
    table = trie.trajectories
    names = (name for name in OPTIONAL if name in table.column_names)
    weight = ["weight"] if has_weights(table) else []
    return frozenset([*(name for name in names if table[name].null_count < table.num_rows), *weight])


def _steps(trie: Trie) -> tuple[int | None, ...]:
    steps = trie.trajectories["step"]
    known = sorted(steps.drop_null().unique().to_pylist())
    return (*([None] if steps.null_count else []), *known)


def _groups(trie: Trie) -> pa.Table:
    columns = trie.trajectories.select(["step", "group_id"])
    weighted = columns.append_column("weight", pa.array(trained_weights(trie)))
    sums = weighted.group_by(["step", "group_id"], use_threads=False).aggregate([("weight", "sum")])
    return sums.select(["step", "group_id", "weight_sum"]).rename_columns(_GROUPS.names).cast(_GROUPS)


def group_numbers(tables: list[pa.Table]) -> list[Int64]:
    """Return a number for each row of `tables`, equal for equal `step` and `group_id`; int64 [num_rows] each."""
    columns = pa.schema([_GROUPS.field("step"), _GROUPS.field("group_id")])
    both = pa.concat_tables([table.select(columns.names).cast(columns) for table in tables])
    steps: Any = both["step"].combine_chunks()
    # Steps [null, 0, 0], groups [a, a, b] -> columns (1, 0, 0), (0, 0, 0), (0, 0, 1) -> numbers [2, 0, 1].
    keys = np.stack(
        [
            steps.is_null().to_numpy(zero_copy_only=False).astype(np.int64),
            steps.fill_null(0).to_numpy(),
            text_codes(both["group_id"]),
        ]
    )
    numbers = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return np.split(numbers, np.cumsum([table.num_rows for table in tables])[:-1])
