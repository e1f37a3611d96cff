"""Raw rollouts to a trie directory: `treepack build-trie` as a function.

    inputs --TrieBuilder.read--> trie in memory or on disk --TrieBuilder.write--> out/

The directory appears when it is complete. Memory is bounded: see `out_of_core`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from treepack.files.directory import finished_directory, refuse_existing
from treepack.files.input_files.inputs import InputHash
from treepack.files.manifest import Manifest, Provenance
from treepack.files.remote.address import AnyPath, Paths, as_output, path_names
from treepack.files.remote.cache import naming_addresses
from treepack.ingest.conversation_counts import conversations_of_log
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import ReadLog
from treepack.ingest.stream import parts_and_job
from treepack.processes import ReportProgress
from treepack.tokenise.saved_template import template_entry
from treepack.tokenise.tokenization import fingerprint, read_tokenizer
from treepack.trie.builders.builder import TrieBuilder
from treepack.trie.builders.earlier_tries import earlier_tries, entry_of, reading_entry
from treepack.trie.builders.merged import MergedRuns
from treepack.trie.totals import COLUMNS, totals_of, trie_totals
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class TrieSummary:
    """A trie directory that was written: its path and manifest, the seconds that it took, and the log of reading."""

    path: AnyPath
    manifest: Manifest
    seconds: float
    log: ReadLog

    @property
    def totals(self) -> dict[str, Any]:
        """Trajectories, groups, trees, nodes, `tokens_flat`, `tokens_tree`, `tokens_trained` and `por`."""
        return self.manifest["totals"]

    @property
    def counts(self) -> dict[str, int]:
        """Number of rollouts per reason for skipping them, and of notes about them."""
        return self.manifest["counts"]

    @property
    def num_files(self) -> int:
        """Input files that were read to their end."""
        return self.manifest["input"]["num_files"]


@naming_addresses()
def build_trie_directory(
    inputs: Paths,
    out: str | AnyPath,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (immutable)
    *,
    overwrite: bool = False,
    memory: int | None = None,
    progress: ReportProgress | None = None,
) -> TrieSummary:
    """Read rollouts and write their prefix tries to the directory `out`, which appears when it is complete.

    Args:
        inputs: a file, a folder, a glob or an address, or several of them; "-" is standard input. A trie directory
            that this function wrote counts as its rollouts.
        out: the directory to write, or an address.
        options: how to read, tokenise and share.
        overwrite: replace `out` if treepack wrote it.
        memory: bytes to use, None for `usual_memory`; larger input is sorted in files without a name in the folder of
            `out`. The result does not depend on it.
        progress: called after each batch with the tokens read so far.

    Raises:
        TreepackError: bad input, no trajectory at all, text without a tokenizer, or `out` cannot be written; or as
            `earlier_tries`.
    """
    out, names = as_output(out), path_names(inputs)
    refuse_existing(out, overwrite=overwrite, inputs=names)
    log, digest, start = ReadLog(), InputHash(), time.perf_counter()
    with finished_directory(out, overwrite=overwrite) as temporary:
        recorded = options.as_record()  # reads the file of tool schemas, so a bad one is refused before the rollouts
        tokenizer = read_tokenizer(options.tokenizer) if options.tokenizer else None
        tries = earlier_tries(names, options, tokenizer)
        parts, job = parts_and_job(
            names, options, tokenizer, digest, as_ranges=options.workers > 1, is_whole=tries.__contains__
        )
        with TrieBuilder(
            parts, job, options, input_hash=digest, folder=temporary, memory=memory, tries=tries
        ) as builder:
            trie = builder.read(log, progress)
            provenance = provenance_of(builder, trie, log, digest, options, tokenizer, tries)
            manifest = builder.write(trie, temporary, replace(provenance, options=recorded))
    return TrieSummary(out, manifest, time.perf_counter() - start, log)


def provenance_of(
    builder: TrieBuilder,
    trie: Trie | MergedRuns,
    log: ReadLog,
    digest: InputHash,
    options: BuildOptions,
    tokenizer: Any,
    tries: Mapping[str, Manifest],
) -> Provenance:
    """Return the entries of the manifest of `trie`, which `builder` has built of rollouts with this `log`.

    `digest` are the input files, and `tries` the tries among the inputs. The options are not recorded yet.
    """
    totals = built_totals(trie)
    conversations, template = conversations_of_log(log, totals), entry_of(tries, "chat_template")
    if options.template_file() or (tokenizer and conversations):
        template = template_entry(tokenizer, options.template_file())
    return Provenance(
        counts=dict(sorted(log.counts.items())),
        skipped=skipped_record(log, trie),
        control_tokens=log.control_record(),
        conversations=conversations.as_record() if conversations else None,
        totals=totals,
        routes=None if (costs := builder.route_costs) is None else costs.as_record(options.route_conflicts),
        tokenizer=fingerprint(tokenizer) if tokenizer else entry_of(tries, "tokenizer"),
        chat_template=template,
        input={"sha256": digest.hexdigest(), "num_files": digest.num_files},
        reading=None if options.keep_routes else reading_entry(log, digest),
    )


@naming_addresses()
def read_to_trie(
    inputs: Paths,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (immutable)
    *,
    tokenizer: Any = None,
    memory: int | None = None,
    progress: ReportProgress | None = None,
) -> tuple[Trie, ReadLog]:
    """Read rollouts into a trie without writing a directory; return it and the log of reading.

    `tokenizer` is the tokenizer of `options` if the caller has loaded it. A trie that is large for `memory`, in bytes
    and None for `usual_memory`, is mapped from temporary files.

    Raises:
        TreepackError: bad input, no trajectory at all, or text without a tokenizer.
    """
    log, digest = ReadLog(), InputHash()
    parts, job = parts_and_job(path_names(inputs), options, tokenizer, digest, as_ranges=options.workers > 1)
    with TrieBuilder(parts, job, options, input_hash=digest, memory=memory) as builder:
        trie = builder.mapped(builder.read(log, progress))
    return trie, log


def skipped_record(log: ReadLog, trie: Trie | MergedRuns) -> dict[str, Any] | None:
    """Return the skipped rollouts of `log`, from which `trie` was built, as its manifest records them."""
    if not log.num_skipped:
        return None
    trajectories = trie.trajectories if isinstance(trie, Trie) else trie.columns(["group_id"])
    return log.skipped_record(trajectories["group_id"].unique().to_pylist())


def built_totals(trie: Trie | MergedRuns) -> dict[str, Any]:
    """Return the totals of a trie that was built, as `trie_totals`."""
    if isinstance(trie, Trie):
        return trie_totals(trie)
    return totals_of(
        trie.columns(COLUMNS),
        num_trees=int((trie.nodes.parent < 0).sum()),
        num_nodes=len(trie.nodes.parent),
        tokens_flat=int(trie.lengths.sum()),
        tokens_tree=int(trie.begins[-1]),
    )
