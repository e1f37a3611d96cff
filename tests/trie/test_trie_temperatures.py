"""Temperatures in tries: they come back from every way to build one, and exist only where the data has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import make
from support.tempered import tempered, token_temperatures
from treepack.errors import TreepackError
from treepack.files import parts as file_parts
from treepack.files import schema
from treepack.files.input_files import ranges
from treepack.ingest import stream
from treepack.ingest.array_rollouts import trajectories_from_arrays
from treepack.ingest.options import BuildOptions
from treepack.sequences import as_columns
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders import builder
from treepack.trie.builders import trie_parts as parts
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.builders.out_of_core import build_large_trie
from treepack.trie.check import check_trie
from treepack.trie.directory import build_trie_directory
from treepack.trie.store import trie_files
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.trie import Trie, trajectories_of


def by_name(trie: Trie) -> dict[str, list[float]]:
    return {item.trajectory_id: token_temperatures(item).tolist() for item in trajectories_of(trie)}


@given(tempered())
def test_a_trie_gives_the_temperatures_back(rollouts: list[Trajectory]) -> None:
    trie = build_trie(rollouts)
    check_trie(trie)
    expected = {item.trajectory_id: token_temperatures(item).tolist() for item in rollouts}
    np.testing.assert_equal(by_name(trie), expected)


@given(tempered())
def test_a_column_exists_only_if_a_trajectory_has_such_a_value(rollouts: list[Trajectory]) -> None:
    names = build_trie(rollouts).trajectories.column_names
    assert ("temperature" in names) == any(item.temperature is not None for item in rollouts)
    contents = [item.content for item in rollouts]
    assert ("temperatures" in names) == any(
        isinstance(each, Tokens) and each.temperatures is not None for each in contents
    )
    assert names[: len(schema.TRAJECTORIES)] == schema.TRAJECTORIES.names


@given(tempered(max_count=6), st.integers(1, 4), st.sampled_from([1, 400]))
def test_runs_on_disk_give_the_table_that_memory_gives(rollouts: list[Trajectory], size: int, run_bytes: int) -> None:
    batches = [as_columns(rollouts[i : i + size]) for i in range(0, len(rollouts), size)]
    table = build_large_trie(batches, run_bytes=run_bytes).trajectories
    assert table.schema.equals(build_trie(rollouts).trajectories.schema, check_metadata=True)
    assert repr(table.to_pylist()) == repr(build_trie(rollouts).trajectories.to_pylist())


@given(tempered())
def test_a_directory_gives_the_temperatures_back(
    tmp_path_factory: pytest.TempPathFactory, rollouts: list[Trajectory]
) -> None:
    trie, folder = build_trie(rollouts), tmp_path_factory.mktemp("trie")
    write_trie(trie, folder)
    again = read_trie(folder)
    assert again.trajectories.column_names == trie.trajectories.column_names
    np.testing.assert_equal(by_name(again), by_name(trie))


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
    with pytest.raises(TreepackError, match="trajectory a: has impossible temperatures"):
        check_trie(build_trie([item]))


def test_temperatures_of_another_length_are_noticed() -> None:
    with pytest.raises(TreepackError, match="trajectory a: temperatures has 1 values"):
        check_trie(build_trie([make("a", [1, 2, 3], temperatures=[1.0])]))


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
