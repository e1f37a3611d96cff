"""Rollouts to a trie in one process or several: read and sort, merge, write.

    this process                                workers
    plans parts of the input     --part-->      read it, tokenise, collect; store sorted runs in an own spool
    ReadLog, progress            <--log--
    cuts the order into ranges   --range-->     merge the range of all runs
    nodes of the trie            <--order--
    plans parts of the output    --places-->    read tokens and trajectories from all spools, write the part
    manifest                     <--entry--

A trie among the inputs is a run that a worker copies (`earlier_tries`).

No token passes through this process, except of inputs that cannot be split. Input that fits into one run of one process
is built in memory. The result does not depend on the number of workers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from multiprocessing import parent_process
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import InputHash
from treepack.files.manifest import Manifest, Provenance
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import ReadLog, refuse_nothing
from treepack.ingest.readers.reading import WholePart
from treepack.ingest.readers.tokens.route_fields import NAMES
from treepack.ingest.stream import ColumnsWork, Part, min_bytes, num_bytes
from treepack.memory.budget import usual_memory
from treepack.processes import ProcessTeam, ReportProgress, with_progress
from treepack.tokenise.tokenization import TokenisationJob
from treepack.trie.builders.earlier_tries import store_trie
from treepack.trie.builders.in_memory import build_trie, route_costs
from treepack.trie.builders.merged import MergedRuns, RunsOfRange, merge_range, merge_runs
from treepack.trie.builders.out_of_core import RUN_BYTES, mapped_trie, run_size, sequences_in_memory
from treepack.trie.builders.routed_store import RoutedStore, StoredBatch, join_stored
from treepack.trie.builders.run_merge import MergedOrder
from treepack.trie.builders.spool import RunStore, SpoolFiles, StoredRun, spool_disk
from treepack.trie.builders.trie_parts import NodesPart, TrajectoriesPart, WrittenPart, part_tasks, write_part
from treepack.trie.route_symbols import RouteCosts
from treepack.trie.storage import SHARE, ArrayStorage
from treepack.trie.store.trie_files import write_renamed, write_trie, write_trie_manifest
from treepack.trie.trie import Trie

MIN_RUN_BYTES = 1 << 25  # of a worker; smaller runs would make the merge slow


@dataclass(frozen=True, slots=True)
class _WorkerJob:
    job: TokenisationJob
    share: str
    spools: list[SpoolFiles]  # of all workers
    number: int  # of this worker, and of the spool that it writes
    run_bytes: int
    keeps_routes: bool


class _Worker:
    """The state of a process: rollouts that are read and not stored yet, and the spools of all processes."""

    def __init__(self, job: _WorkerJob) -> None:
        self.columns = ColumnsWork(job.job)
        self.spools = job.spools
        spool = job.spools[job.number]
        self.runs = RunStore(spool, number=job.number, share=job.share, run_bytes=job.run_bytes)
        self.routed = RoutedStore(spool, number=job.number) if job.keeps_routes else None
        self._job = job

    def store_trie(self, path: str, piece: int) -> tuple[ReadLog, int]:
        """Store a trie as a run; return the log of its reading, and its tokens."""
        number, memory = self._job.number, self._job.run_bytes * SHARE
        run, log, num_tokens = store_trie(path, self.spools[number], number=number, piece=piece, memory=memory)
        self.runs.runs.append(run)
        return log, num_tokens


class TrieBuilder:
    """Processes that build a trie; spools are in `folder`, or in the folder of temporary files."""

    def __init__(
        self,
        parts: Iterator[Part],
        job: TokenisationJob,
        options: BuildOptions,
        *,
        input_hash: InputHash,
        folder: Path | None = None,
        memory: int | None = None,
        tries: Mapping[str, Manifest] = MappingProxyType({}),
    ) -> None:
        """Start no process yet. `parts` and `job` are those of `parts_and_job` with `options` and `input_hash`.

        `tries` are the manifests of the tries among the parts.
        `memory` is in bytes for all processes together, without their interpreters; None takes `usual_memory`.
        """
        self._share, self._folder, self._hash = options.share, folder, input_hash
        self._memory = usual_memory() if memory is None else memory
        self._tries, self._parts = dict(tries), parts
        self._min_bytes = min_bytes(job)
        self._stack = ExitStack()
        self._spools = [self._stack.enter_context(SpoolFiles(folder)) for _ in range(options.workers)]
        self._keeps_routes, self._conflicts = options.keep_routes, options.route_conflicts
        self.route_costs: RouteCosts | None = None
        self.renamed: pa.Table | None = None  # of `schema.RENAMED`
        all_bytes = min(RUN_BYTES, run_size(self._memory))
        run_bytes = min(all_bytes, max(MIN_RUN_BYTES, all_bytes // options.workers))
        jobs = [
            _WorkerJob(job, options.share, self._spools, i, run_bytes, options.keep_routes)
            for i in range(options.workers)
        ]
        self._team = self._stack.enter_context(ProcessTeam(_worker, jobs))

    def __enter__(self) -> TrieBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes and remove the spools."""
        self._stack.close()

    def read(self, log: ReadLog, progress: ReportProgress | None, *, stage: str = "reading") -> Trie | MergedRuns:
        """Read everything and return the trie, in memory if it is small.

        Raises:
            TreepackError: bad input, no trajectory at all, or text without a tokenizer; or the disk fails.
        """
        reading = with_progress(
            refuse_nothing(self._batches(log), log.counts, log.skipped, log.unused),
            progress,
            stage,
            unit="tokens",
            size=lambda num_tokens: num_tokens,
            share=lambda: self._hash.bytes_read.share,
        )
        for _ in reading:
            pass
        if self._keeps_routes:
            return self._routed_trie(log)
        here = self._team.here
        if here is not None and not here.runs.runs:
            sequences = sequences_in_memory(here.runs.pending)
            self._keep_renamed(sequences.renamed, log)
            return build_trie(sequences, share=self._share)
        runs = [run for runs in self._team.each(_finish) for run in runs]
        with spool_disk(self._folder):
            merged = merge_runs(
                self._spools,
                runs,
                share=self._share,
                num_ranges=self._team.size,
                merge_ranges=lambda tasks: self._team.in_order(_merge, tasks),
            )
        self._keep_renamed(merged.renamed, log)
        return merged

    def _keep_renamed(self, renamed: pa.Table | None, log: ReadLog) -> None:
        self.renamed = renamed
        log.count_renamed(renamed)

    def _routed_trie(self, log: ReadLog) -> Trie:
        """Return the trie of all rollouts with their routes, which are in mapped files if they are large.

        Raises:
            TreepackError: no trajectory, no routes, routes of different models, or the disk fails.
        """
        stored = [batch for batches in self._team.each(_finish_routed) for batch in batches]
        sequences, storage = join_stored(self._spools, stored, ArrayStorage(self._memory, self._folder))
        self._keep_renamed(sequences.renamed, log)
        if sequences.routes is not None:
            self.route_costs = route_costs(sequences, share=self._share, storage=storage)
        if self.route_costs is None or not self.route_costs.recorded:
            raise TreepackError(
                f"no rollout has recorded routes in {', '.join(NAMES)}; record them when you sample, or build without "
                "--keep-routes"
            )
        trie = build_trie(sequences, share=self._share, route_conflicts=self._conflicts, storage=storage)
        # The first map contains the routes of all trajectories, which the trie does not need any more.
        return replace(trie, storage=replace(trie.storage, maps=trie.storage.maps[len(storage.maps) :]))

    def _batches(self, log: ReadLog) -> Iterator[int]:
        """Yield the tokens of each part that has a trajectory."""
        numbered = enumerate(self._hashed(self._parts))
        for log_of_part, num_tokens in self._team.in_order(
            _read, numbered, min_size=self._min_bytes, size=lambda item: num_bytes(item[1])
        ):
            log.merge(log_of_part)
            if num_tokens is not None:
                yield num_tokens

    def _hashed(self, parts: Iterator[Part]) -> Iterator[Part]:
        """Yield `parts`, and count the input files of tries."""
        for part in parts:
            if isinstance(part, WholePart):
                for sha256 in self._tries[part.path]["reading"]["files"]:
                    self._hash.add("", sha256)
            yield part

    def mapped(self, trie: Trie | MergedRuns) -> Trie:
        """Return `trie` as arrays, which are mapped files if it is large."""
        storage = ArrayStorage(self._memory, self._folder)
        if isinstance(trie, Trie):
            return replace(trie, storage=replace(storage, maps=trie.storage.maps))
        return mapped_trie(trie, storage)

    def write(self, trie: Trie | MergedRuns, directory: Path, provenance: Provenance) -> Manifest:
        """Write `trie` into an existing empty `directory`, with its manifest last; return the manifest."""
        if isinstance(trie, Trie):
            return write_trie(trie, directory, provenance, self.renamed)
        parts = dict(self._team.unordered(_write, part_tasks(trie, directory)))
        written = [parts[number] for number in sorted(parts)]
        max_token_id = max(part.max_token_id for part in written)
        entries = [*(part.entry for part in written), *write_renamed(directory, self.renamed)]
        return write_trie_manifest(directory, provenance, trie.share, max_token_id, entries)


