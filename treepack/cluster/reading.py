"""Tasks that read rollouts on a cluster: survey files, read parts of them to tables.

    survey_files([file, ...], job)   --> SurveyedFile, ...
    read_input_part(part, number, job)  --> table of `cluster.sequence_table.COLUMNS`, PartSummary

The summary has what the program that runs the tasks needs of a part; no token of a part leaves it except samples.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from treepack.cluster.input_parts import InputFile, InputPart, SurveyedFile, survey
from treepack.cluster.sequence_table import (
    UInt64,
    empty_table,
    group_hashes,
    present_columns,
    sequence_table,
    text_hashes,
)
from treepack.cluster.trie_ranges import sample_keys
from treepack.errors import TreepackError
from treepack.files.input_files.inputs import InputHash
from treepack.files.remote.cache import naming_addresses
from treepack.ingest.read_log import ReadLog
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.stream import ColumnsWork
from treepack.sequences import num_trained
from treepack.tokenise.tokenization import TokenisationJob


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Settings of all tasks that read; `folder` is the one that relative paths start from, None if there is none.

    A survey makes ranges of at most about `range_bytes`. A summary has one sample for every `sample_every` tokens.
    """

    files: ReadOptions
    job: TokenisationJob
    folder: str | None
    share: str
    range_bytes: int
    sample_every: int = 1


@dataclass(frozen=True, slots=True)
class PartSummary:
    """Facts about a part of the input.

    Attributes:
        log: the log of reading.
        hashes: the sha256 of each file that the task has read as a whole.
        unknown: the errors of files without a known format.
        num_tokens: tokens of all trajectories.
        num_trained: trained tokens of all trajectories.
        num_bytes: memory of the table.
        ids: hash of the id of each trajectory, uint64 [num_trajectories].
        groups: distinct hashes of (step, group), uint64.
        samples: order keys of sampled trajectories.
        columns: those columns of `schema.RECORDED` that have a value.
    """

    log: ReadLog
    hashes: list[str]
    unknown: list[TreepackError]
    num_tokens: int
    num_trained: int
    num_bytes: int
    ids: UInt64
    groups: UInt64
    samples: list[bytes]
    columns: frozenset[str]


@naming_addresses()
def survey_files(files: list[InputFile], job: ReadJob) -> list[SurveyedFile]:
    """Survey each of `files`.

    Raises:
        TreepackError: see `input_parts.survey`.
    """
    with _in_folder(job.folder):
        return [survey(file, job.files, job.range_bytes) for file in files]


@naming_addresses()
def read_input_part(part: InputPart, number: int, job: ReadJob) -> tuple[pa.Table, PartSummary]:
    """Read and tokenise part `number` of the input; return its trajectories and their summary.

    Memory: about three times the columns of the part.

    Raises:
        TreepackError: bad input, or text without a tokenizer.
    """
    columns, log, digest = _columns_work(job.job), ReadLog(), InputHash()
    unknown: list[TreepackError] = []
    tables: list[pa.Table] = []
    num_rows = num_tokens = 0
    with _in_folder(job.folder):
        for piece in part.parts(job.files, digest, unknown):
            batch, log_of_piece = columns(piece)
            log.merge(log_of_piece)
            if batch is not None:
                tables.append(sequence_table(batch, part=number, first_row=num_rows))
                num_rows, num_tokens = num_rows + len(batch.offsets) - 1, num_tokens + len(batch.tokens)
        hashes = [sha256 for _, sha256 in digest.files]
    table = pa.concat_tables(tables) if tables else empty_table()
    return table, PartSummary(
        log=log,
        hashes=hashes,
        unknown=unknown,
        num_tokens=num_tokens,
        num_trained=num_trained(table),
        num_bytes=table.nbytes,
        ids=text_hashes(table["trajectory_id"].to_pylist()),
        groups=group_hashes(table),
        samples=sample_keys(table, share=job.share, every=job.sample_every) if num_rows else [],
        columns=present_columns(table) if num_rows else frozenset(),
    )


_LAST: dict[bytes, ColumnsWork] = {}  # that of the last job of this process: loading a tokenizer takes seconds


def _columns_work(job: TokenisationJob) -> ColumnsWork:
    key = pickle.dumps(job)
    if key not in _LAST:
        _LAST.clear()
        _LAST[key] = ColumnsWork(job)
    return _LAST[key]


@contextmanager
def _in_folder(folder: str | None) -> Iterator[None]:
    """Run the block in `folder`, if this process is not there and sees it."""
    if folder is None or folder == os.getcwd() or not os.path.isdir(folder):  # noqa: PTH109, PTH112
        yield
        return
    with contextlib.chdir(folder):
        yield
