"""A share of the input of `build-trie --ray`: whole files, of which one task builds a trie in a separate directory.

    cut_shares(files, bytes)                 --> Share, Share, TRIE, Share     in the order of the input
    build_share(share, job, earlier)         --> ShareRecord                   in a task
        FOLDER/HASH-RANDOM/                      the trie of the share, if it has a trajectory
        FOLDER/HASH.json                         the record, which is written last and completes the share

HASH depends on the options and on names and versions of the files. So a task that runs again, or a command that starts
again, finds a share that was built before. Two attempts at once write equal tries under two names, and the record names
one of them.

Sessions of agents copy answers of other sessions, and each answer is trained once. So if there are several shares, a
share with sessions is only parsed at first, and returns the answers that it has. The command finds which ones an
earlier share has, and gives them to the second task, which builds the trie.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.directory import finished_directory
from treepack.files.input_files.inputs import InputHash, displayed
from treepack.files.manifest import Provenance
from treepack.files.remote.address import AnyPath, as_path, is_address
from treepack.files.remote.cache import naming_addresses
from treepack.files.remote.stored_files import object_info, read_stored, write_stored
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import NoTrajectoryError, ReadLog
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import FinishedPart, ListedInputs, UnreadPart, WholePart, read_parts
from treepack.tokenise.tokenization import TokenisationJob
from treepack.trie.builders.builder import TrieBuilder
from treepack.trie.builders.earlier_tries import reading_entry
from treepack.trie.directory import built_totals

_SHARED = "give an address (s3://...), or a folder that all machines share"

_Part = UnreadPart | FinishedPart | WholePart


@dataclass(frozen=True, slots=True)
class FileState:
    """Bytes of a file as stored, and its version: the time of the last change, or the version that a store returns."""

    size: int
    version: str | None  # None if the file does not exist, which reading it reports


def state_of(path: str) -> FileState:
    """Return the state of a file or an object."""
    if is_address(path):
        entry = object_info(as_path(path))
        return FileState(0, None) if entry is None else FileState(entry.size, entry.version)
    try:
        status = Path(path).stat()
    except OSError:
        return FileState(0, None)
    return FileState(status.st_size, str(status.st_mtime_ns))


@dataclass(frozen=True, slots=True)
class Share:
    """Successive files with their states; a search of a folder found those `searched`."""

    files: tuple[tuple[str, FileState], ...]
    searched: frozenset[str]

    @property
    def size(self) -> int:
        """Bytes of the files as stored."""
        return sum(state.size for _, state in self.files)


@dataclass(frozen=True, slots=True)
class ShareJob:
    """Settings of all shares; `key` is a hash of all that change the result, and tries are written to `folder`."""

    files: ReadOptions
    tokenise: TokenisationJob
    build: BuildOptions
    key: str
    folder: AnyPath


@dataclass(frozen=True, slots=True)
class ShareRecord:
    """Facts about a share that was read.

    Attributes:
        trie: name of the directory of its trie, None without a trajectory.
        is_built: False if the share has sessions, and only `turns` are known.
        turns: the answers of its sessions, as `ReadOptions.turns`.
        log: the log of reading, as `ReadLog.as_record`.
        files: the sha256 of each file that was read.
        num_tokens: tokens of all trajectories.
        unknown: the first error if no file has a known format.
    """

    trie: str | None
    is_built: bool
    turns: list[str]
    log: Mapping[str, Any] = field(default_factory=lambda: ReadLog().as_record())
    files: list[str] = field(default_factory=list)
    num_tokens: int = 0
    unknown: str | None = None


def cut_shares(listed: ListedInputs, states: Mapping[str, FileState], share_bytes: int) -> list[Share | str]:
    """Return the files of `listed` in shares of at most `share_bytes` or one file, and the tries among them."""
    sources: list[Share | str] = []
    files: list[tuple[str, FileState]] = []
    size = 0

    def finish() -> None:
        nonlocal size
        if files:
            sources.append(Share(tuple(files), frozenset(path for path, _ in files if path in listed.searched)))
        files.clear()
        size = 0

    for path in listed.files:
        if path in listed.whole:
            finish()
            sources.append(path)
            continue
        if size + states[path].size > share_bytes:
            finish()
        files.append((path, states[path]))
        size += states[path].size
    finish()
    return sources


@naming_addresses()
def build_share(share: Share, job: ShareJob, earlier: Sequence[str] | None) -> ShareRecord:
    """Build the trie of a share in the folder of the job, unless it is there; return its record.

    `earlier` are the answers of sessions that an earlier share has too. If it is None, a share with sessions is not
    built.

    Raises:
        TreepackError: bad input, a file that this machine does not see, or the folder cannot be written.
    """
    key = _key(share, job, earlier or ())
    place = job.folder / f"{key}.json"
    content = read_stored(place)
    if content is not None:
        return ShareRecord(**json.loads(content))
    _refuse_unseen(share, job.folder)
    files, turns = [path for path, _ in share.files], dict.fromkeys(earlier or (), "")
    listed = ListedInputs(files, share.searched, is_share=True, turns=turns)
    digest = InputHash()
    parts: Iterator[_Part] = read_parts(listed, job.files, input_hash=digest)
    if earlier is None:
        parts = _without_sessions(parts, listed.turns)
    name = f"{key}-{secrets.token_hex(4)}"
    try:
        trie, log, num_tokens = _build(parts, job, digest, job.folder / name)
    except _SessionsError:
        return ShareRecord(None, False, sorted(listed.turns))
    record = ShareRecord(
        trie=name if trie else None,
        is_built=True,
        turns=sorted(listed.turns.keys() - set(earlier or ())),
        log=log.as_record(),
        files=[sha256 for _, sha256 in digest.files],
        num_tokens=num_tokens,
        unknown=str(listed.unknown[0]) if len(listed.unknown) == len(files) else None,
    )
    try:
        write_stored(place, json.dumps(asdict(record)).encode())
    except OSError as error:
        raise TreepackError(
            f"{job.folder}: cannot be written by a worker ({error.strerror or error}); give --out an address "
            "(s3://...), or a folder that all machines share"
        ) from error
    return record


def _key(share: Share, job: ShareJob, earlier: Sequence[str]) -> str:
    files = [[path, asdict(state), path in share.searched] for path, state in share.files]
    return hashlib.sha256(json.dumps([job.key, files, sorted(earlier)]).encode()).hexdigest()[:32]


def _build(parts: Iterator[_Part], job: ShareJob, digest: InputHash, trie: AnyPath) -> tuple[bool, ReadLog, int]:
    """Write the trie of `parts`, if there is a trajectory; return True, the log of reading, and the tokens."""
    log = ReadLog()
    try:
        with (
            finished_directory(trie) as temporary,
            TrieBuilder(parts, job.tokenise, job.build, input_hash=digest, folder=temporary) as builder,
        ):
            built = builder.read(log, None)
            totals = built_totals(built)
            entries = Provenance(
                totals=totals,
                input={"sha256": digest.hexdigest(), "num_files": digest.num_files},
                reading=reading_entry(log, digest),
            )
            builder.write(built, temporary, entries)
    except NoTrajectoryError:
        return False, log, 0
    return True, log, totals["tokens_flat"]


class _SessionsError(Exception):
    """A share has sessions, and answers that earlier shares have too are not known."""


def _without_sessions(parts: Iterator[_Part], turns: Mapping[str, str]) -> Iterator[_Part]:
    """Yield `parts`, whose reading fills `turns` if one of them is a session; then read the rest without tokenising.

    Raises:
        _SessionsError: there is a session.
    """
    try:
        for part in parts:
            if turns:
                for _ in parts:
                    pass
                break
            yield part
    except TreepackError:
        if not turns:
            raise  # else the task that builds the trie reports it
    if turns:
        raise _SessionsError


def _refuse_unseen(share: Share, folder: AnyPath) -> None:
    """Refuse files that the command sees and this machine does not.

    Raises:
        TreepackError: naming the first one.
    """
    if isinstance(folder, Path) and not folder.is_dir():
        raise TreepackError(f"{folder.parent}: a worker does not see this folder of --out; {_SHARED}")
    for path, state in share.files:
        if state.version is not None and not is_address(path) and not Path(path).exists():
            raise TreepackError(f"{displayed(path)}: a worker does not see this file; {_SHARED}")
