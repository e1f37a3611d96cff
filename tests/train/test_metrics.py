"""The metrics file, the lines of steps and trackers: strict JSON, nothing lost or repeated, failures left out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.command_line import Run
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.train.step import StepMetrics
from treepack.train.watch.metrics import MetricsLog, TensorBoardLog, read_metrics, scalars
from treepack.train.watch.sinks import SINKS, SinkRun, Sinks, check_sinks


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


def sink_run(folder: Path) -> SinkRun:
    return SinkRun(folder, "project", "name", "1f2e3d4c", {"lr": 0.1})


def test_trackers_get_finite_numbers_under_train_and_eval() -> None:
    record = {"step": 3, "loss": 2.0, "kl": math.nan, "eval_loss": 2.5, "eval_kl": None, "skipped_rows": [1]}
    assert scalars(record) == {"train/loss": 2.0, "eval/loss": 2.5}


def test_a_tracker_that_fails_is_left_out_with_one_note(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file in the place of the folder")
    notes: list[str] = []
    with closing(Sinks(["tensorboard"], sink_run(tmp_path), notes.append)) as sinks:
        for step in (1, 2):
            sinks.write({"step": step, "loss": 1.0})
    assert len(notes) == 1
    assert notes[0].startswith("tensorboard gets no more metrics (")
    assert notes[0].endswith("; metrics.jsonl has them all")


def test_a_tracker_named_twice_is_opened_once(tmp_path: Path) -> None:
    with closing(Sinks(["tensorboard", "tensorboard"], sink_run(tmp_path), pytest.fail)) as sinks:
        sinks.write({"step": 1, "loss": 1.0})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_unknown_and_missing_trackers_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "report_to is 'mlflow'; expected one of tensorboard, wandb, trackio" in refusal(check_sinks, ["mlflow"])
    monkeypatch.setattr(sys, "meta_path", [])  # no package can be found any more
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert "--report-to wandb needs wandb, which is not installed; install" in refusal(check_sinks, ["wandb"])


def test_the_command_offers_every_tracker(treepack: Run) -> None:
    assert f"--report-to [{'|'.join(SINKS)}]" in treepack("train", "--help").out


summary = import_module("treepack_cli.run_summary")


MEANS = {"ratio": 1.0, "clip_fraction_low": 0.25, "clip_fraction_high": 0.125, "old_kl": 0.5, "entropy": 2.0}


MEANS["zero_advantage"] = 0.1


def metrics(loss: float, **means: float) -> StepMetrics:
    numbers: dict[str, Any] = dict.fromkeys(("lr", "grad_norm", "total_weight", "seconds", "wait_seconds"), 1.0)
    numbers |= {"tokens_per_second": 1.0, "tokens_flat_per_second": 1.0}
    return StepMetrics(step=1, epoch=0, loss=loss, num_rows=1, tokens=1, tokens_flat=2, means=means, **numbers)


def test_a_step_of_a_policy_shows_reward_divergence_entropy_and_clip_share() -> None:
    values = summary.step_values(metrics(0.0, reward=0.5, **MEANS))
    chosen = {name: values[name] for name in ("reward", "KL to the old policy", "entropy", "clip share")}
    assert chosen == {"reward": "0.5", "KL to the old policy": "0.5", "entropy": "2", "clip share": "0.375"}
    with_reference = summary.step_values(metrics(0.0, kl=0.75, **MEANS))
    assert (with_reference["KL"], "KL to the old policy" in with_reference) == ("0.75", False)


def test_the_summary_of_a_policy_has_its_means_and_that_of_others_the_loss() -> None:
    steps = [metrics(0.0, reward=0.5, **MEANS), metrics(0.0, reward=0.75, **MEANS)]
    shown = summary._outcome(steps)
    assert shown["reward, first and last"] == "0.5, 0.75"
    assert "first loss" not in shown
    assert summary._outcome([metrics(2.0), metrics(1.0)]) == {"first loss": 2.0, "last loss": 1.0}
    pairs = summary._outcome([metrics(0.7, accuracy=0.5, margin=0.0)])
    assert pairs["accuracy, first and last"] == "0.5, 0.5"


def test_a_large_divergence_from_the_sampler_and_many_terms_without_advantage_are_said() -> None:
    means = {**MEANS, "sampler_kl": 0.5, "sampler_kl_to_256": 0.25, "sampler_kl_to_1k": 0.75, "zero_advantage": 0.5}
    shown = summary._outcome([metrics(0.0, **means), metrics(0.0, **means)])
    assert shown["KL from the sampler by position, last"] == "to 256: 0.25, to 1k: 0.75"
    assert shown["KL from the sampler, first and last"] == "0.5, 0.5"
    assert shown["terms with advantage 0"].startswith("50.0%; `treepack advantages --reject-equal`")
    step = metrics(0.0, **MEANS, sampler_kl=0.001)
    small = summary._outcome([step])
    assert [name for name in small if "sampler" in name or "advantage" in name] == [
        "KL from the sampler, first and last"
    ]
    assert not [name for name in summary.step_values(step) if "sampler" in name]


def test_a_distillation_shows_its_loss_and_divergence_and_no_ratios() -> None:
    means = {"entropy": 2.0, "divergence": 0.5}
    shown = summary._outcome([metrics(0.5, **means), metrics(0.25, **{**means, "divergence": 0.25})])
    assert shown == {
        "first loss": 0.5,
        "last loss": 0.25,
        "divergence from the teacher, first and last": "0.5, 0.25",
        "entropy, first and last": "2, 2",
    }
