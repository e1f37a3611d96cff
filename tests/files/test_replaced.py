"""A reader of a directory that is replaced while it reads is told to run again, and damage is still called damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.errors import TreepackError
from treepack.files.directory import finished_directory
from treepack.files.manifest import check_part, read_manifest
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import write_trie

AGAIN = "trie: was replaced by another command while it was read; run the command again"


def replace(trie: Path, length: int) -> None:
    """Replace the directory by a trie of one trajectory, as a command with --overwrite does."""
    with finished_directory(trie, overwrite=True) as temporary:
        write_trie(build_trie([make("b", [*range(length)])]), temporary)


# 40 tokens give files of another size; 3 other tokens files of the same size, or nearly.
@pytest.mark.parametrize("length", [40, 3])
def test_a_reader_of_a_replaced_directory_is_told_to_run_again(tmp_path: Path, length: int) -> None:
    trie = saved(build_trie([make("a", [1, 2, 4])]), tmp_path / "trie")
    entries = read_manifest(trie)["files"]
    replace(trie, length)
    differing = [entry for entry in entries if entry not in read_manifest(trie)["files"]]
    assert differing
    for entry in differing:
        assert refusal(check_part, trie, entry).endswith(AGAIN)


def test_a_part_that_the_new_directory_lacks_is_told_the_same(tmp_path: Path) -> None:
    trie = saved(build_trie([make("a", [1, 2, 4])]), tmp_path / "trie")
    entry = read_manifest(trie)["files"][0]
    replace(trie, 40)
    (trie / entry["name"]).unlink()
    with pytest.raises(TreepackError, match=AGAIN):
        check_part(trie, entry)


def test_damage_keeps_its_own_remedy(tmp_path: Path) -> None:
    trie = saved(build_trie([make("a", [1, 2, 4])]), tmp_path / "trie")
    entry = read_manifest(trie)["files"][0]
    part = trie / entry["name"]
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(TreepackError, match=r"its manifest lists .*; write it again"):
        check_part(trie, entry)
    part.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert "was altered since it was written" in refusal(check_part, trie, entry)
    (trie / "manifest.json").write_text("[")
    assert "was altered since it was written" in refusal(check_part, trie, entry)
    shutil.rmtree(trie)
    assert "is missing; write" in refusal(check_part, trie, entry)