def _worker(job: _WorkerJob) -> _Worker:
    if parent_process() is not None:
        _spare_pandas()
    return _Worker(job)


def _spare_pandas() -> None:
    """Let pyarrow conclude that pandas is missing, which it would import at the first array, for 0.3 s.

    An entry None in `sys.modules` is not enough: pyarrow takes it for the module. So the first import is refused.
    """

    class RefusePandas(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    refusal = RefusePandas()
    sys.meta_path.insert(0, refusal)
    pa.array([0])
    sys.meta_path.remove(refusal)


def _read(worker: _Worker, item: tuple[int, Part]) -> tuple[ReadLog, int | None]:
    """Read a part of the input; return its log, and the number of its tokens, or None if it has no trajectory."""
    number, whole = item
    if isinstance(whole, WholePart):
        return worker.store_trie(whole.path, number)
    log, num_tokens = ReadLog(), None
    for part in whole.parts():
        batch, log_of_part = worker.columns(part)
        log.merge(log_of_part)
        if batch is not None:
            (worker.runs if worker.routed is None else worker.routed).add(batch, number)
            num_tokens = (num_tokens or 0) + len(batch.tokens)
    return log, num_tokens


def _finish(worker: _Worker, _: None) -> list[StoredRun]:
    return worker.runs.finish()


def _finish_routed(worker: _Worker, _: None) -> list[StoredBatch]:
    assert worker.routed is not None
    return worker.routed.finish()


def _merge(worker: _Worker, task: RunsOfRange) -> MergedOrder:
    return merge_range(worker.spools, task)


def _write(worker: _Worker, part: NodesPart | TrajectoriesPart) -> WrittenPart:
    return write_part(worker.spools, part)
