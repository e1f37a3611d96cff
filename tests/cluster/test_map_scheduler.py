"""Tries and rows by the ordered map of another program are those of one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.paths import ROOT
from treepack import PackOptions, build_trie_directory
from treepack.analysis.check import check
from treepack.cluster.build import build_trie_on
from treepack.cluster.map_scheduler import MapScheduler
from treepack.cluster.pack import pack_trie_on
from treepack.cluster.scheduler import LocalScheduler
from treepack.errors import TreepackError
from treepack.trajectory import Int64
from treepack.trie.store.trie_files import read_trie

ROLLOUTS = ROOT / "sample_data" / "tokens.jsonl"
TABLE = pa.table({"a": np.arange(10), "b": [[i] * i for i in range(10)]})


def pickled_map(function: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
    """Map as other machines do: everything is pickled on its way there and back."""
    for item in items:
        there, own = pickle.loads(pickle.dumps((function, item)))
        yield pickle.loads(pickle.dumps(there(own)))


def with_sum(table: pa.Table, factor: int) -> tuple[pa.Table, int]:
    return table, factor * int(table["a"].to_numpy().sum())


def by_remainder(table: pa.Table, divisor: int) -> Int64:
    ranges: Int64 = table["a"].to_numpy() % divisor
    return ranges


def test_tables_stay_and_are_exchanged_as_in_one_process(tmp_path: Path) -> None:
    with MapScheduler(pickled_map, tmp_path) as scheduler:
        factor = scheduler.share(3)
        kept = list(scheduler.keep(with_sum, [(TABLE, factor), (TABLE.slice(4), factor)]))
        assert [summary for _, summary in kept] == [135, 117]
        tables = scheduler.exchange([table for table, _ in kept], by_remainder, (scheduler.share(4),), 5)
        rows = [table for table, _ in scheduler.run(with_sum, [(table, 1) for table in tables])]
    expected = LocalScheduler().exchange([TABLE, TABLE.slice(4)], by_remainder, (4,), 5)
    assert [table.to_pydict() for table in rows] == [table.to_pydict() for table in expected]
    assert rows[4].num_rows == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_pool_of_processes_builds_and_packs_the_same(tmp_path: Path) -> None:
    build_trie_directory([ROLLOUTS], tmp_path / "one")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:

        def map_tasks(function: Callable[[Any], Any], items: list[Any]) -> Iterable[Any]:
            return pool.map(function, items)

        with MapScheduler(map_tasks, tmp_path / "scratch") as scheduler:
            build_trie_on(scheduler, [ROLLOUTS], tmp_path / "trie", num_ranges=3)
            options = PackOptions(capacity=4096, method="contiguous")
            pack_trie_on(scheduler, tmp_path / "trie", tmp_path / "packed", options, num_slices=2)
    one, several = read_trie(tmp_path / "one"), read_trie(tmp_path / "trie")
    assert np.array_equal(one.tokens, several.tokens)
    assert one.trajectories.equals(several.trajectories)
    assert check(tmp_path / "packed")["against_trie"]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_table_that_another_machine_has_written_to_its_own_disk_is_named(tmp_path: Path) -> None:
    with MapScheduler(pickled_map, tmp_path) as scheduler:
        ((table, _),) = scheduler.keep(with_sum, [(TABLE, 1)])
        for file in table.files:
            file.unlink()
        with pytest.raises(
            TreepackError, match=r"another worker wrote it, but this one does not see it; give a scratch"
        ):
            list(scheduler.run(with_sum, [(table, 1)]))
