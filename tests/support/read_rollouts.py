"""Rollouts of files as trajectories, and trajectories as samples of tokens, in this process and without a trie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from treepack.files.input_files.inputs import InputHash
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import read_parts
from treepack.tokenise.search_turns import records_of
from treepack.tokenise.tokenization import TokenisationJob, TrajectoryTokeniser
from treepack.trajectory import Skipped, Trajectory


def read_trajectories(
    inputs: Iterable[str | Path],
    *,
    format: str = "auto",  # noqa: A002
    input_hash: InputHash | None = None,
    **options: Any,
) -> Iterator[Trajectory | Skipped]:
    """The trajectories of all `inputs`, in order, and each record that cannot be used; `options` of `ReadOptions`."""
    for part in read_parts(inputs, ReadOptions(format, **options), input_hash=input_hash):
        yield from part.trajectories()


def tokenize(
    trajectories: Iterable[Trajectory | Skipped], *, tokenizer: Any, **options: Any
) -> Iterator[Trajectory | Skipped]:
    """The samples of `trajectories`, in the same order; `options` of `TokenisationJob`."""
    tokenise = TrajectoryTokeniser(TokenisationJob(tokenizer, **options))
    for record in records_of(trajectories):
        yield from (sample for _, samples in tokenise.record(record) for sample in samples)
