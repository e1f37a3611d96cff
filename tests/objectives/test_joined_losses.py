"""Joined rows, and rows in memory: the losses, gradients and factors of the rows alone and of packed directories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from support.oracle_model import gradients, packed_directory, worst_error
from support.packed_objectives import as_trajectories, opened, rollouts
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from support.value_models import critic, valued
from treepack.data.batch import Batch
from treepack.data.dataset import PackedDataset
from treepack.data.joined import join_rows
from treepack.errors import TreepackError
from treepack.model.forward import WholeRows
from treepack.model.loaded import LoadedModel
from treepack.objectives.denominators import check_columns, step_factors, trajectory_table
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.objectives.row_numbers import LossPart
from treepack.pack.directory import pack_trie
from treepack.pack.files import read_rows
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_packing
from treepack.pack.row import Row
from treepack.ragged import RaggedArray
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

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
    assert [each.tolist() for each in row_factors(rows, objective)] == [each.tolist() for each in expected]
    # In any order of the rows, because factors belong to the whole step; their weights add up in a different order.
    for one, other in zip(row_factors(rows[::-1], objective)[::-1], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


def test_a_group_of_another_step_is_another_group() -> None:
    halves = [[replace(each, step=step) for each in as_trajectories(SAMPLES)] for step in (1, 2)]
    objective = choose_objective("grpo", denominator="group")
    rows = [list(plan_packing(build_trie(half), PackOptions(capacity=4096))) for half in halves]
    alone = [float(each.sum()) for each in row_factors(rows[0], objective)]
    both = [float(each.sum()) for each in row_factors([*rows[0], *rows[1]], objective)]
    assert both == pytest.approx([value / 2 for value in alone * 2], rel=1e-15)


def shares(rows: list[Row], denominator: str) -> list[float]:
    """The share of the loss that each of the trajectories B, C, D, ... has, if all of its tokens have the loss 1."""
    options: dict[str, Any] = {"response_length": 1} if denominator == "global" else {}
    found: dict[str, float] = {}
    for row, factors in zip(
        rows, row_factors(rows, choose_objective("grpo", denominator=denominator, **options)), strict=True
    ):
        assert row.terms is not None
        sums = np.bincount(row.terms.trajectory, row.terms.weight * factors.numpy()[row.terms.trajectory])
        found |= dict(zip(row.trajectory_ids, sums.tolist(), strict=True))
    return [found[name] for name in sorted(found)]


def forked(**options: Any) -> list[Trajectory]:
    """B ends early; C and D share a fork. They train 2, 3 and 3 tokens, with the leaf weights 1/2, 1/4, 1/4."""
    ids = {"B": [7, 1, 1], "C": [7, 2, 3, 3], "D": [7, 2, 4, 4]}
    return [
        make(name, tokens, advantage=1.0, metadata={"leaf_weight": 0.5 if name == "B" else 0.25}, **options)
        for name, tokens in ids.items()
    ]


@pytest.mark.parametrize(
    ("denominator", "expected"),
    [
        ("token", [0.4, 0.3, 0.3]),
        ("trajectory", [0.5, 0.25, 0.25]),
        ("group", [0.4, 0.3, 0.3]),
        ("global", [1.0, 0.75, 0.75]),
    ],
)
@pytest.mark.parametrize("capacity", [4, 64])
def test_a_trajectory_counts_its_leaf_weight(denominator: str, expected: list[float], capacity: int) -> None:
    options = PackOptions(capacity=capacity, leaf_weights=True)
    assert shares([*plan_packing(build_trie(forked()), options)], denominator) == pytest.approx(expected, rel=1e-12)


def test_a_trajectory_counts_the_weight_of_its_record() -> None:
    made = [replace(one, weight=weight) for one, weight in zip(forked(), (3.0, 1.0, 0.0), strict=True)]
    rows = [*plan_packing(build_trie(made), PackOptions(capacity=64))]
    assert shares(rows, "trajectory") == pytest.approx([0.75, 0.25, 0], rel=1e-12)
    assert shares(rows, "global") == pytest.approx([1.5, 0.75, 0], rel=1e-12)  # 3 * 2 and 1 * 3 of 4


@pytest.mark.parametrize("weight", [1.0, 0.1, 3.0])
def test_equal_weights_divide_each_trajectory_by_its_own_sum_and_the_number_of_all(weight: float) -> None:
    made = [replace(one, weight=weight) for one in as_trajectories(SAMPLES)]
    rows = [*plan_packing(build_trie(made), PackOptions(capacity=64))]
    for row, factors in zip(rows, row_factors(rows, choose_objective("grpo")), strict=True):
        assert row.terms is not None
        sums = np.bincount(row.terms.trajectory, row.terms.weight)
        assert factors.tolist() == (1 / (sums * len(made))).tolist()  # equal bits


def test_leaves_of_a_fallback_do_not_change_the_share_of_a_tree(tmp_path: Path) -> None:
    # The second tree has 2 leaves of 4 from before a fallback. It counts as 4 rollouts in `global`, as the first does.
    made = []
    for tree, before in (("q0", [0.25, 0.25, 0.25, 0.25]), ("q1", [0.5, 0.5, 0.0, 0.0])):
        for i, weight in enumerate(before):
            metadata = {"leaf_weight": 0.25, "leaf_weight_before_fallback": weight}
            made.append(make(f"{tree}/{i}", [7, i, 1], group=tree, advantage=1.0, metadata=metadata))
    rows = [*plan_packing(build_trie(made), PackOptions(capacity=64, leaf_weights=True))]
    for denominator, of_tree in (("global", 1.0), ("trajectory", 0.5)):
        found = shares(rows, denominator)
        assert [sum(found[:4]), sum(found[4:])] == pytest.approx([of_tree, of_tree], rel=1e-12)


def test_leaf_weights_of_a_directory_are_those_of_memory(tmp_path: Path) -> None:
    options, objective = PackOptions(capacity=8, leaf_weights=True), choose_objective("gspo")
    trie = build_trie(forked())
    pack_trie(saved(trie, tmp_path / "trie"), tmp_path / "packed", options)
    dataset = PackedDataset(tmp_path / "packed", terms=True)
    check_columns(dataset, objective)
    table = trajectory_table(dataset, objective)
    factors = step_factors(table, list(range(len(dataset))), objective)
    in_memory = row_factors([*plan_packing(trie, options)], objective)
    assert [each.tolist() for each in factors] == [each.tolist() for each in in_memory]
    assert sorted(table.own.tolist()) == [0.75, 0.75, 1.5]


def test_equal_leaf_weights_have_no_column_and_are_accepted(tmp_path: Path) -> None:
    trie = build_trie([make(f"t{i}", [1, 2 + i], advantage=1.0, metadata={"leaf_weight": 0.5}) for i in range(2)])
    objective, factors = choose_objective("gspo"), []
    for leaf_weights in (True, False):
        out = tmp_path / f"packed-{leaf_weights}"
        pack_trie(saved(trie, tmp_path / "trie"), out, PackOptions(capacity=8, leaf_weights=leaf_weights))
        dataset = PackedDataset(out, terms=True)
        assert "trajectory_weights" not in dataset.term_columns
        check_columns(dataset, objective)
        factors.append(step_factors(trajectory_table(dataset, objective), [0], objective)[0].tolist())
    assert factors[0] == factors[1] != [0.0, 0.0]


def test_a_trajectory_without_an_advantage_is_refused() -> None:
    trajectories = as_trajectories(SAMPLES, without=["advantages"])
    trajectories = [replace(each, advantage=None if i == 3 else 0.5) for i, each in enumerate(trajectories)]
    rows = list(plan_packing(build_trie(trajectories), PackOptions(capacity=4096)))
    assert "row 0 has no term_advantage for some trajectories, which the loss grpo" in refusal(
        row_factors, rows, choose_objective("grpo")
    )


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_losses_without_factors_are_refused(loss: str) -> None:
    assert f"the loss {loss} has no factors of trajectories" in refusal(row_factors, [], choose_objective(loss))


def recorded_words(*, missing: bool = False) -> list[Row]:
    """Rows of two trajectories with the two likeliest words of a teacher at each token; the last one may lack them."""
    made = []
    for i, ids in enumerate(([7, 1, 2], [7, 3, 4])):
        words = [[5, 6], [] if missing and i else [5, 6]]
        columns: dict[str, Any] = {
            "teacher_topk_ids": RaggedArray.of(words, np.int32),
            "teacher_topk_logprobs": RaggedArray.of([[-0.5, -2.0][: len(each)] for each in words], np.float32),
        }
        made.append(make(f"t{i}", ids, advantage=1.0, **columns))
    return [*plan_packing(build_trie(made), PackOptions(capacity=64))]


def test_distillation_from_recorded_words_has_factors_and_refuses_a_token_without_words() -> None:
    objective = choose_objective("distill")
    (factors,) = row_factors(recorded_words(), objective)
    assert factors.tolist() == [0.25, 0.25]  # 1 / 4 trained tokens
    assert "row 0 has no term_teacher_topk_logprobs for some trajectories, which" in refusal(
        row_factors, recorded_words(missing=True), objective
    )


def test_old_log_probabilities_that_only_some_trajectories_have_are_refused() -> None:
    trajectories = [*as_trajectories(SAMPLES[:3]), *as_trajectories(SAMPLES, without=["old_logprobs"])[3:]]
    rows = list(plan_packing(build_trie(trajectories), PackOptions(capacity=4096)))
    assert "row 0 has no term_old_logprob for some trajectories, which the loss grpo" in refusal(
        row_factors, rows, choose_objective("grpo")
    )


@pytest.mark.parametrize(
    ("column", "cells", "fault"),
    [
        ("term_trajectory", [[0, -1, 1, 1]], "term_trajectory points outside"),
        ("term_trajectory", [[0, 0, 1, 2**31 - 1]], "term_trajectory points outside"),
        ("term_trajectory", [[0, 0, 1]], "list of another length"),
        ("term_weight", [[1.0, 1.0, 1.0]], "list of another length"),
        ("term_weight", [[1.0] * 5], "list of another length"),
        ("trajectory_groups", [["g"]], "points outside"),
    ],
)
def test_rows_whose_terms_were_edited_are_refused_when_they_are_opened(
    tmp_path: Path, column: str, cells: list[list[Any]], fault: str
) -> None:
    rollouts = [make(f"t{i}", [1, 2, 3 + i], advantage=1.0, reward=float(i)) for i in range(2)]
    dataset = PackedDataset(packed_directory(tmp_path / "packed", rollouts, capacity=16), terms=True)
    tables = [*dataset.tables(["trajectory_groups", "term_trajectory", "term_weight"])]
    place = tables[0].schema.get_field_index(column)
    edited = tables[0].set_column(place, column, pa.array(cells, tables[0].schema.field(column).type))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedDataset, "tables", lambda *_: iter([edited]))
        with pytest.raises(TreepackError, match=fault):
            trajectory_table(dataset, choose_objective("grpo"))
