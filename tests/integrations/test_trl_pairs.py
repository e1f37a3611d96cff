"""DPOTrainer of TRL gives the same training with treepack as without, with fewer tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from treepack import TreepackError

pytestmark = pytest.mark.integrations

CASES: dict[str, dict[str, Any]] = {
    "two losses": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "weighted pairs": {"use_weighting": True},
    "lengths desensitised": {"ld_alpha": 0.5},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reference computed before": {"precompute_ref_log_probs": True},
}


@pytest.fixture(scope="module")
def runs() -> Any:
    from support import trl_runs  # the import of trl takes seconds, for which the collection of other tests would wait

    return trl_runs


@pytest.fixture(scope="module")
def model(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(runs.tiny_model(tmp_path_factory.mktemp("model")))


def trainer_of(runs: Any, base: type[Any], model: str, folder: Path, record: Any = None, **changes: Any) -> Any:
    """Return a DPOTrainer whose pairs have prompts of different lengths, and which writes to `record`."""
    import numpy as np
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig

    class Recorded(base):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            record.tokens.append(0)
            loss = super().compute_loss(*args, **kwargs)
            record.losses.append(float(loss.detach()))
            return loss

    rng = np.random.default_rng(0)
    columns = {"prompt": (20, 40), "chosen": (3, 9), "rejected": (3, 9)}
    pairs = [
        {name: " ".join(rng.choice(runs.WORDS, rng.integers(*size))) for name, size in columns.items()}
        for _ in range(12)
    ]
    more = {"peft_config": changes.pop("peft_config")} if "peft_config" in changes else {}
    settings = {**runs.SETTINGS, "per_device_train_batch_size": 2, **changes}
    settings = {name: value for name, value in settings.items() if name in DPOConfig.__dataclass_fields__}
    settings.pop("temperature", None)
    torch.manual_seed(3)  # for the weights of an adapter
    return Recorded(
        AutoModelForCausalLM.from_pretrained(model),
        args=DPOConfig(str(folder), **settings),
        train_dataset=Dataset.from_list(pairs),
        processing_class=runs.tokenizer(),
        callbacks=[runs.Gradients(record)] if record else None,
        **more,
    )


def train_both(runs: Any, model: str, folder: Path, **changes: Any) -> list[Any]:
    """Return the records of DPOTrainer on trees and as it is."""
    from trl import DPOTrainer

    records = []
    for base in (runs.tree_trainer(DPOTrainer), DPOTrainer):
        record = runs.Record()
        trainer = trainer_of(runs, base, model, folder, record, **changes)
        words = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings()
        words.register_forward_hook(lambda _, __, out, record=record: runs.count_tokens(record, out))
        trainer.train()
        record.logs = [log for log in trainer.state.log_history if "loss" in log]
        records.append(record)
    return records


@pytest.fixture(scope="module")
def sigmoid(runs: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return train_both(runs, model, tmp_path_factory.mktemp("dpo"))


def test_dpo_trains_as_it_does_without_treepack(runs: Any, sigmoid: list[Any]) -> None:
    runs.assert_same_training(*sigmoid)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_dpo_with_options_trains_as_it_does_without_treepack(
    changes: dict[str, Any], runs: Any, model: str, tmp_path: Path
) -> None:
    runs.assert_same_training(*train_both(runs, model, tmp_path, **changes))


def test_an_adapter_trains_as_it_does_without_treepack(runs: Any, model: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    runs.assert_same_training(*train_both(runs, model, tmp_path, peft_config=lora))


def test_prompts_are_computed_once_for_both_answers(sigmoid: list[Any]) -> None:
    tree, flat = sigmoid
    assert sum(tree.tokens) < 0.65 * sum(flat.tokens)


def test_all_metrics_of_trl_stay(sigmoid: list[Any]) -> None:
    for ours, theirs in zip(*(record.logs for record in sigmoid), strict=True):
        assert ours.pop("tree/flat_over_computed_tokens") > 1.5
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_generation_is_refused(runs: Any, model: str, tmp_path: Path) -> None:
    from trl import DPOTrainer

    trainer = trainer_of(runs, runs.tree_trainer(DPOTrainer), model, tmp_path)
    with pytest.raises(TreepackError, match="generate with another copy of the model"):
        trainer.model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
