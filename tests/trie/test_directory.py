"""Trie directories: `build_trie_directory` in memory and on disk, and tries mapped from files."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from support import strategies
from support.paths import SAMPLE_DATA
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack import BuildOptions, Progress, build_trie_directory, check, read_to_trie, stats
from treepack.errors import TreepackError
from treepack.files.input_files.inputs import BytesRead
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie, trajectories_of

TOKENS = SAMPLE_DATA / "tokens.jsonl"


def test_a_directory_is_the_trie_in_memory(tmp_path: Path) -> None:
    summary = build_trie_directory([TOKENS], tmp_path / "trie")
    trie, log = read_to_trie([TOKENS])
    written = read_trie(tmp_path / "trie")
    assert np.array_equal(written.tokens, trie.tokens)
    assert written.trajectories.equals(trie.trajectories)
    assert (summary.counts, summary.num_files) == (log.counts, 1)
    assert summary.totals["tokens_tree"] == trie.tokens_tree
    assert json.loads((tmp_path / "trie" / "manifest.json").read_text()) == summary.manifest


def test_progress_ends_with_every_token(tmp_path: Path) -> None:
    calls: list[Progress] = []
    summary = build_trie_directory([TOKENS], tmp_path / "trie", progress=calls.append)
    assert (calls[-1].stage, calls[-1].unit, calls[-1].done) == ("reading", "tokens", summary.totals["tokens_flat"])


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_knows_the_share_of_the_bytes_of_compressed_files_too(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    sizes = []
    for i in range(6):
        name, text = f"{i}.jsonl.gz", TOKENS.read_bytes().replace(b'"estimate-', b'"%d-' % i)
        (folder / name).write_bytes(gzip.compress(text))
        sizes.append((folder / name).stat().st_size)
    calls: list[Progress] = []
    options = BuildOptions(workers=workers)
    build_trie_directory([folder], tmp_path / "trie", options, progress=calls.append)
    # Small files are read to their ends at once, so each counts when the next one begins; the first has no share.
    known = [call.share for call in calls if call.share is not None]
    assert known == sorted(known)
    possible = [sum(sizes[:i]) / sum(sizes) for i in range(1, 6)]
    assert all(any(share == pytest.approx(each) for each in possible) for share in known)
    assert workers > 1 or (calls[0].share is None and sorted(set(known)) == pytest.approx(possible))


def test_the_share_of_bytes_counts_a_file_that_is_read_as_a_whole_when_the_next_begins(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for path, size in zip(files, (10, 30), strict=True):
        path.write_bytes(b"x" * size)
    done = BytesRead()
    done.expect(map(str, files))
    shares = []
    for path, parts in zip(files, ((4, 6), (15, 15)), strict=True):
        done.begin(str(path))
        for part in parts:
            done.count(part)
            shares.append(done.share)
    assert shares == [4 / 40, 4 / 40, 25 / 40, 25 / 40]


def test_progress_of_standard_input_has_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Progress] = []
    with TOKENS.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        build_trie_directory(["-"], tmp_path / "trie", progress=calls.append)
    assert {call.share for call in calls} == {None}


def test_options_are_those_of_the_manifest(tmp_path: Path) -> None:
    options = BuildOptions(share="group", normalize_ids=True)
    recorded = build_trie_directory([TOKENS], tmp_path / "trie", options).manifest["options"]
    assert (recorded["share"], recorded["normalize_ids"]) == ("group", True)
    assert "normalize_ids" not in build_trie_directory([TOKENS], tmp_path / "other").manifest["options"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"share": "some"}, "share is 'some'; expected one of all, group, none"),
        ({"expand": "turn"}, "expand is 'turn'; expected one of trajectory, turns"),
        ({"workers": 0}, "workers is 0; expected at least 1"),
        ({"tools": ["x"]}, "expected a list of tool schemas"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TreepackError, match=sentence):
        BuildOptions(**changes)


def test_an_existing_output_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    build_trie_directory([TOKENS], tmp_path / "trie")
    assert "exists; choose another --out or give --overwrite" in refusal(
        build_trie_directory, ["missing.jsonl"], tmp_path / "trie"
    )
    assert build_trie_directory([TOKENS], tmp_path / "trie", overwrite=True).path == tmp_path / "trie"


def test_stats_and_check_take_what_was_written(tmp_path: Path) -> None:
    summary = build_trie_directory([TOKENS], tmp_path / "trie")
    report = stats([tmp_path / "trie"])
    assert {name: report[name] for name in summary.totals} == summary.totals
    assert check(tmp_path / "trie") == {"num_trajectories": 32, "num_nodes": summary.totals["num_nodes"]}


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
