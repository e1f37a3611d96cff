"""A picture of a training run: what metrics.jsonl holds, as curves over the optimiser steps.

    metrics.jsonl --draw_curves--> curves.png

    +- Loss -----------+  +- Gradient norm --+     one panel per quantity, all over the same steps: loss, gradient
    | \\__      '       |  |  /\\__/\\           |     norm, learning rate, tokens per second, then every other number
    |    \\____________ |  |        \\_________|     that the lines hold, such as the means of an RL objective
    +- Learning rate --+  +- Tokens per second    pale: each step; dark: the mean of the steps around it
    |  /\\____          |  |  ~~~~~~~~~~~~~~~~     a triangle on the upper edge: a step that was skipped

The colours are those of Okabe and Ito, which colour-blind readers tell apart (https://jfly.uni-koeln.de/color/). The
same file gives the same bytes under one version of matplotlib, which is imported only when something is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treepack.errors import TreepackError
from treepack.files.directory import finished_file
from treepack.train.metrics import is_number, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

Float64 = npt.NDArray[np.float64]

_BLUE, _RED, _TEXT, _GREY, _RULE = "#0072B2", "#D55E00", "#222222", "#6B6B6B", "#E4E4E4"
_FEW = 40  # points that are drawn as dots too, for one point makes no line
_PANEL = (4.2, 2.4)  # inches
_DPI = 144
_BINS = 2000  # more than a panel is pixels wide

# Numbers that say what a step was made of, rather than how it went; the second line of the picture sums some of them.
_MAKING = {"step", "epoch", "num_rows", "tokens", "tokens_flat", "total_weight", "seconds", "wait_seconds"}
_TERMS, _PAIRS, _NATS, _ODDS = "share of terms", "share of pairs", "nats per token", "mean over pairs"
_KNOWN = {
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
    """One panel: the `columns` it shows with the name and colour of each; `unit` stands where there is one column."""

    title: str
    unit: str
    columns: dict[str, tuple[str, str]]
    smooth: bool = True
    log: bool = False
    from_zero: bool = False


_FIRST = (
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
    """The steps of a run: `skipped` are the numbers of those without an update; means take `radius` to each side."""

    columns: dict[str, list[Any]]
    numbers: Float64
    skipped: list[int]
    radius: int

    def points(self, name: str) -> tuple[Float64, Float64]:
        """Steps and values where the column has a number."""
        values = np.array([v if is_number(v) else math.nan for v in self.columns.get(name, [])], np.float64)
        there = np.flatnonzero(np.isfinite(values))
        return self.numbers[there], values[there]


def draw_curves(metrics: Path, out: Path) -> None:
    """Draw the curves of a run, which may still be under way; an `out` that exists is replaced.

    Args:
        metrics: a metrics file, as `metrics.MetricsLog` writes it.
        out: a PNG file, whole or absent.

    Raises:
        TreepackError: matplotlib is not installed, the file is damaged or has no step, or `out` cannot be written.
    """
    if out.suffix.lower() != ".png":
        raise TreepackError(f"{out} is to hold a PNG picture; choose a name that ends in .png")
    figure = curves_figure(metrics)
    with finished_file(out) as temporary:
        # The name of matplotlib's version, which it writes by default, would change the bytes.
        figure.savefig(temporary, format="png", backend="agg", dpi=_DPI, metadata={"Software": None})


def curves_figure(metrics: Path) -> Figure:
    """The picture of `draw_curves` as a figure that belongs to no window.

    Raises:
        TreepackError: matplotlib is not installed, or the file is damaged or has no step.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise TreepackError(f"curves cannot be drawn ({error}); pip install 'treepack[plot]'") from error

    steps = _read(metrics)
    panels = _panels(steps)
    across = 2 if len(panels) <= 4 else 3
    down = math.ceil(len(panels) / across)
    head = 0.55 if _keys(steps) else 0.35  # inches
    width, height = across * _PANEL[0], down * _PANEL[1] + head
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, rect=(0, 0, 1, 1 - head / height))
    figure = Figure(figsize=(width, height), facecolor="white", layout=layout)
    grid = figure.subplots(down, across, sharex=True, squeeze=False)
    for panel, axes in zip(panels, grid.flat, strict=False):
        _draw(panel, axes, steps)
    for empty in grid.flat[len(panels) :]:
        empty.set_visible(False)
    for axes in grid.flat[max(0, len(panels) - across) : len(panels)]:
        axes.tick_params(labelbottom=True)
    for axes in grid[-1]:
        axes.set_xlabel("optimiser step", color=_GREY, fontsize=9)
    first, last = steps.numbers[0], steps.numbers[-1]
    margin = max(0.5, (last - first) * 0.02)
    grid[0, 0].set_xlim(first - margin, last + margin)
    grid[0, 0].xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    _head(figure, steps, height)
    return figure


def _read(metrics: Path) -> _Steps:
    columns = read_metrics(metrics)
    numbers = columns.get("step", [])
    if not numbers:
        raise TreepackError(f"{metrics}: holds no step yet; draw its curves once the run has made one")
    skipped = [step for step, rows in zip(numbers, columns.get("skipped_rows", []), strict=False) if rows]
    return _Steps(columns, np.array(numbers, np.float64), skipped, (numbers[-1] - numbers[0]) // 50)


def _panels(steps: _Steps) -> list[_Panel]:
    shown = {name for panel in _FIRST for name in panel.columns}
    others = [name for name in steps.columns if name not in shown | _MAKING and len(steps.points(name)[0])]
    known = {name: _KNOWN.get(name, (name[:1].upper() + name[1:].replace("_", " "), "")) for name in others}
    return [
        *_FIRST,
        *(_Panel(*known[name], {name: ("", _BLUE)}, from_zero=known[name][1] == _TERMS) for name in others),
    ]


def _draw(panel: _Panel, axes: Axes, steps: _Steps) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    found = {name: steps.points(name) for name in panel.columns}
    log = panel.log and all(_spans_decades(values) for _, values in found.values())
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
        _draw_line(axes, found[name], colour, radius=steps.radius if panel.smooth else 0, log=log)
    if not any(len(values) for _, values in found.values()):
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=_GREY, fontsize=9)
        axes.set_yticks([])
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    if steps.skipped:
        edge = axes.get_xaxis_transform()
        marks = axes.plot(steps.skipped, [1.0] * len(steps.skipped), "v", color=_TEXT, markersize=4.5, transform=edge)
        marks[0].set(clip_on=False, in_layout=False)
    _note(axes, panel, logarithmic=log)


