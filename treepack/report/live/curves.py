"""The curves of a run as Vega-Lite charts: loss, gradient norm, learning rate, speed, and every other number.

    RunSeries --CurveView--> charts      specifications without data, one for each quantity
                             data        the points of all charts, thinned: {chart: {line: CurvePoints}}
                             new_data    the points of the steps since then, which are appended to them

A pale line has each step, and a dark line the mean of the last steps. A triangle on the upper edge is a step that was
skipped. A browser gets specifications and data apart; `whole_charts` joins them for pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.report.charts import DATA, MORE, SECOND, ReportChart, Spec, framed
from treepack.report.live.run_series import RunSeries, thin_points, trailing_mean
from treepack.report.words import printable
from treepack.trajectory import Float64

_BINS = 500  # of a line: more than the pixels of a chart's width
_MEAN_BINS = 150  # of a mean, which is smooth
_SMOOTH_SHARE = 25  # the mean takes 1/25 of the steps
_FEW_POINTS = 40  # up to this many points have a dot each, because one point alone makes no line
_MIN_LOG_RANGE = 100  # largest over smallest value: from two decades on, a linear axis hides the small values
# After this many new steps, or a quarter of all, a view is made again: its lines are thinned and its means are longer.
MAX_NEW, NEW_SHARE = 2000, 4
ZERO = 1e-12  # smaller numbers are what rounding left of 0, such as the loss of a policy
# 0.25, 12k, 0; eight digits, so that the labels of a curve that hardly moves differ
_NUMBER = (
    f"abs(datum.value) < {ZERO} ? '0' : abs(datum.value) < 1000 ? format(datum.value, '.8~g') : "
    "format(datum.value, '~s')"
)

# Numbers about the input of a step, which have no chart.
_INPUT_COLUMNS = set("step epoch num_rows tokens tokens_flat total_weight seconds wait_seconds eval_seconds".split())
# Constant if the policy that is trained is the one that sampled.
_OFF_POLICY_COLUMNS = set("ratio clip_fraction_low clip_fraction_high old_kl".split())
_SAMPLER = "sampler_kl"  # and sampler_kl_to_256, ...: the same by position, in one chart
TERMS, PAIRS, NATS, ODDS = "share of terms", "share of pairs", "nats per token", "mean over pairs"
TITLES_AND_UNITS = {
    "reward": ("Reward", "mean over trajectories"),
    "kl": ("KL from the reference", NATS),
    "entropy": ("Entropy", NATS),
    "clip_fraction_high": ("Clip fraction high", TERMS),
    "clip_fraction_low": ("Clip fraction low", TERMS),
    "ratio": ("Ratio", "new / old probability"),
    "old_kl": ("KL from the old policy", NATS),
    "importance": ("Importance", "weight of a term"),
    "truncated": ("Truncated", TERMS),
    "masked": ("Masked", TERMS),
    "effective_sample_size": ("Effective sample size", TERMS),
    "zero_advantage": ("Advantage 0", TERMS),
    "accuracy": ("Accuracy", PAIRS),
    "margin": ("Margin", ODDS),
    "chosen_reward": ("Chosen reward", ODDS),
    "rejected_reward": ("Rejected reward", ODDS),
    "peak_gib": ("GPU memory", "peak of the step, GiB"),
}

_CurvePoints = dict[str, list[list[float]]]


@dataclass(frozen=True, slots=True)
class _CurvePanel:
    """The columns of one chart with the label of each; `log` if its axis is logarithmic."""

    title: str
    unit: str
    columns: dict[str, str]
    smooth: bool = True
    log: bool = False
    from_zero: bool = False


class CurveView:
    """The charts of a run as a browser shows them; `num_steps` are the steps that it was made for."""

    def __init__(self, series: RunSeries, *, bins: int = _BINS) -> None:
        """Choose the charts of `series`, their axes, and the number of steps of a mean."""
        self.num_steps, self._bins = len(series), bins
        self._names = series.names
        steps = series.steps
        self.window = 1 + int(steps[-1] - steps[0]) // _SMOOTH_SHARE if len(steps) else 1
        self.panels = _panels(series)

    def is_outdated(self, series: RunSeries) -> bool:
        """Return true if the run has new columns, or many more steps, so that a new view is due."""
        new = len(series) - self.num_steps
        few = self.num_steps <= _FEW_POINTS < len(series)  # dots become a line
        return series.names != self._names or few or new > min(MAX_NEW, 20 + self.num_steps // NEW_SHARE)

    @property
    def charts(self) -> list[ReportChart]:
        """The charts without their data: the marks read `points`, `mean` and `skipped`."""
        few = self.num_steps <= _FEW_POINTS
        return [
            ReportChart(f"curve-{i}", panel.title, _spec(panel, few=few), (), ()) for i, panel in enumerate(self.panels)
        ]

    def data(self, series: RunSeries) -> dict[str, Any]:
        """Return the points of all steps, at most 2 * bins + 2 on a line."""
        return self._data(series, 0, self._bins, _MEAN_BINS)

    def new_data(self, series: RunSeries, start: int) -> dict[str, Any]:
        """Return the points from step number `start` on; they continue the points of `data`, without thinning."""
        return self._data(series, start, len(series), len(series))

    def _data(self, series: RunSeries, start: int, bins: int, mean_bins: int) -> dict[str, Any]:
        steps = series.steps
        first = steps[start] if start < len(steps) else np.inf
        data: dict[str, Any] = {"skipped": [step for step in series.skipped if step >= first]}
        for i, panel in enumerate(self.panels):
            points: dict[str, _CurvePoints] = {"points": {}, "mean": {}}
            for name, label in panel.columns.items():
                at, values = _finite(steps, series.column(name), log=panel.log)
                from_ = int(np.searchsorted(at, first))
                points["points"][label] = _pairs(*thin_points(at[from_:], values[from_:], bins))
                if panel.smooth and self.window > 2:
                    # The mean of logarithms, because on this axis an arithmetic mean would follow the largest values.
                    mean = trailing_mean(at, np.log(values) if panel.log else values, self.window, from_)
                    mean = np.exp(mean) if panel.log else mean
                    points["mean"][label] = _pairs(*thin_points(at[from_:], mean, mean_bins))
            data[f"curve-{i}"] = points
        return data


def whole_charts(series: RunSeries) -> list[ReportChart]:
    """Return the charts of a run with their data, for pictures."""
    view = CurveView(series)
    data = view.data(series)
    charts = []
    for chart in view.charts:
        own = {name: _rows(lines) for name, lines in data[chart.name].items()}
        own["skipped"] = [{"step": step} for step in data["skipped"]]
        charts.append(ReportChart(chart.name, chart.title, {**chart.spec, "datasets": own}, (), ()))
    return charts


def _rows(lines: _CurvePoints) -> list[dict[str, Any]]:
    # {"loss": [[1, 2], [2.5, 2.0]]} -> a record for each point, as Vega reads them
    return [
        {"line": label, "step": step, "value": value}
        for label, (steps, values) in lines.items()
        for step, value in zip(steps, values, strict=True)
    ]


def _pairs(steps: Float64, values: Float64) -> list[list[float]]:
    return [steps.tolist(), values.tolist()]


def _finite(steps: Float64, values: Float64, *, log: bool = False) -> tuple[Float64, Float64]:
    """Return the steps at which the column has a number, and these numbers; a logarithmic axis has no 0."""
    known = np.isfinite(values) & (values > 0) if log else np.isfinite(values)
    return steps[known], values[known]


def _panels(series: RunSeries) -> list[_CurvePanel]:
    """Return the panels of loss, gradient norm, learning rate and speed, and one for each other column of numbers."""
    known = {name: values for name in series.names if len(values := _finite(series.steps, series.column(name))[1])}
    loss = {"loss": "training"} | ({"eval_loss": "held-out"} if "eval_loss" in known else {})
    norms = known.get("grad_norm", np.empty(0))
    log = _spans_decades(norms)
    speeds = {"tokens_per_second": "computed", "tokens_flat_per_second": "flat-equivalent"}
    panels = [
        _CurvePanel("Loss", "of the objective", loss),
        _CurvePanel("Gradient norm", "before clipping" + (", log scale" if log else ""), {"grad_norm": ""}, log=log),
        _CurvePanel("Learning rate", "", {"lr": ""}, smooth=False, from_zero=True),
        _CurvePanel("Tokens per second", "", speeds, from_zero=True),
    ]
    excluded = {name for panel in panels for name in panel.columns} | _INPUT_COLUMNS
    if "ratio" in known and bool(np.allclose(known["ratio"], 1, rtol=0, atol=1e-9)):
        excluded |= _OFF_POLICY_COLUMNS
    others = []
    if _SAMPLER in known:
        lines = {name: _position(name) for name in known if name.startswith(_SAMPLER)}
        others.append(_CurvePanel("KL from the sampler", f"{NATS}, by position", lines, from_zero=True))
        excluded |= lines.keys()
    for name in known:
        if name not in excluded:
            # A column without an entry: "old_entropy" -> "Old entropy", without a unit.
            title, unit = TITLES_AND_UNITS.get(name, (title_of(name), ""))
            # Equal values differ by the rounding of their means, which must not fill the chart.
            equal = float(np.ptp(known[name])) <= 1e-9 * float(np.abs(known[name]).max())
            others.append(_CurvePanel(title, unit, {name: ""}, from_zero=unit == TERMS or equal))
    order = [title for title, _ in TITLES_AND_UNITS.values()]
    others.sort(key=lambda panel: order.index(panel.title) if panel.title in order else len(order))
    return [panels[0], *others[:4], *panels[1:], *others[4:]]


def _position(name: str) -> str:
    return name.removeprefix(f"{_SAMPLER}_").replace("_", " ") if name != _SAMPLER else "all"


def title_of(name: str) -> str:
    """Return a column's name as a title, without characters that could change the order or the lines of a text."""
    return printable(name[:1].upper() + name[1:].replace("_", " "))


