"""Values of a manifest whose hash is right are checked when it is read, and an error prints no long text whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.directory_damage import write_directories
from support.manifests import seal
from treepack import TreepackError
from treepack.files.manifest import read_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifests")
    write_directories(folder)
    return folder


def refusal(folder: Path, directory: str, path: str, value: Any) -> str:
    """The sentence that refuses a manifest with `value` at `path`, without the name of the file."""
    file = folder / directory / "manifest.json"
    content = file.read_text()
    manifest = json.loads(content)
    holder, *_, last = manifest, *path.split(".")
    for key in path.split(".")[:-1]:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    holder[int(last) if isinstance(holder, list) else last] = value
    try:
        seal(file, manifest)
        with pytest.raises(TreepackError) as error:
            read_manifest(folder / directory)
        return str(error.value).removeprefix(f"{file}: ")
    finally:
        file.write_text(content)


@pytest.mark.parametrize(
    ("directory", "path", "value", "shown"),
    [
        ("trie", "totals.num_nodes", [1], "[1]"),
        ("trie", "totals.tokens_flat", "many", "'many'"),
        ("trie", "totals.tokens_trained", 1.5, "1.5"),
        ("trie", "totals.por", float("nan"), "nan"),
        ("trie", "totals.num_trees", -1, "-1"),
        ("trie", "totals.num_trees", True, "True"),
        ("trie", "share", "some", "'some'"),
        ("trie", "max_token_id", 2**31, "2147483648"),
        ("trie", "files.0.rows", -1, "-1"),
        ("packed", "totals.gap", {"a": 1}, "{'a': 1}"),
        ("packed", "totals.num_rows", 2**70, "1180591620717411303424"),
        ("packed", "counts", {"dropped": "2"}, "'2'"),
        ("packed", "capacity", 0, "0"),
        ("packed", "options.normalize", "turn", "'turn'"),
        ("packed", "options.balance", 0, "0"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_entry(
    folder: Path, directory: str, path: str, value: Any, shown: str
) -> None:
    place = path.replace("files.0", "files[0]") + (".dropped" if path == "counts" else "")
    assert refusal(folder, directory, path, value) == f"is damaged ({place} is {shown}); write the directory again"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "z" * 100_000),
        ("version", "z" * 100_000),
        ("totals.num_rows", "z" * 100_000),
        ("totals.gap", ["z" * 100_000]),
        ("counts", {"z" * 100_000: "z"}),
        ("files.0.name", "z" * 100_000),
        ("options.normalize", "z" * 100_000),
        ("capacity", 10**4000),
    ],
)
def test_a_long_value_is_cut_in_the_error(folder: Path, path: str, value: Any) -> None:
    assert len(refusal(folder, "packed", path, value)) < 300


def test_brackets_without_end_are_damage(folder: Path) -> None:
    file = folder / "trie" / "manifest.json"
    content = file.read_text()
    try:
        file.write_text("[" * 100_000)
        with pytest.raises(TreepackError, match=r"is damaged .*; write the directory again"):
            read_manifest(folder / "trie")
    finally:
        file.write_text(content)
