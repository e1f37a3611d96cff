"""Raw rollouts in object stores: the files that an address, a prefix or a glob names.

    s3://bucket/a.jsonl        one object      its address; copied when it is read
    s3://bucket/run-*.jsonl    a glob          the same for each match
    s3://bucket/rollouts       a prefix        local copies of its small files, and the addresses of its large ones

Some formats read further files of the same folder. These are small, so the copies of a prefix have the same folders.
Large files are copied one by one when they are read, so that all of them together may be larger than the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.directory import is_hidden_output
from treepack.files.remote import object_store
from treepack.files.remote.address import AnyPath, as_path, is_address
from treepack.files.remote.cache import addresses_in, copies_below, recent_copy
from treepack.files.remote.object_store import ObjectInfo
from treepack.trajectory import Outcome, Skipped

LARGE = 1 << 26  # bytes


def expand_address(
    name: str, unread: Callable[[str], str | None], *, copy: bool = True
) -> tuple[list[str], list[Skipped], list[str]]:
    """Return the files that an address names, the objects of prefixes that are not read, and the files from prefixes.

    Args:
        name: an address, which may be a glob.
        unread: returns why a file of this name is not read, None if it is.
        copy: copy the small files of prefixes; otherwise all files are addresses.

    Raises:
        TreepackError: nothing is there, the scheme is not accepted, or the store cannot be reached.
    """
    path = as_path(name)
    if isinstance(path, Path):
        return [str(path)], [], []  # of file://, which no glob follows
    files, skipped, searched = list[str](), list[Skipped](), list[str]()
    for match, objects in object_store.find_objects(path):
        if any(is_hidden_output(part) for part in match.path.split("/") if part not in path.path.split("/")):
            continue
        if objects is None:
            files.append(str(match))
            continue
        below, others, found = _search_prefix(match, objects, unread, copy)
        files += below
        skipped += others
        searched += found
    if not files:
        raise TreepackError(f"{name}: no such object or prefix, and no glob that matches one; check the address")
    return files, skipped, searched


def _search_prefix(
    prefix: AnyPath, objects: dict[str, ObjectInfo], unread: Callable[[str], str | None], copy: bool
) -> tuple[list[str], list[Skipped], list[str]]:
    # Hidden outputs belong to a command that writes below this prefix now, or that was killed.
    objects = {name: entry for name, entry in objects.items() if not any(map(is_hidden_output, name.split("/")))}
    reasons = {name: unread(name) for name in objects}
    skipped = [
        Skipped(str(prefix / name), reason, is_rollout=False) for name, reason in reasons.items() if reason is not None
    ]
    read = {name: entry for name, entry in objects.items() if reasons[name] is None}
    if not read:
        raise TreepackError(f"{prefix}: contains no file to read; check the address and the file extensions")
    small = {name: entry for name, entry in read.items() if copy and entry.size < LARGE}
    copies = copies_below(prefix, small) if small else {}
    files = [str(copies[name]) if name in copies else str(prefix / name) for name in read]
    return files, skipped, files


def named_by_address(sample: Outcome) -> Outcome:
    """Return `sample` with the address of its object as the source, if it was read from a copy."""
    source = addresses_in(sample.source)
    if isinstance(sample, Skipped) and (detail := addresses_in(sample.detail)) != sample.detail:
        sample = replace(sample, detail=detail)
    return sample if source == sample.source else replace(sample, source=source)


def opened_path(path: str) -> str:
    """Return the path by which an input is opened: a copy of an object that is read now; other paths are unchanged.

    Raises:
        TreepackError: the object does not exist, or the store cannot be reached.
    """
    if not is_address(path):
        return path
    target = as_path(path)
    return str(target if isinstance(target, Path) else recent_copy(target))
