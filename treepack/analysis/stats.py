"""Statistics of raw rollouts, a trie or a packed directory: `treepack stats` as a function.

    paths --stats--> one dictionary, ready for JSON: totals, distributions, lost sharing, predictions, forecast

`treepack stats --help` describes the command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from treepack.analysis.capacities import predicted_totals
from treepack.analysis.check import check_trie_totals, checked_totals
from treepack.analysis.describe import Report, describe_rows, describe_trie
from treepack.analysis.forecast import RowCounter
from treepack.analysis.lost_sharing import explain_sharing
from treepack.analysis.needed_memory import CHECKING, DESCRIBING, refuse_too_large
from treepack.analysis.options import StatsOptions
from treepack.analysis.origin import local_paths, manifest_of, read_packed_origin, refuse_reading
from treepack.analysis.summary import conversation_entries
from treepack.analysis.trie_forecast import ForecastTarget, forecast_packed, forecast_trie, read_target
from treepack.analysis.verdict import baseline_notes
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest
from treepack.files.parts import refuse_links
from treepack.files.remote.address import Paths
from treepack.files.remote.cache import naming_addresses
from treepack.ingest.conversation_counts import conversations_of_log, conversations_of_manifest
from treepack.ingest.read_log import PREFIX
from treepack.ingest.readers.tool_files import with_tools_of
from treepack.ingest.readers.unread_programs import ToolSchemasError
from treepack.pack.check import checked_rows
from treepack.pack.files import read_rows
from treepack.processes import Progress, ReportProgress, with_progress
from treepack.tokenise.saved_template import recorded_tokenizer
from treepack.tokenise.tokenization import read_tokenizer
from treepack.trie.directory import read_to_trie, skipped_record
from treepack.trie.store.trie_files import read_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie


@naming_addresses()
def stats(
    paths: Paths,
    options: StatsOptions = StatsOptions(),  # noqa: B008 (immutable)
    *,
    memory: int | None = None,
    contrast: Callable[[Trie], Report] | None = None,
    progress: ReportProgress | None = None,
) -> Report:
    """Return how much rollouts share, how much of it a packing keeps, and the forecast of the speed-up.

    Args:
        paths: a trie directory, a packed directory, an output of `treepack prepare`, or raw rollouts as for
            `build_trie_directory`.
        options: what to add, and how raw rollouts are read.
        memory: bytes to use, None for `usual_memory`; tokens and columns that need more are mapped from temporary
            files. The result does not depend on it.
        contrast: returns more entries about a trie, as `research.contrast` does.
        progress: called with the tokens or rows read so far.

    Raises:
        TreepackError: bad input, an option that does not suit it, a fault that the check found, or a trie whose nodes
            and trajectories do not fit into `memory`.
    """
    target = read_target(options.model, options.device, ranks=options.pack.balance)
    paths = local_paths(paths)
    directory, manifest = Path(paths[0]), manifest_of(paths)
    if manifest:
        # With a trie, a tokenizer distinguishes the causes of lost sharing.
        refuse_reading(directory, options.build, used=["tokenizer"] if manifest["format"] == schema.TRIE_FORMAT else [])
    if manifest and options.check:
        refuse_links(directory, manifest)
    if manifest and manifest["format"] == schema.PACKED_FORMAT:
        if contrast is not None and not options.capacities:
            raise TreepackError(
                f"{directory}: is packed already; give --effective-ratio and --predictions with its trie"
            )
        return _packed_stats(directory, manifest, options, target, memory, progress)
    if manifest:
        trie, counts, kind = read_trie(directory, memory=memory), manifest["counts"], "trie"
        skipped, conversations = manifest.get("skipped"), conversations_of_manifest(manifest)
        control = manifest.get("control_tokens")
    else:
        trie, log = read_to_trie(paths, replace(options.build, shapes=True), memory=memory, progress=progress)
        counts, kind = dict(sorted(log.counts.items())), "trajectories"
        skipped, conversations = skipped_record(log, trie), conversations_of_log(log, trie_totals(trie))
        control = log.control_record()
    refuse_too_large(trie, DESCRIBING, memory=memory)
    contrasted = {} if contrast is None else contrast(trie)  # its refusals come before the forecast, which may be long
    report = describe_trie(trie, kind=kind) | {"counts": counts} | ({"skipped": skipped} if skipped else {})
    report |= {"control_tokens": control} if control else {}
    report |= conversation_entries(conversations, report)
    if options.check:
        report["checked"] = check_trie_totals(trie, manifest)
    report["forecast"], planned = forecast_trie(
        trie,
        target,
        conversations=conversations,
        totals=report,
        capacities=options.capacities,
        options=options.pack,
        progress=progress,
    )
    if options.capacities:
        report["predicted"] = predicted_totals(planned)
    report |= contrasted
    if progress is not None:
        progress(Progress("explaining lost sharing", 0, None, ""))
    report["sharing"] = _sharing(trie, manifest, directory, options.build.tokenizer)
    if not manifest and PREFIX + ToolSchemasError.reason in counts and (build := with_tools_of(paths, options.build)):
        others = stats(paths, replace(options, build=build, check=False), memory=memory, progress=progress)
        report["tools"] = {"file": build.tools, "gain": others["forecast"]["gain"]}
    return report


def _packed_stats(
    directory: Path,
    manifest: Manifest,
    options: StatsOptions,
    target: ForecastTarget,
    memory: int | None,
    progress: ReportProgress | None,
) -> Report:
    """Return the report on a packed directory."""
    if options.capacities:
        raise TreepackError(f"{directory}: is packed already; give --capacity with its trie")
    totals, counter = manifest["totals"], RowCounter()
    read = with_progress(read_rows(directory), progress, "reading", unit="rows", total=totals["num_rows"])
    trie = read_packed_origin(directory, manifest, options.trie, memory=memory) if options.check else None
    if trie is not None:
        refuse_too_large(trie, CHECKING, memory=memory)
    checked = checked_rows(read, manifest, trie) if options.check else read
    distributions = describe_rows(counter.over(checked))
    report: Report = {
        "kind": "packed",
        **totals,
        "options": manifest["options"],
        "counts": manifest["counts"],
        **distributions,
        **conversation_entries(conversations_of_manifest(manifest), totals),
    }
    entries = {"skipped": manifest.get("skipped"), "control_tokens": manifest.get("control_tokens")}
    report |= {name: entry for name, entry in entries.items() if entry}
    if options.check:
        report["checked"] = checked_totals(manifest, against_trie=trie is not None)
    notes = baseline_notes(conversations_of_manifest(manifest), totals)
    forecast = forecast_packed(counter.lines(manifest), counter.rows(manifest["capacity"]), target, notes)
    return report | {"forecast": forecast}


def _sharing(trie: Trie, manifest: Manifest | None, directory: Path, tokenizer: str | None) -> dict[str, Any]:
    """Explain why tokens are stored; a tokenizer distinguishes the causes of lost sharing, if there is one."""
    name = tokenizer or (recorded_tokenizer(manifest, directory) if manifest else None)

    def decode(windows: list[list[int]]) -> list[str]:
        loaded = read_tokenizer(str(name), download=bool(tokenizer))
        texts: list[str] = loaded.backend_tokenizer.decode_batch(windows, skip_special_tokens=False)
        return texts

    if name:
        try:
            return explain_sharing(trie, decode)
        except TreepackError:
            # The tokenizer of the manifest may be gone since; one that the user named must load.
            if tokenizer:
                raise
    return explain_sharing(trie)
