"""An address is one of an accepted store, or one sentence; a local path stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROOT
from support.refusal import refusal
from treepack.files.remote.address import RemotePath, as_output, as_path


def test_addresses_keep_their_slashes_and_characters() -> None:
    assert as_path("s3://bucket/a b/ü%20#?.jsonl") == RemotePath("s3", "bucket/a b/ü%20#?.jsonl")
    assert str(as_path("S3://bucket/x/")) == "s3://bucket/x"
    assert str(as_path("gs://bucket") / "trie") == "gs://bucket/trie"
    assert as_path(as_path("hf://datasets/a/b")) == RemotePath("hf", "datasets/a/b")


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1))
def test_any_key_survives(name: str) -> None:
    path = as_path(f"s3://bucket/folder/{name}")
    assert isinstance(path, RemotePath)
    assert (path.bucket, path.name, str(path.parent)) == ("bucket", name, "s3://bucket/folder")
    assert path.suffix == Path(name).suffix


def test_local_paths_and_file_addresses_are_paths() -> None:
    assert as_path("a/b") == Path("a/b")
    assert as_path(Path("a:b/c")) == Path("a:b/c")
    assert as_path("file:///data/a%20b") == as_path("file://localhost/data/a b") == Path("/data/a b")


@pytest.mark.parametrize(
    ("address", "fault"),
    {
        "hdfs://host/x": "hdfs:// is not supported; expected a local path, file://, s3:// or gs://",
        "s3a://bucket/x": "s3a:// is not supported",
        "s3:///": "names no bucket; write s3://BUCKET/NAME",
        "file://other-host/x": "is no path on this machine; write file:///PATH",
    }.items(),
)
def test_other_addresses_are_refused_by_name(address: str, fault: str) -> None:
    assert refusal(as_path, address).startswith(f"{address}: {fault}")


def test_an_empty_text_is_no_path() -> None:
    assert "'' is empty; expected a path or an address" in refusal(as_path, "")


def test_the_hub_is_read_only() -> None:
    assert "hf:// is read only; choose a local --png or one in s3:// or gs://" in refusal(
        as_output, "hf://datasets/a/b", option="--png"
    )


def test_a_path_lies_in_its_prefixes_only() -> None:
    path = RemotePath("s3", "bucket/run/trie")
    assert path.is_relative_to(RemotePath("s3", "bucket/run"))
    assert path.is_relative_to(path)
    assert not path.is_relative_to(RemotePath("s3", "bucket/ru"))
    assert not path.is_relative_to(RemotePath("gs", "bucket"))


def test_only_files_remote_tells_addresses_from_paths_by_their_class() -> None:
    sources = [path for folder in ("treepack", "cli") for path in (ROOT / folder).rglob("*.py")]
    naming = [path for path in sources if "RemotePath" in path.read_text()]
    inside = ROOT / "treepack" / "files" / "remote"
    assert len(naming) > 3
    assert [path for path in naming if inside not in path.parents] == []
