"""The file of a run, to which trees are appended whole; a run that was killed is continued.

    rollouts.jsonl        one line per leaf, a tree's lines together
    rollouts.jsonl.run    JSON: the options of the run, written before the first tree

`--resume` reads the lines that are there. Trees are complete if all `num_leaves` of their lines are. Only the last tree
can be incomplete, because a killed process stops inside of its last write. Its lines are removed, and everything before
stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from treepack.errors import TreepackError
from treepack.files.directory import finished_file, refuse_inside
from treepack.files.lock import lock
from treepack.files.remote.address import AnyPath, as_output
from treepack.rollout.query import Query
from treepack.rollout.records import name_of_query
from treepack.rollout.servers.dialects import checked_ids
from treepack.trajectory import Int32

FORMAT, VERSION = "treepack-rollouts", 1


@dataclass(slots=True)
class RolloutFile:
    """An open file of rollouts.

    `finished` maps the name of each tree in it (`records.name_of`) to a hash of its prompt. `num_removed` is the number
    of lines of an incomplete tree that were removed when it was opened. `num_appended` counts trees.
    """

    path: Path
    finished: dict[str, bytes] = field(default_factory=dict)
    num_removed: int = 0
    num_appended: int = 0
    _descriptor: int | None = None

    def append(self, lines: bytes) -> None:
        """Write the lines of a tree and wait until they are on the disk; a failed write leaves nothing of them.

        Raises:
            TreepackError: the disk is full or fails.
        """
        size = None
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.fstat(self._descriptor).st_size
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            if self._descriptor is not None and size is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
            raise TreepackError(f"{self.path}: cannot be written ({error.strerror}); free some room") from error
        self.num_appended += 1

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def check_output(out: str | AnyPath, *, resume: bool) -> Path:
    """Return the path of an output without links, before anything slow starts.

    Raises:
        TreepackError: an address, a Parquet name, a directory, a file that exists without `resume`, or a file inside a
            directory that treepack wrote.
    """
    path = as_output(out)
    if not isinstance(path, Path):
        raise TreepackError(
            f"{path}: rollouts are appended while they are sampled, which a store cannot do; give a file on this "
            "machine, and copy it afterwards"
        )
    path = path.resolve()
    if path.suffix == ".parquet":
        raise TreepackError(f"{path}: is written as JSON lines; let its name end in .jsonl")
    if path.is_dir():
        raise TreepackError(f"{path}: is a directory; give the name of a file in it")
    if path.exists() and not resume:
        raise TreepackError(f"{path}: exists; continue its run with --resume, or choose another --out")
    refuse_inside(path)
    return path


@contextmanager
def open_output(out: str | AnyPath, settings: Mapping[str, Any], *, resume: bool) -> Iterator[RolloutFile]:
    """Lock `out`, and open it for new trees; it is created with the first one.

    Args:
        out: file on this machine.
        settings: all options, besides the queries, on which the samples depend, as JSON values.
        resume: continue the file if it exists.

    Raises:
        TreepackError: an address or a Parquet name, a file that exists without `resume`, one that was sampled with
            other `settings`, or whose content is damaged.
    """
    with lock(check_output(out, resume=resume)):
        path = check_output(out, resume=resume)  # again, because another run may have ended before the lock was free
        options = path.with_name(path.name + ".run")
        file = RolloutFile(path)
        if path.exists():
            _check_settings(options, settings, path)
            file = _recovered(path)
        else:
            record = {"format": FORMAT, "version": VERSION, "settings": dict(settings)}
            _write_settings(options, record)
        try:
            yield file
        finally:
            file.close()


def _write_settings(options: Path, record: Mapping[str, Any]) -> None:
    """Write the settings of a run, and wait until they are on the disk: the trees, which are too, need them."""
    with finished_file(options, overwrite=True) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(OSError):  # some network disks refuse it for directories
        descriptor = os.open(options.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _prompt_hash(prompt: Int32) -> bytes:
    """Return a hash of token ids."""
    return hashlib.sha256(np.asarray(prompt, "<i4").tobytes()).digest()


def waiting_queries(queries: list[Query], file: RolloutFile) -> list[Query]:
    """Return the queries that have no tree in `file` yet.

    Raises:
        TreepackError: two queries have one key, or the file has a tree that belongs to none of `queries`, or to one
            whose prompt has changed.
    """
    by_name: dict[str, Query] = {}
    for query in queries:
        if by_name.setdefault(name_of_query(query), query) is not query:
            raise TreepackError(
                f"{query.source or 'a query'}: has the key {query.key}, which an earlier query has too; give it its own"
            )
    for name, digest in file.finished.items():
        found = by_name.get(name)
        if found is None:
            raise TreepackError(
                f"{file.path}: has rollouts of {name}, which the prompts lack; resume with the prompts of its run"
            )
        # An environment makes the prompt later, so it cannot be compared here.
        if len(found.prompt) and _prompt_hash(found.prompt) != digest:
            raise TreepackError(
                f"{file.path}: has rollouts of {name} with another prompt than {found.source or 'its query'}; resume "
                "with the prompts of its run"
            )
    return [query for name, query in by_name.items() if name not in file.finished]


def _check_settings(options: Path, settings: Mapping[str, Any], out: Path) -> None:
    """Compare the settings of a run with the settings in its file.

    Raises:
        TreepackError: the file is missing or damaged, or a setting differs, which is named.
    """
    try:
        record = json.loads(options.read_text(encoding="utf-8"))
        before = record["settings"] if record["format"] == FORMAT and record["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        before = None
    if not isinstance(before, dict):
        raise TreepackError(
            f"{out}: cannot be resumed without {options.name}, which has the options of its run; restore that file, or "
            "choose another --out"
        )
    now = json.loads(json.dumps(dict(settings)))
    for name in [*before, *(name for name in now if name not in before)]:
        if before.get(name) != now.get(name):
            raise TreepackError(
                f"{out}: cannot be resumed, because {name} was {_shown(before.get(name))} when its run started and is "
                f"{_shown(now.get(name))} now; restore it, or choose another --out"
            )


def _shown(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _recovered(path: Path) -> RolloutFile:
    """Read the names of the trees in a file, and remove an incomplete tree at its end.

    Raises:
        TreepackError: a line before the last tree is not one of a rollout.
    """
    finished: dict[str, bytes] = {}
    name, seen, begin, position, num_lines = "", 0, 0, 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                num_lines += 1
                break
            record = _parsed(line, f"{path}:{number}")
            tree, _, leaf = record["rollout_id"].rpartition("/")
            if seen == 0:
                name, begin = tree, position
            if (tree, leaf) != (name, str(seen)) or (seen == 0 and tree in finished):
                raise _damaged(f"{path}:{number}")
            position += len(line)
            seen, num_lines = seen + 1, num_lines + 1
            if seen == record["num_leaves"]:
                finished[name] = _prompt_hash(record["prompt_token_ids"])
                seen, num_lines, begin = 0, 0, position
    if begin < path.stat().st_size:
        os.truncate(path, begin)
    return RolloutFile(path, finished, num_lines)


def _parsed(line: bytes, source: str) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise _damaged(source) from None
    kinds = {"rollout_id": str, "num_leaves": int, "prompt_token_ids": list}
    if not isinstance(record, dict) or any(type(record.get(name)) is not kind for name, kind in kinds.items()):
        raise _damaged(source)
    try:
        return record | {"prompt_token_ids": checked_ids(record["prompt_token_ids"])}
    except (TypeError, ValueError, OverflowError):
        raise _damaged(source) from None


def _damaged(source: str) -> TreepackError:
    return TreepackError(
        f"{source}: is not the line that treepack rollout wrote there; restore the file, or choose another --out"
    )
