"""Columns of a trie: numbers for each token of a trajectory, and values for each token of the trie."""

from __future__ import annotations

import json
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
from support.kept import as_lists, token_sets
from support.refusal import refusal
from support.strategies import make
from support.tempered import token_temperatures
from support.trie_files import saved
from treepack.analysis.check import check
from treepack.errors import TreepackError
from treepack.files import parts as file_parts
from treepack.files import schema
from treepack.files.input_files import ranges
from treepack.files.manifest import Provenance, read_manifest
from treepack.files.part_columns import check_part_columns, with_types
from treepack.files.remote.location import locate
from treepack.files.schema import TRIE
from treepack.ingest import stream
from treepack.ingest.array_rollouts import trajectories_from_arrays
from treepack.ingest.options import BuildOptions
from treepack.ragged import RaggedArray, join_lists
from treepack.trajectory import Float64, Tokens, Trajectory
from treepack.trie.builders import builder
from treepack.trie.builders import trie_parts as parts
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.directory import build_trie_directory
from treepack.trie.store import mapped, trie_files
from treepack.trie.store.row_groups import read_footers
from treepack.trie.store.token_values import carried_values, write_token_values
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.trie import Trie, sequences_of, trajectories_of


@pytest.mark.slow
def test_processes_write_the_bytes_of_memory_if_one_record_of_many_has_a_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ((stream, "MIN_BYTES"), (ranges, "GROUP_BYTES"), (builder, "RUN_BYTES"), (builder, "MIN_RUN_BYTES"))
    for module, name in sizes:
        monkeypatch.setattr(module, name, 1)
    for module in (file_parts, parts, trie_files):
        monkeypatch.setattr(module, "PART_TOKENS", 100)
    lines = [json.dumps({"id": f"t{i}", "input_ids": [1, i, 7, 8], "loss_mask": [0, 1, 1, 1]}) for i in range(64)]
    lines[-1] = lines[-1].replace('"id"', '"temperature": 0.7, "id"')
    folder = tmp_path / "inputs"
    folder.mkdir()
    for name, part in (("a", lines[:48]), ("b", lines[48:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part))
    build_trie_directory([folder], tmp_path / "workers", BuildOptions(workers=2))
    monkeypatch.setattr(builder, "RUN_BYTES", 1 << 27)
    build_trie_directory([folder], tmp_path / "memory")
    written, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("workers", "memory")
    )
    assert written == expected
    assert len([name for name in written if name.startswith("trajectories")]) > 1
    temperatures = read_trie(tmp_path / "workers").trajectories["temperature"].to_pylist()
    assert sorted(map(str, temperatures)) == ["0.7", *["None"] * 63]


@pytest.mark.parametrize("bad", [-0.5, np.inf])
def test_an_impossible_temperature_is_noticed(bad: float) -> None:
    item = replace(make("a", [1, 2, 3]), temperature=bad)
    assert "trajectory a: has impossible temperatures" in refusal(check_trie, build_trie([item]))


def test_temperatures_of_another_length_are_noticed() -> None:
    assert "trajectory a: temperatures has 1 values" in refusal(
        check_trie, build_trie([make("a", [1, 2, 3], temperatures=[1.0])])
    )


def test_arrays_may_have_a_temperature_for_each_trajectory_or_token() -> None:
    ids, mask = [[1, 2, 3], [1, 4]], [[0, 0, 1], [0, 1]]
    whole = trajectories_from_arrays(ids, mask, temperatures=[0.5, 1.0])
    assert [item.temperature for item in whole] == [0.5, 1.0]
    each = trajectories_from_arrays(ids, mask, temperatures=[np.array([9, 9, 0.5]), np.array([9, 0.25])])
    assert [token_temperatures(item).tolist() for item in each] == [[0.5], [0.25]]


