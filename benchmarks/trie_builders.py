"""Two ways to build a trie larger than memory: sorted runs merged k-way, and ranges exchanged between tasks.

    python benchmarks/trie_builders.py [--tokens 10_000_000,100_000_000] [--memory 256M] [--workers 1,2] [--folder DIR]

Makes JSONL as `made_rollouts.py` does, and builds its trie with `treepack build-trie --memory` (runs) and with
`build_trie_on` and a `MapScheduler` of as many processes, whose ranges have the size of a run (ranges). Prints seconds,
those of all processors, the peak of memory of all processes without pages of files, the largest drop of free disk
space, and if both outputs have equal columns and equal files. Other programs must not use this disk meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from made_rollouts import write_rollouts
from out_of_core import INTERVAL, in_memory

from treepack.cluster.build import build_trie_on
from treepack.cluster.map_scheduler import MapScheduler
from treepack.files.manifest import read_manifest
from treepack.trie.builders.out_of_core import run_size

_UNITS = {"M": 1 << 20, "G": 1 << 30}


def build_by_ranges(rollouts: Path, out: Path, scratch: Path, run_bytes: int, workers: int) -> None:
    """Build the trie with as many processes; a range has about the size of a run."""
    num_ranges = max(1, rollouts.stat().st_size // 2 // run_bytes)  # about 8 bytes of JSONL for each token, 4 in a run
    with multiprocessing.get_context("spawn").Pool(workers) as pool, MapScheduler(_ordered_map(pool), scratch) as tasks:
        build_trie_on(tasks, [rollouts], out, num_ranges=num_ranges, part_bytes=run_bytes)


def _ordered_map(pool: multiprocessing.pool.Pool):  # type: ignore[no-untyped-def]
    return lambda function, items: pool.imap(function, items)


def measure(command: list[str], folder: Path) -> tuple[float, float, int, int]:
    """Run a command; return its seconds, those of all processors, and its peaks of memory and disk in bytes."""
    free, private, disk, began = shutil.disk_usage(folder).free, 0, 0, time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        private = max(private, in_memory(process.pid)[1])
        disk = max(disk, free - shutil.disk_usage(folder).free)
        time.sleep(INTERVAL)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, private, disk


def same_columns(one: Path, other: Path) -> bool:
    """Return True if the tables of two tries are equal, whatever parts they are in."""
    return all(
        pq.read_table(sorted(one.glob(f"{name}-*"))).equals(pq.read_table(sorted(other.glob(f"{name}-*"))))
        for name in ("nodes", "trajectories")
    )


def same_files(one: Path, other: Path) -> bool:
    """Return True if two tries have the same parts, byte by byte."""
    hashes = [{entry["name"]: entry["sha256"] for entry in read_manifest(each)["files"]} for each in (one, other)]
    return hashes[0] == hashes[1]


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="10_000_000,100_000_000")
    parser.add_argument("--kind", choices=("heavy", "little"), default="little")
    parser.add_argument("--memory", default="256M")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--folder", help="where the files are made and removed; default: that of temporary files")
    parser.add_argument("--build", nargs=5, help=argparse.SUPPRESS)  # rollouts, out, scratch, bytes, workers
    parsed = parser.parse_args()
    if parsed.build:
        rollouts, out, scratch, run_bytes, workers = parsed.build
        build_by_ranges(Path(rollouts), Path(out), Path(scratch), int(run_bytes), int(workers))
        return
    memory = int(parsed.memory[:-1]) * _UNITS[parsed.memory[-1]]
    version = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    print(f"commit {version.stdout.strip()}, {os.cpu_count()} cores, --memory {parsed.memory} --kind {parsed.kind}")
    print("| tokens | workers | builder | s | processor s | memory, MB | disk, MB | equal columns | equal files |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    treepack = str(Path(sys.executable).parent / "treepack")
    for tokens in map(int, parsed.tokens.split(",")):
        with tempfile.TemporaryDirectory(dir=parsed.folder) as temporary:
            folder = Path(temporary)
            rollouts = folder / "rollouts.jsonl"
            write_rollouts(rollouts, parsed.kind, tokens)
            for workers in parsed.workers.split(","):
                runs, ranges = (folder / f"{name}-{workers}" for name in ("runs", "ranges"))
                by_runs = [treepack, "build-trie", str(rollouts), "--out", str(runs), "--workers", workers]
                by_runs += ["--memory", parsed.memory, "--quiet"]
                by_ranges = [sys.executable, __file__, "--build", str(rollouts), str(ranges), str(folder / "scratch")]
                by_ranges += [str(run_size(memory)), workers]
                for name, out, command in (("runs", runs, by_runs), ("ranges", ranges, by_ranges)):
                    seconds, busy, private, disk = measure(command, folder)
                    tree = read_manifest(out)["totals"]["tokens_tree"]
                    equal = f"{same_columns(runs, out)} | {same_files(runs, out)}"
                    figures = f"{seconds:.2f} | {busy:.2f} | {private / 1e6:.0f} | {disk / 1e6:.0f}"
                    print(f"| {tree:,} | {workers} | {name} | {figures} | {equal} |", flush=True)
                for out in (runs, ranges):
                    shutil.rmtree(out)


if __name__ == "__main__":
    main()
