"""Raw agent rollouts to trajectories. Each format is one file in `formats/` and one line in `FORMATS`.

    files --records--> Record --Format.trajectories--> Trajectory | Skipped

The format of a file is detected from its first record (`recognition`): the first format of `FORMATS` that matches,
unless the caller names a format. The order matters. Formats with particular fields come first, and `tokens` and `chat`
come last, because records of other formats contain token ids and messages too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.address import is_address
from treepack.ingest.readers.fields import ReadOptions
from treepack.ingest.readers.files import read_pieces
from treepack.ingest.readers.format import SIMILAR, Format, close_names
from treepack.ingest.readers.formats import (
    alpaca,
    anthropic_messages,
    art,
    atif,
    auto_code_rover,
    chat,
    chatgpt,
    claude_code,
    cline,
    codex,
    dars,
    gemini_cli,
    harbor_traces,
    inspect,
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
    openassistant,
    opencode,
    openhands,
    otel_genai,
    pi,
    prime_rl,
    prime_rl_sft,
    qwen_code,
    rllm,
    rllm_gateway,
    sharegpt,
    skyrl,
    skyrl_dump,
    slime,
    swe_agent,
    tau2,
    tau_bench,
    text_trees,
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
from treepack.ingest.readers.ranges import Range
from treepack.ingest.readers.recognition import UnknownFormatError, lists_of_objects, recognise
from treepack.ingest.readers.records import DAMAGED_FILE, NoObjectError, Piece, Record
from treepack.ingest.readers.torch_files import NotPlainError
from treepack.ingest.readers.unread_programs import program_of
from treepack.processes import batched
from treepack.trajectory import Skipped, Trajectory

__all__ = [
    "FORMATS",
    "FORMAT_OF_NAME",
    "Format",
    "InputHash",
    "ReadOptions",
    "Record",
    "read_parts",
    "read_trajectories",
]

# A refusal lists this many fields of a record, and this many characters of each name: enough to recognise the program,
# and short enough for a terminal. Documents keyed by task have thousands of fields.
MAX_FIELDS, MAX_FIELD = 20, 40

FORMATS: tuple[Format, ...] = (
    tau_bench.FORMAT,
    tau2.FORMAT,
    swe_agent.FORMAT,
    mini_swe_agent.FORMAT,
    auto_code_rover.FORMAT,
    toolbench.FORMAT,
    dars.FORMAT,
    mint.FORMAT,
    intercode.FORMAT,
    tree_of_thoughts.FORMAT,
    pi.FORMAT,
    qwen_code.FORMAT,
    gemini_cli.FORMAT,
    opencode.FORMAT,
    cline.FORMAT,
    claude_code.FORMAT,
    codex.FORMAT,
    openhands.FORMAT,
    inspect.FORMAT,
    atif.FORMAT,
    harbor_traces.FORMAT,
    nemo_gym.FORMAT,
    verifiers.FORMAT,
    verifiers_results.FORMAT,
    verl.FORMAT,
    verl_dump.FORMAT,
    verl_data.FORMAT,
    alpaca.FORMAT,
    sharegpt.FORMAT,
    ms_swift.FORMAT,
    llama_factory.FORMAT,
    openai_preference.FORMAT,
    trl_preference.FORMAT,
    trl_labels.FORMAT,
    trl_packed.FORMAT,
    trl_grpo.FORMAT,
    slime.FORMAT,
    prime_rl.FORMAT,
    prime_rl_sft.FORMAT,
    skyrl.FORMAT,
    skyrl_dump.FORMAT,
    tinker.FORMAT,
    tinker_datum.FORMAT,
    megatron_rl.FORMAT,
    art.FORMAT,
    rllm.FORMAT,
    rllm_gateway.FORMAT,
    token_trees.FORMAT,
    chatgpt.FORMAT,
    openassistant.FORMAT,
    text_trees.FORMAT,
    openai_chat.FORMAT,
    openai_responses.FORMAT,
    anthropic_messages.FORMAT,
    otel_genai.FORMAT,
    langsmith.FORMAT,
    mooncake.FORMAT,
    tokens.FORMAT,
    chat.FORMAT,
)
FORMAT_OF_NAME: dict[str, Format] = {each.name: each for each in FORMATS}
KNOWN_FIELDS = tuple(sorted({name for each in FORMATS for name in each.required_fields()}))


@dataclass(frozen=True, slots=True)
class Unread:
    """A piece of a file that is not read yet, here or in another process, and the name of its format."""

    piece: Piece | Range
    format: str
    options: ReadOptions

    def parts(self) -> Iterator[Unread]:
        """Yield the part itself, or if it is a range of a file, the parts of a bounded size that the file contains.

        Raises:
            TreepackError: the file cannot be read any more.
        """
        if isinstance(self.piece, Range):
            yield from (replace(self, piece=piece) for piece in self.piece.pieces())
        else:
            yield self

    def trajectories(self) -> Iterator[Trajectory | Skipped]:
        """Read the records of the piece."""
        yield from _read_pieces([self.piece], self.format, self.options)


@dataclass(frozen=True, slots=True)
class Done:
    """Trajectories that have been read, and skipped records."""

    items: Sequence[Trajectory | Skipped]

    def parts(self) -> Iterator[Done]:
        """Yield the part itself."""
        yield self

    def trajectories(self) -> Iterator[Trajectory | Skipped]:
        """Yield the items."""
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
    """Read the trajectories of all `inputs`, in order, and a `Skipped` for every record that cannot be used.

    An input is a file, a folder, a glob, or `-` for standard input. `format` is the name of a format, or `auto`.
    `reward_key`, `vocab_size`, `train_all` and `shapes` have the meaning that they have in `ReadOptions`. `input_hash`
    gets the sha256 of each file after the whole file is read. A file of no known format is skipped if a search of a
    folder found it and the folder contains other formats. It is refused if the caller named it.

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
    as_ranges: bool = False,
) -> Iterator[Unread | Done]:
    """Split the work of `read_trajectories` into parts that workers can read, in order.

    If the records of a format belong together, this process reads them, and the part is `Done`. With `as_ranges`, parts
    of files that can be split contain no data, and the worker opens the file.

    Raises:
        TreepackError: as `read_trajectories`, except errors inside an `Unread` part, which reading the part raises.
    """
    check_format(format)
    # `searched` are the files that a search of a folder found, rather than the caller named.
    files, skipped, searched = list_inputs(inputs)
    if input_hash is not None:
        input_hash.bytes_read.expect(files)
    if skipped:
        yield Done(list(skipped))
    unknown: list[TreepackError] = []
    for path in files:
        parts, error = parts_of_path(
            path,
            options,
            format=format,
            is_searched=path in searched,
            input_hash=input_hash,
            # The local copy of an object may be removed before a worker opens it.
            as_ranges=as_ranges and not is_address(path),
        )
        yield from parts
        if error is not None:
            unknown.append(error)
    # If no file of a folder has a known format, it is the wrong folder, not a folder with extra files.
    if unknown and len(unknown) == len(files):
        raise unknown[0]


