"""Bytes and requests of several machines that read one packed directory from an object store, with and without blocks.

    python benchmarks/machines.py [--machines 4] [--local 2] [--parts 32] [--part-tokens 524288] [--row-tokens 4096]

Packs made rollouts into parts of `part-tokens` tokens (16 row groups each), uploads them to an S3 server on this
machine (moto), and reads one epoch as `machines` times `local` ranks do, each machine with a cache of its own. Prints
the requests and megabytes at the start of the first rank of a machine, of its other ranks and of a second run, and the
megabytes of the epoch over all machines. Needs `pip install '.[test-s3]'`. Prints a Markdown table after the commit and
the command.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from measure import commit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.oracle_model import packed_directory
from support.s3 import Store, running_store
from support.strategies import make
from treepack.data.dataset import PackedDataset

_HEAD = (
    "| order | first rank: requests | MB | other ranks: requests | second run: requests | epoch: MB of all machines | \
times the data | parts per machine |\n|---|---|---|---|---|---|---|---|"
)


@dataclass
class Measurements:
    """Requests and bytes of the parts, per machine."""

    starts: list[tuple[int, int]] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("machines", 4), ("local", 2), ("parts", 32), ("part-tokens", 1 << 19), ("row-tokens", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"commit {commit()}, python {' '.join(sys.argv)}\n\n{_HEAD}")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory() as folder:
        patch.setattr("treepack.files.parts.PART_TOKENS", options.part_tokens)
        patch.setattr("treepack.pack.files.GROUP_TOKENS", options.part_tokens // 16)
        generator = np.random.default_rng(0)
        shape = options.parts * options.part_tokens // options.row_tokens, options.row_tokens - 1
        lines = generator.integers(0, 100_000, shape)
        rollouts = [make(f"t{i}", [100_000 + i, *line.tolist()]) for i, line in enumerate(lines)]
        packed = packed_directory(Path(folder) / "packed", rollouts, capacity=options.row_tokens)
        size = sum(part.stat().st_size for part in packed.glob("part-*"))
        with running_store(patch, Path(folder) / "cache") as store:
            store.upload(packed, "packed")
            for name, blocks in (("rows over all ranks", 1), ("blocks", options.machines)):
                measured = Measurements()
                for machine in range(options.machines):
                    cache = Path(folder) / f"{name}-{machine}"
                    read_epoch(store, cache, machine, options.machines, options.local, blocks, measured)
                print(row(name, measured, size))
    patch.undo()


def read_epoch(
    store: Store, cache: Path, machine: int, machines: int, local: int, blocks: int, measured: Measurements
) -> None:
    """Read the rows of the ranks of one machine."""
    ranks = []
    for place in range(local):
        store.requests.clear()
        store.downloads.clear()
        ranks.append(open_rank(store, cache, machine * local + place, machines * local, blocks))
        if place == 0:
            measured.starts.append((num_requests(store), num_bytes(store)))
        else:
            measured.others.append(num_requests(store))
    store.downloads.clear()
    for batches in zip(*ranks, strict=True):  # rank by rank, as they run side by side
        assert len(batches) == local
    for rank in ranks:
        assert rank._reader._copies is not None
        rank._reader._copies.wait()
    measured.epochs.append(num_bytes(store))
    measured.copies.append(len([*(cache / "parts").glob("*.parquet")]))
    store.requests.clear()
    assert sum(batch.num_tokens for batch in open_rank(store, cache, machine * local, machines * local, blocks))
    measured.again.append(num_requests(store))


def open_rank(store: Store, cache: Path, rank: int, world: int, blocks: int) -> PackedDataset:
    return PackedDataset(store.address("packed"), shuffle=True, rank=rank, world=world, blocks=blocks, cache=cache)


def num_requests(store: Store) -> int:
    return sum("part-" in path for _, path in store.requests)


def num_bytes(store: Store) -> int:
    return sum(number for path, number in store.downloads if "part-" in path)


def row(name: str, measured: Measurements, size: int) -> str:
    requests, started = (max(values) for values in zip(*measured.starts, strict=True))
    total, copies = sum(measured.epochs), f"{min(measured.copies)} to {max(measured.copies)}"
    return (
        f"| {name} | {requests} | {started / 1e6:.2f} | {max(measured.others, default=0)} | {max(measured.again)} "
        f"| {total / 1e6:.1f} | {total / size:.2f} | {copies} |"
    )


if __name__ == "__main__":
    main()
