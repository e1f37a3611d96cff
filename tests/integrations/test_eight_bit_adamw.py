"""AdamW with states of 8 bits, by bitsandbytes on the CPU: close to AdamW, and a resumed run has the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from treepack.errors import TreepackError
from treepack.train.loop import train
from treepack.train.optimiser import make_optimiser
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.setup.opening import open_run

pytestmark = pytest.mark.integrations

OPTIONS = TrainOptions(
    device="cpu", optimizer="adamw-8bit", lr=1e-2, rows_per_step=2, steps=6, checkpoint_every=1, weight_decay=0.1
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), *generator.integers(20, 24, 8).tolist()]) for i in range(12)]
    packed_directory(tmp_path / "packed", rollouts, capacity=40)
    # From 4,096 values on a parameter has states of 8 bits; smaller ones have float32.
    tiny_config(tmp_path / "tiny.json", intermediate_size=512)
    return tmp_path


def test_large_parameters_have_states_of_one_byte_and_the_run_follows_adamw(folder: Path) -> None:
    losses = {}
    for optimizer in ("adamw", "adamw-8bit"):
        run = open_run(folder / "packed", folder / "tiny.json", replace(OPTIONS, optimizer=optimizer))
        losses[optimizer] = [step.loss for step in train(run, folder / optimizer)]
    assert losses["adamw-8bit"][0] == losses["adamw"][0] > losses["adamw"][-1] + 0.1
    assert losses["adamw-8bit"] == pytest.approx(losses["adamw"], rel=0.02)
    optimiser = make_optimiser(run)
    for parameter in run.loaded.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    kinds = {(p.numel() >= 4096, optimiser.state[p]["state1"].dtype) for p in run.loaded.model.parameters()}
    assert kinds == {(True, torch.uint8), (False, torch.float32)}


def test_a_resumed_run_ends_with_the_same_bits(folder: Path) -> None:
    list(train(open_run(folder / "packed", folder / "tiny.json", OPTIONS), folder / "whole"))
    first = train(open_run(folder / "packed", folder / "tiny.json", OPTIONS), folder / "parts")
    assert [next(first).step for _ in range(3)] == [1, 2, 3]
    first.close()  # type: ignore[attr-defined]
    run = open_run(folder / "packed", folder / "tiny.json", OPTIONS)
    assert [each.step for each in train(run, folder / "parts", resume=True)] == [4, 5, 6]
    one, other = ((folder / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_sharded_weights_are_refused(folder: Path) -> None:
    with pytest.raises(TreepackError, match="quantises whole tensors, which sharded weights are not; train in one"):
        open_run(folder / "packed", folder / "tiny.json", OPTIONS, Ranks(0, 2, grouped=True))
