"""GRPOTrainer and RLOOTrainer of TRL give the same training with treepack as without, with fewer tokens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.paths import TESTS
from treepack import TreepackError
from treepack.model.dropout import check_dropout
from treepack.online import OnlineOptions, plan_batch

pytestmark = pytest.mark.integrations

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "cispo": {"loss_type": "cispo"},
    "a sum over a constant": {"loss_type": "dr_grpo"},
    "soft clipping": {"loss_type": "sapo"},
    "a ratio of sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "a mean over a micro-batch": {"loss_type": "bnpo"},
    "two iterations over two steps": {"num_iterations": 2, "steps_per_generation": 4},
    "KL": {"beta": 0.1, "num_iterations": 2},
    "no tool mask": {"tools": False},
    "an entropy bonus": {"entropy_coef": 0.01},
    "tokens of high entropy only": {"top_entropy_quantile": 0.5},
    "truncated completions masked": {"mask_truncated_completions": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "temperature 1": {"temperature": 1.0},
}


@pytest.fixture(scope="module")
def runs() -> Any:
    from support import trl_runs  # the import of trl takes seconds, for which the collection of other tests would wait

    return trl_runs


@pytest.fixture(scope="module")
def model(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(runs.tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def dapo(runs: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the records of GRPOTrainer with its default loss, on trees and without."""
    return runs.train_both(model, tmp_path_factory.mktemp("dapo"))


