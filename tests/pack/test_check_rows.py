"""The check of packed rows: nearest tokens against their definition, and terms in any order of their trajectories."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from support.manifests import manifest_of
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.pack.check import _nearest, check_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie


def trie_and_rows(trajectories: list[Trajectory]) -> tuple[Trie, list[Row]]:
    trie = build_trie(trajectories)
    return trie, list(pack_rows(trie, plan_rows(trie, capacity=20)))


def nearest_by_definition(subtree_end: list[int]) -> list[int]:
    """The slow twin of `_nearest`: of the tokens before j, the last one whose subtree contains j."""
    return [max((k for k in range(j) if subtree_end[k] > j), default=-1) for j in range(len(subtree_end))]


def row_of_ends(ends: list[int]) -> Row:
    (row,) = trie_and_rows([make("a", [1, 2])])[1]
    return replace(row, subtree_end=np.array(ends, np.int32), input_ids=np.zeros(len(ends), np.int32))


@pytest.mark.parametrize("seed", range(40))
def test_nearest_tokens_follow_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends: list[int] = []
    while len(ends) < 30:  # subtrees that nest: each token's ends by the end of the innermost one that is open
        token = len(ends)
        limit = min((end for end in ends if end > token), default=30)
        ends.append(limit if rng.random() < 0.5 else int(rng.integers(token + 1, limit + 1)))
    assert _nearest(row_of_ends(ends)).tolist() == nearest_by_definition(ends)
    for token in rng.integers(0, 30, size=seed % 4).tolist():  # ends that do not nest, which the check refuses later
        ends[token] = int(rng.integers(token + 1, 31))
    assert _nearest(row_of_ends(ends)).tolist() == nearest_by_definition(ends)
    ends = [int(rng.integers(token + 1, 31)) for token in range(30)]
    assert _nearest(row_of_ends(ends)).tolist() == nearest_by_definition(ends)


def two_with_terms() -> tuple[Trie, Row]:
    a = make("a", [1, 2, 3], reward=1.0, old_logprobs=np.array([-1, -2], np.float32))
    b = make("b", [1, 2, 5], reward=2.0, old_logprobs=np.array([-3, -4], np.float32))
    trie, (row,) = trie_and_rows([a, b])
    return trie, row


def with_terms(row: Row, order: list[int]) -> Row:
    """`row` with its terms in another order."""
    assert row.terms is not None
    columns = {
        field.name: values[order]
        for field in fields(row.terms)
        if field.name != "reward" and (values := getattr(row.terms, field.name)) is not None
    }
    return replace(row, terms=replace(row.terms, **columns))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [2, 3, 0, 1], [2, 0, 3, 1]])
def test_terms_of_several_trajectories_may_alternate(order: list[int]) -> None:
    trie, row = two_with_terms()
    assert row.terms is not None
    assert row.terms.trajectory.tolist() == [0, 0, 1, 1]
    shuffled = with_terms(row, order)
    check_packed([shuffled], manifest_of([shuffled], capacity=20), trie)


@pytest.mark.parametrize("order", [[0, 1, 3, 2], [1, 0, 2, 3], [1, 2, 0, 3]])
def test_terms_of_one_trajectory_are_in_order(order: list[int]) -> None:
    trie, row = two_with_terms()
    shuffled = with_terms(row, order)
    with pytest.raises(TreepackError, match=r"trajectory [ab] has terms that are not its trained tokens"):
        check_packed([shuffled], manifest_of([shuffled], capacity=20), trie)


def test_weights_of_trajectories_are_those_of_the_trie() -> None:
    made = [
        make(name, [1, 2, token], reward=1.0, weight=weight) for name, token, weight in (("a", 3, 2.0), ("b", 5, 1))
    ]
    trie, (row,) = trie_and_rows(made)
    assert row.terms is not None
    assert row.terms.trajectory_weight is not None
    assert row.terms.trajectory_weight.tolist() == [2.0, 1.0]
    check_packed([row], manifest_of([row], capacity=20), trie)
    for wrong in (np.array([1.0, 2.0]), None):
        altered = replace(row, terms=replace(row.terms, trajectory_weight=wrong))
        assert "row 0: trajectory a has another weight than in the trie" in refusal(
            check_packed, [altered], manifest_of([altered], capacity=20), trie
        )
    altered = replace(row, terms=replace(row.terms, trajectory_weight=np.array([2.0, -1.0])))
    assert "row 0: trajectory_weights has an impossible value" in refusal(
        check_packed, [altered], manifest_of([altered], capacity=20), None
    )


def test_weights_of_1_have_no_column() -> None:
    _, row = two_with_terms()
    assert row.terms is not None
    assert row.terms.trajectory_weight is None
