"""Advantages with leaf weights: equality with plain loops, equal weights as before, refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from support.markov_law import MarkovLaw
from support.paths import ROOT
from support.refusal import refusal
from support.sampled_trees import rollouts_of_tree, sample_trees, three_tokens
from support.strategies import make
from treepack import PackOptions, plan_packing
from treepack.rl.advantages.advantage_options import EPSILON, AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages
from treepack.rl.advantages.flat import grpo
from treepack.rl.advantages.tree import tree_grpo_segments, treerl, treerpo
from treepack.rl.leaf_weights import LeafWeights, leaf_weights
from treepack.rl.segments import SegmentTree
from treepack.rollout.options import TreeOptions
from treepack.trajectory import Float64, Int32, Int64
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

OPTIONS = TreeOptions(width=8, max_tokens=20, segment=2, depth=8, first_forks=2)
ALL = [
    AdvantageOptions("grpo"),
    AdvantageOptions("grpo", std="batch"),
    AdvantageOptions("dr-grpo"),
    AdvantageOptions("rloo"),
    AdvantageOptions("reinforce++"),
    AdvantageOptions("treepo", reject_equal=False),
    AdvantageOptions("treepo", std="batch", size_weighted=True, reject_equal=False),
    AdvantageOptions("treepo", without_root=True, reject_subgroups=True, reject_equal=False),
    AdvantageOptions("treerpo"),
    AdvantageOptions("tree-grpo"),
    AdvantageOptions("tree-grpo", per_segment=True),
    AdvantageOptions("treerl"),
    AdvantageOptions("treerl", leaf_scaled=True),
]


def score(response: Int32) -> float:
    return float(response.sum() % 3)


@pytest.fixture(scope="module")
def forest() -> Trie:
    trees = sample_trees(MarkovLaw(three_tokens(), stop=0), OPTIONS, [[1], [2]] * 4, seed=4, reward=score)
    rollouts = [rollout for tree in trees for rollout in rollouts_of_tree(tree)]
    return build_trie([replace(one, step=int(str(one.group_id)[1:]) % 2) for one in rollouts])


def weights_of(trie: Trie) -> LeafWeights:
    weights = leaf_weights(trie)
    assert weights is not None
    return weights


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


def deviation(values: Sequence[float], weights: Sequence[float]) -> float:
    middle, total = mean(values, weights), math.fsum(weights)
    squares = math.fsum(w * (v - middle) ** 2 for v, w in zip(values, weights, strict=True))
    found = math.sqrt(squares / (total - math.fsum(w * w for w in weights) / total))
    return found if found > 1e-9 else 0.0


def over(value: float, by: float) -> float:
    return value / (by + EPSILON) if by else 0.0


class Loops:
    """Weighted means and deviations of the leaves below a node, leaf by leaf."""

    def __init__(self, tree: SegmentTree, reward: Float64, weights: LeafWeights) -> None:
        self.tree, self.reward, self.weights = tree, reward, weights
        self.below = {node: sorted(set(tree.owner[tree.node == node].tolist())) for node in set(tree.node.tolist())}

    def weight(self, leaves: Sequence[int], at_least: int = 2) -> list[float]:
        before: list[float] = self.weights.before_fallback[leaves].tolist()
        everything: list[float] = self.weights.all[leaves].tolist()
        return before if sum(w > 0 for w in before) >= at_least else everything

    def mean(self, node: int, at_least: int = 2) -> float:
        leaves = self.below[node]
        return mean(self.reward[leaves].tolist(), self.weight(leaves, at_least))

    def deviation(self, node: int) -> float:
        leaves = self.below[node]
        return deviation(self.reward[leaves].tolist(), self.weight(leaves)) if len(leaves) > 1 else 0.0

    def path(self, leaf: int) -> list[int]:
        return [int(node) for node in self.tree.node[self.tree.owner == leaf]]

    def grpo(self, leaf: int) -> float:
        root = self.path(leaf)[0]
        return over(self.reward[leaf] - self.mean(root), self.deviation(root))

    def treepo(self, leaf: int) -> float:
        root, pairs, weights = self.path(leaf)[0], {}, []
        of_group = dict(zip(self.below[root], self.weight(self.below[root]), strict=True))
        for other in self.below[root]:
            pairs[other] = [
                self.reward[other] - self.mean(node) for node in self.path(other)[:-1] if len(self.below[node]) > 1
            ]
            weights += [of_group[other]] * len(pairs[other])
        spread = deviation([apart for listed in pairs.values() for apart in listed], weights)
        return over(math.fsum(pairs[leaf]) / len(pairs[leaf]), spread)

    def tree_grpo(self, leaf: int) -> float:
        deepest = [node for node in self.path(leaf)[:-1] if len(self.below[node]) > 1][-1]
        return self.grpo(leaf) + over(self.reward[leaf] - self.mean(deepest), self.deviation(deepest))


def advantages(trie: Trie, options: AdvantageOptions) -> tuple[Float64, SegmentTree]:
    estimates = estimate_advantages(trie, replace(options, leaf_weights=True))
    assert estimates.tree is not None
    assert len(estimates.kept) == trie.num_trajectories
    return estimates.values, estimates.tree


def test_flat_and_trajectory_estimators_equal_plain_loops(forest: Trie) -> None:
    reward = forest.trajectories["reward"].to_numpy()
    values, tree = advantages(forest, AdvantageOptions("treepo", reject_equal=False))
    loops, number = Loops(tree, reward, weights_of(forest)), range(forest.num_trajectories)
    assert values == pytest.approx([loops.treepo(i) for i in number], abs=1e-9)
    values, _ = advantages(forest, AdvantageOptions("tree-grpo"))
    assert values == pytest.approx([loops.tree_grpo(i) for i in number], abs=1e-9)
    values = estimate_advantages(forest, AdvantageOptions("grpo", leaf_weights=True)).values
    assert values == pytest.approx([loops.grpo(i) for i in number], abs=1e-9)
    values = estimate_advantages(forest, AdvantageOptions("rloo", leaf_weights=True)).values
    for i in number:
        leaves = loops.below[loops.path(i)[0]]
        weight = dict(zip(leaves, loops.weight(leaves), strict=True))
        others = [leaf for leaf in leaves if leaf != i]
        baseline = mean(reward[others].tolist(), [weight[leaf] for leaf in others])
        assert values[i] == pytest.approx(reward[i] - baseline, abs=1e-9)


def test_segment_estimators_equal_plain_loops(forest: Trie) -> None:
    reward = forest.trajectories["reward"].to_numpy()
    _, tree = advantages(forest, AdvantageOptions("tree-grpo"))
    weights = weights_of(forest)
    loops = Loops(tree, reward, weights)
    by_treerl, by_segment = treerl(tree, reward, weights=weights), tree_grpo_segments(tree, reward, weights=weights)
    siblings = np.bincount(tree.parent[tree.parent >= 0], minlength=len(tree.parent))
    for k, (owner, node) in enumerate(zip(tree.owner.tolist(), tree.node.tolist(), strict=True)):
        head = node
        while tree.parent[head] >= 0 and siblings[tree.parent[head]] == 1:
            head = int(tree.parent[head])
        root, up = loops.path(owner)[0], int(tree.parent[head])
        if up < 0:
            assert (by_treerl[k], by_segment[k]) == (0.0, pytest.approx(loops.grpo(owner), abs=1e-9))
            continue
        value = loops.mean(head, 1)
        assert by_treerl[k] == pytest.approx(2 * value - loops.mean(root, 1) - loops.mean(up, 1), abs=1e-9)
        apart = over(reward[owner] - loops.mean(up), loops.deviation(up))
        assert by_segment[k] == pytest.approx(loops.grpo(owner) + apart, abs=1e-9)


def test_treerpo_leaves_out_the_children_of_a_fallback() -> None:
    # 7 -+- 1 -+- 2   a  1        e and d came from a fallback. Values: [7 1] = (1 + 0) / 2, without e; [7] = 1/2.
    #    |     |- 3   b  0        Compared at [7 1]: a and b alone, so 1/2 over 0.7071; e is 0 - 1/2 over the same.
    #    |     '- 4   e  0        At [7]: [7 1] and c, 1/2 and 1; d is 1/4 below their mean 3/4.
    #    |- 5         c  1
    #    '- 6         d  1/2
    rows = {"a": ([7, 1, 2], 1.0, 0.25), "b": ([7, 1, 3], 0.0, 0.25), "e": ([7, 1, 4], 0.0, 0.0)}
    rows |= {"c": ([7, 5, 5], 1.0, 0.5), "d": ([7, 6, 6], 0.5, 0.0)}
    trie = build_trie(
        [
            make(
                name,
                ids,
                reward=reward,
                metadata={"leaf_weight": 0.2, "leaf_weight_before_fallback": before}
                | {"segments": [1, 2] if ids[1] == 1 else [1]},
            )
            for name, (ids, reward, before) in rows.items()
        ]
    )
    estimates = estimate_advantages(trie, AdvantageOptions("treerpo", segment="recorded", leaf_weights=True, epsilon=0))
    assert estimates.tree is not None
    reward = trie.trajectories["reward"].to_numpy()
    values = treerpo(estimates.tree, reward, weights=weights_of(trie), epsilon=0)
    names = np.array(trie.trajectories["trajectory_id"].to_pylist())[estimates.tree.owner]
    last = {str(name): float(value) for name, value in zip(names, values, strict=True)}
    deep, top = math.sqrt(0.5), math.sqrt(0.125)
    expected = {"a": 0.5 / deep, "b": -0.5 / deep, "e": -0.5 / deep, "c": 0.25 / top, "d": -0.25 / top}
    assert last == pytest.approx(expected)


@pytest.mark.parametrize("options", ALL, ids=lambda options: options.estimator)
def test_equal_weights_give_the_published_estimators(forest: Trie, options: AdvantageOptions) -> None:
    rollouts = []
    for tree in sample_trees(MarkovLaw(three_tokens(), stop=0), OPTIONS, [[1], [2]] * 2, seed=6, reward=score):
        for one in rollouts_of_tree(tree):
            metadata = one.metadata | {"leaf_weight": 3.7, "leaf_weight_before_fallback": 0.3}
            rollouts.append(replace(one, metadata=metadata, step=int(str(one.group_id)[1:]) % 2))
    trie = build_trie(rollouts)
    plain, weighted = (estimate_advantages(trie, replace(options, leaf_weights=used)) for used in (False, True))
    assert weighted.values == pytest.approx(plain.values, abs=1e-12, rel=1e-12)
    assert np.ptp(plain.values) > 0
    # The weights of the sampler give other numbers, so the option has an effect.
    if options.estimator != "treerpo":
        changed = estimate_advantages(forest, replace(options, leaf_weights=True)).values
        assert np.abs(changed - estimate_advantages(forest, options).values).max() > 1e-3


def test_a_group_with_one_leaf_from_before_the_fallback_is_compared_by_all_weights() -> None:
    group: Int64 = np.zeros(3, np.int64)
    weights = LeafWeights(np.array([0.5, 0.25, 0.25]), np.array([1.0, 0.0, 0.0]))
    reward = np.array([1.0, 0.0, 0.0])
    weight = weights.of_pairs(np.arange(3), group, at_least=2)
    assert grpo(reward, group, weight=weight, epsilon=0)[0] == pytest.approx(0.5 / math.sqrt(0.25 / (1 - 0.375)))


def test_leaves_of_a_fallback_count_on_request(forest: Trie) -> None:
    options = AdvantageOptions("dr-grpo", leaf_weights=True)
    weights, values = weights_of(forest), estimate_advantages(forest, options).values
    everything = estimate_advantages(forest, replace(options, fallback_leaves=True)).values
    assert float(weights.before_fallback @ values) == pytest.approx(0, abs=1e-12)
    assert float(weights.all @ everything) == pytest.approx(0, abs=1e-12)
    assert np.abs(values - everything).max() > 1e-3


def test_options_that_make_no_sense_are_refused(forest: Trie) -> None:
    assert "fallback_leaves selects among leaf weights; give --leaf-weights too" in refusal(
        AdvantageOptions, "grpo", fallback_leaves=True
    )
    plain = build_trie([make(f"r{i}", [1, 2 + i], reward=float(i)) for i in range(2)])
    assert "no rollout of the trie has a leaf_weight; sample the rollouts with" in refusal(
        estimate_advantages, plain, AdvantageOptions("grpo", leaf_weights=True)
    )


def test_the_example_of_the_page() -> None:
    rows = {"B": ([7, 1, 1], 1.0, 1 / 2, 1 / 2), "C": ([7, 2, 3], 0.0, 1 / 4, 1 / 6)}
    rows |= {"D": ([7, 2, 4], 1.0, 1 / 4, 1 / 6), "E": ([7, 2, 5], 0.0, 0.0, 1 / 6)}
    trie = build_trie(
        [
            make(name, ids, reward=reward, metadata={"leaf_weight": weight, "leaf_weight_before_fallback": before})
            for name, (ids, reward, before, weight) in rows.items()
        ]
    )
    text = (ROOT / "docs" / "tree-rl.md").read_text()
    for estimator in ("dr-grpo", "grpo", "rloo"):
        values = estimate_advantages(trie, AdvantageOptions(estimator, leaf_weights=True, epsilon=0)).values
        row = next(line for line in text.splitlines() if line.startswith(f"| `{estimator}`, weighted |"))
        assert [float(cell) for cell in row.split("|")[2:6]] == pytest.approx(values, abs=5e-5)
    (packed,) = plan_packing(trie, PackOptions(capacity=64, leaf_weights=True))
    shown = next(line for line in text.splitlines() if line.startswith("| `pack --leaf-weights` | 2"))
    weight = {
        name: packed.loss_weight[end] for name, end in zip(packed.trajectory_ids, packed.trajectory_ends, strict=True)
    }
    assert weight == {name: float(cell) for name, cell in zip("BCD", shown.split("|")[2:5], strict=True)}
