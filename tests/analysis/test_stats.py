"""Statistics: every figure follows from the trajectories alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle, strategies
from support.strategies import make
from treepack.analysis import describe as describe_module
from treepack.analysis.capacities import plan_capacities, predicted_totals
from treepack.analysis.describe import describe_rows, describe_trie, por_by_depth, quantiles
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.totals import trie_totals


@given(strategies.trajectories(steps=False))
def test_totals_follow_from_the_sequences(trajectories: list[Trajectory]) -> None:
    contents = [t.content for t in trajectories if isinstance(t.content, Tokens)]
    totals = trie_totals(build_trie(trajectories))
    flat = sum(len(content.tokens) for content in contents)
    tree = oracle.union_tokens([content.tokens.tolist() for content in contents])
    assert totals["num_trajectories"] == len(trajectories)
    assert totals["num_groups"] == len({t.group_id for t in trajectories})
    assert (totals["tokens_flat"], totals["tokens_tree"]) == (flat, tree)
    assert totals["tokens_trained"] == sum(content.num_trained for content in contents)
    assert totals["por"] == pytest.approx(1 - tree / flat)


@given(strategies.trajectories())
def test_depth_ranges_add_up(trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describe_module, "FIRST_DEPTH", 2)
        ranges = por_by_depth(trie)
    assert sum(part["tokens_flat"] for part in ranges) == trie.tokens_flat
    assert sum(part["tokens_tree"] for part in ranges) == trie.tokens_tree
    assert [part["start"] for part in ranges[1:]] == [part["end"] for part in ranges[:-1]]


def test_overlap_lies_where_it_is() -> None:
    trie = build_trie([make(f"t{i}", [1] * 256 + [i + 2] * 256) for i in range(4)])
    assert [part["por"] for part in por_by_depth(trie)] == [0.75, 0.0]


@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 24))
def test_predictions_are_what_packing_gives(trajectories: list[Trajectory], capacity: int) -> None:
    trie = build_trie(trajectories)
    rows = list(pack_rows(trie, plan_rows(trie, capacity=capacity)))
    (predicted,) = predicted_totals(plan_capacities(trie, [capacity], method="auto", too_long="error"))
    tokens = sum(row.num_tokens for row in rows)
    assert (predicted["num_rows"], predicted["tokens_packed"]) == (len(rows), tokens)
    assert predicted["err"] == pytest.approx(1 - tokens / trie.tokens_flat)
    assert predicted["fill"] == pytest.approx(tokens / (len(rows) * capacity))
    assert predicted["lower_bound"] <= tokens
    assert predicted["err"] <= 1 - trie.tokens_tree / trie.tokens_flat + 1e-12


def test_predictions_count_what_does_not_fit() -> None:
    trie = build_trie([make("a", [1, 2]), make("b", [1, 2, 3, 4, 5])])
    (predicted,) = predicted_totals(plan_capacities(trie, [3], method="contiguous", too_long="drop"))
    assert (predicted["num_too_long"], predicted["tokens_packed"]) == (1, 2)


@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 24))
def test_rows_are_described_by_their_own_columns(trajectories: list[Trajectory], capacity: int) -> None:
    trie = build_trie(trajectories)
    rows = list(pack_rows(trie, plan_rows(trie, capacity=capacity)))
    report = describe_rows(rows)
    assert report["lengths"] == quantiles(np.sort(trie.lengths))
    assert sum(part["tokens_flat"] for part in report["err_by_depth"]) == trie.tokens_flat
    assert sum(part["tokens_packed"] for part in report["err_by_depth"]) == sum(row.num_tokens for row in rows)
    assert report["row_trajectories"]["count"] == len(rows)


def test_reports_are_plain_json() -> None:
    trie = build_trie([make("a", [1, 2]), make("b", [1, 3], group="h")])
    planned = plan_capacities(trie, [8], method="heuristic", too_long="drop")
    report = describe_trie(trie) | {"predicted": predicted_totals(planned)}
    assert json.loads(json.dumps(report)) == report
