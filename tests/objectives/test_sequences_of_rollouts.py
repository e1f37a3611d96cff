"""Sequences of rollouts: ratios, masks and denominators take all trajectories of a rollout as one sequence."""

from __future__ import annotations

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
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.data.dataset import PackedDataset
from treepack.data.joined import join_rows
from treepack.model.forward import WholeRows
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.objectives.row_numbers import LossPart
from treepack.online import sequence_loss
from treepack.pack.files import read_rows
from treepack.trie.builders.in_memory import build_trie

CASES: list[dict[str, Any]] = [
    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    {"name": "luspo", "response_length": 7, "clip_low": 0.2, "clip_high": 0.2},
    {"name": "gmpo", "entropy": 0.1, "denominator": "group"},
    {"name": "vespo", "importance_cap": 1.5, "kl": 0.2},
    {"name": "grpo", "sequence_mask": 0.1, "denominator": "rollout"},
    {"name": "dapo", "importance_cap": 1.1, "importance_level": "sequence"},
    {"name": "cispo", "importance_mask": (0.6, 1.2), "importance_level": "geometric"},
]
NAMES = ["r", "s", None, "r", None, "s", "s", "r", None, None]
# Rollout r is in row 0, s in row 1, and the others anywhere.
ROWS = [0, 1, 0, 0, 1, 1, 1, 0, 2, 2]


def chosen(case: dict[str, Any]) -> Objective:
    return choose_objective(**case, sequence_of="rollout")


def samples_of(names: Sequence[str | None], *, equal_weights: bool = True) -> list[Rollout]:
    """The random rollouts of the tests of objectives as samples of these rollouts."""
    weights = {name: one.weight for name, one in zip(names, rollouts(), strict=True)}
    return [
        replace(one, rollout=name, weight=one.weight if name is None or not equal_weights else weights[name])
        for name, one in zip(names, rollouts(), strict=True)
    ]


