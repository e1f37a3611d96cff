"""A picture of a training run: the numbers of metrics.jsonl as curves over the optimiser steps.

    metrics.jsonl --draw_curves--> curves.png

    +- Loss -----------+  +- Gradient norm --+     one panel per quantity, all over the same steps: loss, gradient
    | \\__      '       |  |  /\\__/\\           |     norm, learning rate, tokens per second, then every other number
    |    \\____________ |  |        \\_________|     of the lines, such as the means of an RL objective
    +- Learning rate --+  +- Tokens per second    pale: each step; dark: the mean of the steps around it
    |  /\\____          |  |  ~~~~~~~~~~~~~~~~     a triangle on the upper edge: a step that was skipped

The colours are from the palette of Okabe and Ito, which colour-blind readers can distinguish
(https://jfly.uni-koeln.de/color/). The same file gives the same bytes with the same version of matplotlib, which is
imported only when a picture is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treepack.errors import TreepackError, install_hint
from treepack.files.directory import finished_file
from treepack.train.watch.metrics import is_number, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

Float64 = npt.NDArray[np.float64]

_BLUE, _RED, _TEXT, _GREY, _RULE = "#0072B2", "#D55E00", "#222222", "#6B6B6B", "#E4E4E4"
_MAX_DOTS = 40  # up to this many points have a dot each, because one point alone makes no line
_PANEL_INCHES = (4.2, 2.4)
_DPI = 144
_BINS = 2000  # more than the pixels of a panel's width, 4.2 * 144 = 605
_MIN_LOG_RANGE = 100  # largest over smallest value: from two decades on, a linear axis hides the small values
_SMOOTH_SHARE = 50  # a moving mean takes 1/50 of the steps to each side, which keeps trends visible

# Numbers about the input of a step, which have no panel; the line above the panels has the sums of some of them.
_INPUT_COLUMNS = set("step epoch num_rows tokens tokens_flat total_weight seconds wait_seconds eval_seconds".split())
# Constant if the policy that is trained is the one that sampled.
_OFF_POLICY_COLUMNS = set("ratio clip_fraction_low clip_fraction_high old_kl".split())
_TERMS, _PAIRS, _NATS, _ODDS = "share of terms", "share of pairs", "nats per token", "mean over pairs"
_TITLES_AND_UNITS = {
    "reward": ("Reward", "mean over trajectories"),
    "ratio": ("Ratio", "new / old probability"),
    "clip_fraction_low": ("Clip fraction low", _TERMS),
    "clip_fraction_high": ("Clip fraction high", _TERMS),
    "old_kl": ("KL from the old policy", _NATS),
    "kl": ("KL from the reference", _NATS),
    "entropy": ("Entropy", _NATS),
    "importance": ("Importance", "weight of a term"),
    "truncated": ("Truncated", _TERMS),
    "accuracy": ("Accuracy", _PAIRS),
    "margin": ("Margin", _ODDS),
    "chosen_reward": ("Chosen reward", _ODDS),
    "rejected_reward": ("Rejected reward", _ODDS),
}


@dataclass(frozen=True)
class _Panel:
    """One panel: its `columns` with the label and colour of each; `unit` is shown if the columns have no labels."""

    title: str
    unit: str
    columns: dict[str, tuple[str, str]]
    smooth: bool = True
    log: bool = False
    from_zero: bool = False


_MAIN_PANELS = (
    _Panel("Loss", "of the objective", {"loss": ("", _BLUE)}),
    _Panel("Gradient norm", "before clipping", {"grad_norm": ("", _BLUE)}, log=True),
    _Panel("Learning rate", "", {"lr": ("", _BLUE)}, smooth=False, from_zero=True),
    _Panel(
        "Tokens per second",
        "",
        {"tokens_per_second": ("computed", _BLUE), "tokens_flat_per_second": ("flat-equivalent", _RED)},
        from_zero=True,
    ),
)


@dataclass(frozen=True)
class _Steps:
    """The steps of a run: `skipped` are the steps without an update; moving means use `radius` steps to each side."""

    columns: dict[str, list[Any]]
    numbers: Float64
    skipped: list[int]
    radius: int

    def points(self, name: str) -> tuple[Float64, Float64]:
        """Return the steps at which the column has a number, and these numbers; float64 [n] each."""
        # [2.5, None, 2.0] at steps 1, 2, 3 -> steps [1, 3], values [2.5, 2.0]
        values = np.array([v if is_number(v) else math.nan for v in self.columns.get(name, [])], np.float64)
        finite = np.flatnonzero(np.isfinite(values))
        return self.numbers[finite], values[finite]


def draw_curves(metrics: Path, out: Path) -> None:
    """Draw the curves of a run, which may still be running; an existing `out` is replaced.

    Args:
        metrics: a metrics file, as `metrics.MetricsLog` writes it.
        out: the PNG file to write; it is whole or absent.

    Raises:
        TreepackError: matplotlib is not installed, the file is damaged or has no step, or `out` cannot be written.
    """
    if out.suffix.lower() != ".png":
        raise TreepackError(f"{out} is not a PNG file; choose a name that ends in .png")
    figure = curves_figure(metrics)
    with finished_file(out, overwrite=True) as temporary:
        # By default matplotlib writes its version into the file, which would change the bytes.
        figure.savefig(temporary, format="png", backend="agg", dpi=_DPI, metadata={"Software": None})


def curves_figure(metrics: Path) -> Figure:
    """Return the picture of `draw_curves` as a figure without a window.

    Raises:
        TreepackError: matplotlib is not installed, or the file is damaged or has no step.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise TreepackError(f"curves cannot be drawn ({error}); {install_hint('plot')}") from error

    steps = _read_steps(metrics)
    panels = _panels(steps)
    across = 2 if len(panels) <= 4 else 3
    down = math.ceil(len(panels) / across)
    head = 0.55 if _legend(steps) else 0.35  # inches: two lines of text, or one
    width, height = across * _PANEL_INCHES[0], down * _PANEL_INCHES[1] + head
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, rect=(0, 0, 1, 1 - head / height))
    figure = Figure(figsize=(width, height), facecolor="white", layout=layout)
    grid = figure.subplots(down, across, sharex=True, squeeze=False)
    for panel, axes in zip(panels, grid.flat, strict=False):
        _draw(panel, axes, steps)
    for empty in grid.flat[len(panels) :]:
        empty.set_visible(False)
    # A shared axis has labels only in the last row, which may be incomplete. 5 panels, 3 across: panels 2, 3, 4, so
    # that panel 2, above an empty place, has labels too.
    for axes in grid.flat[max(0, len(panels) - across) : len(panels)]:
        axes.tick_params(labelbottom=True)
    for axes in grid[-1]:
        axes.set_xlabel("optimiser step", color=_GREY, fontsize=9)
    first, last = steps.numbers[0], steps.numbers[-1]
    margin = max(0.5, (last - first) * 0.02)
    grid[0, 0].set_xlim(first - margin, last + margin)
    grid[0, 0].xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    _draw_head(figure, steps, height)
    return figure


