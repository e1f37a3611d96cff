"""Progress of long commands on stderr: a bar on a terminal, else a line every ten seconds; nothing with --quiet.

    with progress_bars() as report:                        library functions call report(Progress(...))
    for row in progress(rows, description="scoring"):      a loop of the command itself
    with step_progress("training", 100) as report:         a line for each step, with values

    reading: 45 %, 12.3M tokens, 1.2M tokens/s, 2 min 10 s left
    training: step 12 of 100, loss 1.2345, 3 min 20 s left

Without a terminal, commands that take less than ten seconds write nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from treepack.processes import Progress, ReportProgress

_T = TypeVar("_T")

INTERVAL = 10.0  # seconds between two lines
_BAR_WIDTH = 62  # characters of a bar with ten blocks, besides its stage and values
_QUIET = "treepack.quiet"


def _remember_quiet(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_QUIET] = value


quiet_option = click.option(
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_remember_quiet,
    help="Write no progress to stderr, and no last lines about the output and the next command.",
)
"""The option of all commands. Functions of this file read it from the context, so no command passes it on."""


def is_quiet() -> bool:
    """Return True if the command was given --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def say(line: str) -> None:
    """Write a line of progress to stderr, unless the command is quiet."""
    if not is_quiet():
        click.echo(line, err=True)


@contextmanager
def progress_bars() -> Iterator[ReportProgress]:
    """Yield a function that shows the progress of the stages of a command."""
    display: _Bars | _Lines | None = None
    if not is_quiet():
        display = _Bars() if sys.stderr.isatty() else _Lines(INTERVAL)
    if display is None:
        yield lambda progress: None
        return
    try:
        yield display.report
    finally:
        display.close()


def progress(items: Iterable[_T], *, description: str, unit: str = "rows", total: int | None = None) -> Iterator[_T]:
    """Yield `items` and show how many were yielded."""
    from treepack.processes import with_progress

    with progress_bars() as report:
        yield from with_progress(items, report, description, unit=unit, total=total)


def token_progress(trajectories: Iterable[_T], *, description: str) -> Iterator[_T]:
    """Yield trajectories and show how many tokens they have."""
    from treepack.processes import with_progress

    with progress_bars() as report:
        yield from with_progress(
            trajectories,
            report,
            description,
            unit="tokens",
            size=lambda item: len(getattr(getattr(item, "content", item), "tokens", ())),
        )


@contextmanager
def step_progress(
    stage: str, total: int, *, first: int = 0, every: int = 1, interval: float = 0.0
) -> Iterator[Callable[[int, Mapping[str, str]], None]]:
    """Yield a function that shows the steps done and some values: `report(12, {"loss": "1.2345"})`.

    Args:
        stage: name of the work, such as "training".
        total: number of steps.
        first: steps that were done before, in a run that is resumed.
        every: number of steps from one line to the next; the first and the last step have a line too.
        interval: minimum seconds between two lines; 0 for a line for each step.
    """
    if is_quiet():
        yield lambda done, values: None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        shape = _shape()
        with tqdm(total=total, initial=first, desc=stage, unit="step", **shape) as bar:

            def draw(done: int, values: Mapping[str, str]) -> None:
                room = (shape.get("ncols") or shutil.get_terminal_size().columns) - len(stage) - _BAR_WIDTH
                bar.set_postfix_str(", ".join(_fitting(values, room)), refresh=False)
                bar.update(done - bar.n)

            yield draw
    else:
        start = last = time.monotonic()

        def write(done: int, values: Mapping[str, str]) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= interval and (done % every == 0 or done in (first, total)):
                last = now
                parts = [f"step {done} of {total}", *(f"{name} {value}" for name, value in values.items())]
                parts += _time_left((done - first) / max(1, total - first), now - start)
                click.echo(f"{stage}: {', '.join(parts)}", err=True)

        yield write


def _fitting(values: Mapping[str, str], room: int) -> list[str]:
    """Return the first values, which are the most important ones, within `room` characters; at least one.

    {"loss": "1.25", "lr": "1e-05"}, 15 -> ["loss=1.25"]
    """
    texts = [f"{name}={value}" for name, value in values.items()]
    ends = accumulate(len(text) + 2 for text in texts)
    return [text for place, (text, end) in enumerate(zip(texts, ends, strict=True)) if not place or end <= room]


