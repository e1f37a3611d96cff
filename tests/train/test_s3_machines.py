"""Several machines over one packed directory on an S3 server: each downloads its share of the parts, and no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.oracle_model import write_rows
from support.passes import rows_alone
from support.s3 import Store
from support.strategies import make
from treepack.data.dataset import PackedDataset
from treepack.data.mixture import AnyDataset, open_packed, sources_of
from treepack.files import parts
from treepack.train.division import choose_blocks, divide_rows
from treepack.train.options import TrainOptions
from treepack.train.passes import deal
from treepack.train.ranks import Ranks
from treepack.train.schedule import plan_steps
from treepack.trajectory import Trajectory

pytestmark = pytest.mark.s3


def rollouts(number: int, length: int = 2000) -> list[Trajectory]:
    generator = np.random.default_rng(number)
    return [make(f"{number}-{i}", [i, *generator.integers(0, 10 * length, length).tolist()]) for i in range(32)]


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: Store) -> Path:
    """Two directories of 16 parts of two rows, which are also at s3.address("packed/0") and ("packed/1")."""
    monkeypatch.setattr(parts, "PART_TOKENS", 4000)
    monkeypatch.setattr("treepack.pack.files.GROUP_TOKENS", 2000)
    for number in range(2):
        path = write_rows(tmp_path / "packed" / str(number), rollouts(number), range(32))
        assert len([*path.glob("part-*")]) == 16
    s3.upload(tmp_path / "packed", "packed")
    return tmp_path / "packed"


def copied(cache: Path) -> set[str]:
    """Return the hashes of the parts of which `cache` has copies."""
    return {path.stem for path in (cache / "parts").glob("*.parquet")}


def wait(dataset: AnyDataset) -> None:
    """Wait until all downloads are complete."""
    for source in sources_of(dataset):
        assert source._reader._copies is not None
        source._reader._copies.wait()


def size(path: Path) -> int:
    return sum(part.stat().st_size for part in path.rglob("part-*"))


def test_machines_download_the_data_once_together(packed: Path, tmp_path: Path, s3: Store) -> None:
    machines, local = 4, 2
    seen: Counter[int] = Counter()
    expected = [batch.row_id for batch in PackedDataset(packed / "0", shuffle=True, blocks=machines)]
    rounds: list[list[int]] = [[] for _ in range(len(expected) // (machines * local))]
    for machine in range(machines):
        ranks = []
        for place in range(local):
            s3.requests.clear()
            ranks.append(
                PackedDataset(
                    s3.address("packed/0"),
                    shuffle=True,
                    rank=machine * local + place,
                    world=machines * local,
                    blocks=machines,
                    cache=tmp_path / f"cache-{machine}",
                )
            )
        # Footers and scalar columns were read for the first rank.
        assert not [path for _, path in s3.requests if "part-" in path]
        s3.downloads.clear()
        for rank in ranks:
            for number, batch in enumerate(rank):
                wait(rank)  # so that the parts that come next are not also read by range
                seen[batch.row_id] += 1
                rounds[number].append(batch.row_id)
        # Some rows are also read by range, before a thread has begun to copy their part.
        read = sum(number for path, number in s3.downloads if "part-" in path)
        assert size(packed / "0") / machines * 0.9 <= read <= size(packed / "0") / machines * 1.5
        assert len(copied(tmp_path / f"cache-{machine}")) == 16 // machines
    assert len(set.union(*(copied(tmp_path / f"cache-{machine}") for machine in range(machines)))) == 16
    assert seen == Counter(range(32))
    assert [row for rows in rounds for row in sorted(rows, key=expected.index)] == expected


def test_a_restart_asks_for_the_manifest_and_a_listing_only(packed: Path, tmp_path: Path, s3: Store) -> None:
    def read_epoch() -> list[int]:
        dataset = PackedDataset(s3.address("packed/0"), shuffle=True, blocks=2, world=2, cache=tmp_path / "cache")
        rows = [batch.row_id for batch in dataset]
        wait(dataset)
        return rows

    rows = read_epoch()
    s3.requests.clear()
    assert read_epoch() == rows
    listings = [path for _, path in s3.requests if "list-type" in path]
    assert len(listings) == 1
    assert {path.rpartition("/")[2] for _, path in s3.requests if path not in listings} == {"manifest.json"}


def test_machines_share_several_directories(packed: Path, tmp_path: Path, s3: Store, monkeypatch: Any) -> None:
    options, seen = TrainOptions(rows_per_step=8), Counter[int]()
    for machine in range(4):
        monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / f"cache-{machine}"))
        ranks = Ranks(machine, 4, machines=4)
        dataset = open_packed([s3.address("packed/0"), s3.address("packed/1")])
        blocks, _ = choose_blocks(dataset, np.arange(64), options, ranks)
        division = divide_rows(dataset, np.arange(64), blocks, ranks)
        for step in plan_steps(dataset, replace(options, blocks=blocks)):
            share = deal(step.rows, np.ones(64), 4, rows_alone(64), division)[machine]
            own = [row for each in share for row in each]
            dataset.expect(own)
            seen.update(dataset[row].row_id for row in own)
        wait(dataset)
        names = {entry["sha256"]: entry["name"] for entry in dataset.manifest["files"]}
        # Of both directories the parts of its quarter.
        numbers = range(4 * machine, 4 * machine + 4)
        found = Counter(names[sha256] for sha256 in copied(tmp_path / f"cache-{machine}"))
        assert found == Counter(2 * [f"part-{number:05d}.parquet" for number in numbers])
    assert seen == Counter(range(64))
