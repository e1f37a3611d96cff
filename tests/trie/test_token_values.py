"""Values of a critic in tries: a copy has them and nothing else changes, and a part of the trie keeps its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import strategies
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.analysis.check import check
from treepack.errors import TreepackError
from treepack.files import parts as file_parts
from treepack.files import schema
from treepack.files.manifest import Provenance, read_manifest
from treepack.files.remote.location import locate
from treepack.trajectory import Float64, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.store import mapped, trie_files
from treepack.trie.store.row_groups import read_footers
from treepack.trie.store.token_values import carried_values, write_token_values
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.trie import Trie, sequences_of, trajectories_of


def values_of(trie: Trie) -> Float64:
    """A value that depends on the tokens before a token, and so is one for all trajectories through it."""
    values = np.zeros(trie.tokens_tree)
    for node in range(trie.num_nodes):
        for place in range(trie.node_start[node], trie.node_start[node + 1]):
            up = trie.parent[node]
            before = (
                values[place - 1] if place > trie.node_start[node] else values[trie.node_start[up + 1] - 1] * (up >= 0)
            )
            values[place] = 0.5 * before + trie.tokens[place]
    return values


def copied(trie: Trie, folder: Path) -> Path:
    source = saved(trie, folder / "trie")
    out = folder / "valued"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    write_token_values(source, out, values_of(trie), Provenance.of(read_manifest(source)))
    return out


@settings(max_examples=8)  # every example writes files
@given(strategies.trajectories())
def test_a_copy_gives_the_values_back_and_the_rest_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rollouts: list[Trajectory]
) -> None:
    trie = build_trie(rollouts)
    out = copied(trie, tmp_path_factory.mktemp("values"))
    again, without = read_trie(out, token_values=True), read_trie(out)
    check(out)
    assert again.token_values is not None
    np.testing.assert_array_equal(again.token_values, values_of(trie))
    assert without.token_values is None
    assert again.trajectories.equals(trie.trajectories)
    assert [each.tolist() for each in sequences_of(again)] == [each.tolist() for each in sequences_of(trie)]
    assert read_footers(locate(out)).num_tokens == trie.tokens_tree


def test_a_copy_in_parts_has_the_bytes_of_a_trie_written_with_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_parts, trie_files):
        monkeypatch.setattr(module, "PART_TOKENS", 100)
    trie = build_trie([make(f"t{i:02}", [1, i, i % 3, 8, 9]) for i in range(64)])
    out = copied(trie, tmp_path)
    expected = tmp_path / "expected"
    expected.mkdir()
    write_trie(replace(trie, token_values=values_of(trie)), expected, Provenance.of(read_manifest(tmp_path / "trie")))
    written, direct = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (out, expected))
    assert written == direct
    assert len([name for name in written if name.startswith("nodes")]) > 1
    # Values of a copy are replaced by those of a copy of it.
    second = tmp_path / "second"
    second.mkdir()
    write_token_values(out, second, values_of(trie) + 1, Provenance())
    np.testing.assert_array_equal(read_trie(second, token_values=True).token_values, values_of(trie) + 1)


def test_values_of_a_large_trie_are_mapped(tmp_path: Path) -> None:
    trie = build_trie([make(f"t{i}", [1, i, 7, 8]) for i in range(9)])
    mapped = read_trie(copied(trie, tmp_path), memory=8, folder=tmp_path, token_values=True)
    assert len(mapped.storage.maps) == 3  # tokens, values and trajectories
    np.testing.assert_array_equal(mapped.token_values, values_of(trie))
    np.testing.assert_array_equal(mapped.tokens, trie.tokens)


@given(strategies.trajectories(), st.data())
def test_a_part_of_a_trie_keeps_its_values(rollouts: list[Trajectory], data: st.DataObject) -> None:
    trie = build_trie(rollouts)
    everything = list(trajectories_of(trie))
    kept = data.draw(st.lists(st.sampled_from(range(len(everything))), min_size=1, unique=True))
    part = build_trie([everything[i] for i in kept])
    carried = carried_values(replace(trie, token_values=values_of(trie)), part)
    np.testing.assert_array_equal(carried, values_of(part))
    assert carried_values(trie, part) is None


@pytest.mark.parametrize(("values", "fault"), [([0.0], "values for another number"), ([np.nan] * 3, "is not finite")])
def test_values_that_do_not_fit_are_refused(tmp_path: Path, values: list[float], fault: str) -> None:
    source = saved(build_trie([make("a", [1, 2, 3])]), tmp_path / "trie")
    with pytest.raises(TreepackError, match=fault):
        write_token_values(source, tmp_path, np.array(values), Provenance())
    assert not (tmp_path / "manifest.json").exists()


def test_the_check_notices_a_value_that_is_not_finite() -> None:
    trie = build_trie([make("a", [1, 2, 3]), make("b", [1, 4])])
    values = values_of(trie)
    values[2] = np.inf
    assert "node 1: has a token value that is not finite" in refusal(check_trie, replace(trie, token_values=values))


def test_a_null_among_the_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_null(*arguments: Any) -> Iterator[pa.Table]:
        for group in file_parts.read_row_groups(*arguments):
            place = group.column_names.index("token_values") if "token_values" in group.column_names else None
            if place is not None:
                lists = [[None, *values[1:]] for values in group["token_values"].to_pylist()]
                group = group.set_column(place, "token_values", pa.array(lists, pa.list_(pa.float64())))
            yield group

    out = copied(build_trie([make("a", [1, 2, 3])]), tmp_path)
    monkeypatch.setattr(mapped, "read_row_groups", with_null)
    assert "a node has null among its token_values; write them again" in refusal(read_trie, out, token_values=True)


def test_a_trie_without_values_has_no_column(tmp_path: Path) -> None:
    saved(build_trie([make("a", [1, 2, 3])]), tmp_path / "trie")
    names = file_parts.open_part(tmp_path / "trie", read_manifest(tmp_path / "trie")["files"][0], schema.NODES).names
    assert names == schema.NODES.names
