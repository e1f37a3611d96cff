"""Objectives at one or several temperatures of the sampler equal objectives of trajectories run alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.oracle_model import gradients, worst_error, write_rows
from support.oracle_objectives import Rollout, step_loss
from support.packed_objectives import as_trajectories, opened, packed_model, plain, rollouts
from support.refusal import refusal
from treepack.data.dataset import PackedDataset
from treepack.data.mixture import MixedDataset
from treepack.errors import TreepackError
from treepack.files.manifest import Provenance
from treepack.model.forward import WholeRows
from treepack.model.verify.gradients import verify_gradients
from treepack.objectives.denominators import check_columns, step_factors, trajectory_table
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_numbers import LossPart
from treepack.objectives.temperature import check_scored_columns, temperature_of_terms

TOLERANCE = 1e-9
T = float(np.float32(0.7))
CASES: list[dict[str, Any]] = [
    {"name": "grpo", "kl": 0.3, "entropy": 0.2},
    {"name": "ppo", "dual_clip": 1.3, "entropy": 0.1},
    {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04, "kl": 0.2},
    {"name": "cispo", "clip_low": 0.3, "kl": 0.1, "kl_estimator": "k2", "importance_cap": 1.1},
]
# Temperature of token j of trajectory i.
SETTINGS: dict[str, Callable[[int, int], float]] = {
    "one": lambda i, j: T,
    "by trajectory": lambda i, j: (T, 1.0, 1.5)[i % 3],
    "by token": lambda i, j: (T, 1.0, 1.5)[(i + j // 2) % 3],
}


def with_temperatures(samples: Sequence[Rollout], setting: Callable[[int, int], float]) -> list[Rollout]:
    return [replace(r, temperatures=[setting(i, j) for j in range(len(r.tokens))]) for i, r in enumerate(samples)]


def without_temperatures(samples: Sequence[Rollout]) -> list[Rollout]:
    return [replace(r, temperatures=None) for r in samples]


def step_of(dataset: PackedDataset, objective: Objective) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one optimiser step over all rows."""
    check_columns(dataset, objective)
    every, loaded = list(range(len(dataset))), packed_model("qwen3")
    loaded.model.zero_grad()
    total = 0.0
    for row, factors in zip(every, step_factors(trajectory_table(dataset, objective), every, objective), strict=True):
        part = LossPart(objective, torch.from_numpy(factors))
        total += WholeRows(loaded, chunk=5).backward(dataset[row], part).loss.item()
    return total, gradients(loaded.model)


def expected_of(samples: Sequence[Rollout], objective: Objective) -> tuple[float, dict[str, Tensor]]:
    model = plain("qwen3")
    model.zero_grad()
    loss = step_loss(model, samples, objective)
    torch.autograd.backward(loss)
    return loss.item(), gradients(model)


def assert_step(dataset: PackedDataset, objective: Objective, samples: Sequence[Rollout]) -> None:
    (total, grads), (loss, expected) = step_of(dataset, objective), expected_of(samples, objective)
    assert total == pytest.approx(loss, rel=TOLERANCE)
    assert worst_error(grads, expected) <= TOLERANCE


