"""The tables of the reproduction as Markdown, from the records of its runs.

    TABLE-TASK-ARM-SEED.jsonl --Table--> TABLE-TASK.md          credit-TASK.jsonl --credit_table--> credit-TASK.md

Figures of runs are compared at the smallest number of decoded tokens that all runs have reached, so a run that was cut
shortens the comparison and does not bend it; a curve between two evaluations is the straight line. Intervals of 95 %
are by Student's t over seeds, and differences are paired by seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.trajectory import Float64

GRID = 21  # points of the curves
RESAMPLES = 2000  # of the bootstrap
MIN_BLOCKS = 4  # of trees, in a mean over blocks
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Table:
    """A comparison of arms. The first arm that has run is the one that the others are compared with."""

    arms: Mapping[str, str]  # the label of each arm
    columns: Mapping[str, str]  # the heading of each figure; a figure named "-x" is the difference from the first arm


@dataclass(frozen=True, slots=True)
class Run:
    """Records of a run up to `end` decoded tokens, and its pass rates on a grid of tokens from 0 to `end`."""

    steps: Sequence[dict[str, Any]]
    grid: Float64
    rates: Float64
    target: float = NAN


def _total(run: Run, name: str) -> float:
    return float(sum(step.get(name) or 0 for step in run.steps))


# Figures that are not the mean of a field over the steps.
FIGURES: dict[str, Callable[[Run], float]] = {
    "before": lambda run: float(run.rates[0]),
    "after": lambda run: float(run.rates[-1]),
    "area": lambda run: float(run.rates.mean()),
    "to_target": lambda run: first_crossing(run.grid, run.rates, run.target),
    "steps": lambda run: len(run.steps),
    "decoded_per_leaf": lambda run: run.steps[-1]["decoded"] / _total(run, "leaves"),
}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record; the last one may be incomplete, because the run was cut, and is then left out.

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


def is_evaluated(path: Path) -> bool:
    """Return True if a run exists and has been evaluated after its start, so that it counts."""
    return path.exists() and sum("pass_rate" in record for record in read_records(path)) > 1


def run_table(folder: Path, name: str, task: str, table: Table) -> str | None:
    """Return the table of the runs of a task in `folder`, or None without a run that has been evaluated."""
    records = {
        arm: {int(path.stem.rpartition("-")[2]): read_records(path) for path in paths}
        for arm in table.arms
        if (paths := [each for each in folder.glob(f"{name}-{task}-{arm}-[0-9]*.jsonl") if is_evaluated(each)])
    }
    if not records:
        return None
    evaluated = [[each for each in run if "pass_rate" in each] for seeds in records.values() for run in seeds.values()]
    end = min(run[-1]["decoded"] for run in evaluated)
    runs = {arm: {seed: make_run(run, end) for seed, run in seeds.items()} for arm, seeds in records.items()}
    base = next(iter(runs))
    # Halfway between the mean pass rates of the first arm before the training and at the end.
    target = float(np.mean([[run.rates[0], run.rates[-1]] for run in runs[base].values()]))
    cells = [["arm", "seeds", *table.columns.values()]]
    for arm, seeds in runs.items():
        row = [table.arms[arm], f"{len(seeds)}"]
        for figure in table.columns:
            own = {seed: figure_of(run, figure.lstrip("-"), target) for seed, run in seeds.items()}
            if figure.startswith("-"):
                base_runs = runs[base]
                shared = sorted(own.keys() & base_runs.keys()) if arm != base else []
                pairs = [own[seed] - figure_of(base_runs[seed], figure[1:], target) for seed in shared]
                row.append(shown(np.array(pairs), sign="+") if pairs else "")
            else:
                row.append(shown(np.array(list(own.values()))))
        cells.append(row)
    text = f"Up to {end:,.0f} decoded tokens, which all runs have reached; target {target:.3f}."
    return f"{text}\n\n{markdown(cells)}"


def make_run(records: Sequence[dict[str, Any]], end: float) -> Run:
    """Return a run up to `end` decoded tokens, but at least its first step."""
    grid = np.linspace(0.0, end, GRID)
    evaluated = [each for each in records if "pass_rate" in each]
    tokens, rates = (np.array([each[name] for each in evaluated], float) for name in ("decoded", "pass_rate"))
    steps = [each for each in records[1:] if each["decoded"] <= end] or records[1:2]
    return Run(steps, grid, np.interp(grid, tokens, rates))


def figure_of(run: Run, name: str, target: float) -> float:
    """Return a figure of a run; the mean of a field is over the steps after the first that have it, NaN without one.

    The first step is left out, because some figures need a step before it.
    """
    if name in FIGURES:
        return FIGURES[name](Run(run.steps, run.grid, run.rates, target))
    values = [step[name] for step in run.steps[1:] if step.get(name) is not None]
    return float(np.mean(values)) if values else NAN


def first_crossing(x: Float64, y: Float64, target: float) -> float:
    """Return the first x at which the line through the points reaches `target`, NaN if it never does."""
    # x [0, 10, 20], y [0.2, 0.4, 0.8], target 0.6 -> 15
    for i in range(len(y)):
        if y[i] >= target:
            share = (target - y[i - 1]) / (y[i] - y[i - 1]) if i and y[i] > y[i - 1] else 1.0
            return float(x[i - 1] + share * (x[i] - x[i - 1])) if i else float(x[0])
    return NAN


def shown(values: Float64, *, sign: str = "") -> str:
    """Return mean and interval of the finite values, and their number if some are not finite; "-" without any."""
    finite = values[np.isfinite(values)]
    if len(finite) == 0:
        return "-"
    mean, num = float(finite.mean()), len(finite)
    form = ",.0f" if abs(mean) >= 100 else ".1f" if abs(mean) >= 10 else ".3f"
    text = f"{mean:{sign}{form}}"
    if num > 1:
        from scipy import stats

        text += f" ± {stats.t.ppf(0.975, num - 1) * finite.std(ddof=1) / np.sqrt(num):{form}}"
    return text if num == len(values) else f"{text} ({num} of {len(values)})"


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a Markdown table; the first line is the heading."""
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]) + "\n"


