"""The lock of an output: one process at a time; and readers of a directory that is replaced meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.errors import TreepackError
from treepack.files.directory import finished_directory
from treepack.files.lock import lock
from treepack.files.manifest import check_part, read_manifest
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import write_trie

HOLD = """
import pathlib, sys
from treepack.files.lock import lock
with lock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def owner_of(out: Path, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock of `out`, until a line is written to it or it is killed."""
    command = [*prefix, sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def is_free(out: Path) -> bool:
    """Whether another thread can lock `out`; for flock it is as good as another process."""

    def try_lock() -> bool:
        try:
            with lock(out):
                return True
        except TreepackError:
            return False

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(try_lock).result()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "trie"
    with (
        owner_of(out) as owner,
        pytest.raises(TreepackError, match=f"trie: is being written by process {owner.pid} on .*; wait until it ends"),
        lock(out),
    ):
        pass
    assert is_free(out)


def test_a_second_thread_is_refused_and_a_block_inside_a_block_shares_the_lock(tmp_path: Path) -> None:
    with lock(tmp_path / "trie"):
        assert not is_free(tmp_path / "trie")
        assert is_free(tmp_path / "other")
        with lock(tmp_path / "trie"):
            pass
        assert not is_free(tmp_path / "trie")
    assert is_free(tmp_path / "trie")


def test_a_link_and_its_target_have_one_lock(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "trie")
    with lock(tmp_path / "trie"):
        assert not is_free(tmp_path / "link")


def test_the_lock_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "trie"
    with owner_of(out) as owner:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert (tmp_path / ".trie.lock").exists()
        assert is_free(out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0,
    reason="no permission to make a pid namespace, as a container has one",
)
def test_a_process_of_another_pid_namespace_keeps_its_lock(tmp_path: Path) -> None:
    with owner_of(tmp_path / "trie", "unshare", "--pid", "--fork", "--kill-child"):
        assert not is_free(tmp_path / "trie")


def test_a_lock_file_that_is_removed_between_open_and_lock_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The race in the header of lock.py: this process opens inode 1, its owner removes it, and another locks inode 2.
    file, flock = tmp_path / ".trie.lock", fcntl.flock
    others: list[int] = []

    def slow(descriptor: int, operation: int) -> None:
        if not others:
            file.unlink()
            others.append(os.open(file, os.O_RDWR | os.O_CREAT))
            flock(others[0], fcntl.LOCK_EX)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(TreepackError, match="is being written by"), lock(tmp_path / "trie"):
        pass
    os.close(others[0])


CONTEND = """
import pathlib, sys
from treepack.errors import TreepackError
from treepack.files.lock import lock
out, entered = pathlib.Path(sys.argv[1]), 0
while entered < 100:
    try:
        with lock(out):
            (out.parent / "inside").mkdir()     # fails if another process is inside too
            (out.parent / "inside").rmdir()
            entered += 1
    except TreepackError:
        pass
"""


def test_only_one_of_many_processes_is_inside_at_a_time(tmp_path: Path) -> None:
    # They open, lock and remove the same lock file all the time.
    processes = [
        subprocess.Popen([sys.executable, "-c", CONTEND, str(tmp_path / "runs" / "trie")], stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    # The folder may stay: whoever made it could not remove it while another one was inside.
    assert [path.name for path in tmp_path.rglob("*") if path.name != "runs"] == []


def test_folders_made_for_a_lock_are_removed_unless_something_was_written(tmp_path: Path) -> None:
    for name in ("empty", "full"):
        with lock(tmp_path / name / "runs" / "trie"):
            if name == "full":
                (tmp_path / name / "runs" / "trie").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.name for path in (tmp_path / "full" / "runs").iterdir()] == ["trie"]


def test_a_file_system_without_locks_is_used_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock(tmp_path / "trie") as is_locked:
        assert not is_locked
    assert list(tmp_path.iterdir()) == []


def test_a_file_as_parent_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(TreepackError, match=r"cannot be written .*; choose another --out"),
        lock(tmp_path / "file" / "a"),
    ):
        pass


def test_the_lock_file_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / ".trie.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(TreepackError, match="cannot be written"), lock(tmp_path / "trie"):
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_a_folder_around_a_mount_point_needs_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As root every folder can be written, so the refusal of the operating system is simulated.
    out, real = tmp_path / "mount", os.open
    out.mkdir()

    def refuse_files(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_files)
    with lock(out) as is_locked:
        assert is_locked
        assert not is_free(out)
    assert is_free(out)


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
