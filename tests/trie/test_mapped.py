"""A trie that is mapped from files is the trie that is read into memory, and its pages can be released."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from support import strategies
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.errors import TreepackError
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie, trajectories_of

ARRAYS = ("tokens", "node_start", "node_end", "parent", "depth", "num_passing", "end_node")


def assert_equal(a: Trie, b: Trie) -> None:
    for name in ARRAYS:
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert np.array_equal(getattr(a, name), getattr(b, name))
    assert a.trajectories.equals(b.trajectories)
    assert a.share == b.share


# All examples share one tmp_path; each overwrites the directory of the one before.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trajectories=strategies.trajectories())
def test_a_mapped_trie_is_the_trie_in_memory(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    directory = saved(build_trie(trajectories), tmp_path / "trie")
    mapped, in_memory = read_trie(directory, memory=1), read_trie(directory, memory=1 << 40)
    assert len(mapped.storage.maps) == 2
    assert in_memory.storage.maps == ()
    assert_equal(mapped, in_memory)


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    made = [make("a", [1, 2, 3], temperatures=np.array([0.5, 1], np.float32)), make("b", [1, 5])]
    trie = build_trie(made)
    mapped = read_trie(saved(trie, tmp_path / "trie"), memory=1, folder=tmp_path)
    mapped.storage.release()
    assert_equal(mapped, trie)


def test_no_file_of_a_mapped_trie_has_a_name(tmp_path: Path) -> None:
    directory = saved(build_trie([make("a", [1, 2, 3])]), tmp_path / "trie")
    mapped = read_trie(directory, memory=1, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]
    assert mapped.tokens_tree == 3


def test_a_mapped_trie_can_be_pickled(tmp_path: Path) -> None:
    mapped = read_trie(saved(build_trie([make("a", [1, 2, 3])]), tmp_path / "trie"), memory=1)
    copy = pickle.loads(pickle.dumps(mapped))
    assert_equal(copy, mapped)
    assert copy.storage.maps == ()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = saved(build_trie([make("a", [1, 2, 3])]), tmp_path / "trie")
    with pytest.raises(TreepackError, match=r"missing: the trie is larger than the memory, .*\(No such file"):
        read_trie(directory, memory=1, folder=tmp_path / "missing")


def test_a_part_that_was_altered_is_refused_when_it_is_mapped(tmp_path: Path) -> None:
    directory = saved(build_trie([make("a", [1, 2, 3])]), tmp_path / "trie")
    part = directory / "nodes-00000.parquet"
    content = bytearray(part.read_bytes())
    content[10] ^= 1
    part.write_bytes(bytes(content))
    assert "nodes-00000.parquet: was altered" in refusal(read_trie, directory, memory=1)


def test_trajectories_of_a_mapped_trie_are_those_it_was_built_from(tmp_path: Path) -> None:
    trie = build_trie([make("a", [1, 2, 3]), make("b", [1, 4], reward=1.0)])
    mapped = read_trie(saved(trie, tmp_path / "trie"), memory=1)
    assert [each.trajectory_id for each in trajectories_of(mapped)] == ["a", "b"]
    assert build_trie(trajectories_of(mapped)).trajectories.equals(trie.trajectories)