def _draw_line(axes: Axes, points: tuple[Float64, Float64], colour: str, *, radius: int, log: bool) -> None:
    """Each point, and where `radius` takes in several, their mean, which on a logarithmic axis is the geometric one."""
    numbers, values = points
    smooth = radius > 1
    (each,) = axes.plot(*thinned(numbers, values, _BINS), color=colour, linewidth=1.5)
    each.set(marker="o" if len(numbers) <= _FEW else "", markersize=4)
    if smooth:
        each.set(linewidth=0.8, alpha=0.35)
        kept = values > 0 if log else np.full(len(values), True)
        mean = moving_mean(numbers[kept], np.log(values[kept]) if log else values[kept], radius)
        axes.plot(*thinned(numbers[kept], np.exp(mean) if log else mean, _BINS), color=colour, linewidth=1.8)


def _note(axes: Axes, panel: _Panel, *, logarithmic: bool) -> None:
    """At the right of the title: the unit, or the name of each line in its colour."""
    named = [(label, colour) for label, colour in panel.columns.values() if label]
    unit = ", ".join(part for part in (panel.unit, "log scale" if logarithmic else "") if part)
    right: Axes | Annotation = axes
    for label, colour in reversed(named or [(unit, _GREY)]):
        place, offset = ((1, 1), (0, 5)) if right is axes else ((0, 0), (-10, 0))
        right = axes.annotate(
            label, place, offset, xycoords="axes fraction" if right is axes else right, textcoords="offset points",
            ha="right", va="bottom", color=colour, fontsize=8.5, annotation_clip=False, in_layout=False,
        )  # fmt: skip


def _head(figure: Figure, steps: _Steps, height: float) -> None:
    """What the run has done in one line, and below it how to read the panels."""
    first, last = int(steps.numbers[0]), int(steps.numbers[-1])
    told = [f"Step {last:,}" if first == last else f"Steps {first:,} to {last:,}"]
    tokens, flat, seconds = (float(steps.points(name)[1].sum()) for name in ("tokens", "tokens_flat", "seconds"))
    if tokens:
        told.append(f"{_short(tokens, 3)} tokens computed")
    if tokens and flat:
        told.append(f"{_short(flat, 3)} if each trajectory stood alone ({flat / tokens:.1f} times as many)")
    if seconds:
        told.append(_duration(seconds))
    figure.text(0.012, 1 - 0.12 / height, "   ".join(told), va="top", fontsize=10.5, color=_TEXT)
    figure.text(0.012, 1 - 0.36 / height, "      ".join(_keys(steps)), va="top", fontsize=8.5, color=_TEXT)


def _keys(steps: _Steps) -> list[str]:
    keys = [f"pale: each step, dark: mean over {2 * steps.radius + 1} steps"] if steps.radius > 1 else []
    if steps.skipped:
        count = len(steps.skipped)
        keys.append(f"\N{BLACK DOWN-POINTING TRIANGLE} {count:,} {'step' if count == 1 else 'steps'} skipped")
    return keys


def moving_mean(numbers: Float64, values: Float64, radius: int) -> Float64:
    """The mean of all values at most `radius` steps away, for each value.

    Args:
        numbers: float64 [n], ascending steps, not all of them there.
        values: float64 [n].
        radius: steps to each side; at the ends there are fewer.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.searchsorted(numbers, numbers - radius, side="left")
    end = np.searchsorted(numbers, numbers + radius, side="right")
    mean: Float64 = (sums[end] - sums[start]) / (end - start)
    return mean


def thinned(numbers: Float64, values: Float64, bins: int) -> tuple[Float64, Float64]:
    """The least and the greatest point of each of `bins` equal runs of points: they draw the same picture sooner.

    Args:
        numbers: float64 [n], ascending steps.
        values: float64 [n].
        bins: number of runs; all points are returned where there are at most twice as many. The ends stay.
    """
    if len(values) <= 2 * bins:
        return numbers, values
    starts = np.linspace(0, len(values), bins + 1).astype(np.int64)
    ends = [
        start + int(pick(values[start:end]))
        for start, end in pairwise(starts.tolist())
        for pick in (np.argmin, np.argmax)
    ]
    kept = np.unique([0, *ends, len(values) - 1])
    return numbers[kept], values[kept]


def _spans_decades(values: Float64) -> bool:
    positive = values[values > 0]
    return len(positive) > 0 and bool((values >= 0).all()) and float(positive.max() / positive.min()) >= 100


def _short(value: float, digits: int = 9) -> str:
    """A number for a person: 12 k, 0.25, 1e-5."""
    if value == 0:
        return "0"
    power = min(int(math.log10(abs(value)) + 1e-9) // 3, 5) if abs(value) >= 1000 else 0
    text = f"{value / 1000**power:.{digits}g}{('', ' k', ' M', ' G', ' T', ' P')[power]}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