def _read_steps(metrics: Path) -> _Steps:
    columns = read_metrics(metrics)
    numbers = columns.get("step", [])
    if not numbers:
        raise TreepackError(f"{metrics}: contains no step yet; draw the curves after the first step of the run")
    skipped = [step for step, rows in zip(numbers, columns.get("skipped_rows", []), strict=False) if rows]
    return _Steps(columns, np.array(numbers, np.float64), skipped, (numbers[-1] - numbers[0]) // _SMOOTH_SHARE)


def _panels(steps: _Steps) -> list[_Panel]:
    """Return the main panels, and one panel for each other column that has a number."""
    panels = [*_MAIN_PANELS]
    if len(steps.points("eval_loss")[0]):  # held-out rows have a second line in the panel of the loss
        panels[0] = replace(panels[0], columns={"loss": ("training", _BLUE), "eval_loss": ("held-out", _RED)})
    excluded = {name for panel in panels for name in panel.columns} | _INPUT_COLUMNS
    if _is_on_policy(steps):
        excluded |= _OFF_POLICY_COLUMNS
    for name in steps.columns:
        if name not in excluded and len(steps.points(name)[0]):
            # A column without an entry: "old_entropy" -> "Old entropy", without a unit.
            title, unit = _TITLES_AND_UNITS.get(name, (name[:1].upper() + name[1:].replace("_", " "), ""))
            panels.append(_Panel(title, unit, {name: ("", _BLUE)}, from_zero=unit == _TERMS))
    return panels


def _is_on_policy(steps: _Steps) -> bool:
    """Return true if every ratio is 1, so that nothing is clipped and no KL differs from 0."""
    values = steps.points("ratio")[1]
    return len(values) > 0 and bool(np.allclose(values, 1, rtol=0, atol=1e-9))


def _draw(panel: _Panel, axes: Axes, steps: _Steps) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    points = {name: steps.points(name) for name in panel.columns}
    log = panel.log and all(_spans_decades(values) for _, values in points.values())
    axes.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold", color=_TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_GREY, labelcolor=_TEXT, labelsize=8.5, length=3)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    if log:
        axes.set_yscale("log", nonpositive="clip")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    for name, (_, colour) in panel.columns.items():
        _draw_line(axes, points[name], colour, radius=steps.radius if panel.smooth else 0, log=log)
    if not any(len(values) for _, values in points.values()):
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=_GREY, fontsize=9)
        axes.set_yticks([])
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    if steps.skipped:
        edge = axes.get_xaxis_transform()  # x in steps, y in parts of the panel: y 1 is the upper edge
        marks = axes.plot(steps.skipped, [1.0] * len(steps.skipped), "v", color=_TEXT, markersize=4.5, transform=edge)
        marks[0].set(clip_on=False, in_layout=False)
    _draw_labels(axes, panel, logarithmic=log)