def _spans_decades(values: Float64) -> bool:
    positive = values[values > 0]
    return len(positive) > 0 and bool((values >= 0).all()) and float(positive.max() / positive.min()) >= _MIN_LOG_RANGE


def _spec(panel: _CurvePanel, *, few: bool) -> Spec:
    """Return the specification of a panel: each step pale, means dark, and a triangle for each skipped step."""
    labels = list(panel.columns.values())
    x: Spec = {"field": "step", "type": "quantitative", "title": "optimiser step"}
    x |= {"axis": {"tickMinStep": 1, "grid": False}, "scale": {"zero": False, "nice": False, "padding": 6}}
    y: Spec = {"field": "value", "type": "quantitative", "title": panel.unit or None}
    y |= {"scale": {"type": "log"} if panel.log else {"zero": panel.from_zero}}
    y |= {"axis": {"tickCount": 5, "labelExpr": _NUMBER}}
    legend: Spec | None = None
    if len(labels) > 1:
        legend = {"orient": "top", "title": None, "symbolType": "stroke", "symbolOpacity": 1}
    colour: Spec = {"field": "line", "type": "nominal", "legend": legend}
    colour |= {"scale": {"domain": labels, "range": [DATA, SECOND, *MORE][: len(labels)]}}
    tooltip = [
        {"field": "step", "title": "step", "format": ","},
        {"field": "value", "title": panel.title.lower(), "format": ".5~g"},
    ]
    line: Spec = {"encoding": {"x": x, "y": y, "color": colour, "tooltip": tooltip}}
    smooth = panel.smooth and not few
    each: Spec = {"type": "line", "strokeWidth": 1 if smooth else 1.8, "opacity": 0.25 if smooth else 1}
    each |= {"point": {"size": 25}} if few else {}
    layers: list[Spec] = [
        {"data": {"name": "points"}, "mark": each, **line},
        {"data": {"name": "mean"}, "mark": {"type": "line", "strokeWidth": 2}, **line},
    ]
    triangle = {"type": "point", "shape": "triangle-down", "filled": True, "color": "var(--text)", "opacity": 1}
    skipped = {"x": {"field": "step", "type": "quantitative"}, "y": {"value": 4}}
    skipped |= {"tooltip": [{"field": "step", "title": "skipped step"}]}
    layers.append({"data": {"name": "skipped"}, "mark": triangle, "encoding": skipped})
    return framed(panel.title, {"datasets": {"points": [], "mean": [], "skipped": []}, "layer": layers})
