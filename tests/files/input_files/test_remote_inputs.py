"""Objects, prefixes and globs are the files that folders and globs of this machine would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from support.refusal import refusal
from support.written_rollouts import write_rollouts
from treepack.errors import TreepackError
from treepack.files.input_files import remote_inputs
from treepack.files.input_files.inputs import list_inputs
from treepack.files.remote.cache import addresses_in
from treepack.ingest.options import BuildOptions
from treepack.trie.directory import read_to_trie


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    content = write_rollouts(tmp_path / "rollouts.jsonl").read_bytes()
    for name in ("run/b.jsonl", "run/a.jsonl", "run/deep/c.jsonl.gz", "run/notes.txt", "run/LICENSE"):
        memory.pipe_file(f"/bucket/{name}", content)
    yield memory
    memory.rm("/bucket", recursive=True)


def names(*inputs: str) -> list[str]:
    return [addresses_in(path).removeprefix("memory://bucket/") for path in list_inputs(inputs)[0]]


@pytest.mark.parametrize("large", [remote_inputs.LARGE, 1])
def test_a_prefix_is_searched_like_a_folder(store: Any, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_inputs, "LARGE", large)
    files, skipped, searched = list_inputs(["memory://bucket/run"])
    assert [addresses_in(path) for path in files] == [
        f"memory://bucket/run/{name}" for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl.gz")
    ]
    assert searched == set(files)
    assert [(each.source, each.reason) for each in skipped] == [
        ("memory://bucket/run/LICENSE", "file without extension not read"),
        ("memory://bucket/run/notes.txt", "file extension .txt not read"),
    ]


def test_objects_and_globs_keep_the_order_of_the_inputs(store: Any) -> None:
    assert names("memory://bucket/run/b.jsonl", "memory://bucket/run/a.*") == ["run/b.jsonl", "run/a.jsonl"]
    assert names("memory://bucket/run/*.jsonl") == ["run/a.jsonl", "run/b.jsonl"]
    assert names("memory://bucket/run/**/c.*") == ["run/deep/c.jsonl.gz"]
    assert names("memory://bucket/run/d*") == ["run/deep/c.jsonl.gz"]  # a prefix


@pytest.mark.parametrize(
    ("inputs", "fault"),
    {
        ("memory://bucket/none",): "memory://bucket/none: no such object or prefix, and no glob that matches one",
        ("memory://bucket/run/*.csv",): r"memory://bucket/run/\*\.csv: no such object or prefix",
        ("memory://bucket/run", "memory://bucket/run/a.jsonl"): "named twice among the inputs",
        ("ftp://host/x.jsonl",): "ftp://host/x.jsonl: ftp:// is not supported; expected a local path, file://, s3://",
    }.items(),
)
def test_a_wrong_address_is_one_sentence(store: Any, inputs: tuple[str, ...], fault: str) -> None:
    with pytest.raises(TreepackError, match=fault):
        list_inputs(inputs)


def test_a_file_address_is_a_local_path(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "a b.jsonl")
    assert list_inputs([path.as_uri()])[0] == [str(path)]


def test_rollouts_name_their_objects(store: Any, tmp_path: Path) -> None:
    local, _ = read_to_trie([tmp_path / "rollouts.jsonl"])
    for address in ("memory://bucket/run/a.jsonl", "memory://bucket/run/a*"):
        remote, _ = read_to_trie([address])
        assert remote.tokens.tolist() == local.tokens.tolist()
        expected = [source.rpartition("/")[2].partition(":")[2] for source in local.trajectories["source"].to_pylist()]
        sources = remote.trajectories["source"].to_pylist()
        assert sources == [f"memory://bucket/run/a.jsonl:{line}" for line in expected]


def test_damage_is_named_by_its_address(store: Any) -> None:
    store.pipe_file("/bucket/bad.jsonl", b'{"input_ids": [1, 2], "loss_mask": [0, 1]}\n{oops\n')
    for inputs in (["memory://bucket/bad.jsonl"], ["memory://bucket/ba*"]):
        assert refusal(read_to_trie, inputs).startswith("memory://bucket/bad.jsonl:2: ")
    _, log = read_to_trie(["memory://bucket/run/a.jsonl", "memory://bucket/bad.jsonl"], BuildOptions(skip_bad=True))
    assert any("memory://bucket/bad.jsonl" in str(each) for each in log.skipped), log.skipped
    assert "objects/" not in str(log.skipped)
