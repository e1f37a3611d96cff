"""Odd paths: links to themselves, names that are too long or no text, pipes in folders, and slashes without a name."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from support.command_line import Run
from support.manifests import seal
from support.written_rollouts import write_rollouts

LONG = "a" * 256


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with rollouts.jsonl and a link to itself."""
    monkeypatch.chdir(tmp_path)
    write_rollouts(tmp_path / "rollouts.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("build-trie loop --out x", "loop: cannot be read (Too many levels of symbolic links); restore the file or"),
        ("stats loop", "loop: cannot be read (Too many levels of symbolic links); restore the file or its permissions"),
        ("build-trie rollouts.jsonl --out loop", "loop: cannot be written (Too many levels of symbolic links); choose"),
        ("build-trie rollouts.jsonl --out loop/x", "loop/x: cannot be written (Too many levels of symbolic links); "),
        (f"build-trie rollouts.jsonl --out {LONG}", f"{LONG}: cannot be written (File name too long); choose another"),
        (f"stats {LONG}", f"{LONG}: cannot be read (File name too long); check the path"),
        (
            f"build-trie rollouts.jsonl --out {os.fsdecode(b'a%c' % 255)}",
            r"a\xff: has a name or lies in a folder that is no text in UTF-8, which Parquet files need; choose another",
        ),
        ("build-trie rollouts.jsonl --out s3://b//x", "s3://b//x: has an empty part between two slashes; choose"),
    ],
)
def test_an_odd_path_is_one_sentence_and_leaves_nothing(
    treepack: Run, folder: Path, command: str, sentence: str
) -> None:
    before = sorted(folder.iterdir())
    result = treepack(*command.split())
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith(f"treepack: {sentence}")
    assert result.err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("command", ["build-trie  --out x", "pack  --out x", "stats ", "train  --model m --out x"])
def test_an_empty_input_is_not_this_folder(treepack: Run, folder: Path, command: str) -> None:
    result = treepack(*command.split(" "))
    assert result.status == 1
    assert " is empty; " in result.err
    assert result.err.count("\n") == 1
    assert not (folder / "x").exists()


def test_the_longest_name_that_leaves_room_for_a_lock_is_written(treepack: Run, folder: Path) -> None:
    result = treepack("build-trie", "rollouts.jsonl", "--out", "b" * 220)
    assert result.status == 0
    assert (folder / ("b" * 220) / "manifest.json").exists()


@pytest.mark.parametrize("name", [LONG, "a\ud800.parquet"])
def test_a_part_whose_name_no_file_can_have_is_one_sentence(treepack: Run, folder: Path, name: str) -> None:
    assert treepack("build-trie", "rollouts.jsonl", "--out", "trie").status == 0
    path = folder / "trie" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][0]["name"] = name
    seal(path, manifest)
    result = treepack("stats", "trie")
    assert result.status == 1
    assert "which is not a file name of its directory; write it again" in result.err


@pytest.mark.parametrize("out", [False, True])
def test_a_manifest_of_deep_brackets_is_damaged(treepack: Run, folder: Path, out: bool) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "manifest.json").write_text("[" * 100_000)
    words = ["build-trie", "rollouts.jsonl", "--out", "deep", "--overwrite"] if out else ["stats", "deep"]
    result = treepack(*words)
    assert result.status == 1
    sentence = "deep exists and was not written by treepack; remove it" if out else "deep/manifest.json: is damaged ("
    assert result.err.startswith(f"treepack: {sentence}")


def test_a_pipe_in_a_folder_is_skipped_and_counted(treepack: Run, folder: Path) -> None:
    inputs = folder / "inputs"
    inputs.mkdir()
    write_rollouts(inputs / "rollouts.jsonl")
    os.mkfifo(inputs / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as place:
        place.bind(str(Path("inputs") / "socket.jsonl"))
        result = treepack("build-trie", "inputs", "--out", "trie")
    assert result.status == 0, result.err
    assert "pipe, socket or device of a folder not read: 2" in " ".join((result.out + result.err).split())
    expected = treepack("build-trie", "rollouts.jsonl", "--out", "other")
    assert expected.status == 0
    parts = [(folder / name / "nodes-00000.parquet").read_bytes() for name in ("trie", "other")]
    assert parts[0] == parts[1]
