"""Tries built from objects of an S3 server to the server, by tasks that read shares of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.pickled_scheduler import PickledScheduler
from support.s3 import Store
from treepack import build_trie_directory
from treepack.cluster.build import build_trie_on

pytestmark = pytest.mark.s3


class Stopped(PickledScheduler):
    """A scheduler whose command is ended before its second task."""

    def run(self, function: Any, calls: Any) -> Iterator[Any]:
        yield next(super().run(function, calls))
        raise KeyboardInterrupt


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


def test_objects_of_a_server_are_read_and_parts_go_to_it(tmp_path: Path, s3: Store) -> None:
    made = rollouts(600)
    s3.write("in/a.jsonl", "".join(json.dumps(each) + "\n" for each in made[:300]).encode())
    pq.write_table(pa.Table.from_pylist(made[300:]), tmp_path / "b.parquet", row_group_size=20)
    s3.write("in/b.parquet", (tmp_path / "b.parquet").read_bytes())
    build_trie_directory([s3.address("in")], s3.address("one"))
    with pytest.raises(KeyboardInterrupt):
        build_trie_on(Stopped(), [s3.address("in")], s3.address("on"), share_bytes=1)
    shares = [name for name in s3.names(".on.shares") if name.endswith(".json") and "manifest" not in name]
    assert len(shares) == 1
    build_trie_on(PickledScheduler(), [s3.address("in")], s3.address("on"), share_bytes=1)
    assert s3.read("on/manifest.json") == s3.read("one/manifest.json")  # it has the hashes of all parts
    assert [name.partition("/")[2] for name in s3.names("on/")] == [name.partition("/")[2] for name in s3.names("one/")]
    assert not s3.names(".on.shares")
    # The finished share was not read again; the whole listing of the input takes one small read of each object.
    assert sum(method == "GET" and path.endswith("/in/a.jsonl") for method, path in s3.requests) <= 3
