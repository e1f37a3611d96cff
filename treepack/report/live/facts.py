"""The figures and tables of a run's page beside its curves.

    RunFolder, RunSeries, ScheduledRows --run_facts--> RunFacts: state, progress, tiles, plan, slowest steps, metrics

All are short texts, which the page shows as text and never as markup.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.report.live.curves import TITLES_AND_UNITS, ZERO, title_of
from treepack.report.live.run_series import RunSeries
from treepack.report.live.run_state import RunFolder, RunState
from treepack.report.live.step_rows import ScheduledRows
from treepack.report.words import printable
from treepack.trajectory import Float64

_NUM_SLOWEST = 8
_RECENT = 100  # steps whose mean time gives the time left, and whose mean is the figure of a tile
_MAX_TEXT = 300  # characters of a value
_MAX_LINES = 80  # of the plan
_CHOICES = {"None": "off", "False": "no", "True": "yes"}  # words for values of the plan
# Figures above the curves, in this order, if the run has them.
_TILES = ("loss", "eval_loss", "reward", "kl", "entropy", "clip_fraction_high", "accuracy", "tokens_per_second")
_FLAT = "tokens_flat_per_second"

_Line = list[str]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Texts of a run's page.

    `share` is the part of the steps that are done, None if their number is not known. `start` are the lines of the
    command before its first step. `since` is the time of the first of them, in seconds since 1970, or None.
    """

    kind: str
    state: str
    progress: str
    share: float | None
    tiles: list[_Line]
    plan: list[_Line]
    slowest: list[_Line]
    passes: list[_Line]
    metrics: list[_Line]
    notes: list[str]
    last_step: int
    start: list[_Line]
    since: float | None
    has_rollouts: bool

    def as_record(self) -> dict[str, Any]:
        """Return JSON values for the page."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def run_facts(
    folder: RunFolder, series: RunSeries, state: RunState, rows: ScheduledRows | None, notes: list[str]
) -> RunFacts:
    """Return the facts of a run now.

    Args:
        folder: its directory.
        series: its steps so far.
        state: its state.
        rows: its packed rows, if they are known.
        notes: remarks for the reader, such as damaged lines.
    """
    finished = folder.finished() or {}
    steps = series.steps
    last = int(steps[-1]) if len(steps) else 0
    total = _num_steps(folder, rows, finished)
    ended = finished.get("last_step")  # of a run that ended early because of its patience
    seconds = series.column("seconds")
    notes = notes + [shown_text(note) for note in _list(finished.get("notes"))]
    if series.skipped:
        notes = [
            *notes,
            f"Skipped, because the loss or gradient was not finite: {len(series.skipped):,} of {len(series):,} steps.",
        ]
    if series.names_left_out:
        notes = [*notes, "Some numbers of metrics.jsonl are left out, because it has too many names."]
    return RunFacts(
        kind=state.kind,
        state=_state_text(state, last, total, ended),
        progress=_progress(last, total, seconds, state),
        share=None if not total else min(1.0, last / total),
        tiles=_tiles(series, seconds),
        plan=[*_plan(folder.record or {}, finished)][:_MAX_LINES],
        slowest=_slowest(series, seconds, rows),
        passes=_slow_passes(series, rows),
        metrics=_metrics(series),
        notes=notes,
        last_step=last,
        start=_start_lines(state),
        since=state.start.lines[0][0] if state.kind == "starting" and state.start.lines else None,
        has_rollouts=rows is not None,
    )


def shown_text(value: object) -> str:
    """Return a value of a file as a short text of one line."""
    shown = printable(
        value if isinstance(value, str) else shown_number(value) if isinstance(value, float) else str(value)
    )
    return shown if len(shown) <= _MAX_TEXT else shown[: _MAX_TEXT - 3] + "..."


def shown_number(value: float) -> str:
    """Return a number for readers: 12,345 or 0.01234; 0 for what rounding left of it."""
    if not math.isfinite(value):
        return "-"
    if abs(value) < ZERO:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _shown_duration(seconds: float) -> str:
    """Return a duration in a unit that fits: 1.5 h, 12 s."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _num_steps(folder: RunFolder, rows: ScheduledRows | None, finished: dict[str, Any]) -> int:
    """Return the number of steps of the run, 0 if it is not known."""
    options = _dict((folder.record or {}).get("options"))
    for value in (finished.get("num_steps"), options.get("steps"), None if rows is None else rows.num_steps):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _state_text(state: RunState, last: int, total: int, ended: object) -> str:
    done = f"step {last:,}" if last else "the first step"
    following = f"step {last + 1:,}" if last else "the first step"
    if state.kind == "starting":
        return f"starting: {state.start.lines[-1][1]}" if state.start.lines else "starting"
    if state.kind == "failed":
        return f"failed before {following}: {state.start.error}"
    if state.kind == "died" and (state.start.is_starting or not last):
        return f"died before {following}: {state.owner or 'its process'} does not run any more; give the command again"
    if state.kind == "finished":
        early = f", before step {total:,}, because the held-out loss did not fall" if ended and ended != total else ""
        return f"finished after {done}{early}"
    if state.kind == "died":
        return f"died after {done}: {state.owner or 'its process'} does not run any more; continue with --resume"
    if state.kind == "stopped" and total and last >= total:
        return f"ended after {done}, the last one; if the model is missing, continue with --resume"
    if state.kind == "stopped":
        return f"stopped after {done}; continue with --resume"
    if state.kind == "waiting":
        return "not started yet"
    return f"running, {done} done" if last else "running, before the first step"


