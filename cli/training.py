"""Execution of a training run: signals, progress, trackers and the summary.

[3.1 s] loading the weights of Qwen/Qwen3-0.6B      a line for each part before the first step: `stage_lines`
[9.8 s] step 1 of 300, which compiles ...
training: step 1 of 300, loss 1.2345, ...           a line for each step, or a bar on a terminal
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treepack.files.remote.address import AnyPath

from .devices import check_device
from .launch import is_first_process
from .output import lock_until_end, quoted, show, show_end
from .progress import step_progress
from .run_options import RunOptions
from .run_summary import run_summary, step_values
from .stages import import_torch, stage_lines, write_line
from .stop_signals import STOPPED, StopSignals, ignore_until_the_end

if TYPE_CHECKING:
    from treepack.report.live.start_log import StartLog
    from treepack.train.options import TrainOptions
    from treepack.train.ranks import Ranks
    from treepack.train.run import TrainingRun
    from treepack.train.saving.place import Place
    from treepack.train.step import StepMetrics
    from treepack.train.watch.sinks import RunPage, Sinks


def _keep_compiled_code() -> None:
    """Make torch.compile keep its results in the home directory, unless the environment names another place.

    By default they are in the temporary directory, which many machines empty between two jobs.
    """
    # Triton keeps the kernels of attention in the home directory by default.
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with suppress(OSError):
        folder = root / "treepack" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


@contextmanager
def row_ranks(device: str, sequence: int, command: str) -> Iterator[Ranks]:
    """Join the `sequence` ranks that compute every row together, during the block.

    Raises:
        TreepackError: torchrun started another number of processes.
    """
    from treepack.train.ranks import find_device, join_row_ranks, leave_ranks

    try:
        yield join_row_ranks(find_device(device), sequence, command)
    finally:
        leave_ranks()


def use_cache(folder: Path | None, size: str | None) -> None:
    """Choose the folder and the limit of copies of remote files; the workers of the command use them too.

    Raises:
        TreepackError: `size` is not a number of bytes.
    """
    from treepack.files.remote.cache_room import cache_limit

    if folder is not None:
        os.environ["TREEPACK_CACHE"] = str(folder.absolute())
    if size is not None:
        os.environ["TREEPACK_CACHE_SIZE"] = size
        cache_limit(Path.cwd(), 0)


def train_model(
    packed: tuple[str, ...],
    model: str,
    options: TrainOptions,
    out: AnyPath,
    run_options: RunOptions,
    *,
    overwrite: bool,
) -> None:
    """Train until the last step or a signal, from the first step or the newest checkpoint, and print a summary.

    A run that a signal stopped ends the command with the status `STOPPED`, on every rank.

    Raises:
        TreepackError: an option, the data, the model or `out` cannot be used, or training fails.
    """
    if _check_early(packed, model, options, out, run_options, overwrite=overwrite):
        if is_first_process():
            show({"steps": 0})
            show_end(out, then=_next_command(out, options, {}))
        return
    with _watched_start(out, run_options) as start:
        import_torch()
        from treepack.train.ranks import find_device, join_ranks, leave_ranks
        from treepack.train.saving.place import open_place

        _keep_compiled_code()
        ranks = join_ranks(find_device(options.device))
        try:
            # The lock of `out` is held until the end, so that a second command with it is refused before any work.
            with stage_lines(shown=ranks.leads), open_place(out, ranks) as place:
                summary = _train_in(place, packed, model, options, run_options, ranks, start, overwrite=overwrite)
                if "stopped" in summary:
                    ignore_until_the_end()
            # After the last upload: a run that is shown as saved is whole.
            if ranks.leads:
                show(summary)
                show_end(None if "stopped" in summary else out, then=_next_command(out, options, summary))
        finally:
            leave_ranks()
    if "stopped" in summary:
        raise click.exceptions.Exit(STOPPED)


@dataclass(frozen=True)
class _RunStart:
    """What shows the run before its first step: the file of its lines, and its page; None on other ranks."""

    log: StartLog | None = None
    page: RunPage | None = None


@contextmanager
def _watched_start(out: AnyPath, run_options: RunOptions) -> Iterator[_RunStart]:
    """Write the lines before the first step for pages of the run, and start its page; not for a run in a store."""
    from treepack.report.live.start_log import StartLog
    from treepack.train.watch.sinks import RunPage, SinkRun

    if not isinstance(out, Path) or not is_first_process():
        yield _RunStart()
        return
    with StartLog(out) as log:
        page = None
        if "page" in run_options.report_to and log.is_open:
            page = RunPage(
                SinkRun(out, run_options.project, out.name, "", note=lambda note: write_line(f"note: {note}"))
            )
        try:
            yield _RunStart(log, page)
        except BaseException as error:
            log.fail(error)
            raise
        finally:
            if page is not None:
                page.close()  # after the last line of a command that fails, which it shows


def show_plan(packed: tuple[str, ...], model: str, options: TrainOptions, run_options: RunOptions) -> None:
    """Print the choices of a new run, without its steps and its output.

    Raises:
        TreepackError: an option, the data or the model cannot be used, or no plan fits into memory.
    """
    from treepack.train.early_checks import check_training
    from treepack.train.options import RANK_OPTIONS

    held_out = run_options.held_out
    check_device(options.device, options.attention)
    check_training(packed, model, options, held_out=() if held_out is None else (held_out,))
    import_torch()
    from treepack.fit.rung import PLANNED
    from treepack.train.optimiser import decay_groups
    from treepack.train.ranks import find_device, join_ranks, leave_ranks
    from treepack.train.setup.opening import open_run

    _keep_compiled_code()  # compiled code that is there decides whether compilation pays
    ranks = join_ranks(find_device(options.device))
    try:
        with stage_lines(shown=ranks.leads):
            run = open_run(packed, model, options, ranks, held_out=held_out)
        for note in run.notes:
            _note(ranks, note)
        if ranks.leads:
            tokens = sum(int(run.dataset.num_tokens[step.rows].sum()) for step in run.schedule)
            names = ("dtype", *PLANNED, *(RANK_OPTIONS if ranks.grouped else ()))
            values = {name: getattr(run.options, name) for name in names}
            shown = {name.replace("_", " "): "off" if value is None else value for name, value in values.items()}
            if run.options.pass_tokens == 1:
                shown["pass tokens"] = "each row alone"
            decayed, undecayed = map(_kinds_of, decay_groups(run.loaded.model))
            shown |= {f"weights with decay {run.options.weight_decay:g}": decayed, "weights without decay": undecayed}
            if run.memory is None:
                shown["memory and time"] = "no forecast: torch counts no memory on a CPU, so no pass is measured"
            show(
                {"steps": len(run.schedule), "tokens of all steps": tokens, "attention": run.loaded.attention, **shown}
            )
    finally:
        leave_ranks()


def _kinds_of(names: Sequence[str]) -> str:
    """Return the number of weights, and the last part of their names, each once.

    ["model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"] -> "2 (input_layernorm)"
    """
    kinds = dict.fromkeys(name.removesuffix(".weight").removesuffix(".default").rpartition(".")[2] for name in names)
    return f"{len(names)} ({', '.join(kinds)})" if names else "0"


def _next_command(out: AnyPath, options: TrainOptions, summary: dict[str, Any]) -> str:
    """Return the command that usually follows a run: its continuation, or a use of its model."""
    if "stopped" in summary:
        return "the same command with --resume"
    if not options.objective.reads_logprobs:
        return f"treepack critic TRIE --model {quoted(out)} --out VALUES"
    from treepack.files.remote.stored_files import is_stored

    named = "" if is_stored(out / "tokenizer_config.json") else "--tokenizer TOKENIZER "  # none beside a config file
    return f"treepack rollout PROMPTS --engine {quoted(out)} {named}--sampler independent --out ROLLOUTS.jsonl"


def _check_early(
    packed: tuple[str, ...],
    model: str,
    options: TrainOptions,
    out: AnyPath,
    run_options: RunOptions,
    *,
    overwrite: bool,
) -> bool:
    """Refuse what can be refused without torch, whose import takes seconds, and lock a local `out` until the end.

    Return True if the run to resume is finished, with the model that these arguments ask for.

    Raises:
        TreepackError: the data, the model, an option or `out` cannot be used.
    """
    from treepack.train.early_checks import check_resumed, check_training
    from treepack.train.saving.run_record import already_finished, check_out
    from treepack.train.watch.sinks import check_sinks

    held_out = () if run_options.held_out is None else (run_options.held_out,)
    check_out(out, inputs=[*packed, *held_out, model], overwrite=overwrite, resume=run_options.resume)
    if isinstance(out, Path) and is_first_process():
        lock_until_end(out)
    check_sinks(run_options.report_to)
    check_device(options.device, options.attention)
    headers, others = check_training(packed, model, options, held_out=held_out)
    has_advantages = any("term_advantage" in each.term_columns for each in headers)
    if has_advantages and not options.objective.has_terms and is_first_process():
        loss = options.objective.name
        write_line(f"note: the rows have advantages, which --loss {loss} does not use; --loss grpo and others do")
    if not run_options.resume:
        return False
    finished = check_resumed(headers, others, model, options, out)
    if finished and is_first_process():
        write_line(f"note: {already_finished(out)}")
    return finished


def _train_in(
    place: Place,
    packed: tuple[str, ...],
    model: str,
    options: TrainOptions,
    run_options: RunOptions,
    ranks: Ranks,
    start: _RunStart,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Train in `place`, and return the summary."""
    from treepack.train.setup.opening import open_run, resume_run

    held_out = run_options.held_out
    if run_options.resume:
        run = resume_run(packed, model, options, place.out, ranks, held_out=held_out)
    else:
        run = open_run(packed, model, options, ranks, held_out=held_out)
    for note in run.notes:
        _note(ranks, note)
    has_advantages = "term_advantage" in run.dataset.term_columns
    if not options.objective.has_terms and run.rewards is not None and not has_advantages:
        total, count = run.rewards.sum(axis=0).tolist()
        if total != count:  # rollouts that were selected have the reward 1
            unused = f"the rows have rewards, which --loss {options.objective.name} does not use"
            _note(ranks, f"{unused}: it trains good and bad rollouts alike")
    signals = StopSignals(leads=ranks.leads)
    with signals.handled():
        steps = _run_steps(run, place, signals.received, run_options, start, overwrite=overwrite)
    return run_summary(run, place.out, steps)


