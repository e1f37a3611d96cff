"""Raw agent rollouts to trajectories, in parts that workers can read.

    files --records--> Record --Format.trajectories--> Trajectory | Skipped

The format of a file is detected from its records (`recognition`): the first format of `registry.all_formats` that
matches, unless the caller names one or maps columns. The order matters: formats with particular fields have low ranks,
and `tokens`, `chat` and `columns` come last, because records of other formats contain token ids and messages too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import InputHash, displayed, list_inputs
from treepack.files.input_files.ranges import Range
from treepack.files.input_files.record_files import read_blocks
from treepack.files.input_files.records import DAMAGED_FILE, NoObjectError, Record, RecordBlock
from treepack.files.input_files.torch_files import NotPlainError
from treepack.files.remote.address import is_address
from treepack.ingest.readers.column_records import has_columns
from treepack.ingest.readers.columns.aliases import FIELDS
from treepack.ingest.readers.columns.edits import edited
from treepack.ingest.readers.copies import find_copies, size_of, skipped_copies
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.messages.containers import with_containers
from treepack.ingest.readers.path_steps import with_step
from treepack.ingest.readers.recognition import (
    RecognisedFile,
    recognise,
    refuse_own_row,
)
from treepack.ingest.readers.registry import all_formats, check_format, formats_by_name
from treepack.ingest.readers.turn_flags import TurnWeights
from treepack.ingest.readers.unknown_formats import unknown_format, with_suggestion
from treepack.ingest.readers.unread_programs import UnknownFormatError, unread_program
from treepack.processes import batched
from treepack.trajectory import Outcome, Outcomes, Skipped, Trajectory


@dataclass(frozen=True, slots=True)
class UnreadPart:
    """A block of a file that is not read yet, here or in another process, and the name of its format."""

    block: RecordBlock | Range
    format: str
    options: ReadOptions

    def parts(self) -> Iterator[UnreadPart]:
        """Yield the part itself, or if it is a range of a file, the parts of a bounded size that the file contains.

        Raises:
            TreepackError: the file cannot be read any more.
        """
        if isinstance(self.block, Range):
            yield from (replace(self, block=block) for block in self.block.blocks())
        else:
            yield self

    def trajectories(self) -> Outcomes:
        """Read the records of the block."""
        yield from _read_blocks([self.block], self.format, self.options)


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """Trajectories that have been read, and skipped records."""

    items: Sequence[Outcome]

    def parts(self) -> Iterator[FinishedPart]:
        """Yield the part itself."""
        yield self

    def trajectories(self) -> Outcomes:
        """Yield the items."""
        yield from self.items


@dataclass(frozen=True, slots=True)
class WholePart:
    """A directory among the inputs that the caller of `read_parts` reads itself."""

    path: str

    def parts(self) -> Iterator[WholePart]:
        """Yield the part itself."""
        yield self

    def trajectories(self) -> Iterator[Trajectory | Skipped]:
        """Refuse to read it.

        Raises:
            TreepackError: always.
        """
        raise TreepackError(f"{self.path}: is a trie, and only build-trie reads tries; give its rollouts")


@dataclass(frozen=True, slots=True)
class ListedInputs:
    """The files of inputs, after copies were found; or a share of them, if other processes read the others.

    Attributes:
        files: paths and addresses, in order.
        searched: files that a search of a folder found, rather than the caller named.
        skipped: files that are not read.
        whole: directories among the files that are `WholePart`.
        is_share: True if other processes read other files. Then `unknown` is no error.
        turns: as `ReadOptions.turns`, of the files before; reading adds the lines of these files.
        unknown: the errors of files without a known format, added by reading.
    """

    files: Sequence[str]
    searched: Collection[str]
    skipped: Sequence[Skipped] = ()
    whole: Collection[str] = frozenset()
    is_share: bool = False
    turns: dict[str, str] = field(default_factory=dict)
    unknown: list[TreepackError] = field(default_factory=list)


def listed_inputs(
    inputs: Iterable[str | Path],
    *,
    copy: bool = True,
    is_whole: Callable[[str], bool] = lambda _: False,
    sizes: Callable[[list[str]], Iterable[int]] = lambda paths: map(size_of, paths),
) -> ListedInputs:
    """Return the files of `inputs`, without copies of earlier ones; `copy` and `is_whole` are as in `list_inputs`.

    `sizes` returns the bytes of files as stored.

    Raises:
        TreepackError: an input matches nothing, a file occurs twice, or a store cannot be reached.
    """
    files, skipped, searched = list_inputs(inputs, copy=copy, is_whole=is_whole)
    whole = {path for path in files if is_whole(path)}
    read = [path for path in files if path not in whole]
    copies = find_copies(zip(read, sizes(read), strict=True), detect_format)
    kept = [path for path in files if path not in copies]
    return ListedInputs(kept, searched, [*skipped, *skipped_copies(copies)], whole)


def read_parts(
    inputs: Iterable[str | Path] | ListedInputs,
    options: ReadOptions,
    *,
    input_hash: InputHash | None = None,
    as_ranges: bool = False,
    is_whole: Callable[[str], bool] = lambda _: False,
) -> Iterator[UnreadPart | FinishedPart | WholePart]:
    """Yield the trajectories of all `inputs`, in order, in parts that workers can read.

    An input is a file, a folder, a glob, or `-` for standard input. `input_hash` gets the sha256 of each file after the
    whole file is read. A file of no known format is skipped if a search of a folder found it and the folder contains
    other formats. It is refused if the caller named it. A copy of an earlier file is skipped (`copies`). If the records
    of a format belong together, this process reads them, and the part is a `FinishedPart`. With `as_ranges`, parts of
    files that can be split contain no data, and the worker opens the file. A folder that `is_whole` is a `WholePart`.

    Raises:
        TreepackError: an input matches nothing, cannot be read or parsed, or is not of the format; errors inside of an
            `UnreadPart` are raised when it is read.
    """
    check_format(options.format)
    listed = inputs if isinstance(inputs, ListedInputs) else listed_inputs(inputs, is_whole=is_whole)
    options = replace(options, turns=listed.turns)  # this process reads all sessions, in the order of the files
    if input_hash is not None:
        input_hash.bytes_read.expect(path for path in listed.files if path not in listed.whole)
    if listed.skipped:
        yield FinishedPart(list(listed.skipped))
    for path in listed.files:
        if path in listed.whole:
            yield WholePart(path)
            continue
        parts, error = _parts_of_path(
            path,
            options,
            is_searched=path in listed.searched,
            input_hash=input_hash,
            # The local copy of an object may be removed before a worker opens it.
            as_ranges=as_ranges and not is_address(path),
            is_share=listed.is_share,
        )
        yield from parts
        if error is not None:
            listed.unknown.append(error)
    # If no file of a folder has a known format, it is the wrong folder, not a folder with extra files.
    if listed.unknown and len(listed.unknown) == len(listed.files) and not listed.is_share:
        raise listed.unknown[0]


def _parts_of_path(
    path: str,
    options: ReadOptions,
    *,
    is_searched: bool = False,
    input_hash: InputHash | None = None,
    as_ranges: bool = False,
    is_share: bool = False,
) -> tuple[Iterator[UnreadPart | FinishedPart], TreepackError | None]:
    """Return the parts of one file, and the error if it has no known format.

    `is_searched` is True for a file that a search of a folder found; then such an error is only counted. A task reads a
    file of its share without the other objects of the prefix.

    Raises:
        TreepackError: as `read_parts`, or an object of a share has a format that needs the others.
    """
    blocks = read_blocks(path, options.limits, input_hash=input_hash, as_ranges=as_ranges)
    try:
        recognised = recognised_file(blocks, options)
    # An unknown file in a searched folder is skipped and counted; a file that the caller named is an error.
    except (UnknownFormatError, NoObjectError, NotPlainError) as error:
        is_extra = is_searched and options.format == "auto"
        if not is_extra and not options.limits.skip_bad:
            raise
        if is_extra and input_hash is not None:
            input_hash.forget(displayed(path))
        reason = error.reason if isinstance(error, UnknownFormatError) else UnknownFormatError.reason
        extra = Skipped(displayed(path), reason, is_rollout=False)
        part = FinishedPart([extra if is_extra else Skipped(displayed(path), DAMAGED_FILE, detail=str(error))])
        return iter([part]), error
    first = [FinishedPart(recognised.skipped)] if recognised.skipped else []
    if recognised.format is None:
        return iter(first), None
    if is_share and is_searched and is_address(path) and recognised.format.needs_folder:
        raise TreepackError(
            f"{path}: a rollout of the format {recognised.format.name} needs other files of its folder, which a task "
            "on another machine does not see; copy the prefix to a folder that all machines share"
        )
    return chain(first, _parts_of_file(recognised.format.name, recognised.blocks, options)), None


def recognised_file(blocks: Iterator[RecordBlock | Range], options: ReadOptions) -> RecognisedFile:
    """Return the format of a file with these `blocks`.

    Raises:
        TreepackError: as `recognise`.
    """
    return recognise(
        blocks,
        partial(_format_of, options=options),
        refuse=partial(refusal, options=options),
        expected=formats_by_name().get(
            "columns" if options.columns and not options.columns.is_edit else options.format
        ),
        skip_bad=options.limits.skip_bad,
    )


def _parts_of_file(
    name: str, blocks: Iterator[RecordBlock | Range], options: ReadOptions
) -> Iterator[UnreadPart | FinishedPart]:
    if formats_by_name()[name].read_file is None and not formats_by_name()[name].overlaps:
        options = replace(options, turns=None)  # which a part does not need, and a worker would get
        yield from (UnreadPart(block, name, options) for block in blocks)
        return
    # Records that belong together, or may be in an earlier file, cannot be split among workers: passed on in batches.
    yield from map(FinishedPart, batched(_read_blocks(blocks, name, options)))


def _read_blocks(blocks: Iterable[RecordBlock | Range], name: str, options: ReadOptions) -> Outcomes:
    """Read the records of `blocks`; with `skip_bad`, yield the damaged records of a block after its trajectories."""
    damaged: list[Skipped] | None = [] if options.limits.skip_bad else None
    arrays = formats_by_name()[name].arrays
    seen: list[Record] = []  # the first record and the current one, which an error names
    notes: dict[str, None] = {}  # on the current record
    edits, how = (options.columns, replace(options, columns=None)) if _is_edit(options) else (None, options)
    weights = TurnWeights(is_required=formats_by_name()[name].read is not None)

    def records() -> Iterator[Record]:
        for block in blocks:
            for record in block.records(damaged, arrays):
                seen[:] = [*seen[:1], record]
                if edits is not None:
                    record, ignored = edited(record, edits, weights.of_record())
                    notes.update(dict.fromkeys(ignored))
                yield record

    try:
        for item in with_step(formats_by_name()[name].trajectories(records(), how), name):
            if notes and isinstance(item, Trajectory):
                item = replace(item, notes=(*notes, *item.notes))
                notes.clear()
            yield weights.applied(item)
            if damaged:
                yield from damaged
                damaged.clear()
    except TreepackError as error:
        if not seen or not str(error).startswith(f"{seen[-1].source}:"):
            raise
        raise _with_remedy(error, name, seen, options) from error
    for mask in edits.paths.get("mask", ()) if edits is not None and seen else ():
        if not weights.is_used and not mask.is_optional:
            raise TreepackError(f"{seen[0].path}: no turn has {mask.text} (column mask); correct the path")
    yield from damaged or ()


def _is_edit(options: ReadOptions) -> bool:
    return options.columns is not None and options.columns.is_edit


def _with_remedy(error: TreepackError, name: str, seen: Sequence[Record], options: ReadOptions) -> TreepackError:
    """Return `error` about the last record of `seen`, whose file has the format `name`, with what to do about it."""
    found = formats_by_name()[name]
    other = None if found.matches(seen[-1].value) else _format_of(seen[-1], replace(options, columns=None))
    if other not in (None, found) and options.columns is None:
        return TreepackError(
            f"{seen[-1].source}: has the format {other.name}, and the file {name} by its first record; split the file "
            "by format"
        )
    # These formats are recognised by one field, which other layouts have too.
    return with_suggestion(error, seen, options) if name in ("chat", "columns", "tokens") else error


def _format_of(record: Record, options: ReadOptions) -> Format | None:
    """Return the format that the options name if `record` has it, or the first that matches if they name none."""
    if options.columns is not None and options.columns.is_edit:
        record = edited(record, options.columns, TurnWeights())[0]
    elif options.columns is not None:
        return formats_by_name()["columns"] if has_columns(record, options.columns) else None
    refuse_own_row(record)
    record = with_containers(record)
    if options.format == "auto":
        # Particular marks before the formats: a part of such a record may look like one of them, and only this part
        # would be read. Weak marks before the next record: one of its later lines may look like a format too.
        error = unread_program(record, particular=True)
        found = None if error else next((each for each in all_formats() if each.matches(record.value)), None)
        if found is None and (error := error or unread_program(record, particular=False)) is not None:
            raise error
        return found
    named = formats_by_name()[options.format]
    return named if named.matches(record.value) else None


def detect_format(record: Record) -> str:
    """Return the name of the first of `all_formats` that `record` matches.

    Raises:
        UnknownFormatError: no format matches, or another program wrote the record; the message lists its fields, or
            names the program.
        TreepackError: the record is a row of a trie or packed directory.
    """
    found = _format_of(record, ReadOptions())
    if found is None:
        raise refusal([record], ReadOptions())
    return found.name


def refusal(records: Sequence[Record], options: ReadOptions) -> UnknownFormatError:
    """Return the error about records of no known format, with a remedy that was tried on them."""
    return unread_program(records[0], particular=False) or unknown_format(
        list(map(with_containers, records)), all_formats(), _known_fields(), options
    )


@cache
def _known_fields() -> tuple[str, ...]:
    return tuple(sorted({name for each in all_formats() for name in each.required_fields()} | set(FIELDS)))
