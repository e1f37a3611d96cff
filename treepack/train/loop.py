"""A minimal trainer: packed rows in, a directory that from_pretrained loads out.

    run.open_run(packed, model, options) -> TrainingRun     unsuitable data, models and options are refused here
    for metrics in train(run, out): ...                     one StepMetrics per optimiser step

The loss of an optimiser step is the sum over its rows of weight * nll, divided by the sum of all their weights. It is
one global mean: it does not depend on how trajectories are packed into rows, on the ranks that compute the rows, or on
the order of accumulation. The losses of reinforcement learning and preferences are in `objectives.losses` and
follow the same rule. Rows are shuffled by seed and epoch. Rows of one training step (the `step` column) stay together,
these steps keep their order, and an optimiser step never mixes two of them.

A step whose loss or gradient is not finite changes no weights and is counted. `train.step` carries out one step,
`train.saving.run_directory` defines the files of a run, and `train.saving.checkpoint` saves and restores its state. The
library prints nothing: notes are in `TrainingRun.notes`, and the logger `treepack` names each part of a run that takes
long.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath
from treepack.train.evaluation import HeldOutScore
from treepack.train.optimiser import make_optimiser
from treepack.train.retry import FittingRun
from treepack.train.run import TrainingRun
from treepack.train.sampling_check import compare_dtypes, compare_sampling
from treepack.train.saving.checkpoint import Checkpoints, SavedCheckpoint, latest, restore
from treepack.train.saving.checkpoint_files import CHECKPOINTS
from treepack.train.saving.checkpoint_upload import CheckpointUpload
from treepack.train.saving.long_parts import long_part
from treepack.train.saving.model_stage import stage_after_training, stage_before_checkpoint, staged_model
from treepack.train.saving.place import METRICS, Place, open_place
from treepack.train.saving.run_directory import (
    begin,
    extend_run,
    finish_run,
    is_complete,
    record_plan,
)
from treepack.train.saving.run_record import already_finished, is_finished, refuse_fewer_steps
from treepack.train.step import StepMetrics, step_memory_errors
from treepack.train.watch.metrics import MetricsLog

_log = logging.getLogger("treepack")


def train(
    run: TrainingRun,
    out: str | AnyPath | Place,
    *,
    overwrite: bool = False,
    resume: bool = False,
    stop: Callable[[], bool] | None = None,
    note: Callable[[str], None] | None = None,
) -> Iterator[StepMetrics]:
    """Train the model, and yield after every optimiser step; the model in `out` is complete after the last step.

    Every rank of the run must call this function and consume the whole iterator, which yields the same on every rank.

    Args:
        run: from `open_run`.
        out: the directory of the run, see `train.saving.run_directory`: a path, an address, or an opened place.
        overwrite: replace an existing `out`.
        resume: continue from the newest whole checkpoint in `out`, or start from the first step if it has none.
        stop: called after every step; if it returns true on any rank, a checkpoint is written and the iterator ends.
        note: called with a sentence about the step from which the run continues, about each damaged checkpoint, and
            about recorded log-probabilities from a different distribution or dtype; see `sampling_check`.

    Raises:
        TreepackError: `out` exists or another process trains in it, too many steps were skipped, memory is too small,
            or the disk or the store fails.
    """
    ranks, note = run.ranks, note or (lambda _: None)
    with ExitStack() as stack:
        place = out if isinstance(out, Place) else stack.enter_context(open_place(out, ranks))
        ranks.lead(lambda: begin(run, place.out, overwrite=overwrite, resume=resume))
        if is_complete(place.out, run.options, len(run.schedule)):
            note(already_finished(place.out))
        else:
            ranks.lead(place.claim)
            yield from _steps(run, place, stop or (lambda: False), note)


def _steps(
    run: TrainingRun, place: Place, stop: Callable[[], bool], note: Callable[[str], None]
) -> Iterator[StepMetrics]:
    """Carry out the remaining steps with checkpoints and metrics, and write the model.

    Raises:
        TreepackError: too many steps were skipped, memory is too small, or the disk or the store fails.
    """
    options, ranks, model = run.options, run.ranks, run.loaded.model
    optimiser = make_optimiser(run)
    done, skipped, score = _restore_position(run, place, optimiser, note)
    staged, linked = False, None
    upload = None if place.uploads is None else CheckpointUpload(place.uploads, CHECKPOINTS)
    model.train()
    for compare in (compare_sampling, compare_dtypes) if done == 0 else ():
        if (remark := compare(run)) is not None:
            note(remark)
    _log.info(_first_step(run, done))
    with (
        _close_after(Checkpoints(place.folder / CHECKPOINTS, keep=options.keep, upload=upload)) as checkpoints,
        closing(FittingRun(run, optimiser, note=note, record=partial(record_plan, out=place.out))) as fitting,
        closing(MetricsLog(place.folder / METRICS, keep_until=done)) if ranks.leads else nullcontext() as log,
    ):
        if log is not None and log.num_lost:
            note(f"{METRICS} lacks {log.num_lost} of the {done} steps before; the weights are whole")
        while done < len(run.schedule) and not score.is_over(options.patience):
            metrics = fitting.step(done)
            done += 1
            last = done == len(run.schedule)
            if run.held_out is not None and (last or done % options.eval_every == 0):
                metrics = replace(metrics, evaluation=fitting.evaluate())
                score = score.after(done, metrics.evaluation["eval_loss"])
                last = last or score.is_over(options.patience)
            # Only consecutive skips count: one bad row per epoch is tolerable, a diverged model skips every step.
            skipped = skipped + 1 if metrics.skipped_rows else 0
            if log is not None:
                log.write(metrics.as_record())
            if skipped > options.max_skipped:
                raise TreepackError(
                    f"{place.out}: the loss or gradient of {skipped} steps in a row was not finite, the last in rows "
                    f"{_join_ids(metrics.skipped_rows)}; inspect these rows, or start again with a lower --lr"
                )
            stopped = ranks.any(stop())
            position: dict[str, Any] = {"step": done, "skipped": skipped}
            position |= {} if run.held_out is None else {"score": score.as_record()}
            best = score.best_step if options.patience else None
            is_due = options.checkpoint_every and done % options.checkpoint_every == 0
            if last and options.checkpoint_every:
                # The model first, whose weight files the checkpoint links. If it cannot be written (full disk), the
                # checkpoint has the weights, and --resume writes the model without training. If the checkpoint fails
                # instead, the model is still worth finishing.
                staged = best in (None, 0, done) and stage_before_checkpoint(fitting.run, place)
                saved_model = staged_model(place) if staged else None
                with _note_errors(note), long_part(f"writing the checkpoint of step {done}"):
                    checkpoints.save(done, model, optimiser, position, best=best, saved_model=saved_model)
                    checkpoints.wait()
                    linked = f"{CHECKPOINTS}/step-{done:08d}" if staged else None
            elif stopped or is_due or best == done:
                # The run waits for the checkpoint before and for the copy, and if it stops, until all is written.
                with long_part(f"writing the checkpoint of step {done}", at_start=stopped):
                    checkpoints.save(done, model, optimiser, position, best=best)
                    if stopped:
                        checkpoints.wait()
            yield metrics
            if stopped and not last:
                return
        run = fitting.run
    outcome = _take_best(run, place, optimiser, score, done, note) if options.patience and score.best_step else {}
    if not staged:
        stage_after_training(run, place)
    run.ranks.lead(lambda: finish_run(run, place, outcome, linked=linked))


def _take_best(
    run: TrainingRun,
    place: Place,
    optimiser: torch.optim.Optimizer,
    score: HeldOutScore,
    done: int,
    note: Callable[[str], None],
) -> dict[str, int]:
    """Give the model the weights of the lowest held-out loss; return the entries of train.json about it."""
    outcome = {"last_step": done, "best_step": score.best_step}
    if score.is_over(run.options.patience) and done < len(run.schedule):
        note(f"the run ends after step {done}: {score.stale} evaluations had no lower loss than step {score.best_step}")
    if score.best_step == done:
        return outcome
    with _note_errors(note):
        checkpoint, notes = _latest(place, step=score.best_step)
        if checkpoint is not None:
            restore(checkpoint, run.loaded.model, optimiser)
            run.ranks.any(False)  # all have read the files
            if place.uploads is not None:
                shutil.rmtree(checkpoint.path.parent, ignore_errors=True)
            note(f"the model is that of step {score.best_step}, with the held-out loss {score.best_loss:.4f}")
            return outcome
        for each in notes:
            note(each)
    note(f"there is no whole checkpoint of step {score.best_step}: the model is that of step {done}")
    return {**outcome, "best_step": done}


@contextmanager
def _close_after(checkpoints: Checkpoints) -> Iterator[Checkpoints]:
    """Close `checkpoints` at the end; the error of a failed save does not hide an error that ended the run.

    After Ctrl-C nothing waits for a checkpoint that is being written.
    """
    try:
        yield checkpoints
    except KeyboardInterrupt:
        raise
    except BaseException:
        with suppress(TreepackError):
            checkpoints.close()
        raise
    checkpoints.close()


@contextmanager
def _note_errors(note: Callable[[str], None]) -> Iterator[None]:
    """Pass an error to `note` instead of raising it."""
    try:
        yield
    except TreepackError as error:
        note(str(error))


def _first_step(run: TrainingRun, done: int) -> str:
    """Return the line before the first step of this process, which takes longer than the others."""
    compiles = ["the layers"] if run.options.compile else []
    compiles += ["the kernels of attention"] if run.loaded.attention != "reference" else []
    details = f", which compiles {' and '.join(compiles)} if this machine has not done so before" if compiles else ""
    return f"step {done + 1} of {len(run.schedule)}{details}"


def _restore_position(
    run: TrainingRun, place: Place, optimiser: torch.optim.Optimizer, note: Callable[[str], None]
) -> tuple[int, int, HeldOutScore]:
    """Restore model and optimiser from the newest checkpoint; return steps done, consecutive steps skipped, and score.

    Raises:
        TreepackError: the run has fewer steps than are done, or is complete and has no checkpoint to continue from.
    """
    out, num_steps = place.out, len(run.schedule)
    checkpoint, notes = _latest(place)
    for each in notes:
        note(each)
    if checkpoint is None:
        if is_finished(out):
            raise TreepackError(
                f"{out}: has no checkpoint of the finished run to continue from; train the model in it with a new --out"
            )
        extend_run(run, out, 0)
        return 0, 0, HeldOutScore()
    refuse_fewer_steps(out, checkpoint.step, num_steps)
    _log.info("reading the checkpoint of step %d", checkpoint.step)
    with step_memory_errors():
        position = restore(checkpoint, run.loaded.model, optimiser)
    change = extend_run(run, out, position["step"])
    run.ranks.any(False)  # no rank continues before the first one has recorded the change and all have read the files
    if place.uploads is not None:
        shutil.rmtree(checkpoint.path.parent, ignore_errors=True)
    note(f"resumed after step {position['step']} of {num_steps}")
    if change:
        note(change)
    return position["step"], position["skipped"], HeldOutScore(**position.get("score", {}))


def _latest(place: Place, *, step: int | None = None) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint and notes, see `checkpoint.latest`; a remote one is copied to this machine."""
    if place.uploads is not None:
        # A folder that the ranks of this machine share.
        return latest(place.folder.parent / CHECKPOINTS, CheckpointUpload(place.uploads, CHECKPOINTS), step=step)
    return latest(place.folder / CHECKPOINTS, step=step)


def _join_ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
