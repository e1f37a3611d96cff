"""Rows with room left are put together, whatever trees they hold: fewer rows, no token more."""

from __future__ import annotations

import bisect

import numpy as np

from treepack.trajectory import Int64


def merge_rows(row_of: Int64, row_tokens: Int64, steps: Int64, capacity: int) -> Int64:
    """Put rows that are not full together, best fit decreasing, as if they shared nothing. O(rows log rows).

    `row_of` and `steps` int64 [num_trajectories], `row_tokens` int64 [num_rows]; returns the new row of each
    trajectory, rows numbered arbitrarily.
    """
    row_step = np.zeros(len(row_tokens), np.int64)
    row_step[row_of] = steps
    target = np.arange(len(row_tokens))
    for step in np.unique(row_step):
        rows = np.flatnonzero(row_step == step)
        rows = rows[np.argsort(-row_tokens[rows], kind="stable")]
        free: list[tuple[int, int]] = []  # (room, row), ascending
        for row, tokens in zip(rows.tolist(), row_tokens[rows].tolist(), strict=True):
            at = bisect.bisect_left(free, (tokens, -1))
            if at < len(free):
                room, into = free.pop(at)
                target[row] = into
            else:
                room, into = capacity, row
            bisect.insort(free, (room - tokens, into))
    return target[row_of]
