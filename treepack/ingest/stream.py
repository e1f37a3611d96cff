"""Read files into usable trajectories, in one process or several, and count the input that cannot be used.

    inputs --read_parts--> part --worker--> Trajectory | Skipped, ...     (read)
                           part --worker--> Sequences, ReadLog            (parts_and_job, ColumnsWork)

This process finds and hashes the files and cuts them into parts: ranges of plain JSONL and Parquet, which the worker
opens itself, and the decompressed data of all other files. A worker parses, reads and tokenises a part and makes
columns of it. The result does not depend on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import InputHash
from treepack.files.input_files.limits import RecordLimits
from treepack.files.input_files.ranges import Range
from treepack.files.input_files.remote_inputs import named_by_address
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import PREFIX, ReadLog
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import FinishedPart, UnreadPart, WholePart, read_parts
from treepack.processes import in_order
from treepack.sequences import Sequences, as_columns
from treepack.tokenise.search_turns import records_of
from treepack.tokenise.tokenization import TokenisationJob, TrajectoryTokeniser, read_tokenizer
from treepack.trajectory import Outcome, Outcomes, Skipped, Trajectory

Part = UnreadPart | FinishedPart | WholePart


def read(
    inputs: Sequence[str], options: BuildOptions, *, tokenizer: Any = None, input_hash: InputHash | None = None
) -> Outcomes:
    """Yield the tokenised trajectories of `inputs` in a fixed order, and a `Skipped` for each unusable record.

    `tokenizer` is that of `options`, if the caller has loaded it already.

    Raises:
        TreepackError: bad input; text without a tokenizer.
    """
    parts, job = parts_and_job(inputs, options, tokenizer, input_hash)
    min_parts = -(-min_bytes(job) // _PART_BYTES)
    for trajectories in in_order(_ReadWork, job, parts, workers=options.workers, min_tasks=min_parts):
        yield from trajectories


def parts_and_job(
    inputs: Sequence[str],
    options: BuildOptions,
    tokenizer: Any = None,
    input_hash: InputHash | None = None,
    *,
    as_ranges: bool = False,
    is_whole: Callable[[str], bool] = lambda _: False,
) -> tuple[Iterator[Part], TokenisationJob]:
    """Return the parts of `inputs`, for `ColumnsWork`, and its job; with `as_ranges` most parts contain no data.

    A directory that `is_whole` is a `WholePart`, which the caller reads.
    """
    how, job = options_and_job(options, tokenizer)
    parts = read_parts(inputs, how, input_hash=input_hash, as_ranges=as_ranges, is_whole=is_whole)
    return parts, job if options.workers == 1 else job.by_name()


def options_and_job(options: BuildOptions, tokenizer: Any = None) -> tuple[ReadOptions, TokenisationJob]:
    """Return the options of reading records and the job of `ColumnsWork`; `tokenizer` is that of `options` if known.

    Raises:
        TreepackError: the tokenizer does not exist, or a file that `options` names cannot be read.
    """
    if tokenizer is None and options.tokenizer:
        tokenizer = read_tokenizer(options.tokenizer)
    how = ReadOptions(
        format=options.format,
        reward_key=options.reward_key,
        vocab_size=None if tokenizer is None else len(tokenizer),
        train_all=options.train_all,
        shapes=options.shapes,
        limits=RecordLimits(options.max_record_size, options.skip_bad),
        keep_routes=options.keep_routes,
        columns=options.column_map(),
    )
    job = TokenisationJob(
        tokenizer,
        options.expand,
        options.tool_schemas(),
        options.normalize_ids,
        options.strict,
        options.per_path,
        chat_template=options.template_file(),
        control_tokens=options.control_tokens,
        truncated=options.truncated,
        failed=options.failed,
    )
    return how, job


# Bytes of the input below which no other process starts: reading them takes 0.2 s, and starting a process 0.6 s.
# With a tokenizer, reading a single part takes longer.
MIN_BYTES = 1 << 25
_PART_BYTES = 1 << 19  # of a part that contains its data


def min_bytes(job: TokenisationJob) -> int:
    """Return the bytes of input from which on a second process saves time."""
    return 1 if job.tokenizer else MIN_BYTES


def num_bytes(part: Part) -> int:
    """Return the bytes of the input of a part, or an estimate."""
    return part.block.size if isinstance(part, UnreadPart) and isinstance(part.block, Range) else _PART_BYTES


class _ReadWork:
    """The work of a process: read and tokenise a part of a file."""

    def __init__(self, job: TokenisationJob) -> None:
        self._tokenise = TrajectoryTokeniser(job)
        self._strict = job.strict

    def __call__(self, part: Part) -> list[Outcome]:
        return [sample for _, samples in self.samples(part) for sample in samples]

    def samples(self, part: Part) -> Iterator[tuple[Outcome, list[Outcome]]]:
        """Yield each item of `part` with its samples.

        Raises:
            TreepackError: `strict` refuses a rollout.
        """
        for record in records_of(part.trajectories()):
            for item, tokenised in self._tokenise.record(record):
                samples = [named_by_address(sample) for sample in tokenised]
                if self._strict:
                    _refuse_skipped(samples)
                yield named_by_address(item), samples


class ColumnsWork:
    """The work of a process: read and tokenise a part of a file, and make columns of the usable trajectories."""

    def __init__(self, job: TokenisationJob) -> None:
        self._read = _ReadWork(job)

    def __call__(self, part: Part) -> tuple[Sequences | None, ReadLog]:
        log = ReadLog()
        trajectories = [each for item, samples in self._read.samples(part) for each in log.add(item, samples)]
        return as_columns(trajectories) if trajectories else None, log


def _refuse_skipped(samples: Iterable[Outcome]) -> None:
    """Refuse the first rollout among `samples` that is skipped."""
    for sample in samples:
        if isinstance(sample, Skipped) and sample.is_rollout:
            raise TreepackError(f"{sample.sentence}; fix or remove the rollout, or skip it without --strict")


def usable(stream: Iterable[Outcome], counts: Counter[str]) -> Iterator[Trajectory]:
    """Yield the trajectories of `stream`; count each reason for skipping, and each note, in `counts`."""
    for item in stream:
        if isinstance(item, Skipped):
            counts[PREFIX + item.reason] += 1
        else:
            counts.update(item.notes)
            yield item
