"""Rows: the columns follow the definition, weights add up, and the check notices every kind of damage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support import oracle, strategies
from support.manifests import manifest_of
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.pack.capacity import fit_capacity
from treepack.pack.check import check_packed, check_row
from treepack.pack.options import NORMALIZE, SEMANTICS
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.planning import FOREST_METHODS, METHODS, packed_trie, plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import trajectories_of


def packed(trajectories: list[Trajectory], capacity: int, method: str = "contiguous", **options: Any) -> list[Row]:
    trie = build_trie(trajectories)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity, method=method), **options))


def own_weights(trajectories: list[Trajectory], *, semantics: str, normalize: str) -> dict[str, dict[int, float]]:
    """Loss weight of every trajectory at every position, from the definitions, one dictionary at a time."""
    plain: dict[str, dict[int, float]] = {}
    for t in trajectories:
        assert isinstance(t.content, Tokens)
        c = t.content
        spans = zip(c.starts.tolist(), c.ends.tolist(), c.span_weights.tolist(), strict=True)
        plain[t.trajectory_id] = {d: t.weight * w for a, b, w in spans for d in range(a, b)}
    weights: dict[str, dict[int, float]] = {}
    for t in trajectories:
        peers = {"token": [], "trajectory": [t], "group": same_group(t, trajectories)}[normalize]
        total = sum(sum(plain[p.trajectory_id].values()) for p in peers) if peers else 1.0
        factor = t.weight if normalize == "trajectory" else 1.0
        weights[t.trajectory_id] = {
            d: factor * w / total / (trained_by(t, d, trajectories, plain) if semantics == "once" else 1)
            for d, w in plain[t.trajectory_id].items()
        }
    return weights


def same_group(t: Trajectory, trajectories: list[Trajectory]) -> list[Trajectory]:
    return [p for p in trajectories if (p.step, p.group_id) == (t.step, t.group_id)]


def trained_by(t: Trajectory, d: int, trajectories: list[Trajectory], plain: dict[str, dict[int, float]]) -> int:
    def prefix(p: Trajectory) -> list[int]:
        assert isinstance(p.content, Tokens)
        return list(p.content.tokens[: d + 1].tolist())

    return sum(p.step == t.step and prefix(p) == prefix(t) and d in plain[p.trajectory_id] for p in trajectories)


@given(
    trajectories=strategies.trajectories(),
    capacity=st.integers(9, 20),
    method=st.sampled_from(sorted(METHODS)),
    semantics=st.sampled_from(SEMANTICS),
    normalize=st.sampled_from(NORMALIZE),
)
def test_rows_hold_each_trajectory_once_with_its_weights(
    trajectories: list[Trajectory], capacity: int, method: str, semantics: str, normalize: str
) -> None:
    weights = own_weights(trajectories, semantics=semantics, normalize=normalize)
    tokens = {t.trajectory_id: t.content.tokens.tolist() for t in trajectories if isinstance(t.content, Tokens)}
    seen = []
    for row in packed(trajectories, capacity, method, semantics=semantics, normalize=normalize):
        parent = row.parent.tolist()
        expected = np.zeros(row.num_tokens)
        for name, end in zip(row.trajectory_ids, row.trajectory_ends.tolist(), strict=True):
            path = oracle.path_of(parent, end)
            assert row.input_ids[path].tolist() == tokens[name]
            for d, weight in weights[name].items():
                expected[path[d]] += weight
            seen.append(name)
        np.testing.assert_allclose(row.loss_weight, expected, rtol=1e-12)
    assert sorted(seen) == sorted(tokens)


@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 20))
def test_columns_follow_the_definition(trajectories: list[Trajectory], capacity: int) -> None:
    for row in packed(trajectories, capacity):
        parent = row.parent.tolist()
        ends = row.trajectory_ends.tolist()
        for q in range(row.num_tokens):
            sees = {k for k in range(q + 1) if q < row.subtree_end[k]}
            assert sees == oracle.visible(parent, q)
            assert row.position_ids[q] == len(sees) - 1
            assert row.scale[q] == sum(q in oracle.visible(parent, end) for end in ends)
        assert row.num_tokens <= capacity
        assert row.num_pairs == sum(len(oracle.visible(parent, q)) for q in range(row.num_tokens))


@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 20), semantics=st.sampled_from(SEMANTICS))
def test_packed_rows_pass_the_check(trajectories: list[Trajectory], capacity: int, semantics: str) -> None:
    trie = build_trie(trajectories)
    rows = list(pack_rows(trie, plan_rows(trie, capacity=capacity), semantics=semantics))
    check_packed(rows, manifest_of(rows, capacity, semantics), trie)


@pytest.mark.parametrize("method", [*METHODS, *FOREST_METHODS])
@settings(max_examples=15)  # of each method
@given(
    trajectories=strategies.trajectories(),
    capacity=st.integers(9, 20),
    pairs=st.none() | st.integers(45, 90),
    terms=st.none() | st.integers(8, 20),
    ranks=st.integers(1, 3),
    normalize=st.sampled_from(NORMALIZE),
)
def test_rows_of_every_method_within_budgets_and_for_ranks_pass_the_check(
    method: str,
    trajectories: list[Trajectory],
    capacity: int,
    pairs: int | None,
    terms: int | None,
    ranks: int,
    normalize: str,
) -> None:
    trie = build_trie(trajectories)
    try:
        plan = plan_rows(trie, capacity=RowLimits(capacity, pairs, terms), method=method, multiple_of=ranks)
    except TreepackError as error:
        assume("too few for" not in str(error))
        raise
    laid_out = packed_trie(trie, method)
    check_plan(laid_out, plan)
    rows = list(pack_rows(laid_out, plan, normalize=normalize))
    check_packed(rows, manifest_of(rows, capacity, normalize=normalize), laid_out)


def test_once_counts_a_shared_token_once() -> None:
    (row,) = packed([make("a", [1, 2, 3]), make("b", [1, 2, 4]), make("c", [1, 2])], 10, semantics="once")
    assert row.loss_weight.tolist() == pytest.approx([0, 1, 1, 1])


def test_normalize_trajectory_and_group_weigh_alike() -> None:
    trajectories = [make("a", [1, 2, 3], group="g"), make("b", [1, 4], group="g"), make("c", [9, 9, 9, 9], group="h")]
    by_trajectory = packed(trajectories, 20, normalize="trajectory")
    by_group = packed(trajectories, 20, normalize="group")
    assert sum(row.total_weight for row in by_trajectory) == pytest.approx(3)
    assert sum(row.total_weight for row in by_group) == pytest.approx(2)


def test_weights_of_very_different_size_do_not_cancel() -> None:
    large = make("a", [1, 2, 3], spans=[(1, 2, 1e9), (2, 3, 1000000000.5)])
    small = make("b", [4, 5, 6], spans=[(1, 3, 1e-9)])
    (row,) = packed([large, small], 10, normalize="trajectory")
    assert row.loss_weight[3:].tolist() == pytest.approx([0, 0.5, 0.5])


def test_weights_that_overflow_are_refused() -> None:
    assert "trajectory a: its loss weights overflow" in refusal(
        packed, [make("a", [1, 2], spans=[(1, 2, 5e-324)])], 10, normalize="trajectory"
    )


def test_terms_carry_what_the_trajectories_carry() -> None:
    a = make("a", [1, 2, 3], reward=1.0, advantage=0.5, sampling_logprobs=np.array([-1, -2], np.float32))
    b = make("b", [1, 2, 4], spans=[(2, 3, 1.0)], advantages=np.array([0.25]))
    (row,) = packed([a, b], 10)
    terms = row.terms
    assert terms is not None
    assert terms.token.tolist() == [1, 2, 3]
    assert terms.trajectory.tolist() == [0, 0, 1]
    assert terms.weight.tolist() == [1, 1, 1]
    assert terms.advantage is not None
    assert terms.advantage.tolist() == [0.5, 0.5, 0.25]
    assert terms.sampling_logprob is not None
    np.testing.assert_array_equal(terms.sampling_logprob, np.array([-1, -2, np.nan], np.float32))
    assert terms.ref_logprob is None


def test_rows_without_rewards_have_no_terms() -> None:
    assert packed([make("a", [1, 2])], 10)[0].terms is None


def test_rows_name_the_groups_and_rewards_of_their_trajectories() -> None:
    trajectories = [
        make("a", [1, 2, 3], group="x", reward=2.0),
        make("b", [1, 2], group="y"),
        make("c", [4, 5], reward=0.5),
    ]
    (row,) = packed(trajectories, 10)
    assert (row.trajectory_ids, row.trajectory_groups) == (["b", "a", "c"], ["y", "x", "g"])
    assert row.terms is not None
    assert row.terms.reward is not None
    np.testing.assert_array_equal(row.terms.reward, [np.nan, 2.0, 0.5])


def test_check_notices_wrong_groups_and_rewards() -> None:
    trie = build_trie([make("a", [1, 2, 3], reward=1.0), make("b", [1, 2, 4, 5], reward=0.0)])
    (row,) = pack_rows(trie, plan_rows(trie, capacity=10))
    check_packed([row], manifest_of([row], 10), trie)
    assert row.terms is not None
    for rewards in (np.array([1.0, 1.0]), np.array([np.nan, 0.0]), np.array([1.0]), None):
        wrong = replace(row, terms=replace(row.terms, reward=rewards))
        with pytest.raises(TreepackError, match=r"row 0: .*reward"):
            check_packed([wrong], manifest_of([row], 10), trie)
    for groups in (["g", "h"], ["g"]):
        assert "row 0: traj" in refusal(
            check_packed, [replace(row, trajectory_groups=groups)], manifest_of([row], 10), trie
        )


def damaged(row: Row, column: str, token: int, value: float) -> Row:
    values = getattr(row, column).copy()
    values[token] = value
    return replace(row, **{column: values})


@pytest.mark.parametrize(
    ("column", "token", "value"),
    [
        ("subtree_end", 0, 3),
        ("subtree_end", 2, 9),
        ("parent", 3, 2),
        ("parent", 1, -1),
        ("position_ids", 3, 3),
        ("scale", 1, 1),
        ("loss_weight", 0, 1.0),
        ("loss_weight", 1, np.nan),
        ("loss_weight", 1, 5.0),
        ("input_ids", 2, 99),
    ],
)
def test_check_notices_damage(column: str, token: int, value: float) -> None:
    trie = build_trie([make("a", [1, 2, 3]), make("b", [1, 2, 4, 5])])
    (row,) = pack_rows(trie, plan_rows(trie, capacity=10))
    check_packed([row], manifest_of([row], 10), trie)
    assert "row 0" in refusal(check_packed, [damaged(row, column, token, value)], manifest_of([row], 10), trie)


@pytest.mark.parametrize(
    ("column", "value"),
    [("token", 99), ("token", 3), ("trajectory", 1), ("trajectory", 7), ("weight", 9), ("advantage", 9)],
)
def test_check_notices_wrong_terms(column: str, value: float) -> None:
    trie = build_trie([make("a", [1, 2, 3], advantage=0.5), make("b", [1, 2, 4, 5], advantage=-1.0)])
    (row,) = pack_rows(trie, plan_rows(trie, capacity=10))
    check_packed([row], manifest_of([row], 10), trie)
    assert row.terms is not None
    values = getattr(row.terms, column).copy()
    values[0] = value
    assert "row 0" in refusal(
        check_packed, [replace(row, terms=replace(row.terms, **{column: values}))], manifest_of([row], 10), trie
    )


def test_check_notices_rows_over_capacity_and_lost_trajectories() -> None:
    trie = build_trie([make("a", [1, 2, 3]), make("b", [4, 5])])
    (row,) = pack_rows(trie, plan_rows(trie, capacity=10))
    assert "has 5 tokens; expected 1 to 4" in refusal(check_row, row, capacity=4)
    lost = list(pack_rows(build_trie([make("b", [4, 5])]), plan_rows(build_trie([make("b", [4, 5])]), capacity=10)))
    assert "trajectory 'a' and 0 more are in no row" in refusal(check_packed, lost, manifest_of(lost, 10), trie)


@given(trajectories=strategies.trajectories(max_length=9), capacity=st.integers(2, 9))
def test_truncation_keeps_the_beginning(trajectories: list[Trajectory], capacity: int) -> None:
    trie = build_trie(trajectories)
    expected = {}
    for t in trajectories:
        assert isinstance(t.content, Tokens)
        if len(t.content.tokens) <= capacity or (t.content.starts < capacity).any():
            expected[t.trajectory_id] = t.content.tokens[:capacity].tolist()
    if not expected:
        assert "no trajectory fits" in refusal(fit_capacity, trie, capacity, too_long="truncate")
        return
    fitted, _ = fit_capacity(trie, capacity, too_long="truncate")
    kept = {t.trajectory_id: t.content for t in trajectories_of(fitted)}
    assert {name: c.tokens.tolist() for name, c in kept.items() if isinstance(c, Tokens)} == expected
    assert all(c.ends.max() <= capacity for c in kept.values() if isinstance(c, Tokens))


def test_dropping_counts() -> None:
    trie = build_trie([make("a", [1, 2]), make("b", [1, 2, 3, 4])])
    fitted, counts = fit_capacity(trie, 3, too_long="drop")
    assert fitted.trajectories["trajectory_id"].to_pylist() == ["a"]
    assert counts == {"dropped: longer than the capacity": 1}
