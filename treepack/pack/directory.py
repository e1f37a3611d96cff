"""A trie directory to a packed directory: `treepack pack` as a function.

    trie/ --read_trie--> Trie --plan_packing--> Packing --write_packed--> out/

The directory appears when it is complete.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import finished_directory, finished_file, is_inside, refuse_existing
from treepack.files.input_files.inputs import displayed
from treepack.files.manifest import PACKED_FROM_TRIE, Manifest, Provenance, read_manifest, trie_entry
from treepack.files.prepared import RATED_TRIE, prepared_part
from treepack.files.remote.address import AnyPath, as_output, as_path
from treepack.files.remote.cache import local_copy, naming_addresses
from treepack.pack.files import write_packed
from treepack.pack.options import PackOptions
from treepack.pack.packing import Packing, plan_packing, refuse_too_many
from treepack.pack.plan.files import PlanFile, read_plan_file
from treepack.pack.plan.planning import plan_lines
from treepack.processes import ReportProgress, with_progress
from treepack.trie.store.trie_files import read_trie


@dataclass(frozen=True, slots=True)
class PackSummary:
    """A packed directory that was written: its path and its manifest."""

    path: AnyPath
    manifest: Manifest

    @property
    def totals(self) -> dict[str, Any]:
        """`num_rows`, `tokens_packed`, `err`, `fill`, `gap` and more; docs/format.md lists them."""
        return self.manifest["totals"]

    @property
    def counts(self) -> dict[str, int]:
        """Trajectories that were dropped or truncated because they are longer than the capacity."""
        return self.manifest["counts"]


@naming_addresses()
def pack_trie(
    trie: str | AnyPath,
    out: str | AnyPath,
    options: PackOptions = PackOptions(),  # noqa: B008 (immutable)
    *,
    plan: str | AnyPath | None = None,
    save_plan: str | AnyPath | None = None,
    overwrite: bool = False,
    memory: int | None = None,
    progress: ReportProgress | None = None,
) -> PackSummary:
    """Pack a trie directory into rows and write them to the directory `out`, which appears when it is complete.

    Args:
        trie: a trie directory, an output of `treepack prepare`, or the address of a trie.
        out: the directory to write, or an address.
        options: limits, planning and loss weights; without `capacity`, see `PackOptions`.
        plan: take the rows and their limits from this file instead of planning; docs/format.md describes it.
        save_plan: also write the plan to this file, as `plan` reads it.
        overwrite: replace `out` and `save_plan` if treepack wrote them.
        memory: bytes to use, None for `usual_memory`; larger arrays are in files without a name in the folder of `out`.
            The result does not depend on it.
        progress: called with the trees planned and then the rows written so far.

    Raises:
        TreepackError: a trajectory that is too long, a plan that does not suit, nodes and trajectories that do not fit
            into `memory`, or an output that cannot be written.
    """
    trie, out = prepared_part(as_path(trie), RATED_TRIE), as_output(out)
    save_path = None if save_plan is None else as_output(save_plan, option="--save-plan")
    inputs = [trie, plan]
    refuse_existing(out, overwrite=overwrite, inputs=inputs)
    if save_path is not None:
        if is_inside(save_path, out):
            raise TreepackError(f"{save_path} is or lies inside the output {out}; choose another --save-plan")
        refuse_existing(save_path, overwrite=overwrite, inputs=inputs, is_own_file=_is_plan, option="--save-plan")
    plan_file = None if plan is None else read_plan_file(as_path(plan))
    if plan_file is not None:
        options.check_method(plan_file.method)  # before the trie is read
    trie = local_copy(trie)
    source = read_manifest(trie, schema.TRIE_FORMAT)
    entry = trie_entry(trie, displayed(str(trie)))
    if plan_file and plan_file.trie not in (None, entry["sha256"]):
        raise TreepackError(f"{plan}: was made for another trie than {trie}; pass that trie, or leave out --plan")
    with ExitStack() as stack:
        saved = None
        if save_path is not None:
            saved = stack.enter_context(finished_file(save_path, overwrite=overwrite, option="--save-plan"))
        # Before the plan, which may take minutes: its lock refuses a second command for the same `out`.
        temporary = stack.enter_context(finished_directory(out, overwrite=overwrite))
        totals = source["totals"]  # of a trie by another program, they may be missing; then it is read first
        refuse_too_many(totals.get("num_nodes", 0), totals.get("num_trajectories", 0), memory=memory)
        read = read_trie(trie, memory=memory, folder=temporary)
        packing = plan_packing(read, options, plan_file=plan_file, memory=memory, progress=progress)
        if saved is not None:
            with saved.open("w", encoding="utf-8", newline="\n") as file:
                lines = plan_lines(packing.trie, packing.plan, trie_sha256=entry["sha256"])
                file.writelines(line + "\n" for line in lines)
        provenance = replace(
            Provenance.of(source, PACKED_FROM_TRIE),
            options=_recorded(packing, plan_file),
            counts=packing.counts,
            totals=packing.totals,
            trie=entry,
        )
        rows = with_progress(packing, progress, "packing", unit="rows", total=len(packing))
        manifest = write_packed(rows, temporary, capacity=packing.plan.capacity, provenance=provenance)
    return PackSummary(out, manifest)


def _recorded(packing: Packing, plan_file: PlanFile | None) -> dict[str, Any]:
    """Return the options that the manifest records, without effort and time limit if the plan came from a file."""
    record, plan = packing.options.as_record(), packing.plan
    record |= {"method": plan.method, "balance": plan.multiple_of}
    record |= {"pairs_budget": plan.limits.pairs, "terms_budget": plan.limits.terms}
    if plan_file is not None:
        del record["effort"], record["time_limit"]
    return record


def _is_plan(path: Path) -> bool:
    try:
        read_plan_file(path)
    except TreepackError:
        return False
    return True
