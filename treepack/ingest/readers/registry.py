"""Raw agent rollouts to trajectories: one format is one file here and one line in `READERS`.

    files --records--> Record --READERS[format].read--> Trajectory | Skipped

A reader is a module with an `ABOUT`, with `matches(record)`, which tells its records by their fields, and with
`read(record, options)`, which yields what one record holds; or, where several records of a file make one rollout,
`read_file(records, options)`. The format of a file is told from its first record, in the order of `READERS`, unless it
is named: what is most particular comes first, what other formats contain, token fields and messages, last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from treepack.errors import TreepackError
from treepack.ingest.readers.about import About
from treepack.ingest.readers.fields import ReadOptions
from treepack.ingest.readers.formats import (
    alpaca,
    art,
    atif,
    auto_code_rover,
    chat,
    dars,
    harbor_traces,
    intercode,
    langsmith,
    llama_factory,
    megatron_rl,
    mini_swe_agent,
    mint,
    mooncake,
    ms_swift,
    nemo_gym,
    openai_chat,
    openai_preference,
    openai_responses,
    otel_genai,
    pi,
    prime_rl,
    prime_rl_sft,
    rllm,
    rllm_gateway,
    sharegpt,
    skyrl,
    skyrl_dump,
    slime,
    swe_agent,
    tau2,
    tau_bench,
    tinker,
    tinker_datum,
    token_trees,
    tokens,
    toolbench,
    tree_of_thoughts,
    trl_grpo,
    trl_labels,
    trl_packed,
    trl_preference,
    verifiers,
    verifiers_results,
    verl,
    verl_data,
    verl_dump,
)
from treepack.ingest.readers.inputs import InputHash, displayed, list_inputs
from treepack.ingest.readers.records import NoObjectError, Piece, Record, read_pieces
from treepack.ingest.readers.torch_files import NotPlainError
from treepack.processes import batched
from treepack.trajectory import Skipped, Trajectory

__all__ = [
    "READERS",
    "About",
    "FileReader",
    "InputHash",
    "ReadOptions",
    "Record",
    "RecordReader",
    "read_parts",
    "read_trajectories",
]


class RecordReader(Protocol):
    """What a module has to have to be a reader of records that stand alone."""

    ABOUT: About

    def matches(self, record: dict[str, Any]) -> bool:
        """Whether `record` is of this format."""

    def read(self, record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
        """The trajectories that one record holds."""


@runtime_checkable
class FileReader(Protocol):
    """What a module has to have to be a reader of files whose records belong together."""

    ABOUT: About

    def matches(self, record: dict[str, Any]) -> bool:
        """Whether `record`, the first of a file, is of this format."""

    def read_file(self, records: Iterator[Record], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
        """The trajectories that the records of one file hold, in order."""


MAX_FIELDS, MAX_FIELD = 20, 40  # how many fields a refusal names, and how much of each name
READERS: dict[str, RecordReader | FileReader] = {
    "tau-bench": tau_bench,
    "tau2": tau2,
    "swe-agent": swe_agent,
    "mini-swe-agent": mini_swe_agent,
    "auto-code-rover": auto_code_rover,
    "toolbench": toolbench,
    "dars": dars,
    "mint": mint,
    "intercode": intercode,
    "tree-of-thoughts": tree_of_thoughts,
    "pi": pi,
    "atif": atif,
    "harbor-traces": harbor_traces,
    "nemo-gym": nemo_gym,
    "verifiers": verifiers,
    "verifiers-results": verifiers_results,
    "verl": verl,
    "verl-dump": verl_dump,
    "verl-data": verl_data,
    "alpaca": alpaca,
    "sharegpt": sharegpt,
    "ms-swift": ms_swift,
    "llama-factory": llama_factory,
    "openai-preference": openai_preference,
    "trl-preference": trl_preference,
    "trl-labels": trl_labels,
    "trl-packed": trl_packed,
    "trl-grpo": trl_grpo,
    "slime": slime,
    "prime-rl": prime_rl,
    "prime-rl-sft": prime_rl_sft,
    "skyrl": skyrl,
    "skyrl-dump": skyrl_dump,
    "tinker": tinker,
    "tinker-datum": tinker_datum,
    "megatron-rl": megatron_rl,
    "art": art,
    "rllm": rllm,
    "rllm-gateway": rllm_gateway,
    "token-trees": token_trees,
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "otel-genai": otel_genai,
    "langsmith": langsmith,
    "mooncake": mooncake,
    "tokens": tokens,
    "chat": chat,
}


@dataclass(frozen=True, slots=True)
class Unread:
    """A piece of a file and how to read it, here or in another process."""

    piece: Piece
    format: str
    options: ReadOptions

    def trajectories(self) -> Iterator[Trajectory | Skipped]:
        """The trajectories that its records hold, and what was skipped."""
        yield from read_with(READERS[self.format], self.piece.records(), self.options)


@dataclass(frozen=True, slots=True)
class Done:
    """Trajectories that are read already."""

    items: list[Trajectory | Skipped]

    def trajectories(self) -> Iterator[Trajectory | Skipped]:
        """Those trajectories."""
        yield from self.items


def read_trajectories(
    inputs: Iterable[str | Path],
    *,
    format: str = "auto",  # noqa: A002
    reward_key: str | None = None,
    vocab_size: int | None = None,
    train_all: bool = False,
    shapes: bool = False,
    input_hash: InputHash | None = None,
) -> Iterator[Trajectory | Skipped]:
    """The trajectories of all `inputs`, in order, and what was skipped: files, folders, globs, `-` for standard input.

    `format` is a key of `READERS`, or `auto`; `reward_key`, `vocab_size`, `train_all` and `shapes` are those of
    `ReadOptions`. `input_hash` takes up the sha256 of each file as it is read to its end. A file of no known format is
    skipped where it was found by searching a folder that holds others, and refused where it was named.

    Raises:
        TreepackError: an input matches nothing, cannot be read or parsed, or is not of the format.
    """
    options = ReadOptions(reward_key=reward_key, vocab_size=vocab_size, train_all=train_all, shapes=shapes)
    for part in read_parts(inputs, options, format=format, input_hash=input_hash):
        yield from part.trajectories()


def read_parts(
    inputs: Iterable[str | Path],
    options: ReadOptions,
    *,
    format: str = "auto",  # noqa: A002
    input_hash: InputHash | None = None,
) -> Iterator[Unread | Done]:
    """What `read_trajectories` reads, in parts that workers can read, in order.

    The records of a format whose records belong together are read here.

    Raises:
        TreepackError: as `read_trajectories`, but for what is wrong inside of a part.
    """
    check_format(format)
    files, skipped, searched = list_inputs(inputs)
    if skipped:
        yield Done(list(skipped))
    unknown: list[TreepackError] = []
    for path in files:
        pieces = read_pieces(path, input_hash=input_hash)
        try:
            first = next(pieces)
            name = detect_format(next(first.records())) if format == "auto" else format
        except (UnknownFormatError, NoObjectError, NotPlainError) as error:
            if path not in searched or format != "auto":
                raise
            unknown.append(error)
            yield Done([Skipped(displayed(path), "file of no known format")])
            continue
        reader, every = READERS[name], chain([first], pieces)
        if isinstance(reader, FileReader):
            records = (record for piece in every for record in piece.records())
            yield from map(Done, batched(reader.read_file(records, options)))
        else:
            yield from (Unread(piece, name, options) for piece in every)
    if unknown and len(unknown) == len(files):
        raise unknown[0]


def check_format(name: str) -> None:
    """Refuse a name that is neither `auto` nor a key of `READERS`.

    Raises:
        TreepackError: it is neither.
    """
    if name != "auto" and name not in READERS:
        raise TreepackError(f"format '{name}' is not known; expected auto or one that 'treepack formats' lists")


def read_with(
    reader: RecordReader | FileReader, records: Iterator[Record], options: ReadOptions
) -> Iterator[Trajectory | Skipped]:
    """What `reader` makes of the `records` of one file."""
    if isinstance(reader, FileReader):
        yield from reader.read_file(records, options)
        return
    for record in records:
        yield from reader.read(record, options)


class UnknownFormatError(TreepackError):
    """A record is of no known format."""


def detect_format(record: Record) -> str:
    """The first format in `READERS` that `record` matches.

    Raises:
        UnknownFormatError: the record is of no known format; the message then lists its fields.
        TreepackError: the record is a row of a trie or packed directory.
    """
    if "subtree_end" in record.value or {"tree_id", "node_id"} <= record.value.keys():
        raise TreepackError(
            f"{record.source}: is a part of a trie or packed directory; "
            "give the whole directory with its manifest to pack, stats or train, or the rollouts it was made from"
        )
    for name, reader in READERS.items():
        if reader.matches(record.value):
            return name
    raise UnknownFormatError(
        f"{record.source}: not recognised, with the fields {_listed(record.value)}; "
        "see the formats that 'treepack formats' lists"
    )


def _listed(fields: Iterable[str]) -> str:
    """The names of `fields` on one line, of many the first few: documents that are keyed by task have thousands."""
    names = [" ".join(name.split())[:MAX_FIELD] for name in fields]
    more = f" and {len(names) - MAX_FIELDS:,} more" if len(names) > MAX_FIELDS else ""
    return ", ".join(names[:MAX_FIELDS]) + more if names else "no field"
