"""`treepack pack` on many machines, or in one process with little memory: slice after slice of the trie.

    this process                                     tasks
    cuts the trie by footers     --slice-->          plan_slice      rows of the slice      sums, sizes of its rows
    joins open rows by sizes     --places of rows--> write_slice     parts of the output    open rows stay there
                                 --their places-->   write_joined    parts of the output
    manifest

Rows never cross slices, except open rows: the emptiest rows of a training step that several slices share. A slice that
begins inside a tree repeats the tokens of the chain above its first node; they are counted as `repeated_tokens`. Tokens
never come to this process. It needs about 40 bytes for each row and 100 for each group.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treepack.cluster.scheduler import LocalScheduler, Scheduler, TableHandle
from treepack.cluster.slice_layout import SliceLayout, make_layout
from treepack.cluster.slice_plan import PackJob, SlicePlan, plan_slice
from treepack.cluster.slice_rows import SliceRows, write_joined, write_slice
from treepack.cluster.trie_slices import trie_slices
from treepack.files import schema
from treepack.files.directory import MANIFEST, finished_directory, refuse_existing
from treepack.files.input_files.inputs import displayed
from treepack.files.manifest import PACKED_FROM_TRIE, Provenance, read_manifest
from treepack.files.manifest_entries import TrieEntry
from treepack.files.prepared import RATED_TRIE, prepared_part
from treepack.files.remote.address import AnyPath, as_output, as_path
from treepack.files.remote.cache import addresses_in, naming_addresses
from treepack.files.remote.location import DirectoryLocation, locate
from treepack.files.task_output import TaskOutput, check_visible
from treepack.pack.capacity import no_trajectory_fits, usual_capacities_of
from treepack.pack.directory import PackSummary
from treepack.pack.files import write_packed_manifest
from treepack.pack.options import PackOptions
from treepack.pack.plan.planning import refuse_excesses
from treepack.pack.plan.problem import RowLimits
from treepack.pack.totals import totals_of_rows
from treepack.processes import ReportProgress, with_progress
from treepack.trie.store.row_groups import TrieFooters, read_footers

# Tokens of a slice: a task needs about 1 GB for them with their columns, and its rows are so many that a slice costs
# less than one of them.
_SLICE_TOKENS = 1 << 26


@naming_addresses()
def pack_trie_on(
    scheduler: Scheduler,
    trie: str | AnyPath,
    out: str | AnyPath,
    options: PackOptions = PackOptions(),  # noqa: B008 (immutable)
    *,
    num_slices: int | None = None,
    overwrite: bool = False,
    progress: ReportProgress | None = None,
) -> PackSummary:
    """Pack a trie directory into rows by the tasks of `scheduler`, and write them to the directory `out`.

    With one slice, the directory is that of `pack_trie`. With several, the rows differ: with `options.balance`, each
    slice has a multiple of so many rows of each of its steps. Loss weights and terms do not depend on the slices.

    Args:
        scheduler: the program that runs the tasks; `LocalScheduler()` runs them in this process, one after the other.
        trie: a trie directory, an output of `treepack prepare`, or the address of a trie; all machines must see it.
        out: the directory to write, or an address; all machines must see it.
        options: limits, planning and loss weights.
        num_slices: number of slices; None for slices of `_SLICE_TOKENS` tokens. A trie may have fewer places for cuts.
        overwrite: replace `out` if treepack wrote it.
        progress: called with the slices planned and written so far.

    Raises:
        TreepackError: as `pack_trie`; or groups that the options need whole, in a trie whose trees mix groups.
    """
    trie, out = prepared_part(as_path(trie), RATED_TRIE), as_output(out)
    refuse_existing(out, overwrite=overwrite, inputs=[trie])
    shared_trie = trie.resolve() if isinstance(trie, Path) else trie
    location = locate(shared_trie)
    source = read_manifest(location, schema.TRIE_FORMAT)
    with finished_directory(out, overwrite=overwrite) as temporary:
        footers = read_footers(location)
        limits, is_fitted = _limits(options, footers)
        slices = trie_slices(
            shared_trie,
            -(-footers.num_tokens // _SLICE_TOKENS) if num_slices is None else num_slices,
            whole_trees=is_fitted,
            whole_groups=options.method == "groups" or options.leaf_weights,
            footers=footers,
        )
        # Processes inside the tasks of other schedulers would use more cores than it has given to the task.
        of_task = options if isinstance(scheduler, LocalScheduler) else replace(options, workers=1)
        job = PackJob(shared_trie, of_task, limits, None if is_fitted else footers.known, len(slices))
        shared = scheduler.share(job)

        def keep(stage: str, function: Any, calls: Sequence[Any]) -> list[tuple[TableHandle, Any]]:
            results = scheduler.keep(function, calls)
            return [*with_progress(results, progress, stage, unit="slices", total=len(calls))]

        planned = keep("planning", plan_slice, [(shared, part) for part in slices])
        plans: list[SlicePlan] = [plan for _, plan in planned]
        refuse_excesses((excess for plan in plans for excess in plan.excesses), limits)
        if not any(plan.num_rows for plan in plans):
            raise no_trajectory_fits(limits.longest)
        layout, output = make_layout(slices, plans, job), TaskOutput.of(temporary)
        written = keep(
            "packing",
            write_slice,
            [
                (shared, part, table, facts, output)
                for part, (table, _), facts in zip(slices, planned, layout.facts, strict=True)
            ],
        )
        results = _with_joined(scheduler, written, layout, output)
        check_visible(temporary, [entry for rows, _ in results for entry in rows.entries])
        counts: Counter[str] = Counter()
        for plan in plans:
            counts.update(plan.counts)
        provenance = replace(
            Provenance.of(source, PACKED_FROM_TRIE),
            options=options.as_record() | ({"partitions": len(slices)} if len(slices) > 1 else {}),
            counts=dict(sorted(counts.items())),
            totals=_totals(plans, layout, job) | {"tiles_partial_unordered": sum(tiles for _, tiles in results)},
            trie=_trie_entry(location, trie),
        )
        manifest = write_packed_manifest(
            temporary, [rows for rows, _ in results], capacity=limits.capacity, provenance=provenance
        )
    return PackSummary(out, manifest)


def _limits(options: PackOptions, footers: TrieFooters) -> tuple[RowLimits, bool]:
    """Return the limits of the rows, and True if trajectories may be cut or left out."""
    capacity = options.capacity or usual_capacities_of(footers.longest)[0]
    limits = RowLimits(capacity, options.pairs_budget, options.terms_budget)
    return limits, options.leaf_weights or (options.too_long != "error" and footers.longest > limits.longest)


def _with_joined(
    scheduler: Scheduler, written: Sequence[tuple[TableHandle, SliceRows]], layout: SliceLayout, output: TaskOutput
) -> list[SliceRows]:
    """Write the joined rows, from the open rows in the tables of `written`; return all rows in their order."""
    calls = [(join.rows, join.facts, output, *(written[number][0] for number in join.slices)) for join in layout.joins]
    rows = scheduler.run(write_joined, calls)
    joined = {join.after: each for join, each in zip(layout.joins, rows, strict=True)}
    in_order = []
    for number, (_, each) in enumerate(written):
        in_order += [each, joined[number]] if number in joined else [each]
    return in_order


def _totals(plans: Sequence[SlicePlan], layout: SliceLayout, job: PackJob) -> dict[str, Any]:
    """Return the totals of the trie and of its rows, and the tokens that cuts repeat if there are several slices."""
    sums: Counter[str] = Counter()
    for plan in plans:
        sums.update(plan.sums)
    lower_bound, repeated = max(sums.pop("lower_bound"), sums["tokens_tree"]), sums.pop("repeated_tokens")
    rows = totals_of_rows(
        layout.rows,
        capacity=job.limits.capacity,
        multiple_of=job.options.balance,
        token_pairs=job.options.token_pairs,
        lower_bound=lower_bound,
        tokens_flat=sums["tokens_flat"],
    )
    of_trie = {**sums, "num_groups": layout.num_groups, "por": 1 - sums["tokens_tree"] / sums["tokens_flat"]}
    return of_trie | rows | ({"repeated_tokens": repeated} if len(plans) > 1 else {})


def _trie_entry(location: DirectoryLocation, trie: AnyPath) -> TrieEntry:
    """Return the entry of a trie that need not be on this machine, as `trie_entry`."""
    content = location.read(MANIFEST)
    assert content is not None
    return {"path": addresses_in(displayed(str(trie))), "sha256": hashlib.sha256(content).hexdigest()}
