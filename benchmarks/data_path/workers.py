"""Build a trie with one worker and with two, before and after: by the clock, with the same bytes.

    .venv/bin/python benchmarks/data_path/workers.py                        5 x 10^8 tokens: 4 GB of JSONL
    .venv/bin/python benchmarks/data_path/workers.py --tokens 50_000_000    a tenth of it

Rollouts of 8,192 to 32,768 tokens in groups of 16 with a mask and a reward. `--repeated` of the tokens of a group are
repeats. Parquet has row groups of 256 rollouts. Then a run with two workers gives the seconds of the main thread of the
first process per GB of input. All other work is done by workers, or by one thread for each input file that hashes it,
so an estimate for 64 cores follows from Amdahl's law.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from before_after import OUT, Versions, arguments, header, program, treepack

GROUP, ROW_GROUP, CORES = 16, 256, 64


def rollouts(num_tokens: int, repeated: float) -> Iterator[dict[str, Any]]:
    """Yield groups of rollouts that share the beginning, until there are `num_tokens` tokens."""
    rng = np.random.default_rng(0)
    # A share s of each rollout is stored once for the group: 1 - repeated = s / 16 + 1 - s.
    share = repeated / (1 - 1 / GROUP)
    done = 0
    while done < num_tokens:
        length = int(rng.integers(8192, 32769))
        prefix = rng.integers(0, 150_000, int(length * share), dtype=np.int32)
        for i in range(GROUP):
            ids = np.concatenate([prefix, rng.integers(0, 150_000, length - len(prefix), dtype=np.int32)])
            mask = np.zeros(length, np.int8)
            mask[length // 4 :] = 1
            yield {"id": f"{done}-{i}", "input_ids": ids, "loss_mask": mask, "reward": float(i), "group_id": str(done)}
        done += GROUP * length


def write(folder: Path, num_tokens: int, repeated: float) -> dict[str, Path]:
    """Write the rollouts as JSONL and as Parquet."""
    paths = {"JSONL": folder / "rollouts.jsonl", "Parquet": folder / "rollouts.parquet"}
    writer, rows = None, list[dict[str, Any]]()
    with paths["JSONL"].open("wb") as file:
        for rollout in rollouts(num_tokens, repeated):
            file.write(orjson.dumps(rollout, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            rows.append(rollout)
            if len(rows) == ROW_GROUP:
                writer = _write_rows(writer, paths["Parquet"], rows)
        if rows:
            writer = _write_rows(writer, paths["Parquet"], rows)
    assert writer is not None
    writer.close()
    return paths


def _write_rows(writer: pq.ParquetWriter | None, path: Path, rows: list[dict[str, Any]]) -> pq.ParquetWriter:
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    rows.clear()
    writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
    writer.write_table(table)
    return writer


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of a directory."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def build(path: Path, out: Path) -> None:
    """Build with two workers; print the seconds of the main thread, its process, the workers and the clock."""
    import resource
    import time

    from treepack import BuildOptions, build_trie_directory

    start = (time.thread_time(), time.process_time(), time.perf_counter())
    build_trie_directory([path], out, BuildOptions(workers=2))
    end = (time.thread_time(), time.process_time(), time.perf_counter())
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    main, process, clock = (b - a for a, b in zip(start, end, strict=True))
    print(
        json.dumps(
            {"main": main, "threads": process - main, "workers": usage.ru_utime + usage.ru_stime, "clock": clock}
        )
    )


def extrapolate(versions: Versions, name: str, path: Path, num_tokens: int) -> None:
    """Print the serial seconds per GB, and the rate of 64 cores that follows from them."""
    cost = versions.measure("after", program(Path(__file__), "--build", path, OUT), versions.folder / f"serial-{name}")
    seconds = json.loads(cost.output.strip().splitlines()[-1])
    size = path.stat().st_size / 1e9
    clock = seconds["main"] + seconds["workers"] / CORES
    with_one_file = max(clock, seconds["threads"])  # the hash of a file is serial
    print(
        f"{name}, {size:.2f} GB: main thread {seconds['main'] / size:.3f} s/GB, hash and other threads "
        f"{seconds['threads'] / size:.2f} s/GB, workers {seconds['workers'] / size:.2f} s/GB. EXTRAPOLATED to {CORES} "
        f"cores, not measured: {clock:.1f} s or {num_tokens / clock / 1e6:.0f} M tokens/s with many files, "
        f"{num_tokens / with_one_file / 1e6:.0f} M tokens/s with one"
    )


def main() -> None:
    """Compare and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=500_000_000, help="flat tokens")
    parser.add_argument("--repeated", type=float, default=0.9, help="share of the tokens that are repeats")
    options = parser.parse_args()
    with Versions(options.before, options.folder, options.repeats) as versions:
        paths = write(versions.folder, options.tokens, options.repeated)
        header()
        clocks: dict[tuple[str, int], float] = {}
        for name, path in paths.items():
            results: list[dict[str, str]] = []

            def keep(side: str, out: Path, results: list[dict[str, str]] = results) -> None:
                results.append(digests(out))

            for workers in (1, 2):
                cost = versions.compare(
                    f"build-trie {name}, --workers {workers}",
                    treepack("build-trie", path, "--out", OUT, "--workers", workers, "--quiet"),
                    units=("tokens", options.tokens),
                    inspect=keep,
                )
                clocks[name, workers] = cost["after"].clock
            assert all(each == results[0] for each in results), f"{name}: the outputs differ"
        for name, path in paths.items():
            speedup = clocks[name, 1] / clocks[name, 2]
            print(f"{name}: two workers are {speedup:.2f} times as fast as one by the clock; all bytes are the same")
            extrapolate(versions, name, path, options.tokens)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--build"]:
        build(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
