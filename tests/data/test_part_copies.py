"""Copies of remote parts: each part once, whole, within the limit, and the same rows as without copies."""

from __future__ import annotations

import io
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from pyarrow import fs
from torch.utils.data import DataLoader

from support.oracle_model import packed_directory
from support.strategies import make
from treepack.data import part_reader
from treepack.data.dataset import PackedDataset
from treepack.data.prefetch import Prefetch
from treepack.errors import TreepackError
from treepack.files import parts
from treepack.files.remote import part_copies
from treepack.files.remote import retries as patience
from treepack.files.remote.address import as_path
from treepack.files.remote.cache import borrowed_copy
from treepack.files.remote.location import DirectoryLocation
from treepack.files.remote.part_copies import PartCopies
from treepack.objectives.denominators import check_columns, trajectory_table
from treepack.objectives.objective import choose_objective


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packed directory of several parts."""
    monkeypatch.setattr(parts, "PART_TOKENS", 360)
    monkeypatch.setattr("treepack.pack.files.GROUP_TOKENS", 90)
    generator = np.random.default_rng(0)
    trajectories = [make(f"t{i}", [i, *generator.integers(0, 50, 90).tolist()]) for i in range(20)]
    path = packed_directory(tmp_path / "packed", trajectories, capacity=100)
    assert len([*path.glob("part-*")]) == 5
    return path


@pytest.fixture
def memory(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a copy of the directory in the memory filesystem of fsspec."""
    store = fsspec.filesystem("memory")
    original = type(store)._open

    def open_alone(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        # fsspec gives all readers of a file one object with one position, so that threads disturb each other.
        file = original(self, path, mode, **options)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file

    monkeypatch.setattr(type(store), "_open", open_alone)
    store.put(str(packed), "/bucket/packed", recursive=True)
    yield "memory://bucket/packed"
    store.rm("/bucket", recursive=True)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts in the order in which downloads began."""
    names: list[str] = []
    original = DirectoryLocation.open_stream

    def open_stream(self: DirectoryLocation, name: str) -> Any:
        names.append(name)
        return original(self, name)

    monkeypatch.setattr(DirectoryLocation, "open_stream", open_stream)
    return names


def copies(dataset: PackedDataset) -> PartCopies:
    cache = dataset._reader._copies
    assert cache is not None
    return cache


def ids(dataset: PackedDataset) -> list[int]:
    return [batch.row_id for batch in dataset]


def sizes(packed: Path) -> list[int]:
    return sorted(path.stat().st_size for path in packed.glob("part-*"))


def stored(cache: Path) -> list[Path]:
    return sorted((cache / "parts").glob("*.parquet"))


def assert_same_rows(dataset: PackedDataset, packed: Path | PackedDataset) -> None:
    expected = packed if isinstance(packed, PackedDataset) else PackedDataset(packed)
    for i in np.random.default_rng(1).permutation(len(expected)).tolist():
        assert torch.equal(dataset[i].input_ids, expected[i].input_ids)
        assert dataset[i].row_id == expected[i].row_id


def test_an_epoch_copies_every_part_once_and_the_next_process_none(
    packed: Path, memory: str, tmp_path: Path, downloads: list[str]
) -> None:
    dataset = PackedDataset(memory, cache=tmp_path / "cache", shuffle=True)
    assert ids(dataset) == ids(PackedDataset(packed, shuffle=True))
    copies(dataset).wait()
    assert sorted(downloads) == sorted(path.name for path in packed.glob("part-*"))
    assert sorted(path.read_bytes() for path in stored(tmp_path / "cache")) == sorted(
        path.read_bytes() for path in packed.glob("part-*")
    )
    again = PackedDataset(memory, cache=tmp_path / "cache", shuffle=True)
    assert ids(again) == ids(PackedDataset(packed, shuffle=True))
    copies(again).wait()
    assert len(downloads) == 5


def test_rows_are_read_without_the_store_once_their_parts_are_copied(
    packed: Path, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = PackedDataset(memory, cache=tmp_path / "cache")
    dataset.expect(range(len(dataset)))
    copies(dataset).wait()
    expected = PackedDataset(packed)
    assert len(expected[0].input_ids)
    monkeypatch.setattr(dataset._reader, "_open", lambda *_: pytest.fail("asked the store"))
    assert_same_rows(dataset, expected)


def test_the_limit_holds_and_parts_used_least_recently_go(packed: Path, memory: str, tmp_path: Path) -> None:
    limit = 2 * sizes(packed)[-1]
    dataset = PackedDataset(memory, cache=tmp_path / "cache", cache_bytes=limit)
    used = []
    for _ in dataset:
        copies(dataset).wait()
        used.append(sum(path.stat().st_size for path in stored(tmp_path / "cache")))
    assert 0 < max(used) <= limit < sum(sizes(packed))
    # The epoch ended with the last part.
    last = {entry["name"]: entry["sha256"] for entry in dataset.manifest["files"]}["part-00004.parquet"]
    assert last in {path.stem for path in stored(tmp_path / "cache")}
    assert_same_rows(dataset, packed)


def test_parts_and_other_inputs_share_one_limit(
    packed: Path, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, objects = 2 * sizes(packed)[-1], tmp_path / "cache" / "objects"
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TREEPACK_CACHE_SIZE", str(limit))
    fsspec.filesystem("memory").pipe_file("/bucket/model", bytes(limit // 2))
    model = as_path("memory://bucket/model")

    def used() -> int:
        files = [path for name in ("objects", "parts") for path in (tmp_path / "cache" / name).rglob("*")]
        return sum(path.stat().st_size for path in files if path.is_file())

    dataset = PackedDataset(memory)
    with borrowed_copy(model):
        for _ in dataset:
            copies(dataset).wait()
            assert len(stored(tmp_path / "cache")) <= 1
            assert used() <= limit
        assert stored(tmp_path / "cache")
        assert [*objects.rglob("model")]
    for _ in dataset:
        copies(dataset).wait()
    assert len(stored(tmp_path / "cache")) == 2
    assert not [*objects.rglob("model")]
    with borrowed_copy(model):
        assert len(stored(tmp_path / "cache")) == 1


def test_rows_in_random_order_do_not_download_whole_parts_that_do_not_fit_together(
    packed: Path, memory: str, tmp_path: Path, downloads: list[str]
) -> None:
    dataset = PackedDataset(memory, cache=tmp_path / "cache", cache_bytes=2 * sizes(packed)[-1])
    for file in range(5):  # one row of each part
        first = next(group.first for group in dataset._reader.groups if group.file == f"part-{file:05d}.parquet")
        assert len(dataset[first].input_ids)
    copies(dataset).wait()
    assert downloads == []
    assert_same_rows(dataset, packed)  # now each part is read several times
    copies(dataset).wait()
    assert downloads


def test_a_part_larger_than_the_limit_is_read_by_range(
    packed: Path, memory: str, tmp_path: Path, downloads: list[str]
) -> None:
    dataset = PackedDataset(memory, cache=tmp_path / "cache", cache_bytes=sizes(packed)[0] - 1)
    assert ids(dataset) == ids(PackedDataset(packed))
    assert_same_rows(dataset, packed)
    copies(dataset).wait()
    assert downloads == []
    assert ids(PackedDataset(memory, cache_bytes=0)) == ids(PackedDataset(packed))


def test_a_damaged_copy_is_replaced(packed: Path, memory: str, tmp_path: Path) -> None:
    dataset = PackedDataset(memory, cache=tmp_path / "cache")
    dataset.expect(range(len(dataset)))
    copies(dataset).wait()
    before = [path.read_bytes() for path in stored(tmp_path / "cache")]
    for number, path in enumerate(stored(tmp_path / "cache")):
        content = path.read_bytes()
        # Half of them are truncated. The pages come first in a file, so zeros there damage rows.
        path.write_bytes(content[:-1] if number % 2 else bytes(len(content) // 2) + content[len(content) // 2 :])
    dataset._cache.clear()
    assert_same_rows(dataset, packed)
    copies(dataset).wait()
    assert_same_rows(dataset, packed)
    copies(dataset).wait()
    assert [path.read_bytes() for path in stored(tmp_path / "cache")] == before


def test_a_part_altered_in_the_store_is_one_sentence(packed: Path, memory: str, tmp_path: Path) -> None:
    # Bytes 4 to 100 are pages of the first columns; an unread page could be altered without an effect on the rows.
    dataset = PackedDataset(memory, cache=tmp_path / "cache")
    store, part = fsspec.filesystem("memory"), "/bucket/packed/part-00003.parquet"
    whole = store.cat_file(part)
    store.pipe_file(part, whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    dataset.expect(range(len(dataset)))
    copies(dataset).wait()
    with pytest.raises(TreepackError, match=r"part-00003\.parquet: was altered since it was written .*pack the trie"):
        assert dataset[0]
    assert len(stored(tmp_path / "cache")) == 4
    assert not [*(tmp_path / "cache" / "parts").glob("*.partial")]


def test_reading_waits_while_the_store_does_not_answer(
    packed: Path, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_FIRST_PAUSE", 0.001)
    dataset, expected = PackedDataset(memory, cache_bytes=0), PackedDataset(packed)
    failures = iter(range(20))
    original = DirectoryLocation.open_parquet

    def fail(self: DirectoryLocation, name: str, columns: Any) -> Any:
        if next(failures, None) is not None:
            raise TreepackError(f"{name}: no network")
        return original(self, name, columns)

    dataset._reader._files.clear()
    monkeypatch.setattr(DirectoryLocation, "open_parquet", fail)
    monkeypatch.setattr(DirectoryLocation, "size", lambda *_: (_ for _ in ()).throw(TreepackError("no network")))
    monkeypatch.setattr(patience, "_LONGEST_PAUSE", 0.001)
    assert_same_rows(dataset, expected)
    assert next(failures, None) is None
    failures = iter(range(10**9))
    dataset._reader._files.clear()
    dataset._cache.clear()
    monkeypatch.setattr(patience, "OUTAGE_SECONDS", 0.1)
    with pytest.raises(TreepackError, match=r"the store has not answered for 10 minutes; check .* resume the run"):
        assert dataset[0]
    failures = iter(())
    assert_same_rows(dataset, expected)


def test_a_dead_download_is_started_again(packed: Path, memory: str, tmp_path: Path) -> None:
    dataset = PackedDataset(memory, cache=tmp_path / "cache")
    folder = tmp_path / "cache" / "parts"
    for entry in dataset.manifest["files"]:
        (folder / f"{entry['sha256']}.partial").write_bytes(bytes(entry["bytes"]))
    dataset.expect(range(len(dataset)))
    copies(dataset).wait()
    assert len(stored(tmp_path / "cache")) == 5
    assert not [*folder.glob("*.partial")]
    assert_same_rows(dataset, packed)


def _read_all(path: str, cache: Path, rank: int, barrier: Any, results: Any) -> None:
    filesystem = fs.SubTreeFileSystem(path, fs.LocalFileSystem())
    names: list[str] = []
    original = DirectoryLocation.open_stream

    def open_stream(self: DirectoryLocation, name: str) -> Any:
        names.append(name)
        return original(self, name)

    DirectoryLocation.open_stream = open_stream  # type: ignore[method-assign]  # in this process, which ends here
    dataset = PackedDataset("packed", filesystem=filesystem, cache=cache, shuffle=True, rank=rank, world=4)
    barrier.wait()
    rows = ids(dataset)
    copies(dataset).wait()
    results.put((rank, rows, names))


def test_processes_share_the_copies(packed: Path, tmp_path: Path) -> None:
    # A filesystem of pyarrow that is not "local", which spawned processes can share.
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    arguments = [(str(packed.parent), tmp_path / "cache", rank, barrier, results) for rank in range(4)]
    processes = [context.Process(target=_read_all, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert sorted(row for _, rows, _ in found for row in rows) == sorted(ids(PackedDataset(packed)))
    names = sorted(name for _, _, names in found for name in names)
    assert names == sorted(path.name for path in packed.glob("part-*"))
    assert len(stored(tmp_path / "cache")) == 5
    assert not [*(tmp_path / "cache" / "parts").glob("*.partial")]


def test_workers_of_a_data_loader_share_the_copies(packed: Path, tmp_path: Path) -> None:
    filesystem = fs.SubTreeFileSystem(str(packed.parent), fs.LocalFileSystem())
    dataset = PackedDataset("packed", filesystem=filesystem, cache=tmp_path / "cache")
    assert len(dataset[0].input_ids)
    copies(dataset).wait()
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [batch.row_id for batch in loader] == ids(PackedDataset(packed))


def test_a_copy_of_the_dataset_continues_where_the_state_says(packed: Path, memory: str, tmp_path: Path) -> None:
    whole = ids(PackedDataset(packed, shuffle=True, seed=3))
    dataset = PackedDataset(memory, shuffle=True, seed=3, cache=tmp_path / "cache", cache_bytes=2 * sizes(packed)[-1])
    iterator = iter(dataset)
    start = [next(iterator).row_id for _ in range(7)]
    resumed = pickle.loads(pickle.dumps(dataset))
    assert start + ids(resumed) == whole
    other = PackedDataset(packed)
    other.load_state_dict(dataset.state_dict())
    assert start + ids(other) == whole


def test_a_trainer_announces_its_rows(packed: Path, memory: str, tmp_path: Path, downloads: list[str]) -> None:
    dataset = PackedDataset(memory, cache=tmp_path / "cache")
    passes = [*((row,) for row in range(12, 20)), (), *((row,) for row in range(4))]
    prefetch = Prefetch(dataset, passes, pin=False)
    batches = [batch.row_id for batch in prefetch]
    assert [batches[i] for i in range(8)] == [dataset[i].row_id for i in range(12, 20)]
    copies(dataset).wait()
    assert sorted(downloads) == [f"part-{number:05d}.parquet" for number in (0, 3, 4)]


def test_a_full_disk_is_no_error(
    packed: Path, memory: str, tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_copies, "_SPARE", 1 << 62)
    dataset = PackedDataset(memory, cache=tmp_path / "cache")
    assert ids(dataset) == ids(PackedDataset(packed))
    copies(dataset).wait()
    assert downloads == []
    assert not [*(tmp_path / "cache" / "parts").glob("*.p*")]


def test_a_folder_that_cannot_be_written_is_one_sentence(memory: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TreepackError, match=r"file/cache/parts: cannot be written .* choose another --cache"):
        PackedDataset(memory, cache=tmp_path / "file" / "cache")


def test_the_share_of_a_row_group_is_part_of_its_file(packed: Path) -> None:
    groups = PackedDataset(packed)._reader.groups
    assert len(groups) == 20
    assert {group.share for group in groups} == {1 / 4}
    assert part_reader.StoredGroup("part-00001.parquet", 2, 6, 1 / 4) in groups


def test_only_the_first_process_reads_footers_and_scalar_columns(
    packed: Path, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = PackedDataset(memory, cache=tmp_path / "cache")
    assert first.max_position() == PackedDataset(packed).max_position()
    for name in ("open_parquet", "size"):
        monkeypatch.setattr(DirectoryLocation, name, lambda *_: pytest.fail("asked the store"))
    again = PackedDataset(memory, cache=tmp_path / "cache")
    assert again._reader.groups == first._reader.groups
    assert again.term_columns == first.term_columns
    assert again.steps == first.steps
    assert again.max_position() == first.max_position()
    for name in ("row_ids", "num_tokens", "num_pairs", "total_weight"):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))


def test_a_machine_copies_all_parts_of_its_block_if_they_fit_and_no_others(
    packed: Path, memory: str, tmp_path: Path, downloads: list[str]
) -> None:
    limit = sum(sizes(packed)[-3:])
    assert limit < sum(sizes(packed))
    machines = [
        [
            PackedDataset(
                memory,
                shuffle=True,
                rank=2 * machine + local,
                world=4,
                blocks=2,
                cache=tmp_path / str(machine),
                cache_bytes=limit,
            )
            for local in range(2)
        ]
        for machine in range(2)
    ]
    rows = []
    for ranks in machines:
        for rank in ranks:
            rows += ids(rank)
            copies(rank).wait()
    assert sorted(row for row in rows if row >= 0) == sorted(ids(PackedDataset(packed)))
    assert [copies(ranks[0])._fits for ranks in machines] == [True, True]
    names = {entry["sha256"]: entry["name"] for entry in machines[0][0].manifest["files"]}
    # 5 parts of 4 rows: each machine has 10 rows, so both need the part in the middle.
    held = [{names[path.stem] for path in stored(tmp_path / str(machine))} for machine in range(2)]
    assert held[0] <= {f"part-{number:05d}.parquet" for number in (0, 1, 2)}
    assert held[1] <= {f"part-{number:05d}.parquet" for number in (2, 3, 4)}
    assert held[0] | held[1] == set(names.values())
    assert len(downloads) <= 6


def test_what_an_objective_reads_of_all_rows_is_read_once_per_machine(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = [make(f"t{i}", [i, 1, 2], group=f"g{i // 3}", reward=float(i % 2), advantage=1.0) for i in range(9)]
    path = packed_directory(tmp_path / "terms", rollouts, capacity=200)
    fsspec.filesystem("memory").put(str(path), "/bucket/terms", recursive=True)
    objectives = [choose_objective("grpo"), choose_objective("dpo")]

    def read(address: str | Path) -> list[Any]:
        dataset = PackedDataset(address, cache=tmp_path / "cache", terms=True)
        check_columns(dataset, objectives[0])
        first, second = (trajectory_table(dataset, objective) for objective in objectives)
        return [first.first, first.group, first.weight, second.pairs]

    expected = read(path)
    tables = [read("memory://bucket/terms")]
    for name in ("open_parquet", "size"):
        monkeypatch.setattr(DirectoryLocation, name, lambda *_: pytest.fail("asked the store"))
    tables.append(read("memory://bucket/terms"))
    for table in tables:
        for values, other in zip(table, expected, strict=True):
            np.testing.assert_array_equal(values, other)
