"""Tasks of the tests on a Ray cluster, whose workers import this module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

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


def sum_of(values: list[int], factor: int) -> int:
    return factor * sum(values)
