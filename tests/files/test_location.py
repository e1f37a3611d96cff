"""A packed directory has the same rows in every filesystem, and every error there is one sentence."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from pyarrow import fs
from torch.utils.data import DataLoader

from support.oracle_model import packed_directory
from support.refusal import refusal
from support.strategies import make
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest
from treepack.files.remote.location import locate


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    trajectories = [make(f"t{i}", [i, *generator.integers(0, 50, 100).tolist()]) for i in range(6)]
    return packed_directory(tmp_path / "packed", trajectories, capacity=250)


@pytest.fixture
def memory(packed: Path) -> Iterator[str]:
    """Address of a copy of the directory in the memory filesystem of fsspec."""
    store = fsspec.filesystem("memory")
    store.put(str(packed), "/bucket/packed", recursive=True)
    yield "memory://bucket/packed"
    store.rm("/bucket", recursive=True)


@pytest.fixture(autouse=True)
def _copies_of_parts_in_a_folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))


def assert_same_rows(dataset: PackedDataset, expected: PackedDataset) -> None:
    assert len(dataset) == len(expected) > 1
    # In reverse order, so that reading cannot rely on the rows being read from the start.
    for i in reversed(range(len(expected))):
        assert torch.equal(dataset[i].input_ids, expected[i].input_ids)
        assert torch.equal(dataset[i].subtree_end, expected[i].subtree_end)
    assert dataset.state_dict() == expected.state_dict()


def test_rows_come_from_uris_and_filesystems(packed: Path, memory: str) -> None:
    local = PackedDataset(packed)
    assert_same_rows(PackedDataset(str(packed)), local)
    assert_same_rows(PackedDataset(packed.as_uri()), local)
    assert_same_rows(PackedDataset(memory), local)
    subtree = fs.SubTreeFileSystem(str(packed.parent), fs.LocalFileSystem())
    assert_same_rows(PackedDataset("packed", filesystem=subtree), local)
    assert_same_rows(PackedDataset(packed, filesystem=fs.LocalFileSystem()), local)
    assert read_manifest(memory) == read_manifest(packed)


def test_a_copy_in_a_worker_reads_the_same(packed: Path, memory: str) -> None:
    subtree = fs.SubTreeFileSystem(str(packed.parent), fs.LocalFileSystem())
    local = PackedDataset(packed)
    for dataset in (PackedDataset(memory), PackedDataset("packed", filesystem=subtree)):
        # The file is open now. The copy must open it again: forked processes that share a connection read garbage.
        assert len(dataset[0].input_ids) > 0
        assert_same_rows(pickle.loads(pickle.dumps(dataset)), local)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        rows = [batch.input_ids.tolist() for batch in loader]
        assert rows == [local[i].input_ids.tolist() for i in range(len(local))]


def test_a_file_uri_is_checked_like_a_path(packed: Path) -> None:
    part = packed / "part-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    for path in (packed, packed.as_uri()):
        assert "sha256 differs" in refusal(PackedDataset, path)


def test_remote_parts_are_checked_by_size_and_pages_by_checksum(packed: Path, memory: str) -> None:
    store = fsspec.filesystem("memory")
    part = "/bucket/packed/part-00000.parquet"
    whole = store.cat_file(part)
    store.pipe_file(part, whole[:-1])
    with pytest.raises(TreepackError, match=r"memory://bucket/packed/part-00000\.parquet: has \d+ bytes"):
        PackedDataset(memory)
    # A changed byte in the middle of input_ids (column 5). The size is right. The checksum of the page shows it, or the
    # hash of the part, if its copy is complete first.
    dataset = PackedDataset(packed)
    chunk = dataset._reader._open("part-00000.parquet").metadata.row_group(0).column(5)
    middle = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size // 2
    store.pipe_file(part, whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(
        TreepackError, match=r"memory://.*part-00000\.parquet: (row group 0 cannot be read .*CRC|was altered .*sha256)"
    ):
        list(PackedDataset(memory))
    store.rm(part)
    assert "part-00000.parquet: is missing" in refusal(PackedDataset, memory)


def test_a_missing_directory_is_one_sentence(tmp_path: Path, memory: str) -> None:
    cases = {
        "nowhere://bucket/packed": r"nowhere:// is not supported; expected a local path, file://, s3://",
        "memory://bucket/other": r"memory://bucket/other: has no manifest\.json",
        "memory://nobucket/packed": r"has no manifest\.json",
        (tmp_path / "other").as_uri(): r"other: no such directory; check the path",
        str(tmp_path / "other"): r"other: no such directory; check the path",
    }
    for path, message in cases.items():
        with pytest.raises(TreepackError, match=message) as caught:
            PackedDataset(path)
        assert "\n" not in str(caught.value)


def test_a_scheme_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # an import of it fails
    monkeypatch.setenv("AWS_PROFILE", "of-this-test")  # clients are kept by their environment
    assert "s3:// needs s3fs; run pip install 's3fs>=" in refusal(locate, "s3://bucket/packed")


def test_only_filesystems_of_pyarrow_are_taken(packed: Path) -> None:
    assert "is a MemoryFileSystem; expected a pyarrow.fs.FileSystem" in refusal(
        PackedDataset, packed, filesystem=fsspec.filesystem("memory")
    )
