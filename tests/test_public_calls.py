"""Calls of public functions as users write them: one path or several, numbers as text, wrong types and names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import treepack
from support.paths import ROOT
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.files.remote.address import RemotePath, as_path, path_names
from treepack.option_fields import as_count

TOKENS = "sample_data/tokens.jsonl"


class Folder:
    """A path of another library."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


def test_all_public_names_are_listed() -> None:
    assert {name for name in dir(treepack) if not name.startswith("__")} == {*treepack.__all__} - {"__version__"}
    assert "__version__" in dir(treepack)


@pytest.mark.parametrize(
    ("name", "hint"), [("load_modl", "; did you mean load_model?"), ("Tries", "; did you mean Trie?"), ("xyz", "")]
)
def test_a_wrong_name_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'treepack' has no attribute '{name}'{re.escape(hint)}$"):
        getattr(treepack, name)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("data/a", ["data/a"]),
        (Path("data/a"), ["data/a"]),
        (Folder("data/a"), ["data/a"]),
        (RemotePath("s3", "b/a"), ["s3://b/a"]),
        (["data/a", Path("b"), Folder("c"), RemotePath("s3", "b/a")], ["data/a", "b", "c", "s3://b/a"]),
        ([], []),
    ],
)
def test_one_path_and_several_are_names(paths: Any, names: list[str]) -> None:
    assert path_names(paths) == names
    given = paths if isinstance(paths, list) else [paths]
    assert [str(as_path(path)) for path in given] == names


@pytest.mark.parametrize("paths", [5, None, [5], ["a", None], b"data"])
def test_what_is_no_path_is_refused_by_its_type(paths: Any) -> None:
    with pytest.raises(TreepackError, match=r"has the type \w+; expected a path or an address$"):
        path_names(paths)
    with pytest.raises(TreepackError, match=r"has the type \w+; expected a path or an address$"):
        as_path(paths)


def test_functions_take_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    several, _ = treepack.read_to_trie([TOKENS], treepack.BuildOptions())
    one, _ = treepack.read_to_trie(Folder(TOKENS), treepack.BuildOptions())
    assert one.num_nodes == several.num_nodes > 0
    assert refusal(treepack.stats, "missing.jsonl").startswith("missing.jsonl: no such file")
    assert refusal(treepack.stats, []).startswith("there are no paths; give")
    summary = treepack.build_trie_directory(TOKENS, Folder(os.fspath(tmp_path / "trie")))  # type: ignore[arg-type]
    assert summary.path == tmp_path / "trie"
    assert treepack.stats(tmp_path / "trie") == treepack.stats([str(tmp_path / "trie")])


def test_numbers_may_be_texts() -> None:
    assert treepack.PackOptions(capacity="4k", workers="2").capacity == 4096  # type: ignore[arg-type]
    assert treepack.OnlineOptions(capacity="64k").capacity == 65_536  # type: ignore[arg-type]
    assert treepack.StatsOptions(capacities=("4k", 100)).capacities == (4096, 100)  # type: ignore[arg-type]
    assert treepack.ReportOptions(capacities=["1m"]).capacities == (1 << 20,)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["4x", "", "-1", 3.5, [4], None])
def test_what_is_no_number_is_refused_by_the_name_of_its_option(value: Any) -> None:
    with pytest.raises(TreepackError, match=r"^size is .*; expected a whole number, such as 8192 or '8k'$"):
        as_count(value, "size")


def test_wrong_types_are_sentences() -> None:
    trie = treepack.build_trie(treepack.trajectories_from_arrays([[1, 2, 3], [1, 2, 4]], [[0, 1, 1]] * 2))
    packing = treepack.plan_packing(trie)
    calls: list[tuple[Any, str]] = [
        (lambda: treepack.plan_packing("x"), "plan_packing: trie has the type str; expected Trie"),  # type: ignore[arg-type]
        (lambda: treepack.plan_packing(trie, 8), "plan_packing: options has the type int; expected PackOptions"),  # type: ignore[arg-type]
        (lambda: treepack.build_trie("x"), "build_trie: a trajectory has the type str; expected Trajectory"),  # type: ignore[arg-type]
        (lambda: treepack.make_batch(packing), "make_batch: row has the type Packing; expected a Row"),  # type: ignore[arg-type]
        (lambda: treepack.allow_generation(trie), "allow_generation: model has the type Trie; expected Module; use"),  # type: ignore[arg-type]
        (lambda: treepack.row_loss(None, None), "row_loss: loaded has the type NoneType; expected LoadedModel"),  # type: ignore[arg-type]
    ]
    for call, message in calls:
        assert refusal(call).startswith(message)
