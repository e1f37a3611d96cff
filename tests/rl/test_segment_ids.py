"""Ids of recorded segments: siblings that sampled the same tokens stay two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Run
from support.markov_law import MarkovLaw
from support.sampled_trees import rollouts_of_tree, sample_trees, three_tokens
from support.strategies import make
from treepack.errors import TreepackError
from treepack.rl.group_tree import group_codes
from treepack.rl.segments import SegmentTree, segment_tree
from treepack.rollout.options import TreeOptions
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

SHAPES = {
    "two tokens": TreeOptions(width=12, max_tokens=12, segment=2, depth=6, first_forks=3),
    "one token": TreeOptions(width=16, max_tokens=6, segment=1, depth=None, first_forks=(2, 5), branches=3),
    "no fallback": TreeOptions(width=16, max_tokens=9, segment=1, depth=9, first_forks=4, fallback="none"),
}


def tree_of(rollouts: list[Trajectory]) -> tuple[SegmentTree, list[str]]:
    trie = build_trie(rollouts)
    tree = segment_tree(trie, np.arange(trie.num_trajectories), group_codes(trie), segment="recorded")
    return tree, trie.trajectories["trajectory_id"].to_pylist()


@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_segments_rebuild_exactly_the_sampled_tree(shape: str) -> None:
    law = MarkovLaw(three_tokens(), stop=0)
    trees = sample_trees(law, SHAPES[shape], [[1], [2], [1, 2]] * 4, seed=1)
    tree, names = tree_of([rollout for sampled in trees for rollout in rollouts_of_tree(sampled)])
    num_equal = 0
    nodes: dict[int, tuple[str, int]] = {}  # node of the segment tree -> (query, number of the sampled node)
    for sampled in trees:
        for i, leaf in enumerate(sampled.leaves):
            owner = names.index(f"{sampled.query.key}/{i}")
            path, listed = leaf.path(), np.flatnonzero(tree.owner == owner)
            assert tree.start[listed].tolist() == [node.start for node in path]
            for node, place in zip(path, listed.tolist(), strict=True):
                expected = sampled.query.key, node.number
                assert nodes.setdefault(int(tree.node[place]), expected) == expected
                if node.parent is not None:
                    assert nodes[int(tree.parent[tree.node[place]])] == (sampled.query.key, node.parent.number)
        inner = [node for node in sampled.nodes() if node.children]
        texts = [(node.parent.number, *node.tokens.tolist()) for node in inner if node.parent is not None]
        num_equal += len(texts) - len(set(texts))
    # As many nodes as were sampled, so none is shared too little or too much.
    assert len(nodes) == len(set(nodes.values())) == sum(1 for sampled in trees for _ in sampled.nodes())
    assert num_equal > 5  # siblings with the same tokens occur, or ids would not be needed


def test_ids_of_64_bits_are_told_apart() -> None:
    rollouts = [
        make(f"{group}{i}", [7, 1, 2, 3 + i], group=group, metadata={"segments": [1, 3], "segment_ids": [first, i]})
        for group, first in (("g", 2**64 - 1), ("h", 2**64 - 2))
        for i in range(2)
    ]
    assert tree_of(rollouts)[0].num_inner == 4  # a root and a shared segment each


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1], "made:b: 'segment_ids' has 1 numbers for 2 segments"),
        ("1, 2", "made:b: 'segment_ids' is not a list of integers"),
        ([1, True], "made:b: 'segment_ids' is not a list of integers"),
        (None, "of the rollouts of its group, some have 'segment_ids' and others do not"),
    ],
)
def test_malformed_ids_are_refused_by_the_rollout(ids: Any, message: str) -> None:
    good = {"segments": [1, 3], "segment_ids": [1, 2]}
    bad = good | {"segment_ids": ids} if ids is not None else {"segments": [1, 3]}
    rollouts = [make("a", [7, 1, 2, 3], metadata=good), make("b", [7, 1, 2, 4], metadata=bad)]
    with pytest.raises(TreepackError, match=message):
        tree_of(rollouts)


def test_readers_keep_ids_beside_offsets(treepack: Run, tmp_path: Path) -> None:
    line = '{"id":"%s","group_id":"g","prompt_token_ids":[7],"response_ids":[1,2,%d],"reward":%d,%s}\n'
    extra = '"segments":[1,3],"segment_ids":[%d,%d]'
    records = [
        line % (name, last, last % 2, extra % (1 + (name == "c"), last))
        for name, last in (("a", 3), ("b", 4), ("c", 5))
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(records))
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie").status == 0
    shown = treepack("advantages", tmp_path / "trie", "--estimator", "treepo", "--out", tmp_path / "credited")
    # c sampled the tokens of a and b again, so it is no member of their subgroup.
    assert "subgroups" in shown.out
    assert int(shown.out.split("subgroups")[1].split()[0]) == 1
    assert shown.status == 0
