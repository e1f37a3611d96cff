"""Tries larger than memory: seconds, peak memory and peak disk of build-trie, pack, stats and --check with --memory.

    python benchmarks/out_of_core.py [--tokens 100_000_000,1_000_000_000] [--kind little] [--memory 4G] [--folder DIR]
    python benchmarks/out_of_core.py --control-group /sys/fs/cgroup/memory/NAME      also let the system enforce it

Makes JSONL as `benchmarks/made_rollouts.py` does, with at least so many tokens, and runs each command on it. `--steps`
chooses commands, `--method` that of pack.

Memory is the peak of the resident memory of the process and its workers, every 50 ms; "of its own" leaves out pages of
files, which the system can take back at any time. Disk is the largest drop of the free space since the first step, so
other programs must not use this disk meanwhile; it includes the JSONL. With a control group (a folder of cgroup
version 1 or 2 that you may write), the system kills a command that needs more than the memory plus 5 %, pages of files
included.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from made_rollouts import FORKS, write_rollouts
from measure import commit

from treepack.files.manifest import read_manifest

STEPS = ("build-trie", "pack", "stats", "stats PACKED", "check TRIE", "check PACKED")
_UNITS = {"M": 1 << 20, "G": 1 << 30}


@dataclass
class Cost:
    """Seconds, and peaks in bytes."""

    seconds: float = 0.0
    resident: int = 0
    private: int = 0
    disk: int = 0


INTERVAL = 0.05  # seconds between two readings of memory


def in_memory(pid: int) -> tuple[int, int]:
    """Bytes in memory of a process and all its descendants, and the bytes without pages of files."""
    whole = private = 0
    waiting = [pid]
    while waiting:
        folder = Path("/proc", str(waiting.pop()))
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:  # it has ended
            continue
        kilobytes = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssAnon") if name in status}
        whole += kilobytes.get("VmRSS", 0) << 10
        private += kilobytes.get("RssAnon", 0) << 10
    return whole, private


def limit(group: Path, memory: int) -> None:
    """Make a control group with at most `memory` bytes."""
    group.mkdir(exist_ok=True)
    names = ("memory.max", "memory.limit_in_bytes")
    name = next(name for name in names if (group / name).exists())
    (group / name).write_text(str(memory))


def run(arguments: list[str], folder: Path, free: int, group: Path | None) -> Cost:
    """Run a command of treepack and return its cost."""
    command = [str(Path(sys.executable).parent / "treepack"), *arguments, "--quiet"]

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    cost, began = Cost(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=join)
    while process.poll() is None:
        resident, private = in_memory(process.pid)
        cost.resident, cost.private = max(cost.resident, resident), max(cost.private, private)
        cost.disk = max(cost.disk, free - shutil.disk_usage(folder).free)
        time.sleep(INTERVAL)
    cost.seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"treepack {' '.join(arguments)}: exit status {process.returncode}")
    return cost


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="100_000_000,300_000_000")
    parser.add_argument("--kind", choices=[*FORKS], default="little")
    parser.add_argument("--memory", default="4G")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--control-group", type=Path)
    parser.add_argument("--rollouts", type=Path, help="JSONL of the first number of tokens, made if it does not exist")
    parser.add_argument("--folder", help="where the files are made and removed; default: that of temporary files")
    parsed = parser.parse_args()
    memory = int(parsed.memory[:-1]) * _UNITS[parsed.memory[-1]]
    if parsed.control_group is not None:
        limit(parsed.control_group, memory + memory // 20)
    print(f"commit {commit()}, {os.cpu_count()} cores, --memory {parsed.memory} --method {parsed.method}")
    print("| tokens of the tries | step | s | M tree tokens/s | memory, GB | of its own, GB | disk, GB |", flush=True)
    print("|---|---|---|---|---|---|---|")
    for tokens in map(int, parsed.tokens.split(",")):
        with tempfile.TemporaryDirectory(dir=parsed.folder) as temporary:
            folder = Path(temporary)
            free = shutil.disk_usage(folder).free
            rollouts, trie, packed = parsed.rollouts or folder / "rollouts.jsonl", folder / "trie", folder / "packed"
            parsed.rollouts = None
            if not rollouts.exists():
                write_rollouts(rollouts, parsed.kind, tokens)
            commands = {
                "build-trie": ["build-trie", str(rollouts), "--out", str(trie)],
                "pack": ["pack", str(trie), "--capacity", "64k", "--method", parsed.method, "--out", str(packed)],
                "stats": ["stats", str(trie)],
                "stats PACKED": ["stats", str(packed)],
                "check TRIE": ["stats", str(trie), "--check"],
                "check PACKED": ["stats", str(packed), "--check"],
            }
            for step in parsed.steps.split(","):
                cost = run([*commands[step], "--memory", parsed.memory], folder, free, parsed.control_group)
                tree = read_manifest(trie)["totals"]["tokens_tree"]
                values = (cost.seconds, tree / cost.seconds / 1e6, cost.resident / 1e9, cost.private / 1e9)
                figures = " | ".join(f"{value:.2f}" for value in (*values, cost.disk / 1e9))
                print(f"| {tree:,} | {step} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
