"""Targets, effective ratios and pass rates of sampled trees: weighted by default, and so without bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Run
from support.sampled_trees import rollouts_of_tree, sample_trees
from support.strategies import make
from treepack.research.pros.selection import effective_counts, read_state
from treepack.research.trace.targets import anchors, binary_rewards, effective_ratios, recursive_targets, trie_targets
from treepack.rl.leaf_weights import LeafWeights, leaf_weights
from treepack.rollout.options import TreeOptions
from treepack.rollout.simulated import MarkovLaw
from treepack.rollout.tree import Tree
from treepack.trajectory import Int32, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

# Token 0 stops. After the prompt 3, token 1 ends a response at once and token 2 seldom; the first kind succeeds.
LAW = MarkovLaw(np.array([[1.0, 0, 0, 0], [0.9, 0.1, 0, 0], [0.2, 0, 0.8, 0], [0, 0.4, 0.6, 0]]), stop=0)
OPTIONS = {
    "fallback": TreeOptions(width=8, max_tokens=200, segment=2, depth=100, first_forks=2),
    "none": TreeOptions(width=8, max_tokens=200, segment=2, depth=100, first_forks=2, fallback="none"),
}


def succeeds(response: Int32) -> float:
    return float(len(response) > 1 and response[-2] == 1)


def sampled(kind: str, number: int, seed: int) -> list[Tree]:
    return sample_trees(LAW, OPTIONS[kind], [[3]] * number, seed=seed, reward=succeeds)


def forest(trees: list[Tree]) -> tuple[Trie, LeafWeights]:
    trie = build_trie([rollout for tree in trees for rollout in rollouts_of_tree(tree)])
    weights = leaf_weights(trie)
    assert weights is not None
    return trie, weights


@pytest.mark.parametrize("kind", OPTIONS)
def test_weighted_targets_of_prompts_are_unbiased_and_plain_ones_are_not(kind: str) -> None:
    trie, weights = forest(sampled(kind, 80, 2))
    prefixes, reward = anchors(trie, segment="recorded"), binary_rewards(trie)
    exact = LAW.probability_of_last(3, 1)
    errors = []
    for given in (weights, None):
        target = recursive_targets(prefixes.tree, reward, given)[0][: prefixes.tree.num_groups]
        errors.append(abs(target.mean() - exact) / (target.std(ddof=1) / np.sqrt(len(target))))
    assert errors[0] < 3
    assert errors[1] > 3


def test_targets_of_nodes_are_weighted_means_of_the_leaves_below() -> None:
    trie, weights = forest(sampled("fallback", 15, 2))
    reward, prefixes = binary_rewards(trie), anchors(trie, segment="recorded")
    tree, target = prefixes.tree, recursive_targets(prefixes.tree, reward, weights)[0]
    num_by_fallback = 0
    for node in range(tree.num_inner):
        below = np.unique(tree.owner[tree.node == node])
        weight = weights.before_fallback[below]
        if not weight.any():
            num_by_fallback += 1
            weight = weights.all[below]
        assert target[node] == pytest.approx(np.average(reward[below], weights=weight), abs=1e-12)
    assert num_by_fallback > 0
    assert target[tree.num_inner :].tolist() == reward.tolist()


def test_targets_of_trie_nodes_are_weighted_means_of_the_leaves_below() -> None:
    trie, weights = forest(sampled("fallback", 15, 2))
    reward, target = binary_rewards(trie), trie_targets(trie, binary_rewards(trie), weights)
    scaled = weights.times_size(anchors(trie, segment="recorded").group)
    for node in range(trie.num_nodes):
        below = np.flatnonzero((trie.end_node >= node) & (trie.end_node < trie.node_end[node]))
        weight = scaled.before_fallback[below]
        weight = weight if weight.any() else scaled.all[below]
        assert target[node] == pytest.approx(np.average(reward[below], weights=weight), abs=1e-12)


def equal_weights(trie: Trie) -> LeafWeights:
    size = np.bincount(anchors(trie, segment="recorded").group)[anchors(trie, segment="recorded").group]
    return LeafWeights(1 / size, 1 / size)


def test_equal_weights_change_nothing() -> None:
    trie, _ = forest(sampled("fallback", 15, 3))
    reward, prefixes, weights = binary_rewards(trie), anchors(trie, segment="recorded"), equal_weights(trie)
    plain = recursive_targets(prefixes.tree, reward, None)[0]
    assert recursive_targets(prefixes.tree, reward, weights)[0] == pytest.approx(plain, abs=1e-12)
    assert trie_targets(trie, reward, weights) == pytest.approx(trie_targets(trie, reward, None), abs=1e-12)
    ratios, expected = (effective_ratios(prefixes, reward, given) for given in (weights, None))
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(expected[name], abs=1e-12)


def test_effective_ratios_weigh_rollouts_and_count_anchors() -> None:
    # 7 -+- 1 -+- 2   a 1/4  1        the prompt and `7 1` have both outcomes; `7 5` has one
    #    |     '- 3   b 1/4  0        of_rollouts of prefixes: 1/2 of 1, unweighted 2 of 4
    #    '- 5 -+- 6   c 1/4  1
    #          '- 8   d 1/4  1        with the weights 1/8, 1/8, 3/8, 3/8: 1/4 of 1
    def trie(low: float, high: float) -> Trie:
        tokens = {"a": [7, 1, 2], "b": [7, 1, 3], "c": [7, 5, 6], "d": [7, 5, 8]}
        weight = {"a": low, "b": low, "c": high, "d": high}
        return build_trie(
            [
                make(name, ids, reward=float(name != "b"), metadata={"segments": [1, 2], "leaf_weight": weight[name]})
                for name, ids in tokens.items()
            ]
        )

    for low, high, share in ((0.25, 0.25, 0.5), (0.125, 0.375, 0.25)):
        made = trie(low, high)
        ratios = effective_ratios(anchors(made, segment="recorded"), binary_rewards(made), leaf_weights(made))
        assert ratios["root"] == (1.0, 1.0, 1)
        assert list(ratios["prefix"]) == [pytest.approx(share), 0.5, 2]


def test_effective_counts_of_equal_weights_are_one_each() -> None:
    part = np.array([0, 0, 0, 1])
    assert effective_counts(np.array([0.2, 0.2, 0.2, 1.0]), part).tolist() == pytest.approx([1, 1, 1, 1])
    assert effective_counts(np.array([0.5, 0.25, 0.25, 0.0]), part).tolist() == pytest.approx([4 / 3, 2 / 3, 2 / 3, 0])


def record(one: Trajectory) -> dict[str, Any]:
    tokens = one.content.tokens.tolist()  # type: ignore[union-attr]
    ids = {"prompt_token_ids": tokens[:1], "response_ids": tokens[1:]}
    return {"rollout_id": one.trajectory_id, "group_id": one.group_id, "reward": one.reward, **ids, **one.metadata}


def write_records(rollouts: list[Trajectory], path: Path) -> Path:
    path.write_text("".join(json.dumps(record(one)) + "\n" for one in rollouts))
    return path


def test_commands_use_the_weights_of_records(treepack: Run, tmp_path: Path) -> None:
    rollouts = [
        make("a", [7, 1, 2], reward=1.0, metadata={"leaf_weight": 0.5, "segments": [1]}),
        make("b", [7, 3, 2], reward=0.0, metadata={"leaf_weight": 0.25, "segments": [1, 2]}),
        make("c", [7, 3, 4], reward=0.0, metadata={"leaf_weight": 0.25, "segments": [1, 2]}),
    ]
    path = write_records(rollouts, tmp_path / "rollouts.jsonl")
    assert treepack("build-trie", path, "--out", tmp_path / "trie").status == 0
    shown = treepack("select", "update", tmp_path / "state.parquet", "--rollouts", tmp_path / "trie", "--add-groups")
    assert shown.status == 0, shown.err
    assert "effective rollouts" in shown.out
    state = read_state(tmp_path / "state.parquet")
    assert state.tried.tolist() == pytest.approx([1 / (3 / 8)])
    assert (state.passed / state.tried).tolist() == pytest.approx([0.5])
    stats = treepack("stats", tmp_path / "trie", "--effective-ratio", "--segment", "recorded", "--json")
    assert stats.status == 0, stats.err
    ratio = json.loads(stats.out)["effective_ratio"]
    assert ratio["root"] == {"of_rollouts": 1.0, "of_anchors": 1.0, "num_anchors": 1}
    assert ratio["prefix"] == {"of_rollouts": 0.0, "of_anchors": 0.0, "num_anchors": 1}
