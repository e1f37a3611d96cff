"""The picture of a run: a panel for each metric, every point in its place, and the same bytes each time."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from treepack.errors import TreepackError
from treepack.train.watch.metrics import MetricsLog
from treepack.train.watch.plot import curves_figure, draw_curves, moving_mean, thin_points

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


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def test_a_run_has_four_panels_over_the_same_steps_and_each_other_mean_one_more(tmp_path: Path) -> None:
    plain = panels(curves_figure(write_log(tmp_path / "a", *(record(step) for step in (1, 2, 3)))))
    assert list(plain) == BASE
    # A column without a finite number, and one that is no number, have no panel.
    more = {"old_kl": 0.1, "truncated": 0.2, "mean_turns": 4, "always_nan": math.nan, "note": "x"}
    rich = panels(curves_figure(write_log(tmp_path / "b", *(record(step, **more) for step in (1, 2, 3)))))
    assert list(rich) == [*BASE, "KL from the old policy", "Truncated", "Mean turns"]
    assert len({axes.get_xlim() for axes in rich.values()}) == 1


def test_the_loss_of_held_out_rows_is_a_second_line_at_its_steps(tmp_path: Path) -> None:
    records = [record(1), record(2, eval_loss=1.5, eval_seconds=9.0), record(3), record(4, eval_loss=1.25)]
    axes_of = panels(curves_figure(write_log(tmp_path / "m", *records)))
    assert list(axes_of) == BASE
    each, held_out = axes_of["Loss"].lines
    assert points(each) == [(1, 2), (2, 1), (3, 2 / 3), (4, 0.5)]
    assert points(held_out) == [(2, 1.5), (4, 1.25)]
    names = {text.get_text(): to_rgba(text.get_color()) for text in axes_of["Loss"].texts}
    assert names == {"training": to_rgba(each.get_color()), "held-out": to_rgba(held_out.get_color())}


def test_panels_about_the_old_policy_are_left_out_while_every_ratio_is_one(tmp_path: Path) -> None:
    means = {"reward": 0.5, "ratio": 1.0, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0, "old_kl": 0.0}
    records = [record(step, **means, entropy=2.0) for step in (1, 2)]
    assert list(panels(curves_figure(write_log(tmp_path / "on", *records)))) == [*BASE, "Reward", "Entropy"]
    records.append(record(3, **{**means, "ratio": 1.001}, entropy=2.0))
    assert "Clip fraction high" in panels(curves_figure(write_log(tmp_path / "off", *records)))


def test_every_finite_value_is_a_point_of_its_line(tmp_path: Path) -> None:
    records = [record(1), record(2, loss=None, skipped_rows=[7, 9]), record(3, lr=4e-5, tokens_per_second=1500.0)]
    axes_of = panels(curves_figure(write_log(tmp_path / "m", *records)))
    assert points(axes_of["Loss"].lines[0]) == [(1, 2), (3, 2 / 3)]
    assert points(axes_of["Learning rate"].lines[0]) == [(1, 1e-5), (2, 2e-5), (3, 4e-5)]
    computed, flat, _ = axes_of["Tokens per second"].lines  # the third has the marks of skipped steps
    assert points(computed) == [(1, 2000), (2, 2000), (3, 1500)]
    assert points(flat) == [(1, 10000), (2, 10000), (3, 10000)]
    names = {text.get_text(): to_rgba(text.get_color()) for text in axes_of["Tokens per second"].texts}
    assert names == {"computed": to_rgba(computed.get_color()), "flat-equivalent": to_rgba(flat.get_color())}


def test_skipped_steps_are_marked_in_every_panel_and_counted(tmp_path: Path) -> None:
    records = [record(step, skipped_rows=[7] if step in (2, 5) else []) for step in range(1, 7)]
    figure = curves_figure(write_log(tmp_path / "m", *records))
    for axes in panels(figure).values():
        assert points(axes.lines[-1]) == [(2, 1), (5, 1)]  # (step, 1): 1 is the upper edge of the panel
        assert axes.lines[-1].get_transform() == axes.get_xaxis_transform()
    assert any("2 steps skipped" in text.get_text() for text in figure.texts)


@pytest.mark.parametrize(
    ("norms", "scale"),
    [([1, 99], "linear"), ([1, 100], "log"), ([0, 1, 100], "log"), ([0, 0], "linear"), ([None, None], "linear")],
)
def test_the_gradient_norm_has_a_logarithmic_axis_where_it_spans_decades(
    tmp_path: Path, norms: list[float | None], scale: str
) -> None:
    records = [record(step, grad_norm=norm) for step, norm in enumerate(norms, 1)]
    axes = panels(curves_figure(write_log(tmp_path / "m", *records)))["Gradient norm"]
    texts = [text.get_text() for text in axes.texts]
    assert axes.get_yscale() == scale
    assert ("before clipping, log scale" in texts) == (scale == "log")
    assert ("no finite value" in texts) == (norms == [None, None])


def test_a_long_run_has_the_mean_of_the_steps_around_each(tmp_path: Path) -> None:
    # 151 steps: a radius of 150 // 50 = 3, so each mean takes 7 steps.
    records = [record(step, loss=float(step % 2), grad_norm=10.0 ** (step % 3)) for step in range(1, 152)]
    figure = curves_figure(write_log(tmp_path / "m", *records))
    each, mean = panels(figure)["Loss"].lines
    assert [y for _, y in points(each)] == [step % 2 for step in range(1, 152)]
    assert points(mean)[75] == pytest.approx((76, 4 / 7))  # steps 73 to 79, of which 4 are odd
    assert any("mean over 7 steps" in text.get_text() for text in figure.texts)
    geometric = panels(figure)["Gradient norm"].lines[1]
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


@pytest.mark.parametrize("count", [1, 3, 500])
def test_no_title_or_name_covers_another(tmp_path: Path, count: int) -> None:
    names = ("ratio", "clip_fraction_high", "old_kl", "kl", "entropy", "importance", "truncated", "rejected_reward")
    records = [
        record(step, **dict.fromkeys(names, 0.1), grad_norm=1000 / step, skipped_rows=[1] if step == 2 else [])
        for step in range(1, count + 1)
    ]
    figure = curves_figure(write_log(tmp_path / "m", *records))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.texts if text.get_text()]
    for axes in panels(figure).values():
        boxes += [text.get_window_extent() for text in [axes._left_title, *axes.texts] if text.get_text()]  # type: ignore[attr-defined]
    assert len(boxes) > 2 * len(panels(figure))
    # No two texts overlap, and all of them are inside the picture.
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_equal_metrics_give_equal_bytes_of_a_png_in_any_directory(tmp_path: Path) -> None:
    records = [record(1, kl=0.1), record(2, kl=0.3, skipped_rows=[3])]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw_curves(write_log(tmp_path / name / "m.jsonl", *records), tmp_path / name / f"{name}.png")
    picture = (tmp_path / "a" / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert picture == (tmp_path / "b" / "b.png").read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["a.png", "m.jsonl"]


def test_drawing_touches_no_state_that_others_share(tmp_path: Path) -> None:
    path = write_log(tmp_path / "m.jsonl", record(1), record(2))
    code = (
        "import sys, matplotlib; from pathlib import Path; from treepack.train.watch.plot import draw_curves\n"
        "before = matplotlib.rcParams.copy()\n"
        "draw_curves(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print('matplotlib.figure' in sys.modules, 'matplotlib.pyplot' in sys.modules, before == matplotlib.rcParams)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "m.png")]
    # With no backend set, comparing the settings would choose one and import pyplot.
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MPLBACKEND": "agg"})
    assert result.stdout == "True False True\n", result.stderr


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


def test_without_matplotlib_one_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes its import fail
    with pytest.raises(
        TreepackError, match=r"^curves cannot be drawn \(.*\); run pip install '\.\[plot\]' in treepack's folder$"
    ):
        draw_curves(write_log(tmp_path / "m", record(1)), tmp_path / "m.png")
