"""Gradients of the credit alignment against each rollout alone, and its figures against explicit vectors."""

import dataclasses
import json
import sys
from pathlib import Path

import credit
import credit_tables
import numpy as np
import pytest
import torch
from credit_gradients import ESTIMATORS, estimator_gradient, reference_halves, trie_of
from curves_arms import tree_shape
from learner import Learner, start_learner
from policy import make_policy
from tasks import Task, make_task, sample_trees, tree_rewards

from support.reproduction_learners import even_start, save_small_policy
from treepack.errors import TreepackError
from treepack.rollout.tree import Tree, weights_of_leaves
from treepack.trajectory import Float64

LEVELS = (2,)


def short_task() -> Task:
    return dataclasses.replace(make_task("steps", levels=LEVELS), start=even_start, max_tokens=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_policy(tmp_path_factory.mktemp("reproduction") / "policy")


@pytest.fixture(scope="module")
def learner(folder: Path) -> Learner:
    return dataclasses.replace(start_learner(folder, device="cpu", rate=0.0, rows=64), task=short_task())


def sampled(learner: Learner, *, seed: int, is_tree: bool) -> list[Tree]:
    shape = tree_shape(learner.task, 4) if is_tree else learner.task.independent(3)
    return sample_trees(learner.task, learner.task.queries(2, seed=5), learner.engine, shape, seed=seed)


def gradient_alone(tree: Tree, advantages: Float64) -> torch.Tensor:
    """Return the gradient of sum_i A_i sum_t log p(token t of leaf i), each leaf alone through the plain model."""
    model = make_policy("test", seed=3)
    for leaf, advantage in zip(tree.leaves, advantages.tolist(), strict=True):
        ids = torch.from_numpy(leaf.ids().astype(np.int64))[None]
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (float(advantage) * logprobs[tree.root.end - 1 :].sum()).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.mark.parametrize("weighted", [False, True])
def test_a_gradient_from_trees_is_that_of_each_rollout_alone(learner: Learner, weighted: bool) -> None:
    trees = sampled(learner, seed=1, is_tree=True)
    expected = torch.zeros(())
    for tree in trees:
        reward = tree_rewards(tree)
        weights = weights_of_leaves(tree)[1] if weighted else np.full(len(reward), 1 / len(reward))
        expected = expected + gradient_alone(tree, weights * (reward - weights @ reward)) / len(trees)
    name = "dr-grpo, leaf weights" if weighted else "dr-grpo"
    actual = estimator_gradient(learner.policy, trie_of(trees), ESTIMATORS[name], segment="6", capacity=256)
    assert torch.count_nonzero(actual) > 0
    # float32 has a precision of 6e-8; sums over some hundred terms of both signs lose two digits.
    assert (actual - expected).norm() < 1e-5 * actual.norm()


def test_each_half_of_the_reference_has_the_baseline_of_the_other(learner: Learner) -> None:
    halves = [sampled(learner, seed=seed, is_tree=False) for seed in (1, 2)]
    means = [[float(np.mean(tree_rewards(tree))) for tree in half] for half in halves]
    actual, rates = reference_halves(
        learner.policy, iter([([one], [two]) for one, two in zip(*halves, strict=True)]), capacity=256
    )
    assert rates == pytest.approx(np.mean(means, axis=0))
    for number, half in enumerate(halves):
        expected = torch.zeros(())
        for tree, baseline in zip(half, means[1 - number], strict=True):
            reward = tree_rewards(tree)
            expected = expected + gradient_alone(tree, (reward - baseline) / len(reward)) / 2
        assert (actual[number] - expected).norm() < 1e-5 * actual[number].norm()


@pytest.mark.slow
def test_the_limits_are_those_of_the_exact_gradient_of_a_choice_of_one_token(learner: Learner) -> None:
    task = dataclasses.replace(short_task(), max_tokens=1)
    chooser = dataclasses.replace(learner, task=task)
    (query,) = task.queries(1, seed=5)
    model = make_policy("test", seed=3)
    probabilities = model(input_ids=torch.from_numpy(query.prompt.astype(np.int64))[None]).logits[0, -1].softmax(-1)
    # The expected reward: an even token is right.
    probabilities[::2].sum().backward()
    exact = torch.cat([each.grad.flatten() for each in model.parameters()])
    one, other = (sample_trees(task, [query], chooser.engine, task.independent(1024), seed=seed) for seed in (1, 2))
    halves, _ = reference_halves(learner.policy, iter([(one, other)]), capacity=16_384)
    vectors = torch.stack([halves.mean(0), exact])
    assert float(torch.cosine_similarity(vectors[0], vectors[1], dim=0)) > 0.95
    samples = [
        sample_trees(task, [query], chooser.engine, task.independent(4), seed=100 + seed)[0] for seed in range(256)
    ]
    estimated = torch.stack(
        [
            estimator_gradient(
                learner.policy, trie_of([tree]), ESTIMATORS["independent, dr-grpo"], segment="6", capacity=256
            )
            for tree in samples
        ]
    )
    products = credit_tables.Products(
        (estimated @ estimated.T).double().numpy(), (halves @ estimated.T).double().numpy(), 4.0
    )
    cosine, scale, _ = credit_tables.limits((halves @ halves.T).double().numpy(), products)
    # Standard errors are 0.04 and 0.1. The baseline of a group of 4 contains the rollout itself.
    assert cosine == pytest.approx(1.0, abs=0.15)
    assert scale == pytest.approx(1 - 1 / 4, abs=0.25)


def test_the_figures_from_products_are_those_of_the_vectors() -> None:
    rng = np.random.default_rng(0)
    halves, vectors = rng.normal(size=(2, 50)) + 1, rng.normal(size=(8, 50)) + 0.5
    products = credit_tables.Products(vectors @ vectors.T, halves @ vectors.T, 10.0)
    reference = halves.mean(axis=0)
    means = vectors.reshape(4, 2, 50).mean(axis=1)
    expected = means @ reference / np.linalg.norm(means, axis=1) / np.linalg.norm(reference)
    assert credit_tables.block_cosines(halves @ halves.T, products, 2) == pytest.approx(expected, rel=1e-12)
    assert credit_tables.block_sizes(8) == [1, 2]


def test_the_limits_have_no_bias_from_noise() -> None:
    rng = np.random.default_rng(1)
    exact = np.concatenate([np.full(2000, 0.1), np.zeros(2000)])
    tilted = np.full(4000, 0.1)  # 45 degrees from `exact`
    halves, vectors = exact + rng.normal(size=(2, 4000)) * 0.05, 2 * tilted + rng.normal(size=(64, 4000)) * 0.4
    products = credit_tables.Products(vectors @ vectors.T, halves @ vectors.T, 10.0)
    cosine, scale, variance = credit_tables.limits(halves @ halves.T, products)
    assert cosine == pytest.approx(np.sqrt(0.5), abs=0.02)
    assert scale == pytest.approx(2.0, abs=0.1)
    assert variance == pytest.approx(4.0, abs=0.2)  # 4000 * 0.16 / (4000 * 0.04)


def test_a_run_that_was_cut_continues_with_the_missing_estimators(learner: Learner, tmp_path: Path) -> None:
    sizes = dataclasses.replace(credit.DRY_SIZES, rollouts=8, trees=2)
    path, names = tmp_path / "credit-steps.jsonl", list(ESTIMATORS)
    reference, known = credit.start_record(path, learner, sizes)
    assert known == set()
    records = list(credit.measure(learner, reference, sizes, names))
    assert [record["estimator"] for record in records] == names
    assert np.isfinite([record["gram"] for record in records]).all()
    lines = [json.dumps(record) + "\n" for record in records]
    with path.open("a") as file:
        file.writelines([*lines[:5], lines[5][:40]])
    reference, known = credit.start_record(path, learner, sizes)
    assert known == set(names[:5])
    again = list(credit.measure(learner, reference, sizes, names[5:]))
    assert [record["dots"] for record in again] == [record["dots"] for record in records[5:]]
    with path.open("a") as file:
        file.writelines(lines[5:])
    (text,) = credit_tables.write_report(tmp_path)
    assert all(f"| {name} |" in text for name in ESTIMATORS)
    assert (tmp_path / "credit-steps.svg").read_text().startswith("<?xml")
    with pytest.raises(TreepackError, match="was measured with the sizes"):
        credit.start_record(path, learner, dataclasses.replace(sizes, trees=3))


def test_a_policy_that_solves_nothing_is_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["credit.py", "--policy", str(folder), "--out", str(tmp_path / "out"), "--dry-run", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=r"only 0 of 16 prompts have a pass rate from 0.1 to 0.9"):
        credit.main()
