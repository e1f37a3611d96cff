"""Carrying out a training run: its options, its signals, and what is shown of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from .output import show, text

F = TypeVar("F", bound=Callable[..., Any])


def run_options(command: F) -> F:
    """Add the options that say how a run is carried out, not what it computes."""
    options = [
        click.option(
            "--resume", is_flag=True, help="Go on from the newest whole checkpoint in --out, if there is one."
        ),
        click.option(
            "--checkpoint-every",
            type=click.IntRange(min=0),
            default=100,
            show_default=True,
            help="Optimiser steps from one checkpoint to the next; 0 for none.",
        ),
        click.option(
            "--keep",
            type=click.IntRange(min=1),
            default=2,
            show_default=True,
            help="Checkpoints that stay, the newest.",
        ),
        click.option(
            "--max-skipped",
            type=click.IntRange(min=0),
            default=5,
            show_default=True,
            help="Steps in a row that may be skipped because their loss or gradient is not finite.",
        ),
        click.option(
            "--gather-dtype",
            type=click.Choice(["fp32", "bf16"]),
            default="fp32",
            show_default=True,
            help="What weights travel between ranks in; bf16 halves the traffic and rounds all of them, norms too.",
        ),
        click.option("--cpu-offload", is_flag=True, help="Keep sharded weights and optimiser on the CPU."),
        click.option("--tensorboard", is_flag=True, help="Write the metrics for TensorBoard too."),
        click.option("--plot", is_flag=True, help="Draw the curves of metrics.jsonl to metrics.png at the end."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def train_model(
    packed: str, model: str, options: Any, out: Path, *, resume: bool, overwrite: bool, tensorboard: bool, plot: bool
) -> None:
    """Train from the first step or the newest checkpoint to the last step or SIGTERM, and show what was done."""
    from treepack.train.directory import check_out
    from treepack.train.ranks import find_device, join_ranks, leave_ranks
    from treepack.train.run import open_run

    check_out(out, inputs=[packed, model], overwrite=overwrite, resume=resume)
    _require_extras(tensorboard=tensorboard, plot=plot)
    ranks = join_ranks(find_device(options.device))
    try:
        run = open_run(packed, model, options, ranks)
        for note in run.notes:
            _note(ranks, note)
        with _stopped_by_sigterm() as stopped:
            steps = _run_steps(run, out, stopped, resume=resume, overwrite=overwrite, tensorboard=tensorboard)
        if ranks.leads:
            _show(run, out, steps, plot=plot)
    finally:
        leave_ranks()


def _run_steps(
    run: Any, out: Path, stopped: Callable[[], bool], *, resume: bool, overwrite: bool, tensorboard: bool
) -> list[Any]:
    import sys

    from tqdm import tqdm

    from treepack.train.loop import train
    from treepack.train.metrics import TensorBoardLog

    shown = run.ranks.leads and sys.stderr.isatty()
    found = train(run, out, resume=resume, overwrite=overwrite, stop=stopped, note=lambda each: _note(run.ranks, each))
    steps: list[Any] = []
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=len(run.schedule), desc="training", unit="step", disable=not shown))
        board = None
        for metrics in found:
            if tensorboard and run.ranks.leads:
                board = board or stack.enter_context(TensorBoardLog(out / "tensorboard", keep_until=metrics.step - 1))
                board.write(metrics.as_record())
            steps.append(metrics)
            bar.update(metrics.step - bar.n)
            rates = {"tok/s": text(metrics.tokens_per_second), "flat tok/s": text(metrics.tokens_flat_per_second)}
            bar.set_postfix(loss=f"{metrics.loss:.4f}", **rates)
            if metrics.skipped_rows:
                _note(run.ranks, f"step {metrics.step} was skipped: not finite in rows {metrics.skipped_rows}")
    return steps


def _require_extras(*, tensorboard: bool, plot: bool) -> None:
    """Refuse what is not installed before anything is trained or removed."""
    from importlib.util import find_spec

    from treepack.errors import TreepackError

    for asked, package in ((tensorboard, "tensorboard"), (plot, "matplotlib")):
        if asked and find_spec(package) is None:
            name = "tensorboard" if package == "tensorboard" else "plot"
            raise TreepackError(f"--{name} needs {package}, which is not installed; pip install 'treepack[{name}]'")


def _note(ranks: Any, note: str) -> None:
    if ranks.leads:
        click.echo(f"note: {note}", err=True)


@contextmanager
def _stopped_by_sigterm() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come, which ends the run at the next step instead of at once."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(run: Any, out: Path, steps: list[Any], *, plot: bool) -> None:
    from treepack.train.directory import METRICS, is_finished

    record: dict[str, Any] = {"steps": len(steps), "attention": run.loaded.attention}
    if run.ranks.grouped:
        record["ranks"] = run.ranks.size
    if steps:
        seconds = sum(metrics.seconds for metrics in steps)
        tokens, flat = (sum(getattr(metrics, name) for metrics in steps) for name in ("tokens", "tokens_flat"))
        record |= {
            "first loss": steps[0].loss,
            "last loss": steps[-1].loss,
            "tokens computed": tokens,
            "tokens if each trajectory stood alone": flat,
            "tokens per second": tokens / seconds,
            "flat-equivalent tokens per second": flat / seconds,
            "time spent waiting for rows": f"{sum(metrics.wait_seconds for metrics in steps) / seconds:.1%}",
        }
        skipped = sum(bool(metrics.skipped_rows) for metrics in steps)
        record |= {"skipped steps": skipped} if skipped else {}
    if is_finished(out):
        record["saved"] = str(out)
    else:
        record["stopped"] = f"after step {steps[-1].step} of {len(run.schedule)}; go on with --resume"
    if plot and (out / METRICS).exists():
        from treepack.train.plot import draw_curves

        draw_curves(out / METRICS, out / "metrics.png")
        record["curves"] = str(out / "metrics.png")
    show(record)
