"""Seconds of the passes of an optimiser step, of which the slowest is recorded with its rows.

    with times.measure((7, 2)): forward and backward of rows 7 and 2
    times.of_rows() --> {7: 0.81, 2: 0.81}        after the step

On a GPU events measure the time, and only `of_rows` waits for them: the step waits for its losses at the same place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

NUM_ROWS = 8  # of a pass that are recorded


class PassTimes:
    """The times of the passes of one step on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: list[tuple[tuple[int, ...], Any, Any]] = []

    @contextmanager
    def measure(self, rows: tuple[int, ...]) -> Iterator[None]:
        """Measure the block, which computes `rows` together; padding has none and is not measured."""
        start = self._now()
        yield
        if rows:
            self._measured.append((rows, start, self._now()))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def of_rows(self) -> dict[int, float]:
        """Return for each row the seconds of its pass; waits for the GPU."""
        seconds: dict[int, float] = {}
        for rows, start, end in self._measured:
            if self._device.type == "cuda":
                end.synchronize()
                duration = start.elapsed_time(end) / 1000
            else:
                duration = end - start
            seconds |= {row: max(duration, seconds.get(row, 0.0)) for row in rows}  # a mixture may have a row twice
        return seconds


def slowest_pass(seconds: Sequence[float], tokens: Sequence[int], row_ids: Sequence[int]) -> dict[str, Any]:
    """Return the entry of metrics.jsonl about the slowest pass of a step.

    Args:
        seconds: for each row of the step those of its pass, on the rank that computed it.
        tokens: of each row.
        row_ids: of each row.
    """
    longest = max(seconds)
    # The rows of one pass have the same seconds, and rows of other passes have different ones.
    own = [place for place, each in enumerate(seconds) if each == longest]
    return {
        "seconds": round(longest, 4),
        "tokens": sum(tokens[place] for place in own),
        "rows": [row_ids[place] for place in own[:NUM_ROWS]],
    }
