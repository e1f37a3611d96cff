"""Checkpoints of a training run, from which it can continue after any crash.

    RUN/checkpoints/
        step-00000010/                      whole or absent
            rank-00000-000.safetensors ...  the tensors that each rank wrote, see `train.saving.checkpoint_tensors`
            checkpoint.json                 written last: step, ranks, groups of the optimiser, the caller's position;
                                            bytes and sha256 of every file
        .step-00000020.partial-*            being written, or left by a process that died; the next run removes it
        step-00000010.replaced-*            left only by a process that died while it replaced a step by the same step

    Checkpoints.save --copy to CPU memory--> a thread: write, fsync, hash, checkpoint.json, commit, remove older ones
    latest --check every size and hash--> SavedCheckpoint --restore--> model, optimiser, random states; the position

The checkpoints are in a directory or in an object store, see `train.saving.checkpoint_targets`. Under FSDP2 the
parameters are DTensors, each rank writes its parts, and any number of ranks can read them; one process without
torch.distributed writes whole tensors. All ranks must call every function of this module, and only one run at a time
may use a target. No file of a checkpoint can contain code: there are safetensors and JSON. The caller stores in
`position` everything that the order of the data and the learning rate need.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from treepack.errors import TreepackError
from treepack.train.saving.checkpoint_files import (
    describe_error,
    file_entries,
    step_of_name,
    write_record,
)
from treepack.train.saving.checkpoint_ranks import all_ranks
from treepack.train.saving.checkpoint_targets import CheckpointTarget, as_target
from treepack.train.saving.checkpoint_tensors import TensorPart, write_parts
from treepack.train.saving.state import SavedCheckpoint, load_state, training_state

_T = TypeVar("_T")


class Checkpoints:
    """The checkpoints that a run writes to a target, of which the newest `keep` are kept.

    `save` returns after the state is copied to CPU memory (on a GPU machine the memory is pinned and used again), and a
    thread writes the copy. An error of this thread is raised by the next call of any method, on every rank.
    """

    def __init__(self, place: Path | CheckpointTarget, *, keep: int = 2) -> None:
        """Remove unfinished checkpoints that a dead process left in `place`, which is created if it is a directory.

        Raises:
            TreepackError: `keep` is less than 1, the directory cannot be created, or the store fails.
        """
        if keep < 1:
            raise TreepackError(f"keep is {keep}; expected at least 1 checkpoint")
        self._target, self._keep = as_target(place), keep
        self._best: int | None = None
        # A separate group: the collectives of the thread must not mix with the collectives of training, which run at
        # the same time. gloo, because the copies are on the CPU.
        self._ranks = all_ranks(new_group=True)
        try:
            self._ranks.lead(lambda: _described(lambda: self._target.clear(None)))
        except TreepackError as error:
            raise TreepackError(
                f"{self._target.name}: cannot hold checkpoints ({error}); choose another directory"
            ) from error
        # Not the process id: in a container the process that died often had the same.
        self._token = self._ranks.lead(lambda: secrets.token_hex(4))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._stager: BlockingAsyncStager | None = None
        self._staged: list[str] = []

    def save(
        self,
        step: int,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        position: dict[str, Any],
        *,
        best: int | None = None,
    ) -> None:
        """Start to write the checkpoint of `step`, after the previous one is finished.

        Args:
            step: number of updates so far, which names the checkpoint; an existing one of the same step is replaced.
            model: its parameters and persistent buffers are saved, tied ones once.
            optimiser: its state, if it has one yet, and its parameter groups are saved.
            position: JSON values that the caller needs to continue; the values of rank 0 are saved.
            best: the step of a checkpoint to keep however old it is.

        Raises:
            TreepackError: the save before this one failed.
        """
        self.wait()
        self._best = best  # the thread reads it, and is idle now
        parts, groups = training_state(model, optimiser, rank=self._ranks.rank)
        position = json.loads(json.dumps(position, allow_nan=False))
        record = {"step": step, "position": position, "groups": groups}
        self._pending = self._thread.submit(self._write, self._copy_to_cpu(parts), record)

    def wait(self) -> None:
        """Wait until the last save is finished.

        Raises:
            TreepackError: it failed; the checkpoints before it are unchanged.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and release the thread and the process group.

        Raises:
            TreepackError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._ranks.group is not None:
                dist.destroy_process_group(self._ranks.group)

    def _copy_to_cpu(self, parts: dict[str, TensorPart]) -> dict[str, TensorPart]:
        """Copy the state to CPU memory, complete on return; on a GPU machine the memory is pinned and used again."""
        # The first update adds tensors of the optimiser, for which the stager's cached memory has no place.
        if self._stager is None or list(parts) != self._staged:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
            self._staged = list(parts)
        copies = self._stager.stage({name: part.tensor for name, part in parts.items()})
        return {name: replace(part, tensor=copies[name]) for name, part in parts.items()}

    def _write(self, parts: dict[str, TensorPart], record: dict[str, Any]) -> None:
        """Write the checkpoint; runs in the thread and succeeds or fails on all ranks alike.

        Raises:
            TreepackError: any rank failed.
        """
        ranks, target, name = self._ranks, self._target, f"step-{record['step']:08d}"
        folder = target.folder / f".{name}.partial-{self._token}"
        try:
            ranks.lead(lambda: _described(lambda: target.clear(name)))
            written = ranks.together(lambda: _described(lambda: self._write_files(parts, folder, name)))
            files = [entry for entries in written for entry in entries]
            ranks.lead(lambda: _described(lambda: self._finish(folder, name, record, files)))
        except Exception as error:  # of any rank; or the gathering fails, because a rank died
            raise target.failure(folder, name, describe_error(error)) from error
        shutil.rmtree(folder, ignore_errors=True)  # if it did not get the name of the checkpoint

    def _write_files(self, parts: dict[str, TensorPart], folder: Path, name: str) -> list[dict[str, Any]]:
        """Write and store the files of this rank; return their entries in checkpoint.json."""
        folder.mkdir(parents=True, exist_ok=True)
        files = write_parts(parts, folder, rank=self._ranks.rank)
        # Each rank hashes its files, because they are in the memory of its host and because a network disk shows them
        # to other hosts late.
        entries = file_entries(files)
        self._target.put(folder, name, files)
        return entries

    def _finish(self, folder: Path, name: str, record: dict[str, Any], files: list[dict[str, Any]]) -> None:
        """Write the record into `folder`, which has all other files, and complete the checkpoint."""
        write_record(folder, record, files, world_size=self._ranks.size)
        self._target.commit(folder, name, keep=self._keep, best=self._best)


