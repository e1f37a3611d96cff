"""Google Cloud Storage by the same code: conditions of writes, outputs and copies, against a small server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextvars import Context
from pathlib import Path

import pytest

from support.gs import Bucket, running_bucket
from support.refusal import refusal
from support.strategies import make
from treepack.files.directory import finished_directory
from treepack.files.remote import object_store
from treepack.files.remote.address import RemotePath
from treepack.files.remote.object_store import ExistsError
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie, write_trie

pytestmark = pytest.mark.s3

OUT = RemotePath("gs", "bucket/run ü/trie")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    with running_bucket(monkeypatch) as served:
        yield served


def write(first: int, *, overwrite: bool = False) -> None:
    with finished_directory(OUT, overwrite=overwrite) as temporary:
        write_trie(build_trie([make("a", [first, 2, 3])]), temporary)


def test_the_conditions_of_a_write_are_kept(bucket: Bucket) -> None:
    path = OUT / "a b%.json"
    object_store.write(path, b"1", expected=None)
    with pytest.raises(ExistsError):
        object_store.write(path, b"2", expected=None)
    entry = object_store.info(path)
    assert entry is not None
    assert object_store.list_objects(OUT) == {path.name: entry}
    object_store.write(path, b"22", expected=entry.version)
    with pytest.raises(ExistsError):
        object_store.write(path, b"3", expected=entry.version)
    assert object_store.read_object(path) == b"22"
    object_store.delete([path])
    assert object_store.read_object(path) is None
    assert bucket.objects == {}


def test_outputs_are_whole_and_replaced_only_by_overwrite(bucket: Bucket) -> None:
    write(1)
    assert read_trie(OUT).tokens[0] == 1
    assert "trie exists; choose another --out or give --overwrite" in refusal(write, 2)
    write(2, overwrite=True)
    assert read_trie(OUT).tokens[0] == 2
    assert len(bucket.objects) == 3


def test_of_two_writers_the_later_one_gets_one_sentence(bucket: Bucket) -> None:
    def write_late() -> None:
        with finished_directory(OUT) as temporary:
            write_trie(build_trie([make("a", [7, 7])]), temporary)
            Context().run(write, 1)

    assert "trie: exists, because another process has just written it" in refusal(write_late)
    assert read_trie(OUT).tokens[0] == 1
    assert len(bucket.objects) == 3


def test_a_missing_bucket_is_one_sentence(bucket: Bucket) -> None:
    assert "gs://other/trie: there is no bucket other; create it" in refusal(
        object_store.write, RemotePath("gs", "other/trie"), b"", expected=None
    )


UNANSWERED = """
import asyncio, gcsfs.retry, sys
from treepack_cli import main
wait = asyncio.sleep
gcsfs.retry.asyncio.sleep = lambda seconds: wait(0)
sys.argv = ["treepack", "stats", "gs://bucket/trie"]
main()
"""


def test_a_store_that_does_not_answer_is_one_sentence() -> None:
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", UNANSWERED], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("treepack: gs://bucket/trie/manifest.json: cannot be read, the store does not answer (")
