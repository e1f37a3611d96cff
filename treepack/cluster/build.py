"""`treepack build-trie` on many machines: the content of `build_trie_directory`, by tasks of a scheduler.

    this process                                tasks
    lists the input          --files-->         survey_files    ranges of each file, sha256
    groups them into parts   --part-->          read_input_part table of trajectories      summary: hashes, samples
    names, splitters         --exchange-->      one table of each range of the order
                             --range-->         sort_range      sorted table               summary: lengths, edges
    numbers all nodes        --nodes-->         write_range     parts of the output        entries
    manifest

Tokens stay in the tasks, except samples, the edges of ranges, and ids that repeat. The trie is equal to that of one
process, and so are all columns; only the parts end at the ends of ranges. Memory of this process: about 200 bytes for
each trajectory with two nodes, and the samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from treepack.cluster.input_parts import InputFile, SurveyedFile, group_parts, list_files
from treepack.cluster.names import repeated_names
from treepack.cluster.reading import PartSummary, ReadJob, read_input_part, survey_files
from treepack.cluster.scheduler import Scheduler, TableHandle
from treepack.cluster.sequence_table import UInt64, rows_of_hashes
from treepack.cluster.trie_ranges import (
    RangeNodes,
    RangeSummary,
    WrittenRange,
    choose_splitters,
    join_ranges,
    nodes_of_ranges,
    range_of_rows,
    sort_range,
    write_range,
)
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import finished_directory, refuse_existing
from treepack.files.input_files.inputs import InputHash
from treepack.files.manifest import Manifest, Provenance
from treepack.files.remote.address import AnyPath, Paths, as_output, is_address, path_names
from treepack.files.remote.cache import naming_addresses
from treepack.files.task_output import TaskOutput, check_visible
from treepack.ingest.conversations import conversations_of_log
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import PREFIX, ReadLog, refuse_nothing
from treepack.ingest.readers.copies import find_copies, skipped_copies
from treepack.ingest.readers.reading import detect_format
from treepack.ingest.stream import options_and_job
from treepack.processes import ReportProgress, with_progress
from treepack.tokenise.saved_template import template_entry
from treepack.tokenise.tokenization import fingerprint, read_tokenizer
from treepack.trajectory import Int64
from treepack.trie.directory import TrieSummary
from treepack.trie.nodes import NodeArrays
from treepack.trie.store.trie_files import write_trie_manifest

_T = TypeVar("_T")

PART_BYTES = 1 << 27  # of the input as stored, for one task
RANGE_BYTES = 1 << 29  # of the columns of a range; sorting needs about three times as much
_MAX_SURVEYS = 1 << 12  # tasks among which the files are divided
SAMPLES = 1 << 13  # of all input, if it has 8 bytes for each token as JSONL has


class _StageSeconds:
    """Seconds in which this process waits for the tasks of each stage; the rest is its own work."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waited: dict[str, float] = {}

    def results(self, stage: str, items: Iterable[_T]) -> Iterator[_T]:
        """Yield `items`, and count the time until each is there."""
        rest = iter(items)
        while True:
            start = time.perf_counter()
            try:
                item = next(rest)
            except StopIteration:
                return
            finally:
                self._waited[stage] = self._waited.get(stage, 0.0) + time.perf_counter() - start
            yield item

    def timings(self) -> dict[str, float]:
        """Return the seconds of each stage, and of this process as "driver"."""
        total = time.perf_counter() - self._start
        return {**self._waited, "driver": total - sum(self._waited.values())}


@dataclass(slots=True)
class _Reading:
    """The parts of the input, which stay on the machines that read them, and the sums of their summaries."""

    log: ReadLog = field(default_factory=ReadLog)
    digest: InputHash = field(default_factory=InputHash)
    tables: list[TableHandle] = field(default_factory=list)
    ids: list[UInt64] = field(default_factory=list)
    groups: list[UInt64] = field(default_factory=list)
    samples: list[bytes] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    num_tokens: int = 0
    num_trained: int = 0
    num_bytes: int = 0

    def add(self, table: TableHandle, summary: PartSummary) -> int:
        """Add a part; return its tokens."""
        self.log.merge(summary.log)
        for sha256 in summary.hashes:
            self.digest.add("", sha256)
        if not len(summary.ids):
            return 0
        self.tables.append(table)
        self.ids.append(summary.ids)
        self.groups.append(summary.groups)
        self.samples += summary.samples
        self.columns |= summary.columns
        self.num_tokens += summary.num_tokens
        self.num_trained += summary.num_trained
        self.num_bytes += summary.num_bytes
        return summary.num_tokens


