"""Speed and memory of the data half on one core: tries against the dictionary oracle, and the whole commands.

    python benchmarks/data_half.py [--scale N]     needs the development install; prints a table

Data: 512 random sequences of 2,048 to 4,096 tokens in 32 groups of 16 over one common start of 256 tokens, each forking
off an earlier sibling at 45 to 100 % of its length (1.6 M tokens), `--scale` times over with other tokens. The
commands run as processes pinned to one core. Memory is the peak of the process less that of the same command on one
tiny record.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import commit

from treepack.pack.plan.check import check_plan
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.sequences import collect
from treepack.trajectory import Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import oracle
from support.strategies import random_sequences

QUICK = ("--method", "contiguous")  # the time of the pipeline, not of a search


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median wall-clock seconds of `repeats` runs."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def trie_speed(sequences: list[Int32]) -> None:
    """Print tokens per second of build_trie and of the dictionary oracle, and the repeated tokens of each plan."""
    one = np.ones(1)
    rollouts = [
        Trajectory(f"t{i}", f"made:{i}", Tokens(ids, np.array([1], np.int32), np.array([len(ids)], np.int32), one))
        for i, ids in enumerate(sequences)
    ]
    columns = collect(rollouts)
    lists = [ids.tolist() for ids in sequences]
    num = len(columns.tokens)
    fast = median_seconds(lambda: build_trie(columns), 7)
    slow = median_seconds(lambda: oracle.dict_trie(lists), 3)
    print(f"build_trie        {num / fast / 1e6:8.1f} M tokens/s   {num:,} tokens, median of 7")
    print(f"dictionary oracle {num / slow / 1e6:8.1f} M tokens/s   ratio {slow / fast:.0f}")
    trie = build_trie(columns)
    for capacity in (8192, 32768):
        for method in ("auto", "contiguous", "heuristic"):
            plan = plan_rows(trie, capacity=capacity, method=method)
            totals = check_plan(trie, plan)
            seconds = median_seconds(lambda: list(pack_rows(trie, plan)), 3)  # noqa: B023
            print(
                f"pack {capacity:>6} {method:<11} N_pack/N_tree {totals.tokens_packed / trie.tokens_tree:.3f}   "
                f"rows {totals.num_rows}   {totals.tokens_packed / seconds / 1e6:.0f} M row tokens/s"
            )


def command(*arguments: str | Path) -> tuple[float, int]:
    """Wall-clock seconds and peak memory in bytes of one `treepack` process on one core."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [Path(sys.executable).parent / "treepack", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("the command failed")
    unit = 1 if platform.system() == "Darwin" else 1024
    return time.perf_counter() - began, usage.ru_maxrss * unit


def command_speed(sequences: list[Int32], folder: Path) -> None:
    """Print tokens per second and memory of build-trie and pack on JSONL with ids and a mask."""
    path, tiny = folder / "rollouts.jsonl", folder / "tiny.jsonl"
    with path.open("w") as file:
        for i, ids in enumerate(sequences):
            half = len(ids) // 2
            mask = [0] * half + [1] * (len(ids) - half)
            file.write(json.dumps({"id": i, "group_id": i // 16, "input_ids": ids.tolist(), "loss_mask": mask}) + "\n")
    tiny.write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n')
    num = sum(map(len, sequences))
    _, base = command("build-trie", tiny, "--out", folder / "tiny")
    timed = [command("build-trie", path, "--out", folder / "trie", "--overwrite") for _ in range(3)]
    seconds, memory = statistics.median(t for t, _ in timed), max(m for _, m in timed)
    print(f"treepack build-trie  {num / seconds / 1e6:.2f} M tokens/s   {num:,} tokens in {seconds:.2f} s, median of 3")
    times = (memory - base) / (4 * num)
    print(f"  memory over that of a tiny run: {times:.2f} times the token bytes (constant {base >> 20} MiB)")
    seconds, memory = command("pack", folder / "trie", "--capacity", "8192", *QUICK, "--out", folder / "packed")
    print(f"treepack pack        {num / seconds / 1e6:.2f} M flat tokens/s in {seconds:.2f} s")
    size = sum(part.stat().st_size for part in (folder / "packed").iterdir())
    packed = json.loads((folder / "packed" / "manifest.json").read_text())["totals"]["tokens_packed"]
    print(f"  {size / packed:.2f} bytes a token on disk")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=8)
    scale = parser.parse_args().scale
    print(f"$ python benchmarks/data_half.py --scale {scale}   commit {commit()}")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one core")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    trie_speed(random_sequences(seed=0))
    with tempfile.TemporaryDirectory() as folder:
        command_speed([ids for seed in range(scale) for ids in random_sequences(seed=seed)], Path(folder))
    print(f"peak memory of this script {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")


if __name__ == "__main__":
    main()
