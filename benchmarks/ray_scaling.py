"""Seconds of build-trie and pack on a Ray cluster of this machine, and an estimate for a large one.

    .venv-ray/bin/python benchmarks/ray_scaling.py [--tokens 80_000_000] [--kind heavy] [--folder DIR]

Makes JSONL by `made_rollouts.py`, in 16 files, and builds and packs it in one process, with one Ray worker
and with two, in 16 parts and 8 ranges or slices. All runs give the same N_tree. Prints seconds by the clock, which
other work on the machine lengthens, and processor seconds, which it lengthens less: of the tasks by their function, and
of the process of the command, which is the serial part.

Then measures what the process of the command spends on each task, each piece of an exchange and each trajectory, and
computes from these figures the seconds of 10^11 tokens on 16 machines of 64 cores. The computation is printed. It
assumes that all cores are as fast as one of two here, that the network and the store are no limit, and that parts are
as even as here; nothing of it was run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from made_rollouts import FORKS, token_groups
from measure import commit

from treepack import build_trie_directory, pack_trie
from treepack.cluster.build import PART_BYTES, RANGE_BYTES, build_trie_on
from treepack.cluster.pack import SLICE_TOKENS, pack_trie_on
from treepack.cluster.ray import RayScheduler, connected_cluster, tables_per_split
from treepack.ingest.options import BuildOptions
from treepack.pack.options import PackOptions
from treepack.trajectory import Int64

FILES, RANGES = 16, 8
PACK = PackOptions(capacity=65536)
SHORT = BuildOptions(train_all=True)
FLAT, TOKENS_PER_TRAJECTORY, CORES = 1e11, 20_000, 16 * 64
BYTES_PER_TOKEN = {"JSONL": 8.3, "columns": 4.2}


@dataclass
class Cost:
    """Seconds by the clock, and processor seconds of this process and of the tasks by their function."""

    clock: float
    driver: float
    tasks: Counter[str]


class MeteredScheduler(RayScheduler):
    """A RayScheduler that measures the processor seconds of every task."""

    def __init__(self) -> None:
        """Measure nothing yet."""
        super().__init__()
        self._seconds: list[tuple[str, Any]] = []

    def _submit(self, function: Callable[..., Any], call: Any, *, num_returns: int) -> list[Any]:
        refs = super()._submit(meter, (function, num_returns, *call), num_returns=num_returns + 1)
        self._seconds.append((function.__name__, refs[-1]))
        return refs[:-1]

    def seconds(self) -> Counter[str]:
        """Return the seconds of all tasks since the last call, by the names of their functions."""
        total: Counter[str] = Counter()
        for name, ref in self._seconds:
            total[name] += self._ray.get(ref)
        self._seconds.clear()
        return total


def meter(function: Callable[..., Any], num_returns: int, *call: Any) -> tuple[Any, ...]:
    """Run in a task: return the results of `function` and its processor seconds."""
    start = time.process_time()
    result = function(*call)
    return *((result,) if num_returns == 1 else result), time.process_time() - start


@contextmanager
def scheduler_of(workers: int) -> Iterator[MeteredScheduler]:
    """Start a cluster of `workers` CPUs whose processes have imported the stages."""
    with connected_cluster("local", workers=workers):
        scheduler = MeteredScheduler()
        list(scheduler.run(warm_up, [(i,) for i in range(4 * workers)]))
        scheduler.seconds()
        yield scheduler


def warm_up(_: int) -> None:
    """Run in a task: import the stages."""
    import treepack.cluster.build
    import treepack.cluster.pack  # noqa: F401

    time.sleep(0.2)


def cost_of(work: Callable[[], object], scheduler: MeteredScheduler | None) -> Cost:
    """Run `work`."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    return Cost(clock, processor, Counter() if scheduler is None else scheduler.seconds())


def write_rollouts(folder: Path, kind: str, tokens: int) -> int:
    """Write JSONL files with at least `tokens` tokens in total; return their number."""
    folder.mkdir()
    files = [(folder / f"{number:02}.jsonl").open("wb") for number in range(FILES)]
    done = 0
    for file, group in zip(cycle(files), token_groups(FORKS[kind], np.random.default_rng(0)), strict=False):
        for record in group:
            file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            done += len(record["input_ids"])
        if done >= tokens:
            break
    for file in files:
        file.close()
    return done


