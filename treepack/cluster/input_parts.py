"""Parts of input files that tasks on other machines read: no byte of the input passes through this process.

    list_files(inputs)          --> InputFile, ...      paths and addresses only
    survey(file, ...)           --> SurveyedFile        in a task: ranges of the file and its sha256, or the whole file
    group_parts(files, bytes)   --> InputPart, ...      of about equal size, in order
    part.parts(hash, unknown)   --> Unread | Done, ...  in a task

A survey of plain JSONL or Parquet reads the file once: it hashes the file, numbers the lines and cuts it into ranges.
All other files are one block: they are read and hashed by the task that parses them. Paths must name the same file on
each machine. Of an object in a store, a survey streams all bytes, and later tasks fetch ranges; only files that are one
block are copied to the machine of their task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.input_files import ranges
from treepack.files.input_files.byte_streams import COMPRESSION
from treepack.files.input_files.inputs import STDIN, InputHash, displayed, list_inputs, unreadable
from treepack.files.input_files.ranges import LineRange, Range, RowGroups
from treepack.files.input_files.records import DamagedBlock
from treepack.files.input_files.remote_inputs import named_by_address
from treepack.files.remote.address import as_path, is_address
from treepack.files.remote.cache import borrowed_copy
from treepack.files.remote.range_reading import range_reader
from treepack.files.remote.stored_files import object_info
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import FinishedPart, UnreadPart, parts_of_path
from treepack.trajectory import Skipped

# Formats that read further files of the folder, which a copy of one object lacks.
_WITH_FILES_BESIDE = frozenset({"atif", "auto-code-rover", "dars", "openhands", "tau2", "verifiers-results"})


@dataclass(frozen=True, slots=True)
class InputFile:
    """A path or an address; `is_searched` is True if a search of a folder found it."""

    path: str
    is_searched: bool


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file that one task reads: its bytes as stored."""

    file: InputFile
    size: int

    def parts(
        self, how: ReadOptions, input_hash: InputHash, unknown: list[TreepackError]
    ) -> Iterator[UnreadPart | FinishedPart]:
        """Read the file; put its hash into `input_hash`, and its error into `unknown` if it has no known format.

        Raises:
            TreepackError: as `parts_of_path`; or the format needs other objects of the prefix.
        """
        path = self.file.path
        with borrowed_copy(as_path(path)) as local:
            # The path of a local file must stay as it was given, because messages and sources contain it.
            read_path = str(local) if is_address(path) else path
            parts, error = parts_of_path(read_path, how, is_searched=self.file.is_searched, input_hash=input_hash)
            if error is not None:
                unknown.append(error)
            for part in parts:
                if isinstance(part, UnreadPart):
                    _refuse_beside(self.file, part.format)
                yield part


@dataclass(frozen=True, slots=True)
class SurveyedFile:
    """A file as one whole, or its parts with their sizes in bytes, its sha256 and its version in the object store.

    `size` is that of the whole file as stored. `error` is set if the file has no known format, which is an error only
    if no other file has one.
    """

    file: InputFile
    blocks: list[tuple[WholeFile | UnreadPart | FinishedPart, int]]
    size: int
    sha256: str | None = None
    version: str | None = None
    error: TreepackError | None = None


@dataclass(frozen=True, slots=True)
class InputPart:
    """Part of the input for one task: successive blocks of files, and the versions of the objects among the files."""

    blocks: list[WholeFile | UnreadPart | FinishedPart]
    size: int
    versions: dict[str, str]

    def parts(
        self, how: ReadOptions, input_hash: InputHash, unknown: list[TreepackError]
    ) -> Iterator[UnreadPart | FinishedPart]:
        """Read the blocks in bounded steps; the arguments have the meaning that they have in `WholeFile.parts`.

        Raises:
            TreepackError: bad input; or an object was replaced after the survey.
        """
        for address, version in self.versions.items():
            entry = object_info(as_path(address))
            if entry is None or entry.version != version:
                raise TreepackError(f"{address}: was replaced while it was read; run the command again")
        for block in self.blocks:
            yield from block.parts(how, input_hash, unknown) if isinstance(block, WholeFile) else block.parts()


def list_files(inputs: Iterable[str | Path]) -> tuple[list[InputFile], list[Skipped]]:
    """Return the files of `inputs` in order, and the files of folders that are not read.

    Raises:
        TreepackError: an input matches nothing, a file occurs twice, or an input is standard input.
    """
    files, skipped, searched = list_inputs(inputs, copy=False)
    if STDIN in files:
        raise TreepackError("standard input cannot be read by other machines; write it to a file that they see")
    return [InputFile(path, path in searched) for path in files], skipped


