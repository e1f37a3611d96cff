"""The tables and plots of the training curves, from the records that curves.py wrote.

    TASK-ARM-SEED.jsonl --read_runs--> {arm: {seed: Curve}} --common grid of decoded tokens--> curves-TASK.md, .svg

A curve between two evaluations is the straight line. The grid ends at the smallest number of decoded tokens that all
runs have reached, so a run that was cut shortens the comparison and does not bend it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from curves_statistics import DrawnLine, can_draw, draw, first_crossing, t_interval

from treepack.errors import TreepackError
from treepack.trajectory import Float64

GRID = 21  # points of the comparison
BASE = "grpo"  # the arm that the others are compared with, if it has run


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out pass rates of a run after `decoded` tokens, float64 [n] each, and totals of its steps."""

    decoded: Float64
    rates: Float64
    steps: int
    leaves: int
    seconds: float

    def at(self, tokens: Float64) -> Float64:
        """Return the pass rate after these numbers of decoded tokens."""
        return np.interp(tokens, self.decoded, self.rates)


Runs = dict[str, dict[int, Curve]]


def write_report(folder: Path, *, target: float | None) -> list[str]:
    """Write the table of each task beside the records, and its plot if matplotlib is installed; return the tables.

    Args:
        folder: the records.
        target: pass rate for the column with the tokens to a target; by default halfway between the mean pass rates of
            `BASE` before the training and at the end.

    Raises:
        TreepackError: no run has been evaluated after its start.
    """
    texts = []
    for task, runs in sorted(read_runs(folder).items()):
        text, lines = report(runs, target=target)
        (folder / f"curves-{task}.md").write_text(text)
        texts.append(f"{task}\n\n{text}")
        if can_draw():
            draw(lines, folder / f"curves-{task}.svg", across="decoded tokens", up=f"held-out pass rate, {task}")
    if not texts:
        raise TreepackError(f"{folder}: contains no run with an evaluation after its start; run curves.py first")
    return texts


def read_runs(folder: Path) -> dict[str, Runs]:
    """Return the curves of each task, arm and seed; runs without an evaluation after their start are left out.

    Raises:
        TreepackError: a damaged line that is not the last one of its file.
    """
    tasks: dict[str, Runs] = {}
    for path in sorted(folder.glob("*.jsonl")):
        records = read_records(path)
        evaluated = [record for record in records if "pass_rate" in record]
        if len(evaluated) < 2:
            continue
        decoded, rates = (np.array([each[name] for each in evaluated], float) for name in ("decoded", "pass_rate"))
        first, steps = records[0], records[1:]
        curve = Curve(
            decoded,
            rates,
            steps=len(steps),
            leaves=sum(int(each.get("leaves", 0)) for each in steps),
            seconds=sum(each["step_seconds"] for each in steps),
        )
        tasks.setdefault(first["task"], {}).setdefault(first["arm"], {})[first["seed"]] = curve
    return tasks


def is_evaluated(path: Path) -> bool:
    """Return True if a run exists and has been evaluated after its start, so that it counts."""
    return path.exists() and sum("pass_rate" in record for record in read_records(path)) > 1


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run; the last one may be incomplete, because the run was cut, and is then left out.

    Raises:
        TreepackError: another line is damaged.
    """
    lines, records = path.read_text().splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise TreepackError(f"{path}:{number}: is not JSON; remove the file and run it again") from error
    return records


def report(runs: Runs, *, target: float | None) -> tuple[str, dict[str, DrawnLine]]:
    """Return the Markdown table of one task, and the lines of its plot; see `write_report`."""
    end = min(curve.decoded[-1] for seeds in runs.values() for curve in seeds.values())
    grid = np.linspace(0.0, end, GRID)
    base = BASE if BASE in runs else next(iter(runs))
    if target is None:
        target = float(np.mean([curve.at(grid)[[0, -1]].mean() for curve in runs[base].values()]))
    head = (
        f"Up to {end:,.0f} decoded tokens, the most that all runs have reached; intervals of 95 % by Student's t over "
        f"seeds. Target: {target:.3f}.\n\n"
        f"| arm | seeds | pass rate before | after | area | against {base}: after | area | tokens to the target "
        "| steps | decoded / leaf | s / step |\n" + "|---" * 11 + "|\n"
    )
    lines = {arm: _band(seeds, grid) for arm, seeds in runs.items()}
    return head + "".join(_table_line(runs, arm, base, grid, target) for arm in runs), lines


def _table_line(runs: Runs, arm: str, base: str, grid: Float64, target: float) -> str:
    curves, steps = runs[arm], sum(curve.steps for curve in runs[arm].values())
    after = {seed: curve.at(grid)[-1] for seed, curve in curves.items()}
    area = {seed: curve.at(grid).mean() for seed, curve in curves.items()}
    others = {seed: curve.at(grid) for seed, curve in runs[base].items()}
    reached = np.array([first_crossing(grid, curve.at(grid), target) for curve in curves.values()])
    cells = [
        arm,
        f"{len(curves)}",
        f"{np.mean([curve.rates[0] for curve in curves.values()]):.3f}",
        _plus_minus(after),
        _plus_minus(area),
        "" if arm == base else _paired(after, {seed: rates[-1] for seed, rates in others.items()}),
        "" if arm == base else _paired(area, {seed: rates.mean() for seed, rates in others.items()}),
        _reached(reached),
        f"{steps / len(curves):.0f}",
        f"{sum(curve.decoded[-1] for curve in curves.values()) / max(1, _total(curves, 'leaves')):.1f}",
        f"{_total(curves, 'seconds') / max(1, steps):.2f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _total(curves: Mapping[int, Curve], name: str) -> float:
    return float(sum(getattr(curve, name) for curve in curves.values()))


def _plus_minus(values: Mapping[int, float]) -> str:
    mean, half = t_interval(np.array(list(values.values())))
    return f"{mean:.3f} ± {half:.3f}" if np.isfinite(half) else f"{mean:.3f}"


def _paired(values: Mapping[int, float], others: Mapping[int, float]) -> str:
    """Return the mean difference over the seeds that both have."""
    seeds = sorted(values.keys() & others.keys())
    if not seeds:
        return "no common seed"
    mean, half = t_interval(np.array([values[seed] - others[seed] for seed in seeds]))
    return f"{mean:+.3f} ± {half:.3f}" if np.isfinite(half) else f"{mean:+.3f}"


def _reached(tokens: Float64) -> str:
    """Return the mean number of tokens of the runs that reached the target, and their number if some did not."""
    has = np.isfinite(tokens)
    if not has.any():
        return "not reached"
    share = "" if has.all() else f" ({has.sum()} of {len(has)} runs)"
    return f"{tokens[has].mean():,.0f}{share}"


def _band(curves: Mapping[int, Curve], grid: Float64) -> DrawnLine:
    rates = np.array([curve.at(grid) for curve in curves.values()])
    mean = rates.mean(axis=0)
    if len(rates) < 2:
        return DrawnLine(grid, mean)
    half = np.array([t_interval(column)[1] for column in rates.T])
    return DrawnLine(grid, mean, mean - half, mean + half)
