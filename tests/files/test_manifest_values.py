"""JSON files: checked values of a manifest, and fields that are set while every other byte stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.directory_damage import write_directories
from support.manifests import seal
from treepack import TreepackError
from treepack.files.json_text import set_field, without_field
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


_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists)


_NAMES = st.sampled_from(["a", "eos_token_id", 'q"', "\u00e9", "b}"])


@given(st.dictionaries(_NAMES, _JSON), _NAMES, _JSON, st.sampled_from([None, 2]), st.booleans())
def test_a_field_is_set_and_every_other_byte_stays(
    fields: dict[str, Any], name: str, value: Any, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(fields, indent=indent, ensure_ascii=ascii_only) + "\n"
    changed = set_field(text.encode(), name, value).decode()
    assert json.loads(changed) == {**fields, name: value}
    if name in fields:
        assert (
            set_field(changed.encode(), name, fields[name]).decode()
            == json.dumps(fields, indent=indent, ensure_ascii=ascii_only).replace(
                json.dumps(name, ensure_ascii=ascii_only) + ": " + json.dumps(fields[name], ensure_ascii=ascii_only),
                json.dumps(name, ensure_ascii=ascii_only) + ": " + json.dumps(fields[name]),
            )
            + "\n"
            or indent
        )
    else:
        assert changed.startswith(text.rstrip()[:-1].rstrip())


def test_of_two_equal_names_the_one_that_counts_is_set() -> None:
    assert set_field(b'{"a": 1, "a": 2}', "a", 3) == b'{"a": 1, "a": 3}'


@given(st.dictionaries(_NAMES, _JSON), _NAMES, st.sampled_from([None, 2]))
def test_a_field_is_taken_out_of_the_text_alone(fields: dict[str, Any], name: str, indent: int | None) -> None:
    text = json.dumps(fields, indent=indent)
    rest = {key: value for key, value in fields.items() if key != name}
    assert json.loads(without_field(text.encode(), name)) == rest
    if name not in fields or rest:
        assert without_field(text.encode(), name).decode() == json.dumps(rest, indent=indent)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "a": 2}', "{}"),
        ('{"b": 1e-06,\r\n\t"a" :{"a": [3]}\r\n}\n', '{"b": 1e-06\r\n}\n'),
        ('\ufeff{ "a":1 , "b":"a" }', '\ufeff{ "b":"a" }'),
        ('{"a": 1, "b": 2, "a": 3}', '{"b": 2}'),
    ],
)
def test_a_field_is_taken_out_as_often_as_it_is_there(text: str, expected: str) -> None:
    assert without_field(text.encode(), "a").decode() == expected
