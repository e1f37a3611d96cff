"""Cost of `treepack pack` of a trie of 10 M tokens: the first run after the installation, and the second one.

    python benchmarks/data_path/first_pack.py [--before REVISION]

"before" compiles its loops with numba in the first run, so its cache of machine code is a new folder each time.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from before_after import OUT, Versions, arguments, treepack

GROUPS, GROUP_SIZE = 60, 16


def write_rollouts(path: Path) -> None:
    """Write groups of 16 rollouts that fork anywhere, 8,192 to 32,768 tokens each, as a Parquet file of token ids."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(GROUPS):
        ones: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        for _ in range(GROUP_SIZE):
            length = int(rng.integers(8192, 32768))
            start = ones[int(rng.integers(len(ones)))] if ones else np.zeros(0, np.int32)
            start = start[: int(rng.uniform(0.1, 0.8) * len(start))][:length]
            ones.append(np.concatenate([start, rng.integers(0, 150_000, length - len(start), dtype=np.int32)]))
        rows += [{"input_ids": ids, "loss_mask": np.ones(len(ids), np.int8), "group_id": str(group)} for ids in ones]
    pq.write_table(pa.Table.from_pylist(rows), path)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__).parse_args()
    with Versions(options.before, options.folder, options.repeats) as versions:
        rollouts, trie = versions.folder / "rollouts.parquet", versions.folder / "trie"
        write_rollouts(rollouts)
        versions.measure("after", treepack("build-trie", rollouts, "--train-all", "--out", trie), versions.folder)
        print("\n| version | first run, processor s | second run | first / second |\n|---|---|---|---|")
        for side in ("before", "after"):
            # An installation compiles bytecode. This run does it here: it imports nearly everything.
            run(versions, side, trie, "contiguous")
            pairs = [run(versions, side, trie, "auto") for _ in range(options.repeats)]
            first, second = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            print(f"| {side} | {first:.2f} | {second:.2f} | {first / second:.2f} |", flush=True)


def run(versions: Versions, side: str, trie: Path, method: str) -> tuple[float, float]:
    """Return the processor time of a pack with an empty cache of machine code, and of a second one."""
    cache = {"NUMBA_CACHE_DIR": tempfile.mkdtemp(dir=versions.folder)}
    command = treepack("pack", trie, "--method", method, "--effort", "low", "--capacity", 65536, "--out", OUT)
    outs = [Path(tempfile.mkdtemp(dir=versions.folder)) / "out" for _ in range(2)]
    first, second = (versions.measure(side, command, out, cache).processor for out in outs)
    return first, second


if __name__ == "__main__":
    main()
