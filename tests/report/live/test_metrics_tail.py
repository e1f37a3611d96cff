"""New lines of a metrics file: each comes once and whole, damaged ones are counted, and a new file starts again."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.errors import TreepackError
from treepack.report.live import metrics_tail
from treepack.report.live.metrics_tail import MetricsTail
from treepack.report.live.run_series import RunSeries
from treepack.train.watch.metrics import MetricsLog


def steps_of(tail: MetricsTail) -> list[Any]:
    return [record if record is None else record["step"] for record in tail.read_new()]


def test_a_line_comes_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert steps_of(tail) == []
    path.write_bytes(b'{"step":1}\n{"st')
    assert steps_of(tail) == [1]
    assert steps_of(tail) == []
    with path.open("ab") as file:
        file.write(b'ep":2}\n{"step":3}\n')
    assert steps_of(tail) == [2, 3]
    assert tail.num_damaged == 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 7))
def test_any_cut_of_the_file_gives_the_same_steps(cuts: list[int], size: int) -> None:
    content = b"".join(b'{"step":%d,"loss":1.5}\n' % step for step in range(1, 12))
    tail, found, at = MetricsTail(Path("unused")), [], 0
    for cut in [*cuts, len(content)]:
        chunk = content[at : at + cut]
        at += len(chunk)
        for i in range(0, len(chunk), size):
            found += [record["step"] for record in tail._records(chunk[i : i + size])]
    assert found == [*range(1, 12)]


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step":1}', '{"st', "[1]", '{"step":true}', '{"step":1}', '{"step":2,"loss":NaN}', "[" * 100_000, "\x00"]
    lines += ['{"step":-3}', '{"step":1e9}', '{"step":' + "9" * 30 + "}", '{"step":3,"loss":"\\ud800"}']
    path.write_text("\n".join(lines) + "\n")
    tail = MetricsTail(path)
    assert steps_of(tail) == [1, 2, 3]
    assert (tail.num_damaged, tail.first_damaged) == (9, 2)


def test_a_line_without_end_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_tail, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(metrics_tail, "CHUNK_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n' + "x" * 5000)
    tail = MetricsTail(path)
    assert steps_of(tail) == [1]
    assert len(tail._rest) <= 100
    with path.open("a") as file:
        file.write('x\n{"step":2}\n')
    assert steps_of(tail) == [2]
    assert (tail.num_damaged, tail.first_damaged) == (1, 2)


def test_a_resume_that_cuts_steps_off_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path, keep_until=None)) as log:
        for step in (1, 2, 3):
            log.write({"step": step})
    tail = MetricsTail(path)
    assert steps_of(tail) == [1, 2, 3]
    with closing(MetricsLog(path, keep_until=2)) as log:
        log.write({"step": 3, "loss": 0.5})
        assert steps_of(tail) == [None, 1, 2, 3]
    path.unlink()
    assert steps_of(tail) == [None]
    path.write_text('{"step":1}\n')
    assert steps_of(tail) == [1]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    path, secret = tmp_path / "metrics.jsonl", tmp_path / "secret"
    secret.write_text('{"step":1}\n')
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(TreepackError, match=r"metrics\.jsonl: .*expected .* training run$"):
        steps_of(MetricsTail(path))


def test_numbers_that_are_not_finite_are_missing_and_names_are_bounded() -> None:
    series = RunSeries()
    values = [1.5, None, float("nan"), float("inf"), 10**400, "x", True, [1], 1e308]
    for step, value in enumerate(values, 1):
        series.add({"step": step, "loss": value, f"name {step}": 1})
    assert [value for value in series.column("loss").tolist() if value == value] == [1.5]
    for step in range(10, 100):
        series.add(json.loads(f'{{"step": {step}, "other {step}": 2}}'))
    assert len(series.names) == 64
    assert series.names_left_out
    assert {len(series.column(name)) for name in series.names} == {len(series)}
