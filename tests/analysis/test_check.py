"""The check of a directory finds what hashes cannot show: files that are wrong and have the right hashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.command_line import Run
from support.manifests import seal
from support.written_rollouts import write_rollouts
from treepack.analysis.check import check
from treepack.errors import TreepackError
from treepack.files.manifest import file_sha256
from treepack.trie.directory import build_trie_directory


@pytest.fixture
def trie(tmp_path: Path) -> Path:
    build_trie_directory([write_rollouts(tmp_path / "rollouts.jsonl")], tmp_path / "trie")
    return tmp_path / "trie"


@pytest.fixture
def packed(treepack: Run, trie: Path, tmp_path: Path) -> Path:
    assert treepack("pack", trie, "--capacity", 12, "--out", tmp_path / "packed").status == 0
    return tmp_path / "packed"


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    change(manifest)
    seal(directory / "manifest.json", manifest)


def refusals(treepack: Run, directory: Path) -> str:
    """The sentence of the library, which must be that of the command too."""
    with pytest.raises(TreepackError) as error:
        check(directory)
    result = treepack("stats", directory, "--check")
    assert (result.status, result.err) == (1, f"treepack: {error.value}\n")
    return str(error.value)


@pytest.mark.parametrize("which", ["trie", "packed"])
def test_max_token_id_is_computed_again(treepack: Run, trie: Path, packed: Path, which: str) -> None:
    directory = {"trie": trie, "packed": packed}[which]
    largest = json.loads((directory / "manifest.json").read_text())["max_token_id"]
    change_manifest(directory, lambda manifest: manifest.update(max_token_id=largest - 1))
    sentence = f"the files give max_token_id = {largest}, the manifest lists {largest - 1}; write it again"
    assert refusals(treepack, directory) == sentence


def test_row_id_is_the_place_of_the_row(treepack: Run, packed: Path) -> None:
    path = packed / "part-00000.parquet"
    table = pq.read_table(path)
    ids = [77, *table["row_id"].to_pylist()[1:]]
    pq.write_table(table.set_column(0, table.schema.field("row_id"), pa.array(ids, pa.int64())), path)
    sizes = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    change_manifest(packed, lambda manifest: manifest["files"][0].update(sizes))
    assert refusals(treepack, packed) == "row 0: has the row_id 77; expected its place; pack the trie again"


@pytest.mark.parametrize("which", ["trie", "packed"])
def test_a_part_that_is_a_link_out_of_the_directory_is_refused(
    treepack: Run, trie: Path, packed: Path, tmp_path: Path, which: str
) -> None:
    directory = {"trie": trie, "packed": packed}[which]
    part = next(directory.glob("*-00000.parquet"))
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    assert "is a link to" in refusals(treepack, directory)
    part.unlink()
    (tmp_path / "elsewhere.parquet").rename(directory / "blob")
    part.symlink_to("blob")  # inside the directory it is harmless
    assert treepack("stats", directory, "--check").status == 0