def _progress(last: int, total: int, seconds: Float64, state: RunState) -> str:
    if state.kind in ("starting", "failed") and not last:
        return f"step 1 of {total:,}" if total else "before the first step"
    shown = f"step {last:,} of {total:,}" if total else f"step {last:,}"
    spent = float(np.nansum(seconds))
    parts = [shown, f"{_shown_duration(spent)} of training"] if spent else [shown]
    recent = seconds[1:][-_RECENT:]  # the first step compiles
    recent = recent[np.isfinite(recent)]
    if state.kind == "running" and total > last and len(recent):
        parts.append(f"{_shown_duration(float(recent.mean()) * (total - last))} left")
    return ", ".join(parts)


def _start_lines(state: RunState) -> list[_Line]:
    """Return the lines of a command that has not done a step yet: seconds since its first line, and text."""
    if state.kind not in ("starting", "failed", "died"):
        return []
    lines = state.start.lines
    return [[f"{max(0.0, time - lines[0][0]):.1f} s", text] for time, text in lines][-_MAX_LINES:]


def _tiles(series: RunSeries, seconds: Float64) -> list[_Line]:
    tiles = []
    for name in _TILES:
        values = series.column(name)
        values = values[np.isfinite(values)]
        if not len(values):
            continue
        title = "Held-out loss" if name == "eval_loss" else TITLES_AND_UNITS.get(name, (title_of(name), ""))[0]
        tiles.append([title.removesuffix(" from the reference"), shown_number(float(values[-1]))])
    flat, computed = (float(np.nansum(series.column(name))) for name in ("tokens_flat", "tokens"))
    if computed:
        tiles.append(["Tokens computed", _short(computed)])
    if computed and flat:
        tiles.append(["Tokens if one by one", _short(flat)])
    return tiles


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def _plan(record: dict[str, Any], finished: dict[str, Any]) -> Iterator[_Line]:
    """Yield the choices of the run first, then its data, model and options; names and values."""
    if isinstance(record.get("chosen"), dict):
        for name, chosen in _flat(record["chosen"], "chosen: "):
            yield [name, _CHOICES.get(chosen, chosen)]
    for name in ("packed", "model", "attention", "num_ranks", "treepack"):
        value = record.get(name, finished.get(name))
        if value is not None:
            yield [shown_text(name), shown_text(value)]
    options = {**_dict(finished.get("options")), **_dict(record.get("options"))}
    objective = _dict(options.pop("objective", None))
    for name, value in _flat({**options, **objective}, ""):
        if value not in ("None", "0.0", "False", ""):
            yield [name, value]


