"""`--temperature` of `treepack train` and `treepack logprobs`: values, refusals, and columns that fit the loss."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command_line import Run as Command
from support.oracle_model import tiny_config, write_rows
from support.oracle_objectives import own_logprobs
from support.packed_objectives import as_trajectories, packed_model, plain, rollouts
from support.refusal import refusal
from treepack.pack.files import read_rows
from treepack.train.logprobs import term_scores
from treepack.train.scoring_options import ScoreOptions

T = float(np.float32(0.7))
ROWS = [i % 2 for i in range(10)]  # the two groups in a row each


def written(path: Path, temperatures: list[float] | None) -> Path:
    """Write rollouts whose temperatures repeat `temperatures`, without old log-probabilities."""
    samples = list(rollouts())
    if temperatures is not None:
        samples = [
            replace(r, temperatures=[temperatures[i % len(temperatures)]] * len(r.tokens))
            for i, r in enumerate(samples)
        ]
    without = ["old_logprobs", "ref_logprobs", "sampling_logprobs"]
    return write_rows(path, as_trajectories(samples, without=without), ROWS)


@pytest.mark.parametrize(
    ("temperatures", "options", "expected"),
    [
        (None, {}, [1.0]),
        (None, {"temperature": T}, [T]),
        ([T, 1.5], {}, [T, 1.5]),
        ([T, nan], {"temperature": T}, [T]),
        ([T, 1.5], {"ignore_temperature": True}, [1.0]),
    ],
)
def test_scores_are_those_at_the_temperature_of_each_trajectory(
    tmp_path: Path, temperatures: list[float] | None, options: dict[str, Any], expected: list[float]
) -> None:
    recorded = rollouts()
    for row in read_rows(written(tmp_path / "packed", temperatures)):
        assert row.terms is not None
        scores = np.stack(term_scores(packed_model("qwen3"), [row], ScoreOptions(**options))[0][:2])
        for i, name in enumerate(row.trajectory_ids):
            number = int(name[1:])
            rollout = replace(
                recorded[number], temperatures=[expected[number % len(expected)]] * len(recorded[number].tokens)
            )
            with torch.no_grad():
                alone = [list(values.values()) for values in own_logprobs(plain("qwen3"), rollout)]
            np.testing.assert_allclose(scores[:, row.terms.trajectory == i], np.array(alone), rtol=1e-9)


@pytest.mark.parametrize("value", [0.0, -1.0, nan, inf])
def test_scoring_needs_a_positive_temperature(value: float) -> None:
    assert "expected a finite number above 0, because ratios need the prob" in refusal(ScoreOptions, temperature=value)


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_columns_fit_the_loss_or_are_refused(treepack: Command, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    packed = written(tmp_path / "packed", [T])
    common = ("--model", config, "--device", "cpu", "--quiet")

    def run(command: str, source: Path, *options: Any) -> tuple[int, str]:
        done = treepack(command, source, *common, *options)
        return done.status, done.err

    assert run("logprobs", packed, "--out", tmp_path / "old") == (0, "")
    entry = json.loads((tmp_path / "old" / "manifest.json").read_text())["logprobs"]["old"]
    assert entry["temperature"] == 0.7
    # The loss computes at the temperatures of the data too, so every ratio is 1.
    assert run("train", tmp_path / "old", "--loss", "grpo", "--out", tmp_path / "grpo")[0] == 0
    (line,) = (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["ratio"] == pytest.approx(1, abs=1e-6)
    # The same temperature as an option does not contradict the data, another one is.
    assert run("train", packed, "--loss", "grpo", "--temperature", 0.7, "--out", tmp_path / "same")[0] == 0
    status, error = run("train", packed, "--loss", "grpo", "--temperature", 1, "--out", tmp_path / "other")
    assert (status, "temperature is 1, but the data has 0.7" in error) == (1, True)
    # dpo needs a reference at the temperature 1.
    status, error = run("logprobs", packed, "--column", "ref", "--out", tmp_path / "ref")
    assert (status, error) == (
        0,
        "note: the reference is computed at the sampler's temperature; for dpo add --ignore-temperature\n",
    )
    status, error = run("train", tmp_path / "ref", "--loss", "dpo", "--out", tmp_path / "dpo")
    assert (status, "computed at the temperature 0.7, and the loss dpo computes at 1" in last_line(error)) == (1, True)
    plain_reference = tmp_path / "plain-ref"
    assert run("logprobs", packed, "--column", "ref", "--ignore-temperature", "--out", plain_reference) == (0, "")
    assert run("train", plain_reference, "--loss", "dpo", "--out", tmp_path / "dpo")[0] == 0
    status, error = run("train", plain_reference, "--loss", "grpo", "--kl", 0.1, "--out", tmp_path / "kl")
    assert (status, "computed at the temperature 1, and the loss grpo computes at 0.7" in error) == (1, True)
    assert run("train", packed, "--loss", "grpo", "--verify")[0] == 0


def test_gaps_and_greedy_samples_are_refused_before_the_model_is_loaded(treepack: Command, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = tiny_config(tmp_path / "model" / "config.json").parent  # without weights: to load it would be another error
    for temperatures, message in (
        ([T, nan], "have no temperature and others have one; give the sampler's temperature for them as --temperature"),
        ([0.0], "were sampled at the temperature 0, but ratios need the probabilities of a sampler"),
    ):
        packed = written(tmp_path / str(temperatures[0]), temperatures)
        for command in (("train", "--loss", "grpo"), ("logprobs",)):
            done = treepack(command[0], packed, *command[1:], "--model", model, "--out", tmp_path / "out")
            assert (done.status, message in last_line(done.err)) == (1, True)