def survey(file: InputFile, how: ReadOptions, max_bytes: int) -> SurveyedFile:
    """Cut a file into ranges of at most about `max_bytes`, and hash it; or return it as a whole.

    Raises:
        TreepackError: the file cannot be read, is damaged, is not seen by this machine, or has no known format and was
            named by the caller.
    """
    entry = object_info(as_path(file.path)) if is_address(file.path) else None
    size = _local_size(file) if entry is None else entry.size
    whole = SurveyedFile(file, [(WholeFile(file, size), size)], size)
    if size < ranges.MIN_FILE or not _may_have_ranges(file.path, how):
        return whole
    digest = InputHash()
    parts, unknown = parts_of_path(file.path, how, is_searched=file.is_searched, input_hash=digest, as_ranges=True)
    blocks: list[tuple[WholeFile | UnreadPart | FinishedPart, int]] = []
    for part in _join_adjacent(parts, max_bytes):
        if isinstance(part, UnreadPart) and isinstance(part.block, Range):
            _refuse_beside(file, part.format)
            blocks.append((part, part.block.size))
        elif unknown is not None or _is_skipped(part):
            blocks.append((_with_addresses(part), 0))
        else:
            # A file that cannot be cut, records that belong together, or a list inside of a document.
            return whole
    hashes = digest.files
    sha256, version = hashes[0][1] if hashes else None, None if entry is None else entry.version
    return SurveyedFile(file, blocks, size, sha256, version, unknown)


def _may_have_ranges(path: str, how: ReadOptions) -> bool:
    """Return False for a file that is never cut, before more than its first line is read."""
    if is_address(path):
        with range_reader(path) as read:
            return read(0, 2) not in COMPRESSION
    try:
        return ranges.plan_ranges(path, how.limits, None) is not None
    except OSError as error:
        raise unreadable(displayed(path), error) from error


def _local_size(file: InputFile) -> int:
    """Return the size of a file of this machine, or of one that all machines share.

    Raises:
        TreepackError: it cannot be read.
    """
    try:
        return Path(file.path).stat().st_size
    except FileNotFoundError as error:  # it was there when the inputs were listed
        raise TreepackError(
            f"{displayed(file.path)}: a worker does not see this file; give an address (s3://...), or a folder "
            "that all machines share"
        ) from error
    except OSError as error:
        raise unreadable(displayed(file.path), error) from error


def group_parts(files: Sequence[SurveyedFile], size: int) -> Iterator[InputPart]:
    """Yield the blocks of all `files` in parts of about `size` bytes, in order."""
    blocks: list[WholeFile | UnreadPart | FinishedPart] = []
    versions: dict[str, str] = {}
    total = 0
    for file in files:
        for block, num_bytes in file.blocks:
            if blocks and total + num_bytes > size:
                yield InputPart(blocks, total, versions)
                blocks, versions, total = [], {}, 0
            blocks.append(block)
            total += num_bytes
            if file.version is not None:
                versions[file.file.path] = file.version
    if blocks:
        yield InputPart(blocks, total, versions)


def _with_addresses(part: UnreadPart | FinishedPart) -> UnreadPart | FinishedPart:
    """Return a part of skipped records with addresses instead of local copies."""
    if isinstance(part, FinishedPart):
        return FinishedPart([named_by_address(item) for item in part.items])
    assert isinstance(part.block, DamagedBlock)
    skipped = named_by_address(part.block.skipped)
    assert isinstance(skipped, Skipped)
    return replace(part, block=DamagedBlock(skipped))


def _is_skipped(part: UnreadPart | FinishedPart) -> bool:
    """Return True if a part has only records that are skipped, which are few."""
    if isinstance(part, FinishedPart):
        return all(isinstance(item, Skipped) for item in part.items)
    return isinstance(part.block, DamagedBlock)


def _join_adjacent(parts: Iterator[UnreadPart | FinishedPart], max_bytes: int) -> Iterator[UnreadPart | FinishedPart]:
    """Yield `parts` with adjacent ranges of lines joined up to `max_bytes`."""
    last: UnreadPart | None = None
    for part in parts:
        joined = None if last is None else _join(last, part, max_bytes)
        if joined is not None:
            last = joined
            continue
        if last is not None:
            yield last
        last = part if isinstance(part, UnreadPart) else None
        if last is None:
            yield part
    if last is not None:
        yield last


def _join(first: UnreadPart, second: UnreadPart | FinishedPart, max_bytes: int) -> UnreadPart | None:
    if isinstance(second, FinishedPart) or first.format != second.format:
        return None
    a, b = first.block, second.block
    # Lines 1 .. 3 in bytes [0, 90) and lines 4 .. 9 in bytes [90, 200) -> lines 1 .. 9 in bytes [0, 200).
    if isinstance(a, LineRange) and isinstance(b, LineRange):
        if a.offset + a.size == b.offset and a.size + b.size <= max_bytes:
            return replace(first, block=replace(a, size=a.size + b.size))
    elif (
        isinstance(a, RowGroups)
        and isinstance(b, RowGroups)
        and a.groups[-1] + 1 == b.groups[0]
        and a.size + b.size <= max_bytes
    ):
        return replace(first, block=replace(a, groups=a.groups + b.groups, size=a.size + b.size))
    return None


def _refuse_beside(file: InputFile, format: str) -> None:  # noqa: A002
    """Refuse a format whose records need other objects of the same prefix.

    Raises:
        TreepackError: with the remedy.
    """
    if file.is_searched and is_address(file.path) and format in _WITH_FILES_BESIDE:
        raise TreepackError(
            f"{file.path}: a rollout of the format {format} needs other files of its folder, which a task on another "
            "machine does not see; copy the prefix to a folder that all machines share"
        )
