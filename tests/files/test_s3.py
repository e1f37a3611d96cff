"""Objects of a real S3 server: conditions of writes, faults of the network, kills, and two writers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from pathlib import Path
from urllib.parse import unquote

import pytest

from support.s3 import CUT, LOST, Store
from support.strategies import make
from treepack.errors import TreepackError
from treepack.files.directory import finished_directory, finished_file
from treepack.files.remote import object_store
from treepack.files.remote.address import RemotePath, as_path
from treepack.files.remote.cache import local_copy
from treepack.files.remote.object_store import ExistsError
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie, write_trie

pytestmark = pytest.mark.s3


def path_of(s3: Store, name: str) -> RemotePath:
    path = as_path(s3.address(name))
    assert isinstance(path, RemotePath)
    return path


def write(s3: Store, first: int, *, overwrite: bool = False, name: str = "trie") -> None:
    """Write the trie of one trajectory that starts with the token `first`."""
    with finished_directory(path_of(s3, name), overwrite=overwrite) as temporary:
        write_trie(build_trie([make("a", [first, 2, 3])]), temporary)


def first_token(s3: Store) -> int:
    return int(read_trie(path_of(s3, "trie")).tokens[0])


def fails(action: Callable[[], object]) -> str:
    with pytest.raises(TreepackError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_conditions_of_a_write_are_kept(s3: Store) -> None:
    path = path_of(s3, "dir with spaces/ü%2F+?#.json")
    object_store.write(path, b"1", expected=None)
    with pytest.raises(ExistsError):
        object_store.write(path, b"2", expected=None)
    entry = object_store.info(path)
    assert entry is not None
    object_store.write(path, b"22", expected=entry.version)
    with pytest.raises(ExistsError):
        object_store.write(path, b"3", expected=entry.version)
    assert object_store.read_object(path) == b"22"
    assert list(object_store.list_objects(path_of(s3, "dir with spaces"))) == [path.name]
    object_store.delete([path, path_of(s3, "missing")])
    assert object_store.info(path) is None
    assert object_store.read_object(path) is None


def test_a_large_file_goes_up_in_parts_and_keeps_the_condition(s3: Store, tmp_path: Path) -> None:
    local, copy, path = tmp_path / "large", tmp_path / "copy", path_of(s3, "large")
    local.write_bytes(os.urandom(1 << 20) * 101)
    object_store.upload(local, path, expected=None)
    assert sum(method == "PUT" and "partNumber" in name for method, name in s3.requests) > 1
    with pytest.raises(ExistsError):
        object_store.upload(local, path, expected=None)
    object_store.download(path, copy)
    assert copy.read_bytes() == local.read_bytes()
    assert not s3.client.list_multipart_uploads(Bucket=s3.bucket).get("Uploads")


def test_a_write_whose_answer_is_lost_has_succeeded(s3: Store) -> None:
    lost: list[str] = []

    def lose_first(method: str, name: str) -> int | None:
        if method == "PUT" and not lost:
            lost.append(name)
            return LOST
        return None

    s3.fault = lose_first
    object_store.write(path_of(s3, "manifest.json"), b"mine", expected=None)
    assert lost
    assert s3.read("manifest.json") == b"mine"


@pytest.mark.parametrize("status", [500, 503, CUT])
def test_faults_that_pass_are_not_noticed(s3: Store, status: int) -> None:
    failed: dict[tuple[str, str], int] = {}

    def fail_once(method: str, name: str) -> int | None:
        failed[method, name] = failed.get((method, name), 0) + 1
        return status if failed[method, name] == 1 else None

    s3.fault = fail_once
    write(s3, 1)
    assert first_token(s3) == 1
    assert len(failed) >= 10


@pytest.mark.parametrize(
    ("status", "fault"), {500: "does not answer", 503: "does not answer", CUT: "does not answer", 403: "denied"}.items()
)
def test_faults_that_stay_are_one_sentence_and_leave_no_output(
    s3: Store, status: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    write(s3, 1)
    s3.fault = lambda method, name: status
    message = fails(lambda: read_trie(path_of(s3, "trie")))
    assert message.startswith(f"s3://{s3.bucket}/trie")
    assert fault in message
    assert fault in fails(lambda: write(s3, 2, name="other"))
    s3.fault = lambda method, name: status if method == "PUT" else None
    assert fault in fails(lambda: write(s3, 2, name="other"))
    s3.fault = lambda method, name: None
    assert s3.names("other") == []


def test_missing_credentials_and_buckets_are_one_sentence(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for action in (lambda: read_trie("s3://no-such-bucket/trie"), lambda: local_copy(as_path("s3://no-such-bucket/x"))):
        assert "there is no bucket no-such-bucket; create it, or check the address" in fails(action)
    with (
        pytest.raises(TreepackError, match="there is no bucket no-such-bucket"),
        finished_directory(as_path("s3://no-such-bucket/trie")),
    ):
        raise AssertionError("refused before any work")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "access denied (Unable to locate credentials); check the credentials (AWS_PROFILE" in fails(
        lambda: read_trie(path_of(s3, "trie"))
    )


def test_every_reader_finds_a_whole_output_at_any_moment(s3: Store) -> None:
    write(s3, 1)
    seen = []

    def look(method: str, name: str) -> None:
        if method in ("PUT", "POST", "DELETE"):
            manifest = json.loads(s3.read("trie/manifest.json"))
            sizes = {name: len(s3.read(f"trie/{name}")) for name in (entry["name"] for entry in manifest["files"])}
            assert sizes == {entry["name"]: entry["bytes"] for entry in manifest["files"]}
            seen.append((method, unquote(name)))

    s3.fault = look
    write(s3, 5, overwrite=True)
    assert [method for method, _ in seen][:4] == ["PUT", "PUT", "PUT", "DELETE"]
    assert "manifest.json" in seen[2][1]
    assert first_token(s3) == 5
    assert len(s3.names("trie")) == 3


@pytest.mark.parametrize("same", [True, False])
def test_of_writers_at_once_one_wins_and_the_others_get_one_sentence(s3: Store, same: bool) -> None:
    barrier = threading.Barrier(4)

    def meet(method: str, name: str) -> None:
        if method == "PUT" and "manifest.json" in name:
            barrier.wait(timeout=60)  # all have uploaded their parts

    s3.fault = meet

    def attempt(number: int) -> str | None:
        try:
            Context().run(write, s3, 1 if same else number)
        except TreepackError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        faults = list(pool.map(attempt, range(4)))
    s3.fault = lambda method, name: None
    losers = [fault for fault in faults if fault is not None]
    assert len(losers) == 3
    for fault in losers:
        assert (
            fault == f"{s3.address('trie')}: exists, because another process has just written it; choose another --out"
        )
    assert first_token(s3) == (1 if same else faults.index(None))
    write(s3, 9, overwrite=True)
    assert len(s3.names("trie")) == 3


def test_of_two_updates_of_a_file_none_is_lost(s3: Store) -> None:
    path = path_of(s3, "state")
    object_store.write(path, b"0")

    def overwrite() -> None:
        with finished_file(path, overwrite=True) as temporary:
            Context().run(object_store.write, path, b"other")
            temporary.write_bytes(b"mine")

    assert fails(overwrite) == f"{path}: was written by another process meanwhile; run the command again"
    assert s3.read("state") == b"other"


def test_a_command_killed_during_its_upload_is_run_again(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text(json.dumps({"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}) + "\n")
    reached, go_on = threading.Event(), threading.Event()

    def wait(method: str, name: str) -> int | None:
        if method == "PUT" and "trie/manifest.json" in name:
            reached.set()
            go_on.wait(60)
            return CUT
        return None

    s3.fault = wait
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    command = [str(Path(sys.executable).parent / "treepack"), "build-trie", str(rollouts), "--out", s3.address("trie")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not reached.wait(1):
            assert process.poll() is None, process.communicate()
        process.kill()
        process.wait()
    go_on.set()
    s3.fault = lambda method, name: None
    left = s3.names("trie")
    assert len(left) == 2
    assert "has no manifest.json" in fails(lambda: read_trie(path_of(s3, "trie")))
    write(s3, 7)  # other content, so other names
    assert first_token(s3) == 7
    assert not set(left) & set(s3.names("trie"))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_processes_that_start_together_copy_a_file_once(s3: Store, tmp_path: Path) -> None:
    s3.write("input", os.urandom(1 << 20))
    program = (
        "import sys; from treepack.files.remote.cache import local_copy; "
        "from treepack.files.remote.address import as_path; "
        "print(local_copy(as_path(sys.argv[1])))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, s3.address("input")], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    copies = {process.communicate(timeout=120)[0] for process in started}
    (copy,) = copies
    assert Path(copy.strip()).read_bytes() == s3.read("input")
    assert sum(method == "GET" and name.endswith("/input") for method, name in s3.requests) == 1
