"""The trainer: one global mean per step, every row once per epoch, whole files; and the verification of gradients."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoModelForCausalLM

from support import interpreter  # noqa: F401
from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from treepack.errors import TreepackError
from treepack.files.manifest_entries import TokenizerEntry
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.ranks import find_device
from treepack.train.run import TrainingRun
from treepack.train.schedule import learning_rate, plan_steps
from treepack.train.setup.opening import open_run, open_verification
from treepack.trajectory import Tokens, Trajectory

CPU = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, checkpoint_every=0)


def rollouts(count: int = 9, *, num_steps: int | None = None) -> list[Trajectory]:
    """Return trajectories of 18 tokens, in groups of three that share a prompt of 9 tokens."""
    generator = np.random.default_rng(0)
    trajectories = []
    for i in range(count):
        prompt = [i // 3, *range(10, 18)]
        tokens = [*prompt, 5, *generator.integers(20, 24, 8).tolist()]  # 4 different tokens: answers share prefixes too
        step = None if num_steps is None else i * num_steps // count
        trajectories.append(make(f"t{i}", tokens, spans=[(len(prompt), len(tokens), 1.0 + i % 2)], step=step))
    return trajectories


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", rollouts(), capacity=40)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json")


def test_training_learns_and_the_model_loads_without_treepack(packed: Path, config: Path, tmp_path: Path) -> None:
    run = open_run(packed, config, replace(CPU, epochs=8))
    metrics = list(train(run, tmp_path / "out"))
    assert len(metrics) == len(run.schedule) == 8 * -(-len(run.dataset) // 2)
    assert metrics[-1].loss < 0.7 * metrics[0].loss
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in run.loaded.model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], weight)
    assert "treepack" not in (tmp_path / "out" / "config.json").read_text()
    assert saved.config._attn_implementation == "sdpa"
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [m.loss for m in metrics]
    assert sum(line["tokens_flat"] for line in lines) == 8 * 9 * 18  # epochs, trajectories, tokens
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert (record["options"]["lr"], record["num_steps"]) == (CPU.lr, len(metrics))


@torch.no_grad()
def loss_alone(model: Any, trajectories: list[Trajectory]) -> float:
    """Return the weighted mean of nll over all trained tokens, computed for one trajectory at a time."""
    total, weight = 0.0, 0.0
    for trajectory in trajectories:
        content = trajectory.content
        assert isinstance(content, Tokens)
        ids = torch.tensor(content.tokens, dtype=torch.int64)
        nll = cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")
        for start, end, span_weight in zip(content.starts, content.ends, content.span_weights, strict=True):
            total += span_weight * float(nll[start - 1 : end - 1].sum())  # nll[0] belongs to token 1
            weight += span_weight * (end - start)
    return total / weight


@pytest.mark.parametrize("rows_per_step", [1, 2, 100])
def test_the_loss_of_a_step_is_one_mean_over_all_its_tokens(packed: Path, config: Path, rows_per_step: int) -> None:
    run = open_run(packed, config, replace(CPU, rows_per_step=rows_per_step, lr=0.0))  # weights stay for the oracle
    by_id = {t.trajectory_id: t for t in rollouts()}
    plain = AutoModelForCausalLM.from_config(deepcopy(run.loaded.model.config), attn_implementation="sdpa")
    plain.load_state_dict(run.loaded.model.state_dict())
    for metrics, step in zip(train(run, packed.parent / "out"), run.schedule, strict=True):
        members = [by_id[name] for row in step.rows for name in run.dataset[row].trajectory_ids]
        assert metrics.loss == pytest.approx(loss_alone(plain, members), rel=1e-5)
        assert metrics.tokens < metrics.tokens_flat == 18 * len(members)


@pytest.mark.parametrize("attention", ["reference", "flex"])
def test_bf16_computes_under_autocast_on_float32_weights(
    packed: Path, config: Path, tmp_path: Path, attention: str
) -> None:
    expected = list(train(open_run(packed, config, replace(CPU, steps=2)), tmp_path / "a"))
    run = open_run(packed, config, replace(CPU, steps=2, dtype="bf16", attention=attention))
    metrics = list(train(run, tmp_path / "b"))
    assert all(parameter.dtype == torch.float32 for parameter in run.loaded.model.parameters())
    for step, reference in zip(metrics, expected, strict=True):
        assert step.loss != reference.loss  # otherwise autocast was not in effect
        assert step.loss == pytest.approx(reference.loss, rel=2e-2)


def test_every_epoch_takes_every_row_once_in_another_order(packed: Path, config: Path) -> None:
    run = open_run(packed, config, replace(CPU, epochs=3))
    epochs = [[row for step in run.schedule if step.epoch == e for row in step.rows] for e in range(3)]
    assert all(sorted(rows) == list(range(len(run.dataset))) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) > 1
    assert plan_steps(run.dataset, run.options) == run.schedule
    assert plan_steps(run.dataset, replace(run.options, seed=1)) != run.schedule
    longer = plan_steps(run.dataset, replace(run.options, steps=50))  # --steps overrides --epochs
    assert len(longer) == 50
    assert longer[: len(run.schedule)] == run.schedule


def test_training_steps_keep_their_order_and_never_mix(tmp_path: Path, config: Path) -> None:
    path = packed_directory(tmp_path / "packed", rollouts(12, num_steps=4), capacity=20)
    run = open_run(path, config, replace(CPU, rows_per_step=2))
    seen = [{run.dataset.steps[row] for row in step.rows} for step in run.schedule]
    assert all(len(steps) == 1 for steps in seen)
    order = [next(iter(steps)) for steps in seen]
    assert order == sorted(order, key=lambda step: -1 if step is None else step)
    assert len(set(order)) == 4


def test_rows_without_trained_tokens_are_left_out_and_counted(tmp_path: Path, config: Path) -> None:
    idle = make("idle", [40, 41, 42], spans=[])
    path = packed_directory(tmp_path / "packed", [*rollouts(3), idle], capacity=18)
    run = open_run(path, config, CPU)
    empty = set(np.flatnonzero(run.dataset.total_weight == 0).tolist())
    assert len(empty) == 1
    assert empty.isdisjoint(row for step in run.schedule for row in step.rows)
    assert any(note.startswith("1 rows without trained tokens") for note in run.notes)
    with pytest.raises(TreepackError, match="nothing to train on"):
        open_run(packed_directory(tmp_path / "empty", [idle], capacity=30), config, CPU)


def test_the_learning_rate_warms_up_and_ends_at_its_minimum() -> None:
    options = TrainOptions(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(options, step, 20) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def poison_run(packed: Path, config: Path, **changes: Any) -> tuple[TrainingRun, set[int]]:
    """Return a run whose loss is NaN for rows that contain the token 2, and the indices of these rows."""
    run = open_run(packed, config, replace(CPU, **changes))
    with torch.no_grad():
        run.loaded.model.get_input_embeddings().weight[2] = torch.nan
    return run, {i for i in range(len(run.dataset)) if 2 in run.dataset[i].input_ids}


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    # With tied weights the NaN of token 2 would be in the output layer too, and so in the logits of every row.
    return tiny_config(tmp_path / "untied.json", tie_word_embeddings=False)


def test_a_step_whose_loss_is_not_finite_is_skipped_with_its_rows(packed: Path, untied: Path, tmp_path: Path) -> None:
    run, bad = poison_run(packed, untied, rows_per_step=1, epochs=2)
    assert 0 < len(bad) < len(run.dataset)
    head = run.loaded.model.get_output_embeddings().weight
    before = head.detach().clone()
    for metrics, step in zip(train(run, tmp_path / "out"), run.schedule, strict=True):
        assert torch.equal(before, head) is (step.rows[0] in bad)
        assert metrics.skipped_rows == [int(run.dataset.row_ids[row]) for row in step.rows if row in bad]
        assert math.isnan(metrics.loss) is math.isnan(metrics.grad_norm) is bool(metrics.skipped_rows)
        before = head.detach().clone()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["loss"] is None for line in lines) == 2 * len(bad)


def test_a_gradient_that_is_not_finite_skips_the_step_with_all_its_rows(
    packed: Path, config: Path, tmp_path: Path
) -> None:
    run = open_run(packed, config, replace(CPU, rows_per_step=100, steps=1))
    run.loaded.model.base_model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    (metrics,) = train(run, tmp_path / "out")
    assert math.isfinite(metrics.loss)
    assert sorted(metrics.skipped_rows) == sorted(run.dataset.row_ids.tolist())


def test_too_many_skipped_steps_in_a_row_end_the_run_and_name_the_rows(
    packed: Path, untied: Path, tmp_path: Path
) -> None:
    # One pass of all rows: a value that is not finite spreads over it.
    run, bad = poison_run(packed, untied, rows_per_step=100, epochs=5, max_skipped=2, pass_tokens=4096)
    seen: list[int] = []
    with pytest.raises(TreepackError, match="loss or gradient of 3 steps in a row was not finite") as caught:
        seen.extend(metrics.step for metrics in train(run, tmp_path / "out"))
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3
    # ..., the last in rows 0, 2; inspect these rows, ...
    named = str(caught.value).split("in rows ")[1].split(";")[0]
    assert set(named.split(", ")) == {str(run.dataset.row_ids[row]) for row in bad}


def test_out_of_memory_names_the_row_and_a_remedy(packed: Path, config: Path, tmp_path: Path) -> None:
    run = open_run(packed, config, replace(CPU, pass_tokens=1))

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    run.loaded.model.base_model.layers[1].register_forward_hook(fails)
    # The row with most tokens is computed first, so it is the row of the error.
    row = max(run.schedule[0].rows, key=lambda row: int(run.dataset.num_tokens[row]))
    place = f"out of memory in row {run.dataset.row_ids[row]} of {run.dataset.num_tokens[row]} tokens"
    expected = rf"{place} with the smallest plan \(.*\), and [\d.]+ GiB are free; pack with a smaller --capacity"
    with pytest.raises(TreepackError, match=expected):
        list(train(run, tmp_path / "out"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_a_model_that_does_not_fit_is_one_sentence(
    packed: Path, config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    handle = register_module_module_registration_hook(fails)  # the model is built of modules
    try:
        with pytest.raises(
            TreepackError, match=r"^out of memory while the model was loaded, and [\d.]+ GiB are free; free the memory"
        ):
            open_run(packed, config, CPU)
    finally:
        handle.remove()


def test_an_existing_output_is_replaced_only_when_asked(packed: Path, config: Path, tmp_path: Path) -> None:
    def steps(*, overwrite: bool = False) -> list[int]:
        run = open_run(packed, config, replace(CPU, steps=2))
        return [metrics.step for metrics in train(run, tmp_path / "out", overwrite=overwrite)]

    assert steps() == [1, 2]
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    with pytest.raises(TreepackError, match="exists"):
        steps()
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before
    assert steps(overwrite=True) == [1, 2]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 0},
        {"rows_per_step": 0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"dtype": "fp8"},
        {"attention": "x"},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": "x"},
        {"mix": "0.5,0.5"},
        {"mix": (1, "2")},
        {"keep": 0},
        {"checkpoint_every": -1},
        {"max_skipped": -1},
        {"gather_dtype": "fp8"},
        {"carry": 0},
        {"carry": "all"},
    ],
)
def test_options_without_meaning_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(TreepackError, match=f"^{next(iter(fields))} is "):
        TrainOptions(**fields)


@pytest.mark.parametrize(
    ("fields", "made"), [({"objective": "grpo"}, "choose_objective"), ({"lora": 8}, "LoraOptions")]
)
def test_options_of_a_wrong_type_name_what_makes_them(fields: dict[str, Any], made: str) -> None:
    with pytest.raises(TreepackError, match=rf"^TrainOptions: {next(iter(fields))} has the type .*; use {made}\("):
        TrainOptions(**fields)


def test_ids_beyond_the_vocabulary_are_refused_before_training(tmp_path: Path, config: Path) -> None:
    path = packed_directory(tmp_path / "packed", [make("t", [1, 50])], capacity=30)
    with pytest.raises(TreepackError, match="the token id 50 and the vocabulary ends at 49"):
        open_run(path, config, CPU)


@pytest.mark.parametrize("attention", ["reference", "flex"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_neox", "gpt2"])
def test_verification_passes_in_float64_without_help(packed: Path, tmp_path: Path, kind: str, attention: str) -> None:
    run = open_verification(packed, tiny_config(tmp_path / f"{kind}.json", kind), replace(CPU, attention=attention))
    report = verify_gradients(run.loaded, list(run.dataset))
    assert report.passed
    assert (report.dtype, report.attention, report.num_trajectories) == ("float64", attention, 9)
    assert set(report.errors) == {name for name, _ in run.loaded.model.named_parameters()}
    assert report.worst[1] < 1e-12  # float64's rounding is 1e-16
    assert run.loaded.model.config._attn_implementation == f"treepack_{attention}"
    assert all(parameter.grad is None for parameter in run.loaded.model.parameters())


def test_verification_of_the_kernel_is_in_float32(packed: Path, config: Path) -> None:
    run = open_verification(packed, config, replace(CPU, attention="triton"))
    report = verify_gradients(run.loaded, [run.dataset[0]])
    assert (report.passed, report.dtype, report.attention) == (True, "float32", "triton")


@pytest.mark.parametrize("name", ["foo", "mps", "meta", "xla", "", "cpu:1", "cuda:", "cuda:9999"])
def test_devices_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(TreepackError, match=f"^device is '{name}'.* expected"):
        find_device(name)


def test_a_missing_tokenizer_is_a_note_and_about_tokenizers(tmp_path: Path, config: Path) -> None:
    made_by: TokenizerEntry = {"name": str(tmp_path / "gone"), "vocab_size": 2, "sha256": "0"}
    path = packed_directory(tmp_path / "packed", rollouts(3), capacity=40, tokenizer=made_by)
    run = open_run(path, config, CPU)
    assert run.files.keys() == {"config.json"}
    assert any(note.startswith("no tokenizer is saved with the model") for note in run.notes)
    assert not any("attention" in note for note in run.notes)


def test_verification_fails_on_a_wrong_mask(packed: Path, config: Path) -> None:
    run = open_verification(packed, config, CPU)
    rows = list(run.dataset)
    # Every token sees all tokens before it, also on other branches.
    wrong = [replace(row, subtree_end=torch.full_like(row.subtree_end, len(row.subtree_end))) for row in rows]
    assert not verify_gradients(run.loaded, wrong).passed


def test_verification_asks_for_precision_and_for_weight(packed: Path, config: Path) -> None:
    run = open_verification(packed, config, CPU)
    half = LoadedModel(run.loaded.model.bfloat16(), "m", "reference", ())
    with pytest.raises(TreepackError, match="float64 or float32"):
        verify_gradients(half, list(run.dataset))
    with pytest.raises(TreepackError, match="no row has loss weight"):
        verify_gradients(LoadedModel(run.loaded.model.double(), "m", "reference", ()), [])
