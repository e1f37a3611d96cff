"""`train --loss value` and `--value-coef`: files written and read again, resumed runs, adapters, ranks, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config, tiny_model
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.strategies import make
from treepack.files.model_source import VALUE_FILE
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.head.value_head import read_value_head
from treepack.model.load import load_model
from treepack.objectives.objective import Objective, choose_objective
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.setup.opening import open_run
from treepack.train.step import StepMetrics
from treepack.trajectory import Trajectory

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, epochs=3, checkpoint_every=0, warmup_steps=1)
VALUE = choose_objective("value")
BOTH = choose_objective("ppo", value_coef=0.5)


def rollouts() -> list[Trajectory]:
    """Return trajectories that share prompts, whose returns depend on their tokens."""
    generator = np.random.default_rng(0)
    result = []
    for i in range(12):
        tokens = [i // 3, *range(9), 5, *generator.integers(20, 24, 3 + i).tolist()]
        returns = [0.2 * token - 4.0 for token in tokens[10:]]
        size = len(returns)
        result.append(
            make(
                f"t{i}",
                tokens,
                spans=[(10, len(tokens), 1.0)],
                group=f"g{i // 3}",
                reward=float(i % 2),
                advantages=generator.normal(size=size).tolist(),
                returns=returns,
                old_values=(generator.normal(size=size) * 0.1).tolist(),
            )
        )
    return result


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", rollouts(), capacity=40)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model("qwen3", dtype=torch.float32).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def go(
    packed: Path, model: Path, out: Path, objective: Objective, *, until: int | None = None, **changes: Any
) -> tuple[list[StepMetrics], TrainingRun]:
    """Start or resume a run like a new process, up to step `until`; return its steps and the run."""
    run = open_run(packed, model, replace(OPTIONS, objective=objective, **changes))
    steps: list[StepMetrics] = []
    for metrics in train(run, out, resume=True, stop=lambda: until is not None and len(steps) + 1 >= until):
        steps.append(metrics)
    return steps, run


def test_a_critic_learns_returns_and_is_written_beside_its_model(packed: Path, base: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 25, "rows_per_step": 100, "checkpoint_every": 25}
    steps, run = go(packed, base, tmp_path / "critic", replace(VALUE, value_clip=0.0), **options)
    assert steps[-1].means["value_loss"] < 0.5 * steps[0].means["value_loss"]
    assert steps[-1].means["explained_variance"] > 0.3 > steps[0].means["explained_variance"]
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    head = run.loaded.value_head
    assert head is not None
    saved = read_value_head(tmp_path / "critic")
    assert saved is not None
    torch.testing.assert_close(saved, {name: value.detach() for name, value in head.named_parameters()}, rtol=0, atol=0)
    again = load_model(tmp_path / "critic", value_head=True)
    for name, value in run.loaded.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=0, atol=0)


def test_a_new_head_gives_zero_and_beside_it_the_policy_loss_is_unchanged(
    packed: Path, base: Path, tmp_path: Path
) -> None:
    (first, *_), run = go(packed, base, tmp_path / "both", BOTH, epochs=1, rows_per_step=100)
    (policy, *_), _ = go(packed, base, tmp_path / "policy", choose_objective("ppo"), epochs=1, rows_per_step=100)
    assert run.loaded.value_head is not None
    # Values are 0, so the error is the return; a clipped value is at most 0.2 from an old value of any size.
    assert first.means["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert first.loss == pytest.approx(policy.loss + 0.5 * first.means["value_loss"], rel=1e-5)
    assert first.means["entropy"] == policy.means["entropy"]
    assert not (tmp_path / "policy" / VALUE_FILE).exists()


def test_a_stopped_run_continues_bit_for_bit_with_its_head(packed: Path, base: Path, tmp_path: Path) -> None:
    go(packed, base, tmp_path / "whole", BOTH)
    go(packed, base, tmp_path / "parts", BOTH, until=3)
    go(packed, base, tmp_path / "parts", BOTH)
    for name in ("model.safetensors", VALUE_FILE):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert "cannot resume: --value-clip was" in refusal(
        go, packed, base, tmp_path / "parts", replace(BOTH, value_clip=0.3)
    )


def test_a_critic_starts_from_the_checkpoint_of_a_policy_and_the_other_way_round(
    packed: Path, base: Path, tmp_path: Path
) -> None:
    policy = choose_objective("ppo")
    go(packed, base, tmp_path / "policy", policy, until=2)
    go(packed, base, tmp_path / "critic", VALUE, until=2)
    for objective, start in ((VALUE, "policy"), (policy, "critic")):
        checkpoint = tmp_path / start / "checkpoints" / "step-00000002"
        trained = open_run(packed, base, replace(OPTIONS, objective=objective, init_from=str(checkpoint)))
        fresh = open_run(packed, base, replace(OPTIONS, objective=objective))
        head = trained.loaded.value_head
        assert (head is None) == (objective is policy)
        assert head is None or not bool(head.weight.any())
        names = [name for name, _ in fresh.loaded.model.named_parameters() if "value_head" not in name]
        weights = [each.loaded.model.state_dict() for each in (trained, fresh)]
        assert all(bool((weights[0][name] != weights[1][name]).any()) for name in names if "layers" in name)


def test_adapters_train_a_head_which_a_later_run_continues(packed: Path, base: Path, tmp_path: Path) -> None:
    _, run = go(packed, base, tmp_path / "lora", VALUE, lora=LoraOptions(rank=2))
    saved = read_value_head(tmp_path / "lora")
    assert saved is not None
    assert bool(saved["weight"].any())
    assert not any("value_head" in name for name in load_file(tmp_path / "lora" / "adapter_model.safetensors"))
    again = load_model(tmp_path / "lora", value_head=True)
    trained = {name: value for name, value in run.loaded.model.named_parameters() if value.requires_grad}
    assert any("value_head" in name for name in trained)
    for name, value in again.model.named_parameters():
        if name in trained:
            torch.testing.assert_close(value, trained[name], rtol=0, atol=0)
    go(packed, base, tmp_path / "merged", VALUE, lora=LoraOptions(rank=2, merge=True))
    merged = read_value_head(tmp_path / "merged")
    torch.testing.assert_close(merged, saved, rtol=0, atol=0)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]


@pytest.mark.parametrize("changes", [{"carry": 16}, {"checkpoint_layers": "all"}, {"dtype": "bf16"}], ids=str)
def test_pieces_recomputation_and_bf16_keep_the_loss(
    packed: Path, base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    (plain, *_), _ = go(packed, base, tmp_path / "plain", BOTH, epochs=1, rows_per_step=100)
    (other, *_), run = go(packed, base, tmp_path / "other", BOTH, epochs=1, rows_per_step=100, **changes)
    rel = 0.05 if "dtype" in changes else 1e-4
    assert other.loss == pytest.approx(plain.loss, rel=rel)
    assert other.grad_norm == pytest.approx(plain.grad_norm, rel=rel)
    head = run.loaded.value_head
    assert head is not None
    assert head.weight.dtype == torch.float32
    assert head.weight.grad is not None


def test_the_command_trains_and_verifies_a_critic(treepack: Run, packed: Path, base: Path, tmp_path: Path) -> None:
    common = (packed, "--model", base, "--device", "cpu")
    done = treepack("train", *common, "--loss", "value", "--out", tmp_path / "critic", "--steps", 2)
    assert done.status == 0
    line = json.loads((tmp_path / "critic" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"value_loss", "value_clip_fraction", "explained_variance", "return"} <= line.keys()
    both = ("--loss", "ppo", "--value-coef", "0.5", "--value-clip", "0.1")
    lora = ("--lora-rank", 2)
    for options in (
        ("--loss", "value"),
        ("--loss", "value", *lora),
        (*both, "--carry", 16),
        (*both, *lora, "--carry", 16),
    ):
        # A new head has random weights here, so that gradients of the values reach the model.
        done = treepack("train", *common, *options, "--verify")
        assert (done.status, "float64" in done.out) == (0, True)
    done = treepack(
        "train", packed, "--model", tmp_path / "critic", "--loss", "sft", "--out", tmp_path / "o", "--steps", 1
    )
    assert "neither trained nor written" in done.err


def test_a_head_of_another_model_or_a_damaged_one_is_refused(base: Path) -> None:
    save_file({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, base / VALUE_FILE)
    assert "is for states of 5 numbers and the model has 16" in refusal(load_model, base, value_head=True)
    save_file({"weight": torch.zeros(2, 16), "bias": torch.zeros(1)}, base / VALUE_FILE)
    assert "expected the tensors weight" in refusal(load_model, base, value_head=True)
    (base / VALUE_FILE).write_bytes(b"?")
    assert "cannot be read" in refusal(load_model, base, value_head=True)
    assert load_model(base).value_head is None


@pytest.mark.slow
def test_two_ranks_train_a_critic_as_one_process_does(packed: Path, base: Path) -> None:
    folder = packed.parent
    tiny = tiny_config(folder / "untied.json", tie_word_embeddings=False)
    uneven = {"epochs": 2, "rows_per_step": 3, "clip": 0.0}  # the second rank runs out of rows
    lora = {**uneven, "lora": LoraOptions(rank=2)}
    cases = [
        Case("files", packed, base, uneven, "value"),
        Case("random", packed, tiny, uneven, "value"),
        Case("both", packed, base, uneven, "ppo", value_coef=0.5),
        Case("pieces", packed, base, {**uneven, "carry": 16}, "ppo", value_coef=0.5),
        Case("offloaded", packed, base, {**uneven, "offload_optimizer": True}, "value"),
        Case("lora", packed, base, lora, "value"),
        Case("stopped", packed, base, uneven, "ppo", value_coef=0.5, out=folder / "parts", until=2),
        Case("resumed", packed, base, uneven, "ppo", value_coef=0.5, out=folder / "parts"),
    ]
    results = train_over(2, folder, cases)
    expected = train_over(0, folder, cases[:-2])
    for case in cases[:-2]:
        result, reference = results[case.name], expected[case.name]
        for actual, record in zip(result["records"], reference["records"], strict=True):
            for name in ("loss", "grad_norm", "value_loss", "explained_variance"):
                assert actual[name] == pytest.approx(record[name], rel=5e-5, abs=1e-6), (case.name, name)
        for name, gradient in reference["gradients"].items():
            if gradient is not None:
                torch.testing.assert_close(result["gradients"][name], gradient, rtol=2e-4, atol=1e-6)
        torch.testing.assert_close(
            *(read_value_head(each["out"]) for each in (result, reference)), rtol=1e-3, atol=2e-5
        )
    torch.testing.assert_close(*(read_value_head(results[name]["out"]) for name in ("resumed", "both")), rtol=0, atol=0)
