"""Experts over ranks: losses and gradients equal one process's, and a rank reads only its own experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.oracle_model import packed_directory, tiny_config, worst_error
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.shared_experts import ExpertCase, gradients_over
from support.strategies import make
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.experts.division import check_share
from treepack.model.experts.routing import combine_pairs, sort_pairs, spread_tokens
from treepack.train.early_checks import check_training
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_run, open_verification

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES = {
    2: [
        ExpertCase("qwen3_moe", 2),
        ExpertCase("qwen3_moe", 2, lora=True),
        ExpertCase("qwen3_moe", 2, limit=4, replays=True),
        ExpertCase("qwen3_moe", 2, lora=True, limit=4),
        ExpertCase("gpt_oss", 2, replays=True),
        ExpertCase("qwen3_moe", 2, sequence_ranks=2, lora=True, replays=True),
        ExpertCase("qwen3_moe", 2, sequence_ranks=2, limit=4, replays=True),
    ],
    4: [
        ExpertCase("qwen3_moe", 2, lora=True, limit=4),
        ExpertCase("qwen3_moe", 4),
        ExpertCase("qwen3_moe", 4, lora=True, limit=4),
        ExpertCase("qwen3_moe", 2, sequence_ranks=2, limit=4),
        ExpertCase("qwen3_moe", 4, sequence_ranks=2, limit=4, replays=True),
        ExpertCase("gpt_oss", 4, sequence_ranks=2, replays=True),
    ],
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A mixture in the names of the hub: one tensor for each expert and product."""
    torch.manual_seed(0)
    config = json.loads(tiny_config(tmp_path / "moe.json", model_type="qwen3_moe", **EXPERTS).read_text())
    config.pop("architectures", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path / "moe")
    return tmp_path / "moe"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_losses_and_gradients_equal_those_of_one_process(size: int, tmp_path: Path, checkpoint: Path) -> None:
    results = gradients_over(size, tmp_path, CASES[size], [checkpoint])
    expected = gradients_over(1, tmp_path, CASES[size])
    for case, mine, twin in zip(CASES[size], results, expected, strict=True):
        assert mine.keys() == twin.keys()
        assert worst_error(mine, twin) <= 1e-9, case
    # Every tensor of an expert is read once, by the rank that has the expert.
    stored = [name for name in load_file(checkpoint / "model.safetensors") if ".experts." in name]
    assert len(stored) == 2 * 4 * 3
    owned: list[str] = []
    for rank in range(size):
        read = [name for name in (tmp_path / f"moe-{rank}.txt").read_text().splitlines() if ".experts." in name]
        first, count = rank * 4 // size, 4 // size
        assert {int(name.split(".experts.")[1].split(".")[0]) for name in read} == set(range(first, first + count))
        owned += read
    assert sorted(owned) == sorted(stored)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [
        make(
            f"t{i}",
            [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()],
            reward=float(i % 2),
            advantage=i % 2 - 0.5,
        )
        for i in range(12)
    ]
    return packed_directory(tmp_path / "packed", rollouts, capacity=40)


@pytest.mark.slow
def test_runs_over_ranks_are_those_of_one_process_and_go_on_over_others(
    tmp_path: Path, packed: Path, checkpoint: Path
) -> None:
    short: dict[str, Any] = {"epochs": 1, "rows_per_step": 3, "checkpoint_every": 1, "lr": 3e-3}
    shared = {**short, "expert_ranks": 2}
    names = {
        "sft": Case("sft", packed, checkpoint, {**shared, "router_aux": 0.1}),
        "grpo": Case("grpo", packed, checkpoint, {**shared, "lora": LoraOptions(rank=2)}, "grpo"),
        "pieces": Case("pieces", packed, checkpoint, {**shared, "carry": 16}),
        "first": Case("first", packed, checkpoint, shared, out=tmp_path / "parts", until=1),
    }
    rest = Case("rest", packed, checkpoint, shared, out=tmp_path / "parts")
    two = train_over(2, tmp_path, list(names.values()))
    four = train_over(4, tmp_path, [replace(names["sft"], name="four"), rest])
    plain = [
        replace(case, changes={**case.changes, "expert_ranks": 1}, out=None, until=None) for case in names.values()
    ]
    one = train_over(0, tmp_path, plain)
    for name in ("sft", "grpo", "pieces"):
        check(two[name], one[name])
    check(four["four"], one["sft"])
    whole = [record["loss"] for record in one["first"]["records"]]
    parts = [record["loss"] for result in (two["first"], four["rest"]) for record in result["records"]]
    assert parts == pytest.approx(whole, rel=2e-5)
    assert len(whole) > 1


def check(mine: dict[str, Any], twin: dict[str, Any]) -> None:
    """Compare losses, norms and the written weights, which have the names of the hub."""
    for field in ("loss", "grad_norm"):
        values = [[record[field] for record in each["records"]] for each in (mine, twin)]
        assert values[0] == pytest.approx(values[1], rel=5e-5)
    for path in Path(twin["out"]).glob("*.safetensors"):
        expected, written = load_file(path), load_file(Path(mine["out"]) / path.name)
        assert written.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(written[name], tensor, rtol=1e-3, atol=3e-5)


@pytest.mark.parametrize("opening", [open_run, open_verification])
def test_ranks_that_cannot_be_are_refused_before_anything_is_loaded(opening: Any) -> None:
    assert "expert_ranks is 2 and this is one process" in refusal(
        opening, "no rows", "no model", TrainOptions(device="cpu", expert_ranks=2)
    )


def test_experts_that_cannot_be_divided_are_refused() -> None:
    assert "its 6 experts cannot be divided among 4 ranks; give --expert-ranks 3" in refusal(check_share, 6, 4, "tiny")
    assert "has no experts in stacked weights; train it without --expert-ranks" in refusal(check_share, 0, 4, "tiny")


def test_slots_without_an_expert_add_nothing() -> None:
    index = torch.tensor([[0, 2], [2, 2], [1, 0]])  # 2 is none
    routing = sort_pairs(index, 2, num_pairs=3)
    assert routing.token.tolist() == [0, 2, 2]
    assert routing.ends.tolist() == [2, 3]
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    spread = spread_tokens(rows, routing)
    total = combine_pairs(spread * torch.tensor([[1.0], [10.0], [100.0]]), routing, torch.float32)
    assert total.tolist() == [[0.0, 1.0], [0.0, 0.0], [440.0, 550.0]]
    total.sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [110.0, 110.0]]


def test_experts_that_cannot_be_divided_are_refused_by_the_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    packed = packed_directory(tmp_path / "packed", [make("t", [1, 2, 3])], capacity=8)
    model = str(tiny_config(tmp_path / "six.json", model_type="qwen3_moe", **{**EXPERTS, "num_experts": 6}))
    assert "its 6 experts cannot be divided among 4 ranks" in refusal(
        check_training, [packed], model, TrainOptions(device="cpu", expert_ranks=4)
    )
    check_training([packed], model, TrainOptions(device="cpu", expert_ranks=2))
