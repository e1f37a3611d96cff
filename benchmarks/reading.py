"""Reading and building tries: megabytes per second, and the peak memory of all processes together.

    python benchmarks/reading.py [--kind heavy|little|chat] [--gigabytes N] [--workers 1,2] [--folder DIR]

Makes JSONL of made-up rollouts of 8,192 to 32,768 tokens, in groups of 16. Each except the first of a group branches
off an earlier one: at 92 to 100 % of its length (heavy: about nine tokens in ten are repeats) or at 0 to 20 % (little:
one in ten); or conversations of ten turns of made-up text under two system prompts, for sample_data/tokenizer (chat).
Runs `treepack build-trie` on it once for each number of workers, and compares the outputs.

Memory is the resident memory that /proc lists (Linux), summed over the process and its workers every 50 ms. Pages that
several of them share, for example of libraries, are counted for each. "of its own" leaves out pages of files.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from measure import commit

from treepack.files.manifest import read_manifest
from treepack.trajectory import Int32

ROOT = Path(__file__).parents[1]
GROUP = 16
LENGTHS = (1 << 13, 1 << 15)
VOCABULARY = 150_000
FORKS = {"heavy": (0.92, 1.0), "little": (0.0, 0.2)}
INTERVAL = 0.05


def token_groups(forks: tuple[float, float], rng: np.random.Generator) -> Iterator[list[dict[str, Any]]]:
    """Groups of token records without end."""
    number = 0
    while True:
        length = int(rng.integers(*LENGTHS))
        family: list[Int32] = []
        for _ in range(GROUP):
            old = family[rng.integers(len(family))] if family else np.zeros(0, np.int32)
            kept = old[: int(len(old) * rng.uniform(*forks))]
            fresh = max(1, length - len(kept) + int(rng.integers(-200, 200)))
            family.append(np.concatenate([kept, rng.integers(0, VOCABULARY, fresh, dtype=np.int32)]))
        yield [
            {
                "id": f"{number}-{i}",
                "group_id": number,
                "reward": float(i % 2),
                "input_ids": ids,
                "loss_mask": (np.arange(len(ids)) >= len(ids) // 4).astype(np.uint8),
            }
            for i, ids in enumerate(family)
        ]
        number += 1


def chat_groups(rng: np.random.Generator) -> Iterator[list[dict[str, Any]]]:
    """Groups of conversations without end."""
    words = np.array(sorted({word for word in (ROOT / "README.md").read_text().split() if word.isalpha()}))
    systems = [" ".join(rng.choice(words, 1000)) for _ in range(2)]
    number = 0
    while True:
        question = " ".join(rng.choice(words, 300))
        group = []
        for i in range(GROUP):
            messages = [{"role": "system", "content": systems[number % 2]}, {"role": "user", "content": question}]
            for _ in range(10):
                messages.append({"role": "assistant", "content": " ".join(rng.choice(words, 150))})
                messages.append({"role": "user", "content": " ".join(rng.choice(words, 100))})
            messages.append({"role": "assistant", "content": " ".join(rng.choice(words, 150))})
            group.append({"id": f"{number}-{i}", "group_id": number, "reward": float(i % 2), "messages": messages})
        yield group
        number += 1


def make(path: Path, kind: str, size: int) -> None:
    """Write at least `size` bytes of records."""
    rng = np.random.default_rng(0)
    groups = chat_groups(rng) if kind == "chat" else token_groups(FORKS[kind], rng)
    with path.open("wb") as file:
        while file.tell() < size:
            for record in next(groups):
                file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


def write_rollouts(path: Path, kind: str, num_tokens: int) -> None:
    """Write whole groups of token records that have at least `num_tokens` tokens together."""
    done = 0
    with path.open("wb") as file:
        for group in token_groups(FORKS[kind], np.random.default_rng(0)):
            for record in group:
                file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
                done += len(record["input_ids"])
            if done >= num_tokens:
                return


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


def build(path: Path, out: Path, options: list[str]) -> tuple[float, int, int]:
    """Seconds of `treepack build-trie`, and the peaks of `in_memory`."""
    command = [Path(sys.executable).parent / "treepack", "build-trie", path, "--out", out, *options]
    began = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    whole = private = 0
    while process.poll() is None:
        memory = in_memory(process.pid)
        whole, private = max(whole, memory[0]), max(private, memory[1])
        time.sleep(INTERVAL)
    if process.returncode:
        raise SystemExit("the command failed")
    return time.perf_counter() - began, whole, private


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*FORKS, "chat"], default="heavy")
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--folder", help="where the files are made and removed; default: that of temporary files")
    parsed = parser.parse_args()
    arguments = f"--kind {parsed.kind} --gigabytes {parsed.gigabytes:g} --workers {parsed.workers}"
    print(f"$ python benchmarks/reading.py {arguments}   commit {commit()}")
    machine = f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"{machine}, load before {os.getloadavg()[0]:.1f}", flush=True)
    options = ["--tokenizer", str(ROOT / "sample_data" / "tokenizer")] if parsed.kind == "chat" else []
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        path = Path(folder) / "rollouts.jsonl"
        make(path, parsed.kind, int(parsed.gigabytes * 1e9))
        size = path.stat().st_size
        written = set()
        for workers in map(int, parsed.workers.split(",")):
            out = Path(folder) / f"trie-{workers}"
            seconds, whole, private = build(path, out, [*options, "--workers", str(workers)])
            manifest = read_manifest(out)
            written.add(tuple(entry["sha256"] for entry in manifest["files"]))
            if len(written) == 1 and workers == int(parsed.workers.split(",")[0]):
                totals = manifest["totals"]
                print(
                    f"{size / 1e9:.2f} GB, {totals['num_trajectories']:,} rollouts, N_flat {totals['tokens_flat']:,}, "
                    f"N_tree {totals['tokens_tree']:,}, POR {100 * totals['por']:.1f} %"
                )
            print(
                f"workers {workers}   {seconds:7.1f} s   {size / seconds / 1e6:6.1f} MB/s   "
                f"{totals['tokens_flat'] / seconds / 1e6:5.2f} M tokens/s   "
                f"peak memory {whole / 1e6:,.0f} MB, of its own {private / 1e6:,.0f} MB",
                flush=True,
            )
        print("all wrote the same bytes" if len(written) == 1 else "THEY DIFFER")


if __name__ == "__main__":
    main()