@pytest.mark.parametrize("bad", [[-1.0], [np.nan], [1e39], [np.array([0, -1.0])]])
def test_arrays_with_an_impossible_temperature_are_refused(bad: list[float]) -> None:
    with pytest.raises(TreepackError, match=r"trajectory 0: .*temperature.* finite"):
        trajectories_from_arrays([[1, 2]], [[0, 1]], temperatures=bad)


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


def sets(*lists: list[int]) -> RaggedArray:
    return RaggedArray.of(lists, np.int32)


@pytest.mark.parametrize("bad", [[[2, 3]], [[3, 2, 2], [3]], [[2, 3], [2, 4]], [[-1, 2], [3]], [[3, 2], [3]]])
def test_wrong_sets_are_noticed(bad: list[list[int]]) -> None:
    with pytest.raises(TreepackError, match=r"trajectory a: (kept_ids has 1 values|has impossible kept_ids)"):
        check_trie(build_trie([make("a", [1, 2, 3], kept_ids=sets(*bad))]))


def test_arrays_may_have_a_set_for_each_token() -> None:
    ids, mask = [[1, 2, 3], [1, 4]], [[0, 0, 1], [0, 1]]
    one, other = trajectories_from_arrays(ids, mask, kept_ids=[[None, [7], np.array([9, 3])], None])
    assert [token_sets(one), token_sets(other)] == [[[3, 9]], [[]]]
    (none,) = trajectories_from_arrays([[1, 2]], [[0, 1]], kept_ids=[[[], []]])
    assert isinstance(none.content, Tokens)
    assert none.content.kept_ids is None


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ([[], [4]], "lack the sampled id 2"),
        ([[], [2, 2]], "repeat the id 2"),
        ([[2]], "1 lists for 2 tokens"),
        ([[], [2, -1]], "hold the id -1"),
        ([[], [2, 1 << 31]], "hold the id 2147483648"),
        ([[], [2.0]], "not a list of token ids"),
        ([[], [[2]]], "not a list of token ids"),
        ([[], 2], "not a list of token ids"),
        ({"a": 1}, "has dict for 2 tokens"),
    ],
)
def test_arrays_with_impossible_sets_are_refused(bad: list[list[int]], fault: str) -> None:
    with pytest.raises(TreepackError, match=f"trajectory 0: kept_ids .*{fault}"):
        trajectories_from_arrays([[1, 2]], [[0, 1]], kept_ids=[bad])


def test_files_of_other_programs_may_have_short_offsets_but_no_nulls() -> None:
    kind = pa.list_(pa.list_(pa.int32()))
    good, bad = (pa.table({"kept_ids": pa.array([[[1, 2], []], None], kind)}) for _ in range(2))
    check_part_columns(good.schema, TRIE["trajectories"], "part", "build it again")
    assert with_types(good, TRIE["trajectories"])["kept_ids"].to_pylist() == [[[1, 2], []], None]
    for cells in ([[[1, None]]], [[None]]):
        bad = pa.table({"kept_ids": pa.array(cells, kind)})
        with pytest.raises(ValueError, match="a null in kept_ids"):
            with_types(bad, TRIE["trajectories"])


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5), st.data())
def test_lists_are_cut_and_joined_as_lists_of_python_are(lists: list[list[int]], data: st.DataObject) -> None:
    ragged, num = RaggedArray.of(lists, np.int32), len(lists)
    begin, end = data.draw(st.integers(0, num)), data.draw(st.integers(0, num))
    assert as_lists(ragged[begin:end]) == lists[begin:end]
    rows = data.draw(st.lists(st.integers(0, max(num - 1, 0)), max_size=4 if num else 0))
    assert as_lists(ragged[begin:][np.array([], np.int64)]) == []
    assert as_lists(ragged[np.array(rows, np.int64)]) == [lists[i] for i in rows]
    joined = join_lists([ragged[begin:], ragged[:end]])
    assert as_lists(joined) == lists[begin:] + lists[:end]
    assert joined.equals(RaggedArray.of(lists[begin:] + lists[:end], np.int32))


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