def measure(folder: Path, rollouts: Path, workers: int) -> dict[str, Cost]:
    """Build and pack in one process (0 workers) or on a cluster."""
    trie, packed = folder / f"trie-{workers}", folder / f"packed-{workers}"
    if not workers:
        return {
            "build-trie": cost_of(lambda: build_trie_directory([rollouts], trie), None),
            "pack": cost_of(lambda: pack_trie(trie, packed, PACK), None),
        }
    part_bytes = sum(path.stat().st_size for path in rollouts.iterdir()) // FILES
    with scheduler_of(workers) as scheduler:
        build = cost_of(
            lambda: build_trie_on(scheduler, [rollouts], trie, num_ranges=RANGES, part_bytes=part_bytes), scheduler
        )
        pack = cost_of(lambda: pack_trie_on(scheduler, trie, packed, PACK, num_slices=RANGES), scheduler)
    return {"build-trie": build, "pack": pack}


def totals_of(directory: Path) -> dict[str, Any]:
    """Return the totals of a directory."""
    totals: dict[str, Any] = json.loads((directory / "manifest.json").read_bytes())["totals"]
    return totals


def nothing(_: int) -> None:
    """Run in a task: do nothing."""


def small_table(rows: int) -> tuple[pa.Table, None]:
    """Run in a task: return a table of 512 KB."""
    return pa.table({"key": np.arange(rows), "filling": np.zeros((rows, 63)).sum(1)}), None


def modulo(table: pa.Table, num_ranges: int) -> Int64:
    """Run in a task: return the range of each row."""
    keys: Int64 = table["key"].to_numpy() % num_ranges
    return keys


