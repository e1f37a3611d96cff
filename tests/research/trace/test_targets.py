"""Recursive targets, effective ratios and rank correlations: each equals its equation, on any tree."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.command_line import Run
from support.oracle_rl import Node, Rollout, paths, turn_cuts
from support.refusal import refusal
from support.strategies import make, trajectories
from support.trie_targets import trie_targets
from treepack.errors import TreepackError
from treepack.research.trace.targets import (
    anchors,
    binary_rewards,
    effective_ratio,
    effective_ratios,
    recursive_targets,
    spearman,
)
from treepack.trajectory import Float64, Tokens
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie, trajectories_of

few = settings(max_examples=40)  # every example builds a trie


@st.composite
def forests(draw: st.DrawFn) -> Trie:
    """A trie of rollouts that fail or succeed, of one or two groups and steps."""
    made = draw(trajectories(max_count=10))
    return build_trie([replace(one, reward=float(draw(st.booleans()))) for one in made])


def runs(content: Tokens) -> list[int]:
    """Starts of the runs of trained tokens, which are the turns."""
    # spans [1, 3) and [3, 4) and [6, 8) -> trained {1, 2, 3, 6, 7} -> [1, 6]
    trained = {at for a, b in zip(content.starts, content.ends, strict=True) for at in range(a, b)}
    return sorted(at for at in trained if at - 1 not in trained)


def rollouts_of(trie: Trie) -> list[Rollout]:
    rollouts = []
    for one in trajectories_of(trie):
        assert isinstance(one.content, Tokens)
        assert one.reward is not None
        step = -1 if one.step is None else one.step
        rollouts.append(
            Rollout(one.content.tokens.tolist(), runs(one.content), one.group_id or one.trajectory_id, step, one.reward)
        )
    return [replace(one, cuts=cuts) for one, cuts in zip(rollouts, turn_cuts(rollouts), strict=True)]


def by_recursion(rollouts: list[Rollout]) -> dict[Node, tuple[int, float]]:
    """Equation 18 in its recursive form: n_y and the target of every node above a leaf."""
    children: dict[Node, list[Node]] = defaultdict(list)
    leaves: dict[Node, float] = {}
    for i, (rollout, path) in enumerate(zip(rollouts, paths(rollouts), strict=True)):
        # Leaves are never shared, so the index of the rollout is part of the key.
        leaf: Node = (*path[-1], "leaf", i)
        leaves[leaf] = rollout.reward
        for up, node in itertools.pairwise([*path, leaf]):
            if node not in children[up]:
                children[up].append(node)

    def target_of(node: Node) -> tuple[int, float]:
        if node in leaves:
            return 1, leaves[node]
        below = [target_of(child) for child in children[node]]
        total = sum(n for n, _ in below)
        return total, math.fsum(n * value for n, value in below) / total

    return {node: target_of(node) for node in list(children)}


@few
@given(forests())
def test_targets_are_the_average_of_children_weighted_by_their_leaves(trie: Trie) -> None:
    rollouts, prefixes, reward = rollouts_of(trie), anchors(trie), binary_rewards(trie)
    expected, (target, below) = by_recursion(rollouts), recursive_targets(prefixes.tree, reward, None)
    assert len(expected) == prefixes.tree.num_inner
    for i, path in enumerate(paths(rollouts)):
        nodes = prefixes.tree.node[prefixes.tree.owner == i][:-1]
        assert len(nodes) == len(path)
        for node, key in zip(nodes, path, strict=True):
            count, value = expected[key]
            assert below[node] == count
            assert target[node] == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert target[prefixes.tree.num_inner :].tolist() == reward.tolist()


@few
@given(forests())
def test_targets_of_trie_nodes_are_the_average_of_children_and_rollouts_that_end_there(trie: Trie) -> None:
    reward = binary_rewards(trie)
    count, total = np.zeros(trie.num_nodes), np.zeros(trie.num_nodes)
    # Nodes are numbered depth-first, so the children of a node come after it.
    for node in reversed(range(trie.num_nodes)):
        ended = trie.end_node == node
        below = np.flatnonzero(trie.parent == node)
        count[node] = ended.sum() + count[below].sum()
        total[node] = reward[ended].sum() + total[below].sum()
    assert trie_targets(trie, reward, None) == pytest.approx(total / count, rel=1e-12)


@few
@given(forests())
def test_anchors_are_the_prefixes_before_every_turn_but_the_first(trie: Trie) -> None:
    prefixes = anchors(trie)
    listed = list(zip(prefixes.trajectory.tolist(), prefixes.turn.tolist(), prefixes.num_tokens.tolist(), strict=True))
    expected = [
        (i, turn, start)
        for i, rollout in enumerate(rollouts_of(trie))
        for turn, start in enumerate(rollout.cuts[1:], start=1)
    ]
    assert listed == expected
    tokens = [tuple(rollout.tokens) for rollout in rollouts_of(trie)]
    same: dict[int, set[Any]] = defaultdict(set)
    for node, (i, _, length) in zip(prefixes.node.tolist(), listed, strict=True):
        same[node].add((prefixes.group[i], tokens[i][:length]))
    assert all(len(token_lists) == 1 for token_lists in same.values())


@few
@given(forests())
def test_effective_ratios_count_anchors_with_both_outcomes(trie: Trie) -> None:
    rollouts, anchor_table, reward = rollouts_of(trie), anchors(trie), binary_rewards(trie)
    groups, prefixes = defaultdict(list), defaultdict(list)
    for rollout, path in zip(rollouts, paths(rollouts), strict=True):
        groups[path[0]].append(rollout.reward)
        for node in path[1:]:
            prefixes[node].append(rollout.reward)
    ratios = effective_ratios(anchor_table, reward, None)
    shared = [rewards for rewards in prefixes.values() if len(rewards) > 1]
    for name, sets in (("root", list(groups.values())), ("prefix", shared)):
        mixed = [rewards for rewards in sets if len(set(rewards)) == 2]
        assert ratios[name].num_anchors == len(sets)
        assert ratios[name].of_anchors == pytest.approx(len(mixed) / len(sets) if sets else 0)
        total = sum(map(len, sets))
        assert ratios[name].of_rollouts == pytest.approx(sum(map(len, mixed)) / total if sets else 0)


def test_no_anchor_has_an_effective_ratio_of_zero() -> None:
    assert effective_ratio(np.zeros(0, np.int64), np.zeros(0)) == (0.0, 0.0, 0)


@few
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.integers(0, 4)), min_size=3))
def test_spearman_is_the_correlation_of_mean_ranks(pairs: list[tuple[float, int]]) -> None:
    predicted, target = np.array(pairs, np.float64).T
    assume(np.ptp(predicted) > 0 and np.ptp(target) > 0)

    # Equal values share the mean of their ranks: [5, 7, 7] -> [1, 2.5, 2.5].
    def ranks(values: Float64) -> Float64:
        return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])

    correlation = spearman(predicted, target)
    assert correlation.rho == pytest.approx(np.corrcoef(ranks(predicted), ranks(target))[0, 1], abs=1e-12)
    assert correlation.num_pairs == len(pairs)


def test_constant_values_have_no_rank_correlation() -> None:
    assert spearman(np.ones(5), np.arange(5.0)) == (None, None, 5, 0)
    assert spearman(np.arange(2.0), np.arange(2.0)) == (None, None, 2, 0)


def test_without_scipy_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(TreepackError, match=r"need scipy; run pip install 'scipy>=[\d.]+'"):
        spearman(np.arange(5.0), np.arange(5.0))


@pytest.mark.parametrize(("reward", "fault"), [(None, "no reward"), (0.5, "the reward 0.5"), (-1.0, "the reward -1")])
def test_rewards_that_are_not_binary_are_refused(reward: float | None, fault: str) -> None:
    trie = build_trie([make("a", [1, 2], reward=1.0), make("b", [1, 3], reward=reward)])
    assert f"made:b: has {fault}; TRACE needs 0 for failure or 1 for success" in refusal(binary_rewards, trie)


# Group p is mixed with 3 of 5 rollouts. Its shared prefixes are a and b after turns 1 and 2, both mixed.
STATS = """\
effective ratio  anchors  of_anchors  of_rollouts
           root        2      50.0 %       60.0 %
         prefix        2     100.0 %      100.0 %

     spearman  pairs  unpredicted    rho  p_value
         root      2            0      -        -
       prefix      3            0  0.866   0.3333
