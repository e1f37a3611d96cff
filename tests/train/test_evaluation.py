"""Held-out rows: their loss is that of one step over all of them, it changes nothing, and patience ends a run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.strategies import make
from treepack.objectives.objective import choose_objective
from treepack.train.evaluation import evaluate
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.saving.position import HeldOutScore
from treepack.train.saving.run_record import finished_record, steps_done
from treepack.train.setup.opening import open_run
from treepack.trajectory import Trajectory

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=6, eval_every=2, checkpoint_every=0)


def rollouts(seed: int, count: int) -> list[Trajectory]:
    """Return trajectories of 19 tokens in groups of three, with the columns of every objective."""
    generator = np.random.default_rng(seed)
    return [
        make(
            f"t{i}",
            [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()],
            group=f"g{i // 3}",
            reward=float(i % 3),
            advantage=float(i % 3 - 1),
            ref_logprobs=[-1.0] * 18,
        )
        for i in range(count)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with rows to train on, held-out rows and the configuration of a model."""
    packed_directory(tmp_path / "packed", rollouts(0, 12), capacity=40)
    packed_directory(tmp_path / "held-out", rollouts(1, 7), capacity=40)
    tiny_config(tmp_path / "tiny.json")
    return tmp_path


def opened(folder: Path, **changes: Any) -> TrainingRun:
    options = replace(OPTIONS, **changes)
    return open_run(folder / "packed", folder / "tiny.json", options, held_out=folder / "held-out")


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loss", ["sft", "dpo", "grpo"])
def test_the_held_out_loss_is_that_of_one_step_over_all_rows(folder: Path, loss: str) -> None:
    run = opened(folder, objective=choose_objective(loss))
    assert run.held_out is not None
    found, _ = evaluate(run.held_out)
    # The first step of a run that trains on these rows, all of them at once, has the same loss before its update.
    whole = open_run(folder / "held-out", folder / "tiny.json", replace(run.options, rows_per_step=99, steps=1, lr=0.0))
    (step,) = train(whole, folder / loss)
    assert found["eval_loss"] == pytest.approx(step.loss, rel=1e-6)
    means = {name.removeprefix("eval_") for name in found} - {"loss", "seconds"}
    assert means == step.means.keys() - {"reward"}
    for name in means:
        assert found[f"eval_{name}"] == pytest.approx(step.means[name], rel=1e-6, abs=1e-9)


def test_an_evaluation_changes_neither_the_weights_nor_the_other_metrics(folder: Path) -> None:
    plain = open_run(folder / "packed", folder / "tiny.json", OPTIONS)
    steps = [list(train(run, folder / name)) for run, name in ((plain, "plain"), (opened(folder), "held"))]
    assert [step.loss for step in steps[0]] == [step.loss for step in steps[1]]
    one, other = ((folder / name / "model.safetensors").read_bytes() for name in ("plain", "held"))
    assert one == other
    lines = records(folder / "held")
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6]
    assert all(
        set(line) - set(plain_line) <= {"eval_loss", "eval_seconds"}
        for line, plain_line in zip(lines, records(folder / "plain"), strict=True)
    )


def test_patience_counts_evaluations_without_a_lower_loss() -> None:
    score = HeldOutScore()
    for step, loss in ((2, 1.0), (4, 0.5), (6, 0.5), (8, math.nan)):
        assert not score.is_over(2)
        score = score.after(step, loss)
    assert (score.best_loss, score.best_step, score.stale) == (0.5, 4, 2)
    assert score.is_over(2)
    assert not score.is_over(0)
    assert HeldOutScore(**json.loads(json.dumps(asdict(score)))) == score


def test_a_run_without_improvement_ends_early_with_its_best_model(folder: Path) -> None:
    run = opened(folder, steps=40, eval_every=1, patience=3, lr=1.0, keep=1)
    notes: list[str] = []
    steps = list(train(run, folder / "out", note=notes.append))
    losses = [step.evaluation["eval_loss"] for step in steps]
    best = int(np.nanargmin(losses)) + 1
    assert len(steps) == best + 3 < 40
    record = json.loads((folder / "out" / "train.json").read_text())
    assert (record["num_steps"], record["last_step"], record["best_step"]) == (40, len(steps), best)
    assert notes[0] == f"the run ends after step {len(steps)}: 3 evaluations had no lower loss than step {best}"
    # The saved model has the loss of the best evaluation.
    saved = open_run(folder / "packed", folder / "out", OPTIONS, held_out=folder / "held-out")
    assert saved.held_out is not None
    assert evaluate(saved.held_out)[0]["eval_loss"] == pytest.approx(losses[best - 1], rel=1e-6)
    again = opened(folder, steps=40, eval_every=1, patience=3, lr=1.0, keep=1)
    assert list(train(again, folder / "out", resume=True, note=notes.append)) == []
    assert notes[-1].endswith(f"finished, with {len(steps)} steps; --patience with a larger number trains on")
    assert steps_done(finished_record(folder / "out")) == len(steps)


def test_a_run_that_ended_early_continues_with_more_patience(folder: Path) -> None:
    changes = {"steps": 40, "eval_every": 1, "lr": 1.0, "checkpoint_every": 100}
    ended = list(train(opened(folder, **changes, patience=1), folder / "parts"))
    longer = list(train(opened(folder, **changes, patience=2), folder / "parts", resume=True))
    whole = list(train(opened(folder, **changes, patience=2), folder / "whole"))
    assert longer
    assert [step.step for step in [*ended, *longer]] == [step.step for step in whole]
    one, other = ((folder / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_other_held_out_rows_are_refused_at_a_resumption(folder: Path) -> None:
    list(train(opened(folder), folder / "out", stop=lambda: True))
    packed_directory(folder / "other", rollouts(2, 3), capacity=40)
    run = open_run(folder / "packed", folder / "tiny.json", OPTIONS, held_out=folder / "other")
    assert "cannot resume: --eval has a different content than when the run started" in refusal(
        list, train(run, folder / "out", resume=True)
    )


@pytest.mark.slow
def test_two_ranks_end_early_with_the_best_model_of_one_process(folder: Path) -> None:
    # Rows of one trajectory each, so that the second rank runs out of rows in an evaluation too.
    changes = {"steps": 12, "eval_every": 1, "patience": 2, "lr": 0.3, "clip": 1.0, "rows_per_step": 2}
    case = Case("run", folder / "packed", folder / "tiny.json", changes, held_out=folder / "held-out")
    two, one = (train_over(size, folder, [case])["run"] for size in (2, 0))
    assert len(one["records"]) == len(two["records"]) < 12
    for name in ("loss", "eval_loss"):
        losses = [[record[name] for record in result["records"]] for result in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # large steps amplify the rounding of sums over ranks
    best = [json.loads((result["out"] / "train.json").read_text())["best_step"] for result in (one, two)]
    assert best[0] == best[1] < len(one["records"])
    # The saved models, evaluated in one process, have the losses of their best evaluations.
    for result in (one, two):
        saved = open_run(folder / "packed", result["out"], OPTIONS, held_out=folder / "held-out")
        assert saved.held_out is not None
        expected = result["records"][best[0] - 1]["eval_loss"]
        assert evaluate(saved.held_out)[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)
