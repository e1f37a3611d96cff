"""The command of the docs for several machines, run as two torchrun agents on this one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from support.torchrun import documented_launch, free_port


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_nodes_train_and_evaluate_as_one_process_does(treepack: Run, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(12)]
    packed = packed_directory(tmp_path / "packed", rollouts, capacity=40)
    held_out = packed_directory(tmp_path / "held-out", rollouts[:5], capacity=40)
    config = tiny_config(tmp_path / "tiny.json")
    options = ["--model", str(config), "--device", "cpu", "--steps", "4", "--rows-per-step", "3", "--lr", "0.01"]
    options += ["--eval", str(held_out), "--eval-every", "2", "--checkpoint-every", "2"]
    done = treepack("train", str(packed), *options, "--out", str(tmp_path / "one"))
    assert done.status == 0, done.err
    port = free_port()
    nodes = [
        subprocess.Popen(
            [*documented_launch(node, port), str(packed), *options, "--out", str(tmp_path / "two")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    outputs = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert json.loads((tmp_path / "two" / "train.json").read_text())["num_ranks"] == 2
    one, two = (records(tmp_path / name) for name in ("one", "two"))
    for name in ("loss", "eval_loss"):
        expected = [record[name] for record in one if name in record]
        assert len(expected) == (4 if name == "loss" else 2)
        assert [record[name] for record in two if name in record] == pytest.approx(expected, rel=1e-4)
    # A checkpoint that follows an evaluation has the weights of its step.
    steps = ["--init-from", str(tmp_path / "two" / "checkpoints" / "step-00000002"), "--steps", "1", "--lr", "0"]
    again = treepack("train", str(packed), *options, *steps, "--eval-every", "1", "--out", str(tmp_path / "again"))
    assert again.status == 0, again.err
    evaluated = [record["eval_loss"] for record in two if "eval_loss" in record]
    assert records(tmp_path / "again")[0]["eval_loss"] == pytest.approx(evaluated[0], rel=1e-4)