def parts_of_path(
    path: str,
    options: ReadOptions,
    *,
    format: str = "auto",  # noqa: A002
    is_searched: bool = False,
    input_hash: InputHash | None = None,
    as_ranges: bool = False,
) -> tuple[Iterator[Unread | Done], TreepackError | None]:
    """Return the parts of one file, and the error if it has no known format.

    `is_searched` is True for a file that a search of a folder found; then such an error is only counted.

    Raises:
        TreepackError: as `read_parts`.
    """
    pieces = read_pieces(
        path,
        input_hash=input_hash,
        max_size=options.max_record_size,
        skip_bad=options.skip_bad,
        as_ranges=as_ranges,
    )
    try:
        recognised = recognise(
            pieces,
            partial(_format_of, format=format),
            expected=FORMAT_OF_NAME.get(format),
            skip_bad=options.skip_bad,
        )
    # An unknown file in a searched folder is skipped and counted; a file that the caller named is an error.
    except (UnknownFormatError, NoObjectError, NotPlainError) as error:
        is_extra = is_searched and format == "auto"
        if not is_extra and not options.skip_bad:
            raise
        extra = Skipped(displayed(path), "file of no known format", is_rollout=False)
        part = Done([extra if is_extra else Skipped(displayed(path), DAMAGED_FILE, detail=str(error))])
        return iter([part]), error
    first = [Done(recognised.skipped)] if recognised.skipped else []
    if recognised.format is None:
        return iter(first), None
    return chain(first, _parts_of_file(recognised.format.name, recognised.pieces, options)), None


