"""Checkpoints that a training run can always go on from.

    RUN/checkpoints/
        step-00000010/            whole or absent
            __0_0.distcp ...      the tensors of each rank, as torch.distributed.checkpoint (DCP) writes them
            .metadata             DCP's table of contents
            checkpoint.json       written last: step, ranks, the caller's position; bytes and sha256 of every file
        .step-00000020.partial-*  being written, or left by a process that died; the next run removes it
        step-00000010.replaced-*  only where a process died while it put a step in the place of the same step

    Checkpoints.save --copy to CPU memory--> a thread: write, fsync, hash, checkpoint.json, rename, remove older ones
    latest --every size and hash--> Found --restore--> model, optimiser, random states; the position

Under FSDP2 the parameters are DTensors, each rank writes its shards, and any number of ranks can read them; one process
without torch.distributed writes plain tensors into the same format. All ranks call every function here, and one run
at a time owns a directory. DCP's files hold pickles: restore only what you trust. The order of the data and the
learning rate's schedule belong to the caller, who keeps in `position` what they need.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from treepack import __version__
from treepack.errors import TreepackError
from treepack.files.manifest import file_sha256
from treepack.train.state import load_state, training_state

FORMAT = "treepack-checkpoint"
VERSION = 1
RECORD = "checkpoint.json"

_STEP = re.compile(r"step-(\d{8,})(\.replaced-\w+)?")

T = TypeVar("T")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint on disk: `step` and `position` as they were given to `save`, by `world_size` ranks."""

    path: Path
    step: int
    world_size: int
    position: dict[str, Any]


@dataclass(frozen=True)
class _RankFiles:
    """The processes of the run that `group` joins; this one alone where torch.distributed is not initialised."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, on every rank."""
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    @property
    def collective(self) -> dict[str, Any]:
        """How DCP's save and load are told about the ranks."""
        return {"process_group": self.group, "no_dist": self.size == 1}


def _all_ranks(*, own_group: bool = False) -> _RankFiles:
    if not (dist.is_available() and dist.is_initialized()):
        return _RankFiles(None, 0, 1)
    group = dist.new_group(backend="gloo") if own_group else None
    return _RankFiles(group, dist.get_rank(), dist.get_world_size())


