"""The metrics file: strict JSON, no line lost to a kill, and after a resume no line of steps that are repeated."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.train.watch.metrics import MetricsLog, TensorBoardLog, read_metrics


def write_log(path: Path, *records: dict[str, Any], keep_until: int | None = None) -> Path:
    with closing(MetricsLog(path, keep_until=keep_until)) as log:
        for record in records:
            log.write(record)
    return path


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_every_line_is_strict_json_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    record = {
        "step": 1,
        "loss": math.nan,
        "lr": 1e-5,
        "kl": -math.inf,
        "rows": [math.inf, 3],
        "norm": np.float32("nan"),
    }
    path = write_log(tmp_path / "m.jsonl", record, record | {"step": 2, "loss": 0.1, "norm": np.float64(2.5)})
    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert first == {"step": 1, "loss": None, "lr": 1e-5, "kl": None, "rows": [None, 3], "norm": None}
    assert second == first | {"step": 2, "loss": 0.1, "norm": 2.5}


def test_a_killed_process_loses_no_line_that_it_wrote(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from treepack.train.watch.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]), keep_until=None)\n"
        "for step in (1, 2, 3): log.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    # SIGKILL runs no handler, so nothing in a buffer of Python would reach the file.
    assert run_python(code, tmp_path / "m.jsonl").returncode == -9
    assert read_metrics(tmp_path / "m.jsonl") == {"step": [1, 2, 3]}


def test_a_full_disk_is_one_sentence_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from contextlib import closing; from pathlib import Path\n"
        "from treepack.errors import TreepackError\n"
        "from treepack.train.watch.metrics import MetricsLog\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))\n"  # 30 bytes: two lines of 11 and part of a third
        "try:\n"
        "    with closing(MetricsLog(Path(sys.argv[1]), keep_until=None)) as log:\n"
        "        for step in range(1, 9): log.write({'step': step})\n"
        "except TreepackError as error: print(error)"
    )
    path = tmp_path / "m.jsonl"
    (sentence,) = run_python(code, path).stdout.splitlines()
    assert sentence.startswith(f"{path}: cannot be written (File too large); check that its disk")
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n{"step":'
    assert read_metrics(write_log(path, {"step": 3}, keep_until=2)) == {"step": [1, 2, 3]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 6), lost=st.integers(0, 150), keep_until=st.integers(0, 7))
def test_a_resumed_run_finds_the_whole_lines_up_to_its_step_byte_for_byte(
    tmp_path: Path, count: int, lost: int, keep_until: int
) -> None:
    path = tmp_path / "m.jsonl"
    path.unlink(missing_ok=True)
    # json puts spaces after ":" and orjson does not, so a line that is parsed and written again would differ.
    lines = [json.dumps({"step": step, "loss": 1 / step}).encode() for step in range(1, count + 1)]
    whole = b"\n".join([*lines, b""])
    left = whole[: max(0, len(whole) - lost)]  # a crash lost the last bytes
    path.write_bytes(left)
    MetricsLog(path, keep_until=keep_until).close()
    # A line without only its line end counts: its record is whole.
    survived = [
        line for number, line in enumerate(lines[:keep_until], 1) if len(b"\n".join(lines[:number])) <= len(left)
    ]
    assert path.read_bytes() == b"".join(line + b"\n" for line in survived)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_resumed_run_without_a_file_begins_one(tmp_path: Path) -> None:
    assert read_metrics(write_log(tmp_path / "m.jsonl", {"step": 5}, keep_until=4)) == {"step": [5]}


@pytest.mark.parametrize(("written", "keep_until", "lost"), [(5, 3, 0), (3, 3, 0), (1, 3, 2), (0, 3, 3), (2, 0, 0)])
def test_lost_lines_are_counted(tmp_path: Path, written: int, keep_until: int, lost: int) -> None:
    path = write_log(tmp_path / "m.jsonl", *({"step": step + 1} for step in range(written)))
    with closing(MetricsLog(path, keep_until=keep_until)) as log:
        assert log.num_lost == lost
    path.unlink()
    with closing(MetricsLog(path, keep_until=keep_until)) as log:
        assert log.num_lost == keep_until
    path.unlink()
    with closing(MetricsLog(path, keep_until=None)) as log:
        assert log.num_lost == 0


def test_a_new_run_refuses_a_file_that_is_there(tmp_path: Path) -> None:
    path = write_log(tmp_path / "m.jsonl", {"step": 1})
    assert "m.jsonl exists and a new run would add to it; resume that run or choose" in refusal(
        MetricsLog, path, keep_until=None
    )
    assert read_metrics(path) == {"step": [1]}


def test_columns_are_as_long_as_the_run_with_none_where_a_line_lacks_the_name(tmp_path: Path) -> None:
    path = write_log(tmp_path / "m.jsonl", {"step": 1, "loss": 2.5}, {"step": 3, "kl": 0.1, "skipped_rows": [4]})
    path.write_bytes(path.read_bytes() + b'{"step":4,"lo')  # a line that is still being written
    assert read_metrics(path) == {"step": [1, 3], "loss": [2.5, None], "kl": [None, 0.1], "skipped_rows": [None, [4]]}
    path.write_bytes(b"")
    assert read_metrics(path) == {}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"step":2,"lo', "malformed JSON"),
        (b"", "malformed JSON"),
        (b'{"step":2,"loss":NaN}', "malformed JSON"),
        (b'{"step":2,"loss":"\xff"}', "malformed JSON"),
        (b"[2]", "not a JSON object"),
        (b'{"loss":1.5}', "no valid step"),
        (b'{"step":true}', "no valid step"),
        (b'{"step":1}', "step 1 comes after step 1, so two runs wrote to this file"),
    ],
)
def test_a_damaged_line_is_refused_by_its_number_and_left_alone(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "m.jsonl"
    content = b'{"step":1}\n' + line + b'\n{"step":3}\n'
    path.write_bytes(content)
    for use in (lambda: read_metrics(path), lambda: MetricsLog(path, keep_until=1)):
        with pytest.raises(TreepackError) as caught:
            use()
        assert str(caught.value).startswith(f"{path}:2: {problem}")
        assert str(caught.value).endswith("; remove the line, or restore the file from a copy")
    assert path.read_bytes() == content


def test_a_missing_file_or_directory_is_named(tmp_path: Path) -> None:
    assert "none.jsonl: cannot be read (No such file" in refusal(read_metrics, tmp_path / "none.jsonl")
    assert "none/m.jsonl: cannot be written (No such file" in refusal(
        MetricsLog, tmp_path / "none" / "m.jsonl", keep_until=None
    )


def test_tensorboard_shows_the_numbers_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Steps 1 to 4, then a run resumed after step 2 that computes steps 3 and 4 again.
    for keep_until, first, loss in ((None, 1, 0.5), (2, 3, 0.25)):
        with closing(TensorBoardLog(tmp_path, keep_until=keep_until)) as log:
            for step in range(first, 5):
                log.write({"step": step, "loss": loss, "kl": math.nan, "epoch": 0, "name": "x", "skipped_rows": [1]})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["train/loss", "train/epoch"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.25),
        (4, 0.25),
    ]


def test_without_tensorboard_one_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes an import fail, unless torch's module has already imported it.
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        TreepackError,
        match=r"^TensorBoard cannot be used \(.*\); run pip install 'tensorboard>=[\d.]+'$",
    ):
        TensorBoardLog(tmp_path, keep_until=None)


def test_importing_brings_neither_torch_nor_tensorboard() -> None:
    code = (
        "import sys; before = set(sys.modules); import treepack.train.watch.metrics\n"
        "assert 'treepack.train.watch.metrics' in set(sys.modules) - before\n"
        "print({'torch', 'tensorboard'} & set(sys.modules))"
    )
    assert run_python(code).stdout == "set()\n"