@pytest.fixture
def refused(runs: Any, model: str, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a GRPOTrainer on trees."""

    def make(other: Any = None, more: dict[str, Any] | None = None, **changes: Any) -> Any:
        canned = {"rollout_func": runs.rollout, **(more or {})}
        base = runs.tree_trainer(runs.GRPOTrainer)
        return runs.make_trainer(base, other or model, tmp_path, more=canned, **changes)

    return make


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_grpo_trains_as_it_does_without_treepack(
    changes: dict[str, Any], runs: Any, model: str, tmp_path: Path
) -> None:
    runs.assert_same_training(*runs.train_both(model, tmp_path, **changes))


def test_dapo_trains_as_it_does_without_treepack(runs: Any, dapo: Any) -> None:
    runs.assert_same_training(*dapo)


def test_rloo_trains_as_it_does_without_treepack(runs: Any, model: str, tmp_path: Path) -> None:
    from trl import RLOOConfig

    runs.assert_same_training(*runs.train_both(model, tmp_path, base=runs.CannedRLOO, config=RLOOConfig, beta=0.05))


def test_rows_shorter_than_a_micro_batch_give_the_same_training(
    runs: Any, model: str, dapo: Any, tmp_path: Path
) -> None:
    rows = runs.tree_trainer(runs.GRPOTrainer, OnlineOptions(capacity=80))
    runs.assert_same_training(runs.train(rows, model, tmp_path), dapo[1])


@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["no reference", "a reference without the adapter"])
def test_an_adapter_trains_as_it_does_without_treepack(beta: float, runs: Any, model: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    settings = {"more": {"peft_config": lora}, "beta": beta, "num_iterations": 2}
    runs.assert_same_training(*runs.train_both(model, tmp_path, **settings))


def test_each_optimiser_step_has_the_samples_that_trl_chose(dapo: Any) -> None:
    tree, flat = dapo
    assert tree.step_samples() == flat.step_samples()
    assert tree.samples != flat.samples  # the micro-batches of a step differ


def test_a_loss_that_depends_on_micro_batches_keeps_their_samples(runs: Any, model: str, tmp_path: Path) -> None:
    tree, flat = runs.train_both(model, tmp_path, loss_type="bnpo")
    assert tree.samples == flat.samples


def test_the_policy_computes_the_tokens_of_the_plan(dapo: Any) -> None:
    run, _ = dapo
    planned = [plan_batch([torch.tensor(ids) for ids in batch]).num_tokens for batch in run.samples]
    # A node of the tree of a step is a prefix of a sample.
    tree = sum(len({ids[:n] for ids in step for n in range(1, len(ids) + 1)}) for step in run.step_samples())
    flat = sum(len(ids) for batch in run.samples for ids in batch)
    assert run.tokens[1:] == planned[1:]  # the first micro-batch also checks the model
    assert sum(planned) <= 1.05 * tree
    assert 3 * sum(planned) <= flat


def test_metrics_of_trl_stay(dapo: Any) -> None:
    for ours, theirs in zip(dapo[0].logs, dapo[1].logs, strict=True):
        assert ours.keys() - theirs.keys() == {"tree/flat_over_computed_tokens"}
        # Means over micro-batches of their means depend on the micro-batches.
        same = [name for name in theirs if not name.startswith(("step_time", "clip_ratio", "entropy"))]
        expected = {name: theirs[name] for name in same}
        assert {name: ours[name] for name in same} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_model_still_generates_and_evaluates(runs: Any, model: str, tmp_path: Path) -> None:
    results = []
    for base in (runs.GRPOTrainer, runs.tree_trainer(runs.GRPOTrainer)):
        changes = {"max_steps": 1, "max_completion_length": 6, "per_device_eval_batch_size": 4}
        more = {"eval_dataset": runs.prompts(2)}
        trainer = runs.make_trainer(base, model, tmp_path, more=more, **changes)
        trainer.train()
        logs = {**trainer.state.log_history[0], **trainer.evaluate()}
        results.append({name: logs[name] for name in ("loss", "reward", "grad_norm", "eval_loss", "eval_reward")})
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-6)


def test_two_processes_train_as_they_do_without_treepack(runs: Any, model: str, tmp_path: Path) -> None:
    program = [TESTS / "support" / "trl_ranks.py", model, tmp_path]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    subprocess.run([sys.executable, *launch, *map(str, program)], check=True, timeout=600)
    for rank in range(2):
        records = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        for name in ("tree", "shared", "sharded"):
            runs.assert_same_training(records[name], records["flat"])
        assert 2 * sum(records["tree"].tokens[1:]) < sum(records["flat"].tokens[1:])
        # Rows of the samples of both ranks, half of whose tokens each computes
        assert 1.2 * sum(records["shared"].tokens[1:]) < sum(records["flat"].tokens[1:])


def test_sequence_ranks_that_cannot_share_rows_are_refused(runs: Any, model: str, tmp_path: Path) -> None:
    from trl import DPOTrainer

    with pytest.raises(TreepackError, match="sequence_ranks is 2, and 1 processes train; start a multiple of it"):
        runs.make_trainer(runs.tree_trainer(runs.GRPOTrainer, sequence_ranks=2), model, tmp_path)
    with pytest.raises(TreepackError, match="not of DPOTrainer; set it to 1, or run `treepack train --sequence-ranks"):
        runs.tree_trainer(DPOTrainer, sequence_ranks=2)


def test_the_auxiliary_loss_of_experts_is_refused(refused: Callable[..., Any]) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 1464, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    with pytest.raises(TreepackError, match="set router_aux_loss_coef=0"):
        refused(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)))


def test_rollouts_with_tools_train_as_they_do_without_treepack(runs: Any, model: str, tmp_path: Path) -> None:
    settings = {"more": runs.with_tools(), "max_completion_length": 200}
    tree, flat = runs.train_both(model, tmp_path, base=runs.CannedTools, **settings)
    runs.assert_same_training(tree, flat)
    assert all(log["tools/call_frequency"] == 1 and log["tools/failure_frequency"] == 0 for log in tree.logs)
    assert sum(tree.tokens) < 0.6 * sum(flat.tokens)


def test_dropout_is_set_to_0_with_a_note(
    refused: Callable[..., Any], model: str, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    trainer = refused(AutoModelForCausalLM.from_pretrained(model, attention_dropout=0.2), more={"peft_config": lora})
    check_dropout(trainer.model.train())
    notes = [message for message in caplog.messages if "dropout" in message]
    assert [note.split(":")[2].split(" set")[0].strip() for note in notes] == [
        "attention_dropout of 0.2",
        "lora_dropout of 0.1",
    ]


def test_virtual_tokens_are_refused(refused: Callable[..., Any]) -> None:
    from peft import PromptTuningConfig

    virtual = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(TreepackError, match="virtual tokens"):
        refused(more={"peft_config": virtual})


def test_images_are_refused(refused: Callable[..., Any]) -> None:
    trainer, ids = refused(), torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(TreepackError, match="the batch has pixel_values"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 1, pixel_values=ids)


def test_another_trainer_is_refused(runs: Any) -> None:
    from trl import GRPOTrainer, RewardTrainer

    with pytest.raises(TreepackError, match="RewardTrainer is not supported; expected GRPOTrainer"):
        runs.tree_trainer(RewardTrainer)
    with pytest.raises(TreepackError, match="TreeGRPOTrainer shares prefixes already"):
        runs.tree_trainer(runs.tree_trainer(GRPOTrainer))
