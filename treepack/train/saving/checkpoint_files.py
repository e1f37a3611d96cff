"""The files of one checkpoint: the name of its directory, its record, and damage to them.

    step-00000010/checkpoint.json --read_record--> record, or the fault
    record["files"] --find_damage--> None, or the fault of one file

    {"format": "treepack-checkpoint", "version": 2, "treepack": ..., "torch": ..., "world_size": 8, "step": 10,
     "position": {...}, "groups": [{"lr": 1e-05, ...}, ...],
     "files": [{"name": "rank-00000-000.safetensors", "bytes": 4711, "sha256": ...}, ...], "sha256": ...}

The last entry is the hash of all other entries, so that an altered record is noticed too. A fault is a few words for
the middle of a sentence. `train.saving.checkpoint` writes checkpoints and decides which one to use.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from treepack import __version__
from treepack.errors import TreepackError
from treepack.files.manifest import file_sha256
from treepack.files.remote.address import AnyPath
from treepack.train.saving.checkpoint_tensors import FILE_NAME

FORMAT = "treepack-checkpoint"
VERSION = 2
CHECKPOINTS = "checkpoints"  # their folder in the directory of a run
RECORD = "checkpoint.json"

# "step-00000010" and "step-00000010.replaced-1f2e3d4c", but not ".step-00000010.partial-1f2e3d4c"
_STEP = re.compile(r"step-(\d{8,})(\.replaced-\w+)?")


def list_steps(directory: Path) -> list[Path]:
    """Return the paths of possible checkpoints in `directory`, newest first, a replaced one after its successor."""
    paths = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)] if directory.is_dir() else []
    # step-00000010, step-00000010.replaced-1f2e3d4c, step-00000020 -> 20, 10, 10.replaced
    return sorted(paths, key=lambda path: (-_step_of(path), path.name))


def _step_of(path: Path) -> int:
    """Return the step of a path from `list_steps`."""
    step = step_of_name(path.name)
    assert step is not None
    return step


def step_of_name(name: str) -> int | None:
    """Return the step of the name of a checkpoint, None if it is another name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def write_record(path: Path, fields: dict[str, Any], files: list[dict[str, Any]], *, world_size: int) -> None:
    """Write checkpoint.json into the directory `path`, and flush the file and the directory to disk.

    Args:
        path: directory of the checkpoint, which already contains all other files.
        fields: `step`, `position` and `groups`.
        files: name, bytes and sha256 of every other file.
        world_size: number of ranks that wrote them.

    Raises:
        OSError: the disk fails.
    """
    versions = {"treepack": __version__, "torch": torch.__version__, "world_size": world_size}
    record = {"format": FORMAT, "version": VERSION, **versions, **fields, "files": files}
    text = json.dumps(record | {"sha256": _digest(record)}, indent=2, allow_nan=False) + "\n"
    with (path / RECORD).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_names(path)


def file_entries(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the entries of files in checkpoint.json, in the order of `paths`."""
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter to other threads
        hashes = list(pool.map(file_sha256, paths))
    return [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256}
        for path, sha256 in zip(paths, hashes, strict=True)
    ]


def read_record(path: Path) -> dict[str, Any] | str:
    """Return checkpoint.json of the checkpoint `path`, or its fault.

    Raises:
        TreepackError: as `parse_record`.
    """
    try:
        return parse_record((path / RECORD).read_bytes(), path)
    except FileNotFoundError:
        return f"{RECORD} is missing"
    except OSError as error:
        return f"{RECORD} cannot be read: {describe_error(error)}"


def parse_record(content: bytes, path: AnyPath) -> dict[str, Any] | str:
    """Return the record with this content of the checkpoint `path`, or its fault.

    Raises:
        TreepackError: it is undamaged, and a treepack with another version of the format wrote it.
    """
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"{RECORD} cannot be read: {describe_error(error)}"
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return f"{RECORD} does not have the format {FORMAT}"
    digest = record.pop("sha256", None)
    # The step is compared too, because a renamed directory has an intact record.
    if digest != _digest(record) or record.get("step") != step_of_name(path.name):
        return f"{RECORD} was altered"
    if record.get("version") != VERSION:
        writer = str(record.get("treepack"))[:20]
        raise TreepackError(
            f"{path}: treepack {writer} wrote this checkpoint in version {record.get('version')} of its format, and "
            f"this treepack reads version {VERSION}; finish the run with treepack {writer}, or start a new --out"
        )
    kinds = {"world_size": int, "position": dict, "groups": list, "files": list}
    if any(type(record.get(field)) is not kind for field, kind in kinds.items()):
        return f"{RECORD} has wrong fields"
    is_whole = record["files"] and all(map(_is_entry, record["files"]))
    return record if is_whole else f"{RECORD} has wrong entries of files"


def _is_entry(entry: Any) -> bool:
    """Return True for a file with tensors in the directory itself: nothing else is read, or copied from a store."""
    kinds = {"name": str, "bytes": int, "sha256": str}
    if not isinstance(entry, dict) or any(type(entry.get(field)) is not kind for field, kind in kinds.items()):
        return False
    return FILE_NAME.fullmatch(entry["name"]) is not None


def find_damage(path: Path, entry: dict[str, Any], *, hashed: bool) -> str | None:
    """Return the fault of the file in `path` that `entry` of checkpoint.json describes, or None.

    Args:
        path: directory of the checkpoint.
        entry: name, bytes and sha256 of the file.
        hashed: compare the hash too, which reads the whole file; the size alone costs no reading.
    """
    file, name = path / entry["name"], entry["name"]
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            return f"{name} is truncated" if size < entry["bytes"] else f"{name} is longer than it was"
        return f"{name} was altered" if hashed and file_sha256(file) != entry["sha256"] else None
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, TreepackError) as error:
        return f"{name} cannot be read: {describe_error(error)}"


def has_all_files(path: Path) -> bool:
    """Return true if the record of `path` is intact and all files have their size; their hashes are not compared."""
    try:
        record = read_record(path)
    except TreepackError:  # of another version
        return False
    return isinstance(record, dict) and not any(find_damage(path, entry, hashed=False) for entry in record["files"])


def sync_names(directory: Path) -> None:
    """Flush the names in `directory` to disk; fsync of a file flushes only its bytes."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_error(error: BaseException) -> str:
    """Return the cause of an error in a few words: our sentence, the reason of the disk, or the type."""
    if isinstance(error, TreepackError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'without a message'}"


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
