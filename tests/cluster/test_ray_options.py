"""Options that do not go together, and a machine without Ray, are one sentence each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.command_line import Run
from support.paths import SAMPLE_DATA
from treepack.files.manifest import read_manifest


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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--partitions", 2, "--memory", "1G"], "--memory has no meaning with --partitions"),
        (["--partitions", 2, "--save-plan", "plan.jsonl"], "--save-plan has no meaning with --partitions"),
        (["--ray", "auto", "--save-plan", "plan.jsonl"], "--save-plan has no meaning with --ray"),
        (["--ray", "auto", "--plan", "plan.jsonl"], "--plan has no meaning with --ray"),
        (["--ray", "auto", "--workers", 2], "--workers has no meaning with --ray auto"),
    ],
)
def test_options_of_pack_that_exclude_each_other(
    treepack: Run, tmp_path: Path, arguments: list[object], sentence: str
) -> None:
    (tmp_path / "trie").mkdir()
    (tmp_path / "plan.jsonl").touch()
    arguments = [tmp_path / each if each == "plan.jsonl" else each for each in arguments]
    result = treepack("pack", tmp_path / "trie", *arguments, "--out", tmp_path / "packed")
    assert result.status == 2
    assert sentence in " ".join(result.err.split())


def test_pack_in_parts_needs_no_cluster(treepack: Run, tmp_path: Path) -> None:
    assert treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", "--out", tmp_path / "trie").status == 0
    for options in ([], ["--partitions", 3]):
        out = tmp_path / f"packed-{len(options)}"
        result = treepack("pack", tmp_path / "trie", "--capacity", 4096, "--out", out, *options)
        assert result.status == 0, result.err
        assert treepack("stats", out, "--check").status == 0
    totals = [read_manifest(tmp_path / name)["totals"] for name in ("packed-0", "packed-2")]
    assert totals[0]["tokens_tree"] == totals[1]["tokens_tree"]


def test_without_ray_the_command_says_how_to_install_it(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # makes `import ray` fail
    rollouts = SAMPLE_DATA / "chat.jsonl"
    result = treepack("build-trie", rollouts, "--out", tmp_path / "trie", "--ray", "auto")
    assert result.status == 1
    assert "--ray needs Ray, which is not installed; run pip install 'ray[client" in result.err
    assert not (tmp_path / "trie").exists()
