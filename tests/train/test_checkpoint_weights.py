"""The last checkpoint of a run has its weights in the files of the model, and is whole without the model."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from support.tiny_families import family_config
from treepack.errors import TreepackError
from treepack.model.load import build_model, read_config
from treepack.model.weights.conversion import stored_tensors
from treepack.model.weights.writing import saved_weights
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.saving.checkpoint import Checkpoints
from treepack.train.saving.checkpoint_files import has_all_files
from treepack.train.saving.checkpoint_pickles import CheckpointReader
from treepack.train.saving.checkpoint_weights import find_boxes, link_weights, linked_files
from treepack.train.saving.run_record import is_finished
from treepack.train.setup.opening import open_run

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=3, checkpoint_every=2, min_lr_ratio=1)
LAST = Path("checkpoints", "step-00000003")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(9)]
    return packed_directory(tmp_path / "packed", rollouts, capacity=40)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json")


def go(packed: Path, config: Path, out: Path, **changes: Any) -> tuple[list[int], list[str]]:
    """Start or resume a run; return its steps and notes."""
    notes: list[str] = []
    run = open_run(packed, config, replace(OPTIONS, **changes))
    return [each.step for each in train(run, out, resume=True, note=notes.append)], notes


def test_the_model_and_the_last_checkpoint_are_one_file_and_either_may_be_removed(
    packed: Path, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    go(packed, config, out)
    model, linked = out / "model.safetensors", out / LAST / "model.safetensors"
    assert model.samefile(linked)
    assert not list((out / "checkpoints" / "step-00000002").glob("*.safetensors"))
    names = CheckpointReader(out / LAST).read_metadata().state_dict_metadata
    assert not [name for name in names if name.startswith("model.")]
    model.unlink()
    assert has_all_files(out / LAST)
    assert go(packed, config, out, steps=5)[0] == [4, 5]
    shutil.rmtree(out / "checkpoints")
    whole = tmp_path / "whole"
    go(packed, config, whole, steps=5)
    assert model.read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_file_system_without_links_gets_a_copy(
    packed: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    out = tmp_path / "out"
    go(packed, config, out)
    model, copied = out / "model.safetensors", out / LAST / "model.safetensors"
    assert not model.samefile(copied)
    assert model.read_bytes() == copied.read_bytes()
    assert go(packed, config, out, steps=4)[0] == [4]


def test_a_changed_model_file_is_noticed_and_the_checkpoint_before_is_used(
    packed: Path, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    go(packed, config, out)
    with (out / "model.safetensors").open("r+b") as file:  # in place, so that the checkpoint changes too
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    steps, notes = go(packed, config, out, steps=4)
    assert steps == [3, 4]
    assert "step-00000003 is damaged (model.safetensors was altered); step-00000002 is used" in notes[0]


def test_a_run_killed_between_model_and_checkpoint_continues_from_the_checkpoint_before(
    packed: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save = tmp_path / "out", Checkpoints.save

    def die(self: Checkpoints, step: int, *arguments: Any, **options: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt
        save(self, step, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", die)
        with pytest.raises(KeyboardInterrupt):
            go(packed, config, out)
    assert not is_finished(out)
    assert go(packed, config, out)[0] == [3]
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []
    go(packed, config, tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_checkpoint_that_fails_is_noted_and_the_model_is_finished(
    packed: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TreepackError("the disk is full")

    monkeypatch.setattr(Checkpoints, "save", fail)
    _, notes = go(packed, config, tmp_path / "out", checkpoint_every=9)
    assert notes == ["the disk is full"]
    assert is_finished(tmp_path / "out")


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "gpt2"])
def test_tensors_that_transformers_cuts_or_renames_are_read_bit_for_bit(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(family_config(kind)).save_pretrained(tmp_path / "source")
    model = build_model(str(tmp_path / "source"), read_config(tmp_path / "source")[0], torch.float32, 0)
    weights = saved_weights(model)
    assert weights is not None
    (tmp_path / "saved").mkdir()
    weights.write(tmp_path / "saved", max_file_bytes=30_000)
    link_weights(tmp_path / "saved", tmp_path / "checkpoint")
    files, boxes, tensors = linked_files(tmp_path / "checkpoint"), find_boxes(model), stored_tensors(model)
    assert boxes.tensors.keys() == tensors.keys()
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
    boxes.check(files, tmp_path)
    boxes.read(tensors, files)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