class Checkpoints:
    """The checkpoints that a run writes to `directory`, of which the newest `keep` stay.

    `save` returns once the state is copied to CPU memory, kept for the next copy where there is a GPU; a thread does
    the rest. What goes wrong there is raised by the next call of any method, on every rank.
    """

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        """Make `directory` and remove what a process that died left in it.

        Raises:
            TreepackError: `keep` is less than 1, or the directory cannot be made.
        """
        if keep < 1:
            raise TreepackError(f"keep is {keep}; expected at least 1 checkpoint")
        self._directory = directory
        self._keep = keep
        # The thread's collectives must not mix with those of training, and the copies they are about are on the CPU.
        self._ranks = _all_ranks(own_group=True)
        token, problem = self._ranks.gather(_tidy(directory) if self._ranks.rank == 0 else ("", None))[0]
        if problem:
            raise TreepackError(f"{directory}: cannot hold checkpoints ({problem}); choose another directory")
        self._partial, self._replaced = f".{{}}.partial-{token}", f"{{}}.replaced-{token}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._stager: BlockingAsyncStager | None = None
        self._staged: list[str] = []
        _expect_one_process()

    def save(self, step: int, model: nn.Module, optimiser: torch.optim.Optimizer, position: dict[str, Any]) -> None:
        """Begin to write the checkpoint of `step`, after the one before is finished.

        Args:
            step: number of updates made, which names the checkpoint; one of the same step is replaced.
            model: its parameters and persistent buffers are saved, tied ones once.
            optimiser: its state, if it has one yet, and its parameter groups are saved.
            position: what the caller needs to go on besides, as JSON can hold it; rank 0's is saved.

        Raises:
            TreepackError: the save before this one failed.
        """
        self.wait()
        record = {"step": step, "position": json.loads(json.dumps(position, allow_nan=False))}
        staged = self._copied(training_state(model, optimiser, rank=self._ranks.rank))
        self._pending = self._thread.submit(self._write, staged, record)

    def wait(self) -> None:
        """Return when the last save is finished.

        Raises:
            TreepackError: it failed; the checkpoints before it are as they were.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and give the thread and the process group back.

        Raises:
            TreepackError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._ranks.group is not None:
                dist.destroy_process_group(self._ranks.group)

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy in CPU memory, made when this returns; where there is a GPU, its memory is pinned and used again."""
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if self._stager is None or list(tensors) != self._staged:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
            self._staged = list(tensors)
        return {
            **copy.deepcopy({key: state[key] for key in state.keys() - tensors.keys()}),
            **self._stager.stage(tensors),
        }

    def _write(self, state: dict[str, Any], record: dict[str, Any]) -> None:
        """What the thread does; every rank comes to the same end."""
        path = self._directory / f"step-{record['step']:08d}"
        partial = self._directory / self._partial.format(path.name)
        files, problem = [], None
        try:
            try:
                files = self._write_files(state, partial)
            except (Exception, CheckpointException) as error:
                problem = _reason(error)
            everyone = self._ranks.gather((files, problem))
            problem = next((theirs for _, theirs in everyone if theirs), None)
            if problem is None and self._ranks.rank == 0:
                problem = self._finish(partial, path, record, [entry for own, _ in everyone for entry in own])
            problem = self._ranks.gather(problem)[0]
        except (Exception, CheckpointException) as error:  # a rank that died takes the gathering down
            problem = _reason(error)
        if problem:
            if self._ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise TreepackError(
                f"{path}: the checkpoint could not be written ({problem}); see that its disk is there and has space, "
                "and resume from the checkpoint before it"
            )

    def _write_files(self, state: dict[str, Any], partial: Path) -> list[dict[str, Any]]:
        """DCP's files, synced to disk, and the entries in checkpoint.json of those that this rank wrote."""
        writer = FileSystemWriter(partial, sync_files=True)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        state_dict_saver.save(state, storage_writer=writer, planner=planner, **self._ranks.collective)
        # Each rank lists and hashes its own, which are in its host's memory; a network disk shows them to others late.
        own = set(partial.glob(f"__{self._ranks.rank}_*"))
        if self._ranks.rank == 0:
            own |= {path for path in partial.iterdir() if not path.name.startswith("__")}
        return [{"name": p.name, "bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in sorted(own)]

    def _finish(self, partial: Path, path: Path, given: dict[str, Any], files: list[dict[str, Any]]) -> str | None:
        """Make `partial`, whose files are all there, the checkpoint `path`; returns why that failed."""
        versions = {"treepack": __version__, "torch": torch.__version__, "world_size": self._ranks.size}
        record = {"format": FORMAT, "version": VERSION, **versions, **given, "files": files}
        text = json.dumps(record | {"sha256": _digest(record)}, indent=2, allow_nan=False) + "\n"
        try:
            with (partial / RECORD).open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            _sync(partial)
            if path.exists():
                path.rename(path.with_name(self._replaced.format(path.name)))
            partial.rename(path)
            _sync(self._directory)
        except Exception as error:
            return _reason(error)
        with suppress(OSError):  # the new checkpoint is whole; an old one that stays costs space and nothing else
            self._remove_older(path)
        return None

    def _remove_older(self, written: Path) -> None:
        """Of the checkpoints up to the one just `written`, leave it and the newest that are whole, `keep` in all.

        Later ones are not of this run, or it would have gone on from them: they are damaged, or somebody else's.
        """
        kept = 1
        for path in _candidates(self._directory):
            if path == written or _step(path) > _step(written):
                continue
            if kept < self._keep and _step(path) < _step(written) and _seems_whole(path):
                kept += 1
                continue
            hidden = path.with_name(self._partial.format(path.name))  # a process that dies here leaves no half
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def latest(directory: Path) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """The newest whole checkpoint in `directory`, and a sentence about each newer one that is not; None if none exists.

    Every file's size and hash is compared with checkpoint.json; each rank reads a share of the files.

    Raises:
        TreepackError: there are checkpoints and none is whole.
    """
    ranks = _all_ranks()
    names = ranks.gather([path.name for path in _candidates(directory)] if ranks.rank == 0 else [])[0]
    faults: list[str] = []
    for name in names:
        path = directory / name
        record = ranks.gather(_read_record(path) if ranks.rank == 0 else "")[0]
        if isinstance(record, dict):
            share = (_damage(path, entry, hashed=True) for entry in record["files"][ranks.rank :: ranks.size])
            damage = next((found for found in ranks.gather(next(filter(None, share), None)) if found), None)
            if damage is None:
                notes = tuple(f"{fault}; {name} is used" for fault in faults)
                return SavedCheckpoint(path, record["step"], record["world_size"], record["position"]), notes
            record = damage
        faults.append(f"{directory.name}/{name} is damaged ({record})")
    if faults:
        raise TreepackError(
            f"{directory}: no checkpoint can be used, as {' and '.join(faults)}; put a copy of one back, or remove "
            "the directory to start from the beginning"
        )
    return None, ()


def restore(found: SavedCheckpoint, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Give `model`, `optimiser` and the generators of random numbers the state they had, and return the position.

    Tensors are filled in place, sharded as the model is now. The generators of a rank that did not exist then are left
    alone. Without a state in the checkpoint (no update was made yet) the optimiser has none afterwards.

    Raises:
        TreepackError: the parameters are not those of the checkpoint, or it cannot be read.
    """
    ranks = _all_ranks()
    _expect_one_process()
    try:
        load_state(found.path, model, optimiser, rank=ranks.rank, collective=ranks.collective)
    except (OSError, CheckpointException) as error:
        raise TreepackError(
            f"{found.path}: cannot be read ({_reason(error)}); see that its disk is there, or remove this checkpoint "
            "to go on from an older one"
        ) from error
    return found.position


def _expect_one_process() -> None:
    """Silence DCP's warning that one process is one process.

    For good, because the thread saves too and `warnings.catch_warnings` is not safe in threads.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def _candidates(directory: Path) -> list[Path]:
    """What may be a checkpoint in `directory`, newest first, one that was being replaced after its successor."""
    paths = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)] if directory.is_dir() else []
    return sorted(paths, key=lambda path: (-_step(path), path.name))


def _step(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _tidy(directory: Path) -> tuple[str, str | None]:
    """Make `directory`, remove what dead processes left, and return a name for this one, and what went wrong."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(".step-*.partial-*"):
            shutil.rmtree(path)
    except OSError as error:
        return "", _reason(error)
    # No process id: in a container the dead one often had the same.
    return secrets.token_hex(4), None


def _read_record(path: Path) -> dict[str, Any] | str:
    """checkpoint.json of the checkpoint `path`, or what is wrong with it."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{RECORD} is missing"
    except (OSError, ValueError) as error:
        return f"{RECORD} cannot be read: {_reason(error)}"
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return f"{RECORD} is not of the format {FORMAT}"
    if record.get("version") != VERSION:
        return f"{RECORD} has version {record.get('version')} where this treepack reads version {VERSION}"
    digest = record.pop("sha256", None)
    if digest != _digest(record) or record["step"] != _step(path):
        return f"{RECORD} was altered"
    return record


def _damage(path: Path, entry: dict[str, Any], *, hashed: bool) -> str | None:
    """What is wrong with the file of `path` that `entry` of checkpoint.json is about; None if nothing."""
    file, name = path / entry["name"], entry["name"]
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            return f"{name} is truncated" if size < entry["bytes"] else f"{name} is longer than it was"
        return f"{name} was altered" if hashed and file_sha256(file) != entry["sha256"] else None
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, TreepackError) as error:
        return f"{name} cannot be read: {_reason(error)}"


def _seems_whole(path: Path) -> bool:
    record = _read_record(path)
    return isinstance(record, dict) and not any(_damage(path, entry, hashed=False) for entry in record["files"])


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sync(directory: Path) -> None:
    """Have the names in `directory` on disk, as fsync has the bytes of a file."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _reason(error: BaseException) -> str:
    """In a few words what went wrong: the disk's error where there is one beneath, DCP's and torch's otherwise."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    beneath: BaseException | None = error
    while beneath is not None:  # torch's own writer fails again when it closes a file that could not be written
        if isinstance(beneath, OSError) and beneath.strerror:
            return beneath.strerror
        beneath = beneath.__cause__ or beneath.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'without a message'}"
