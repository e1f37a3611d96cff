"""Leaf weights of a trie: recorded ones, those of continuations, refusals, and estimates without bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import oracle_leaf_weights as oracle
from support.command_line import Run
from support.markov_law import MarkovLaw
from support.refusal import refusal
from support.sampled_trees import continuations_of, rollouts_of_tree, sample_trees, three_tokens
from support.strategies import make
from support.trie_targets import trie_targets
from treepack.errors import TreepackError
from treepack.research.pros.selection import effective_counts, read_state
from treepack.research.trace.targets import anchors, binary_rewards, recursive_targets
from treepack.rl.leaf_weights import LeafWeights, leaf_weights
from treepack.rollout.options import TreeOptions, independent
from treepack.rollout.records import tree_lines
from treepack.rollout.tree import Tree
from treepack.rollout.tree import weights_of_leaves as sampled_weights
from treepack.trajectory import Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.directory import build_trie_directory
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie

LAW = MarkovLaw(three_tokens(), stop=0)


WITH_FALLBACK = TreeOptions(width=8, max_tokens=20, segment=2, depth=8, first_forks=2)


WITHOUT = TreeOptions(width=8, max_tokens=20, segment=2, depth=8, first_forks=(2, 4), fallback="none")


INDEPENDENT = independent(width=4, max_tokens=20)


def weights_by_name(rollouts: list[Trajectory], *, share: str = "all") -> tuple[dict[str, float], dict[str, float]]:
    trie = build_trie(rollouts, share=share)
    weights, names = leaf_weights(trie), trie.trajectories["trajectory_id"].to_pylist()
    assert weights is not None
    both = weights.all.tolist(), weights.before_fallback.tolist()
    return dict(zip(names, both[0], strict=True)), dict(zip(names, both[1], strict=True))


def by_hand(name: str, tokens: list[int], **metadata: Any) -> Trajectory:
    return make(name, tokens, metadata=metadata)


def odd(response: Int32) -> float:
    return float(len(response) % 2)


def test_rollouts_without_weights_have_none() -> None:
    assert leaf_weights(build_trie([by_hand("a", [1, 2], note="a leaf_weight in a text"), make("b", [1, 3])])) is None


def test_weights_of_a_group_sum_to_one_and_several_trees_of_a_group_count_equally() -> None:
    first = [by_hand("a", [1, 2], leaf_weight=1.0)]
    second = [by_hand("b", [1, 3], leaf_weight=0.25), by_hand("c", [1, 4], leaf_weight=0.75)]
    everything, before = weights_by_name(first + second)
    assert everything == before == {"a": 0.5, "b": 0.125, "c": 0.375}


def test_the_same_group_of_another_step_has_weights_of_its_own() -> None:
    rollouts = [
        make(f"{i}{step}", [1, 2 + i], step=step, metadata={"leaf_weight": 0.5}) for i in (0, 1) for step in (1, 2)
    ]
    assert set(weights_by_name(rollouts)[0].values()) == {0.5}


def test_groups_without_weights_have_equal_ones() -> None:
    plain = [make(f"p{i}", [1, 5 + i], group="h") for i in range(4)]
    everything, _ = weights_by_name([by_hand("a", [1, 2], leaf_weight=1), *plain])
    assert everything == {"a": 1.0} | {f"p{i}": 0.25 for i in range(4)}


def test_records_of_the_sampler_give_its_weights(tmp_path: Path) -> None:
    trees = sample_trees(LAW, WITH_FALLBACK, [[1], [2]] * 2, seed=4)
    (tmp_path / "rollouts.jsonl").write_bytes(b"".join(map(tree_lines, trees)))
    build_trie_directory([tmp_path / "rollouts.jsonl"], tmp_path / "trie")
    trie = read_trie(tmp_path / "trie")
    weights, names = leaf_weights(trie), trie.trajectories["trajectory_id"].to_pylist()
    assert weights is not None
    for tree in trees:
        at = [names.index(f"{tree.query.key}/{number}") for number in range(len(tree.leaves))]
        everything, before = sampled_weights(tree)
        assert weights.all[at] == pytest.approx(everything)
        assert weights.before_fallback[at] == pytest.approx(before)


@pytest.mark.parametrize("options", [WITH_FALLBACK, WITHOUT])
def test_weights_of_sampled_trees_are_those_of_the_sampler(options: TreeOptions) -> None:
    trees = sample_trees(LAW, options, [[1], [2]] * 5, seed=2)
    everything, before = weights_by_name([rollout for tree in trees for rollout in rollouts_of_tree(tree)])
    for tree in trees:
        sampled = oracle.sampled_leaves(tree)
        assert {one.name: everything[one.name] for one in sampled} == pytest.approx(
            oracle.weights_of(sampled, before_fallback=False)
        )
        assert {one.name: before[one.name] for one in sampled} == pytest.approx(
            oracle.weights_of(sampled, before_fallback=True)
        )


# Without ids, equal siblings of a tree are one node; so only independent rollouts may lack them here.
@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        (WITH_FALLBACK, "ids and weights"),
        (WITHOUT, "ids and weights"),
        (INDEPENDENT, "ids and weights"),
        (INDEPENDENT, "weights"),
        (INDEPENDENT, "nothing"),
    ],
)
def test_continuations_divide_the_weight_of_their_prefix(options: TreeOptions, recorded: str) -> None:
    rng = np.random.default_rng(5)
    for tree in sample_trees(LAW, options, [[1], [2]] * 6, seed=3, reward=odd):
        rollouts, sampled = rollouts_of_tree(tree), oracle.sampled_leaves(tree)
        for number in range(4):  # later rounds also continue continuations
            at = int(rng.integers(len(rollouts)))
            content = rollouts[at].content
            assert isinstance(content, Tokens)
            num_tokens = int(rng.integers(1, len(content.tokens)))
            made = continuations_of(LAW, rollouts[at], num_tokens, 1 + number % 3, seed=number, reward=odd)
            # A second round of one prefix has names of its own.
            made = [Trajectory(**(_fields(one) | {"trajectory_id": f"{one.trajectory_id}r{number}"})) for one in made]
            for one in made:
                one.metadata["segment_ids"][-1] += number
            sampled += [
                oracle.continued(sampled[at], num_tokens, one.trajectory_id, _length(one) - num_tokens) for one in made
            ]
            rollouts += made
        if recorded == "nothing":
            for one in rollouts:
                for name in ("segments", "segment_ids", "leaf_weight"):
                    del one.metadata[name]
        elif recorded == "weights":
            for one in rollouts:
                del one.metadata["segment_ids"], one.metadata["segments"]
        everything, before = weights_by_name([rollouts[i] for i in rng.permutation(len(rollouts))])
        assert everything == pytest.approx(oracle.weights_of(sampled, before_fallback=False))
        assert before == pytest.approx(oracle.weights_of(sampled, before_fallback=True))
        assert sum(everything.values()) == pytest.approx(1)
        assert sum(before.values()) == pytest.approx(1)


def _fields(one: Trajectory) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Trajectory.__slots__}


def _length(one: Trajectory) -> int:
    assert isinstance(one.content, Tokens)
    return len(one.content.tokens)


def test_without_ids_rollouts_of_equal_cuts_share_a_prefix() -> None:
    base = [by_hand(f"a{i}", [7, 1, 2, 3 + i], segments=[1, 3], leaf_weight=0.5) for i in range(2)]
    new = by_hand("n", [7, 1, 2, 9], segments=[1, 3], parent_rollout="a1", parent_tokens=3)
    assert weights_by_name([*base, new])[0] == pytest.approx(dict.fromkeys(("a0", "a1", "n"), 1 / 3))


def test_a_continuation_may_repeat_all_tokens_of_its_parent() -> None:
    rollouts = [by_hand("a", [7, 1], leaf_weight=1.0), by_hand("b", [7, 1, 2], parent_rollout="a", parent_tokens=2)]
    assert weights_by_name(rollouts)[0] == {"a": 0.5, "b": 0.5}


def test_continuations_of_a_fallback_leaf_count_only_after_the_fallback() -> None:
    base = [
        by_hand("a", [7, 1], leaf_weight=0.5, leaf_weight_before_fallback=1.0),
        by_hand("b", [7, 2, 3], leaf_weight=0.5, leaf_weight_before_fallback=0.0),
        by_hand("c", [7, 2, 4], parent_rollout="b", parent_tokens=2),
    ]
    everything, before = weights_by_name(base)
    assert everything == {"a": 0.5, "b": 0.25, "c": 0.25}
    assert before == {"a": 1.0, "b": 0.0, "c": 0.0}


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([{"leaf_weight": 0.5}, {}], "made:r1: has no leaf_weight and other rollouts of its group have one"),
        ([{"leaf_weight": -0.5}, {}], "made:r0: leaf_weight is -0.5; expected a finite number of 0 or more"),
        ([{"leaf_weight": "1"}], 'made:r0: leaf_weight is "1"; expected a finite number'),
        ([{"leaf_weight": True}], "made:r0: leaf_weight is true; expected a finite number"),
        ([{"leaf_weight": 0.0}], "made:r0: leaf_weight is 0 in all rollouts of its group"),
        ([{"leaf_weight_before_fallback": 0.5}], "made:r0: has a leaf_weight_before_fallback and no leaf_weight"),
        (
            [{"leaf_weight": 1, "leaf_weight_before_fallback": 0.0}],
            "made:r0: leaf_weight_before_fallback is 0 in all rollouts of its group",
        ),
        ([{"parent_rollout": "x", "parent_tokens": 1}], "made:r0: continues the rollout 'x', which the trie does not"),
        ([{"parent_rollout": "r1", "parent_tokens": 0}, {}], 'made:r0: continues 0 tokens of the rollout "r1"'),
        (
            [{"parent_rollout": "r1", "parent_tokens": 3}, {}],
            "made:r0: continues 3 tokens of the rollout 'r1', which has",
        ),
        (
            [{"parent_rollout": "r1", "parent_tokens": 1}, {"parent_rollout": "r0", "parent_tokens": 1}],
            "continues rollouts that continue it",
        ),
    ],
)
def test_impossible_weights_are_refused_in_one_sentence(rollouts: list[dict[str, Any]], message: str) -> None:
    trie = build_trie([by_hand(f"r{i}", [7, 1, 2 + i, 5], **metadata) for i, metadata in enumerate(rollouts)])
    with pytest.raises(TreepackError, match=message) as caught:
        leaf_weights(trie)
    assert "\n" not in str(caught.value)


def test_a_continuation_of_another_group_is_refused() -> None:
    rollouts = [make("a", [7, 1, 2], group="h"), by_hand("b", [7, 1, 3], parent_rollout="a", parent_tokens=2)]
    assert "made:b: continues 2 tokens of the rollout 'a', which is in another group" in refusal(
        leaf_weights, build_trie(rollouts)
    )


def test_parts_without_leaves_from_before_the_fallback_take_all_weights() -> None:
    weights = LeafWeights(np.array([0.25, 0.25, 0.3, 0.2, 0.0]), np.array([0.5, 0.5, 0.0, 0.0, 0.0]))
    owner, part = np.array([0, 1, 2, 2, 3, 4]), np.array([0, 0, 0, 1, 1, 2])
    assert weights.of_pairs(owner, part).tolist() == [0.5, 0.5, 0.0, 0.3, 0.2, 1.0]
    owner, part = np.array([0, 2, 3]), np.array([0, 0, 0])
    assert weights.of_pairs(owner, part).tolist() == [0.5, 0.0, 0.0]
    assert weights.of_pairs(owner, part, at_least=2).tolist() == [0.25, 0.3, 0.2]


# Token 0 stops. After the prompt 3, token 1 ends a response at once and token 2 seldom; the first kind succeeds.
STOPPING = MarkovLaw(np.array([[1.0, 0, 0, 0], [0.9, 0.1, 0, 0], [0.2, 0, 0.8, 0], [0, 0.4, 0.6, 0]]), stop=0)


OPTIONS = {
    "fallback": TreeOptions(width=8, max_tokens=200, segment=2, depth=100, first_forks=2),
    "none": TreeOptions(width=8, max_tokens=200, segment=2, depth=100, first_forks=2, fallback="none"),
}


def succeeds(response: Int32) -> float:
    return float(len(response) > 1 and response[-2] == 1)


def sampled(kind: str, number: int, seed: int) -> list[Tree]:
    return sample_trees(STOPPING, OPTIONS[kind], [[3]] * number, seed=seed, reward=succeeds)


def forest(trees: list[Tree]) -> tuple[Trie, LeafWeights]:
    trie = build_trie([rollout for tree in trees for rollout in rollouts_of_tree(tree)])
    weights = leaf_weights(trie)
    assert weights is not None
    return trie, weights


@pytest.mark.parametrize("kind", OPTIONS)
def test_weighted_targets_of_prompts_are_unbiased_and_plain_ones_are_not(kind: str) -> None:
    trie, weights = forest(sampled(kind, 80, 2))
    prefixes, reward = anchors(trie, segment="recorded"), binary_rewards(trie)
    exact = STOPPING.probability_of_last(3, 1)
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
