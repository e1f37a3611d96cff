"""Losses, sums and gradients of joined rows equal the sums over rows alone, with every loss and every way of joining.

In float64 they agree to a relative 1e-9: the total, the part of each row, and the gradient of every parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.oracle_model import gradients, worst_error
from support.packed_objectives import opened
from support.value_models import critic, valued
from treepack.data.batch import Batch
from treepack.data.joined import join_rows
from treepack.model.forward import WholeRows
from treepack.model.loaded import LoadedModel
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_numbers import LossPart

TOLERANCE = 1e-9
ROWS = [0, 0, 1, 1, 2, 2, 2, 3, 3, 4]
JOINS = [[[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4]], [[3, 0], [4], [2, 1]], [[4, 3, 2], [1, 0]]]
CASES: list[dict[str, Any]] = [
    {"name": "ppo", "kl": 0.1, "entropy": 0.05},
    {"name": "grpo", "importance_cap": 2.0},
    {"name": "gspo"},
    {"name": "cispo"},
    {"name": "dr_grpo", "response_length": 7},
    {"name": "value"},
    {"name": "ppo", "value_coef": 0.5},
    {"name": "gspo", "value_coef": 0.4},
    {"name": "gmpo", "importance_mask": (0.5, 2.0), "importance_level": "geometric", "sequence_mask": 0.1},
]


def step_of(
    loaded: LoadedModel, rows: list[Batch], passes: list[list[int]], objective: Objective | None, factors: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Return the loss of each row, the gradients, and the sums of a step."""
    loaded.model.zero_grad()
    losses, sums = torch.zeros(len(rows), dtype=torch.float64), dict[str, float]()
    for numbers in passes:
        batch = join_rows([rows[number] for number in numbers], multiple=8)
        part = LossPart(denominator=3.0)
        if objective is not None:
            part = LossPart(objective, torch.cat([factors[number] for number in numbers]))
        loss = WholeRows(loaded, chunk=5).backward(batch, part)
        assert loss.rows.shape == (len(numbers),)
        assert not loss.rows.requires_grad
        assert float(loss.loss) == pytest.approx(float(loss.rows.sum()), rel=TOLERANCE, abs=TOLERANCE)
        losses[numbers] += loss.rows
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in loss.sums.items()}
    return losses, gradients(loaded.model), sums


def name_of(case: dict[str, Any] | None) -> str:
    return "sft" if case is None else "-".join(map(str, case.values()))


@pytest.mark.parametrize("case", [None, *CASES], ids=name_of)
def test_every_way_of_joining_has_the_losses_and_gradients_of_single_rows(
    tmp_path: Path, case: dict[str, Any] | None
) -> None:
    objective = None if case is None else choose_objective(**case)
    dataset = opened(tmp_path / "packed", valued(), ROWS)
    rows, every = [dataset[number] for number in range(len(dataset))], list(range(len(dataset)))
    factors = [torch.empty(0)] * len(rows)
    if objective is not None:
        factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), every, objective)]
    alone, expected, sums = step_of(critic("qwen3"), rows, JOINS[0], objective, factors)
    assert alone.abs().min() > 0
    for passes in JOINS[1:]:
        losses, grads, own = step_of(critic("qwen3"), rows, passes, objective, factors)
        torch.testing.assert_close(losses, alone, rtol=TOLERANCE, atol=TOLERANCE)
        assert worst_error(grads, expected) <= TOLERANCE
        assert own == pytest.approx(sums, rel=TOLERANCE, abs=TOLERANCE)


def test_pairs_of_dpo_stay_within_their_rows(tmp_path: Path) -> None:
    objective = choose_objective("dpo")
    dataset = opened(tmp_path / "packed", valued(), [i % 2 for i in range(10)])
    rows = [dataset[0], dataset[1]]
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), [0, 1], objective)]
    alone, expected, _ = step_of(critic("qwen3"), rows, [[0], [1]], objective, factors)
    losses, grads, _ = step_of(critic("qwen3"), rows, [[1, 0]], objective, factors)
    torch.testing.assert_close(losses, alone, rtol=TOLERANCE, atol=TOLERANCE)
    assert worst_error(grads, expected) <= TOLERANCE
