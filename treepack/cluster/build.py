"""`treepack build-trie` on many machines: shares of the files as tasks of a scheduler, and one merge of their tries.

    this process                                     tasks
    lists the files, finds copies  --Share-->        build_share    its trie, beside the output
    finds copied answers           <--ShareRecord--
    merges the tries of all shares, in the order of the input
    out/

The result is that of one process, byte for byte, for any size of the shares. A command that starts again after its end,
at any point, finds the shares that are finished (`cluster.shares`), and removes them after the output is complete.

Memory of this process: 350 bytes for each trajectory, and 150 for each answer in sessions of agents. Disk: the output
and 4 bytes for each token of it, beside the shares.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import treepack
from treepack.cluster.scheduler import Call, Scheduler
from treepack.cluster.shares import FileState, Share, ShareJob, ShareRecord, build_share, cut_shares, state_of
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import MANIFEST, finished_directory, refuse_existing, shares_beside
from treepack.files.input_files.inputs import STDIN, InputHash
from treepack.files.manifest import Manifest, read_manifest
from treepack.files.remote import object_store
from treepack.files.remote.address import AnyPath, Paths, as_output, as_path, path_names
from treepack.files.remote.cache import naming_addresses
from treepack.files.remote.stored_files import is_stored, remove_folder
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import PREFIX, ReadLog, refuse_nothing
from treepack.ingest.readers.reading import ListedInputs, WholePart, listed_inputs
from treepack.ingest.stream import options_and_job
from treepack.processes import ReportProgress, with_progress
from treepack.tokenise.tokenization import fingerprint, read_tokenizer
from treepack.trie.builders.builder import TrieBuilder
from treepack.trie.builders.earlier_tries import earlier_tries, log_of
from treepack.trie.directory import TrieSummary, provenance_of

_SHARE_BYTES = 1 << 26  # of the input as stored: two minutes of tokenising
_MAX_SHARES = 1 << 10  # above, shares are larger; each costs the merge a little time for every trajectory
_THREADS = 16  # requests for the versions of objects, side by side


@naming_addresses()
def build_trie_on(
    scheduler: Scheduler,
    inputs: Paths,
    out: str | AnyPath,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (immutable)
    *,
    share_bytes: int | None = None,
    overwrite: bool = False,
    progress: ReportProgress | None = None,
) -> TrieSummary:
    """Read rollouts and write their prefix tries to the directory `out` by tasks of `scheduler`.

    Args:
        scheduler: runs the tasks; `LocalScheduler()` runs them in this process, one after the other.
        inputs: files, folders and globs that all machines see, addresses, or tries that `build-trie` wrote.
        out: the directory to write, on a disk that all machines share, or an address.
        options: how to read, tokenise and share; `workers` has no meaning here.
        share_bytes: stored bytes of the input for each task, at least one file; None for `_SHARE_BYTES`, and more if
            there would be more than `_MAX_SHARES` tasks. The result does not depend on it.
        overwrite: replace `out` if treepack wrote it.
        progress: called after each share with the tokens read so far, and then with the tokens merged.

    Raises:
        TreepackError: as `build_trie_directory`; standard input; or a file that another machine does not see.
    """
    if share_bytes is not None and share_bytes < 1:
        raise TreepackError(f"share_bytes is {share_bytes}; expected at least 1")
    if options.keep_routes:
        raise TreepackError("keep_routes builds the trie on one machine; build it without a cluster (--ray)")
    out, names = as_output(out), path_names(inputs)
    refuse_existing(out, overwrite=overwrite, inputs=names)
    options, start, log, digest = replace(options, workers=1), time.perf_counter(), ReadLog(), InputHash()
    with finished_directory(out, overwrite=overwrite) as temporary:
        recorded = options.as_record()
        tokenizer = read_tokenizer(options.tokenizer) if options.tokenizer else None
        tries = earlier_tries(names, options, tokenizer)
        how, work = options_and_job(options, tokenizer)
        with _share_folder(shares_beside(out)) as folder:
            job = ShareJob(how, work.by_name(), options, _key(options, recorded, tokenizer), folder)
            listed, states = _list(names, tries)
            for extra in listed.skipped:
                log.counts[PREFIX + extra.reason] += 1
            total = sum(state.size for state in states.values())
            sources = cut_shares(listed, states, share_bytes or max(_SHARE_BYTES, total // _MAX_SHARES))
            records = _build_all(scheduler, [each for each in sources if isinstance(each, Share)], job, progress)
            paths = _tries_of(sources, records, tries, folder, log, digest)
            manifests = tries | {path: _manifest_of(path) for path in paths if path not in tries}
            parts = map(WholePart, paths)
            with TrieBuilder(
                parts, work, options, input_hash=InputHash(), folder=temporary, tries=manifests
            ) as builder:
                trie = builder.read(ReadLog(), progress, stage="merging")
                log.count_renamed(builder.renamed)
                provenance = provenance_of(builder, trie, log, digest, options, tokenizer, tries)
                manifest = builder.write(trie, temporary, replace(provenance, options=recorded))
    remove_folder(folder)
    return TrieSummary(out, manifest, time.perf_counter() - start, log)


@contextmanager
def _share_folder(folder: AnyPath) -> Iterator[AnyPath]:
    """Yield the folder of the shares; after an error it stays, if a share is finished."""
    if isinstance(folder, Path):
        folder.mkdir(exist_ok=True)
    try:
        yield folder
    except BaseException:
        names = map(str, folder.glob("*.json")) if isinstance(folder, Path) else object_store.list_objects(folder)
        if not any(name.endswith(".json") and not name.endswith(MANIFEST) for name in names):
            remove_folder(folder)
        raise


def _key(options: BuildOptions, recorded: dict[str, Any], tokenizer: Any) -> str:
    """Return a hash of all that decides on the trie of a file."""
    settings = [treepack.__version__, asdict(options), recorded, tokenizer and fingerprint(tokenizer)["sha256"]]
    return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()


def _list(names: Sequence[str], tries: dict[str, Manifest]) -> tuple[ListedInputs, dict[str, FileState]]:
    """Return the files of the inputs, and the state of each.

    Raises:
        TreepackError: as `listed_inputs`; or standard input.
    """
    states: dict[str, FileState] = {}

    def sizes(paths: list[str]) -> Iterator[int]:
        if STDIN in paths:
            raise TreepackError("standard input cannot be read by other machines; write it to a file that they see")
        with ThreadPoolExecutor(_THREADS) as pool:
            states.update(zip(paths, pool.map(state_of, paths), strict=True))
        return (states[path].size for path in paths)

    return listed_inputs(names, copy=False, is_whole=tries.__contains__, sizes=sizes), states


def _build_all(
    scheduler: Scheduler, shares: list[Share], job: ShareJob, progress: ReportProgress | None
) -> list[ShareRecord]:
    """Build the tries of all shares; return their records."""
    handle, total = scheduler.share(job), sum(share.size for share in shares)
    done = 0
    records: list[ShareRecord] = []

    def results() -> Iterator[ShareRecord]:
        nonlocal done
        # With one share, no other one has the answers of its sessions.
        calls: list[Call] = [(share, handle, [] if len(shares) == 1 else None) for share in shares]
        for share, record in zip(shares, scheduler.run(build_share, calls), strict=True):
            records.append(record)
            done += share.size if record.is_built else 0
            yield record
        again, seen = dict[int, list[str]](), set[str]()
        for number, record in enumerate(records):
            earlier = sorted(seen.intersection(record.turns))
            if earlier or not record.is_built:
                again[number] = earlier
            seen.update(record.turns)
        calls = [(shares[number], handle, earlier) for number, earlier in again.items()]
        for number, record in zip(again, scheduler.run(build_share, calls), strict=True):
            records[number] = record
            done += shares[number].size
            yield record

    for _ in with_progress(
        results(),
        progress,
        "reading",
        unit="tokens",
        size=lambda record: record.num_tokens,
        share=lambda: min(1.0, done / total) if total else None,
    ):
        pass
    return records


def _tries_of(
    sources: Sequence[Share | str],
    records: Sequence[ShareRecord],
    tries: dict[str, Manifest],
    folder: AnyPath,
    log: ReadLog,
    digest: InputHash,
) -> list[str]:
    """Return the tries of all sources, in order; add their logs and the hashes of their files.

    Raises:
        TreepackError: no source has a trajectory, or no file has a known format.
    """
    paths: list[str] = []
    rest = iter(records)
    for source in sources:
        if isinstance(source, str):
            log.merge(log_of(source, tries[source]))
            hashes = tries[source]["reading"]["files"]
            paths.append(source)
        else:
            record = next(rest)
            log.merge(ReadLog.of_record(record.log))
            hashes = record.files
            paths += [] if record.trie is None else [str(folder / record.trie)]
        for sha256 in hashes:
            digest.add("", sha256)
    # If no file has a known format, it is the wrong folder, not a folder with extra files.
    if not tries and all(record.unknown is not None for record in records):
        raise TreepackError(str(records[0].unknown))
    for _ in refuse_nothing(paths, log.counts, log.skipped, log.unused):
        pass
    return paths


def _manifest_of(path: str) -> Manifest:
    """Return the manifest of the trie of a share.

    Raises:
        TreepackError: this machine does not see it.
    """
    if not is_stored(as_path(path) / MANIFEST):
        raise TreepackError(
            f"{path}: a worker wrote it, but this machine does not see it; give --out an address (s3://...), or a "
            "folder that all machines share"
        )
    return read_manifest(as_path(path), schema.TRIE_FORMAT)