def _described(function: Callable[[], _T]) -> _T:
    """Return the result of `function`; its error becomes the TreepackError that `RankGroup.together` shares."""
    try:
        return function()
    except Exception as error:
        raise TreepackError(describe_error(error)) from error


def latest(
    place: Path | CheckpointTarget, *, step: int | None = None
) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, or None, and a note on each newer damaged one.

    The size and hash of every file are compared with checkpoint.json; each rank reads a part of the files.

    Args:
        place: directory of the checkpoints, or their target.
        step: only the checkpoint of this step counts.

    Raises:
        TreepackError: there are checkpoints and all of them are damaged, another version of treepack wrote them, or
            the store fails.
    """
    target, ranks = as_target(place), all_ranks()
    names = [name for name in ranks.lead(target.steps) if step is None or step_of_name(name) == step]
    faults: list[str] = []
    for name in names:
        record = ranks.lead(partial(target.record, name))
        if isinstance(record, dict):
            results = ranks.together(partial(target.fetch, name, record, ranks))
            damage = next((fault for _, fault in results if fault), None)
            if damage is None:
                notes = tuple(f"{fault}; {name} is used" for fault in faults)
                files = tuple(entry["name"] for entry in record["files"])
                fields = {key: record[key] for key in ("step", "world_size", "position", "groups")}
                path, _ = results[ranks.rank]
                return SavedCheckpoint(path, **fields, files=files, is_copy=target.is_copied), notes
            record = damage
        faults.append(f"{target.name.name}/{name} is damaged ({record})")
    if faults:
        raise TreepackError(
            f"{target.name}: no checkpoint can be used, because {' and '.join(faults)}; put back a copy of one, "
            "or remove the directory to start from the first step"
        )
    return None, ()


def restore(checkpoint: SavedCheckpoint, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the state of `model`, `optimiser` and the random generators from `checkpoint`, and return its position.

    Tensors are filled in place and keep the sharding that the model has now. The generators of a rank that did not
    exist when the checkpoint was written are unchanged. If the checkpoint has no optimiser state, because it was
    written before the first update, the optimiser has no state afterwards. A copy from a store is removed.

    Raises:
        TreepackError: model and checkpoint have different parameters, or the checkpoint cannot be read.
    """
    ranks = all_ranks()

    def load() -> None:
        try:
            load_state(checkpoint, model, optimiser, rank=ranks.rank)
        except OSError as error:
            raise TreepackError(
                f"{checkpoint.path}: cannot be read ({describe_error(error)}); check that its disk is mounted, or "
                "remove this checkpoint to continue from an older one"
            ) from error

    ranks.together(load)
    if checkpoint.is_copy:
        shutil.rmtree(checkpoint.path.parent, ignore_errors=True)
    return checkpoint.position
