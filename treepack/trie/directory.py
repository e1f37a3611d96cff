"""Raw rollouts to a trie directory: `treepack build-trie` as a function.

    inputs --read_columns--> batches --build_large_trie--> Trie --write_trie--> out/

The directory appears when it is complete. Memory is bounded: see `out_of_core`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treepack.columns import Sequences
from treepack.files.address import AnyPath, as_output
from treepack.files.cache import naming_addresses
from treepack.files.directory import finished_directory, refuse_existing
from treepack.files.manifest import Manifest, Provenance
from treepack.ingest.conversations import conversations_of_log
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import ReadLog, refuse_nothing
from treepack.ingest.readers.inputs import InputHash
from treepack.ingest.stream import read_columns
from treepack.ingest.tokenization import fingerprint, read_tokenizer
from treepack.processes import ReportProgress, with_progress
from treepack.trie.files import write_trie
from treepack.trie.out_of_core import build_large_trie
from treepack.trie.totals import trie_totals
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
    inputs: Sequence[str | Path],
    out: str | AnyPath,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (immutable)
    *,
    overwrite: bool = False,
    progress: ReportProgress | None = None,
) -> TrieSummary:
    """Read rollouts and write their prefix tries to the directory `out`, which appears when it is complete.

    Args:
        inputs: files, folders, globs, or "-" for standard input; addresses too.
        out: the directory to write, or an address.
        options: how to read, tokenise and share.
        overwrite: replace `out` if treepack wrote it.
        progress: called after each batch with the tokens read so far.

    Raises:
        TreepackError: bad input, no trajectory at all, text without a tokenizer, or `out` cannot be written.
    """
    out, names = as_output(out), [str(path) for path in inputs]
    refuse_existing(out, overwrite=overwrite, inputs=names)
    log, digest, start = ReadLog(), InputHash(), time.perf_counter()
    with finished_directory(out, overwrite=overwrite) as temporary:
        recorded = options.as_record()  # reads the file of tool schemas, so a bad one is refused before the rollouts
        tokenizer = read_tokenizer(options.tokenizer) if options.tokenizer else None
        batches = read_columns(names, options, log, tokenizer=tokenizer, input_hash=digest)
        built = build_large_trie(_reading(batches, log, digest, progress), share=options.share, folder=temporary)
        totals = trie_totals(built.trie)
        built.release()
        conversations = conversations_of_log(log, totals)
        provenance = Provenance(
            options=recorded,
            counts=dict(sorted(log.counts.items())),
            skipped=skipped_record(log, built.trie),
            control_tokens=log.control_record(),
            conversations=conversations.as_record() if conversations else None,
            totals=totals,
            tokenizer=fingerprint(tokenizer) if tokenizer else None,
            input={"sha256": digest.hexdigest(), "num_files": digest.num_files},
        )
        manifest = write_trie(built.trie, temporary, provenance, release=built.release)
    return TrieSummary(out, manifest, time.perf_counter() - start, log)


@naming_addresses()
def read_to_trie(
    inputs: Sequence[str | Path],
    options: BuildOptions = BuildOptions(),  # noqa: B008 (immutable)
    *,
    tokenizer: Any = None,
    progress: ReportProgress | None = None,
) -> tuple[Trie, ReadLog]:
    """Read rollouts into a trie without writing a directory; return it and the log of reading.

    `tokenizer` is the tokenizer of `options` if the caller has loaded it. A large trie is mapped from temporary files.

    Raises:
        TreepackError: bad input, no trajectory at all, or text without a tokenizer.
    """
    log, digest = ReadLog(), InputHash()
    batches = read_columns([str(path) for path in inputs], options, log, tokenizer=tokenizer, input_hash=digest)
    trie = build_large_trie(_reading(batches, log, digest, progress), share=options.share).trie
    return trie, log


def skipped_record(log: ReadLog, trie: Trie) -> dict[str, Any] | None:
    """Return the skipped rollouts of `log`, from which `trie` was built, as its manifest records them."""
    return log.skipped_record(trie.trajectories["group_id"].unique().to_pylist()) if log.num_skipped else None


def _reading(
    batches: Iterable[Sequences], log: ReadLog, digest: InputHash, progress: ReportProgress | None
) -> Iterable[Sequences]:
    return with_progress(
        refuse_nothing(batches, log.counts, log.skipped),
        progress,
        "reading",
        unit="tokens",
        size=lambda batch: len(batch.tokens),
        share=lambda: digest.bytes_read.share,
    )