@pytest.mark.parametrize("setting", ["one", "by token"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_gradients_are_those_of_trajectories_alone(tmp_path: Path, case: dict[str, Any], setting: str) -> None:
    samples = with_temperatures(rollouts(), SETTINGS[setting])
    for name, rows in (("one", [0] * 10), ("mixed", [0, 0, 1, 1, 1, 2, 2, 2, 3, 3])):
        dataset = opened(tmp_path / name, samples, rows)
        assert_step(dataset, choose_objective(**case), samples)
    terms = opened(tmp_path / "again", samples, [0] * 10)[0].terms
    assert terms is not None
    # With several temperatures some tokens are scored at two of them.
    assert (len(set(terms.tokens.tolist())) < len(terms.tokens)) == (setting != "one")


def test_the_option_stands_for_temperatures_that_the_data_lacks(tmp_path: Path) -> None:
    objective = choose_objective("grpo", temperature=T, entropy=0.1)
    samples = with_temperatures(rollouts(), SETTINGS["one"])
    assert_step(opened(tmp_path / "none", without_temperatures(samples), [0] * 10), objective, samples)
    some = [replace(r, temperatures=[nan if i % 2 else T] * len(r.tokens)) for i, r in enumerate(samples)]
    assert_step(opened(tmp_path / "some", some, [0] * 10), objective, samples)


def test_dpo_and_sft_ignore_the_temperatures_of_the_data(tmp_path: Path) -> None:
    samples = with_temperatures(rollouts(), SETTINGS["by trajectory"])
    dataset = opened(tmp_path / "packed", samples, [0] * 10)
    assert_step(dataset, choose_objective("dpo"), without_temperatures(samples))
    for name in ("sft", "dpo"):
        assert f"temperature is not an option of the loss {name}" in refusal(choose_objective, name, temperature=T)
        check_columns(dataset, choose_objective(name))


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "dpo"])
def test_verification_covers_temperatures(tmp_path: Path, name: str) -> None:
    some = [replace(r, temperatures=[nan] * len(r.tokens)) if i % 4 == 0 else r for i, r in enumerate(rollouts())]
    samples = [
        r if r.temperatures else replace(r, temperatures=[(T, 1.5)[i % 2]] * len(r.tokens)) for i, r in enumerate(some)
    ]
    objective = choose_objective(name) if name == "dpo" else choose_objective(name, temperature=1.5)
    dataset = opened(tmp_path / "packed", samples, [0] * 10)
    (factors,) = step_factors(trajectory_table(dataset, objective), [0], objective)
    arguments: dict[str, Any] = {"objective": objective, "factors": [torch.from_numpy(factors)]}
    batch = dataset[0]
    assert batch.terms is not None
    report = verify_gradients(packed_model("qwen3"), [batch], **arguments)
    assert report.passed
    assert report.worst[1] < 1e-10


REFUSED: list[tuple[Callable[[int, int], float], float | None, str]] = [
    (lambda i, j: T, 1.0, r"temperature is 1, but the data has 0\.7; omit --temperature"),
    (lambda i, j: (T, 1.0)[i % 2], T, r"temperature is 0\.7, but the data has 1; omit"),
    (lambda i, j: (T, nan)[i % 2], None, r"terms have no temperature and others have one; give the sampler's"),
    (lambda i, j: (0.0, 1.0)[i % 2], None, "sampled at the temperature 0, but ratios need the prob"),
]


@pytest.mark.parametrize(("setting", "option", "message"), REFUSED)
def test_contradictions_are_refused(
    tmp_path: Path, setting: Callable[[int, int], float], option: float | None, message: str
) -> None:
    dataset = opened(tmp_path / "packed", with_temperatures(rollouts(), setting), [0] * 10)
    with pytest.raises(TreepackError, match=message):
        check_columns(dataset, choose_objective("grpo", temperature=option))


def test_a_directory_without_temperatures_beside_one_with_them_is_a_gap(tmp_path: Path) -> None:
    samples = with_temperatures(rollouts(), SETTINGS["one"])
    without = opened(tmp_path / "without", without_temperatures(samples), [0] * 10)
    both = MixedDataset([opened(tmp_path / "with", samples, [0] * 10), without])
    assert "without: has no temperatures and other rows have them" in refusal(
        check_columns, both, choose_objective("grpo")
    )
    check_columns(both, choose_objective("grpo", temperature=T))


@pytest.mark.parametrize("value", [0.0, -1.0, nan, float("inf")])
def test_a_temperature_is_positive(value: float) -> None:
    assert "expected a finite number above 0, because ratios need the prob" in refusal(
        choose_objective, "grpo", temperature=value
    )


NAMES: list[tuple[Callable[[int, int], float] | None, float | None, float | str]] = [
    (None, None, 1.0),
    (None, 0.7, 0.7),
    (lambda i, j: T, None, 0.7),
    (lambda i, j: (T, nan)[i % 2], 0.7, 0.7),
    (lambda i, j: (T, 1.0)[i % 2], None, "data"),
    (lambda i, j: (T, 1.5, nan)[i % 3], 0.8, "data, 0.8 where missing"),
]


@pytest.mark.parametrize(("setting", "option", "expected"), NAMES)
def test_equal_temperatures_have_equal_names(
    tmp_path: Path, setting: Callable[[int, int], float] | None, option: float | None, expected: float | str
) -> None:
    samples = list(rollouts()) if setting is None else with_temperatures(rollouts(), setting)
    assert temperature_of_terms(opened(tmp_path / "packed", samples, [0] * 10), option) == expected


