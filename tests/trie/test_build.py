"""Tries: every trajectory survives, tokens are stored once, order does not matter."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle, strategies
from support.refusal import refusal
from support.strategies import make
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.trie import Trie, trajectories_of


def content(trajectory: Trajectory) -> Tokens:
    assert isinstance(trajectory.content, Tokens)
    return trajectory.content


def as_values(trajectory: Trajectory) -> dict[str, object]:
    """All fields of a trajectory, as values that can be compared."""
    tokens = content(trajectory)
    arrays = {name: getattr(tokens, name) for name in Tokens.__slots__}
    lists = {name: None if array is None else array.tolist() for name, array in arrays.items()}
    scalars = {name: getattr(trajectory, name) for name in ("trajectory_id", "source", "group_id", "step", "weight")}
    return lists | scalars | {"reward": trajectory.reward, "metadata": trajectory.metadata}


def same(a: Trie, b: Trie) -> bool:
    arrays = ("tokens", "node_start", "node_end", "parent", "depth", "num_passing", "end_node")
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays) and a.trajectories.equals(b.trajectories)


@given(strategies.trajectories())
def test_every_trajectory_comes_back_as_it_was(trajectories: list[Trajectory]) -> None:
    back = {trajectory.trajectory_id: trajectory for trajectory in trajectories_of(build_trie(trajectories))}
    assert {name: as_values(trajectory) for name, trajectory in back.items()} == {
        t.trajectory_id: as_values(t) for t in trajectories
    }


@given(strategies.sequences())
def test_tokens_are_stored_once(sequences: list[list[int]]) -> None:
    trie = build_trie([make(f"t{i}", tokens) for i, tokens in enumerate(sequences)])
    assert trie.tokens_tree == oracle.count_tokens(oracle.dict_trie(sequences))


@given(strategies.trajectories())
def test_a_built_trie_passes_its_check(trajectories: list[Trajectory]) -> None:
    check_trie(build_trie(trajectories))


@given(strategies.trajectories(), st.randoms(use_true_random=False))
def test_arrival_order_does_not_matter(trajectories: list[Trajectory], rng: random.Random) -> None:
    shuffled = trajectories.copy()
    rng.shuffle(shuffled)
    assert same(build_trie(trajectories), build_trie(shuffled))


@given(strategies.trajectories())
def test_num_passing_counts_trajectories_below(trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    ends = trie.end_node.tolist()
    counted = [sum(node <= end < stop for end in ends) for node, stop in enumerate(trie.node_end.tolist())]
    assert trie.num_passing.tolist() == counted


@given(strategies.trajectories(steps=True))
def test_trees_never_span_steps(trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    trees = trie.tree_id[trie.end_node].tolist()
    steps: dict[int, set[object]] = {}
    for tree, step in zip(trees, trie.trajectories["step"].to_pylist(), strict=True):
        steps.setdefault(tree, set()).add(step)
    assert all(len(values) == 1 for values in steps.values())


@given(strategies.trajectories())
def test_groups_keep_their_own_tries_when_asked(trajectories: list[Trajectory]) -> None:
    together = build_trie(trajectories, share="group")
    keys = {(t.step, t.group_id) for t in trajectories}
    apart = [build_trie([t for t in trajectories if (t.step, t.group_id) == key]) for key in keys]
    assert together.tokens_tree == sum(trie.tokens_tree for trie in apart)


def test_equal_ids_are_made_unique_by_their_source() -> None:
    a = Trajectory("x", "a.jsonl:1", make("x", [1, 2]).content, "g")
    b = Trajectory("x", "b.jsonl:1", make("x", [1, 3]).content, "g")
    ids = build_trie([a, b]).trajectories["trajectory_id"].to_pylist()
    assert ids == ["x@a.jsonl:1", "x@b.jsonl:1"]


@pytest.mark.parametrize("column", ["tree_id", "num_tokens", "trained", "advantages"])
def test_check_notices_damaged_columns(column: str) -> None:
    trie = build_trie([make("a", [1, 2], advantages=np.array([0.5])), make("b", [3, 4], advantages=np.array([1.0]))])
    check_trie(trie)
    field = trie.trajectories.schema.field(column)
    bad = {"trained": [[{"start": 0, "end": 9, "weight": 1.0}]] * 2, "advantages": [[1.0, 2.0]] * 2}
    values = pa.array(bad.get(column, [7, 7]), field.type)
    table = trie.trajectories.set_column(trie.trajectories.column_names.index(column), field, values)
    assert "build the trie again" in refusal(check_trie, replace(trie, trajectories=table))


def test_names_made_unique_never_collide() -> None:
    rollouts = [
        Trajectory(name, "f:1", make("x", [1, 2]).content, "g") for name in ("x", "x", "x@f:1", "x@f:1#2", "x@f:1")
    ]
    ids = build_trie(rollouts).trajectories["trajectory_id"].to_pylist()
    assert len(set(ids)) == 5


def test_no_trajectory_is_an_error() -> None:
    assert "no trajectory with a trained token was found" in refusal(build_trie, [])


def test_5000_nested_prefixes_need_no_recursion() -> None:
    chain = list(range(5001))
    trie = build_trie([make(f"t{n}", chain[: n + 1]) for n in range(1, 5001)])
    assert (trie.num_trajectories, trie.tokens_tree, trie.num_nodes) == (5000, 5001, 5000)


def test_a_node_of_500_000_tokens() -> None:
    trunk = list(range(500_000))
    trie = build_trie([make("a", [*trunk, 1]), make("b", [*trunk, 2])])
    assert trie.node_length.tolist() == [500_000, 1, 1]
