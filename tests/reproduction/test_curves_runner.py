"""The arms of the training curves, the runner, and the tables that follow from its records."""

import dataclasses
import json
import sys
from pathlib import Path

import curves
import curves_tables
import numpy as np
import pytest
import torch
from curves_arms import Sizes, State
from curves_statistics import bootstrap_interval, first_crossing, t_interval
from learner import start_learner
from tasks import make_task

from support.reproduction_learners import even_start, save_small_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_policy(tmp_path_factory.mktemp("reproduction") / "policy")


@pytest.mark.parametrize("arm", ["grpo", "treepo", "treerpo", "tree-grpo", "tree-flat"])
def test_an_arm_trains_and_counts_what_it_decodes(arm: str, folder: Path) -> None:
    learner = start_learner(folder, device="cpu", rate=1e-3, rows=64)
    task = dataclasses.replace(make_task("steps", levels=[2]), start=even_start, max_tokens=9)
    state = State(dataclasses.replace(learner, task=task), Sizes(prompts=3, width=4), seed=0, step=1)
    before = [weights.detach().clone() for weights in learner.policy.model.parameters()]
    decoded, figures = curves.ARMS[arm](state)
    assert decoded == learner.engine.counts.decoded
    assert figures["leaves"] == 12
    assert figures["mixed"] > 0
    assert figures["sampler_gap"] < 1e-5
    pairs = zip(before, learner.policy.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


def test_all_arms_of_a_seed_have_the_same_prompts_and_each_step_has_others(folder: Path) -> None:
    learner = start_learner(folder, device="cpu", rate=1e-3, rows=64)
    keys = [
        tuple(query.key for query in State(learner, Sizes(prompts=3), seed=seed, step=step).queries())
        for seed, step in [(0, 1), (0, 1), (0, 2), (1, 1)]
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_run_appends_its_steps_and_a_second_start_keeps_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--policy {folder} --out {tmp_path} --arms grpo --seeds 3 --tokens 1500 --evaluations 2 --dry-run"
    monkeypatch.setattr(sys, "argv", ["curves.py", *words.split(), "--device", "cpu", "--one"])
    curves.main()
    records = curves_tables.read_records(tmp_path / "steps-grpo-3.jsonl")
    assert [record["step"] for record in records] == list(range(len(records)))
    assert records[-1]["decoded"] >= 1500
    assert ["pass_rate" in record for record in records][-1]
    assert sum("pass_rate" in record for record in records) == 3
    sys.argv.remove("--one")
    curves.main()
    assert "steps-grpo-3.jsonl: exists and is kept" in capsys.readouterr().out
    assert curves_tables.read_records(tmp_path / "steps-grpo-3.jsonl") == records


def write_run(folder: Path, arm: str, seed: int, rates: list[float]) -> None:
    records = [
        {
            "task": "steps",
            "arm": arm,
            "seed": seed,
            "step": step,
            "decoded": 100 * step,
            "step_seconds": 1.0,
            "leaves": 10,
        }
        | {"pass_rate": rate}
        for step, rate in enumerate(rates)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"steps-{arm}-{seed}.jsonl").write_text(lines + '{"task": "ste')


def test_a_report_compares_cut_runs_up_to_what_all_have_reached(tmp_path: Path) -> None:
    for seed, gain in enumerate([0.1, 0.2, 0.3]):
        write_run(tmp_path, "grpo", seed, [0.2, 0.3, 0.4, 0.9])
        write_run(tmp_path, "treepo", seed, [0.2, 0.3, 0.4 + gain])
    (text,) = curves_tables.write_report(tmp_path, target=0.35)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "Up to 200 decoded tokens" in text
    # Student's t with 2 degrees of freedom: 4.303 * 0.1 / sqrt(3) = 0.248
    assert "| +0.200 ± 0.248 |" in lines["treepo"]
    assert "| 150 |" in lines["grpo"]
    assert (tmp_path / "curves-steps.svg").read_text().startswith("<?xml")


def test_statistics_are_those_of_their_definitions() -> None:
    assert t_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx((2.0, 4.3027 / np.sqrt(3)), rel=1e-4)
    assert first_crossing(np.array([0.0, 10, 20]), np.array([0.2, 0.4, 0.8]), 0.6) == pytest.approx(15)
    assert np.isnan(first_crossing(np.array([0.0, 10]), np.array([0.2, 0.4]), 0.6))
    values = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(lambda chosen: float(values[chosen].mean()), 400)
    # The standard error of the mean of 400 standard normal numbers is 0.05.
    assert (low, high) == pytest.approx((values.mean() - 0.098, values.mean() + 0.098), abs=0.015)


@pytest.mark.slow  # starts Python and torch
def test_a_failed_run_is_named_with_the_place_of_its_log(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "warm_up.json").write_bytes((folder / "warm_up.json").read_bytes())
    words = ["--policy", str(tmp_path / "policy"), "--out", str(tmp_path / "out"), "--arms", "grpo", "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["curves.py", *words, "--device", "cpu", "--dry-run"])
    with pytest.raises(SystemExit, match="the runs grpo 0 failed; read their logs"):
        curves.main()
    assert "error" in (tmp_path / "out" / "steps-grpo-0.log").read_text().lower()
