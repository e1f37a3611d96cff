"""A picture of a training run: the numbers of metrics.jsonl as curves over the optimiser steps.

    metrics.jsonl --draw_curves--> curves.png

    +- Loss -----------+  +- Gradient norm --+     one panel per quantity, all over the same steps: loss, gradient
    | \\__      '       |  |  /\\__/\\           |     norm, learning rate, tokens per second, then every other number
    |    \\____________ |  |        \\_________|     of the lines, such as the means of an RL objective
    +- Learning rate --+  +- Tokens per second    pale: each step; dark: the mean of the steps around it
    |  /\\____          |  |  ~~~~~~~~~~~~~~~~     a triangle on the upper edge: a step that was skipped

The picture is a Vega-Lite specification that vl-convert renders. The colours are from the palette of Okabe and Ito,
which colour-blind readers can distinguish (https://jfly.uni-koeln.de/color/). The same file gives the same bytes with
the same version of vl-convert, which is imported only when a picture is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treepack.errors import TreepackError, install_hint
from treepack.files.directory import finished_file
from treepack.train.watch.metrics import is_number, read_metrics

Spec = dict[str, Any]
Float64 = npt.NDArray[np.float64]

_BLUE, _RED, _TEXT, _GREY, _RULE = "#0072B2", "#D55E00", "#222222", "#6B6B6B", "#E4E4E4"
_MAX_DOTS = 40  # up to this many points have a dot each, because one point alone makes no line
_PANEL = {"width": 330, "height": 180}  # pixels
_SCALE = 1.6  # pixels of the file for each of them
_BINS = 2000  # more than the pixels of a panel's width in the file, 330 * 1.6 = 528
_NUMBER = "abs(datum.value) < 1000 ? format(datum.value, '~g') : format(datum.value, '~s')"  # 0.25, 12k
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
        TreepackError: vl-convert is not installed, the file is damaged or has no step, or `out` cannot be written.
    """
    if out.suffix.lower() != ".png":
        raise TreepackError(f"{out} is not a PNG file; choose a name that ends in .png")
    try:
        import vl_convert
    except ImportError as error:
        raise TreepackError(f"curves cannot be drawn ({error}); {install_hint('report')}") from error
    picture = vl_convert.vegalite_to_png(curves_spec(metrics), scale=_SCALE)
    with finished_file(out, overwrite=True) as temporary:
        temporary.write_bytes(picture)


def curves_spec(metrics: Path) -> Spec:
    """Return the picture of `draw_curves` as a Vega-Lite specification.

    Raises:
        TreepackError: the file is damaged or has no step.
    """
    steps = _read_steps(metrics)
    panels = _panels(steps)
    head: Spec = {
        "text": _summary(steps),
        "subtitle": _legend(steps),
        "anchor": "start",
        "fontSize": 14,
        "fontWeight": "normal",
    }
    return {
        "title": head | {"color": _TEXT, "subtitleColor": _TEXT, "subtitleFontSize": 11, "offset": 14},
        "background": "white",
        "padding": 12,
        "columns": 2 if len(panels) <= 4 else 3,
        "concat": [_drawn(panel, steps) for panel in panels],
        "resolve": {"scale": {"color": "independent"}},
        "config": {"font": "sans-serif", "view": {"stroke": None}, "axis": {"labelColor": _TEXT, "tickColor": _GREY}},
    }


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