def _flat(entries: dict[str, Any], prefix: str) -> Iterator[_Line]:
    """Yield the entries of an object and of the objects in it: {"a": {"b": 1}} -> a b, 1."""
    waiting = [(prefix, entries)]
    while waiting:
        start, inside = waiting.pop(0)
        for name, value in inside.items():
            if isinstance(value, dict):
                waiting.append((f"{start}{name} ", value))
                continue
            # A list of sentences, such as the reasons of the choices, is a line for each.
            lines = value if isinstance(value, list) and all(isinstance(each, str) for each in value) else [value]
            for line in lines[:_MAX_LINES]:
                yield [shown_text(f"{start}{name}".replace("_", " ")), shown_text(line)]


def _slowest(series: RunSeries, seconds: Float64, rows: ScheduledRows | None) -> list[_Line]:
    """Return the slowest steps: step, seconds, seconds of waiting, tokens, tokens per second, and the largest row."""
    known = np.flatnonzero(np.isfinite(seconds))
    order = known[np.argsort(-seconds[known], kind="stable")][:_NUM_SLOWEST]
    steps, columns = series.steps, [series.column(name) for name in ("wait_seconds", "tokens", "tokens_per_second")]
    lines = []
    for i in order.tolist():
        wait, tokens, speed = (float(column[i]) for column in columns)
        numbers = [shown_number(each) for each in (round(wait, 2), tokens, speed)]
        line = [f"{int(steps[i])}", f"{seconds[i]:.3g}", *numbers]
        lines.append([*line, _largest(rows, int(steps[i]))])
    return lines


def _slow_passes(series: RunSeries, rows: ScheduledRows | None) -> list[_Line]:
    """Return the slowest passes of recent steps: step, seconds, tokens, tokens per second, rows, and how to see one."""
    recent = [each for each in series.passes if each.step > series.steps[0]]  # the first step compiles
    lines = []
    for each in sorted(recent, key=lambda each: -each.seconds)[:_NUM_SLOWEST]:
        numbers = [f"{each.step}", f"{each.seconds:.3g}", shown_number(each.tokens)]
        shown = [*numbers, shown_number(each.tokens / each.seconds), ", ".join(map(str, each.rows)) or "-"]
        # The rows of several directories are numbered over all of them, and `show` takes one directory.
        packed = rows.directory if rows is not None and each.rows else None
        command = "" if packed is None else f"treepack show {shlex.quote(printable(packed))} --row {each.rows[0]}"
        lines.append([*shown, command])
    return lines


def _largest(rows: ScheduledRows | None, step: int) -> str:
    if rows is None or not 1 <= step <= rows.num_steps:
        return "-"
    row = max(rows.of_step(step), key=lambda each: int(rows.num_tokens[each]))
    return f"row {int(rows.row_ids[row])}, {int(rows.num_tokens[row]):,} tokens"


def rows_fit(series: RunSeries, rows: ScheduledRows) -> bool:
    """Return true if the last step has the rows and the tokens that metrics.jsonl records."""
    steps, sizes, tokens = series.steps, series.column("num_rows"), series.column("tokens")
    if not len(steps):
        return True
    try:
        own = rows.of_step(int(steps[-1]))
    except (IndexError, TreepackError):
        return False
    return (len(own), int(rows.num_tokens[own].sum())) == (sizes[-1], tokens[-1])


def _metrics(series: RunSeries) -> list[_Line]:
    """Return for each number its name, last value, mean of the last steps, and lowest and highest value with steps."""
    steps, lines = series.steps, []
    for name in series.names:
        values = series.column(name)
        known = np.flatnonzero(np.isfinite(values))
        if not len(known):
            continue
        values, at = values[known], steps[known]
        low, high = int(values.argmin()), int(values.argmax())
        lines.append(
            [
                printable(name),
                shown_number(float(values[-1])),
                shown_number(float(values[-_RECENT:].mean())),
                f"{shown_number(float(values[low]))} at {int(at[low]):,}",
                f"{shown_number(float(values[high]))} at {int(at[high]):,}",
            ]
        )
    return lines


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value[:20] if isinstance(value, list) else []
