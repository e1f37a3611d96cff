"""Trackers get the finite numbers of every step; one that fails is left out, and training continues."""

from __future__ import annotations

import math
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config
from support.refusal import refusal
from support.strategies import make
from treepack.train.watch.metrics import scalars
from treepack.train.watch.sinks import SINKS, SinkRun, Sinks, check_sinks


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


def test_the_command_reports_every_step(treepack: Run, tmp_path: Path) -> None:
    packed = packed_directory(tmp_path / "packed", [make("a", [1, 2, 3]), make("b", [1, 4])], capacity=8)
    config = tiny_config(tmp_path / "tiny.json")
    arguments = ["train", str(packed), "--model", str(config), "--steps", "2", "--out", str(tmp_path / "out")]
    done = treepack(*arguments, "--report-to", "tensorboard")
    assert done.status == 0, done.err
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


def test_the_command_offers_every_tracker(treepack: Run) -> None:
    assert f"--report-to [{'|'.join(SINKS)}]" in treepack("train", "--help").out
