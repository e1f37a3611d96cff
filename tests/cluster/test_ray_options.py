"""Options that do not go together, and a machine without Ray, are one sentence each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.command_line import Run
from support.paths import SAMPLE_DATA


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-", "--ray", "auto"], "standard input (-) cannot be its input"),
        ([SAMPLE_DATA, "--partitions", 2], "--partitions is gone; build-trie --ray takes shares of whole files"),
        ([SAMPLE_DATA, "--ray", "auto", "--memory", "1G"], "--memory has no meaning with --ray"),
        ([SAMPLE_DATA, "--ray", "auto", "--workers", 2], "--workers has no meaning with --ray auto"),
    ],
)
def test_options_of_build_trie_that_exclude_each_other(
    treepack: Run, tmp_path: Path, arguments: list[object], sentence: str
) -> None:
    result = treepack("build-trie", *arguments, "--out", tmp_path / "trie")
    assert result.status == 2
    assert sentence in " ".join(result.err.split())


@pytest.mark.parametrize("option", ["--ray", "--partitions"])
def test_options_of_pack_that_are_gone_have_a_remedy(treepack: Run, tmp_path: Path, option: str) -> None:
    (tmp_path / "trie").mkdir()
    result = treepack("pack", tmp_path / "trie", option, 2, "--out", tmp_path / "packed")
    assert result.status == 2
    assert f"{option} is gone; pack reads a trie of any number of tokens" in " ".join(result.err.split())


def test_without_ray_the_command_says_how_to_install_it(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # makes `import ray` fail
    rollouts = SAMPLE_DATA / "chat.jsonl"
    result = treepack("build-trie", rollouts, "--out", tmp_path / "trie", "--ray", "auto")
    assert result.status == 1
    assert "--ray needs Ray, which is not installed; run pip install 'ray[client" in result.err
    assert not (tmp_path / "trie").exists()
