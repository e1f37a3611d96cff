"""Files to usable trajectories: reading, tokenising, and counting what cannot be used, in one process or several.

    inputs --read_parts--> part --worker--> Trajectory | Skipped, ...     (read)
                           part --worker--> Sequences, counts             (read_columns)

This process finds, hashes, decompresses and cuts up the files; parsing, reading, tokenising and making columns are done
where the parts go. The result does not depend on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from treepack.columns import Sequences, as_columns
from treepack.ingest.options import BuildOptions
from treepack.ingest.readers.inputs import InputHash
from treepack.ingest.readers.registry import Done, ReadOptions, Unread, read_parts
from treepack.ingest.tokenization import Job, Tokenisation, load_tokenizer
from treepack.processes import in_order
from treepack.trajectory import Skipped, Trajectory

Part = Unread | Done


def read(
    inputs: Sequence[str], options: BuildOptions, *, tokenizer: Any = None, input_hash: InputHash | None = None
) -> Iterator[Trajectory | Skipped]:
    """Tokenised trajectories of `inputs`, in a fixed order, and what is skipped.

    `tokenizer` is `options.tokenizer`, where a caller has loaded it already.

    Raises:
        TreepackError: bad input; text without a tokenizer.
    """
    parts, job = _parts_and_job(inputs, options, tokenizer, input_hash)
    for found in in_order(_ReadWork, job, parts, workers=options.workers, min_pieces=_min_parts(job)):
        yield from found


def read_columns(
    inputs: Sequence[str],
    options: BuildOptions,
    counts: Counter[str],
    *,
    tokenizer: Any = None,
    input_hash: InputHash | None = None,
) -> Iterator[Sequences]:
    """What `read` gives as columns, in batches; what is skipped, and every note, is added to `counts`.

    The ids of the trajectories may repeat.

    Raises:
        TreepackError: bad input; text without a tokenizer.
    """
    parts, job = _parts_and_job(inputs, options, tokenizer, input_hash)
    for batch, counted in in_order(_ColumnsWork, job, parts, workers=options.workers, min_pieces=_min_parts(job)):
        counts.update(counted)
        if batch is not None:
            yield batch


def _parts_and_job(
    inputs: Sequence[str], options: BuildOptions, tokenizer: Any, input_hash: InputHash | None
) -> tuple[Iterator[Part], Job]:
    if tokenizer is None and options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
    how = ReadOptions(
        reward_key=options.reward_key,
        vocab_size=None if tokenizer is None else len(tokenizer),
        train_all=options.train_all,
        shapes=options.shapes,
    )
    job = Job(tokenizer, options.expand, options.tools, options.normalize_ids)
    parts = read_parts(inputs, how, format=options.format, input_hash=input_hash)
    return parts, job if options.workers == 1 else job.by_name()


def _min_parts(job: Job) -> int:
    """Parts that are worth a process: starting one costs about as much as reading 4 MB of token ids."""
    return 1 if job.tokenizer else 8


class _ReadWork:
    """Reads and tokenises parts."""

    def __init__(self, job: Job) -> None:
        self._tokenise = Tokenisation(job)

    def __call__(self, part: Part) -> list[Trajectory | Skipped]:
        return [found for item in part.trajectories() for found in self._tokenise(item)]


class _ColumnsWork:
    """Reads and tokenises parts, and makes columns of what is usable."""

    def __init__(self, job: Job) -> None:
        self._read = _ReadWork(job)

    def __call__(self, part: Part) -> tuple[Sequences | None, Counter[str]]:
        counts: Counter[str] = Counter()
        found = list(usable(self._read(part), counts))
        return as_columns(found) if found else None, counts


def usable(stream: Iterable[Trajectory | Skipped], counts: Counter[str]) -> Iterator[Trajectory]:
    """The trajectories of `stream`; what is skipped, and every note, is added to `counts`."""
    for item in stream:
        if isinstance(item, Skipped):
            counts[f"skipped: {item.reason}"] += 1
        else:
            counts.update(item.notes)
            yield item
