"""Seconds of build-trie and pack on a Ray cluster of this machine, beside one process.

    .venv-ray/bin/python benchmarks/ray_scaling.py [--tokens 80_000_000] [--kind heavy] [--folder DIR]

Makes JSONL by `made_rollouts.py`, in 16 files, and builds and packs it in one process, with one Ray worker
and with two, in 16 shares and 8 slices. All runs give the same N_tree. Prints seconds by the clock, which
other work on the machine lengthens, and processor seconds, which it lengthens less: of the tasks by their function, and
of the process of the command, which is the serial part.
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
from made_rollouts import FORKS, token_groups
from measure import commit

from treepack import build_trie_directory, pack_trie
from treepack.cluster.build import build_trie_on
from treepack.cluster.pack import pack_trie_on
from treepack.cluster.ray import RayScheduler, connected_cluster
from treepack.pack.options import PackOptions

FILES, SLICES = 16, 8
PACK = PackOptions(capacity=65536)


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
    with scheduler_of(workers) as scheduler:
        build = cost_of(lambda: build_trie_on(scheduler, [rollouts], trie, share_bytes=1), scheduler)
        pack = cost_of(lambda: pack_trie_on(scheduler, trie, packed, PACK, num_slices=SLICES), scheduler)
    return {"build-trie": build, "pack": pack}


def totals_of(directory: Path) -> dict[str, Any]:
    """Return the totals of a directory."""
    totals: dict[str, Any] = json.loads((directory / "manifest.json").read_bytes())["totals"]
    return totals


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


if __name__ == "__main__":
    main()
