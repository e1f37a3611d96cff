"""Trees of token ids: one trajectory per path, weighted as their trainers weight them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.readings import read_as, tokens_of, trajectories
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.trajectory import Trajectory

SAMPLES = ROLLOUTS / "token-trees"


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as("token-trees", value))


def test_each_path_of_a_tree_trains_all_that_its_nodes_mark_with_its_share_of_the_mean() -> None:
    found = read(json.loads((SAMPLES / "prime_rl.jsonl").read_text()))
    trunk = [1, 10, 11, 2, 30, 31, 2, 1, 40, 2]
    assert [back(item)[:2] for item in found] == [
        ([*trunk, 30, 32, 2], [4, 5, 6, 10, 11, 12]),
        ([*trunk, 30, 33, 2], [4, 5, 6, 10, 11, 12]),
        ([1, 10, 11, 2, 34, 2], [4, 5]),
    ]
    assert [item.weight for item in found] == [1 / 3] * 3
    assert [(item.trajectory_id, item.group_id) for item in found] == [
        (f"r.jsonl:1/leaf-{leaf}", "r.jsonl:1") for leaf in range(3)
    ]
    advantages = [tokens_of(item).advantage for item in found]
    assert [None if each is None else each.tolist() for each in advantages] == [
        [0.5, 0.5, 0.5, 1.0, 1.0, 1.0],
        [0.5, 0.5, 0.5, -1.0, -1.0, -1.0],
        [-0.5, -0.5],
    ]


def test_advantages_that_nobody_set_are_none() -> None:
    (trajectory,) = read({"nodes": [{"parent": -1, "token_ids": [1, 2], "loss_mask": [False, True], "advantage": 0.0}]})
    assert tokens_of(trajectory).advantage is None


def test_completions_of_a_prompt_are_trained_from_their_first_token_on() -> None:
    found = read(json.loads((SAMPLES / "automodel.jsonl").read_text()))
    assert [back(item)[:2] for item in found] == [
        ([1, 10, 11, 2, 30, 31, 2], [4, 5, 6]),
        ([1, 10, 11, 2, 30, 32, 33, 2], [4, 5, 6, 7]),
    ]
    assert {item.group_id for item in found} == {"r.jsonl:1"}


def test_a_tree_that_contradicts_itself_is_refused() -> None:
    node = {"parent": -1, "token_ids": [1], "loss_mask": [True]}
    for other, said in (
        (node | {"parent": 1}, "node 1 has the parent 1; expected null or an earlier node"),
        (node | {"parent": 0, "loss_mask": []}, "node 1 has the loss_mask []; expected one value for each of 1 tokens"),
    ):
        with pytest.raises(TreepackError, match="node 1 has") as caught:
            read({"nodes": [node, other]})
        assert said in str(caught.value)
