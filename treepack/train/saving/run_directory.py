"""The directory of a training run, from its first step to the finished model.

out/run.json         written first: data, model and options, so that only the same run can be resumed
out/metrics.jsonl    a line per optimiser step; see `train.watch.metrics`
out/checkpoints/     see `train.saving.checkpoint`
out/...              weights, config and tokenizer, after training is complete
out/train.json       written last: options, inputs, notes; a directory without it is unfinished

`out` may be an address in an object store. Then run.json is written only if it is absent, and files on their way are in
the folder of a `train.saving.place.Place`.

A resumed run may have more steps than before, even if it was finished. Then run.json gets the new number and train.json
is removed, after the last checkpoint is read and before the first new step.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from treepack import __version__
from treepack.data.mixture import sources_of
from treepack.errors import TreepackError
from treepack.files.directory import RUN, finished_file
from treepack.files.remote import object_store
from treepack.files.remote.address import AnyPath
from treepack.files.remote.object_store import ExistsError
from treepack.files.remote.retries import patiently
from treepack.files.remote.stored_files import clear_folder, is_stored, remove_stored
from treepack.train.options import LENGTH_OPTIONS, TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.saving.choices import ENTRY, chosen_values
from treepack.train.saving.model_stage import model_errors, staged_model
from treepack.train.saving.place import Place
from treepack.train.saving.run_record import (
    FINISHED,
    FORMAT,
    VERSION,
    check_out,
    files_sha256,
    finished_record,
    package_entry,
    read_run_record,
    refuse_differences,
    steps_done,
    text_sha256,
)
from treepack.train.schedule import learning_rate, plan_steps

_log = logging.getLogger("treepack")

# Entries of a model's configuration that depend on its folder and its version of transformers, not on its architecture.
_INCIDENTAL = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


def begin(run: TrainingRun, out: AnyPath, *, overwrite: bool, resume: bool) -> None:
    """Create the directory `out` of `run`, or with `resume` check that an existing one belongs to an equal run.

    Raises:
        TreepackError: `out` exists and may not be replaced, or was written by a run that computes something else.
    """
    check_out(out, inputs=[*run.paths, run.loaded.source], overwrite=overwrite, resume=resume)
    if resume and is_stored(out / RUN):
        refuse_differences(out, _identity(run))
        return
    with _disk_errors(out, "choose another --out"):
        try:
            clear_folder(out, first=FINISHED, last=RUN)
            _write(out / RUN, _run_record(run), is_new=True)
        except ExistsError as error:
            raise TreepackError(f"{out}: another process has just started a run there; choose another --out") from error


def is_complete(out: AnyPath, options: TrainOptions, num_steps: int) -> bool:
    """Return true if the model in `out` is complete, and a run of `num_steps` steps has nothing to add to it.

    Raises:
        TreepackError: train.json is damaged.
    """
    record = finished_record(out)
    if record.get("num_steps") != num_steps:
        return False
    # A run that ended early because of its patience continues if its patience changes.
    return steps_done(record) == num_steps or record["options"].get("patience") == options.patience


def extend_run(run: TrainingRun, out: AnyPath, done: int) -> str | None:
    """Record that the run in `out`, of which `done` steps are done, now has another number of steps; return a note.

    Only the first rank writes. None if the number of steps is the same as before.

    Raises:
        TreepackError: the disk fails.
    """
    before = read_run_record(out / RUN)
    lengths = {name: before["options"][name] for name in LENGTH_OPTIONS}
    old, new = len(plan_steps(run.dataset, replace(run.options, **lengths), run.table)), len(run.schedule)
    if run.ranks.leads:
        with _disk_errors(out):
            same = lengths == {name: getattr(run.options, name) for name in LENGTH_OPTIONS}
            if not same or _values(before) != _values(_run_record(run)):
                _write(out / RUN, _run_record(run))
            remove_stored(out / FINISHED)
    if old == new:
        return None
    if done == 0 or done == new or run.options.min_lr_ratio == 1:
        return f"{old} steps become {new}"
    # Steps are counted from 0 here: step `done - 1` was the last one.
    last, following = learning_rate(run.options, done - 1, old), learning_rate(run.options, done, new)
    return (
        f"{old} steps become {new}, and the learning rate follows the schedule of {new} steps: it was {last:.3g} at "
        f"step {done} and is {following:.3g} at step {done + 1}"
    )


def record_plan(run: TrainingRun, out: AnyPath) -> None:
    """Replace the choices in run.json with those of the run, such as a smaller plan.

    Raises:
        TreepackError: the disk fails.
    """
    with _disk_errors(out):
        _write(out / RUN, {**read_run_record(out / RUN), **chosen_values(run)})


def finish_run(run: TrainingRun, place: Place, outcome: Mapping[str, Any] | None = None) -> None:
    """Move the staged model to its place, and write `train.json` last.

    Args:
        run: the trained run.
        place: its directory.
        outcome: JSON values for `train.json`, such as the last step of a run that ended early.

    Raises:
        TreepackError: the disk or the store fails.
    """
    record = {
        **_identity(run),
        "treepack": __version__,
        "attention": run.loaded.attention,
        "num_steps": len(run.schedule),
        **(outcome or {}),
        "num_ranks": run.ranks.size,
        "options": run.options.as_record(),
        "notes": list(run.notes),
    }
    staged = staged_model(place)
    names = sorted(path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file())
    if isinstance(place.out, Path):
        with model_errors(place):
            for name in names:  # within one file system, so that each file is whole or absent
                (place.out / name).parent.mkdir(exist_ok=True)
                (staged / name).replace(place.out / name)
            shutil.rmtree(staged)
            _write(place.out / FINISHED, record)
    if place.uploads is not None:
        _log.info("uploading the model")
        with place.uploads.kept_on_errors():
            patiently(place.uploads.push)
            patiently(place.uploads.check_owner)
            for name in names:
                place.uploads.send(staged / name, name)
            patiently(lambda: _write(place.out / FINISHED, record))


@contextmanager
def _disk_errors(out: AnyPath, remedy: str = "resume the run") -> Iterator[None]:
    """Turn an error of the disk into a TreepackError."""
    try:
        yield
    except OSError as error:
        raise TreepackError(f"{out}: cannot be written ({error.strerror or error}); {remedy}") from error


def _identity(run: TrainingRun) -> dict[str, Any]:
    """Return the entries that two runs must have in common to compute the same, if they start from equal weights."""
    config = {name: value for name, value in run.loaded.causal.config.to_dict().items() if name not in _INCIDENTAL}
    return {
        "format": FORMAT,
        "version": VERSION,
        "packed": str(run.dataset.path),
        "packed_sha256": files_sha256(run.dataset.manifest["files"]),
        "model": run.loaded.source,
        "config_sha256": text_sha256(json.dumps(config, sort_keys=True, default=str)),
        **({} if run.held_out is None else {"eval_sha256": files_sha256(run.held_out.dataset.manifest["files"])}),
        "options": run.options.fixed_options,
        **package_entry(run.options),
    }


def _run_record(run: TrainingRun) -> dict[str, Any]:
    """Return the content of run.json."""
    held_out = {} if run.held_out is None else {"eval": str(run.held_out.dataset.path)}
    packed = [str(source.path) for source in sources_of(run.dataset)]
    return {
        **_identity(run),
        "treepack": __version__,
        "folder": str(Path.cwd()),
        "inputs": {"packed": packed, "model": run.loaded.source, **held_out},
        "free_options": run.options.free_options,
        **chosen_values(run),
    }


def _values(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a run has chosen, without the reasons, which only the process that measured knows."""
    return {name: value for name, value in record.get(ENTRY, {}).items() if name != "why"}


def _write(path: AnyPath, record: dict[str, Any], *, is_new: bool = False) -> None:
    """Write a record; with `is_new`, only one of several processes can write it to a store."""
    content = (json.dumps(record, indent=2) + "\n").encode()
    if not isinstance(path, Path):
        object_store.write(path, content, expected=None if is_new else object_store.ANY)
        return
    with finished_file(path, overwrite=True) as temporary:
        temporary.write_bytes(content)
