"""Gradients of rows in pieces equal the gradients of every trajectory alone, in float64 to 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.oracle_model import Sample, alone, gradients, make_row, sample_sets
from support.oracle_objectives import step_loss
from support.packed_gradients import Gradients, assert_equal, packed, plain
from support.packed_objectives import opened, packed_model, rollouts
from support.packed_objectives import plain as plain_of_rollouts
from treepack.carry.backward import CarryOptions, RowsInPieces, backward_row
from treepack.data.batch import Batch, make_batch
from treepack.model.forward import WholeRows
from treepack.model.loaded import LoadedModel
from treepack.objectives.denominators import check_columns, step_factors, trajectory_table
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_numbers import LossPart

CASES: list[dict[str, Any]] = [
    {"name": "ppo", "dual_clip": 1.3},
    {"name": "grpo", "kl": 0.3, "entropy": 0.2, "importance_cap": 1.1},
    {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04, "kl": 0.1, "entropy": 0.2},
    {"name": "cispo", "clip_low": 0.3, "entropy": 0.1},
    {"name": "dpo", "beta": 0.7},
    {"name": "vespo", "importance_cap": 1.1},
    {"name": "ppo", "importance_cap": 1.1, "importance_level": "sequence", "sequence_mask": 0.1},
]


def carried(loaded: LoadedModel, batch: Batch, limit: int) -> Gradients:
    loaded.model.zero_grad()
    result = backward_row(loaded, batch, CarryOptions(limit))
    return result.loss.item(), gradients(loaded.model)


@settings(max_examples=8)
@given(samples=sample_sets(max_samples=9, max_suffix=9), limit=st.sampled_from([1, 2, 3, 5, 7, 20, 1000]))
def test_gradients_of_pieces_are_those_of_trajectories_alone(samples: list[Sample], limit: int) -> None:
    batch = make_batch(make_row(samples), multiple=8)
    expected = alone(plain("qwen3"), samples)
    loaded = packed("qwen3", "reference")
    assert_equal(carried(loaded, batch, limit), expected)
    value = RowsInPieces(loaded, CarryOptions(limit)).loss(batch)
    torch.testing.assert_close(value.loss, expected[0], rtol=1e-9, atol=0)
    assert value.sums == {}


# Pieces of 7 tokens cut every node; of 1 token or of the whole row they differ in the plan, not in the loss.
@pytest.mark.parametrize(
    ("case", "limit"),
    [*((case, 7) for case in CASES), (CASES[2], 1), (CASES[4], 1), (CASES[1], 1000)],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else None,
)
def test_objectives_in_pieces_are_those_of_trajectories_alone(tmp_path: Path, case: dict[str, Any], limit: int) -> None:
    objective = choose_objective(**case)
    samples = rollouts("qwen3")
    model = plain_of_rollouts("qwen3")
    model.zero_grad()
    loss = step_loss(model, samples, objective)
    torch.autograd.backward(loss)
    expected = loss.detach(), gradients(model)
    dataset = opened(tmp_path / "packed", samples, [0] * len(samples))
    check_columns(dataset, objective)
    (factors,) = step_factors(trajectory_table(dataset, objective), [0], objective)
    loaded, batch, f = packed_model("qwen3"), dataset[0], torch.from_numpy(factors)
    loaded.model.zero_grad()
    result = backward_row(loaded, batch, CarryOptions(limit, chunk=5), objective=objective, factors=f)
    assert_equal((result.loss.item(), gradients(loaded.model)), expected)
    part = LossPart(objective, f)
    whole = WholeRows(loaded).loss(batch, part)
    assert result.sums.keys() == whole.sums.keys()
    for name, expected_sum in whole.sums.items():
        torch.testing.assert_close(result.sums[name], expected_sum, rtol=1e-9, atol=1e-9)
    value = RowsInPieces(loaded, CarryOptions(limit)).loss(batch, part)
    torch.testing.assert_close(value.loss, result.loss, rtol=1e-9, atol=0)
    assert value.sums.keys() == result.sums.keys()
