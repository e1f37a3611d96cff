"""Records of sampled trees are token records that build-trie reads, and contain the whole tree."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from support.markov_law import MarkovLaw
from support.read_rollouts import read_trajectories, tokenize
from support.sampled_trees import sample_trees, three_tokens
from treepack.rl.segments import segment_tree
from treepack.rollout.engine import Segment
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.records import name_of_query, tree_lines, tree_records, tree_trajectories
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import SimulatedEngine
from treepack.rollout.tree import Tree, weights_of_leaves
from treepack.trajectory import Float64, Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie


def eight_tokens() -> Float64:
    """Return the law of three tokens, which continues the tokens 3 to 7 of observations too but never samples them."""
    matrix = np.zeros((8, 8))
    matrix[:, :3] = three_tokens()[[0, 1, 2, 1, 1, 1, 1, 1]]
    return matrix


LAW = MarkovLaw(eight_tokens(), stop=0)
# Short segments of three tokens: many siblings are equal, and most trees have a fallback.
SHAPE = TreeOptions(width=8, max_tokens=12, segment=2, depth=None, max_repeats=0)


@dataclass(frozen=True)
class TwoTurns:
    """An episode whose first observation is `answer`, and whose second turn is the last."""

    answer: tuple[int, ...] = (7, 7)
    num_turns: int = 0

    async def after(self, turn: Int32) -> tuple[TwoTurns, Int32 | None]:
        """Count the turn."""
        observation = np.array(self.answer, np.int32) if self.num_turns == 0 else None
        return replace(self, num_turns=self.num_turns + 1), observation

    async def reward(self, unfinished: Int32) -> float | None:
        """Return the number of turns."""
        return float(self.num_turns)

    async def close(self) -> None:
        """Nothing is open."""


def sample(query: Query, options: TreeOptions = SHAPE, *, episode: Any = None, version: str = "") -> Tree:
    engine = SimulatedEngine(LAW, version=version)
    return asyncio.run(sample_tree(query, engine, options, episode=episode or SingleTurn(), seed=3))


def prompt(*ids: int, **others: Any) -> Query:
    return Query("task", "task", np.array(ids, np.int32), **others)


def read_back(trees: list[Tree], path: Path) -> list[Trajectory]:
    file = path / "rollouts.jsonl"
    file.write_bytes(b"".join(tree_lines(tree) for tree in trees))
    read = list(tokenize(read_trajectories([file]), tokenizer=None))
    assert all(isinstance(each, Trajectory) for each in read)
    return [each for each in read if isinstance(each, Trajectory)]


def test_the_recorded_segments_rebuild_the_sampled_tree(tmp_path: Path) -> None:
    trees = sample_trees(LAW, SHAPE, [[1, 2], [2, 1], [1, 1]], seed=5)
    assert any(node.is_fallback for tree in trees for node in tree.nodes())
    trie = build_trie(read_back(trees, tmp_path))
    names = trie.trajectories["group_id"].to_pylist()
    group = np.array([int(name[1:]) for name in names])
    built = segment_tree(trie, np.arange(len(names)), group, segment="recorded")
    # Every node below the root is an inner node, or the last segment of one leaf.
    assert built.num_inner + built.num_trajectories == sum(len(list(tree.nodes())) for tree in trees)
    children = np.bincount(built.parent[built.parent >= 0], minlength=len(built.parent))
    forks = [len(node.children) for tree in trees for node in tree.nodes()]
    assert sorted(children.tolist()) == sorted(forks)


def test_ids_and_log_probabilities_are_those_of_the_engine(tmp_path: Path) -> None:
    tree = sample(prompt(2, 1, 2))
    by_id = {each.trajectory_id: each.content for each in read_back([tree], tmp_path)}
    for number, leaf in enumerate(tree.leaves):
        content = by_id[f"task/{number}"]
        assert isinstance(content, Tokens)
        assert content.tokens.tolist() == leaf.ids().tolist()
        sampled = [node.logprobs for node in leaf.path()[1:] if node.logprobs is not None]
        assert content.sampling_logprob is not None
        assert content.sampling_logprob.tobytes() == np.concatenate(sampled).astype(np.float32).tobytes()


def test_trajectories_in_memory_are_those_of_the_file(tmp_path: Path) -> None:
    trees = [
        sample(prompt(2, 1, 2, step=3, fields={"solution": "42"}), version="7"),
        sample(Query("turns", "turns", np.array([1], np.int32)), episode=TwoTurns()),
        sample(Query("t/3@3", "t", np.array([1, 2, 1], np.int32), parent_rollout="t/3", cuts=(2,), cut_ids=(1,))),
        sample(prompt(1, untrained_prefix=1)),
    ]
    read = read_back(trees, tmp_path)
    made = [each for tree in trees for each in tree_trajectories(tree)]
    # The log of reading has sums of its own, and a trajectory in memory has no line of a file.
    expected = [replace(each, source="", totals={}) for each in read]
    assert list(map(repr, expected)) == [repr(replace(each, source="")) for each in made]
    tries = [build_trie(each) for each in (read, made)]
    assert tries[0].tokens.tobytes() == tries[1].tokens.tobytes()
    tables = [trie.trajectories.drop_columns("source") for trie in tries]
    assert tables[0].equals(tables[1])


def test_the_weights_of_the_leaves_are_recorded() -> None:
    tree = sample(prompt(2, 1, 2))
    records = tree_records(tree)
    weights, before = weights_of_leaves(tree)
    assert [record["leaf_weight"] for record in records] == weights.tolist()
    assert [record["leaf_weight_before_fallback"] for record in records] == before.tolist()
    assert [record["num_leaves"] for record in records] == [8] * 8
    marked = ["fallback" in record for record in records]
    assert marked == [share == 0 for share in before]
    assert 0 < sum(marked) < 8


def test_a_tree_without_a_fallback_has_one_weight_per_leaf() -> None:
    (record, *_) = tree_records(sample(prompt(1), independent(width=4, max_tokens=8)))
    assert record["leaf_weight"] == 0.25
    assert "leaf_weight_before_fallback" not in record
    assert "fallback" not in record


def test_observations_are_in_the_response_and_not_trained(tmp_path: Path) -> None:
    tree = sample(prompt(1), independent(width=3, max_tokens=40), episode=TwoTurns())
    for each in read_back([tree], tmp_path):
        assert isinstance(each.content, Tokens)
        trained = np.zeros(len(each.content.tokens), bool)
        for start, end in zip(each.content.starts, each.content.ends, strict=True):
            trained[start:end] = True
        # The observation 7 7 is the only text that the policy did not write, and no law of three tokens writes a 7.
        assert each.content.tokens[~trained].tolist() == [1, 7, 7]
        assert each.reward == 2.0


def test_an_observation_after_the_last_segment_is_left_out() -> None:
    tree = sample(prompt(1), independent(width=3, max_tokens=40, depth=1), episode=TwoTurns())
    assert [leaf.observation.tolist() for leaf in tree.leaves] == [[7, 7]] * 3
    for leaf, record in zip(tree.leaves, tree_records(tree), strict=True):
        assert record["response_ids"].tolist() == leaf.path()[1].tokens.tolist()
        assert record["finish"] == "depth"


def test_a_policy_that_changed_on_the_path_is_recorded_with_its_first_token() -> None:
    class Publishing(SimulatedEngine):
        """A policy that changes after two requests."""

        calls = 0

        async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
            self.calls += 1
            await self.publish("7" if self.calls <= 2 else "8")
            return await super().extend(ids, count=count, max_tokens=max_tokens, seed=seed)

    shape = TreeOptions(width=1, max_tokens=30, segment=2, depth=None, first_forks=1, branches=1, max_repeats=0)
    law = MarkovLaw(np.array([[0.0, 1.0], [1e-9, 1 - 1e-9]]), stop=0)
    tree = asyncio.run(sample_tree(prompt(1, 1), Publishing(law), shape, episode=SingleTurn()))
    (record,) = tree_records(tree)
    assert record["policy_version"] == "7,8"
    assert record["metadata"] == {"policy_versions": [("7", 2), ("8", 6)]}
    (record, *_) = tree_records(sample(prompt(1), version="7"))
    assert record["policy_version"] == "7"
    assert "metadata" not in record


def test_fields_of_a_query_are_copied_if_they_are_short_and_have_no_other_meaning(tmp_path: Path) -> None:
    given = {
        "solution": "42",
        "level": 3,
        "long": "x" * 3000,
        "parts": [1, 2],
        "huge": 10**30,
        # Names by which other formats are recognised, or which the reader would take for the reward or the group.
        **dict.fromkeys("instruction input output messages prompt uid reward score step weight text task".split(), "1"),
    }
    (record, *_) = tree_records(sample(prompt(1, fields=given)))
    assert {name: record[name] for name in given if name in record} == {"solution": "42", "level": 3}
    (each, *_) = read_back([sample(prompt(1, fields=given))], tmp_path)
    assert each.metadata["solution"] == "42"
    assert each.notes == ()


def test_a_continuation_records_its_parent_and_inherits_its_segments() -> None:
    query = Query(
        "task/3@5",
        "task",
        np.array([1, 2, 1, 2, 1], np.int32),
        count=2,
        step=4,
        parent_rollout="task/3",
        cuts=(2, 4),
        cut_ids=(1, 6),
    )
    first, second = tree_records(sample(query, independent(width=2, max_tokens=8)))
    assert (first["rollout_id"], second["rollout_id"]) == ("task/3@5/0", "task/3@5/1")
    assert (first["parent_rollout"], first["parent_tokens"], first["step"]) == ("task/3", 5, 4)
    assert first["segments"] == [2, 4, 5]
    assert first["segment_ids"][:2] == second["segment_ids"][:2] == [1, 6]
    # Two samples of one query are two nodes, and their numbers never meet those of the parent's tree.
    assert first["segment_ids"][2] != second["segment_ids"][2]
    assert min(first["segment_ids"][2], second["segment_ids"][2]) > 10**6


def test_a_continuation_of_a_rollout_without_segments_has_none() -> None:
    query = Query("r@2", "task", np.array([1, 2], np.int32), parent_rollout="r")
    (record, *_) = tree_records(sample(query, independent(width=1, max_tokens=8)))
    assert "segments" not in record
    assert "segment_ids" not in record


@pytest.mark.parametrize(
    ("query", "name"),
    [
        (prompt(1), "task"),
        (prompt(1, step=3), "task:step-3"),
        (Query("task:step-3/0@9", "task", np.ones(9, np.int32), step=3, parent_rollout="task:step-3/0"), None),
    ],
)
def test_ids_of_rollouts_are_distinct_over_steps(query: Query, name: str | None) -> None:
    assert name_of_query(query) == (name or query.key)
    records = [orjson.loads(line) for line in tree_lines(sample(query)).splitlines()]
    assert [record["rollout_id"] for record in records] == [f"{name or query.key}/{i}" for i in range(8)]
