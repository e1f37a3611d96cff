"""The numbers of a run as columns: one entry per step, NaN for a step without the number.

record, record, ... --RunSeries.add--> steps [n], column(name) [n]
column --trailing_mean--> its trend      column --thin_points--> the same picture with fewer points

Memory is bounded by the number of steps and of names.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from treepack.trajectory import Float64

_MAX_COLUMNS = 64  # the trainer writes about thirty; a damaged file could have a new name in every line
_MAX_NAME = 80  # characters
_RECENT_PASSES = 1000  # steps whose slowest passes are kept
_MAX_ROWS = 8  # of a pass


@dataclass(frozen=True, slots=True)
class _SlowPass:
    """The slowest pass of a step: the ids of its rows, their tokens, and its seconds."""

    step: int
    seconds: float
    tokens: float
    rows: tuple[int, ...]


class RunSeries:
    """The columns of a run, which grow by a step at a time.

    Attributes:
        names: names of the columns, in the order in which they first occur.
        skipped: steps that changed no weights.
        passes: the slowest pass of each of the last steps.
        names_left_out: True if there were more than `_MAX_COLUMNS` names.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}
        self.skipped: list[int] = []
        self.passes: deque[_SlowPass] = deque(maxlen=_RECENT_PASSES)
        self.names_left_out = False

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def steps(self) -> Float64:
        """The steps, float64 [n], ascending."""
        return np.array(self._steps, np.float64)

    def column(self, name: str, start: int = 0) -> Float64:
        """Return the entries of a column from index `start` on, float64 [n - start]; NaN if the name is unknown."""
        if name not in self._columns:
            return np.full(len(self._steps) - start, np.nan)
        return np.array(self._columns[name][start:], np.float64)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append the step of a line of metrics.jsonl."""
        before = len(self._steps)
        self._steps.append(record["step"])
        if record.get("skipped_rows"):
            self.skipped.append(record["step"])
        if (slow := _slow_pass(record)) is not None:
            self.passes.append(slow)
        for name, value in record.items():
            number = _number(value)
            if name == "step" or number is None:
                continue
            if name not in self._columns:
                if len(self._columns) == _MAX_COLUMNS or len(name) > _MAX_NAME:
                    self.names_left_out = True
                    continue
                self._columns[name] = array("d", [math.nan]) * before
            self._columns[name].append(number)
        for column in self._columns.values():
            if len(column) == before:
                column.append(math.nan)


def _slow_pass(record: Mapping[str, Any]) -> _SlowPass | None:
    """Return the slowest pass of a step, None if the record has none or a damaged one."""
    entry = record.get("slowest_pass")
    if not isinstance(entry, dict) or not isinstance(entry.get("rows"), list):
        return None
    seconds, tokens = (_number(entry.get(name)) for name in ("seconds", "tokens"))
    rows = [row for row in entry["rows"][:_MAX_ROWS] if type(row) is int and 0 <= row < 1 << 53]
    if seconds is None or tokens is None or not math.isfinite(seconds + tokens) or seconds <= 0:
        return None
    return _SlowPass(record["step"], seconds, tokens, tuple(rows))


def _number(value: object) -> float | None:
    """Return a number, NaN if it is missing or not finite; None if the value is something else."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Not math.isfinite, which raises for an integer that is too large for a float.
    return float(value) if -1e300 < value < 1e300 else math.nan


def trailing_mean(steps: Float64, values: Float64, window: int, start: int = 0) -> Float64:
    """Return for each value from index `start` on the mean of the values of the last `window` steps.

    Args:
        steps: float64 [n], ascending; some may be missing.
        values: float64 [n], all finite.
        window: number of steps; the first ones have fewer before them.
        start: index of the first mean that is returned.
    """
    # steps [1, 2, 4], values [3, 5, 7], window 2: sums [0, 3, 8, 15], first [0, 0, 2] -> [3, 4, 7]
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.searchsorted(steps, steps[start:] - window, side="right")
    end = np.arange(start, len(steps)) + 1
    mean: Float64 = (sums[end] - sums[first]) / (end - first)
    return mean


def thin_points(steps: Float64, values: Float64, bins: int) -> tuple[Float64, Float64]:
    """Return the lowest and the highest point of each of `bins` bins: the same picture with fewer points.

    The first and the last point are always among them.

    Args:
        steps: float64 [n], ascending.
        values: float64 [n].
        bins: number of bins with equally many points each; at most twice as many points are returned unchanged.
    """
    if len(values) <= 2 * bins:
        return steps, values
    # values [5, 1, 2, 9, 0, 3], bins 2: bins [0, 3) and [3, 6) with minima 1, 4 and maxima 0, 3 -> points 0, 1, 3, 4, 5
    starts = np.linspace(0, len(values), bins + 1).astype(np.int64)
    ends = [
        start + int(pick(values[start:end]))
        for start, end in pairwise(starts.tolist())
        for pick in (np.argmin, np.argmax)
    ]
    points = np.unique([0, *ends, len(values) - 1])
    return steps[points], values[points]
