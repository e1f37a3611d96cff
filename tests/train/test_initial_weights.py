"""A run that starts with the weights of a checkpoint or model of a different run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.oracle_model import packed_directory, tiny_config
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.setup.opening import open_run

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=1, steps=3, checkpoint_every=1, keep=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows, a configuration, and a run that is complete."""
    folder = tmp_path_factory.mktemp("trained")
    packed_directory(folder / "packed", [make(f"t{i}", [1, 2, 3 + i, 4]) for i in range(4)], capacity=8)
    tiny_config(folder / "tiny.json")
    list(train(opened(folder), folder / "first"))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, which the test may change."""
    return Path(shutil.copytree(trained, tmp_path, dirs_exist_ok=True))


def opened(folder: Path, init_from: Path | None = None, seed: int = 0) -> TrainingRun:
    options = replace(OPTIONS, init_from=None if init_from is None else str(init_from), seed=seed)
    return open_run(folder / "packed", folder / "tiny.json", options)


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.loaded.model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_complete_run_gives_its_model_and_a_checkpoint_its_step(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "first").state_dict()
    run = opened(folder, folder / "first", seed=1)
    assert_equal(weights(run), model)
    assert run.loaded.notes[-1] == f"the run starts with the weights of {folder / 'first'}"
    assert run.loaded.source == str(folder / "tiny.json")
    steps = [weights(opened(folder, folder / "first" / "checkpoints" / f"step-{n:08d}", seed=1)) for n in (2, 3)]
    assert_equal(steps[1], model)
    assert not all(torch.equal(steps[0][name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("as_model", [False, True])
def test_an_adapter_is_refused_by_name(folder: Path, as_model: bool) -> None:
    adapter = folder / "adapter"
    adapter.mkdir()
    record = {"peft_type": "LORA", "base_model_name_or_path": str(folder / "tiny.json"), "r": 2, "target_modules": []}
    (adapter / "adapter_config.json").write_text(json.dumps(record))
    model, init_from = (adapter, folder / "first") if as_model else (folder / "tiny.json", adapter)
    with pytest.raises(TreepackError) as raised:
        open_run(folder / "packed", model, replace(OPTIONS, init_from=str(init_from)))
    said = f"{adapter}: is an adapter, and --init-from is about whole models; give it as --model alone"
    assert str(raised.value) == said


def test_a_run_that_is_not_complete_gives_its_newest_checkpoint(folder: Path) -> None:
    (folder / "first" / "train.json").unlink()
    found = weights(opened(folder, folder / "first", seed=1))
    assert_equal(found, weights(opened(folder, folder / "first" / "checkpoints" / "step-00000003")))


def test_a_new_run_starts_at_its_first_step_and_resumes(folder: Path) -> None:
    list(train(opened(folder, folder / "first"), folder / "whole"))
    first = train(opened(folder, folder / "first"), folder / "parts")
    assert next(first).step == 1
    first.close()  # type: ignore[attr-defined]
    assert [each.step for each in train(opened(folder, folder / "first"), folder / "parts", resume=True)] == [2, 3]
    one, other = ((folder / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other
    assert "cannot resume: --init-from was" in refusal(list, train(opened(folder), folder / "parts", resume=True))


def test_other_shapes_are_refused_by_name(folder: Path) -> None:
    tiny_config(folder / "tiny.json", intermediate_size=48)
    with pytest.raises(TreepackError, match=r"first: its model\.layers\.0\.mlp\.\w+\.weight is of shape .* start from"):
        opened(folder, folder / "first")
    with pytest.raises(TreepackError, match=r"step-00000003: model\.layers\.0\.mlp.* in the checkpoint and .* in the"):
        opened(folder, folder / "first" / "checkpoints" / "step-00000003")


def test_a_run_without_a_checkpoint_and_a_damaged_one_are_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "run.json").write_text("{}")
    assert "empty: is a run without a checkpoint; wait for its first one" in refusal(opened, folder, folder / "empty")
    step = folder / "first" / "checkpoints" / "step-00000003"
    data = next(step.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    assert "step-00000003 is damaged" in refusal(opened, folder, step)
