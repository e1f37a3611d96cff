"""SFTTrainer of TRL trains a packed directory with treepack's loss."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from support.oracle_model import gradients, worst_error, write_rows
from support.packed_objectives import as_trajectories, rollouts
from support.paths import SAMPLE_DATA
from treepack import PackedDataset, TreepackError, load_model, row_loss

pytestmark = pytest.mark.integrations

ROWS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]  # the row of every rollout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return PackedDataset(write_rows(tmp_path_factory.mktemp("data") / "packed", as_trajectories(rollouts()), ROWS))


def make_trainer(model: Any, dataset: Any, folder: Path, **changes: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    from support.trl_runs import SETTINGS, tokenizer, tree_trainer

    settings = {**SETTINGS, "per_device_train_batch_size": 2, "max_steps": 1, **changes}
    settings = {name: value for name, value in settings.items() if name in SFTConfig.__dataclass_fields__}
    args = SFTConfig(str(folder), **settings)
    return tree_trainer(SFTTrainer)(model, args, train_dataset=dataset, processing_class=tokenizer())


def test_a_step_has_the_gradient_of_its_rows(packed: PackedDataset, tmp_path: Path) -> None:
    from support.trl_runs import Gradients, Record

    loaded = load_model(SAMPLE_DATA / "tiny-qwen3.json")
    alone = deepcopy(loaded.model)
    # Two micro-batches of two rows, in the order of the directory.
    trainer = make_trainer(loaded.model, packed, tmp_path, train_sampling_strategy="sequential")
    record = Record()
    trainer.add_callback(Gradients(record))
    trainer.train()
    chosen = [packed[i] for i in range(4)]
    expected = load_model(SAMPLE_DATA / "tiny-qwen3.json")
    expected.model.load_state_dict(alone.state_dict())
    total = torch.stack([row_loss(expected, row) for row in chosen]).sum()
    loss = total / sum(row.total_weight for row in chosen)
    torch.autograd.backward(loss)
    # float32: rounding changes a gradient by about 1e-6, a wrong denominator by much more
    assert worst_error(record.gradients[0], gradients(expected.model)) < 1e-5
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_samples_that_are_not_packed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match=r"expected train_dataset=PackedDataset"):
        make_trainer(load_model(SAMPLE_DATA / "tiny-qwen3.json").model, [{"text": "a"}], tmp_path)


def test_another_loss_is_refused(packed: PackedDataset, tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match="loss_type is 'dft'"):
        make_trainer(load_model(SAMPLE_DATA / "tiny-qwen3.json").model, packed, tmp_path, loss_type="dft")