def _drawn(panel: _Panel, steps: _Steps) -> Spec:
    """Return the specification of one panel: a layer for each line, and one for the marks of skipped steps."""
    points = {name: steps.points(name) for name in panel.columns}
    log = panel.log and all(_spans_decades(values) for _, values in points.values())
    unit = ", ".join(text for text in (panel.unit, "log scale" if log else "") if text)
    title: Spec = {"text": panel.title, "subtitle": unit, "anchor": "start", "color": _TEXT, "subtitleColor": _GREY}
    first, last = float(steps.numbers[0]), float(steps.numbers[-1])
    margin = max(0.5, (last - first) * 0.02)
    # Labels at whole steps only, and points on the edge of the panel are drawn whole.
    axis = {
        "title": "optimiser step",
        "titleColor": _GREY,
        "titleFontWeight": "normal",
        "tickMinStep": 1,
        "grid": False,
    }
    x: Spec = {
        "field": "step",
        "type": "quantitative",
        "axis": axis,
        "scale": {"domain": [first - margin, last + margin]},
    }
    layers = [
        layer
        for name, line in panel.columns.items()
        for layer in _line_layers(points[name], line, radius=steps.radius if panel.smooth else 0, log=log)
    ]
    if not any(len(values) for _, values in points.values()):
        layers.append({"data": {"values": [{}]}, "mark": {"type": "text", "text": "no finite value", "color": _GREY}})
    else:
        y: Spec = {"field": "value", "type": "quantitative", "title": None}
        # Equal values differ by the rounding of their means, which must not fill the panel.
        every = np.concatenate([values for _, values in points.values()])
        zero = panel.from_zero or (not log and float(np.ptp(every)) <= 1e-9 * float(np.abs(every).max()))
        y |= {"scale": {"type": "log" if log else "linear", "zero": zero}}
        y |= {"axis": {"labelExpr": _NUMBER, "tickCount": 5, "gridColor": _RULE, "domainColor": _GREY}}
        names = {line[0]: line[1] for line in panel.columns.values()}
        legend = (
            {"orient": "top-right", "title": None, "offset": 0, "symbolType": "stroke", "symbolOpacity": 1}
            if len(names) > 1
            else None
        )
        colour: Spec = {"field": "line", "type": "nominal", "legend": legend}
        colour |= {"scale": {"domain": [*names], "range": [*names.values()]}}
        layers = [layer | {"encoding": {"x": x, "y": y, "color": colour}} for layer in layers]
    if steps.skipped:
        marks = {"type": "point", "shape": "triangle-down", "filled": True, "color": _TEXT, "opacity": 1, "size": 40}
        skipped = [{"step": int(step)} for step in steps.skipped]
        layers.append({"data": {"values": skipped}, "mark": marks, "encoding": {"x": x, "y": {"value": 0}}})
    return _PANEL | {"title": title, "layer": layers}


def _line_layers(points: tuple[Float64, Float64], line: tuple[str, str], *, radius: int, log: bool) -> list[Spec]:
    """Return each point, and the moving mean if `radius` is 2 or more; on a logarithmic axis the geometric mean."""
    numbers, values = points
    if log:  # such an axis has no 0
        numbers, values = numbers[values > 0], values[values > 0]
    smooth = radius > 1
    mark: Spec = {"type": "line", "strokeWidth": 1.5, "point": {"size": 25} if len(numbers) <= _MAX_DOTS else False}
    if not smooth:
        return [_line_layer(numbers, values, line[0], mark)]
    pale = mark | {"strokeWidth": 0.8, "opacity": 0.35}
    # The mean of logarithms, because on this axis an arithmetic mean would follow the largest values.
    mean = moving_mean(numbers, np.log(values) if log else values, radius)
    return [
        _line_layer(numbers, values, line[0], pale),
        _line_layer(numbers, np.exp(mean) if log else mean, line[0], mark | {"strokeWidth": 1.8, "point": False}),
    ]


def _line_layer(numbers: Float64, values: Float64, label: str, mark: Spec) -> Spec:
    thin = zip(*(each.tolist() for each in thin_points(numbers, values, _BINS)), strict=True)
    return {"data": {"values": [{"step": step, "value": value, "line": label} for step, value in thin]}, "mark": mark}


def _summary(steps: _Steps) -> str:
    """Return the line above the panels."""
    first, last = int(steps.numbers[0]), int(steps.numbers[-1])
    summary = [f"Step {last:,}" if first == last else f"Steps {first:,} to {last:,}"]
    tokens, flat, seconds = (float(steps.points(name)[1].sum()) for name in ("tokens", "tokens_flat", "seconds"))
    if tokens:
        summary.append(f"{_short(tokens, 3)} tokens computed")
    if tokens and flat:
        summary.append(f"{_short(flat, 3)} if each trajectory is computed alone ({flat / tokens:.1f} times as many)")
    if seconds:
        summary.append(_duration(seconds))
    return ",  ".join(summary)


def _legend(steps: _Steps) -> list[str]:
    """Return the lines below the summary."""
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