SCORED: list[tuple[dict[str, Any], dict[str, float | str], str | None]] = [
    ({"name": "grpo"}, {"old": 0.7, "ref": 1.0}, None),  # without kl nothing reads the reference
    ({"name": "grpo"}, {}, r"term_old_logprob was computed at the temperature 1, and the loss grpo computes at 0\.7"),
    ({"name": "grpo", "kl": 0.1}, {"old": 0.7, "ref": 1.0}, "term_ref_logprob was computed at the temperature 1"),
    ({"name": "grpo", "kl": 0.1}, {"old": 0.7, "ref": 0.7}, None),
    ({"name": "grpo"}, {"old": "data"}, "at the temperature of the data"),
    ({"name": "dpo"}, {"ref": 0.7}, r"temperature 0\.7, and the loss dpo computes at 1; .* --ignore-temperature"),
    ({"name": "dpo"}, {"old": 0.7}, None),
    ({"name": "opd"}, {"old": 0.7, "teacher": 1.0}, r"term_teacher_logprob was computed at the temperature 1"),
    ({"name": "opd", "teacher": "m"}, {"old": 0.7, "teacher": 1.0}, None),  # computed during training
    ({"name": "distill"}, {"old": 0.7, "teacher": 0.7}, None),
]


@pytest.mark.parametrize(("case", "recorded", "message"), SCORED)
def test_columns_computed_at_another_temperature_are_refused(
    tmp_path: Path, case: dict[str, Any], recorded: dict[str, float | str], message: str | None
) -> None:
    samples = with_temperatures(rollouts(), SETTINGS["one"])
    path = write_rows(tmp_path / "packed", as_trajectories(samples), [0] * 10)
    dataset = PackedDataset(path, terms=True)
    entries = {name: {"model": "m"} for name in ("old", "ref", "teacher") if name != "teacher" or name in recorded}
    dataset.manifest["logprobs"] = {
        name: entry | ({"temperature": recorded[name]} if recorded.get(name, 1.0) != 1 else {})
        for name, entry in entries.items()
    }
    assert Provenance.of(dataset.manifest).logprobs == dataset.manifest["logprobs"]
    if message is None:
        check_scored_columns(dataset, choose_objective(**case))
    else:
        with pytest.raises(TreepackError, match=message):
            check_scored_columns(dataset, choose_objective(**case))


def test_columns_of_several_models_are_refused_if_one_differs(tmp_path: Path) -> None:
    samples = with_temperatures(rollouts(), SETTINGS["one"])
    dataset = PackedDataset(write_rows(tmp_path / "packed", as_trajectories(samples), [0] * 10), terms=True)
    second: dict[str, Any] = {"model": "m", "temperature": 0.7, "groups": "a"}
    for others in (None, {"model": "n", "temperature": 0.7}):
        dataset.manifest["logprobs"] = {"teacher": {**second, "others": others}}
        check_scored_columns(dataset, choose_objective("opd"))
    dataset.manifest["logprobs"] = {"teacher": {**second, "others": {"model": "n"}}}
    assert "term_teacher_logprob was computed at the temperature 1" in refusal(
        check_scored_columns, dataset, choose_objective("opd")
    )


@pytest.mark.parametrize(
    ("name", "kept_sets", "message"),
    [
        ("grpo", True, None),
        ("grpo", False, "over the whole vocabulary, and the loss grpo computes over kept sets; .* without --ignore"),
        ("dpo", False, None),
        ("distill", False, None),
        ("opd", False, "term_teacher_logprob was computed over the whole vocabulary"),
        ("dpo", True, "over kept sets, and the loss dpo computes over the whole vocabulary; .* with --ignore"),
    ],
)
def test_columns_over_other_words_are_refused(tmp_path: Path, name: str, kept_sets: bool, message: str | None) -> None:
    samples = [replace(each, kept=[[token] for token in each.tokens]) for each in rollouts()]
    dataset = PackedDataset(write_rows(tmp_path / "packed", as_trajectories(samples), [0] * 10), terms=True)
    entry: dict[str, Any] = {"model": "m", **({"kept_sets": True} if kept_sets else {})}
    dataset.manifest["logprobs"] = dict.fromkeys(
        ("ref", "teacher") if name in ("distill", "opd") else ("old", "ref"), entry
    )
    if message is None:
        check_scored_columns(dataset, choose_objective(name))
    else:
        with pytest.raises(TreepackError, match=message):
            check_scored_columns(dataset, choose_objective(name))