def short_rollouts(path: Path, number: int) -> None:
    """Write `number` rollouts of 24 tokens, whose trees and lengths cost little beside their number."""
    rng = np.random.default_rng(1)
    lines = [
        orjson.dumps({"id": f"r{i}", "group_id": f"g{i // 16}", "input_ids": [*[i // 16 % 997] * 8, *ids]}) + b"\n"
        for i, ids in enumerate(rng.integers(0, 1000, (number, 16)).tolist())
    ]
    path.write_bytes(b"".join(lines))


def driver_costs(folder: Path) -> dict[str, float]:
    """Return processor seconds of this process for each task, piece, and trajectory of build-trie and of pack."""
    with scheduler_of(2) as scheduler:
        tasks = cost_of(lambda: list(scheduler.run(nothing, [(i,) for i in range(1000)])), scheduler)
        kept = [table for table, _ in scheduler.keep(small_table, [(8192,)] * 200)]
        scheduler.seconds()

        def exchange(num_ranges: int) -> None:
            tables = scheduler.exchange(kept, modulo, (num_ranges,), num_ranges)
            list(scheduler.run(nothing, [(table,) for table in tables]))

        pieces = [cost_of(lambda: exchange(n), scheduler).driver for n in (10, 110)]  # noqa: B023 (called at once)
        seconds: dict[str, list[float]] = {"build-trie": [], "pack": []}
        numbers = (20_000, 120_000)
        for number in numbers:
            path = folder / f"short-{number}.jsonl"
            short_rollouts(path, number)
            trie, packed = folder / f"short-trie-{number}", folder / f"short-packed-{number}"
            build = cost_of(lambda: build_trie_on(scheduler, [path], trie, SHORT, num_ranges=4), scheduler)  # noqa: B023
            pack = cost_of(lambda: pack_trie_on(scheduler, trie, packed, PACK, num_slices=4), scheduler)  # noqa: B023
            seconds["build-trie"].append(build.driver)
            seconds["pack"].append(pack.driver)
    num_splits = len(kept) // tables_per_split(len(kept), 110, 2)
    slopes = {name: max(0.0, b - a) / (numbers[1] - numbers[0]) for name, (a, b) in seconds.items()}
    task = tasks.driver / 1000
    # 100 more ranges are 100 more pieces of each split, and 200 more tasks: a join, and one that does nothing.
    piece = max(0.0, pieces[1] - pieces[0] - 200 * task) / (100 * num_splits)
    return {"task": task, "piece": piece, **slopes}


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=80_000_000)
    parser.add_argument("--kind", choices=[*FORKS], default="heavy")
    parser.add_argument("--folder", help="where the files are made and removed; default: that of temporary files")
    parsed = parser.parse_args()
    print(f"commit {commit()}, {platform.machine()}, {os.cpu_count()} cores; {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory(dir=parsed.folder) as temporary:
        folder = Path(temporary)
        flat = write_rollouts(folder / "rollouts", parsed.kind, parsed.tokens)
        costs = {workers: measure(folder, folder / "rollouts", workers) for workers in (0, 1, 2)}
        show(folder, flat, costs)
        spent = driver_costs(folder)
        estimate(flat, costs[2], spent, totals_of(folder / "trie-0"))


def show(folder: Path, flat: int, costs: dict[int, dict[str, Cost]]) -> None:
    """Print the table of all runs."""
    print(f"{flat:,} tokens, load of the machine {os.getloadavg()[0]:.1f}\n")
    print("| command | workers | s by the clock | processor s: command | tasks | serial share | N_tree or N_pack |")
    print("|---|---|---|---|---|---|---|")
    for name, directory, total in (("build-trie", "trie", "tokens_tree"), ("pack", "packed", "tokens_packed")):
        for workers, by_command in costs.items():
            cost, tokens = by_command[name], totals_of(folder / f"{directory}-{workers}")[total]
            sums = sum(cost.tasks.values())
            share = f"{cost.driver / (cost.driver + sums):.1%}" if workers else ""
            label = workers or "one process"
            print(f"| {name} | {label} | {cost.clock:.1f} | {cost.driver:.2f} | {sums:.1f} | {share} | {tokens:,} |")
    print("\nprocessor seconds of the tasks, two workers:")
    for name, cost in costs[2].items():
        print(f"  {name}: " + ", ".join(f"{task} {seconds:.2f}" for task, seconds in cost.tasks.items()))


def estimate(flat: int, costs: dict[str, Cost], spent: dict[str, float], totals: dict[str, Any]) -> None:
    """Print the computation for `FLAT` tokens on `CORES` cores."""
    print(f"\nestimate for {FLAT:.0e} tokens on {CORES} cores (computed, not run):")
    task, piece = spent["task"] * 1e6, spent["piece"] * 1e6
    print(f"  processor time of the command: {task:.0f} us for each task, {piece:.0f} us for each piece of an exchange")
    trajectories = FLAT / TOKENS_PER_TRAJECTORY
    parts = FLAT * BYTES_PER_TOKEN["JSONL"] / PART_BYTES
    ranges = FLAT * BYTES_PER_TOKEN["columns"] / RANGE_BYTES
    pieces = parts / tables_per_split(int(parts), int(ranges), CORES) * ranges
    slices = FLAT * totals["tokens_tree"] / totals["tokens_flat"] / SLICE_TOKENS
    serial = {
        "build-trie": (2 * parts + 4 * ranges) * spent["task"] + pieces * spent["piece"],
        "pack": 3 * slices * spent["task"],
    }
    print(f"  {parts:,.0f} parts of 128 MB, {ranges:,.0f} ranges, {pieces:,.0f} pieces, {slices:,.0f} slices, ")
    print(f"  {trajectories:,.0f} trajectories of {TOKENS_PER_TRAJECTORY:,} tokens")
    for name, cost in costs.items():
        work = sum(cost.tasks.values())
        per_token = work / flat
        tasks = FLAT * per_token / CORES
        of_trajectories = trajectories * spent[name]
        total = tasks + serial[name] + of_trajectories
        print(
            f"  {name}: tasks {work:.1f} s / {flat:,} tokens x {FLAT:.0e} / {CORES} cores = {tasks:.0f} s; "
            f"command {serial[name]:.0f} s for tasks and pieces + {trajectories:,.0f} x {spent[name] * 1e6:.1f} us = "
            f"{of_trajectories:.0f} s for trajectories; together {total:.0f} s, serial {1 - tasks / total:.0%}"
        )


if __name__ == "__main__":
    main()
