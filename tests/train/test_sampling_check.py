"""Before the first step, `treepack train` says if the sampler's log-probabilities are of another distribution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.command_line import Run as Command
from support.oracle_model import VOCABULARY, tiny_model, write_rows
from support.rank_processes import Case, train_over
from support.strategies import make
from treepack.objectives.objective import choose_objective
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.sampling_check import compare_sampling, measure_gap
from treepack.train.setup.opening import open_run

LENGTH, COUNT = 24, 16
# Changes logits [COUNT, V] of the sampled position into the recorded log-probabilities [COUNT, V].
Record = Callable[[Tensor], Tensor]


def at(temperature: float) -> Record:
    return lambda logits: (logits / temperature).log_softmax(-1)


def nucleus(mass: float) -> Record:
    """Log-probabilities after top-p: of the most probable tokens that have `mass` together, renormalised."""

    def record(logits: Tensor) -> Tensor:
        probabilities, order = logits.softmax(-1).sort(-1, descending=True)
        outside = probabilities.cumsum(-1) - probabilities >= mass
        return logits.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)

    return record


@functools.cache
def peaked() -> Any:
    """A model as peaked as a trained one, with an entropy of about 1 nat: 16 times the logits of `tiny_model`."""
    model = tiny_model("qwen3", dtype=torch.float32).eval()
    model.lm_head.weight.data *= 16
    return model


@torch.no_grad()
def sample(draw: Record, record: Record) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sample rollouts from `draw` and return tokens and recorded log-probabilities, [COUNT, LENGTH] each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.full((COUNT, 1), 7)
    recorded = torch.zeros(COUNT, 1)
    for _ in range(LENGTH - 1):
        logits = peaked()(tokens, use_cache=False).logits[:, -1].float()
        new = torch.multinomial(draw(logits).exp(), 1, generator=generator)
        recorded = torch.cat([recorded, record(logits).gather(-1, new)], 1)
        tokens = torch.cat([tokens, new], 1)
    return tokens.numpy(), recorded.numpy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peaked")
    peaked().save_pretrained(path)
    return path


def packed_rollouts(
    path: Path, tokens: Any, recorded: Any, *, temperature: float | None = None, known: bool = True
) -> Path:
    trajectories = [
        make(
            f"t{i}",
            tokens[i].tolist(),
            sampling_logprobs=recorded[i, 1:].astype(np.float32) if known else np.full(LENGTH - 1, np.nan, np.float32),
            advantages=np.ones(LENGTH - 1),
            temperature=temperature,
        )
        for i in range(COUNT)
    ]
    return write_rows(path, trajectories, [i // 8 for i in range(COUNT)])


def opened(packed: Path, model: Path, **options: Any) -> TrainingRun:
    objective = choose_objective("grpo", **options)
    return open_run(packed, model, TrainOptions(device="cpu", dtype="fp32", objective=objective))


def sentence(run: TrainingRun) -> str:
    found = compare_sampling(run)
    assert found is not None
    return found


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_right_temperature_has_no_remark(tmp_path: Path, model: Path, temperature: float) -> None:
    tokens, recorded = sample(at(temperature), at(temperature))
    with_column = packed_rollouts(tmp_path / "column", tokens, recorded, temperature=temperature)
    without = packed_rollouts(tmp_path / "option", tokens, recorded)
    for run in (opened(with_column, model), opened(without, model, temperature=temperature)):
        assert compare_sampling(run) is None
        found = measure_gap(run)
        assert found is not None
        assert found.num_terms == 8 * (LENGTH - 1)
        assert found.gap < 1e-5
        # The rounding of a sampler in low precision does not cause a remark either.
    noise = np.random.default_rng(0).normal(0, 0.02, recorded.shape)
    noisy = packed_rollouts(tmp_path / "noisy", tokens, recorded + noise, temperature=temperature)
    assert compare_sampling(opened(noisy, model)) is None


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_missing_temperature_is_named(tmp_path: Path, model: Path, temperature: float, noise: float) -> None:
    tokens, recorded = sample(at(temperature), at(temperature))
    recorded = recorded + np.random.default_rng(0).normal(0, noise, recorded.shape)
    run = opened(packed_rollouts(tmp_path / "packed", tokens, recorded), model)
    assert f"train with --temperature {temperature:g}" in sentence(run)


def test_the_check_runs_again_with_a_smaller_plan_if_memory_runs_out(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(at(0.7), at(0.7))
    run, calls = opened(packed_rollouts(tmp_path / "packed", tokens, recorded), model), []

    def fails_once(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError

    hook = run.loaded.causal.base_model.register_forward_hook(fails_once)
    found = sentence(run)
    hook.remove()
    assert len(calls) == 2
    assert found == sentence(run)


def test_values_recorded_before_the_temperature_are_named(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(at(0.7), at(1.0))
    found = sentence(opened(packed_rollouts(tmp_path / "column", tokens, recorded, temperature=0.7), model))
    assert "at the temperatures of the data), but by 0.000 at the temperature 1: they were recorded before" in found
    found = sentence(opened(packed_rollouts(tmp_path / "option", tokens, recorded), model, temperature=0.7))
    assert "if --temperature 0.7 is right, they were recorded before" in found


def test_wrong_temperatures_of_the_data_are_named(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(at(0.7), at(0.7))
    found = sentence(opened(packed_rollouts(tmp_path / "packed", tokens, recorded, temperature=1.5), model))
    assert "at the temperature 0.7: the temperatures of the data are not the sampler's" in found


def test_truncated_distributions_are_named(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(nucleus(0.8), nucleus(0.8))
    assert "as after top-p, top-k or min-p" in sentence(
        opened(packed_rollouts(tmp_path / "p", tokens, recorded), model)
    )


@pytest.mark.parametrize("step", [-1, 1])
def test_values_shifted_by_one_token_are_named(tmp_path: Path, model: Path, step: int) -> None:
    tokens, recorded = sample(at(1.0), at(1.0))
    moved = recorded[:, 1:]
    moved = np.concatenate([recorded[:, :1], np.roll(moved, step, axis=1)], axis=1)
    found = sentence(opened(packed_rollouts(tmp_path / "packed", tokens, moved), model))
    assert "if they are moved by one token" in found


def test_another_policy_is_named(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(at(1.0), at(1.0))
    other = np.random.default_rng(0).permutation(VOCABULARY)[tokens]  # as if another tokenizer had made the ids
    found = sentence(opened(packed_rollouts(tmp_path / "packed", other, recorded), model))
    assert "they come from a different policy, or the tokenizer or chat template" in found


def test_a_policy_some_updates_ahead_has_no_remark(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(at(1.0), at(1.0))
    packed = packed_rollouts(tmp_path / "packed", tokens, recorded)
    later = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in later.parameters():
            parameter += 0.01 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    later.save_pretrained(tmp_path / "later")
    run = opened(packed, tmp_path / "later")
    found = measure_gap(run)
    assert found is not None
    assert 0.02 < found.gap < 0.3
    assert compare_sampling(run) is None


def test_losses_without_a_sampler_and_data_without_values_are_not_compared(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(at(0.7), at(0.7))
    packed = packed_rollouts(tmp_path / "packed", tokens, recorded)
    assert compare_sampling(open_run(packed, model, TrainOptions(device="cpu", dtype="fp32"))) is None
    unknown = packed_rollouts(tmp_path / "unknown", tokens, recorded, known=False)
    assert compare_sampling(opened(unknown, model)) is None


def test_training_notes_it_once_and_the_steps_stay_the_same(
    treepack: Command, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, recorded = sample(at(0.7), at(0.7))
    packed = packed_rollouts(tmp_path / "packed", tokens, recorded)
    notes: list[str] = []
    with_check = list(train(opened(packed, model), tmp_path / "library", note=notes.append))
    assert [note for note in notes if "train with --temperature 0.7" in note] == notes
    monkeypatch.setattr("treepack.train.loop.compare_sampling", lambda run: None)
    without = list(train(opened(packed, model), tmp_path / "without"))
    assert [each.loss for each in with_check] == [each.loss for each in without]
    monkeypatch.undo()
    common = ("train", packed, "--model", model, "--device", "cpu", "--loss", "grpo", "--dtype", "fp32")
    done = treepack(*common, "--out", tmp_path / "command")
    assert done.status == 0
    assert done.err.count("train with --temperature 0.7") == 1
    done = treepack(*common, "--temperature", 0.7, "--out", tmp_path / "right")
    assert (done.status, "nats per token" in done.err) == (0, False)


@pytest.mark.slow
def test_three_ranks_with_two_rows_make_the_remark_of_one(tmp_path: Path, model: Path) -> None:
    tokens, recorded = sample(at(0.7), at(0.7))
    packed = packed_rollouts(tmp_path / "packed", tokens, recorded)
    cases = [Case("grpo", packed, model, {}, "grpo"), Case("compiled", packed, model, {"compile": True}, "grpo")]
    results, expected = train_over(3, tmp_path, cases), train_over(0, tmp_path, cases[:1])["grpo"]
    # One process compares one row, three compare both rows and a row of padding.
    for rows, each in [(8, expected), *((16, result) for result in results.values())]:
        (remark,) = each["remarks"]
        assert "train with --temperature 0.7" in remark
        assert f"{rows * (LENGTH - 1)} tokens" in remark
        assert each["records"][0]["loss"] == pytest.approx(expected["records"][0]["loss"], rel=1e-5)
