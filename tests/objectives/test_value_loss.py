"""The value loss over packed rows equals that of trajectories run alone, with and without a policy loss.

Values, losses and gradients of every parameter agree in float64 to a relative 1e-9, for any packing into rows. The
oracle runs each trajectory as a sequence of its own and reads the last hidden states that transformers returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.oracle_model import gradients, tiny_model, worst_error
from support.oracle_objectives import Rollout, own_values, step_loss
from support.packed_objectives import opened, rollouts
from support.refusal import refusal
from support.value_models import critic, plain, valued, with_head
from treepack.attention import register
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.carry.verify import in_pieces
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.model.forward import RowRunner, WholeRows
from treepack.model.head.value_head import value_head_of
from treepack.model.layers import adapt_layers
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.objectives.denominators import check_columns, step_factors, trajectory_table
from treepack.objectives.losses import step_means
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_numbers import LossPart

TOLERANCE = 1e-9


def step_of(
    loaded: LoadedModel, dataset: PackedDataset, objective: Objective, *, limit: int | None = None
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Return loss, gradients and means of one optimiser step over all rows, in pieces of `limit` tokens if given."""
    check_columns(dataset, objective)
    every = list(range(len(dataset)))
    factors = step_factors(trajectory_table(dataset, objective), every, objective)
    loaded.model.zero_grad()
    runner = runner_with(loaded, limit)
    total, sums = 0.0, dict[str, float]()
    for row, row_factors in zip(every, factors, strict=True):
        part = LossPart(objective, torch.from_numpy(row_factors))
        result = runner.backward(dataset[row], part)
        again = runner.loss(dataset[row], part)
        assert again.loss.item() == pytest.approx(float(result.loss), rel=1e-12, abs=1e-12)
        assert again.sums.keys() == result.sums.keys()
        total += result.loss.item()
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in result.sums.items()}
    return total, gradients(loaded.model), step_means(sums)


def runner_with(loaded: LoadedModel, limit: int | None) -> RowRunner:
    return WholeRows(loaded) if limit is None else RowsInPieces(loaded, CarryOptions(limit))


def expected_of(model: Any, samples: Sequence[Rollout], objective: Objective) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = step_loss(model, samples, objective)
    torch.autograd.backward(loss)
    return loss.item(), gradients(model)


def packings(count: int) -> list[list[int]]:
    return [[0] * count, [i * i % 3 % 2 + (i > 6) for i in range(count)], list(range(count))]


CASES: list[dict[str, Any]] = [
    {"name": "value"},
    {"name": "value", "denominator": "trajectory", "value_clip": 0.05},
    {"name": "value", "denominator": "group", "value_clip": 0.0},
    {"name": "ppo", "value_coef": 0.5},
    {"name": "grpo", "value_coef": 0.7, "value_clip": 0.1, "kl": 0.2, "entropy": 0.1},
    {"name": "gspo", "value_coef": 0.4, "clip_low": 0.03, "clip_high": 0.04},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.parametrize("kind", ["qwen3"])
def test_loss_and_gradients_are_those_of_trajectories_alone(tmp_path: Path, kind: str, case: dict[str, Any]) -> None:
    objective = choose_objective(**case)
    samples = valued(kind)
    loss, expected = expected_of(plain(kind), samples, objective)
    assert worst_error({name: torch.zeros_like(value) for name, value in expected.items()}, expected) > 0
    for i, rows in enumerate(packings(len(samples))):
        total, grads, means = step_of(critic(kind), opened(tmp_path / str(i), samples, rows), objective)
        assert total == pytest.approx(loss, rel=TOLERANCE)
        assert worst_error(grads, expected) <= TOLERANCE
        assert (0 < means["value_clip_fraction"] < 1) == (objective.value_clip > 0)


@pytest.mark.parametrize("seed", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["value", "ppo", "gspo"])
def test_rows_in_pieces_give_the_same_on_any_tree(tmp_path: Path, name: str, seed: int) -> None:
    objective = choose_objective(name, **({} if name == "value" else {"value_coef": 0.5}))
    samples = valued(seed=seed, count=7 + seed)
    loss, expected = expected_of(plain("qwen3"), samples, objective)
    dataset = opened(tmp_path / "packed", samples, [0] * len(samples))
    for limit in (3, 7, None):
        total, grads, _ = step_of(critic("qwen3"), dataset, objective, limit=limit)
        assert total == pytest.approx(loss, rel=TOLERANCE)
        assert worst_error(grads, expected) <= TOLERANCE


@pytest.mark.parametrize("limit", [None, 2, 5])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt_neox", "gpt2"])
def test_every_token_of_a_row_has_the_value_of_its_path_alone(tmp_path: Path, kind: str, limit: int | None) -> None:
    samples = valued(kind)
    batch = opened(tmp_path / "packed", samples, [0] * len(samples))[0]
    loaded, tokens = critic(kind), torch.arange(batch.num_tokens)
    with torch.no_grad():
        values = runner_with(loaded, limit).values(batch)
        for number in tokens.tolist():
            path, token = [], number
            while token >= 0:
                path.append(int(batch.input_ids[token]))
                token = int(batch.parent[token])
            output = plain(kind)(input_ids=torch.tensor(path[::-1])[None], use_cache=False, output_hidden_states=True)
            head = value_head_of(plain(kind))
            assert head is not None
            expected = output.hidden_states[-1][0, -1] @ head.weight[0] + head.bias[0]
            assert values[number].item() == pytest.approx(expected.item(), rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["value", "ppo"])
def test_recomputed_layers_give_the_same_gradients(tmp_path: Path, name: str) -> None:
    register()
    loaded = LoadedModel(with_head(tiny_model("qwen3", attention="treepack_reference")), "qwen3", "reference", ())
    adapt_layers(loaded.causal, checkpointing=True, compiled=False)
    loaded.model.train()
    objective = choose_objective(name, **({} if name == "value" else {"value_coef": 0.5}))
    samples = valued()
    _, expected = expected_of(plain("qwen3"), samples, objective)
    _, grads, _ = step_of(loaded, opened(tmp_path / "packed", samples, [0] * len(samples)), objective)
    assert worst_error(grads, expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["value", pytest.param("gspo", marks=pytest.mark.slow)])
def test_verification_compares_values_and_finds_a_leak(tmp_path: Path, name: str) -> None:
    objective = choose_objective(name, **({} if name == "value" else {"value_coef": 0.5}))
    samples = valued()
    dataset = opened(tmp_path / "packed", samples, [i % 2 for i in range(len(samples))])
    batches = [dataset[row].to("cpu") for row in range(2)]
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), [0, 1], objective)]
    loaded = critic("qwen3")
    for backward in (None, in_pieces(3)):
        report = verify_gradients(loaded, batches, objective=objective, factors=factors, backward=backward)
        assert report.passed
        assert {"value_head.weight", "value_head.bias"} <= report.errors.keys()
    # Every token sees all tokens before it, even of other branches.
    leaking = [replace(batch, subtree_end=torch.full_like(batch.subtree_end, len(batch.parent))) for batch in batches]
    assert not verify_gradients(loaded, leaking, objective=objective, factors=factors).passed