def loss_of(dataset: PackedDataset, objective: Objective, way: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step of all rows: one after the other, joined, or in pieces."""
    loaded, every = packed_model("qwen3"), list(range(len(dataset)))
    loaded.model.zero_grad()
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), every, objective)]
    if way == "joined":
        batch = join_rows([dataset[row] for row in reversed(every)], multiple=8)
        result = WholeRows(loaded, chunk=5).backward(batch, LossPart(objective, torch.cat(factors[::-1])))
        return result.loss.item(), gradients(loaded.model)
    rows = WholeRows(loaded, chunk=5) if way == "whole" else RowsInPieces(loaded, CarryOptions(4))
    total = sum(
        rows.backward(dataset[row], LossPart(objective, own)).loss.item()
        for row, own in zip(every, factors, strict=True)
    )
    return total, gradients(loaded.model)


@pytest.mark.parametrize("way", ["whole", "joined", "pieces"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rows_have_the_loss_and_gradient_of_sequences_of_rollouts(
    case: dict[str, Any], way: str, tmp_path: Path
) -> None:
    objective = chosen(case)
    # The denominators of vespo and dapo take samples of different weights.
    samples = samples_of(NAMES, equal_weights=objective.denominator != "token")
    model = plain("qwen3")
    model.zero_grad()
    expected = step_loss(model, samples, objective)
    torch.autograd.backward(expected)
    wanted = gradients(model)
    dataset = opened(tmp_path / "packed", samples, ROWS)
    loss, slopes = loss_of(dataset, objective, way)
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    assert worst_error(slopes, wanted) <= 1e-9
    by_trajectory = step_loss(model, samples, replace(objective, sequence_of="trajectory"))
    assert loss != pytest.approx(by_trajectory.item(), rel=1e-6)
    in_files = step_factors(trajectory_table(dataset, objective), [0, 1, 2], objective)
    in_memory = row_factors(list(read_rows(dataset.path)), objective)
    assert [each.tolist() for each in in_memory] == [each.tolist() for each in in_files]


@settings(max_examples=4)
@given(cuts=st.sets(st.integers(2, 6), min_size=1), way=st.sampled_from(["whole", "pieces"]))
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.get("denominator") != "group"], ids=lambda c: c["name"]
)
def test_a_history_that_is_cut_has_the_loss_and_gradient_of_the_whole(
    case: dict[str, Any], cuts: set[int], way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokens, rng = [3, 1, 4, 1, 5, 9, 2, 6], np.random.default_rng(0)
    whole = replace(rollouts()[0], tokens=tokens, weights=[0.0] + [1.0] * 7, weight=1.0, rollout="r")
    with torch.no_grad():
        logs, _ = own_logprobs(plain("qwen3"), whole)
    near = np.array([0.0, *(logs[j].item() for j in range(1, 8))])
    old, ref, sampling = ((near + rng.normal(size=8) / 3).tolist() for _ in range(3))
    whole = replace(whole, old=old, ref=ref, sampling=sampling, advantages=rng.normal(size=8).tolist())
    other = replace(whole, tokens=[3, 1, 2, 2], weights=[0.0, 1.0, 1.0, 1.0], rollout=None)
    # Each sample trains the tokens from one cut to the next, after all tokens before it.
    parts = [
        replace(whole, tokens=tokens[:end], weights=[float(begin <= j < end) for j in range(end)])
        for begin, end in pairwise([1, *sorted(cuts), 8])
    ]
    results = []
    for name, samples in (("whole", [whole, other]), ("parts", [*parts, other])):
        dataset = opened(tmp_path_factory.mktemp(name) / "packed", samples, [0] * len(samples))
        results.append(loss_of(dataset, chosen(case), way))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
    assert worst_error(results[1][1], results[0][1]) <= 1e-9


@pytest.mark.parametrize("case", CASES[:2] + CASES[3:], ids=lambda case: case["name"])
def test_sequences_in_memory_have_the_loss_of_rows(case: dict[str, Any], tmp_path: Path) -> None:
    objective = replace(chosen(case), entropy=0.0)
    samples = [replace(one, weight=1.0, weights=[float(w > 0) for w in one.weights]) for one in samples_of(NAMES)]
    expected, _ = loss_of(opened(tmp_path / "packed", samples, ROWS), objective, "whole")
    width = max(len(one.tokens) for one in samples)

    def padded(values: list[list[float]]) -> Tensor:
        return torch.tensor([[*each, *[0.0] * (width - len(each))] for each in values], dtype=torch.float64)

    with torch.no_grad():
        logs = [own_logprobs(plain("qwen3"), one)[0] for one in samples]
    logprobs = padded([[float(log.get(j, 0.0)) for j in range(width)] for log in logs])
    columns: dict[str, Any] = {
        f"{name}_logprobs": padded([getattr(one, name) for one in samples]) for name in ("old", "ref", "sampling")
    }
    columns["advantages"] = padded([one.advantages for one in samples])
    scored = padded([one.weights for one in samples]) > 0
    numbers = torch.tensor([0, 1, 2, 0, 3, 1, 1, 0, 4, 5])
    whole, _ = sequence_loss(logprobs, None, scored, objective, rollouts=numbers, **columns)
    assert whole.item() == pytest.approx(expected, rel=1e-9)
    # Micro-batches of whole rollouts add up.
    totals = {"step_sequences": 6.0, "step_tokens": float(scored.sum())}
    parts = [
        sequence_loss(
            *(logprobs[part], None, scored[part], objective),
            **(totals | {name: values[part] for name, values in columns.items()}),
            rollouts=numbers[part],
        )[0].item()
        for part in (numbers <= 1, numbers > 1)
    ]
    assert sum(parts) == pytest.approx(expected, rel=1e-9)
    assert refusal(sequence_loss, logprobs, None, scored, objective, **columns) == (
        f"sequence_loss: the denominator is {objective.denominator} and a sequence is a rollout; give rollouts if one "
        "of them is rollout, else none"
    )


@pytest.mark.slow
def test_two_ranks_take_the_sequences_that_one_process_takes(tmp_path: Path) -> None:
    rows = packed_directory(tmp_path / "rows", as_trajectories(samples_of(NAMES)), capacity=64)
    model = tiny_config(tmp_path / "tiny.json")
    options = {"sequence_of": "rollout", "kl": 0.2, "clip_low": 0.2, "clip_high": 0.2}
    case = Case("rollout", rows, model, {"epochs": 2, "rows_per_step": 3}, loss="gspo", objective=options)
    (expected,), (result,) = (train_over(ranks, tmp_path, [case]).values() for ranks in (0, 2))
    assert len(result["records"]) == len(expected["records"])
    for record, twin in zip(result["records"], expected["records"], strict=True):
        for name in ("loss", "grad_norm", "ratio"):
            assert record[name] == pytest.approx(twin[name], rel=1e-4), name


def sample(number: int, rollout: str, *, tokens: Sequence[int] = (1, 2), **more: Any) -> Any:
    made = make(f"t{number}", [number, *tokens], advantage=1.0, **more)
    return replace(made, rollout_id=rollout, rollout_part=number, source="made")


def test_rollouts_that_are_not_one_sequence_are_refused(tmp_path: Path) -> None:
    objective = chosen({"name": "gspo"})

    def sentence(name: str, items: list[Any], rows: list[int], loss: Objective = objective) -> str:
        dataset = PackedDataset(write_rows(tmp_path / name, items, rows), terms=True)
        said = refusal(trajectory_table, dataset, loss)
        assert refusal(row_factors, list(read_rows(dataset.path)), loss).endswith(said.partition(": ")[2])
        return said.removeprefix(f"{dataset.path}: ")

    assert sentence("rows", [sample(0, "r"), sample(1, "s"), sample(2, "r")], [0, 1, 2]) == (
        "rows 0 and 2 have trajectories of one rollout, which is one sequence of gspo and must be in one row; pack "
        "with --method groups, or choose sequence_of trajectory"
    )
    assert sentence("shared", [sample(0, "r"), replace(sample(1, "r"), rollout_part=-1)], [0, 0]) == (
        "row 0 has turns that several paths of a search tree share, and the loss adds up the tokens of each rollout; "
        "build the trie without --expand turns, or with --per-path"
    )
    assert "a trajectory of another weight than others of its rollout have" in (
        sentence("weights", [sample(0, "r", weight=2.0), sample(1, "r")], [0, 0])
    )


def test_the_option_without_a_sequence_is_refused() -> None:
    assert refusal(choose_objective, "grpo", sequence_of="rollout") == (
        "sequence_of is about ratios and masks of sequences, which grpo with these options does not have; choose the "
        "denominator rollout instead, or neither"
    )


def test_the_command_trains_and_verifies_sequences_of_rollouts(treepack: Run, tmp_path: Path) -> None:
    saved(build_trie([sample(i, "rrstu"[i], reward=float(i)) for i in range(5)]), tmp_path / "trie")
    model = ("--model", tiny_config(tmp_path / "tiny.json"), "--device", "cpu", "--loss", "gspo")
    how = (*model, "--sequence-of", "rollout")
    assert treepack("pack", tmp_path / "trie", "--capacity", 8, "--out", tmp_path / "packed").status == 0
    for more in (["--verify"], ["--carry", 3, "--out", tmp_path / "pieces"], ["--out", tmp_path / "trained"]):
        done = treepack("train", tmp_path / "packed", *how, *more)
        assert done.status == 0, done.err
    packed = treepack("pack", tmp_path / "trie", "--capacity", 3, "--too-long", "drop", "--out", tmp_path / "single")
    assert packed.status == 0
    done = treepack("train", tmp_path / "single", *how, "--dry-run")
    assert done.status == 1
    assert "trajectories of one rollout, which is one sequence of gspo and must be in one row; pack with" in done.err
    longer = sample(1, "r", tokens=[1, 2, 3, 4, 5, 6])
    saved(build_trie([sample(0, "r"), longer, sample(2, "s")]), tmp_path / "longer")
    cut = ("--capacity", 4, "--too-long", "drop", "--out", tmp_path / "cut")
    assert treepack("pack", tmp_path / "longer", *cut).status == 0
    done = treepack("train", tmp_path / "cut", *how, "--dry-run")
    assert (
        "pack has dropped trajectories of 1 rollouts of several, and a sequence of gspo is a whole rollout; pack with "
        "a larger --capacity"
    ) in done.err


def test_runs_without_the_option_have_the_record_of_older_ones() -> None:
    assert "sequence_of" not in choose_objective("gspo").as_record()
    assert choose_objective("gspo", sequence_of="rollout").as_record()["sequence_of"] == "rollout"
