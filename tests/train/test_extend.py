"""A run that is resumed with more steps: with a constant rate the same bits as one long run, else a new schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.oracle_model import packed_directory, tiny_config
from support.refusal import refusal
from support.strategies import make
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.saving.run_record import is_finished
from treepack.train.schedule import learning_rate
from treepack.train.setup.opening import open_run
from treepack.train.step import StepMetrics

CONSTANT = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=8, warmup_steps=2, min_lr_ratio=1.0)
TIMES = ("seconds", "wait_seconds", "slowest_pass", "tokens_per_second", "tokens_flat_per_second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extend")


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(15)]
    return packed_directory(folder / "packed", rollouts, capacity=40)


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    return tiny_config(folder / "tiny.json")


@pytest.fixture(scope="module")
def whole(folder: Path, packed: Path, config: Path) -> Path:
    """The output of one run of all steps."""
    go(packed, config, folder / "whole")
    return folder / "whole"


def go(
    packed: Path, config: Path, out: Path, *, until: int | None = None, **changes: Any
) -> tuple[list[StepMetrics], list[str]]:
    """Start or resume a run like a new process, up to step `until`; return its steps and notes."""
    run = open_run(packed, config, replace(CONSTANT, **changes))
    steps: list[StepMetrics] = []
    notes: list[str] = []
    for metrics in train(run, out, resume=True, stop=lambda: len(steps) + 1 == until, note=notes.append):
        steps.append(metrics)
    return steps, notes


def files(out: Path) -> dict[str, bytes]:
    """Return the files of a run that do not depend on time, without its checkpoints."""
    names = ("model.safetensors", "config.json", "train.json", "run.json")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    return {**{name: (out / name).read_bytes() for name in names}, "metrics": json.dumps(kept).encode()}


@pytest.mark.parametrize("lengths", [[(3, None), (8, None)], [(5, 2), (4, None), (8, 2), (8, None)]])
def test_with_a_constant_rate_an_extended_run_has_the_bits_of_one_long_run(
    packed: Path, config: Path, whole: Path, tmp_path: Path, lengths: list[tuple[int, int | None]]
) -> None:
    for steps, until in lengths:
        go(packed, config, tmp_path / "parts", steps=steps, until=until)
        assert is_finished(tmp_path / "parts") is (until is None)
    assert files(tmp_path / "parts") == files(whole)


def test_another_schedule_is_computed_over_all_steps_and_its_rates_are_named(
    packed: Path, config: Path, tmp_path: Path
) -> None:
    go(packed, config, tmp_path / "out", steps=4, min_lr_ratio=0.1)
    steps, notes = go(packed, config, tmp_path / "out", min_lr_ratio=0.1)
    options = replace(CONSTANT, min_lr_ratio=0.1)
    assert [metrics.lr for metrics in steps] == [learning_rate(options, step, 8) for step in range(4, 8)]
    before, after = learning_rate(options, 3, 4), learning_rate(options, 4, 8)
    assert notes[1] == (
        "4 steps become 8, and the learning rate follows the schedule of 8 steps: "
        f"it was {before:.3g} at step 4 and is {after:.3g} at step 5"
    )
    assert before < after


def test_steps_that_are_done_are_not_undone(packed: Path, config: Path, tmp_path: Path) -> None:
    go(packed, config, tmp_path / "out", until=5)
    assert "5 steps are done and this run has 4; give --steps of at least 5" in refusal(
        go, packed, config, tmp_path / "out", steps=4
    )
    go(packed, config, tmp_path / "whole", steps=5)
    assert go(packed, config, tmp_path / "out", steps=5)[0] == []  # only the model is written
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_finished_run_without_a_checkpoint_is_not_started_again(packed: Path, config: Path, tmp_path: Path) -> None:
    go(packed, config, tmp_path / "out", steps=3, checkpoint_every=0)
    before = files(tmp_path / "out")
    assert "has no checkpoint of the finished run to continue from" in refusal(go, packed, config, tmp_path / "out")
    assert files(tmp_path / "out") == before
