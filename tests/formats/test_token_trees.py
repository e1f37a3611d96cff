"""Trees of token ids: one trajectory per path, weighted as their trainers weight them."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import read_as, tokens_of, trajectories
from treepack.errors import TreepackError
from treepack.trajectory import Trajectory


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as("token-trees", value))


def test_advantages_that_nobody_set_are_none() -> None:
    (trajectory,) = read({"nodes": [{"parent": -1, "token_ids": [1, 2], "loss_mask": [False, True], "advantage": 0.0}]})
    assert tokens_of(trajectory).advantage is None


def test_a_tree_that_contradicts_itself_is_refused() -> None:
    node = {"parent": -1, "token_ids": [1], "loss_mask": [True]}
    for other, said in (
        (node | {"parent": 1}, "node 1 has the parent 1; expected null or an earlier node"),
        (node | {"parent": 0, "loss_mask": []}, "node 1 has the loss_mask []; expected one value for each of 1 tokens"),
    ):
        with pytest.raises(TreepackError, match="node 1 has") as caught:
            read({"nodes": [node, other]})
        assert said in str(caught.value)
