"""Addresses and names: an accepted store, a local path, a model on the hub, or one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROOT
from support.refusal import refusal
from treepack.files.remote.address import RemotePath, as_output, as_path
from treepack.files.remote.hub import is_offline, load_fault, refuse_missing


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


FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub at which nobody answers."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def fault(name: str) -> str:
    return str(load_fault(name, ValueError("Repo id must be\n in the form"), kind="tokenizer"))


def test_a_folder_without_the_files_is_told_what_they_are(tmp_path: Path) -> None:
    expected = "contains no tokenizer; give a folder with tokenizer.json or tokenizer_config.json, or a hub name"
    assert refusal(refuse_missing, str(tmp_path), kind="tokenizer", files=FILES) == f"{tmp_path}: {expected}"


def test_a_damaged_folder_has_the_reason_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert fault(str(tmp_path)) == (
        f"{tmp_path}: its tokenizer cannot be loaded (Repo id must be in the form); save it again with transformers"
    )


@pytest.mark.parametrize("name", ["./none", "/none", "a/b/c", "none.json", "none/"])
def test_a_path_that_does_not_exist_never_goes_to_the_hub(name: str) -> None:
    assert not is_offline(name)
    assert refusal(refuse_missing, name, kind="tokenizer", files=FILES) == (
        f"{name}: no such file or folder; give the folder of a tokenizer, or its name on the hub"
    )


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_an_unreachable_hub_is_named_as_the_reason(name: str, no_hub: None) -> None:
    assert is_offline(name)
    assert "is no folder here, and the Hugging Face hub cannot be reached for a tokenizer" in fault(name)
