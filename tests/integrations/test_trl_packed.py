"""SFTTrainer of TRL trains a packed directory with treepack's loss."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.oracle_model import gradients, worst_error, write_rows
from support.packed_objectives import as_trajectories, rollouts
from support.paths import SAMPLE_DATA
from treepack import PackedDataset, TreepackError, load_model, row_loss
from treepack.integrations.trl import tree_trainer

pytestmark = pytest.mark.integrations

ROWS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]  # the row of every rollout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return PackedDataset(write_rows(tmp_path_factory.mktemp("data") / "packed", as_trajectories(rollouts()), ROWS))


def make_trainer(model: Any, dataset: Any, folder: Path, eval_dataset: Any = None, **changes: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    from support.trl_runs import SETTINGS, tokenizer, tree_trainer

    settings = {**SETTINGS, "per_device_train_batch_size": 2, "max_steps": 1, **changes}
    settings = {name: value for name, value in settings.items() if name in SFTConfig.__dataclass_fields__}
    args = SFTConfig(str(folder), **settings)
    return tree_trainer(SFTTrainer)(
        model, args, train_dataset=dataset, eval_dataset=eval_dataset, processing_class=tokenizer()
    )


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


def expected_metrics(model: Any, dataset: PackedDataset) -> dict[str, float]:
    """Return the loss and TRL's metrics of every rollout alone, from the logits of the whole model."""
    loss, entropy, correct, weight, tokens = (0.0,) * 5
    for row in dataset:
        ends = row.trajectory_ends.tolist()
        for end in ends:
            path = [end]
            while (before := int(row.parent[path[0]])) >= 0:
                path.insert(0, before)
            tokens += len(path)
        logits = model(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            subtree_end=row.subtree_end[None],
            use_cache=False,
        ).logits[0]
        for j in row.loss_weight.nonzero().flatten().tolist():
            logprobs = torch.log_softmax(logits[int(row.parent[j])].double(), -1)
            factor = float(row.loss_weight[j])
            weight += factor
            loss -= factor * float(logprobs[row.input_ids[j]])
            entropy -= factor * float((logprobs.exp() * logprobs).sum())
            correct += factor * float(logprobs.argmax() == row.input_ids[j])
    return {
        "loss": loss / weight,
        "entropy": entropy / weight,
        "mean_token_accuracy": correct / weight,
        "num_tokens": tokens,
    }


def test_the_metrics_of_trl_and_an_evaluation_are_those_of_the_rows(packed: PackedDataset, tmp_path: Path) -> None:
    loaded = load_model(SAMPLE_DATA / "tiny-qwen3.json")
    loaded.model.eval()
    with torch.no_grad():
        expected = expected_metrics(loaded.model, packed)
    # Three micro-batches of six rows in a step; 6 rows in evaluations of 4, so that two rows are padding.
    trainer = make_trainer(
        loaded.model,
        packed,
        tmp_path,
        packed,
        gradient_accumulation_steps=3,
        per_device_eval_batch_size=4,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    trained = next(each for each in trainer.state.log_history if "loss" in each)
    evaluated = next(each for each in trainer.state.log_history if "eval_loss" in each)
    assert trained["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert trained["num_tokens"] == expected["num_tokens"]
    assert trained["tree/flat_over_computed_tokens"] > 1.2
    assert evaluated["eval_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert trainer.evaluate({"again": packed})["eval_again_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    # TRL's metrics are means over micro-batches; one micro-batch of all rows has the mean over all tokens.
    trainer = make_trainer(loaded.model, packed, tmp_path, per_device_train_batch_size=6, gradient_accumulation_steps=1)
    trainer.train()
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        assert trainer.state.log_history[0][name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": True}, "packing=True packs samples, and the rows are packed already; leave it out"),
        ({"assistant_only_loss": True}, "assistant_only_loss=True chooses trained tokens"),
        ({"loss_type": "dft"}, "loss_type is 'dft'"),
    ],
)
def test_options_of_samples_are_refused(
    changes: dict[str, Any], message: str, packed: PackedDataset, tmp_path: Path
) -> None:
    with pytest.raises(TreepackError, match=message):
        make_trainer(load_model(SAMPLE_DATA / "tiny-qwen3.json").model, packed, tmp_path, **changes)


@pytest.mark.parametrize("option", ["cp_size", "sp_size", "tp_size"])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_parallelism_of_accelerate_is_refused_before_a_model_is_loaded(kind: str, option: str, tmp_path: Path) -> None:
    import trl

    config = getattr(trl, f"{kind}Config")(str(tmp_path), use_cpu=True, bf16=False)
    config.parallelism_config = SimpleNamespace(**{option: 2})
    trainer: Any = tree_trainer(getattr(trl, f"{kind}Trainer"))
    with pytest.raises(TreepackError, match=rf"config.{option} is 2, .* `treepack train --sequence-ranks 2`"):
        trainer("no-such-model", args=config, train_dataset=None)


def test_samples_that_are_not_packed_are_refused(packed: PackedDataset, tmp_path: Path) -> None:
    datasets, model = pytest.importorskip("datasets"), load_model(SAMPLE_DATA / "tiny-qwen3.json").model
    with pytest.raises(TreepackError, match=r"expected train_dataset=PackedDataset\(...\), not list"):
        make_trainer(model, [{"text": "a"}], tmp_path)
    with pytest.raises(TreepackError, match=r"expected eval_dataset=PackedDataset\(...\), not list"):
        make_trainer(model, packed, tmp_path, [{"text": "a"}])
    with pytest.raises(TreepackError, match=r"expected eval_dataset=PackedDataset\(...\), not Dataset"):
        make_trainer(model, packed, tmp_path, datasets.Dataset.from_dict({"text": ["a"]}))