def _run_steps(
    run: TrainingRun,
    place: Place,
    stop: Callable[[], bool],
    run_options: RunOptions,
    start: _RunStart,
    *,
    overwrite: bool,
) -> list[StepMetrics]:
    """Train with a progress bar, notes and trackers on the first rank; return the metrics of all steps."""
    from treepack.train.loop import train

    metrics_of_steps = train(
        run,
        place,
        resume=run_options.resume,
        overwrite=overwrite,
        stop=stop,
        note=lambda note: _note(run.ranks, note),
    )
    steps: list[StepMetrics] = []
    lines = partial(step_progress, "training", len(run.schedule), every=run_options.log_every)
    with ExitStack() as stack:
        sinks, report = None, None
        for metrics in metrics_of_steps:
            if start.log is not None:
                start.log.end()
            if run_options.report_to and run.ranks.leads:
                # Opened at the first step and not before: `train` may replace `out`, and finds the step to resume from.
                if sinks is None:
                    sinks = _open_sinks(run, place, run_options, start, done=metrics.step - 1)
                    stack.callback(sinks.close)
                sinks.write(metrics.as_record())
            steps.append(metrics)
            if run.ranks.leads:
                # The time left is estimated without the first step, which compiles.
                report = report or stack.enter_context(lines(first=metrics.step))
                report(metrics.step, step_values(metrics))
            if metrics.skipped_rows:  # above the bar, at the time it happens
                _note(run.ranks, f"step {metrics.step} was skipped: not finite in rows {metrics.skipped_rows}")
    return steps


def _open_sinks(run: TrainingRun, place: Place, run_options: RunOptions, start: _RunStart, *, done: int) -> Sinks:
    """Open the trackers for the steps after `done`."""
    from treepack.train.watch.sinks import SinkRun, Sinks, tracker_id

    config = {**run.options.as_record(), "packed": [str(path) for path in run.paths], "model": run.loaded.source}
    name = run_options.run_name or place.out.name or "run"  # Path(".") has no name
    note = partial(_note, run.ranks)
    described = SinkRun(place.folder, run_options.project, name, tracker_id(place), config, done, note)
    opened = {} if start.page is None else {"page": start.page}
    return Sinks(run_options.report_to, described, note, opened=opened)


def _note(ranks: Ranks, note: str) -> None:
    if ranks.leads:  # every rank makes the same notes
        write_line(f"note: {note}")
