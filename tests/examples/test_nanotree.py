"""Examples: the idea in one file with torch and numpy alone, and the whole loop with exact gradients."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nanotree
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop import Settings, accumulate, credit, figures, make_problems, publish, reward, sample, start, update

from support.fresh_processes import PROCESSES
from support.oracle_model import gradients, keep_norms, worst_error
from support.oracle_objectives import Rollout, step_loss
from support.paths import ROOT
from support.strategies import make
from treepack import Trie, load_model
from treepack.objectives.objective import choose_objective
from treepack.pack.leaf_weights import weigh_leaves
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.rollout.options import TreeOptions
from treepack.rollout.tree import Tree
from treepack.trajectory import Tokens, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import trajectories_of

Array = np.ndarray[Any, Any]


SOURCE = (ROOT / "examples" / "nanotree.py").read_text()


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def test_the_file_is_short_and_imports_torch_and_numpy_alone() -> None:
    assert len(SOURCE.splitlines()) <= 200
    imported = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported == {"__future__", "dataclasses", "numpy", "torch"}


@pytest.mark.parametrize("seed", range(3))
def test_the_gradients_of_a_row_are_those_of_each_rollout_alone(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 < nanotree.main(seed) < 1e-12
    assert "14 rollouts" in capsys.readouterr().out


def test_a_row_without_its_mask_has_other_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(row: nanotree.Row) -> torch.Tensor:
        return torch.ones(len(row.tokens), len(row.tokens), dtype=torch.bool).tril()

    monkeypatch.setattr(nanotree, "visible", causal)
    assert nanotree.main() > 1e-3


def test_the_row_of_the_header_is_the_one_that_is_made() -> None:
    row = nanotree.make_row(
        [nanotree.Rollout([7, 8, 3, 4], [0, 0, 1, 1]), nanotree.Rollout([7, 8, 1, 2], [0, 0, 1, 1])]
    )
    columns = (row.tokens, row.subtree_end, row.parent, row.position)
    shown = [" ".join(f"{value:2}" for value in column) for column in columns]
    names = ("one row", "subtree_end", "parent", "position")
    assert [line in SOURCE for line in shown] == [True] * len(names), shown
    assert row.weight.tolist() == [0, 0, 1, 1, 1, 1]


@given(SEQUENCES)
def test_its_row_is_the_row_of_the_library(sequences: list[list[int]]) -> None:
    # The library trains no first token of a rollout, because nothing predicts it.
    row = nanotree.make_row([nanotree.Rollout(tokens, [0.0] + [1.0] * (len(tokens) - 1)) for tokens in sequences])
    trie = build_trie([make(str(number), tokens) for number, tokens in enumerate(sequences)])
    (own,) = pack_rows(trie, plan_rows(trie, capacity=1000))
    columns = (own.input_ids, own.parent, own.subtree_end, own.position_ids, own.loss_weight)
    assert trees(*columns) == trees(row.tokens, row.parent, row.subtree_end, row.position, row.weight)


def trees(tokens: Array, parent: Array, subtree_end: Array, *others: Array) -> list[tuple[float, ...]]:
    """Return the columns of each tree, sorted, because their order in a row is free; indices become distances."""
    index = np.arange(len(tokens))
    columns = (tokens, np.where(parent < 0, 0, index - parent), subtree_end - index, *others)
    cuts = [(int(root), int(subtree_end[root])) for root in np.flatnonzero(parent < 0)]
    return sorted(tuple(np.concatenate([column[a:b] for column in columns]).tolist()) for a, b in cuts)


EXAMPLE = ROOT / "examples" / "loop.py"


SMALL = Settings(temperature=0.7, lr=0.05)


PROBLEMS = make_problems(4)


TREES = TreeOptions(width=8, segment=1, max_tokens=4, depth=None)


@dataclass(frozen=True)
class TwoSteps:
    """Two steps of the loop: the trees of each, its figures, the versions of its samples, and the weights before it."""

    trees: list[list[Tree]]
    figures: list[dict[str, float]]
    versions: list[set[str]]
    weights: list[list[torch.Tensor]]


def take_two_steps(settings: Settings) -> TwoSteps:
    """Run the parts of the loop one by one; the weights after the second step come last."""

    async def run() -> TwoSteps:
        result, actors = TwoSteps([], [], [], []), start(settings)

        def keep_weights() -> None:
            result.weights.append([weights.detach().clone() for weights in actors.policy.model.parameters()])

        try:
            for step in (1, 2):
                trees = await sample(actors, PROBLEMS, TREES, step=step, seed=0)
                mixed = [tree for tree in trees if len({leaf.reward for leaf in tree.leaves}) > 1]
                keep_weights()
                result.figures.append(accumulate(actors.policy, credit(mixed, settings), settings))
                result.figures[-1]["grad_norm"] = update(actors)
                await publish(actors, step)
                result.trees.append(mixed)
                result.versions.append({node.version for tree in trees for node in tree.nodes() if node.parent})
            keep_weights()
        finally:
            await actors.engine.close()
        return result

    return asyncio.run(run())


@pytest.fixture(scope="module")
def two_steps() -> TwoSteps:
    """Train the tiny model for two steps; the learning rate is large enough to change its samples."""
    return take_two_steps(SMALL)


def rollouts_of(trie: Trie) -> list[Rollout]:
    """Return the trajectories of `trie` for the oracle, which knows no tree."""
    result = []
    for each in trajectories_of(trie):
        content = each.content
        assert isinstance(content, Tokens)
        size, trained = len(content.tokens), positions(content.starts, content.ends)
        weights, advantages = np.zeros(size), np.zeros(size)
        weights[trained] = 1.0
        advantages[trained] = each.advantage if content.advantage is None else content.advantage
        zeros = [0.0] * size
        result.append(
            Rollout(
                tokens=content.tokens.tolist(),
                weights=weights.tolist(),
                advantages=advantages.tolist(),
                old=zeros,
                ref=zeros,
                sampling=zeros,
                group=str(each.group_id),
                reward=each.reward or 0.0,
                temperatures=[SMALL.temperature] * size,
                weight=each.weight,
            )
        )
    return result


@pytest.mark.parametrize(
    ("estimator", "loss", "capacity", "leaf_weights"),
    [
        ("treepo", "grpo", 12, False),
        ("treerpo", "dapo", 12, False),
        ("grpo", "grpo", 4096, False),
        pytest.param("grpo", "grpo", 12, True, marks=pytest.mark.slow),
        ("grpo", "gspo", 12, True),
    ],
)
def test_the_gradient_of_a_step_is_that_of_each_rollout_alone(
    estimator: str, loss: str, capacity: int, leaf_weights: bool, two_steps: TwoSteps
) -> None:
    settings = replace(SMALL, estimator=estimator, loss=loss, capacity=capacity, leaf_weights=leaf_weights)
    policy = load_model(settings.model, dtype=torch.float64)
    keep_norms(policy.model)
    trie = credit(two_steps.trees[0][:5], settings)
    means = accumulate(policy, trie, settings)
    actual = gradients(policy.model)
    assert means["tokens"] < means["tokens_flat"]

    policy.model.zero_grad()
    policy.causal.set_attn_implementation("sdpa")
    if leaf_weights:
        trie, _ = weigh_leaves(trie, fallback_leaves=False)
        assert len(set(trie.trajectories["weight"].to_pylist())) > 1
    alone = step_loss(policy.model, rollouts_of(trie), choose_objective(loss), has_old=False)
    torch.autograd.backward(alone)
    assert means["loss"] == pytest.approx(alone.item(), rel=1e-9, abs=1e-12)
    assert worst_error(actual, gradients(policy.model)) < 1e-9


def check_steps(steps: TwoSteps, *, gap: float) -> None:
    """Check that each step has a finite loss, changes all weights, and samples from the weights before it."""
    assert steps.versions == [{""}, {"1"}]
    for i, means in enumerate(steps.figures):
        assert np.isfinite(list(means.values())).all()
        assert means["grad_norm"] > 0
        assert means["sampler_gap"] < gap
        changed = zip(steps.weights[i], steps.weights[i + 1], strict=True)
        assert not any(torch.equal(before, after) for before, after in changed)


def test_the_engine_samples_from_the_weights_of_the_last_step(two_steps: TwoSteps) -> None:
    check_steps(two_steps, gap=1e-5)
    # The policy of the first step gives the samples of the second one other log-probabilities.
    policy = load_model(SMALL.model)
    for weights, first in zip(policy.model.parameters(), two_steps.weights[0], strict=True):
        weights.data.copy_(first)
    assert accumulate(policy, credit(two_steps.trees[1], SMALL), SMALL)["sampler_gap"] > 0.05


def run_example(arguments: list[str], out: Path) -> None:
    """Run the example as a script, with its output in `out`. It fails if it imports a module that it must not need."""
    assert not {"polars", "ortools"} & sys.modules.keys()
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not {"polars", "ortools"} & sys.modules.keys()


@pytest.mark.slow
def test_a_step_runs_as_a_script_without_polars_and_ortools(tmp_path: Path) -> None:
    options = "--steps 1 --warm-up 3 --problems 12 --eval-every 1 --eval-problems 4 --leaf-weights".split()
    save = tmp_path / "saved"
    process = PROCESSES.Process(target=run_example, args=([*options, "--save", str(save)], tmp_path / "out"))
    process.start()
    process.join()
    assert process.exitcode == 0
    records: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1]
    assert all(0 <= record["pass_rate"] <= 1 for record in records)
    for record in records[1:]:
        assert record["mixed"] > 0
        assert np.isfinite([record[name] for name in ("loss", "entropy", "grad_norm", "reward")]).all()
        assert record["sampler_gap"] < 1e-5
        assert record["tokens"] < record["tokens_flat"]
    trained, fresh = (load_model(model).model.state_dict() for model in (save, SMALL.model))
    assert all(not torch.equal(trained[name], fresh[name]) for name in fresh)


def test_the_page_lists_the_fields_of_a_record(two_steps: TwoSteps) -> None:
    section = (ROOT / "docs" / "tree-rl.md").read_text().partition("\n### In one process\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    own = {"step", "sample_seconds", "train_seconds", "pass_rate"}
    assert listed | own == {*two_steps.figures[0], *figures(two_steps.trees[0]), "mixed", *own}


def test_the_reward_is_the_share_of_the_answer_that_the_text_begins_with() -> None:
    assert [reward(text, "12\n") for text in ("", "2", "1", "17\n", "12", "12\n", "12\n\n")] == pytest.approx(
        [0, 0, 1 / 3, 1 / 3, 2 / 3, 1, 1]
    )


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 300