def _parts_of_file(name: str, pieces: Iterator[Piece | Range], options: ReadOptions) -> Iterator[Unread | Done]:
    if FORMAT_OF_NAME[name].read_file is None:
        yield from (Unread(piece, name, options) for piece in pieces)
        return
    # Records that belong together cannot be split among workers; they are passed on in batches.
    yield from map(Done, batched(_read_pieces(pieces, name, options)))


def _read_pieces(pieces: Iterable[Piece | Range], name: str, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the records of `pieces`; with `skip_bad`, yield the damaged records of a piece after its trajectories."""
    damaged: list[Skipped] | None = [] if options.skip_bad else None
    arrays = FORMAT_OF_NAME[name].arrays
    records = (record for piece in pieces for record in piece.records(damaged, arrays))
    for item in FORMAT_OF_NAME[name].trajectories(records, options):
        yield item
        if damaged:
            yield from damaged
            damaged.clear()
    yield from damaged or ()


def _format_of(record: Record, format: str) -> Format:  # noqa: A002
    """Return the format with the name `format`, or the first one that matches `record` if the name is "auto".

    Raises:
        UnknownFormatError: `record` has another format, or none that is known.
    """
    if format == "auto":
        return FORMAT_OF_NAME[detect_format(record)]
    if not FORMAT_OF_NAME[format].matches(record.value):
        raise UnknownFormatError(f"{record.source}: is not of the format {format}")
    return FORMAT_OF_NAME[format]


def check_format(name: str) -> None:
    """Refuse a name that is neither `auto` nor the name of a format.

    Raises:
        TreepackError: the name is unknown.
    """
    if name != "auto" and name not in FORMAT_OF_NAME:
        raise TreepackError(f"format '{name}' is not known; expected auto or a name that 'treepack formats' lists")


def detect_format(record: Record) -> str:
    """Return the name of the first format in `FORMATS` that `record` matches.

    Raises:
        UnknownFormatError: no format matches; the message lists the fields of the record.
        TreepackError: the record is a row of a trie or packed directory.
    """
    # The columns of a packed row, and of a node of a trie. Both have token ids, so `tokens` would match them.
    if "subtree_end" in record.value or {"tree_id", "node_id"} <= record.value.keys():
        raise TreepackError(
            f"{record.source}: is a part of a trie or packed directory; "
            "give the whole directory with its manifest to pack, stats or train, or the rollouts it was made from"
        )
    for each in FORMATS:
        if each.matches(record.value):
            return each.name
    if (program := program_of(record.value)) is not None:
        raise UnknownFormatError(
            f"{record.source}: is a log of {program}, which treepack does not read; write each conversation as one "
            "record with messages (format chat)"
        )
    fields = f"but the fields {_list_fields(record.value)}" if record.value else "because it has no fields"
    raise UnknownFormatError(f"{record.source}: has no known format, {fields}; {_remedy(record.value)}")


def _remedy(value: dict[str, Any]) -> str:
    """Return the remedy for a record of no known format, by its fields: a misspelt name, or lists inside a document."""
    if similar := close_names(value, KNOWN_FIELDS):
        (name,) = difflib.get_close_matches(similar[0], KNOWN_FIELDS, 1, SIMILAR)
        return f"rename '{similar[0]}' if it is '{name}'; 'treepack formats' lists the formats and their fields"
    if names := lists_of_objects(value):
        return (
            f"write each element of {' or '.join(names)} as one record, if these are the rollouts; 'treepack formats' "
            "lists the formats and their fields"
        )
    return "'treepack formats' lists the formats and their fields"


def _list_fields(fields: Iterable[str]) -> str:
    """Join the names of `fields` on one line, at most `MAX_FIELDS` of them."""
    names = [" ".join(name.split())[:MAX_FIELD] for name in fields]
    # 25 fields -> the first 20 "and 5 more"
    more = f" and {len(names) - MAX_FIELDS:,} more" if len(names) > MAX_FIELDS else ""
    return ", ".join(names[:MAX_FIELDS]) + more
