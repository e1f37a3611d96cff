"""The curves and steps of a run: every point in its place, thinned and appended without a change."""

from __future__ import annotations

import base64
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.oracle_model import packed_directory
from support.refusal import refusal
from support.run_folder import TOKENIZER, packed_text, run_folder, step_record
from support.strategies import make
from treepack.data.mixture import open_packed
from treepack.errors import TreepackError
from treepack.report.charts import Spec
from treepack.report.live import step_rollouts
from treepack.report.live.curves import CurveView, whole_charts
from treepack.report.live.facts import shown_number
from treepack.report.live.run_series import RunSeries, thin_points, trailing_mean
from treepack.report.live.run_state import RunFolder
from treepack.report.live.step_rollouts import read_steps, rollout_texts
from treepack.report.live.step_rows import ScheduledRows, open_run_rows
from treepack.report.pictures import light_colours, printed_spec
from treepack.tokenise.tokenization import load_tokenizer
from treepack.train.options import TrainOptions
from treepack.train.schedule import plan_steps

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


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two training steps, some without a trained token."""
    made = [
        make(
            f"r{i}",
            [1, 2 + i, 3, 4, 5 + i % 3],
            group=f"g{i // 2}",
            step=i // 6,
            spans=[] if i == 4 else None,
            reward=i / 12,
        )
        for i in range(12)
    ]
    return packed_directory(tmp_path_factory.mktemp("packed") / "packed", made, capacity=9)


def rows_of(packed: Path, folder: Path, **options: Any) -> ScheduledRows:
    return open_run_rows(RunFolder(run_folder(folder, packed=packed, options=options)).record or {}, folder)


@given(
    size=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    blocks=st.sampled_from([None, 1, 2]),
    steps=st.none() | st.integers(1, 30),
)
def test_the_rows_of_each_step_are_those_of_the_trainer(
    packed: Path, size: int, epochs: int, seed: int, blocks: int | None, steps: int | None
) -> None:
    options = {"rows_per_step": size, "epochs": epochs, "seed": seed, "blocks": blocks, "steps": steps}
    schedule = plan_steps(open_packed(packed), TrainOptions(**options))  # type: ignore[arg-type]
    record = json.loads((run_record(packed)).read_text())
    rows = open_run_rows({**record, "options": options}, packed)
    assert rows.num_steps == len(schedule)
    assert [rows.of_step(step) for step in range(1, len(schedule) + 1)] == [step.rows for step in schedule]
    assert rows.num_tokens.tolist() == open_packed(packed).num_tokens.tolist()


def run_record(packed: Path) -> Path:
    folder = packed.parent / "run"
    return (folder if folder.exists() else run_folder(folder, packed=packed)) / "run.json"


def test_threads_that_ask_for_different_epochs_get_their_own_rows(packed: Path, tmp_path: Path) -> None:
    rows = rows_of(packed, tmp_path / "run", rows_per_step=1, epochs=2)
    first, second = (
        [rows.of_step(epoch * rows.steps_per_epoch + i + 1) for i in range(rows.steps_per_epoch)] for epoch in (0, 1)
    )
    place = next(i for i in range(rows.steps_per_epoch) if first[i] != second[i])
    asks = False

    def ask_between_lines(frame: FrameType, event: str, _: object) -> Any:
        # What another thread does at the worst moment: between two lines of `of_step` it asks for another epoch.
        nonlocal asks
        if frame.f_code is ScheduledRows.of_step.__code__ and event == "line" and not asks:
            asks = True
            rows.of_step(rows.steps_per_epoch + place + 1)
            asks = False
        return ask_between_lines

    before = sys.gettrace()
    sys.settrace(ask_between_lines)
    try:
        found = rows.of_step(place + 1)
    finally:
        sys.settrace(before)
    assert found == first[place]


def test_no_step_needs_torch(packed: Path, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", packed=packed)
    code = (
        "import sys, json, pathlib\nfrom treepack.report.live.step_rows import open_run_rows\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "rows = open_run_rows(json.loads((folder / 'run.json').read_text()), folder)\n"
        "rows.read(rows.of_step(1)[0])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_rows_are_found_beside_the_run_and_must_be_those_of_the_run(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(run_record(packed).read_text()) | {"packed": packed.name}
    monkeypatch.chdir(tmp_path)
    assert open_run_rows(record, packed.parent / "run").num_steps > 1
    assert "no such packed directory; run the command in the folder where" in refusal(
        open_run_rows, record, tmp_path / "run"
    )
    assert open_run_rows(record | {"folder": str(packed.parent)}, tmp_path / "run").num_steps > 1
    assert "has other rows than the run was trained on" in refusal(
        open_run_rows, record | {"packed_sha256": "0"}, packed.parent / "run"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"options": 5}, "no options"),
        ({"options": {"rows_per_step": 0, "epochs": 1, "seed": 0}}, "rows_per_step; expected an integer of at least 1"),
        ({"options": {"rows_per_step": 1, "epochs": 1, "seed": -1}}, "seed; expected"),
        ({"options": {"rows_per_step": 1, "epochs": 1, "seed": 0, "mix": [1, 2]}}, "--mix"),
        ({"packed": "s3://bucket/packed"}, "object store"),
    ],
)
def test_rows_that_cannot_be_known_are_refused_in_one_sentence(
    packed: Path, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    record = json.loads(run_record(packed).read_text()) | change
    with pytest.raises(TreepackError, match=sentence):
        open_run_rows(record, tmp_path)


def block(blocks: dict[str, str], name: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(blocks[name])))


def test_the_explorer_has_the_rollouts_of_the_newest_steps_with_their_steps(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(packed, tmp_path / "run", rows_per_step=2)
    texts = rollout_texts(rows, name=None, limit=100)
    whole = read_steps(rows, rows.num_steps, texts)
    assert (whole.first, whole.last) == (1, rows.num_steps)
    ids = {
        name
        for step in range(1, rows.num_steps + 1)
        for row in rows.of_step(step)
        for name in rows.read(row).trajectory_ids
    }
    assert set(block(whole.blocks, "sample-ids")) == ids
    names = block(whole.blocks, "groups-names")
    assert {name.split(" ", 1)[1] for name in names} == {f"(step {step})" for step in range(1, rows.num_steps + 1)}
    monkeypatch.setattr(step_rollouts, "MAX_TOKENS", 1)
    assert read_steps(rows, 2, texts).first == 2
    monkeypatch.setattr(step_rollouts, "MAX_STEP_TOKENS", 1)
    assert "1 more rows of the step are left out" in read_steps(rows, 1, texts).about
    with pytest.raises(TreepackError, match=r"step 99 is not one of the \d+ steps of the run"):
        read_steps(rows, 99, texts)


def test_texts_are_decoded_by_the_tokenizer_of_the_rows(tmp_path: Path) -> None:
    ids = load_tokenizer(str(TOKENIZER)).encode("Ride slower.", add_special_tokens=False)
    path = packed_text(tmp_path / "packed", [make("a", ids)], capacity=64)
    rows = rows_of(path, tmp_path / "run")
    shown = read_steps(rows, 1, rollout_texts(rows, name=None, limit=1000))
    assert "Ride slower." in "".join("".join(node) for node in block(shown.blocks, "text-0"))
    hidden = read_steps(rows, 1, rollout_texts(rows, name=None, limit=None))
    assert not any(name.startswith("text-") for name in hidden.blocks)
    assert "contains no text" in hidden.about
