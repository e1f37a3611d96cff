"""Outputs in a store are complete or absent: the code of all stores, here with the memory filesystem of fsspec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from support.refusal import refusal
from support.strategies import make
from treepack.files import parts
from treepack.files.directory import finished_directory, finished_file, refuse_existing
from treepack.files.lock import lock
from treepack.files.manifest import read_manifest
from treepack.files.remote.address import AnyPath, RemotePath, as_path
from treepack.files.remote.cache import local_copy
from treepack.files.remote.remote_output import UNFINISHED
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie, write_trie

OUT = as_path("memory://bucket/run/trie")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def names(store: Any) -> list[str]:
    return sorted(name.removeprefix("/bucket/run/trie/") for name in store.find("/bucket/run/trie"))


def write(first: int, *, overwrite: bool = False, out: Any = OUT) -> None:
    """Write the trie of one trajectory that starts with the token `first`."""
    with finished_directory(out, overwrite=overwrite) as temporary:
        write_trie(build_trie([make("a", [first, 2, 3])]), temporary)


def write_and(action: Callable[[], object], tokens: list[int], *, overwrite: bool = False) -> None:
    """Write a trie, and call `action` between its last part and its manifest."""
    with finished_directory(OUT, overwrite=overwrite) as temporary:
        write_trie(build_trie([make("a", tokens)]), temporary)
        action()


def write_file(out: AnyPath, content: str, **options: Any) -> None:
    with finished_file(out, **options) as temporary:
        temporary.write_text(content)


def die() -> None:
    raise KeyboardInterrupt


def as_another_process(action: Callable[[], object]) -> Callable[[], object]:
    """Return `action` without what this process has observed."""
    return lambda: Context().run(action)


def first_token() -> int:
    return int(read_trie(OUT).tokens[0])


def test_the_names_of_parts_depend_on_their_content_only(store: Any, tmp_path: Path) -> None:
    write(1)
    assert [name.split("-")[0] for name in names(store)] == ["manifest.json", "nodes", "trajectories"]
    before = {name: store.cat_file(f"/bucket/run/trie/{name}") for name in names(store)}
    store.rm("/bucket/run", recursive=True)
    write(1)
    assert before == {name: store.cat_file(f"/bucket/run/trie/{name}") for name in names(store)}
    write(1, out=tmp_path / "trie")
    local, remote = read_manifest(tmp_path / "trie")["files"], read_manifest(OUT)["files"]
    assert [entry["sha256"] for entry in local] == [entry["sha256"] for entry in remote]


def test_parts_are_uploaded_when_they_are_closed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_TOKENS", 1)
    with finished_directory(OUT) as temporary:
        columns = pa.schema([("x", pa.int32())])
        writer = parts.PartWriter(temporary, "part", columns)
        for number in range(3):
            writer.write(pa.table({"x": pa.array([number], pa.int32())}), tokens=1)
            assert len(names(store)) == number  # the open part is still here
            assert len(list(temporary.iterdir())) == 1
        (temporary / "manifest.json").write_text(json.dumps({"files": writer.entries()}))
        assert [path.name for path in temporary.iterdir()] == ["manifest.json"]
    assert len(names(store)) == 4


def test_an_existing_output_is_replaced_only_by_overwrite(store: Any) -> None:
    write(1)
    assert "memory://bucket/run/trie exists; choose another --out or give --overw" in refusal(write, 5)
    assert first_token() == 1
    write(5, overwrite=True)
    assert first_token() == 5
    assert len(names(store)) == 3  # the old parts are gone


def test_an_output_that_treepack_did_not_write_is_never_replaced(store: Any) -> None:
    store.pipe_file("/bucket/run/trie/mine.txt", b"precious")
    for overwrite in (False, True):
        assert "exists" in refusal(write, 1, overwrite=overwrite)
    assert names(store) == ["mine.txt"]


def test_the_remains_of_a_killed_upload_are_unfinished_and_then_replaced(store: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_and(die, [9, 9])
    assert len(names(store)) == 2
    assert "memory://bucket/run/trie: has no manifest.json" in refusal(read_trie, OUT)
    write(1)
    assert first_token() == 1
    assert len(names(store)) == 3


def test_of_two_writers_the_later_one_gets_one_sentence_and_leaves_nothing(store: Any) -> None:
    assert "bucket/run/trie: exists, because another process has just written it" in refusal(
        write_and, as_another_process(lambda: write(1)), [7, 7]
    )
    assert first_token() == 1
    assert len(names(store)) == 3


def test_of_two_writers_of_equal_content_the_parts_of_the_winner_stay(store: Any) -> None:
    assert "another process has just written it" in refusal(write_and, as_another_process(lambda: write(1)), [1, 2, 3])
    assert first_token() == 1


def test_of_two_that_overwrite_one_wins_and_no_part_is_lost(store: Any) -> None:
    write(1)
    assert "another process has just written it" in refusal(
        write_and, as_another_process(lambda: write(5, overwrite=True)), [7, 7], overwrite=True
    )
    assert first_token() == 5
    assert len(names(store)) == 3


def test_a_directory_with_fixed_names_is_marked_until_its_record_is_there(store: Any) -> None:
    def save(number: int, *, overwrite: bool = False) -> None:
        with finished_directory(OUT, overwrite=overwrite) as temporary:
            (temporary / "model").mkdir()
            (temporary / "model" / "weights").write_text(str(number))
            record = {"format": "treepack-values", "number": number}
            (temporary / "values.json").write_text(json.dumps(record))

    save(1)
    assert names(store) == ["model/weights", "values.json"]
    assert "exists" in refusal(save, 2)
    save(2, overwrite=True)
    assert store.cat_file("/bucket/run/trie/model/weights") == b"2"
    # As after a kill: the marker lists what the killed process may have left, and nothing else is replaced.
    store.rm_file("/bucket/run/trie/values.json")
    store.pipe_file(f"/bucket/run/trie/{UNFINISHED}", b"model/weights\nmodel/more\n")
    store.pipe_file("/bucket/run/trie/mine.txt", b"precious")
    assert "exists" in refusal(save, 3)
    store.rm_file("/bucket/run/trie/mine.txt")
    store.pipe_file("/bucket/run/trie/model/more", b"left")
    save(3)
    assert names(store) == ["model/weights", "values.json"]
    assert store.cat_file("/bucket/run/trie/model/weights") == b"3"


def test_a_file_is_written_whole_and_only_if_it_is_absent(store: Any) -> None:
    out = as_path("memory://bucket/run/values.jsonl")
    with pytest.raises(KeyboardInterrupt), finished_file(out, overwrite=False):
        raise KeyboardInterrupt
    assert not store.exists("/bucket/run/values.jsonl")
    write_file(out, "whole", overwrite=False)
    assert "values.jsonl exists; choose another --save-plan or give --overwrite" in refusal(
        write_file, out, "other", overwrite=False, option="--save-plan"
    )
    write_file(out, "new", overwrite=True)
    assert store.cat_file("/bucket/run/values.jsonl") == b"new"


def test_a_file_that_is_read_and_written_again_loses_no_change(store: Any) -> None:
    out = as_path("memory://bucket/run/state")
    write_file(out, "1", overwrite=False)
    with lock(out):
        store.pipe_file("/bucket/run/state", b"another")
        assert "state: was written by another process meanwhile; run the command ag" in refusal(
            write_file, out, "mine", overwrite=True
        )
    assert store.cat_file("/bucket/run/state") == b"another"


def test_an_output_is_not_inside_its_input(store: Any) -> None:
    write(1)
    inner = as_path("memory://bucket/run/trie/inner")
    assert "trie/inner lies inside memory://bucket/run/trie, which treepack wrote" in refusal(
        refuse_existing, inner, overwrite=False, inputs=["memory://bucket/run/trie"]
    )
    assert "holds the input memory://bucket/run/trie/manifest.json, which --over" in refusal(
        refuse_existing, OUT, overwrite=True, inputs=[OUT / "manifest.json"]
    )


def test_an_output_is_not_inside_a_directory_that_treepack_wrote(store: Any) -> None:
    write(1)
    inner = as_path("memory://bucket/run/trie/deep/inner")
    assert "deep/inner lies inside memory://bucket/run/trie, which treepack wrote" in refusal(
        refuse_existing, inner, overwrite=False
    )
    refuse_existing(as_path("memory://bucket/run/inner"), overwrite=False)


def test_a_damaged_part_is_named_by_its_address(store: Any) -> None:
    write(1)
    (part,) = (name for name in names(store) if name.startswith("nodes"))
    whole = store.cat_file(f"/bucket/run/trie/{part}")
    store.pipe_file(f"/bucket/run/trie/{part}", whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"memory://bucket/run/trie/{part}: was altered since it was written" in refusal(read_trie, OUT)
    store.rm_file(f"/bucket/run/trie/{part}")
    assert f"trie/{part}: is missing; if memory://bucket/run/trie is being replaced" in refusal(read_trie, OUT)
    store.pipe_file(f"/bucket/run/trie/{part}", whole)
    assert first_token() == 1  # nothing damaged has been kept
    copy = local_copy(OUT) / part
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == hashlib.sha256(whole).hexdigest()


def test_messages_of_the_library_name_addresses(store: Any) -> None:
    write(1)
    (part,) = (name for name in names(store) if name.startswith("nodes"))
    copy = local_copy(OUT) / part
    copy.write_bytes(copy.read_bytes()[:-1] + b"!")
    assert refusal(read_trie, OUT).startswith(f"memory://bucket/run/trie/{part}: was altered")


def test_a_missing_directory_is_named(store: Any) -> None:
    assert "memory://bucket/run/trie: no such object and no prefix of one" in refusal(
        local_copy, RemotePath("memory", "bucket/run/trie")
    )
