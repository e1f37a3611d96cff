"""Tries built from objects of an S3 server to the server, by tasks that read ranges of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.pickled_scheduler import PickledScheduler
from support.s3 import Store
from treepack import build_trie_directory
from treepack.cluster.build import build_trie_on
from treepack.files.input_files import ranges
from treepack.files.remote.address import as_path
from treepack.files.remote.cache import local_copy
from treepack.trie.store.trie_files import read_trie

pytestmark = pytest.mark.s3


def rollouts(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {
            "id": f"r{i}",
            "group_id": f"g{i % 7}",
            "input_ids": [1, 2, i % 7, *(rng.randrange(30_000) for _ in range(400))],
        }
        | {"loss_mask": [0] + [1] * 402}
        for i in range(count)
    ]


def test_objects_are_fetched_by_range_and_parts_go_to_the_store(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "GROUP_BYTES", 1)
    made = rollouts(600)
    s3.write("in/a.jsonl", "".join(json.dumps(each) + "\n" for each in made[:300]).encode())
    pq.write_table(pa.Table.from_pylist(made[300:]), tmp_path / "b.parquet", row_group_size=20)
    s3.write("in/b.parquet", (tmp_path / "b.parquet").read_bytes())
    build_trie_directory([s3.address("in")], tmp_path / "one")
    on = build_trie_on(PickledScheduler(), [s3.address("in")], s3.address("on"), num_ranges=3, part_bytes=100_000)
    trie, expected = read_trie(local_copy(as_path(s3.address("on")))), read_trie(tmp_path / "one")
    assert (trie.tokens == expected.tokens).all()
    assert trie.trajectories.equals(expected.trajectories)
    assert on.manifest["input"]["num_files"] == 2
    assert len([name for name in s3.names("on") if "trajectories-" in name]) == 3
    # A survey streams its object; each of the tasks that read the object fetches a range.
    for name in ("a.jsonl", "b.parquet"):
        assert sum(method == "GET" and path.endswith(f"/in/{name}") for method, path in s3.requests) > 5
