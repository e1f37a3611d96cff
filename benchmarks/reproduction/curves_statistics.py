"""Intervals, interpolation and pictures for the tables of the reproduction.

five paired seeds --t_interval--> mean and half the width of its interval of 95 %
repetitions --bootstrap_interval--> lower and upper bound
lines with bands --draw--> SVG
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError, install_hint
from treepack.trajectory import Float64, Int64

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222", "#8C6BB1")
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line of a picture: `x` float64 [n], `y` float64 [n], and the bounds of its band if there is one."""

    x: Float64
    y: Float64
    low: Float64 | None = None
    high: Float64 | None = None
    dashed: bool = False


def t_interval(values: Float64) -> tuple[float, float]:
    """Return the mean, and half the width of its interval of 95 % by Student's t; infinite for a single value."""
    from scipy import stats

    num = len(values)
    if num < 2:
        return float(np.mean(values)), float("inf")
    half = stats.t.ppf(0.975, num - 1) * np.std(values, ddof=1) / np.sqrt(num)
    return float(np.mean(values)), float(half)


def bootstrap_interval(statistic: Callable[[Int64], float], num: int, *, seed: int = 0) -> tuple[float, float]:
    """Return the interval of 95 % of a statistic of `num` repetitions, by the percentiles of resampled ones.

    Args:
        statistic: of the repetitions with the indices int64 [num], which may occur several times.
        num: number of repetitions.
        seed: seed of the resampling.
    """
    rng = np.random.default_rng(seed)
    values = [statistic(rng.integers(num, size=num)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def first_crossing(x: Float64, y: Float64, target: float) -> float:
    """Return the first x at which the line through the points reaches `target`, NaN if it never does."""
    # x [0, 10, 20], y [0.2, 0.4, 0.8], target 0.6 -> 15
    for i in range(len(y)):
        if y[i] >= target:
            if i == 0 or y[i] == y[i - 1]:
                return float(x[i])
            return float(x[i - 1] + (target - y[i - 1]) / (y[i] - y[i - 1]) * (x[i] - x[i - 1]))
    return float("nan")


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(lines: Mapping[str, DrawnLine], out: Path, *, across: str, up: str, log: bool = False) -> None:
    """Draw lines with their bands as an SVG file with the same bytes every time; an existing file is replaced.

    Raises:
        TreepackError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TreepackError(f"plots cannot be drawn ({error}); {install_hint('plot')}") from error
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes: Any = figure.subplots()
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        style = "--" if line.dashed or number >= len(COLOURS) else "-"
        axes.plot(line.x, line.y, style, color=colour, label=name, linewidth=1.5)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    if log:
        axes.set_xscale("log")
    axes.set(xlabel=across, ylabel=up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "treepack"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
