"""A minimal trainer: packed rows in, a directory that from_pretrained loads out.

    run.open_run(packed, model, options) -> TrainingRun     unsuitable data, models and options are refused here
    for metrics in train(run, out): ...                     one StepMetrics per optimiser step

The loss of an optimiser step is the sum over its rows of weight * nll, divided by the sum of all their weights. It is
one global mean: it does not depend on how trajectories are packed into rows, on the ranks that compute the rows, or on
the order of accumulation. The losses of reinforcement learning and preferences are in `objectives.losses` and
follow the same rule. Rows are shuffled by seed and epoch. Rows of one training step (the `step` column) stay together,
these steps keep their order, and an optimiser step never mixes two of them.

A step whose loss or gradient is not finite changes no weights and is counted. `train.step` carries out one step,
`train.saving.position` counts the steps, `train.saving.run_directory` defines the files of a run, and
`train.saving.checkpoint` saves and restores its state. The library prints nothing: notes are in `TrainingRun.notes`,
and the logger `treepack` names each part of a run that takes long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch

from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath
from treepack.train.optimiser import make_optimiser
from treepack.train.retry import FittingRun
from treepack.train.run import TrainingRun
from treepack.train.sampling_check import compare_dtypes, compare_sampling
from treepack.train.saving.checkpoint import Checkpoints, latest, restore
from treepack.train.saving.long_parts import long_part
from treepack.train.saving.model_stage import stage_model
from treepack.train.saving.place import METRICS, Place, open_place
from treepack.train.saving.position import Position
from treepack.train.saving.run_directory import begin, extend_run, finish_run, is_complete, record_plan
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
    options, ranks = run.options, run.ranks
    optimiser = make_optimiser(run)
    at = _restore_position(run, place, optimiser, note)
    with _opened(run, place, optimiser, at, note) as (checkpoints, fitting, log):
        while not at.is_over(run):
            metrics = fitting.step(at.step)
            at = at.after(skipped=bool(metrics.skipped_rows))
            if run.held_out is not None and (at.is_last(run) or at.is_due(options.eval_every)):
                metrics = replace(metrics, evaluation=fitting.evaluate())
                at = at.scored(metrics.evaluation["eval_loss"])
            if log is not None:
                log.write(metrics.as_record())
            _refuse_divergence(place, at, metrics, options.max_skipped)
            stopped = ranks.any(stop())
            if at.is_over(run) and options.checkpoint_every:
                # If the checkpoint fails, the model is still worth finishing. If the model cannot be written instead
                # (full disk), --resume writes it without training.
                with _note_errors(note):
                    _save(checkpoints, run, optimiser, at, waits=True)
            elif stopped or at.is_due(options.checkpoint_every) or at.step == at.best(run):
                _save(checkpoints, run, optimiser, at, waits=stopped)
            yield metrics
            if stopped and not at.is_over(run):
                return
        run = fitting.run
    outcome = _take_best(run, place, optimiser, at, note) if at.best(run) else {}
    stage_model(run, place)
    ranks.lead(lambda: finish_run(run, place, outcome))


@contextmanager
def _opened(
    run: TrainingRun, place: Place, optimiser: torch.optim.Optimizer, at: Position, note: Callable[[str], None]
) -> Iterator[tuple[Checkpoints, FittingRun, MetricsLog | None]]:
    """Prepare the steps after `at`: checkpoints, the run whose plan fits, and metrics on the first rank."""
    run.loaded.model.train()
    for compare in (compare_sampling, compare_dtypes) if at.step == 0 else ():
        if (remark := compare(run)) is not None:
            note(remark)
    _log.info(_first_step(run, at.step))
    with (
        _close_after(Checkpoints(place.checkpoints, keep=run.options.keep)) as checkpoints,
        closing(FittingRun(run, optimiser, note=note, record=partial(record_plan, out=place.out))) as fitting,
        closing(MetricsLog(place.folder / METRICS, keep_until=at.step)) if run.ranks.leads else nullcontext() as log,
    ):
        if log is not None and log.num_lost:
            note(f"{METRICS} lacks {log.num_lost} of the {at.step} steps before; the weights are whole")
        yield checkpoints, fitting, log


def _save(
    checkpoints: Checkpoints, run: TrainingRun, optimiser: torch.optim.Optimizer, at: Position, *, waits: bool
) -> None:
    """Start the checkpoint at `at`, after the one before; if the run `waits`, until all is written."""
    with long_part(f"writing the checkpoint of step {at.step}", at_start=waits):
        checkpoints.save(at.step, run.loaded.model, optimiser, at.as_record(), best=at.best(run))
        if waits:
            checkpoints.wait()


def _refuse_divergence(place: Place, at: Position, metrics: StepMetrics, max_skipped: int) -> None:
    if at.skipped > max_skipped:
        raise TreepackError(
            f"{place.out}: the loss or gradient of {at.skipped} steps in a row was not finite, the last in rows "
            f"{_join_ids(metrics.skipped_rows)}; inspect these rows, or start again with a lower --lr"
        )


def _take_best(
    run: TrainingRun, place: Place, optimiser: torch.optim.Optimizer, at: Position, note: Callable[[str], None]
) -> dict[str, int]:
    """Give the model the weights of the lowest held-out loss; return the entries of train.json about it."""
    score, outcome = at.score, {"last_step": at.step, "best_step": at.score.best_step}
    if not at.is_last(run):
        stale = f"{score.stale} evaluations had no lower loss than step {score.best_step}"
        note(f"the run ends after step {at.step}: {stale}")
    if score.best_step == at.step:
        return outcome
    with _note_errors(note):
        checkpoint, notes = latest(place.checkpoints, step=score.best_step)
        if checkpoint is not None:
            restore(checkpoint, run.loaded.model, optimiser)
            note(f"the model is that of step {score.best_step}, with the held-out loss {score.best_loss:.4f}")
            return outcome
        for each in notes:
            note(each)
    note(f"there is no whole checkpoint of step {score.best_step}: the model is that of step {at.step}")
    return {**outcome, "best_step": at.step}


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
) -> Position:
    """Restore model and optimiser from the newest checkpoint, and return its position.

    Raises:
        TreepackError: the run has fewer steps than are done, or is complete and has no checkpoint to continue from.
    """
    out, num_steps = place.out, len(run.schedule)
    checkpoint, notes = latest(place.checkpoints)
    for each in notes:
        note(each)
    if checkpoint is None:
        if is_finished(out):
            raise TreepackError(
                f"{out}: has no checkpoint of the finished run to continue from; train the model in it with a new --out"
            )
        extend_run(run, out, 0)
        return Position()
    at = Position.from_record(checkpoint.position, checkpoint.path)
    refuse_fewer_steps(out, at.step, num_steps)
    _log.info("reading the checkpoint of step %d", at.step)
    with step_memory_errors():
        restore(checkpoint, run.loaded.model, optimiser)
    change = extend_run(run, out, at.step)
    run.ranks.any(False)  # no rank continues before the first one has recorded the change
    note(f"resumed after step {at.step} of {num_steps}")
    if change:
        note(change)
    return at


def _join_ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
