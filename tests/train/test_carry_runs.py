"""Training runs with rows in pieces: the results of whole rows, counts of tokens, resumption and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from treepack.objectives.objective import choose_objective
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.run import TrainingRun
from treepack.train.sampling_check import measure_gap
from treepack.train.saving.choices import with_recorded
from treepack.train.setup.opening import open_run
from treepack.train.step import StepMetrics
from treepack.trajectory import Trajectory

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=1, steps=3, eval_every=2, checkpoint_every=0)
TIMES = ("seconds", "wait_seconds", "slowest_pass", "tokens_per_second", "tokens_flat_per_second", "eval_seconds")


def rollouts(seed: int = 0, count: int = 9) -> list[Trajectory]:
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
            sampling_logprobs=[-3.0 + i / 10] * 18,
        )
        for i in range(count)
    ]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", rollouts(), capacity=60)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json")


def go(run: TrainingRun, out: Path, *, until: int | None = None) -> list[StepMetrics]:
    """Start or resume a run up to step `until`, or to its end."""
    steps: list[StepMetrics] = []
    for metrics in train(run, out, resume=True, stop=lambda: until is not None and len(steps) + 1 >= until):
        steps.append(metrics)
    return steps


def record(out: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / name).read_text())
    return content


def lines(out: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without times and rates."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in each.items() if name not in TIMES} for each in records]


def weights(out: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(out).state_dict()
    return state


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        ("sft", {}),
        pytest.param("sft", {"offload_checkpoints": True}, marks=pytest.mark.slow),
        pytest.param("grpo", {}, marks=pytest.mark.slow),
        ("gspo", {}),
    ],
)
def test_a_run_in_pieces_computes_what_whole_rows_give(
    packed: Path, config: Path, tmp_path: Path, loss: str, changes: dict[str, Any]
) -> None:
    held_out = packed_directory(tmp_path / "held-out", rollouts(1, 3), capacity=60)
    options = OPTIONS if loss == "sft" else replace(OPTIONS, objective=choose_objective(loss))
    for name, each in (("whole", options), ("pieces", replace(options, carry=7, **changes))):
        go(open_run(packed, config, each, held_out=held_out), tmp_path / name)
    whole, pieces = lines(tmp_path / "whole"), lines(tmp_path / "pieces")
    counts = ("tokens_forward", "tokens_backward")
    for before, after in zip(whole, pieces, strict=True):
        assert after["tokens_backward"] == after["tokens"] < after["tokens_forward"]
        assert after.keys() - before.keys() == set(counts)
        for key, value in before.items():
            assert after[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for name, weight in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "pieces")[name], weight, rtol=1e-3, atol=2e-5)


def test_every_token_runs_backward_once_and_trunk_forward_twice(packed: Path, config: Path, tmp_path: Path) -> None:
    run = open_run(packed, config, replace(OPTIONS, carry=5, rows_per_step=2, steps=2))
    for metrics, step in zip(go(run, tmp_path / "out"), run.schedule, strict=True):
        batches = [run.dataset[row] for row in step.rows]
        ends = [batch.subtree_end[: batch.num_tokens].numpy() for batch in batches]
        trunk = sum(int(np.count_nonzero(end - np.arange(len(end)) > 5)) for end in ends)
        assert trunk > 0
        assert metrics.passes == {"tokens_forward": metrics.tokens + trunk, "tokens_backward": metrics.tokens}


def test_two_runs_and_a_resumed_one_agree_in_every_bit(packed: Path, config: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, carry=5)
    for name in ("one", "two"):
        go(open_run(packed, config, options), tmp_path / name)
    for until in (1, None):
        go(open_run(packed, config, options), tmp_path / "resumed", until=until)
    for name in ("two", "resumed"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
        assert lines(tmp_path / name) == lines(tmp_path / "one")


def test_the_values_that_auto_chose_are_recorded_and_kept(packed: Path, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert with_recorded(OPTIONS, out, Ranks()) == OPTIONS
    assert open_run(packed, config, OPTIONS).options.carry is None, "whole rows on a CPU"
    go(open_run(packed, config, replace(OPTIONS, carry=7)), out, until=1)
    chosen: dict[str, Any] = {
        "compile": False,
        "checkpoint_layers": 0,
        "offload_checkpoints": False,
        "offload_optimizer": False,
        "carry": 7,
        "pass_tokens": 1,
        "loss_chunk": 2048,
    }
    assert record(out, "run.json")["chosen"] == chosen
    objective = replace(OPTIONS.objective, old_logprobs="recorded")  # also chosen when the first run opened
    assert with_recorded(OPTIONS, out, Ranks()) == replace(OPTIONS, blocks=1, objective=objective, **chosen)
    # Another number may replace it: it changes the rounding and nothing else.
    go(open_run(packed, config, replace(OPTIONS, carry=5)), out)
    assert record(out, "run.json")["chosen"] == {**chosen, "carry": 5}
    assert record(out, "train.json")["options"]["carry"] == 5


def test_the_command_counts_tokens_and_resumes_with_the_same_pieces(
    packed: Path, config: Path, tmp_path: Path, treepack: Run
) -> None:
    command = ["train", packed, "--model", config, "--out", tmp_path / "out", "--device", "cpu", "--quiet"]
    first = treepack(*command, "--carry", "5", "--steps", "1")
    assert first.status == 0
    shown = dict(line.rsplit(maxsplit=1) for line in first.out.splitlines())
    metrics = lines(tmp_path / "out")[0]
    for name, key in (("tokens forward", "tokens_forward"), ("tokens backward", "tokens_backward")):
        assert int(shown[name].replace(",", "")) == metrics[key]
    assert shown["tokens of a piece"] == "5"
    again = treepack(*command, "--carry", "auto", "--steps", "2", "--resume")
    assert again.status == 0
    assert record(tmp_path / "out", "train.json")["options"]["carry"] == 5


def test_pieces_under_autocast_have_the_gradients_of_whole_rows(packed: Path, config: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, dtype="bf16", steps=1, lr=0.0)
    norms = [
        go(open_run(packed, config, replace(options, carry=carry)), tmp_path / str(carry))[0].grad_norm
        for carry in (None, 5)
    ]
    # bfloat16 has a relative error of 2**-8 in each of some ten products one after the other; a weight without its
    # gradient changes the norm by far more.
    assert norms[1] == pytest.approx(norms[0], rel=2.0**-5)


def test_recorded_values_are_compared_in_pieces_too(packed: Path, config: Path) -> None:
    options = replace(OPTIONS, objective=choose_objective("grpo"))
    whole, pieces = (measure_gap(open_run(packed, config, replace(options, carry=carry))) for carry in (None, 5))
    assert whole is not None
    assert pieces is not None
    assert pieces.gap == pytest.approx(whole.gap, rel=1e-5)
    assert pieces.num_terms == whole.num_terms > 0
