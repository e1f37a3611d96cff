"""The denominator rollout: a rollout weighs the same, however many trajectories its history became."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.command_line import Run
from support.oracle_model import gradients, packed_directory, tiny_config, worst_error, write_rows
from support.oracle_objectives import Rollout, own_logprobs, step_loss
from support.packed_objectives import as_trajectories, opened, packed_model, plain, rollouts
from support.paths import ROOT
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.data.dataset import PackedDataset
from treepack.model.forward import WholeRows
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.objectives.row_numbers import LossPart
from treepack.online import sequence_loss
from treepack.pack.files import read_rows
from treepack.pack.row import concatenate_rows
from treepack.train.options import TrainOptions
from treepack.train.schedule import plan_steps
from treepack.trie.builders.in_memory import build_trie

OPTIONS: dict[str, Any] = {"denominator": "rollout", "kl": 0.2}


def with_rollouts(names: Sequence[str | None]) -> list[Rollout]:
    """The random rollouts of the tests of objectives as samples of these rollouts, each with one weight."""
    weights = {name: one.weight for name, one in zip(names, rollouts(), strict=True)}
    return [
        replace(one, rollout=name, weight=one.weight if name is None else weights[name])
        for name, one in zip(names, rollouts(), strict=True)
    ]


def loss_of(dataset: PackedDataset, objective: Objective, carry: int | None) -> tuple[float, dict[str, Tensor]]:
    loaded = packed_model("qwen3")
    loaded.model.zero_grad()
    rows = WholeRows(loaded, chunk=5) if carry is None else RowsInPieces(loaded, CarryOptions(carry))
    every = list(range(len(dataset)))
    total = 0.0
    for row, factors in zip(every, step_factors(trajectory_table(dataset, objective), every, objective), strict=True):
        total += rows.backward(dataset[row], LossPart(objective, torch.from_numpy(factors))).loss.item()
    return total, gradients(loaded.model)


@settings(max_examples=4)
@given(
    names=st.lists(st.sampled_from(["r", "s", None]), min_size=10, max_size=10),
    rows=st.lists(st.integers(0, 2), min_size=10, max_size=10),
    carry=st.sampled_from([None, 4]),
)
def test_rows_have_the_loss_and_gradient_of_a_mean_over_rollouts(
    names: list[str | None], rows: list[int], carry: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    objective, samples = choose_objective("grpo", **OPTIONS), with_rollouts(names)
    model = plain("qwen3")
    model.zero_grad()
    expected = step_loss(model, samples, objective)
    torch.autograd.backward(expected)
    wanted = gradients(model)
    places = np.unique(rows, return_inverse=True)[1].tolist()
    dataset = opened(tmp_path_factory.mktemp("rows") / "packed", samples, places)
    loss, slopes = loss_of(dataset, objective, carry)
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    assert worst_error(slopes, wanted) <= 1e-9
    in_memory = row_factors(list(read_rows(dataset.path)), objective)
    table = trajectory_table(dataset, objective)
    in_files = step_factors(table, list(range(len(dataset))), objective)
    assert [each.tolist() for each in in_memory] == [each.tolist() for each in in_files]


@settings(max_examples=4)
@given(cuts=st.sets(st.integers(2, 6)), both=st.booleans())
def test_a_history_that_is_cut_has_the_loss_and_gradient_of_the_whole(
    cuts: set[int], both: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokens, rng = [3, 1, 4, 1, 5, 9, 2, 6], np.random.default_rng(0)
    numbers: dict[str, Any] = {
        name: rng.normal(size=8).tolist() for name in ("advantages", "old", "ref", "sampling")
    } | {"group": "g", "reward": 1.0}
    whole = Rollout(tokens, [0.0] + [1.0] * 7, **numbers, rollout="r")
    other = replace(whole, tokens=[3, 1, 2, 2], weights=[0.0, 1.0, 1.0, 1.0], rollout=None)
    # Each sample trains the tokens from one cut to the next, after all tokens before it.
    edges = [1, *sorted(cuts), 8]
    parts = [
        replace(whole, tokens=tokens[:end], weights=[float(begin <= j < end) for j in range(end)])
        for begin, end in pairwise(edges)
    ]
    objective = choose_objective("grpo", **OPTIONS)
    results = []
    for name, samples in (("whole", [whole, other]), ("parts", [*parts, other])):
        rows = [i if both else 0 for i in range(len(samples))]
        dataset = opened(tmp_path_factory.mktemp(name) / "packed", samples, rows)
        results.append(loss_of(dataset, objective, None))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
    assert worst_error(results[1][1], results[0][1]) <= 1e-9


def test_sequences_in_memory_have_the_loss_of_rows(tmp_path: Path) -> None:
    names = ["r", "s", None, "r", None, "s", "s", "r", None, None]
    samples = [replace(one, weight=1.0, weights=[float(w > 0) for w in one.weights]) for one in with_rollouts(names)]
    objective = choose_objective("grpo", denominator="rollout")
    dataset = opened(tmp_path / "packed", samples, [0] * len(samples))
    expected, _ = loss_of(dataset, objective, None)
    width = max(len(one.tokens) for one in samples)

    def padded(values: list[list[float]]) -> Tensor:
        return torch.tensor([[*each, *[0.0] * (width - len(each))] for each in values], dtype=torch.float64)

    with torch.no_grad():
        logs = [own_logprobs(plain("qwen3"), one)[0] for one in samples]
    logprobs = padded([[float(log.get(j, 0.0)) for j in range(width)] for log in logs])
    columns: dict[str, Any] = {
        "advantages": padded([one.advantages for one in samples]),
        "old_logprobs": padded([one.old for one in samples]),
    }
    scored = padded([one.weights for one in samples]) > 0
    numbers = torch.tensor([0, 1, 2, 0, 3, 1, 1, 0, 4, 5])
    whole, _ = sequence_loss(logprobs, None, scored, objective, rollouts=numbers, **columns)
    assert whole.item() == pytest.approx(expected, rel=1e-9)
    # Micro-batches of whole rollouts add up.
    total = 0.0
    for part in (numbers <= 1, numbers > 1):
        own = {name: values[part] for name, values in columns.items()}
        total += sequence_loss(
            logprobs[part], None, scored[part], objective, rollouts=numbers[part], step_sequences=6.0, **own
        )[0].item()
    assert total == pytest.approx(expected, rel=1e-9)
    for given_numbers, denominator in ((None, "rollout"), (numbers, "token")):
        chosen = choose_objective("grpo", denominator=denominator)
        sentence = refusal(sequence_loss, logprobs, None, scored, chosen, rollouts=given_numbers, **columns)
        assert sentence == (
            f"sequence_loss: the denominator is {denominator} and a sequence is a trajectory; give rollouts if one of "
            "them is rollout, else none"
        )


def packed(path: Path, items: list[Any], rows: list[int]) -> PackedDataset:
    return PackedDataset(write_rows(path, items, rows), terms=True)


def sample(number: int, rollout: str, *, step: int | None = None, **more: Any) -> Any:
    made = make(f"t{number}", [number, 1, 2], step=step, advantage=1.0, **more)
    return replace(made, rollout_id=rollout, rollout_part=number, source="made")


def test_rows_of_a_rollout_are_in_one_step(tmp_path: Path) -> None:
    # Rows 0 and 3 share r, 3 and 1 share s, 2 and 4 are alone.
    owners = [(0, "r"), (3, "r"), (3, "s"), (1, "s"), (2, "t"), (4, "u")]
    items = [sample(i, name) for i, (_, name) in enumerate(owners)]
    dataset = packed(tmp_path / "packed", items, [row for row, _ in owners])
    for size in (1, 2, 4):
        options = TrainOptions(objective=choose_objective("grpo", **OPTIONS), rows_per_step=size, epochs=3)
        steps = plan_steps(dataset, options, trajectory_table(dataset, options.objective))
        for epoch in range(3):
            own = [step.rows for step in steps if step.epoch == epoch]
            assert sorted(row for rows in own for row in rows) == list(range(5))
            assert any({0, 1, 3} <= set(rows) for rows in own)
            assert all(len(rows) <= max(size, 3) for rows in own)


@pytest.mark.slow
def test_two_ranks_weigh_rollouts_as_one_process_does(tmp_path: Path) -> None:
    names = ["r", "s", None, "r", None, "s", "s", "r", None, None]
    rows = packed_directory(tmp_path / "rows", as_trajectories(with_rollouts(names)), capacity=24)
    model = tiny_config(tmp_path / "tiny.json")
    case = Case("rollout", rows, model, {"epochs": 2, "rows_per_step": 3}, loss="grpo", objective=OPTIONS)
    (expected,), (result,) = (train_over(ranks, tmp_path, [case]).values() for ranks in (0, 2))
    assert len(result["records"]) == len(expected["records"])
    for record, twin in zip(result["records"], expected["records"], strict=True):
        for name in ("loss", "grad_norm", "kl"):
            assert record[name] == pytest.approx(twin[name], rel=1e-4), name


def test_a_rollout_that_cannot_be_in_one_step_is_refused(tmp_path: Path) -> None:
    objective = choose_objective("grpo", denominator="rollout")
    dataset = packed(tmp_path / "steps", [sample(0, "r", step=1), sample(1, "r", step=2)], [0, 1])
    options = TrainOptions(objective=objective)
    assert refusal(plan_steps, dataset, options, trajectory_table(dataset, objective)) == (
        f"{dataset.path}: rows 0 and 1 have trajectories of one rollout, which the denominator rollout needs in one "
        "step, but their training steps differ; choose the denominator trajectory"
    )
    dataset = packed(tmp_path / "mixed", [sample(0, "r"), sample(1, "r")], [0, 1])
    mixed = replace(options, mix=(1.0,))
    assert "of one rollout, which the denominator rollout needs in one step, but --mix takes rows one by one" in (
        refusal(plan_steps, dataset, mixed, trajectory_table(dataset, objective))
    )


def test_rollouts_without_one_number_or_weight_are_refused(tmp_path: Path) -> None:
    objective = choose_objective("grpo", denominator="rollout")
    dataset = packed(tmp_path / "weights", [sample(0, "r", weight=2.0), sample(1, "r")], [0, 0])
    assert refusal(trajectory_table, dataset, objective) == (
        f"{dataset.path}: row 0 has a trajectory of another weight than others of its rollout have, and the "
        "denominator rollout gives a rollout one weight; choose the denominator trajectory"
    )
    shared = [sample(0, "r"), replace(sample(1, "r"), rollout_part=-1)]
    dataset = packed(tmp_path / "shared", shared, [0, 0])
    assert refusal(trajectory_table, dataset, objective) == (
        f"{dataset.path}: row 0 has turns that several paths of a search tree share, and the loss adds up the "
        "tokens of each rollout; build the trie without --expand turns, or with --per-path"
    )


def test_the_commands_train_and_verify_by_rollout(treepack: Run, tmp_path: Path) -> None:
    items = [sample(i, "rrstu"[i], reward=float(i)) for i in range(5)]
    saved(build_trie(items), tmp_path / "trie")
    assert treepack("pack", tmp_path / "trie", "--capacity", 8, "--out", tmp_path / "packed").status == 0
    assert treepack("stats", tmp_path / "packed", "--check").status == 0
    model = ("--model", tiny_config(tmp_path / "tiny.json"), "--device", "cpu", "--loss", "grpo")
    for more in (["--verify"], ["--carry", 3, "--out", tmp_path / "pieces"], ["--out", tmp_path / "trained"]):
        done = treepack("train", tmp_path / "packed", *model, "--denominator", "rollout", *more)
        assert done.status == 0, done.err
    assert treepack("pack", tmp_path / "trie", "--capacity", 3, "--out", tmp_path / "single").status == 0
    done = treepack("train", tmp_path / "single", *model, "--denominator", "rollout", "--dry-run", "--rows-per-step", 1)
    assert "rows that share a rollout are in one step, so the largest step has 2 rows; pack with --method groups" in (
        done.notes
    )


def test_rows_of_an_older_treepack_are_refused_for_this_denominator_alone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "earlier" / "packed", tmp_path / "packed")
    dataset = PackedDataset(tmp_path / "packed", terms=True)
    assert trajectory_table(dataset, choose_objective("grpo")).rollout is None
    (row,) = read_rows(tmp_path / "packed")
    assert concatenate_rows([row, row]).terms.rollout_number is None  # type: ignore[union-attr]
    assert len(row_factors([row], choose_objective("grpo"))) == 1
    assert refusal(row_factors, [row], choose_objective("grpo", denominator="rollout")) == (
        "row 0: an older treepack packed it without rollout numbers; pack the trie again"
    )
    assert refusal(trajectory_table, dataset, choose_objective("grpo", denominator="rollout")) == (
        f"{tmp_path / 'packed'}: was packed by an older treepack, and has no numbers of rollouts for the denominator "
        "rollout; pack the trie again"
    )
