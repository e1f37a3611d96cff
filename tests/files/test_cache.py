"""Copies of remote inputs are whole, are made once, fit into a limit, and are named by their addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from support.refusal import refusal
from treepack.files.remote import cache_room
from treepack.files.remote.address import RemotePath, as_path
from treepack.files.remote.cache import addresses_in, borrowed_copy, local_copy, recent_copy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(folder: Path) -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/run/a b.jsonl", b"one")
    memory.pipe_file("/bucket/run/deep/ü.jsonl", b"two")
    yield memory
    memory.rm("/bucket", recursive=True)


def test_an_object_is_copied_once_and_again_when_it_changes(store: Any) -> None:
    path = as_path("memory://bucket/run/a b.jsonl")
    copy = local_copy(path)
    assert (copy.name, copy.read_bytes()) == ("a b.jsonl", b"one")
    before = copy.stat()
    assert local_copy(path) == copy
    assert os.path.samestat(before, copy.stat())
    store.pipe_file("/bucket/run/a b.jsonl", b"eno")
    assert local_copy(path).read_bytes() == b"eno"
    assert copy.read_bytes() == b"one"  # a reader of the old copy can continue


def test_a_prefix_keeps_its_folders(store: Any) -> None:
    copy = local_copy(as_path("memory://bucket/run"))
    files = {path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert files == {"a b.jsonl": b"one", "deep/ü.jsonl": b"two"}


def test_a_local_path_is_its_own_copy(tmp_path: Path, folder: Path) -> None:
    assert local_copy(tmp_path) == tmp_path
    assert not folder.exists()


@pytest.mark.parametrize("key", ["../../../escaped", "a//b", "./c", "100%/%2E%2E/d"])
def test_no_key_leaves_the_folder_of_its_copy(key: str, folder: Path) -> None:
    from treepack.files.remote.cache import _path

    first, second = (_path(RemotePath("s3", f"bucket/{name}"), "0" * 16) for name in (key, key.replace("%", "%25")))
    inner = first.relative_to(folder / "objects" / ("0" * 16) / "s3" / "bucket")
    assert ".." not in inner.parts
    assert (first == second) == (key == key.replace("%", "%25"))  # different keys have different copies


def test_messages_name_addresses(store: Any, folder: Path) -> None:
    copy = local_copy(as_path("memory://bucket/run/a b.jsonl"))
    assert addresses_in(f"{copy}:3: is wrong; fix {copy}") == (
        "memory://bucket/run/a b.jsonl:3: is wrong; fix memory://bucket/run/a b.jsonl"
    )
    assert addresses_in(f"{folder}/objects/x: is wrong") == f"{folder}/objects/x: is wrong"


def test_old_copies_make_room_and_copies_in_use_stay(store: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEPACK_CACHE_SIZE", "2.5K")
    paths = [as_path(f"memory://bucket/{name}") for name in "abcd"]
    for path in paths:
        store.pipe_file(f"/{path.path}", b"x" * 1000)  # type: ignore[union-attr]
    copies = []
    for number, path in enumerate(paths[:2]):
        with borrowed_copy(path) as copy:
            copies.append(copy)
            assert copy.stat().st_size == 1000
        os.utime(next(parent for parent in copy.parents if (parent / ".pin").exists()) / ".pin", (number, number))
    used = local_copy(paths[2])
    assert [copy.exists() for copy in copies] == [False, True]
    with borrowed_copy(paths[3]) as copy:
        assert [copies[1].exists(), used.exists(), copy.exists()] == [False, True, True]
    store.pipe_file("/bucket/large", b"x" * 2000)
    assert "needs 2,000 more bytes, and may have 2,560, of which 1,000 are in use; " in refusal(
        local_copy, as_path("memory://bucket/large")
    )
    assert used.exists()


def test_many_files_one_by_one_do_not_need_room_for_all(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from treepack.files.remote import cache

    monkeypatch.setenv("TREEPACK_CACHE_SIZE", "20K")
    monkeypatch.setattr(cache, "_RECENT_FILES", 4)
    monkeypatch.setattr(cache, "_RECENT_BYTES", 0)
    for number in range(60):
        store.pipe_file(f"/bucket/{number}", b"x" * 1000)
        assert recent_copy(as_path(f"memory://bucket/{number}")).stat().st_size == 1000


def test_remains_of_a_killed_download_are_removed(store: Any) -> None:
    path = as_path("memory://bucket/run/a b.jsonl")
    copy = local_copy(path)
    copy.unlink()
    remains = copy.with_name(".0123.partial")
    remains.write_bytes(b"o")
    assert local_copy(path).read_bytes() == b"one"
    assert not remains.exists()


def test_a_limit_that_is_no_size_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEPACK_CACHE_SIZE", "much")
    assert "TREEPACK_CACHE_SIZE or --cache-size is 'much'; expected a number of bytes" in refusal(
        local_copy, as_path("memory://bucket/run")
    )


def test_the_cache_works_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TREEPACK_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_room.cache_folder() == tmp_path / "xdg" / "treepack"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_room.cache_folder()
    assert folder == tmp_path / f"treepack-cache-{os.getuid()}"
    assert folder.stat().st_mode & 0o077 == 0
    folder.rmdir()
    folder.symlink_to(tmp_path / "xdg")  # of somebody else
    assert "set TREEPACK_CACHE to one" in refusal(cache_room.cache_folder)


def test_a_folder_in_use_by_another_process_stays(folder: Path) -> None:
    objects = folder / "objects"
    program = f"""
import sys
from pathlib import Path
from treepack.files.remote.cache_room import pin
pin(Path({str(objects / "key")!r}))
print("pinned", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not cache_room.remove_unused(objects / "key")
        process.kill()
        process.wait()
    assert cache_room.remove_unused(objects / "key")
    assert not (objects / "key").exists()