def test_without_old_values_nothing_is_clipped(tmp_path: Path) -> None:
    objective = choose_objective("value")
    samples = [replace(rollout, old_values=None) for rollout in valued()]
    loss, expected = expected_of(plain("qwen3"), samples, objective)
    total, grads, means = step_of(critic("qwen3"), opened(tmp_path / "packed", samples, [0] * 10), objective)
    assert total == pytest.approx(loss, rel=TOLERANCE)
    assert worst_error(grads, expected) <= TOLERANCE
    assert means["value_clip_fraction"] == 0


def test_explained_variance_is_one_minus_the_ratio_of_variances(tmp_path: Path) -> None:
    samples = [replace(r, weights=[float(w > 0) for w in r.weights], weight=1.0) for r in valued()]
    _, _, means = step_of(critic("qwen3"), opened(tmp_path / "p", samples, [0] * 10), choose_objective("value"))
    with torch.no_grad():
        pairs = [
            (r.returns[j], float(v)) for r in samples for j, v in own_values(plain("qwen3"), r).items() if r.returns
        ]
    targets, values = np.array(pairs).T
    assert means["explained_variance"] == pytest.approx(1 - (targets - values).var() / targets.var(), rel=1e-9)
    assert means["return"] == pytest.approx(targets.mean(), rel=1e-9)
    assert not {"return_square", "value_error", "value_error_square"} & means.keys()
    assert math.isnan(step_means({"weight": 1.0, **dict.fromkeys(means, 1.0), **_moments()})["explained_variance"])


def _moments() -> dict[str, float]:
    return {"return": 2.0, "return_square": 4.0, "value_error": 1.0, "value_error_square": 1.0}


def test_an_objective_with_values_names_what_is_missing(tmp_path: Path) -> None:
    dataset = opened(tmp_path / "packed", rollouts(), [0] * 10)
    with pytest.raises(TreepackError, match=r"has no term_return, .*--estimator gae"):
        check_columns(dataset, choose_objective("value"))
    for loss, coefficient in (("value", {}), ("ppo", {"value_coef": 0.5})):
        assert "no estimator writes edges beside the returns" in refusal(
            choose_objective, loss, denominator="edge", **coefficient
        )
    assert "value_clip is about the value loss" in refusal(choose_objective, "ppo", value_clip=0.1)
    register()
    loaded = LoadedModel(tiny_model("qwen3", attention="treepack_reference"), "qwen3", "reference", ())
    assert "has no value head" in refusal(WholeRows(loaded).values, dataset[0])