def _shape() -> dict[str, int]:
    """Return arguments of tqdm for a terminal that gives no size, on which it would write empty lines; else none."""
    with suppress(OSError, ValueError):
        return {} if all(os.get_terminal_size(sys.stderr.fileno())) else {"ncols": 80, "nrows": 24}
    return {}


class _Bars:
    """Bars on a terminal, one for each stage; a stage that counts nothing has a line until the next one starts."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}
        self._estimated: set[str] = set()  # stages whose total is an estimate
        self._latest: Progress | None = None

    def report(self, progress: Progress) -> None:
        if self._latest is None or progress.stage != self._latest.stage:
            self._start(progress)
        self._latest = progress
        bar = self._bars[progress.stage]
        if progress.share and progress.total is None:
            self._estimated.add(progress.stage)
            bar.total = round(progress.done / progress.share)
        bar.update(progress.done - bar.n)

    def _start(self, progress: Progress) -> None:
        from tqdm import tqdm

        for stage, bar in list(self._bars.items()):
            # "planning" stays open while "merging rows" is shown below it, and comes back.
            if not bar.leave or (progress.unit and stage != progress.stage):
                self._close(stage)
        if progress.stage not in self._bars:
            is_tokens = progress.unit == "tokens"
            self._bars[progress.stage] = tqdm(
                desc=progress.stage,
                total=progress.total,
                unit="tok" if is_tokens else "",
                unit_scale=is_tokens,
                bar_format=None if progress.unit else "{desc} ...",
                leave=bool(progress.unit),
                **_shape(),
            )

    def _close(self, stage: str) -> None:
        bar = self._bars.pop(stage)
        if stage in self._estimated:
            bar.total = bar.n
        bar.close()

    def close(self) -> None:
        for stage in list(self._bars):
            self._close(stage)


class _Lines:
    """Lines in a file or a pipe, one every `interval` seconds.

    A thread writes them: a stage may compute for minutes between two reports, and must not look as if it hangs.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._start = time.monotonic()  # of the current stage
        self._latest: Progress | None = None
        self._was_shown = False  # the current stage has a line
        self._guard = Lock()  # of these three
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def report(self, progress: Progress) -> None:
        with self._guard:
            if self._latest is not None and progress.stage != self._latest.stage:
                self._finish_stage()
            self._latest = progress

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._finish_stage()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            with self._guard:
                seconds = time.monotonic() - self._start
                if self._latest is not None and seconds >= self._interval / 2:
                    self._was_shown = True
                    self._write(_line(self._latest, seconds))

    def _finish_stage(self) -> None:
        """Write the last line of a stage that had one before, and start the clock of the next stage."""
        if self._latest is not None and self._was_shown:
            self._write(_last_line(self._latest, time.monotonic() - self._start))
        self._start, self._was_shown = time.monotonic(), False

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # stderr was closed; the command itself continues
            click.echo(line, err=True)


def _line(progress: Progress, seconds: float) -> str:
    """Return the state of a stage that started `seconds` ago: amount, rate and time left."""
    if not progress.unit:
        return f"{progress.stage}: {duration(seconds)} so far"
    share = progress.share
    if share is None and progress.total:
        share = progress.done / progress.total
    parts = [] if share is None else [f"{share:.0%}".replace("%", " %")]
    parts += [_amount(progress), f"{short(progress.done / seconds)} {progress.unit}/s"]
    return f"{progress.stage}: {', '.join(parts + _time_left(share, seconds))}"


def _last_line(progress: Progress, seconds: float) -> str:
    parts = [_amount(progress)] if progress.unit else []
    return f"{progress.stage}: {', '.join([*parts, f'done in {duration(seconds)}'])}"


def _amount(progress: Progress) -> str:
    total = "" if progress.total is None else f" of {short(progress.total)}"
    return f"{short(progress.done)}{total} {progress.unit}"


def _time_left(share: float | None, seconds: float) -> list[str]:
    """Return the time left if `share` of the work took `seconds`; nothing at the start and at the end."""
    # A quarter in 30 s -> 30 * 0.75 / 0.25 = 90 s left.
    return [f"{duration(seconds * (1 - share) / share)} left"] if share and share < 1 else []


def short(value: float) -> str:
    """Return a number with at most four characters and a suffix: 1234567 -> 1.23M."""
    for suffix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 200 -> 3 min 20 s."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
