"""Two ranks whose memory runs out: both continue with one smaller plan, and with the numbers of undisturbed ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, train_over
from support.simulated_device import ScriptedMemory, ScriptedShortage
from support.strategies import make

GIB = 1 << 30


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that losses and the gradients of the last step are equal except for float32 rounding."""
    assert len(result["records"]) == len(expected["records"]) == 3
    for actual, reference in zip(result["records"], expected["records"], strict=True):
        for name in ("loss", "grad_norm", "tokens"):
            assert actual[name] == pytest.approx(reference[name], rel=2e-5), name
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_all_ranks_go_on_if_the_memory_of_one_runs_out(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(15)]
    packed = packed_directory(tmp_path / "packed", rollouts, capacity=40)
    config = tiny_config(tmp_path / "tiny.json", num_hidden_layers=3)
    steps = {"steps": 3, "rows_per_step": 3, "checkpoint_every": 0}
    # A row of 128 tokens needs 50 GiB, and 5 GiB if two of three layers are recomputed.
    memory = ScriptedMemory((60 * GIB, 60 * GIB), kept=0.4 * GIB, recomputed=0.04 * GIB, steps=2, taken=(0, 20 * GIB))
    # One pass for each row: with one pass a step, ranks would keep no whole weights.
    auto = {**steps, "compile": False, "carry": None, "loss_chunk": 64, "pass_tokens": 1}
    taken = Case("taken", packed, config, auto, memory=memory)
    forward = Case("forward", packed, config, {**steps, "carry": 8}, shortage=ScriptedShortage(1, 5))
    backward = Case("backward", packed, config, {**steps, "carry": 8}, shortage=ScriptedShortage(0, 3, backward=True))
    # Only held-out rows are longer than a piece.
    held_out = packed_directory(tmp_path / "held-out", rollouts[:8], capacity=80)
    failing = ScriptedShortage(0, 2, forward=True)
    each = {**steps, "carry": 40, "eval_every": 1}  # one evaluation lacks memory, and training continues
    evaluation = Case("evaluation", packed, config, each, shortage=failing, held_out=held_out)
    results = train_over(2, tmp_path, [taken, forward, backward, evaluation])
    alone = [replace(each, memory=None, shortage=None) for each in (taken, forward, backward, evaluation)]
    expected = train_over(0, tmp_path, alone)
    for name, note in {
        "taken": "step 3 lacks memory on a rank, which has room for 40.0 GiB; it runs with a smaller plan: 2 layers",
        "forward": "out of memory on another rank; it runs again with a smaller plan: 2 layers recomputed, pieces",
        "backward": "out of memory in row ",
    }.items():
        assert_same(results[name], expected[name])
        (remark,) = results[name]["remarks"]
        assert remark.startswith(note)
        assert json.loads((results[name]["out"] / "run.json").read_text())["chosen"]["checkpoint_layers"] == 2
    assert any(each.startswith("whole-weights on: all weights") for each in results["taken"]["notes"])
    assert_same(results["evaluation"], expected["evaluation"])
    (remark,) = results["evaluation"]["remarks"]
    smaller = "pieces of 40 tokens, not joined, logits of 1,024 targets"
    assert remark.startswith("out of memory in row ")
    assert remark.endswith(f"it runs again with a smaller plan: {smaller}")
    losses = [each["evaluation"]["records"][-1]["eval_loss"] for each in (results, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
