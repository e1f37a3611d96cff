"""Columns and routes of rows: which make terms, which exist, and which values the check of rows refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.manifests import manifest_of
from support.oracle import path_of
from support.recorded_routes import routed_trajectories
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.analysis.check import check
from treepack.data.batch import TermTensors, make_batch
from treepack.data.dataset import PackedDataset
from treepack.data.ragged_tensor import RaggedTensor
from treepack.errors import TreepackError
from treepack.files.manifest import Provenance, read_manifest
from treepack.files.remote.location import locate
from treepack.files.routes import route_array
from treepack.pack.check import check_packed
from treepack.pack.directory import pack_trie
from treepack.pack.files import read_rows, write_packed
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_packing
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row, concatenate_rows
from treepack.pack.rows import pack_rows
from treepack.ragged import RaggedArray
from treepack.trajectory import Routes, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.row_groups import read_footers
from treepack.trie.store.trie_files import write_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import trajectories_of


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


CAPACITY = 12


def routes_by_id(rows: list[Row]) -> dict[str, list[object]]:
    result = {}
    for row in rows:
        assert row.routes is not None
        for name, end in zip(row.trajectory_ids, row.trajectory_ends.tolist(), strict=True):
            result[name] = row.routes[path_of(row.parent.tolist(), end)].tolist()
    return result


def expected_routes(trie_trajectories: list[Trajectory]) -> dict[str, list[object]]:
    result = {}
    for each in trie_trajectories:
        assert isinstance(each.content, Tokens)
        routes: Routes | None = each.content.routes
        assert routes is not None
        result[each.trajectory_id] = routes.tolist()
    return result


@settings(max_examples=20)
@given(data=st.data(), dtype=st.sampled_from([np.uint8, np.uint16]))
def test_rows_files_and_joined_rows_have_the_routes_of_the_trie(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    dtype: type[np.unsignedinteger],
) -> None:
    trie = build_trie(data.draw(routed_trajectories(dtype=dtype)))
    expected = expected_routes([*trajectories_of(trie)])
    rows = [*plan_packing(trie, PackOptions(capacity=CAPACITY))]
    assert routes_by_id(rows) == expected
    assert routes_by_id([concatenate_rows(rows)]) == expected
    folder = tmp_path_factory.mktemp("packed")
    write_packed(rows, folder, capacity=CAPACITY)
    assert routes_by_id([*read_rows(folder)]) == expected
    dataset = PackedDataset(folder, routes=True)
    assert dataset.has_routes
    for batch, row in zip(dataset, rows, strict=True):
        assert batch.routes is not None
        assert row.routes is not None
        assert batch.routes.dtype == (torch.uint8 if dtype == np.uint8 else torch.int16)
        assert batch.routes.numpy().view(dtype).tolist() == row.routes.tolist()
    assert PackedDataset(folder)[0].routes is None


def test_padding_has_no_recorded_routes() -> None:
    routes = np.ones((3, 2, 2), np.uint16)
    (row,) = plan_packing(build_trie([_simple(routes)]), PackOptions(capacity=CAPACITY))
    batch = make_batch(row, multiple=8)
    assert batch.routes is not None
    assert batch.routes[:3].tolist() == routes.tolist()
    assert (batch.routes[3:] == -1).all()
    assert batch.routes.shape == (8, 2, 2)


def test_a_check_compares_the_routes_with_those_of_the_trie(tmp_path: Path) -> None:
    build = build_trie([_simple(np.array([[[0, 1]], [[1, 2]], [[2, 0]]], np.uint8))])
    (tmp_path / "trie").mkdir()
    write_trie(build, tmp_path / "trie", Provenance(totals=trie_totals(build)))
    pack_trie(tmp_path / "trie", tmp_path / "packed", PackOptions(capacity=CAPACITY))
    assert check(tmp_path / "packed")["against_trie"]
    (row,) = read_rows(tmp_path / "packed")
    manifest = read_manifest(tmp_path / "packed")
    assert row.routes is not None
    for routes in (row.routes[::-1], None):
        assert "trajectory 'a' differs from the trie's" in refusal(
            check_packed, [replace(row, routes=routes)], manifest, build
        )


def test_slices_of_a_trie_with_routes_are_refused_with_both_remedies(tmp_path: Path) -> None:
    trie = saved(build_trie([_simple(np.array([[[0, 1]], [[1, 2]], [[2, 0]]], np.uint8))]), tmp_path / "trie")
    with pytest.raises(TreepackError, match=r"has recorded routes, .* pack it without --ray and --partitions"):
        read_footers(locate(trie))


def test_a_row_with_too_few_bytes_is_refused() -> None:
    assert "row 3: has 5 bytes of routes" in refusal(route_array, b"12345", (3, 1, 1), "row 3")


def _simple(routes: Routes) -> Trajectory:
    tokens = np.array([5, 6, 7], np.int32)
    one = np.array([1], np.int32)
    return Trajectory("a", "a", Tokens(tokens, one, one + np.int32(2), np.ones(1), routes=routes))
