"""Recomputed and offloaded layers in a training run: equal bits, resumption with another choice, refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, train_over
from support.simulated_device import ScriptedMemory
from support.strategies import make
from treepack.errors import TreepackError
from treepack.model.layers import adapted_layers
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.setup import host_memory
from treepack.train.setup.host_memory import check_host, pages_of_row
from treepack.train.setup.opening import open_run

LAYERS = 3
OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, checkpoint_every=0, steps=2)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(15)]
    return packed_directory(tmp_path / "packed", rollouts, capacity=40)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json", num_hidden_layers=LAYERS)


def go(packed: Path, config: Path, out: Path, *, until: int | None = None, **changes: Any) -> TrainingRun:
    """Start or resume a run, up to step `until`."""
    run = open_run(packed, config, replace(OPTIONS, **changes))
    done: list[int] = []
    steps = train(run, out, resume=True, stop=lambda: until is not None and len(done) + 1 >= until)
    done.extend(metrics.step for metrics in steps)
    return run


def test_every_choice_of_layers_has_the_bits_of_no_recomputation(packed: Path, config: Path, tmp_path: Path) -> None:
    # With host memory for the longest row, "auto" would join fewer rows.
    go(packed, config, tmp_path / "plain", pass_tokens=35)
    expected = (tmp_path / "plain" / "model.safetensors").read_bytes()
    choices: list[dict[str, Any]] = [
        {"checkpoint_layers": "all"},
        {"checkpoint_layers": 2},
        {"offload_checkpoints": True},
        {"offload_checkpoints": True, "checkpoint_layers": 1},
    ]
    for number, changes in enumerate(choices):
        out = tmp_path / str(number)
        go(packed, config, out, until=1, pass_tokens=35, **changes)
        before = choices[number - 1]  # another choice now
        adapted = adapted_layers(go(packed, config, out, pass_tokens=35, **before).loaded.causal)
        assert adapted is not None
        assert adapted.recomputed == [1, 3, 2, 3][number]
        assert (adapted.offload is not None) == (number in (0, 3))
        assert (out / "model.safetensors").read_bytes() == expected, changes


def test_layers_that_are_offloaded_are_recomputed_and_recorded(treepack: Run, packed: Path, config: Path) -> None:
    out = packed.parent / "out"
    command = ["train", str(packed), "--model", str(config), "--device", "cpu", "--steps", "1", "--out", str(out)]
    done = treepack(*command, "--checkpoint-layers", "auto", "--offload-checkpoints")
    assert done.status == 0
    notes = json.loads((out / "train.json").read_text())["notes"]
    assert "layers keep at most 48 MiB of a row in host memory, for 128 tokens" in notes
    assert re.search(r"note: layers keep at most 48 MiB of a row in host memory, for 128 tokens", done.err)
    assert json.loads((out / "run.json").read_text())["chosen"] == {
        "compile": False,
        "checkpoint_layers": 3,
        "offload_checkpoints": True,
        "offload_optimizer": False,
        "carry": None,
        "pass_tokens": 1,
        "loss_chunk": 2048,
    }
    assert json.loads((out / "train.json").read_text())["options"]["checkpoint_layers"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offload_optimizer": 1}, "offload_optimizer is 1; expected True, False or auto"),
        ({"checkpoint_layers": -1}, "checkpoint_layers is -1; expected a number of layers, all or auto"),
        ({"checkpoint_layers": "most"}, "checkpoint_layers is 'most'; expected a number of layers, all or auto"),
        (
            {"checkpoint_layers": 0, "offload_checkpoints": True},
            "offload_checkpoints offloads recomputed layers and checkpoint_layers is 0; omit one",
        ),
    ],
)
def test_bad_numbers_of_layers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=f"^{re.escape(message)}$"):
        replace(OPTIONS, **changes)


def test_too_little_host_memory_is_refused_before_the_first_step(
    packed: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 3 layers x 1 page of 16 MiB, and 90 % of 40 MiB may be used
    monkeypatch.setattr(host_memory, "available_memory", lambda: 40 << 20)
    with pytest.raises(TreepackError) as caught:
        open_run(packed, config, replace(OPTIONS, offload_checkpoints=True))
    assert str(caught.value) == (
        "offload_checkpoints needs 48 MiB of host memory for the longest row of 128 tokens, and 36 MiB may be used; "
        "pack with --capacity 128, give a smaller number of --checkpoint-layers, or train without "
        "--offload-checkpoints"
    )
    open_run(packed, config, replace(OPTIONS, offload_checkpoints=True, checkpoint_layers=2))


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: 100 << 30)
    check_host(80 << 30, 65_536)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_host(45 << 30, 65_536)
    with pytest.raises(TreepackError, match=r"needs 80\.0 GiB of host memory for each of 2 ranks .* --capacity 36864,"):
        check_host(80 << 30, 65_536)


def test_pages_of_the_host_are_those_that_a_row_takes(packed: Path, config: Path) -> None:
    run = open_run(packed, config, replace(OPTIONS, offload_checkpoints=True))
    adapted = adapted_layers(run.loaded.causal)
    assert adapted is not None
    assert adapted.offload is not None
    list(train(run, packed.parent / "out"))
    assert adapted.offload.pages.count == pages_of_row(run.loaded, 128, recomputed=LAYERS, lower=False)


@pytest.mark.slow
def test_sharded_layers_are_offloaded_and_planned_as_in_one_process(packed: Path, config: Path) -> None:
    offloaded = {"epochs": 1, "offload_checkpoints": True}
    # A row of 128 tokens keeps the activations of all layers on the first rank. On the second one they would leave the
    # margin of 15 MB free, but not as much again, in which ranks exchange weights.
    memory = ScriptedMemory((250_000_000, 150_000_000), kept=1e6, recomputed=1e5, total=187_500_000)
    auto = {"epochs": 1, "compile": False, "carry": None, "loss_chunk": 64}
    cases = [
        Case("plain", packed, config, {"epochs": 1}),
        Case("offloaded", packed, config, offloaded),
        Case("some", packed, config, {**offloaded, "checkpoint_layers": 2, "compile": True}),
        Case("planned", packed, config, auto, memory=memory),
    ]
    results = train_over(2, packed.parent, cases)
    for name, value in results["plain"]["gradients"].items():
        assert torch.equal(results["offloaded"]["gradients"][name], value)
        for other in ("some", "planned"):
            torch.testing.assert_close(results[other]["gradients"][name], value, rtol=1e-4, atol=1e-6)
    (line,) = (note for note in results["planned"]["notes"] if note.startswith("checkpoint-layers"))
    assert line.startswith("checkpoint-layers 1 of 3: a token needs 977 KiB if layers keep")
    record = json.loads((results["planned"]["out"] / "run.json").read_text())["chosen"]
    assert (record["checkpoint_layers"], record["carry"], record["compile"]) == (1, None, False)
    assert line in record["why"]