shared prefix      2            0      -        -
"""
# id, group, reward, tokens, mask: a and b share two turns, c leaves after the prompt, d and e have one turn each.
ROLLOUTS = [
    ("a", "p", 1, [7, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1]),
    ("b", "p", 0, [7, 1, 2, 3, 4, 6], [0, 1, 0, 1, 0, 1]),
    ("c", "p", 0, [7, 8, 2, 9], [0, 1, 0, 1]),
    ("d", "q", 1, [7, 7], [0, 1]),
    ("e", "q", 1, [7, 9], [0, 1]),
]
# Targets of the prefixes: 1/2 after turn 1 of a and b, 1/2 after turn 2, 0 after turn 1 of c.
PREFIX_VALUES = [("a", 1, 0.6), ("a", 2, 0.4), ("b", 1, 0.6), ("b", 2, 0.4), ("c", 1, 0.2)]
PREDICTED: list[dict[str, Any]] = [{"group_id": name, "value": 0.5} for name in "pq"] + [
    {"group_id": "p", "trajectory_id": name, "turn": turn, "value": value} for name, turn, value in PREFIX_VALUES
]


def test_stats_shows_effective_ratios_and_how_well_predictions_rank(treepack: Run, tmp_path: Path) -> None:
    fields = ("id", "group_id", "reward", "input_ids", "loss_mask")
    write_lines(tmp_path / "rollouts.jsonl", [dict(zip(fields, rollout, strict=True)) for rollout in ROLLOUTS])
    write_lines(tmp_path / "predictions.jsonl", PREDICTED)
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie").status == 0
    command = ("stats", tmp_path / "trie", "--predictions", tmp_path / "predictions.jsonl")
    shown = treepack(*command)
    assert (shown.status, shown.notes) == (0, "")
    assert STATS in shown.out
    report = treepack(*command, "--json").json
    assert report["effective_ratio"] == treepack("stats", tmp_path / "trie", "--effective-ratio", "--json").json.get(
        "effective_ratio"
    )
    assert report["spearman"]["prefix"]["num_pairs"] == 3  # type: ignore[index]
    assert "effective_ratio" not in treepack("stats", tmp_path / "trie", "--json").json
    assert treepack("pack", tmp_path / "trie", "--capacity", 99, "--out", tmp_path / "packed").status == 0
    refused = treepack("stats", tmp_path / "packed", "--effective-ratio")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err.endswith("is packed already; give --effective-ratio and --predictions with its trie\n")


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
