"""Columns in rows: which make terms, which exist, and which values the check of rows refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.manifests import manifest_of
from support.refusal import refusal
from support.strategies import make
from treepack.data.batch import TermTensors, make_batch
from treepack.data.ragged_tensor import RaggedTensor
from treepack.errors import TreepackError
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.ragged import RaggedArray
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie


def packed(rollouts: list[Trajectory], capacity: int = 64) -> list[Row]:
    trie = build_trie(rollouts)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity, method="contiguous")))


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


def row_of_words(ids: RaggedArray, logprobs: RaggedArray) -> list[Row]:
    columns: dict[str, Any] = {"teacher_topk_ids": ids, "teacher_topk_logprobs": logprobs}
    return packed([make("a", [1, 2, 3], reward=1.0, **columns)])


def test_words_of_other_lengths_are_refused(tmp_path: Path) -> None:
    ids, logprobs = RaggedArray.of([[4, 5], [6]], np.int32), RaggedArray.of([[-1.0, -2.0], [-1.0]], np.float32)
    rows = row_of_words(ids, logprobs)
    write_packed(rows, tmp_path, capacity=40)
    (again,) = read_rows(tmp_path)
    assert again.terms is not None
    assert again.terms.teacher_topk_logprobs is not None
    assert again.terms.teacher_topk_logprobs.equals(logprobs)
    wrong = row_of_words(ids, RaggedArray.of([[-1.0], [-1.0]], np.float32))
    assert "differ in length" in refusal(check_packed, wrong, manifest_of(wrong, 40), None)


def test_temperatures_alone_make_no_terms() -> None:
    (row,) = packed([make("a", [1, 2, 3], temperature=0.7)])
    assert row.terms is None


@pytest.mark.parametrize(("bad", "fault"), [(-1.0, "impossible value"), (0.25, "another term_temperature")])
def test_the_check_notices_a_wrong_temperature(bad: float, fault: str) -> None:
    rollouts = [make("a", [1, 2, 3], reward=1.0, temperature=0.7)]
    (row,) = packed(rollouts)
    assert row.terms is not None
    wrong = replace(row, terms=replace(row.terms, temperature=np.array([0.7, bad], np.float32)))
    with pytest.raises(TreepackError, match=fault):
        check_packed([wrong], manifest_of([wrong], 64), build_trie(rollouts))


def sets_of_terms(terms: TermTensors) -> list[list[int]]:
    """The set of each term."""
    if terms.kept_ids is None:
        return [[] for _ in terms.index]
    bounds = list(pairwise(terms.kept_ids.offsets.tolist()))
    return [terms.kept_ids.values[slice(*bounds[i])].tolist() for i in terms.index.tolist()]


def test_temperatures_and_sets_of_a_token_are_told_apart() -> None:
    def rollout(name: str, temperature: float, ids: list[int]) -> Trajectory:
        return make(name, [1, 2], reward=1.0, temperature=temperature, kept_ids=RaggedArray.of([ids], np.int32))

    rollouts = [rollout("a", 1.0, [2, 3]), rollout("b", 0.5, [2, 3]), rollout("c", 0.5, [2]), rollout("d", 0.5, [2])]
    terms = make_batch(packed(rollouts)[0]).terms
    assert terms is not None
    assert terms.temperature is not None
    assert terms.tokens.tolist() == [1, 1, 1]
    found = list(zip(terms.temperature[terms.index.long()].tolist(), sets_of_terms(terms), strict=True))
    assert found == [(1.0, [2, 3]), (0.5, [2, 3]), (0.5, [2]), (0.5, [2])]


def test_sets_alone_make_no_terms_and_rows_without_sets_no_column() -> None:
    (row,) = packed([make("a", [1, 2], kept_ids=RaggedArray.of([[2]], np.int32))])
    assert row.terms is None
    (row,) = packed([make("a", [1, 2], reward=1.0)])
    assert row.terms is not None
    assert row.terms.kept_ids is None


@pytest.mark.parametrize(
    ("bad", "fault"), [([[2], [4]], "term_kept_ids has an impossible value"), ([[2], [3, 4]], "another term_kept_ids")]
)
def test_the_check_notices_wrong_sets(bad: list[list[int]], fault: str) -> None:
    rollouts = [make("a", [1, 2, 3], reward=1.0, kept_ids=RaggedArray.of([[2], [3]], np.int32))]
    (row,) = packed(rollouts)
    assert row.terms is not None
    wrong = replace(row, terms=replace(row.terms, kept_ids=RaggedArray.of(bad, np.int32)))
    with pytest.raises(TreepackError, match=fault):
        check_packed([wrong], manifest_of([wrong], 64), build_trie(rollouts))


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5), st.data())
def test_tensors_of_lists_are_cut_as_lists_of_python_are(lists: list[list[int]], data: st.DataObject) -> None:
    def plain(ragged: RaggedTensor) -> list[list[int]]:
        return [ragged.values[a:b].tolist() for a, b in pairwise(ragged.offsets.tolist())]

    ragged, num = RaggedTensor.of(RaggedArray.of(lists, np.int32)), len(lists)
    begin, end = data.draw(st.integers(0, num)), data.draw(st.integers(0, num))
    assert plain(ragged[begin:end]) == lists[begin:end]
    rows = data.draw(st.lists(st.integers(0, max(num - 1, 0)), max_size=4 if num else 0))
    assert plain(ragged[torch.tensor(rows, dtype=torch.int64)]) == [lists[i] for i in rows]
    assert ragged.owners.tolist() == [i for i, own in enumerate(lists) for _ in own]
