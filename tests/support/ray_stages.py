"""Tasks of the tests on a Ray cluster, whose workers import this module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError


def square(number: int) -> int:
    return number * number


def slow_square(number: int, folder: Path) -> int:
    """The square, after a pause; writes the number of this process into the folder."""
    (folder / str(os.getpid())).touch()
    time.sleep(0.3)
    return number * number


def square_after_death(number: int, marker: Path) -> int:
    """The square; kills its process the first time that it runs for a marker."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def always_dies(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def refuses(number: int) -> int:
    if number == 3:
        raise TreepackError(f"rollouts.jsonl:{number}: no tokens; remove the line")
    return number


def breaks(number: int) -> float:
    return 1 / (number - 3)


def folder_of_task(_: int) -> str:
    return os.getcwd()  # noqa: PTH109


def large_table_of(seed: int, rows: int) -> tuple[pa.Table, int]:
    """A table of 8 KB for each row."""
    rng = np.random.default_rng(seed)
    values = pa.array(rng.integers(0, 9, rows * 2048, np.int32))
    tokens = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * 2048), values)
    return pa.table({"key": pa.array(rng.integers(0, 1000, rows), pa.int64()), "tokens": tokens}), rows


def refuses_table(number: int) -> tuple[pa.Table, int]:
    raise TreepackError(f"table {number}: cannot be made; give another")


def num_rows_and_sum(table: pa.Table, factor: int) -> tuple[int, int]:
    return len(table), factor * int(table["key"].to_numpy().sum())
