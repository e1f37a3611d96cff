"""Seconds of an exchange by `RayScheduler` and by the sorts of Ray Data, on a Ray cluster of this machine.

    .venv-ray/bin/python benchmarks/ray_exchange.py [--tables 16] [--rows 400] [--ranges 8]

Each table has `rows` rows of 8,192 to 16,384 token ids, so that 16 tables are 315 MB. Ray Data adds a column with the
range of each row and sorts by it, with the ends of the ranges as explicit boundaries and without limits of the sizes of
blocks, by each of its strategies. Every result has the same rows. A strategy runs twice; the second run counts, because
the first one starts workers. Prints a Markdown table after the versions and the command.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from measure import commit

from treepack.cluster.ray import RayScheduler, connected_cluster
from treepack.trajectory import Int64

STRATEGIES = ("sort_shuffle_pull_based", "sort_shuffle_push_based", "hash_shuffle", "shuffle_v2")
KEYS = 1 << 30


def make(seed: int, rows: int) -> tuple[pa.Table, None]:
    """Run in a task: return a table of random keys and token ids."""
    rng = np.random.default_rng(seed)
    ends = np.concatenate([[0], np.cumsum(rng.integers(8192, 16384, rows))]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(pa.array(ends), pa.array(rng.integers(0, 150_000, ends[-1], dtype=np.int32)))
    return pa.table({"key": pa.array(rng.integers(0, KEYS, rows)), "tokens": tokens}), None


def assign(table: pa.Table, num_ranges: int) -> Int64:
    """Run in a task: return the range of each row."""
    ranges: Int64 = table["key"].to_numpy() * num_ranges // KEYS
    return ranges


def rows_of(table: pa.Table, num_ranges: int) -> tuple[set[int], int]:
    """Run in a task: return the ranges of the rows of a table, and the number of its rows."""
    return set(assign(table, num_ranges).tolist()), len(table)


def by_ray_data(tables: list[Any], num_ranges: int, strategy: str) -> list[Any]:
    """Return the tables of all ranges, by a sort of Ray Data."""
    import ray.data
    from ray.data.context import DataContext, ShuffleStrategy

    context = DataContext.get_current()
    context.shuffle_strategy = ShuffleStrategy(strategy)
    context.target_max_block_size = None
    context.shuffle_compression = "none"
    context.enable_progress_bars = False

    def with_range(table: pa.Table) -> pa.Table:
        return table.append_column("range", pa.array(assign(table, num_ranges)))

    data = ray.data.from_arrow_refs(tables)
    data = data.map_batches(with_range, batch_format="pyarrow", batch_size=None, zero_copy_batch=True)
    refs: list[Any] = data.sort("range", boundaries=[*range(1, num_ranges)]).to_arrow_refs()
    return refs


def seconds_of(scheduler: RayScheduler, exchange: Callable[[], list[Any]], num_ranges: int, num_rows: int) -> float:
    """Run an exchange twice, check its results, and return the seconds of the second run."""
    for _ in range(2):
        start = time.perf_counter()
        tables = exchange()
        rows = list(scheduler.run(rows_of, [(table, num_ranges) for table in tables]))
        seconds = time.perf_counter() - start
        assert all(ranges <= {i} for i, (ranges, _) in enumerate(rows)), "rows of a different range"
        assert sum(number for _, number in rows) == num_rows, "lost rows"
        del tables
    return seconds


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=16)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--ranges", type=int, default=8)
    parsed = parser.parse_args()
    print(f"commit {commit()}, {platform.machine()}, {os.cpu_count()} cores; {' '.join(sys.argv)}\n")
    print("| exchange | s |\n|---|---|")
    number, num_rows = parsed.ranges, parsed.tables * parsed.rows
    with connected_cluster("local", workers=2) as scheduler:
        kept = [table for table, _ in scheduler.keep(make, [(seed, parsed.rows) for seed in range(parsed.tables)])]
        own = seconds_of(scheduler, lambda: scheduler.exchange(kept, assign, (number,), number), number, num_rows)
        print(f"| RayScheduler | {own:.2f} |", flush=True)
        for strategy in STRATEGIES:
            seconds = seconds_of(scheduler, lambda: by_ray_data(kept, number, strategy), number, num_rows)  # noqa: B023
            print(f"| Ray Data, {strategy} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