def credit_table(path: Path) -> str | None:
    """Return the table of a record of credit.py, or None without an estimator.

    The gradient from k trees of each prompt is the mean of k vectors v_t, so its cosine with the reference h follows
    from the products alone. For the block of trees S, sum_S dots / (sqrt(sum_SS gram) |h|). T / k blocks without a
    common tree give the mean and its bootstrap interval.
    """
    head, *records = read_records(path)
    if not records:
        return None
    halves, rates = np.array(head["halves"]), np.array(head["rates"])
    # |h|^2 is the mean of the four products. The cosine of the halves is c, and the exact gradient has the cosine
    # sqrt(2 c / (1 + c)) with their mean (Spearman 1910, Brown 1910).
    cosine = halves[0, 1] / np.sqrt(halves[0, 0] * halves[1, 1])
    ceiling = np.sqrt(2 * cosine / (1 + cosine)) if cosine > 0 else NAN
    num_trees = len(records[0]["gram"])
    sizes = [1 << i for i in range(num_trees.bit_length()) if (1 << i) * MIN_BLOCKS <= num_trees or i == 0]
    base = next((each for each in records if each["estimator"] == "grpo"), records[0])
    base_cosines = block_cosines(halves, base, sizes[-1])
    heading = ["estimator", "tokens / tree", *(f"cosine, trees: {size}" for size in sizes)]
    cells = [[*heading, f"against {base['estimator']}", "cosine in the limit", "scale", "relative variance"]]
    for each in records:
        cosines = [block_cosines(halves, each, size) for size in sizes]
        # Estimators on trees have the same trees, so their blocks are pairs.
        against = "" if each is base else with_interval(cosines[-1] - base_cosines, sign="+")
        tokens = f"{np.mean(each['decoded']) / len(rates):.0f}"
        row = [each["estimator"], tokens, *map(with_interval, cosines), against]
        cells.append([*row, *(f"{value:.3g}" for value in limits(halves, each))])
    return (
        f"{len(rates)} prompts with pass rates {rates.min():.2f} to {rates.max():.2f}. Cosine of the halves of the "
        f"reference: {cosine:.3f}; the exact gradient would have {ceiling:.3f} with the whole reference. Intervals of "
        f"95 % by bootstrap over blocks of trees.\n\n{markdown(cells)}"
    )


def block_cosines(halves: Float64, record: Mapping[str, Any], size: int) -> Float64:
    """Return the cosine with the reference for each block of `size` trees, float64 [T // size]; 0 for a zero vector."""
    num = len(record["gram"]) // size
    dots = np.array(record["dots"]).mean(axis=0)[: num * size].reshape(num, size).sum(axis=1)
    # gram [b, i, b, j] -> the sum over i and j of block b
    blocks = np.array(record["gram"])[: num * size, : num * size].reshape(num, size, num, size)
    norms = np.sqrt(np.maximum(np.einsum("bibj->b", blocks), 0.0) * halves.mean())
    cosines: Float64 = np.divide(dots, norms, out=np.zeros(num), where=norms > 0)
    return cosines


def limits(halves: Float64, record: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return three figures of the expected gradients E v and E h, without bias from noise: NaN if a square is <= 0.

    The cosine, which is what more trees approach; the scale E v . E h / |E h|^2; and the variance of one tree of each
    prompt over |E v|^2. They are estimated from the products of different trees and of different halves.
    """
    gram, num = np.array(record["gram"]), len(record["gram"])
    between = (gram.sum() - np.trace(gram)) / (num * (num - 1)) if num > 1 else NAN
    exact, dot = halves[0, 1], np.mean(record["dots"])
    if not (between > 0 and exact > 0):
        return NAN, NAN, NAN
    return dot / np.sqrt(between * exact), dot / exact, (np.trace(gram) / num - between) / between


def with_interval(values: Float64, sign: str = "") -> str:
    """Return the mean and its interval by the percentiles of resampled means."""
    chosen = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[chosen].mean(axis=1), [2.5, 97.5])
    return f"{values.mean():{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
