"""The picture of a run: a panel for each metric, every point in its place, and the same bytes each time."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.errors import TreepackError
from treepack.train.watch.metrics import MetricsLog
from treepack.train.watch.plot import Spec, curves_spec, draw_curves, moving_mean, thin_points

BASE = ["Loss", "Gradient norm", "Learning rate", "Tokens per second"]


def record(step: int, **more: Any) -> dict[str, Any]:
    """Return the record of a line of metrics.jsonl, as the trainer writes it."""
    common = {"step": step, "epoch": 0, "loss": 2 / step, "lr": 1e-5 * step, "grad_norm": 1.5, "num_rows": 8}
    sums = {"tokens": 1000, "tokens_flat": 5000, "total_weight": 300.0, "seconds": 0.5, "wait_seconds": 0.01}
    speeds = {"tokens_per_second": 2000.0, "tokens_flat_per_second": 10000.0, "skipped_rows": []}
    return {**common, **sums, **speeds, **more}


def write_log(path: Path, *records: dict[str, Any]) -> Path:
    with MetricsLog(path, keep_until=None) as log:
        for each in records:
            log.write(each)
    return path


def panels(spec: Spec) -> dict[str, Spec]:
    return {panel["title"]["text"]: panel for panel in spec["concat"]}


def lines(panel: Spec) -> list[Spec]:
    return [layer for layer in panel["layer"] if layer["mark"]["type"] == "line"]


def points(line: Spec) -> list[tuple[float, float]]:
    return [(each["step"], each["value"]) for each in line["data"]["values"]]


def colours(panel: Spec) -> dict[str, str]:
    """Return the colour of each label in the legend."""
    (found,) = {json.dumps(line["encoding"]["color"]) for line in lines(panel)}
    scale = json.loads(found)["scale"]
    return dict(zip(scale["domain"], scale["range"], strict=True))


def labels(panel: Spec) -> list[str]:
    """Return the label of each line."""
    return [line["data"]["values"][0]["line"] for line in lines(panel)]


def test_a_run_has_four_panels_over_the_same_steps_and_each_other_mean_one_more(tmp_path: Path) -> None:
    plain = panels(curves_spec(write_log(tmp_path / "a", *(record(step) for step in (1, 2, 3)))))
    assert list(plain) == BASE
    # A column without a finite number, and one that is not a number, have no panel.
    more = {"old_kl": 0.1, "truncated": 0.2, "mean_turns": 4, "always_nan": math.nan, "note": "x"}
    rich = panels(curves_spec(write_log(tmp_path / "b", *(record(step, **more) for step in (1, 2, 3)))))
    assert list(rich) == [*BASE, "KL from the old policy", "Truncated", "Mean turns"]
    domains = [line["encoding"]["x"]["scale"]["domain"] for panel in rich.values() for line in lines(panel)]
    assert len(domains) == 7 + 1
    assert domains == [[0.5, 3.5]] * len(domains)


def test_the_loss_of_held_out_rows_is_a_second_line_at_its_steps(tmp_path: Path) -> None:
    records = [record(1), record(2, eval_loss=1.5, eval_seconds=9.0), record(3), record(4, eval_loss=1.25)]
    panel_of = panels(curves_spec(write_log(tmp_path / "m", *records)))
    assert list(panel_of) == BASE
    each, held_out = lines(panel_of["Loss"])
    assert points(each) == [(1, 2), (2, 1), (3, 2 / 3), (4, 0.5)]
    assert points(held_out) == [(2, 1.5), (4, 1.25)]
    assert labels(panel_of["Loss"]) == ["training", "held-out"]
    assert len({*colours(panel_of["Loss"]).values()}) == 2


def test_panels_about_the_old_policy_are_left_out_while_every_ratio_is_one(tmp_path: Path) -> None:
    means = {"reward": 0.5, "ratio": 1.0, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0, "old_kl": 0.0}
    records = [record(step, **means, entropy=2.0) for step in (1, 2)]
    assert list(panels(curves_spec(write_log(tmp_path / "on", *records)))) == [*BASE, "Reward", "Entropy"]
    records.append(record(3, **{**means, "ratio": 1.001}, entropy=2.0))
    assert "Clip fraction high" in panels(curves_spec(write_log(tmp_path / "off", *records)))


def test_every_finite_value_is_a_point_of_its_line(tmp_path: Path) -> None:
    records = [record(1), record(2, loss=None, skipped_rows=[7, 9]), record(3, lr=4e-5, tokens_per_second=1500.0)]
    panel_of = panels(curves_spec(write_log(tmp_path / "m", *records)))
    assert points(lines(panel_of["Loss"])[0]) == [(1, 2), (3, 2 / 3)]
    assert points(lines(panel_of["Learning rate"])[0]) == [(1, 1e-5), (2, 2e-5), (3, 4e-5)]
    computed, flat = lines(panel_of["Tokens per second"])
    assert points(computed) == [(1, 2000), (2, 2000), (3, 1500)]
    assert points(flat) == [(1, 10000), (2, 10000), (3, 10000)]
    assert labels(panel_of["Tokens per second"]) == ["computed", "flat-equivalent"]
    assert list(colours(panel_of["Tokens per second"])) == ["computed", "flat-equivalent"]


def test_skipped_steps_are_marked_in_every_panel_and_counted(tmp_path: Path) -> None:
    records = [record(step, skipped_rows=[7] if step in (2, 5) else []) for step in range(1, 7)]
    spec = curves_spec(write_log(tmp_path / "m", *records))
    for panel in panels(spec).values():
        marks = panel["layer"][-1]
        assert (marks["mark"]["shape"], marks["encoding"]["y"]) == ("triangle-down", {"value": 0})  # the upper edge
        assert marks["data"]["values"] == [{"step": 2}, {"step": 5}]
    assert any("2 steps skipped" in line for line in spec["title"]["subtitle"])


@pytest.mark.parametrize(
    ("norms", "scale"),
    [([1, 99], "linear"), ([1, 100], "log"), ([0, 1, 100], "log"), ([0, 0], "linear"), ([None, None], "linear")],
)
def test_the_gradient_norm_has_a_logarithmic_axis_where_it_spans_decades(
    tmp_path: Path, norms: list[float | None], scale: str
) -> None:
    records = [record(step, grad_norm=norm) for step, norm in enumerate(norms, 1)]
    panel = panels(curves_spec(write_log(tmp_path / "m", *records)))["Gradient norm"]
    assert panel["title"]["subtitle"] == "before clipping" + (", log scale" if scale == "log" else "")
    if norms == [None, None]:
        assert panel["layer"][-1]["mark"]["text"] == "no finite value"
    else:
        assert [line["encoding"]["y"]["scale"]["type"] for line in lines(panel)] == [scale]
        assert points(lines(panel)[0]) == [(i, norm) for i, norm in enumerate(norms, 1) if norm or scale == "linear"]


def test_a_long_run_has_the_mean_of_the_steps_around_each(tmp_path: Path) -> None:
    # 151 steps: a radius of 150 // 50 = 3, so each mean takes 7 steps.
    records = [record(step, loss=float(step % 2), grad_norm=10.0 ** (step % 3)) for step in range(1, 152)]
    spec = curves_spec(write_log(tmp_path / "m", *records))
    each, mean = lines(panels(spec)["Loss"])
    assert [y for _, y in points(each)] == [step % 2 for step in range(1, 152)]
    assert points(mean)[75] == pytest.approx((76, 4 / 7))  # steps 73 to 79, of which 4 are odd
    assert any("mean over 7 steps" in line for line in spec["title"]["subtitle"])
    geometric = lines(panels(spec)["Gradient norm"])[1]
    assert points(geometric)[75] == pytest.approx((76, 10 ** (sum(step % 3 for step in range(73, 80)) / 7)))


@given(st.dictionaries(st.integers(1, 60), st.floats(-1e3, 1e3), min_size=1), st.integers(1, 20))
def test_the_moving_mean_is_that_of_all_values_near(value_of: dict[int, float], radius: int) -> None:
    steps = sorted(value_of)
    near = [[value_of[other] for other in steps if abs(other - step) <= radius] for step in steps]
    mean = moving_mean(np.array(steps, float), np.array([value_of[step] for step in steps]), radius)
    assert mean.tolist() == pytest.approx([sum(values) / len(values) for values in near], abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=80), st.integers(1, 12))
def test_thinning_keeps_both_ends_and_the_extremes_of_every_run(values: list[float], bins: int) -> None:
    numbers, extremes = thin_points(np.arange(len(values), dtype=float), np.array(values), bins)
    assert [values[int(number)] for number in numbers] == extremes.tolist()
    assert (np.diff(numbers) > 0).all()
    assert numbers[[0, -1]].tolist() == [0, len(values) - 1]
    assert len(extremes) == len(values) <= 2 * bins or len(extremes) <= 2 * bins + 2
    for run in np.array_split(np.arange(len(values)), bins) if len(values) % bins == 0 else []:
        part = [values[i] for i in run]
        assert {min(part), max(part)} <= {values[int(number)] for number in numbers if run[0] <= number <= run[-1]}


def test_equal_values_do_not_fill_a_panel_with_their_rounding(tmp_path: Path) -> None:
    records = [record(step, kl=0.1, entropy=1 + step / 10) for step in range(1, 200)]
    panel_of = panels(curves_spec(write_log(tmp_path / "m", *records)))
    zero = {name: lines(panel)[0]["encoding"]["y"]["scale"]["zero"] for name, panel in panel_of.items()}
    assert (zero["KL from the reference"], zero["Entropy"]) == (True, False)


def test_equal_metrics_give_equal_bytes_of_a_png_in_any_directory(tmp_path: Path) -> None:
    records = [record(1, kl=0.1), record(2, kl=0.3, skipped_rows=[3])]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw_curves(write_log(tmp_path / name / "m.jsonl", *records), tmp_path / name / f"{name}.png")
    picture = (tmp_path / "a" / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert picture == (tmp_path / "b" / "b.png").read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["a.png", "m.jsonl"]


def test_what_cannot_be_drawn_is_refused_and_the_older_picture_stays(tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    draw_curves(write_log(tmp_path / "good", record(1)), out)
    before = out.read_bytes()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "damaged").write_bytes(b'{"step":1}\n{"st\n{"step":3}\n')
    for name, sentence in (("empty", "contains no step yet"), ("damaged", ":2: malformed"), ("none", "cannot be read")):
        with pytest.raises(TreepackError, match=f"{name}.*{sentence}"):
            draw_curves(tmp_path / name, out)
    assert out.read_bytes() == before
    with pytest.raises(TreepackError, match=r"curves\.pdf is not a PNG file; choose a name that ends in \.png"):
        draw_curves(tmp_path / "good", tmp_path / "curves.pdf")


def test_without_vl_convert_one_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # makes its import fail
    with pytest.raises(
        TreepackError, match=r"^curves cannot be drawn \(.*\); run pip install .*'vl-convert-python>=[\d.]+'$"
    ):
        draw_curves(write_log(tmp_path / "m", record(1)), tmp_path / "m.png")
