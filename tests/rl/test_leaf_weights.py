"""Leaf weights of a trie: recorded ones, those of continuations, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import oracle_leaf_weights as oracle
from support.refusal import refusal
from support.sampled_trees import continuations_of, rollouts_of_tree, sample_trees, three_tokens
from support.strategies import make
from treepack.errors import TreepackError
from treepack.rl.leaf_weights import LeafWeights, leaf_weights
from treepack.rollout.options import TreeOptions, independent
from treepack.rollout.records import tree_lines
from treepack.rollout.simulated import MarkovLaw
from treepack.rollout.tree import weights_of_leaves as sampled_weights
from treepack.trajectory import Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.directory import build_trie_directory
from treepack.trie.store.trie_files import read_trie

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


def test_a_place_between_segments_has_as_many_children_as_were_sampled_there() -> None:
    # 7 -+- 1 2 -+- 3      a   1/4        two continuations after `1 2`: 4 children of 1/8 each
    #    |       '- 4      b   1/4
    #    '- 5 6            c   1/2        one continuation inside of it: 2 children of 1/4 each
    base = [
        by_hand("a", [7, 1, 2, 3], segments=[1, 3], segment_ids=[1, 3], leaf_weight=0.25),
        by_hand("b", [7, 1, 2, 4], segments=[1, 3], segment_ids=[1, 4], leaf_weight=0.25),
        by_hand("c", [7, 5, 6], segments=[1], segment_ids=[2], leaf_weight=0.5),
    ]
    made = [by_hand(f"a{i}", [7, 1, 2, 8 + i], parent_rollout="a", parent_tokens=3) for i in range(2)]
    made.append(by_hand("c0", [7, 5, 9], parent_rollout="c", parent_tokens=2))
    everything, before = weights_by_name([*base, *made])
    eighths = {"a": 1, "b": 1, "a0": 1, "a1": 1, "c": 2, "c0": 2}
    assert everything == before == {name: count / 8 for name, count in eighths.items()}


def test_without_ids_rollouts_of_equal_cuts_share_a_prefix() -> None:
    base = [by_hand(f"a{i}", [7, 1, 2, 3 + i], segments=[1, 3], leaf_weight=0.5) for i in range(2)]
    new = by_hand("n", [7, 1, 2, 9], segments=[1, 3], parent_rollout="a1", parent_tokens=3)
    assert weights_by_name([*base, new])[0] == pytest.approx(dict.fromkeys(("a0", "a1", "n"), 1 / 3))


def test_a_tree_sampled_below_a_prefix_keeps_its_own_weights() -> None:
    # Below the prefix 7 1 of a: two forks, of which the second forks again.
    base = [by_hand("a", [7, 1, 2], leaf_weight=1.0)]
    marks: dict[str, Any] = {"parent_rollout": "a", "parent_tokens": 2}
    below = [
        by_hand("b", [7, 1, 3, 3], segments=[2], segment_ids=[11], leaf_weight=0.5, **marks),
        by_hand("c", [7, 1, 4, 5], segments=[2, 3], segment_ids=[12, 13], leaf_weight=0.25, **marks),
        by_hand("d", [7, 1, 4, 6], segments=[2, 3], segment_ids=[12, 14], leaf_weight=0.25, **marks),
    ]
    expected = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 6, "d": 1 / 6}
    assert weights_by_name([*base, *below])[0] == pytest.approx(expected)


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
