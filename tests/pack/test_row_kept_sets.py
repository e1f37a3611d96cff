"""Kept sets in rows: every term has that of its trajectory's token, also in files and batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.kept import as_lists, kept, token_sets
from support.manifests import manifest_of
from support.strategies import make
from treepack.data.batch import TermTensors, make_batch
from treepack.data.joined import join_rows, terms_of_row
from treepack.data.ragged_tensor import RaggedTensor
from treepack.errors import TreepackError
from treepack.pack.capacity import fit_capacity
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row, concatenate_rows
from treepack.pack.rows import pack_rows
from treepack.ragged import RaggedArray
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import trajectories_of

Sets = dict[str, list[list[int]]]


def packed(rollouts: list[Trajectory], capacity: int = 64) -> list[Row]:
    trie = build_trie(rollouts)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity, method="contiguous")))


def sets_by_name(rows: list[Row]) -> Sets:
    result: Sets = {}
    for row in rows:
        assert row.terms is not None
        lists = row.terms.kept_ids
        lists = RaggedArray.empty(len(row.terms.token), np.int32) if lists is None else lists
        for i, name in enumerate(row.trajectory_ids):
            result[name] = as_lists(lists[np.flatnonzero(row.terms.trajectory == i)])
    return result


def expected(rollouts: list[Trajectory]) -> Sets:
    return {item.trajectory_id: token_sets(item) for item in rollouts}


@given(kept(), st.integers(9, 40))
def test_every_term_has_the_set_of_its_token(rollouts: list[Trajectory], capacity: int) -> None:
    rows = packed(rollouts, capacity)
    check_packed(rows, manifest_of(rows, capacity), build_trie(rollouts))
    assert sets_by_name(rows) == expected(rollouts)


@given(kept())
def test_files_give_the_sets_back(tmp_path_factory: pytest.TempPathFactory, rollouts: list[Trajectory]) -> None:
    rows, folder = packed(rollouts), tmp_path_factory.mktemp("packed")
    write_packed(rows, folder, capacity=64)
    assert sets_by_name(list(read_rows(folder))) == expected(rollouts)


@given(kept(), st.integers(9, 20))
def test_concatenated_rows_have_the_sets_of_each(rollouts: list[Trajectory], capacity: int) -> None:
    rows = [row for row in packed(rollouts, capacity) if row.step == packed(rollouts, capacity)[0].step]
    assert sets_by_name([concatenate_rows(rows)]) == sets_by_name(rows)


def sets_of_terms(terms: TermTensors) -> list[list[int]]:
    """The set of each term."""
    if terms.kept_ids is None:
        return [[] for _ in terms.index]
    bounds = list(pairwise(terms.kept_ids.offsets.tolist()))
    return [terms.kept_ids.values[slice(*bounds[i])].tolist() for i in terms.index.tolist()]


@given(kept(), st.integers(9, 20))
def test_the_terms_of_a_batch_have_their_sets(rollouts: list[Trajectory], capacity: int) -> None:
    rows = packed(rollouts, capacity)
    batches = [make_batch(row) for row in rows]
    for row, batch in zip(rows, batches, strict=True):
        assert row.terms is not None
        assert batch.terms is not None
        lists = [[] for _ in row.terms.token] if row.terms.kept_ids is None else as_lists(row.terms.kept_ids)
        assert sets_of_terms(batch.terms) == lists
        assert batch.terms.tokens[batch.terms.index.long()].tolist() == row.terms.token.tolist()
        # A token occurs once for each of its sets.
        pairs = {(token, tuple(own)) for token, own in zip(row.terms.token.tolist(), lists, strict=True)}
        assert len(batch.terms.tokens) == len(pairs)
    joined = join_rows(batches)
    if joined.edges is not None:
        assert joined.terms is not None
        for i, batch in enumerate(batches):
            assert batch.terms is not None
            assert sets_of_terms(terms_of_row(joined.terms, joined.edges, i)) == sets_of_terms(batch.terms)


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


def test_a_truncated_trajectory_keeps_the_sets_of_its_tokens() -> None:
    lists = RaggedArray.of([[2], [0, 3], [4]], np.int32)
    shorter, _ = fit_capacity(build_trie([make("a", [1, 2, 3, 4], kept_ids=lists)]), 3, too_long="truncate")
    assert [token_sets(item) for item in trajectories_of(shorter)] == [[[2], [0, 3]]]


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