def _draw_line(axes: Axes, points: tuple[Float64, Float64], colour: str, *, radius: int, log: bool) -> None:
    """Draw each point, and the moving mean if `radius` is 2 or more; on a logarithmic axis the geometric mean."""
    numbers, values = points
    smooth = radius > 1
    (each,) = axes.plot(*thin_points(numbers, values, _BINS), color=colour, linewidth=1.5)
    each.set(marker="o" if len(numbers) <= _MAX_DOTS else "", markersize=4)
    if smooth:
        each.set(linewidth=0.8, alpha=0.35)
        # The mean of logarithms, because on this axis an arithmetic mean would follow the largest values.
        mask = values > 0 if log else np.full(len(values), True)
        mean = moving_mean(numbers[mask], np.log(values[mask]) if log else values[mask], radius)
        axes.plot(*thin_points(numbers[mask], np.exp(mean) if log else mean, _BINS), color=colour, linewidth=1.8)


def _draw_labels(axes: Axes, panel: _Panel, *, logarithmic: bool) -> None:
    """Write the unit, or the label of each line in its colour, to the right of the title."""
    labels = [(label, colour) for label, colour in panel.columns.values() if label]
    unit = ", ".join(part for part in (panel.unit, "log scale" if logarithmic else "") if part)
    # From right to left: the last label ends at the corner of the panel, each other one left of the one after it.
    right: Axes | Annotation = axes
    for label, colour in reversed(labels or [(unit, _GREY)]):
        place, offset = ((1, 1), (0, 5)) if right is axes else ((0, 0), (-10, 0))
        right = axes.annotate(
            label, place, offset, xycoords="axes fraction" if right is axes else right, textcoords="offset points",
            ha="right", va="bottom", color=colour, fontsize=8.5, annotation_clip=False, in_layout=False,
        )  # fmt: skip


