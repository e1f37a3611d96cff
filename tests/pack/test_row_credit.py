"""Returns, old values and factors of edges in rows: every term has those of its trajectory's token, also in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import strategies
from support.manifests import manifest_of
from support.strategies import make
from treepack.columns import COMPUTED
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.pack.capacity import fit_capacity
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.trie import trajectories_of

FIELDS = {"returns": "returns", "old_values": "old_values", "edge_factors": "edge_factor"}


@st.composite
def credited(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories of which some have returns with old values, and some have factors of edges."""
    return [draw(_one(item)) for item in draw(strategies.trajectories(max_count=4))]


@st.composite
def _one(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    content = item.content
    assert isinstance(content, Tokens)
    column = st.lists(st.integers(0, 9), min_size=content.num_trained, max_size=content.num_trained)
    values: dict[str, Any] = {}
    if draw(st.booleans()):
        values |= {"returns": draw(column), "old_values": draw(column)}
    if draw(st.booleans()):
        values["edge_factors"] = draw(column)
    columns: dict[str, Any] = {name: np.array(each, np.float64) for name, each in values.items()}
    return replace(item, advantage=0.5, content=replace(content, **columns))


def packed(rollouts: list[Trajectory], capacity: int = 64) -> list[Row]:
    trie = build_trie(rollouts)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity, method="contiguous")))


def content_of(item: Trajectory) -> Tokens:
    assert isinstance(item.content, Tokens)
    return item.content


@settings(max_examples=12)  # every example writes files
@given(credited(), st.integers(9, 40))
def test_every_term_has_the_values_of_its_token(
    tmp_path_factory: pytest.TempPathFactory, rollouts: list[Trajectory], capacity: int
) -> None:
    trie, rows = build_trie(rollouts), packed(rollouts, capacity)
    check_trie(trie)
    check_packed(rows, manifest_of(rows, capacity), trie)
    folder = tmp_path_factory.mktemp("packed")
    write_packed(rows, folder, capacity=capacity)
    contents = {item.trajectory_id: content_of(item) for item in rollouts}
    for row in read_rows(folder):
        terms = make_batch(row).terms
        assert terms is not None
        for name, field in FIELDS.items():
            column = getattr(terms, field)
            assert (column is None) == all(getattr(each, name) is None for each in contents.values())
            for i, trajectory in enumerate(row.trajectory_ids):
                if column is not None:
                    own = column[terms.trajectory == i].numpy()
                    expected = getattr(contents[trajectory], name)
                    np.testing.assert_equal(own, np.full(len(own), np.nan) if expected is None else expected)


@given(credited())
def test_a_trie_gives_the_values_back(rollouts: list[Trajectory]) -> None:
    trie = build_trie(rollouts)
    contents = {item.trajectory_id: content_of(item) for item in trajectories_of(trie)}
    for item in rollouts:
        for name in FIELDS:
            np.testing.assert_equal(getattr(contents[item.trajectory_id], name), getattr(content_of(item), name))
            has_values = any(getattr(content_of(each), name) is not None for each in rollouts)
            assert (name in trie.trajectories.column_names) == has_values


def test_files_without_such_values_have_no_such_columns(tmp_path: Path) -> None:
    write_packed(packed([make("a", [1, 2, 3], advantage=1.0)]), tmp_path, capacity=64)
    (row,) = read_rows(tmp_path)
    assert row.terms is not None
    assert (row.terms.returns, row.terms.old_values, row.terms.edge_factor) == (None, None, None)
    assert not set(build_trie([make("a", [1, 2])]).trajectories.column_names) & {column.stored for column in COMPUTED}


def test_a_truncated_trajectory_keeps_the_values_of_its_tokens() -> None:
    trie = build_trie([make("a", [1, 2, 3, 4], returns=[1.0, 2.0, 3.0], old_values=[4.0, 5.0, 6.0])])
    shorter, _ = fit_capacity(trie, 3, too_long="truncate")
    (item,) = trajectories_of(shorter)
    assert [content_of(item).returns.tolist(), content_of(item).old_values.tolist()] == [[1, 2], [4, 5]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "bad", "fault"),
    [
        ("returns", np.inf, "term_return has an impossible value"),
        ("returns", 3.0, "another term_return"),
        ("returns", np.nan, "term_old_value without term_return"),
        ("old_values", np.nan, "another term_old_value"),
        ("old_values", 3.0, "another term_old_value"),
        ("edge_factor", -1.0, "term_edge_factor has an impossible value"),
        ("edge_factor", 3.0, "another term_edge_factor"),
    ],
)
def test_the_check_notices_a_wrong_value_of_a_row(field: str, bad: float, fault: str) -> None:
    values: dict[str, Any] = {"returns": [1.0, 2.0], "old_values": [0.5, 0.25], "edge_factors": [0.5, 0.5]}
    rollouts = [make("a", [1, 2, 3], advantage=1.0, **values)]
    (row,) = packed(rollouts)
    assert row.terms is not None
    wrong: dict[str, Any] = {field: np.array([bad, getattr(row.terms, field)[1]])}
    changed = replace(row, terms=replace(row.terms, **wrong))
    with pytest.raises(TreepackError, match=fault):
        check_packed([changed], manifest_of([changed], 64), build_trie(rollouts))


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"old_values": [1.0, 2.0]}, "has old_values and no returns"),
        ({"returns": [1.0, 2.0], "old_values": [1.0, np.nan]}, "impossible old_values"),
        ({"edge_factors": [1.0, -2.0]}, "impossible edge_factors"),
        ({"edge_factors": [1.0]}, "edge_factors has 1 values"),
    ],
)
def test_the_check_notices_a_wrong_value_of_a_trajectory(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(TreepackError, match=f"trajectory b: .*{fault}"):
        check_trie(build_trie([make("a", [1, 2, 3]), make("b", [1, 2, 4], **values)]))
