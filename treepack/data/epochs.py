"""The order of rows in an epoch, and the share of each rank.

    steps, seed, epoch --epoch_order--> parts       one part per training step (column `step`), shuffled within it
    parts, world       --rounds-------> [R, world]  one row per rank and round

    world 2, rows by step   5 5 5 | 6 6      ranks 0 1
                                             round 5 5
                                                   5 .     . is -1, a row of padding
                                                   6 6

Every rank computes the same number of rows, and no round mixes two training steps. Everything is a function of its
arguments: the same epoch has the same order on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treepack.trajectory import Int64


def epoch_order(steps: Sequence[int | None], rows: Sequence[int] | Int64, *, seed: int, epoch: int) -> list[Int64]:
    """Shuffle the `rows` of an epoch within each training step; return one part per step, in the order of the steps.

    Args:
        steps: training step of every row of the dataset; rows without a step come first.
        rows: indices of the rows to order, ascending.
        seed: not negative.
        epoch: counted from 0; each epoch has its own order.
    """
    # steps [None, 7, 7, None, 3] -> (False, 0): [0, 3], (True, 7): [1, 2], (True, 3): [4]; sorted: None, 3, 7.
    # The flag comes first because None cannot be compared with a number.
    by_step: dict[tuple[bool, int], list[int]] = {}
    for row in np.asarray(rows, np.int64).tolist():
        step = steps[row]
        by_step.setdefault((step is not None, step or 0), []).append(row)
    generator = np.random.default_rng([seed, epoch])
    return [generator.permutation(np.array(part, np.int64)) for _, part in sorted(by_step.items())]


def file_order(steps: Sequence[int | None]) -> list[Int64]:
    """Return all rows in the order of the files, cut into parts where the training step changes."""
    # steps [0, 0, 1, 0] -> cuts [2, 3] -> parts [0, 1], [2], [3]: a step that comes back starts another part.
    cuts = [row for row in range(1, len(steps)) if steps[row] != steps[row - 1]]
    return np.split(np.arange(len(steps)), cuts)


def rounds(parts: Sequence[Int64], world: int, *, done: int = 0) -> Int64:
    """Return the rows of every rank, int64 [R, world]; -1 fills the last round of a part.

    Args:
        parts: the result of `epoch_order` or `file_order`.
        world: number of ranks.
        done: number of rows to skip at the start, because ranks already took them.
    """
    # parts [3, 1, 2], [0, 4] and world 2: done 0 -> [[3, 1], [2, -1], [0, 4]], done 4 -> [[4, -1]]
    blocks = [np.empty((0, world), np.int64)]  # keeps the shape if no row is left
    for part in parts:
        remaining = part[done:]
        done = max(0, done - len(part))
        padding = np.full(-len(remaining) % world, -1, np.int64)
        blocks.append(np.concatenate([remaining, padding]).reshape(-1, world))
    return np.concatenate(blocks)