def _draw_head(figure: Figure, steps: _Steps, height: float) -> None:
    """Write a summary of the run above the panels, and the legend below the summary."""
    first, last = int(steps.numbers[0]), int(steps.numbers[-1])
    summary = [f"Step {last:,}" if first == last else f"Steps {first:,} to {last:,}"]
    tokens, flat, seconds = (float(steps.points(name)[1].sum()) for name in ("tokens", "tokens_flat", "seconds"))
    if tokens:
        summary.append(f"{_short(tokens, 3)} tokens computed")
    if tokens and flat:
        summary.append(f"{_short(flat, 3)} if each trajectory is computed alone ({flat / tokens:.1f} times as many)")
    if seconds:
        summary.append(_duration(seconds))
    figure.text(0.012, 1 - 0.12 / height, "   ".join(summary), va="top", fontsize=10.5, color=_TEXT)
    figure.text(0.012, 1 - 0.36 / height, "      ".join(_legend(steps)), va="top", fontsize=8.5, color=_TEXT)


def _legend(steps: _Steps) -> list[str]:
    entries = [f"pale: each step, dark: mean over {2 * steps.radius + 1} steps"] if steps.radius > 1 else []
    if steps.skipped:
        count = len(steps.skipped)
        entries.append(f"\N{BLACK DOWN-POINTING TRIANGLE} {count:,} {'step' if count == 1 else 'steps'} skipped")
    return entries


def moving_mean(numbers: Float64, values: Float64, radius: int) -> Float64:
    """Return for each value the mean of all values at most `radius` steps away, float64 [n].

    Args:
        numbers: float64 [n], ascending steps; some may be missing.
        values: float64 [n].
        radius: steps to each side; at the ends there are fewer.
    """
    # numbers [1, 2, 4], values [3, 5, 7], radius 1: sums [0, 3, 8, 15], start [0, 0, 2], end [2, 2, 3] -> [4, 4, 7]
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.searchsorted(numbers, numbers - radius, side="left")
    end = np.searchsorted(numbers, numbers + radius, side="right")
    mean: Float64 = (sums[end] - sums[start]) / (end - start)
    return mean


def thin_points(numbers: Float64, values: Float64, bins: int) -> tuple[Float64, Float64]:
    """Return the lowest and the highest point of each of `bins` bins: the same picture with fewer points.

    The first and the last point are always among them.

    Args:
        numbers: float64 [n], ascending steps.
        values: float64 [n].
        bins: number of bins with equally many points each; at most twice as many points are returned unchanged.
    """
    if len(values) <= 2 * bins:
        return numbers, values
    # values [5, 1, 2, 9, 0, 3], bins 2: bins [0, 3) and [3, 6) with minima 1, 4 and maxima 0, 3 -> points 0, 1, 3, 4, 5
    starts = np.linspace(0, len(values), bins + 1).astype(np.int64)
    ends = [
        start + int(pick(values[start:end]))
        for start, end in pairwise(starts.tolist())
        for pick in (np.argmin, np.argmax)
    ]
    points = np.unique([0, *ends, len(values) - 1])
    return numbers[points], values[points]


def _spans_decades(values: Float64) -> bool:
    positive = values[values > 0]
    return len(positive) > 0 and bool((values >= 0).all()) and float(positive.max() / positive.min()) >= _MIN_LOG_RANGE


def _short(value: float, digits: int = 9) -> str:
    """Return a number in a short form: 12 k, 0.25, 1e-5."""
    if value == 0:
        return "0"
    # Powers of 1000 in the number: 999 -> 0, 12000 -> 1, 3e6 -> 2. The 1e-9 is for a logarithm that is rounded to just
    # below a whole number.
    power = min(int(math.log10(abs(value)) + 1e-9) // 3, 5) if abs(value) >= 1000 else 0
    text = f"{value / 1000**power:.{digits}g}{('', ' k', ' M', ' G', ' T', ' P')[power]}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
