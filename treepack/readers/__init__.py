"""Raw agent rollouts to trajectories: one format is one file here and one line in `READERS`.

    files --records--> Record --READERS[format].read--> Trajectory | Skipped

A reader has `matches(record)`, which tells its records by their fields, and `read(record, options)`, which yields what
one record holds. The format of a file is told from its first record, in the order of `READERS`, unless it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from treepack.errors import TreepackError
from treepack.readers import chat, swe_agent, tau_bench, tokens, toolbench
from treepack.readers.fields import ReadOptions
from treepack.readers.records import InputHash, Record, list_inputs, read_records
from treepack.trajectory import Skipped, Trajectory

__all__ = ["READERS", "InputHash", "ReadOptions", "Reader", "Record", "read_trajectories"]


class Reader(Protocol):
    """What a module has to have to be a reader."""

    def matches(self, record: dict[str, Any]) -> bool:
        """Whether `record` is of this format."""

    def read(self, record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
        """The trajectories that one record holds."""


READERS: dict[str, Reader] = {
    "tokens": tokens,
    "chat": chat,
    "tau-bench": tau_bench,
    "swe-agent": swe_agent,
    "toolbench": toolbench,
}


def read_trajectories(
    inputs: Iterable[str | Path],
    *,
    format: str = "auto",  # noqa: A002
    reward_key: str | None = None,
    vocab_size: int | None = None,
    train_all: bool = False,
    input_hash: InputHash | None = None,
) -> Iterator[Trajectory | Skipped]:
    """The trajectories of all `inputs`, in order, and what was skipped: files, folders, globs, `-` for standard input.

    `format` is a key of `READERS`, or `auto`; `reward_key`, `vocab_size` and `train_all` are those of `ReadOptions`.
    `input_hash` takes up the sha256 of each file as it is read to its end.

    Raises:
        TreepackError: an input matches nothing, cannot be read or parsed, or is not of the format.
    """
    if format != "auto" and format not in READERS:
        raise TreepackError(f"format '{format}' is not known; expected auto, {', '.join(READERS)}")
    files, skipped = list_inputs(inputs)
    yield from skipped
    options = ReadOptions(reward_key=reward_key, vocab_size=vocab_size, train_all=train_all)
    for path in files:
        reader = None if format == "auto" else READERS[format]
        for record in read_records(path, input_hash=input_hash):
            if reader is None:
                reader = READERS[detect_format(record)]
            yield from reader.read(record, options)


def detect_format(record: Record) -> str:
    """The first format in `READERS` that `record` matches.

    Raises:
        TreepackError: the record is a row of a trie or packed directory, or of no known format; the message then lists
            the record's fields and the formats.
    """
    if "subtree_end" in record.value or {"tree_id", "node_id"} <= record.value.keys():
        raise TreepackError(
            f"{record.source}: is a part of a trie or packed directory; "
            "give the whole directory with its manifest to pack, stats or train, or the rollouts it was made from"
        )
    for name, reader in READERS.items():
        if reader.matches(record.value):
            return name
    fields = ", ".join(record.value) or "no field"
    raise TreepackError(
        f"{record.source}: not recognised, with the fields {fields}; expected one of the formats {', '.join(READERS)}"
    )
