"""Input files that are copies of other ones: each rollout is read once, even if its file is in two folders.

    runs/a.jsonl  backup/a.jsonl  runs/b.jsonl   --find_copies-->   {"backup/a.jsonl": "runs/a.jsonl"}

A copy has the bytes of an earlier file. Two rollouts may sample the same text, so equal bytes are not enough:

    a file of one plain conversation      is a copy only if its record has an id as text: a session, a trace, a uuid
    a file of a trial of Harbor           is a copy only if it has the same place in a trial with an equal `result.json`
    files in the folders of two steps     are not copies: `step_1/r.jsonl`, `step_2/r.jsonl`
    a file that is read with others       is not a copy, because the others may differ: the first of several events

Every other file has several records, or a log of steps, spans or samples.

Only files of equal size are opened, and only files with equal ends are read: once for their hash. Memory: one hash and
one size for each file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.inputs import STDIN, displayed
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.files.remote.address import as_path, is_address
from treepack.files.remote.cache import addresses_in
from treepack.files.remote.range_reading import range_reader
from treepack.files.remote.stored_files import object_info
from treepack.ingest.readers.path_steps import step_of_path
from treepack.trajectory import Skipped

COPY = "copy of another file, whose rollouts are read once"
_END = 1 << 16  # bytes of both ends of a file that are compared before the whole
_CHUNK = 1 << 24
# Names of ids that no other rollout has. At the top of a record, further names are such ids too; deeper, they may be
# ids of calls.
_IDS = frozenset("session_id sessionId trace_id traceId run_id span_id spanId uuid conversation_id thread_id".split())
_IDS_AT_TOP = _IDS | frozenset("id trajectory_id rollout_id trial_name episode_id log_id".split())
# Lists of which a record has several rollouts, or one as more than a conversation.
_LISTS = frozenset(
    "samples traces trajectories trajectory simulations rollouts steps nodes spans resourceSpans runs events".split()
)
_MAX_DEPTH = 6
# Formats in which one file represents others of its folder. Outputs of OpenHands with a `history` do not.
_WITH_OTHERS = frozenset({"auto-code-rover", "dars", "openhands", "tau2"})
_RESULTS = ("../result.json", "../../../result.json", "result.json")  # of a trial, from the file of its trajectory


def size_of(path: str) -> int:
    """Return the bytes of a file as stored; 0 for standard input, and for a file that is not there."""
    if path == STDIN:
        return 0
    try:
        if is_address(path):
            entry = object_info(as_path(path))
            return 0 if entry is None else entry.size
        return Path(path).stat().st_size
    except OSError:  # reading it reports the reason
        return 0


def find_copies(sizes: Iterable[tuple[str, int]], format_of: Callable[[Record], str]) -> dict[str, str]:
    """Return the path of the first file for each path that is a copy of one; `sizes` are the files in their order.

    `format_of` returns the name of a record's format, and raises TreepackError if it is not known.

    Raises:
        TreepackError: an object store cannot be reached.
    """
    files = [(path, size) for path, size in sizes if size > 0]
    by_size = _grouped((path, size) for path, size in files)
    ends = ((path, size) for path, size in files if len(by_size[size]) > 1)
    same_ends = _grouped((path, (size, _hash(path, [(0, _END), (max(0, size - _END), _END)]))) for path, size in ends)
    copies: dict[str, str] = {}
    for (size, digest), paths in same_ends.items():
        if len(paths) == 1 or digest is None:
            continue
        chunks = [(start, _CHUNK) for start in range(0, size, _CHUNK)]
        for key, equal in _grouped((path, _identity(path, chunks)) for path in paths).items():
            if len(equal) > 1 and key is not None and _is_unique(equal[0], format_of):
                copies |= dict.fromkeys(equal[1:], equal[0])
    return {path: copies[path] for path, _ in files if path in copies}


def skipped_copies(copies: Mapping[str, str]) -> list[Skipped]:
    """Return what `find_copies` found as files that are not read."""
    return [
        Skipped(shown, COPY, detail=f"{shown}: has the bytes of {_shown(first)}, and is not read", is_rollout=False)
        for shown, first in ((_shown(path), first) for path, first in copies.items())
    ]


def _shown(path: str) -> str:
    return addresses_in(displayed(path))


def _grouped(items: Iterable[tuple[str, Any]]) -> dict[Any, list[str]]:
    """Return the paths of each key, in order."""
    groups: dict[Any, list[str]] = {}
    for path, key in items:
        groups.setdefault(key, []).append(path)
    return groups


def _hash(path: str, blocks: Iterable[tuple[int, int]]) -> str | None:
    """Return the sha256 of blocks of a file, (start, size) each, or None if it cannot be read."""
    sha256 = hashlib.sha256()
    try:
        with range_reader(path) as read:
            for start, size in blocks:
                sha256.update(read(start, size))
    except OSError:
        return None
    return sha256.hexdigest()


def _identity(path: str, chunks: list[tuple[int, int]]) -> tuple[Any, ...] | None:
    """Return what two copies have in common: their bytes, the step of their path and the result of their trial."""
    digest = _hash(path, chunks)
    if digest is None:
        return None
    step = step_of_path(addresses_in(path), "prime-rl")
    results = [] if is_address(path) else [Path(path).parent / name for name in _RESULTS]
    result = next((each for each in results if each.is_file() and each != Path(path)), None)
    if result is None:
        return (digest, step)
    # runs/t1/agent/trajectory.json, whose result is runs/t1/agent/../result.json -> agent/trajectory.json
    place = os.path.relpath(path, os.path.normpath(result.parent))
    return (digest, step, hashlib.sha256(result.read_bytes()).hexdigest(), place)


def _is_unique(path: str, format_of: Callable[[Record], str]) -> bool:
    """Return True if no two rollouts can have the bytes of the file: see the header."""
    try:
        records = list(islice(read_records(path), 2))
        formats = [format_of(record) for record in records[:1]]
    except TreepackError:  # reading it as an input reports the reason
        return False
    if not records or (formats[0] in _WITH_OTHERS and "history" not in records[0].value):
        return False
    if len(records) > 1:
        return True
    value = records[0].value
    return any(isinstance(value.get(name), list) for name in _LISTS) or _has_id(value, _IDS_AT_TOP, _MAX_DEPTH)


def _has_id(value: Any, names: frozenset[str], depth: int) -> bool:
    if isinstance(value, dict):
        if any(isinstance(value.get(name), str) and value[name] for name in names):
            return True
        return depth > 0 and any(_has_id(part, _IDS, depth - 1) for part in value.values())
    return isinstance(value, list) and depth > 0 and any(_has_id(part, _IDS, depth - 1) for part in value)
