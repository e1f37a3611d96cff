"""`pack --leaf-weights`: rows of sampled trees whose gradient is that of independent rollouts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from support.command_line import Run
from support.markov_law import MarkovLaw
from support.refusal import refusal
from support.sampled_trees import rollouts_of_tree, sample_trees, three_tokens
from support.strategies import make
from treepack import PackOptions, check, pack_trie, plan_packing
from treepack.files.manifest import read_manifest
from treepack.pack.files import read_rows
from treepack.pack.leaf_weights import LEFT_OUT
from treepack.pack.row import Row
from treepack.rl.group_tree import group_codes
from treepack.rl.leaf_weights import leaf_weights
from treepack.rollout.options import TreeOptions
from treepack.trajectory import Float64, Int32, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import write_trie
from treepack.trie.trie import Trie, trajectories_of

WITH_FALLBACK = TreeOptions(width=8, max_tokens=20, segment=2, depth=8, first_forks=2)
USED = PackOptions(capacity=64, leaf_weights=True)


def sampled(options: TreeOptions = WITH_FALLBACK, *, number: int = 6) -> Trie:
    trees = sample_trees(MarkovLaw(three_tokens(), stop=0), options, [[1], [2]] * (number // 2), seed=8)
    return build_trie([rollout for tree in trees for rollout in rollouts_of_tree(tree)])


@pytest.fixture(scope="module")
def trie() -> Trie:
    return sampled()


@pytest.fixture
def directory(trie: Trie, tmp_path: Path) -> Path:
    (tmp_path / "trie").mkdir()
    write_trie(trie, tmp_path / "trie")
    return tmp_path / "trie"


def same(a: Row, b: Row) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Row) if f.name != "terms")


def by_hand(trie: Trie, *, fallback_leaves: bool) -> Trie:
    """The trie of the same rollouts with the weights that they should have, without rollouts of weight 0."""
    weights, group = leaf_weights(trie), group_codes(trie)
    assert weights is not None
    factor = weights.all if fallback_leaves else weights.before_fallback
    made = []
    for i, one in enumerate(trajectories_of(trie)):
        if factor[i] > 0:
            made.append(replace(one, weight=one.weight * factor[i] * (group == group[i]).sum()))
    return build_trie(made)


@pytest.mark.parametrize("normalize", ["token", "trajectory", "group"])
@pytest.mark.parametrize("semantics", ["branch", "once"])
@pytest.mark.parametrize("fallback_leaves", [False, True])
def test_rows_are_those_of_trajectories_with_these_weights(
    trie: Trie, normalize: str, semantics: str, fallback_leaves: bool
) -> None:
    plain = PackOptions(capacity=64, normalize=normalize, semantics=semantics)
    options = replace(plain, leaf_weights=True, fallback_leaves=fallback_leaves)
    rows, expected = (
        list(plan_packing(trie, options)),
        list(plan_packing(by_hand(trie, fallback_leaves=fallback_leaves), plain)),
    )
    assert len(rows) == len(expected)
    assert all(map(same, rows, expected))
    assert any(len(set(row.loss_weight.tolist())) > 2 for row in rows)


def test_a_star_of_equal_weights_is_unchanged() -> None:
    star = [make(f"s{i}", [1, 2 + i], metadata={"leaf_weight": 0.25}) for i in range(4)]
    trie = build_trie(star)
    rows, plain = (list(plan_packing(trie, options)) for options in (USED, PackOptions(capacity=64)))
    assert len(rows) == 1
    assert same(rows[0], plain[0])


def test_leaves_of_a_fallback_are_left_out_and_counted(directory: Path, trie: Trie, tmp_path: Path) -> None:
    weights = leaf_weights(trie)
    assert weights is not None
    num_left_out = int((weights.before_fallback == 0).sum())
    assert 0 < num_left_out < trie.num_trajectories
    summary = pack_trie(directory, tmp_path / "packed", USED)
    assert summary.counts == {LEFT_OUT: num_left_out}
    assert read_manifest(tmp_path / "packed")["options"]["leaf_weights"] is True
    names = [name for row in read_rows(tmp_path / "packed") for name in row.trajectory_ids]
    assert len(names) == trie.num_trajectories - num_left_out
    whole = pack_trie(directory, tmp_path / "whole", replace(USED, fallback_leaves=True))
    assert whole.counts == {}
    assert sum(len(row.trajectory_ids) for row in read_rows(tmp_path / "whole")) == trie.num_trajectories
    for packed in ("packed", "whole"):
        assert check(tmp_path / packed)["against_trie"] is True


def test_other_manifests_do_not_mention_leaf_weights(directory: Path, tmp_path: Path) -> None:
    options = pack_trie(directory, tmp_path / "packed", PackOptions(capacity=64)).manifest["options"]
    assert not {"leaf_weights", "fallback_leaves"} & set(options)


def test_plans_are_for_the_trajectories_that_are_left(directory: Path, tmp_path: Path, treepack: Run) -> None:
    plan = tmp_path / "plan.jsonl"
    arguments = ("pack", directory, "--capacity", 64, "--leaf-weights")
    first = treepack(*arguments, "--out", tmp_path / "first", "--save-plan", plan)
    assert first.status == 0, first.err
    assert LEFT_OUT in first.out + first.err
    again = treepack("pack", directory, "--leaf-weights", "--plan", plan, "--out", tmp_path / "again")
    assert again.status == 0, again.err
    assert all(map(same, read_rows(tmp_path / "first"), read_rows(tmp_path / "again")))
    other = treepack("pack", directory, "--plan", plan, "--out", tmp_path / "other")
    assert other.status == 1
    assert "in no row" in other.err


def test_prepare_passes_leaf_weights_to_both_commands(treepack: Run, tmp_path: Path) -> None:
    line = '{"id":"%s","group_id":"g","prompt_token_ids":[7],"response_ids":[%d,2],"reward":%d,"leaf_weight":%g}\n'
    rows = (("a", 1, 1, 0.5), ("b", 3, 0, 0.25), ("c", 4, 0, 0.25))
    (tmp_path / "rollouts.jsonl").write_text("".join(line % row for row in rows))
    result = treepack(
        "prepare", tmp_path / "rollouts.jsonl", "--advantages", "dr-grpo", "--leaf-weights", "--out", tmp_path / "out"
    )
    assert result.status == 0, result.err
    (row,) = read_rows(tmp_path / "out" / "packed")
    assert row.terms is not None
    assert row.terms.advantage is not None
    of_weight = dict(zip(row.terms.weight.tolist(), row.terms.advantage.tolist(), strict=True))
    assert of_weight == {1.5: 0.5, 0.75: -0.5}  # the weighted mean is 1/2


def test_options_and_tries_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    assert "fallback_leaves selects among leaf weights; give --leaf-weights too" in refusal(
        PackOptions, fallback_leaves=True
    )
    assert "no rollout of the trie has a leaf_weight; sample the rollouts with" in refusal(
        plan_packing, build_trie([make("a", [1, 2])]), USED
    )


# Token 0 stops. After the prompt 3, token 1 ends a response at once and token 2 seldom; the first kind succeeds.
LOGITS = np.log(np.array([[1.0, 0, 0, 0], [0.9, 0.1, 0, 0], [0.2, 0, 0.8, 0], [0, 0.4, 0.6, 0]]) + 1e-300)
DIRECTION = np.array([[0.0, 0, 0, 0], [0.0, 0, 0, 0], [0.5, 0, -0.5, 0], [0, 1.0, -1.0, 0]])


def policy(logits: Float64) -> MarkovLaw:
    powers = np.exp(logits)
    return MarkovLaw(powers / powers.sum(axis=1, keepdims=True), stop=0)


def reward_of(response: Int32) -> float:
    return float(len(response) > 1 and response[-2] == 1)


def slopes(rollouts: list[Trajectory], options: PackOptions) -> Float64:
    """Policy gradient along DIRECTION of each group, from the terms of packed rows: sum of weight * R * d log p / n."""
    law = policy(LOGITS)
    # d log p(t | s) along D is D[s, t] minus its mean under p(. | s).
    slope = DIRECTION - (law.transition * DIRECTION).sum(axis=1, keepdims=True)
    sums: dict[str, float] = defaultdict(float)
    for row in plan_packing(build_trie([replace(one, advantage=one.reward) for one in rollouts]), options):
        terms = row.terms
        assert terms is not None
        assert terms.advantage is not None
        before = row.input_ids[row.parent[terms.token]]
        values = terms.weight * terms.advantage * slope[before, row.input_ids[terms.token]]
        per_trajectory = np.bincount(terms.trajectory, values, minlength=len(row.trajectory_groups))
        for group, value in zip(row.trajectory_groups, per_trajectory.tolist(), strict=True):
            sums[group] += value
    sizes = Counter(str(one.group_id) for one in rollouts)
    return np.array([value / sizes[group] for group, value in sums.items()])


@pytest.mark.parametrize("fallback", ["random", "none"])
def test_the_policy_gradient_of_rows_is_unbiased(fallback: str) -> None:
    options = TreeOptions(width=8, max_tokens=200, segment=2, depth=100, first_forks=2, fallback=fallback)
    trees = sample_trees(policy(LOGITS), options, [[3]] * 120, seed=6, reward=reward_of)
    rollouts = [rollout for tree in trees for rollout in rollouts_of_tree(tree)]
    step = 1e-5
    above, below = (policy(LOGITS + sign * step * DIRECTION).probability_of_last(3, 1) for sign in (1, -1))
    errors = []
    for used in (True, False):
        found = slopes(rollouts, PackOptions(capacity=65536, method="contiguous", leaf_weights=used))
        assert len(found) == len(trees)
        deviation = found.std(ddof=1) / np.sqrt(len(found))
        errors.append(abs(found.mean() - (above - below) / (2 * step)) / deviation)
    assert errors[0] < 3
    assert errors[1] > 3
