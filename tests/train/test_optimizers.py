"""--optimizer and --schedule: updates as in torch and bitsandbytes, resumed runs with the same bits, or a refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from support.oracle_model import packed_directory, tiny_config
from support.refusal import refusal
from support.strategies import make
from support.tiny_families import family_config
from treepack.train.loop import train
from treepack.train.optimiser import check_optimizer, make_optimiser, prepare_states
from treepack.train.options import TrainOptions
from treepack.train.schedule import learning_rate
from treepack.train.setup.opening import open_run
from treepack.train.step import StepMetrics

OTHERS = ("adamw8bit", "muon", "sgd")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(12)]
    return packed_directory(tmp_path_factory.mktemp("rows") / "packed", rollouts, capacity=40)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    # Moments of matrices of fewer than 4,096 weights have 32 bits in bitsandbytes.
    return tiny_config(tmp_path / "tiny.json", hidden_size=64, intermediate_size=128)


def options(**changes: Any) -> TrainOptions:
    usual = {"device": "cpu", "lr": 1e-2, "weight_decay": 0.1, "rows_per_step": 2, "steps": 4, "checkpoint_every": 2}
    return TrainOptions(**{**usual, **changes})


def expected_updates(
    optimizer: str, weights: dict[str, nn.Parameter], decayed: set[str], matrices: set[str]
) -> list[torch.optim.Optimizer]:
    """Return the optimisers of torch and bitsandbytes that together make the updates of `optimizer`."""

    def groups(names: set[str]) -> list[dict[str, Any]]:
        both = [(sorted(names & decayed), 0.1), (sorted(names - decayed), 0.0)]
        return [{"params": [weights[name] for name in chosen], "weight_decay": decay} for chosen, decay in both]

    if optimizer == "adamw8bit":
        return [bitsandbytes.optim.AdamW8bit(groups(set(weights)), lr=1e-2, betas=(0.9, 0.95))]
    if optimizer == "sgd":
        return [torch.optim.SGD(groups(set(weights)), lr=1e-2)]
    return [
        torch.optim.Muon(groups(matrices)[:1], lr=1e-2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups(set(weights) - matrices), lr=1e-2, betas=(0.9, 0.95)),
    ]


@pytest.mark.parametrize("optimizer", OTHERS)
def test_updates_are_those_of_the_library(optimizer: str, packed: Path, config: Path) -> None:
    run = open_run(packed, config, options(optimizer=optimizer))
    trained = dict(run.loaded.model.named_parameters())
    theirs = {name: nn.Parameter(weight.detach().clone()) for name, weight in trained.items()}
    # By their names in Qwen3: all projections are matrices of layers, and norms have no decay.
    matrices = {name for name in trained if name.endswith("_proj.weight")}
    decayed = matrices | {name for name in trained if "embed" in name or "lm_head" in name}
    ours = make_optimiser(run)
    others = expected_updates(optimizer, theirs, decayed, matrices)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, weight in trained.items():
            weight.grad = torch.randn(weight.shape, generator=generator)
            theirs[name].grad = weight.grad.clone()
        prepare_states(ours)
        for each in (ours, *others):
            each.step()
    assert len(matrices) >= 7
    for name, weight in trained.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-7, msg=name)


def weights_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("optimizer", OTHERS)
def test_a_resumed_run_has_the_same_bits(optimizer: str, packed: Path, config: Path, tmp_path: Path) -> None:
    chosen = options(optimizer=optimizer, schedule="wsd", warmup_steps=1)
    whole = list(train(open_run(packed, config, chosen), tmp_path / "whole"))
    steps: list[StepMetrics] = []
    for metrics in train(open_run(packed, config, chosen), tmp_path / "out", stop=lambda: len(steps) == 2):
        steps.append(metrics)
    assert len(steps) == 3
    steps += list(train(open_run(packed, config, chosen), tmp_path / "out", resume=True))
    assert [each.loss for each in steps] == [each.loss for each in whole]
    assert whole[-1].loss != whole[0].loss
    saved, again = weights_of(tmp_path / "whole"), weights_of(tmp_path / "out")
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_rates_are_those_of_the_schedulers_of_torch() -> None:
    for schedule, lr, ratio in (("cosine", 0.3, 0.1), ("linear", 0.3, 0.25)):
        optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
        scheduler: Any = (
            CosineAnnealingLR(optimiser, 16, eta_min=lr * ratio)
            if schedule == "cosine"
            else LinearLR(optimiser, 1.0, ratio, total_iters=16)
        )
        chosen = TrainOptions(lr=lr, min_lr_ratio=ratio, schedule=schedule, warmup_steps=3)
        for step in range(3, 20):
            assert math.isclose(learning_rate(chosen, step, 20), scheduler.get_last_lr()[0], rel_tol=1e-12)
            optimiser.step()
            scheduler.step()


def test_a_constant_rate_stays_and_wsd_decays_in_the_last_tenth() -> None:
    constant = TrainOptions(lr=0.5, schedule="constant", warmup_steps=1)
    assert [learning_rate(constant, step, 4) for step in range(4)] == [0.5] * 4
    wsd = TrainOptions(lr=1.0, schedule="wsd", min_lr_ratio=0.0)
    rates = [learning_rate(wsd, step, 101) for step in range(101)]
    assert rates[:91] == pytest.approx([1.0] * 91)
    assert rates[91:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_what_an_optimizer_cannot_do_is_refused(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(TrainOptions, optimizer="muon", offload_optimizer=True) == (
        "offload_optimizer moves the moments of AdamW; use optimizer adamw, or omit it"
    )
    assert refusal(check_optimizer, TrainOptions(optimizer="adamw8bit"), 2) == (
        "--optimizer adamw8bit needs whole weights on one rank; on several use adamw"
    )
    mixture = tmp_path / "mixture.json"
    family_config("qwen3_moe").to_json_file(mixture)
    run = open_run(packed, mixture, options(optimizer="muon"))
    assert refusal(make_optimiser, run).endswith("has the experts of a layer in one tensor; use adamw")
    monkeypatch.setattr("treepack.train.optimiser.find_spec", lambda _: None)
    assert refusal(check_optimizer, TrainOptions(optimizer="adamw8bit"), 1).startswith(
        "--optimizer adamw8bit needs bitsandbytes; run pip install"
    )


def test_a_run_of_another_optimizer_cannot_be_resumed(packed: Path, config: Path, tmp_path: Path) -> None:
    steps = train(open_run(packed, config, options(optimizer="sgd")), tmp_path / "out")
    next(steps), next(steps), next(steps)
    steps.close()  # type: ignore[attr-defined]
    again = open_run(packed, config, options())
    assert "optimizer" in refusal(lambda: list(train(again, tmp_path / "out", resume=True)))


def test_a_state_that_does_not_fit_leaves_no_part_of_it(
    packed: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(packed, config, options(optimizer="adamw8bit"))
    optimiser, parameters = make_optimiser(run), list(run.loaded.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(optimiser), "get_state_buffer", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            prepare_states(optimiser)
    assert not any(optimiser.state.get(parameter) for parameter in parameters)
    prepare_states(optimiser)
    optimiser.step()
    assert all("state2" in optimiser.state[parameter] for parameter in parameters)
