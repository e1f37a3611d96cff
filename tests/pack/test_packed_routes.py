"""Packed rows keep the recorded routes of each of their trajectories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.oracle import path_of
from support.recorded_routes import routed_trajectories
from support.refusal import refusal
from support.trie_files import saved
from treepack.analysis.check import check
from treepack.data.batch import make_batch
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.files.manifest import Provenance, read_manifest
from treepack.files.remote.location import locate
from treepack.files.routes import route_array
from treepack.pack.check import check_packed
from treepack.pack.directory import pack_trie
from treepack.pack.files import read_rows, write_packed
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_packing
from treepack.pack.row import Row, concatenate_rows
from treepack.trajectory import Routes, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.row_groups import read_footers
from treepack.trie.store.trie_files import write_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import trajectories_of

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
