"""The curves of a run: a chart for each metric, every point in its place, thinned and appended without a change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.run_folder import step_record
from treepack.report.charts import Spec
from treepack.report.live.curves import CurveView, whole_charts
from treepack.report.live.facts import shown_number
from treepack.report.live.run_series import RunSeries, thin_points, trailing_mean
from treepack.report.pictures import light_colours, printed_spec

BASE = ["Loss", "Gradient norm", "Learning rate", "Tokens per second"]


def series_of(*records: dict[str, Any]) -> RunSeries:
    series = RunSeries()
    for record in records:
        series.add(record)
    return series


def charts(series: RunSeries) -> dict[str, Spec]:
    return {chart.title: chart.spec for chart in whole_charts(series)}


def points(spec: Spec, kind: str = "points") -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in spec["datasets"][kind]:
        lines.setdefault(row["line"], []).append((row["step"], row["value"]))
    return lines


def test_a_run_has_four_charts_and_each_other_number_one_more() -> None:
    assert list(charts(series_of(*map(step_record, (1, 2, 3))))) == BASE
    more = {"old_kl": 0.1, "reward": 0.5, "mean_turns": 4, "always_nan": math.nan, "note": "x"}
    rich = charts(series_of(*(step_record(step, **more) for step in (1, 2, 3))))
    assert list(rich) == ["Loss", "Reward", "KL from the old policy", "Mean turns", *BASE[1:]]


def test_the_loss_of_held_out_rows_is_a_second_line_at_its_steps() -> None:
    records = [step_record(1), step_record(2, eval_loss=1.5, eval_seconds=9.0), step_record(3)]
    found = charts(series_of(*records, step_record(4, eval_loss=1.25)))
    assert list(found) == BASE
    lines = points(found["Loss"])
    assert lines == {"training": [(1, 2), (2, 1), (3, 2 / 3), (4, 0.5)], "held-out": [(2, 1.5), (4, 1.25)]}


def test_charts_about_the_old_policy_are_left_out_while_every_ratio_is_one() -> None:
    means = {"reward": 0.5, "ratio": 1.0, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0, "old_kl": 0.0}
    records = [step_record(step, **means, entropy=2.0) for step in (1, 2)]
    assert list(charts(series_of(*records))) == ["Loss", "Reward", "Entropy", *BASE[1:]]
    records.append(step_record(3, **{**means, "ratio": 1.001}, entropy=2.0))
    assert "Clip fraction high" in charts(series_of(*records))


def test_the_divergence_from_the_sampler_is_one_chart_with_a_line_for_each_part() -> None:
    means = {"sampler_kl": 0.1, "sampler_kl_to_256": 0.05, "sampler_kl_to_1k": 0.2}
    found = charts(series_of(*(step_record(step, **means) for step in (1, 2))))
    assert list(found) == ["Loss", "KL from the sampler", *BASE[1:]]
    assert points(found["KL from the sampler"]) == {
        "all": [(1, 0.1), (2, 0.1)],
        "to 256": [(1, 0.05), (2, 0.05)],
        "to 1k": [(1, 0.2), (2, 0.2)],
    }


def test_skipped_steps_are_marked_in_every_chart() -> None:
    records = [
        step_record(step, loss=None if step == 2 else 1.0, skipped_rows=[7] * (step in (2, 5))) for step in range(1, 7)
    ]
    for title, spec in charts(series_of(*records)).items():
        assert spec["datasets"]["skipped"] == [{"step": 2}, {"step": 5}], title
    assert [step for step, _ in points(charts(series_of(*records))["Loss"])["training"]] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("norms", "scale"), [([1, 99], "linear"), ([1, 100], "log"), ([0, 1, 100], "log"), ([0, 0], "linear")]
)
def test_the_gradient_norm_has_a_logarithmic_axis_if_it_spans_decades(norms: list[float], scale: str) -> None:
    spec = charts(series_of(*(step_record(i, grad_norm=norm) for i, norm in enumerate(norms, 1))))["Gradient norm"]
    assert spec["layer"][0]["encoding"]["y"]["scale"].get("type", "linear") == scale
    assert points(spec)[""] == [(i, norm) for i, norm in enumerate(norms, 1) if norm or scale == "linear"]


def test_a_long_run_has_the_mean_of_the_steps_before_each() -> None:
    # 151 steps: a mean takes 1 + 150 // 25 = 7 steps.
    records = [step_record(step, loss=float(step % 2), grad_norm=10.0 ** (step % 3)) for step in range(1, 152)]
    found = charts(series_of(*records))
    assert points(found["Loss"], "mean")["training"][75] == pytest.approx((76, 3 / 7))  # 70 to 76 has three odd steps
    geometric = points(found["Gradient norm"], "mean")[""]
    assert geometric[75] == pytest.approx((76, 10 ** (sum(step % 3 for step in range(70, 77)) / 7)))
    assert points(found["Learning rate"], "mean") == {}


@given(st.dictionaries(st.integers(1, 60), st.floats(-1e3, 1e3), min_size=1), st.integers(1, 20), st.data())
def test_the_mean_is_that_of_all_values_in_the_window(
    value_of: dict[int, float], window: int, data: st.DataObject
) -> None:
    steps = sorted(value_of)
    near = [[value_of[other] for other in steps if step - window < other <= step] for step in steps]
    start = data.draw(st.integers(0, len(steps)))
    mean = trailing_mean(np.array(steps, float), np.array([value_of[step] for step in steps]), window, start)
    assert mean.tolist() == pytest.approx([sum(values) / len(values) for values in near[start:]], abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=80), st.integers(1, 12))
def test_thinning_keeps_both_ends_and_the_extremes_of_every_bin(values: list[float], bins: int) -> None:
    numbers, extremes = thin_points(np.arange(len(values), dtype=float), np.array(values), bins)
    assert [values[int(number)] for number in numbers] == extremes.tolist()
    assert (np.diff(numbers) > 0).all()
    assert numbers[[0, -1]].tolist() == [0, len(values) - 1]
    assert {min(values), max(values)} <= set(extremes.tolist())
    assert len(extremes) <= 2 * bins + 2


@given(st.lists(st.floats(-10, 10) | st.none(), min_size=2, max_size=60), st.data())
def test_appended_points_and_means_are_those_of_the_whole(values: list[float | None], data: st.DataObject) -> None:
    records = [step_record(step, loss=value) for step, value in enumerate(values, 1)]
    cut = data.draw(st.integers(1, len(values)))
    view = CurveView(series_of(*records))  # one view: the same window and the same axes
    whole, before = view.data(series_of(*records)), view.data(series_of(*records[:cut]))
    new = view.new_data(series_of(*records), cut)
    for name in (chart.name for chart in view.charts):
        for kind in ("points", "mean"):
            for label, (steps, numbers) in whole[name][kind].items():
                joined = [a + b for a, b in zip(before[name][kind][label], new[name][kind][label], strict=True)]
                assert joined[0] == steps
                assert joined[1] == pytest.approx(numbers, abs=1e-9)


def test_a_hundred_thousand_steps_are_few_points_with_the_extremes() -> None:
    series = RunSeries()
    for step in range(1, 100_001):
        series.add({"step": step, "loss": 1.0 + (step == 77_777) - (step == 33_333)})
    view = CurveView(series)
    steps, values = view.data(series)["curve-0"]["points"]["training"]
    assert len(steps) <= 1002
    assert {(77_777, 2.0), (33_333, 0.0)} <= set(zip(steps, values, strict=True))
    assert not view.is_outdated(series)


def test_equal_values_do_not_fill_a_chart_with_their_rounding() -> None:
    found = charts(series_of(*(step_record(step, kl=0.1, entropy=1 + step / 10) for step in range(1, 200))))
    zero = {
        title: spec["layer"][0]["encoding"]["y"]["scale"]["zero"]
        for title, spec in found.items()
        if "KL" in title or title == "Entropy"
    }
    assert zero == {"KL from the reference": True, "Entropy": False}


def test_the_charts_of_the_page_are_the_ones_that_are_printed() -> None:
    chart = whole_charts(series_of(*(step_record(step) for step in range(1, 60))))[0]
    printed = printed_spec(chart, light_colours())
    assert "var(" not in str(printed)
    assert printed["title"]["text"] == "Loss"


@pytest.mark.parametrize(
    ("value", "shown"), [(-8.1e-17, "0"), (1e-9, "1e-09"), (0.01234, "0.01234"), (12345.6, "12,346")]
)
def test_what_rounding_left_of_zero_is_zero(value: float, shown: str) -> None:
    assert shown_number(value) == shown
