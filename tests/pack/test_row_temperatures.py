"""Temperatures in rows: every term has that of its trajectory's token, also in files, and none is made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.manifests import manifest_of
from support.strategies import make
from support.tempered import tempered, token_temperatures
from treepack.errors import TreepackError
from treepack.pack.capacity import fit_capacity
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import trajectories_of


def packed(rollouts: list[Trajectory], capacity: int = 64) -> list[Row]:
    trie = build_trie(rollouts)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity, method="contiguous")))


def temperatures_by_name(rows: list[Row]) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {}
    for row in rows:
        assert row.terms is not None
        assert row.terms.temperature is not None
        for i, name in enumerate(row.trajectory_ids):
            result[name] = row.terms.temperature[row.terms.trajectory == i].tolist()
    return result


@given(tempered(), st.integers(9, 40))
def test_every_term_has_the_temperature_of_its_token(rollouts: list[Trajectory], capacity: int) -> None:
    rollouts = [replace(rollouts[0], temperature=0.5), *rollouts[1:]]  # at least one has a temperature
    rows = packed(rollouts, capacity)
    check_packed(rows, manifest_of(rows, capacity), build_trie(rollouts))
    expected = {item.trajectory_id: token_temperatures(item).tolist() for item in rollouts}
    np.testing.assert_equal(temperatures_by_name(rows), expected)


@given(tempered())
def test_files_give_the_temperatures_back(tmp_path_factory: pytest.TempPathFactory, rollouts: list[Trajectory]) -> None:
    rows, folder = packed(rollouts), tmp_path_factory.mktemp("packed")
    write_packed(rows, folder, capacity=64)
    for row, again in zip(rows, read_rows(folder), strict=True):
        assert row.terms is not None
        assert again.terms is not None
        np.testing.assert_equal(again.terms.temperature, row.terms.temperature)


def test_rows_have_no_such_column_if_no_trajectory_has_a_temperature() -> None:
    (row,) = packed([make("a", [1, 2, 3], reward=1.0)])
    assert row.terms is not None
    assert row.terms.temperature is None


def test_temperatures_alone_make_no_terms() -> None:
    (row,) = packed([make("a", [1, 2, 3], temperature=0.7)])
    assert row.terms is None


def test_a_truncated_trajectory_keeps_the_temperatures_of_its_tokens() -> None:
    trie = build_trie([make("a", [1, 2, 3, 4], temperatures=[0.5, 0.25, 1.0])])
    shorter, _ = fit_capacity(trie, 3, too_long="truncate")
    assert [token_temperatures(item).tolist() for item in trajectories_of(shorter)] == [[0.5, 0.25]]


@pytest.mark.parametrize(("bad", "fault"), [(-1.0, "impossible value"), (0.25, "another term_temperature")])
def test_the_check_notices_a_wrong_temperature(bad: float, fault: str) -> None:
    rollouts = [make("a", [1, 2, 3], reward=1.0, temperature=0.7)]
    (row,) = packed(rollouts)
    assert row.terms is not None
    wrong = replace(row, terms=replace(row.terms, temperature=np.array([0.7, bad], np.float32)))
    with pytest.raises(TreepackError, match=fault):
        check_packed([wrong], manifest_of([wrong], 64), build_trie(rollouts))
