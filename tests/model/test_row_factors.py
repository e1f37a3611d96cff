"""The factors of rows in memory equal those of the same rows in a packed directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.packed_objectives import as_trajectories, opened, rollouts
from treepack.errors import TreepackError
from treepack.model.denominators import step_factors, trajectory_table
from treepack.model.objectives import choose_objective
from treepack.model.row_factors import row_factors
from treepack.pack.files import read_rows
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_packing
from treepack.trie.build import build_trie

SAMPLES = rollouts()


@pytest.mark.parametrize("denominator", ["token", "trajectory", "group", "global"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_factors_equal_those_of_a_directory(denominator: str, seed: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"response_length": 7} if denominator == "global" else {}
    objective = choose_objective("grpo", denominator=denominator, **options)
    in_row = np.random.default_rng(seed).integers(0, 4, len(SAMPLES))
    dataset = opened(tmp_path / "packed", SAMPLES, in_row.tolist())
    every = list(range(len(dataset)))
    expected = step_factors(trajectory_table(dataset, objective), every, objective)
    rows = list(read_rows(tmp_path / "packed"))
    # In any order of the rows, whose factors are those of the whole step.
    backwards = row_factors(rows[::-1], objective)[::-1]
    for factors in (row_factors(rows, objective), backwards):
        assert [each.tolist() for each in factors] == [each.tolist() for each in expected]


def test_a_group_of_another_step_is_another_group() -> None:
    halves = [[replace(each, step=step) for each in as_trajectories(SAMPLES)] for step in (1, 2)]
    objective = choose_objective("grpo", denominator="group")
    rows = [list(plan_packing(build_trie(half), PackOptions(capacity=4096))) for half in halves]
    alone = [float(each.sum()) for each in row_factors(rows[0], objective)]
    both = [float(each.sum()) for each in row_factors([*rows[0], *rows[1]], objective)]
    assert both == pytest.approx([value / 2 for value in alone * 2], rel=1e-15)


def test_a_trajectory_without_an_advantage_is_refused() -> None:
    trajectories = as_trajectories(SAMPLES, without=["advantages"])
    trajectories = [replace(each, advantage=None if i == 3 else 0.5) for i, each in enumerate(trajectories)]
    rows = list(plan_packing(build_trie(trajectories), PackOptions(capacity=4096)))
    with pytest.raises(TreepackError, match="row 0 has no term_advantage for some trajectories, which the loss grpo"):
        row_factors(rows, choose_objective("grpo"))


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_losses_without_factors_are_refused(loss: str) -> None:
    with pytest.raises(TreepackError, match=f"the loss {loss} has no factors of trajectories"):
        row_factors([], choose_objective(loss))
