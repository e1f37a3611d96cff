"""Checkpoints of a training run, from which it can continue after any crash.

    RUN/checkpoints/
        step-00000010/            whole or absent
            __0_0.distcp ...      the tensors of each rank, as torch.distributed.checkpoint (DCP) writes them
            .metadata             DCP's table of contents
            model.safetensors     only of the last step: a hard link to the weights of the saved model
            checkpoint.json       written last: step, ranks, the caller's position; bytes and sha256 of every file
        .step-00000020.partial-*  being written, or left by a process that died; the next run removes it
        step-00000010.replaced-*  left only by a process that died while it replaced a step by the same step

    Checkpoints.save --copy to CPU memory--> a thread: write, fsync, hash, checkpoint.json, rename, remove older ones
    latest --check every size and hash--> SavedCheckpoint --restore--> model, optimiser, random states; the position

If the run is in an object store, the directory is one of each rank on its machine. Its files are uploaded and removed
from there, see `train.saving.checkpoint_upload`, and `latest` copies the newest checkpoint back.

Under FSDP2 the parameters are DTensors, each rank writes its shards, and any number of ranks can read them; one process
without torch.distributed writes plain tensors into the same format. All ranks must call every function of this module,
and only one run at a time may use a directory. DCP's files contain pickles, and `train.saving.checkpoint_pickles` reads
them without running code. The caller stores in `position` everything that the order of the data and the learning rate
need.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import secrets
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from treepack.errors import TreepackError
from treepack.train.saving.checkpoint_files import (
    RECORD,
    describe_error,
    file_entries,
    find_damage,
    has_all_files,
    list_steps,
    read_record,
    step_of,
    step_of_name,
    sync_names,
    write_record,
)
from treepack.train.saving.checkpoint_ranks import RankGroup, all_ranks
from treepack.train.saving.checkpoint_upload import CheckpointUpload
from treepack.train.saving.checkpoint_weights import link_weights
from treepack.train.saving.state import load_state, training_state


@dataclass(frozen=True)
class SavedCheckpoint:
    """A whole checkpoint on disk, written by `world_size` ranks: `step` and `position` are the arguments of `save`."""

    path: Path
    step: int
    world_size: int
    position: dict[str, Any]


class Checkpoints:
    """The checkpoints that a run writes to `directory`, of which the newest `keep` are kept.

    `save` returns after the state is copied to CPU memory (on a GPU machine the memory is pinned and used again), and a
    thread writes the copy. An error of this thread is raised by the next call of any method, on every rank.
    """

    def __init__(self, directory: Path, *, keep: int = 2, upload: CheckpointUpload | None = None) -> None:
        """Create `directory` and remove unfinished checkpoints that a dead process left in it, or in the store.

        Args:
            directory: the checkpoints; with `upload` a directory of this rank alone, for files on their way.
            keep: number of checkpoints to keep.
            upload: the upload to an object store.

        Raises:
            TreepackError: `keep` is less than 1, the directory cannot be created, or the store fails.
        """
        if keep < 1:
            raise TreepackError(f"keep is {keep}; expected at least 1 checkpoint")
        self._directory, self._upload = directory, upload
        self._keep = keep
        self._best: int | None = None
        # A group of its own: the collectives of the thread must not mix with the collectives of training, which run at
        # the same time. gloo, because the copies are on the CPU.
        self._ranks = all_ranks(new_group=True)
        is_own = self._ranks.rank == 0 or upload is not None
        prepared = self._ranks.gather(_prepare_directory(directory) if is_own else ("", None))
        token, problem = prepared[0][0], next((each for _, each in prepared if each), None)
        problem = problem or self._clear(None)
        if problem:
            name = directory if upload is None else upload.prefix
            raise TreepackError(f"{name}: cannot hold checkpoints ({problem}); choose another directory")
        # step-00000010 -> .step-00000010.partial-1f2e3d4c and step-00000010.replaced-1f2e3d4c
        self._partial, self._replaced = f".{{}}.partial-{token}", f"{{}}.replaced-{token}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._stager: BlockingAsyncStager | None = None
        self._staged: list[str] = []
        _expect_one_process()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        position: dict[str, Any],
        *,
        best: int | None = None,
        saved_model: Path | None = None,
    ) -> None:
        """Start to write the checkpoint of `step`, after the previous one is finished.

        Args:
            step: number of updates so far, which names the checkpoint; an existing one of the same step is replaced.
            model: its parameters and persistent buffers are saved, tied ones once.
            optimiser: its state, if it has one yet, and its parameter groups are saved.
            position: JSON values that the caller needs to continue; the values of rank 0 are saved.
            best: the step of a checkpoint to keep however old it is.
            saved_model: the directory to which `model` was just saved; its weight files are linked, not written again.

        Raises:
            TreepackError: the save before this one failed.
        """
        self.wait()
        self._best = best  # the thread reads it, and is idle now
        record = {"step": step, "position": json.loads(json.dumps(position, allow_nan=False))}
        without = saved_model is not None
        state = training_state(model, optimiser, rank=self._ranks.rank, without_weights=without)
        self._pending = self._thread.submit(self._write, self._copy_to_cpu(state), record, saved_model)

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

    def _copy_to_cpu(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the state to CPU memory, complete on return; on a GPU machine the memory is pinned and used again."""
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        # The first update adds tensors of the optimiser, for which the stager's cached memory has no place.
        if self._stager is None or list(tensors) != self._staged:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
            self._staged = list(tensors)
        return {
            **copy.deepcopy({key: state[key] for key in state.keys() - tensors.keys()}),
            **self._stager.stage(tensors),
        }

    def _write(self, state: dict[str, Any], record: dict[str, Any], saved_model: Path | None) -> None:
        """Write the checkpoint; runs in the thread and succeeds or fails on all ranks alike.

        Raises:
            TreepackError: any rank failed.
        """
        path = self._directory / f"step-{record['step']:08d}"
        partial = self._directory / self._partial.format(path.name)
        files = []
        try:
            problem = self._clear(path.name)
            try:
                if problem is None:
                    files = self._write_files(state, partial, saved_model)
                    if self._upload is not None:
                        self._upload.send(partial, path.name, files)
            except (Exception, CheckpointException) as error:
                problem = self._describe(error)
            results = self._ranks.gather((files, problem))
            problem = next((each for _, each in results if each), None)
            if problem is None and self._ranks.rank == 0:
                problem = self._finish(partial, path, record, [entry for entries, _ in results for entry in entries])
            problem = self._ranks.gather(problem)[0]
        except (Exception, CheckpointException) as error:  # the gathering fails if a rank died
            problem = describe_error(error)
        if problem and self._upload is not None:
            raise TreepackError(
                f"{self._upload.prefix / path.name}: the checkpoint could not be uploaded ({problem}); its files are "
                f"kept in {self._upload.keep()}, and --resume continues from the checkpoint before it"
            )
        if self._ranks.rank == 0 or self._upload is not None:
            shutil.rmtree(partial, ignore_errors=True)
        if problem:
            raise TreepackError(
                f"{path}: the checkpoint could not be written ({problem}); check that its disk is mounted and has free "
                "space, and resume from the checkpoint before it"
            )

    def _clear(self, step: str | None) -> str | None:
        """Remove unfinished checkpoints from the store, and the checkpoint `step`; return the error, on every rank."""
        if self._upload is None:
            return None
        upload, leads = self._upload, self._ranks.rank == 0
        try:
            self._ranks.together(lambda: upload.clear(step) if leads else None)
        except TreepackError as error:
            return str(error)
        return None

    def _write_files(self, state: dict[str, Any], partial: Path, saved_model: Path | None) -> list[dict[str, Any]]:
        """Write DCP's files to disk; return the entries in checkpoint.json of the files that this rank wrote."""
        writer = FileSystemWriter(partial, sync_files=True)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        state_dict_saver.save(state, storage_writer=writer, planner=planner, **self._ranks.collective)
        if self._ranks.rank == 0 and saved_model is not None:
            link_weights(saved_model, partial)
        # Each rank lists and hashes its files, because they are in the memory of its host and because a network disk
        # shows them to other hosts late. Rank 0 adds .metadata, which it wrote for all ranks.
        paths = set(partial.glob(f"__{self._ranks.rank}_*"))
        if self._ranks.rank == 0:
            paths |= {path for path in partial.iterdir() if not path.name.startswith("__")}
        return file_entries(sorted(paths))

    def _finish(self, partial: Path, path: Path, fields: dict[str, Any], files: list[dict[str, Any]]) -> str | None:
        """Write the record into `partial`, which has all other files, and rename it to `path`; return an error."""
        try:
            write_record(partial, fields, files, world_size=self._ranks.size)
            if self._upload is not None:
                self._upload.complete(partial, path.name, keep=self._keep, best=self._best)
                return None
            # A directory cannot replace another in one step. If the process dies between the two renames, `latest`
            # uses the one with the suffix .replaced-*.
            if path.exists():
                path.rename(path.with_name(self._replaced.format(path.name)))
            partial.rename(path)
            sync_names(self._directory)
        except Exception as error:
            return self._describe(error)
        with suppress(OSError):  # the new checkpoint is whole; an old one that stays only costs space
            self._remove_older(path)
        return None

    def _describe(self, error: BaseException) -> str:
        # A sentence about the store has its own remedy.
        is_sentence = self._upload is not None and isinstance(error, TreepackError)
        return str(error) if is_sentence else describe_error(error)

    def _remove_older(self, written: Path) -> None:
        """Remove old checkpoints: keep the one just `written`, the newest whole ones before it, in total `keep`, and
        the best one.

        Later ones are kept. They do not belong to this run, which would have continued from them: they are damaged, or
        another run wrote them.
        """
        # keep 2, after writing 30: 10, 20, 20.replaced-*, 30, 40 -> 20, 30, 40
        # the same if 20 is damaged: 10, 20, 20.replaced-*, 30, 40 -> 20.replaced-*, 30, 40
        num_kept = 1
        for path in list_steps(self._directory):
            if path == written or step_of(path) > step_of(written):
                continue
            if step_of(path) == self._best and has_all_files(path):
                continue
            if num_kept < self._keep and step_of(path) < step_of(written) and has_all_files(path):
                num_kept += 1
                continue
            # Renamed first: a process that dies while it deletes must not leave half a checkpoint under a valid name.
            hidden = path.with_name(self._partial.format(path.name))
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def latest(
    directory: Path, store: CheckpointUpload | None = None, *, step: int | None = None
) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, or None if there is none, and a note on each newer damaged one.

    The size and hash of every file are compared with checkpoint.json; each rank reads a part of the files.

    Args:
        directory: directory of the checkpoints; with `store` a directory for copies, which ranks may share.
        store: the checkpoints in an object store.
        step: only the checkpoint of this step counts.

    Raises:
        TreepackError: there are checkpoints and all of them are damaged, or the store fails.
    """
    ranks = all_ranks()
    names = ranks.together(lambda: _names(directory, store) if ranks.rank == 0 else [])[0]
    names = [name for name in names if step is None or step_of_name(name) == step]
    faults: list[str] = []
    for name in names:
        read = functools.partial(_record, directory, store, name)
        record = ranks.together(read if ranks.rank == 0 else str)[0]
        if isinstance(record, dict):
            # A copy has a directory for each content.
            digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
            path = directory / (name if store is None else f"{name}-{digest[:16]}")
            check = functools.partial(_check_share, path, store, name, record["files"], ranks)
            damage = next(filter(None, ranks.together(check)), None)
            if damage is None:
                notes = tuple(f"{fault}; {name} is used" for fault in faults)
                return SavedCheckpoint(path, record["step"], record["world_size"], record["position"]), notes
            record = damage
        faults.append(f"{directory.name}/{name} is damaged ({record})")
    if faults:
        where = directory if store is None else store.prefix
        raise TreepackError(
            f"{where}: no checkpoint can be used, because {' and '.join(faults)}; put back a copy of one, "
            "or remove the directory to start from the first step"
        )
    return None, ()


def _names(directory: Path, store: CheckpointUpload | None) -> list[str]:
    """Return the names of possible checkpoints, newest first."""
    if store is None:
        return [path.name for path in list_steps(directory)]
    return [name for name, files in store.steps().items() if RECORD in files]


def _record(directory: Path, store: CheckpointUpload | None, name: str) -> dict[str, Any] | str:
    return read_record(directory / name) if store is None else store.record(name)


def _check_share(
    path: Path, store: CheckpointUpload | None, name: str, files: list[dict[str, Any]], ranks: RankGroup
) -> str | None:
    """Check this rank's share of the files, or copy them from the store; return the fault of one, or None."""
    if store is not None:
        return store.fetch(name, files, path, first=ranks.rank)
    # 5 files and 2 ranks: rank 0 checks files 0, 2, 4 and rank 1 files 1, 3.
    share = (find_damage(path, entry, hashed=True) for entry in files[ranks.rank :: ranks.size])
    return next(filter(None, share), None)