@naming_addresses()
def build_trie_on(
    scheduler: Scheduler,
    inputs: Paths,
    out: str | AnyPath,
    options: BuildOptions = BuildOptions(),  # noqa: B008 (immutable)
    *,
    num_ranges: int | None = None,
    part_bytes: int = PART_BYTES,
    overwrite: bool = False,
    progress: ReportProgress | None = None,
) -> TrieSummary:
    """Read rollouts and write their prefix tries to the directory `out` by tasks of `scheduler`.

    Args:
        scheduler: runs the tasks.
        inputs: files, folders and globs that all machines see, or addresses.
        out: the directory to write, on a disk that all machines share, or an address.
        options: how to read, tokenise and share; `workers` has no meaning here.
        num_ranges: ranges of the order that are sorted and written by a task each; by default one for every
            `RANGE_BYTES` of columns.
        part_bytes: stored bytes of the input for each task that reads.
        overwrite: replace `out` if treepack wrote it.
        progress: called after each part with the tokens read so far.

    Returns:
        The summary; its `timings` have the seconds in which this process waited for each stage, and its own ("driver").

    Raises:
        TreepackError: as `build_trie_directory`; standard input; or a file that another machine does not see.
    """
    if (num_ranges is not None and num_ranges < 1) or part_bytes < 1:
        raise TreepackError(f"num_ranges is {num_ranges} and part_bytes is {part_bytes}; expected at least 1 of each")
    if options.keep_routes:
        raise TreepackError("keep_routes builds the trie on one machine; build it without a cluster (--ray)")
    out, names = as_output(out), path_names(inputs)
    refuse_existing(out, overwrite=overwrite, inputs=names)
    watch = _StageSeconds()
    start = time.perf_counter()
    with finished_directory(out, overwrite=overwrite) as temporary:
        recorded = options.as_record()
        tokenizer = read_tokenizer(options.tokenizer) if options.tokenizer else None
        how, job = options_and_job(options, tokenizer)
        reading_job = ReadJob(
            how,
            job.by_name(),
            _folder_of(names),
            options.share,
            max(1, part_bytes // 4),
        )
        reading = _read(scheduler, names, reading_job, part_bytes, watch, progress)
        tables, ranges = _sort_ranges(scheduler, reading, options.share, num_ranges, watch)
        nodes = join_ranges(ranges, share=options.share)
        totals = _totals(reading, nodes)
        conversations, given = conversations_of_log(reading.log, totals), job.chat_template
        groups = frozenset[str]().union(*(each.groups for each in ranges))
        provenance = Provenance(
            options=recorded,
            counts=dict(sorted(reading.log.counts.items())),
            skipped=reading.log.skipped_record(groups),
            control_tokens=reading.log.control_record(),
            conversations=conversations.as_record() if conversations else None,
            totals=totals,
            tokenizer=fingerprint(tokenizer) if tokenizer else None,
            chat_template=template_entry(tokenizer, given) if conversations or given else None,
            input={"sha256": reading.digest.hexdigest(), "num_files": reading.digest.num_files},
        )
        parts = list(nodes_of_ranges(nodes, ranges, share=options.share))
        columns = schema.trajectory_columns(reading.columns)
        results = _write(scheduler, tables, parts, columns, temporary, watch)
        manifest = _write_manifest(temporary, provenance, options.share, results)
    return TrieSummary(out, manifest, time.perf_counter() - start, reading.log, watch.timings())


def _folder_of(inputs: Sequence[str]) -> str | None:
    """Return the folder that relative inputs start from, None if there is none.

    A process has one folder, so workers that run several tasks in threads need absolute paths.
    """
    return None if all(is_address(name) or Path(name).is_absolute() for name in inputs) else str(Path.cwd())


def _read(
    scheduler: Scheduler,
    inputs: list[str],
    job: ReadJob,
    part_bytes: int,
    watch: _StageSeconds,
    progress: ReportProgress | None,
) -> _Reading:
    """Survey and read all input; the tables stay in the tasks.

    Raises:
        TreepackError: bad input, or no trajectory at all.
    """
    files, skipped = list_files(inputs)
    reading = _Reading()
    for extra in skipped:
        reading.log.counts[PREFIX + extra.reason] += 1
    surveyed = _survey(scheduler, files, job, watch)
    copies = find_copies(((each.file.path, each.size) for each in surveyed), detect_format)
    surveyed = [each for each in surveyed if each.file.path not in copies]
    for extra in skipped_copies(copies):
        reading.log.counts[PREFIX + extra.reason] += 1
    for each in surveyed:
        if each.sha256 is not None:
            reading.digest.add("", each.sha256)
    parts = list(group_parts(surveyed, part_bytes))
    total = sum(part.size for part in parts)
    # 8 bytes of JSONL for each token, 2 of compressed Parquet: 4 times as many samples then.
    handle = scheduler.share(replace(job, sample_every=max(1, total // (8 * SAMPLES))))
    unknown = [each.error for each in surveyed if each.error is not None]
    done = 0

    def tokens_of_parts() -> Iterator[int]:
        nonlocal done
        calls = [(part, number, handle) for number, part in enumerate(parts)]
        results = watch.results("read", scheduler.keep(read_input_part, calls))
        for part, (table, summary) in zip(parts, results, strict=True):
            unknown.extend(summary.unknown)
            num_tokens = reading.add(table, summary)
            done += part.size
            if num_tokens:
                yield num_tokens
        # If no file has a known format, it is the wrong folder, not a folder with extra files.
        if unknown and len(unknown) == len(surveyed):
            raise unknown[0]

    tokens = refuse_nothing(tokens_of_parts(), reading.log.counts, reading.log.skipped, reading.log.unused)
    for _ in with_progress(
        tokens,
        progress,
        "reading",
        unit="tokens",
        size=lambda num_tokens: num_tokens,
        share=lambda: done / total if total else None,
    ):
        pass
    return reading


def _survey(scheduler: Scheduler, files: list[InputFile], job: ReadJob, watch: _StageSeconds) -> list[SurveyedFile]:
    size = -(-len(files) // _MAX_SURVEYS)
    handle = scheduler.share(job)
    calls = [(files[i : i + size], handle) for i in range(0, len(files), size)]
    return [each for some in watch.results("survey", scheduler.run(survey_files, calls)) for each in some]


def _sort_ranges(
    scheduler: Scheduler, reading: _Reading, share: str, num_ranges: int | None, watch: _StageSeconds
) -> tuple[list[TableHandle], list[RangeSummary]]:
    """Return the sorted tables of all ranges and their summaries."""

    def look_up(wanted: UInt64) -> Iterator[tuple[Int64, list[str], list[str]]]:
        handle = scheduler.share(wanted)
        pairs = zip(reading.tables, reading.ids, strict=True)
        calls = [(table, handle) for table, ids in pairs if np.isin(ids, wanted).any()]
        return watch.results("names", scheduler.run(rows_of_hashes, calls))

    names = repeated_names(reading.ids, look_up)
    reading.log.count_renamed(None if names is None else pa.table({"arrival": names.arrival}))
    count = max(1, -(-reading.num_bytes // RANGE_BYTES)) if num_ranges is None else num_ranges
    splitters = choose_splitters(reading.samples, count)
    reading.samples.clear()
    exchange = partial(scheduler.exchange, reading.tables, range_of_rows, (splitters, share), len(splitters) + 1)
    (tables,) = watch.results("exchange", (call() for call in [exchange]))
    reading.tables.clear()
    shared = scheduler.share((names, frozenset(reading.log.groups)))
    sort = watch.results("sort", scheduler.keep(_sort, [(table, share, shared) for table in tables]))
    results = list(sort)
    return [table for table, _ in results], [summary for _, summary in results]


def _sort(table: pa.Table, share: str, shared: tuple[Any, frozenset[str]]) -> tuple[pa.Table, RangeSummary]:
    names, groups = shared
    return sort_range(table, share=share, names=names, groups=groups)


def _totals(reading: _Reading, nodes: NodeArrays) -> dict[str, Any]:
    """Return the totals as `trie_totals`; groups are counted by 64-bit hashes."""
    tokens_tree = int(nodes.node_start[-1])
    return {
        "num_trajectories": len(nodes.end_node),
        "num_groups": len(np.unique(np.concatenate(reading.groups))),
        "num_trees": int((nodes.parent < 0).sum()),
        "num_nodes": len(nodes.parent),
        "tokens_flat": reading.num_tokens,
        "tokens_tree": tokens_tree,
        "tokens_trained": reading.num_trained,
        "por": 1 - tokens_tree / reading.num_tokens,
    }


def _write(
    scheduler: Scheduler,
    tables: list[TableHandle],
    ranges: list[RangeNodes],
    columns: pa.Schema,
    temporary: Path,
    watch: _StageSeconds,
) -> list[WrittenRange]:
    # Parts of ranges (2, 1), (3, 2) -> the second range begins with number 2 of the nodes and 1 of the trajectories.
    counts = np.array([each.num_parts for each in ranges])
    first = (np.cumsum(counts, axis=0) - counts).tolist()
    shared = scheduler.share((TaskOutput.of(temporary), columns))
    calls = [(table, each, tuple(numbers), shared) for table, each, numbers in zip(tables, ranges, first, strict=True)]
    return list(watch.results("write", scheduler.run(_write_one, calls)))


@naming_addresses()
def _write_one(
    table: pa.Table, nodes: RangeNodes, numbers: tuple[int, int], shared: tuple[TaskOutput, pa.Schema]
) -> WrittenRange:
    output, columns = shared
    with output.folder() as folder:
        return write_range(table, nodes, folder, numbers=numbers, columns=columns)


def _write_manifest(temporary: Path, provenance: Provenance, share: str, results: list[WrittenRange]) -> Manifest:
    entries = [entry for each in results for entry in each.nodes]
    entries += [entry for each in results for entry in each.trajectories]
    max_token_id = max(each.max_token_id for each in results)
    check_visible(temporary, entries)
    return write_trie_manifest(temporary, provenance, share, max_token_id, entries)