def restore(checkpoint: SavedCheckpoint, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Load the state of `model`, `optimiser` and the random generators from `checkpoint`, and return its position.

    Tensors are filled in place and keep the sharding that the model has now. The generators of a rank that did not
    exist when the checkpoint was written are unchanged. If the checkpoint has no optimiser state, because it was
    written before the first update, the optimiser has no state afterwards.

    Raises:
        TreepackError: model and checkpoint have different parameters, or the checkpoint cannot be read.
    """
    ranks = all_ranks()
    _expect_one_process()
    try:
        load_state(checkpoint.path, model, optimiser, rank=ranks.rank, collective=ranks.collective)
    except (OSError, CheckpointException) as error:
        raise TreepackError(
            f"{checkpoint.path}: cannot be read ({describe_error(error)}); check that its disk is mounted, or remove "
            "this checkpoint to continue from an older one"
        ) from error
    return checkpoint.position


def _expect_one_process() -> None:
    """Silence DCP's warning that torch.distributed is not in use, until the process ends."""
    # Not with `warnings.catch_warnings`, which is not safe in threads: the thread saves too.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def _prepare_directory(directory: Path) -> tuple[str, str | None]:
    """Create `directory` and remove unfinished checkpoints; return a name for this process, and the error or None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(".step-*.partial-*"):
            shutil.rmtree(path)
    except OSError as error:
        return "", describe_error(error)
    # Not the process id: in a container the process that died often had the same.
    return secrets.token_hex(4), None
