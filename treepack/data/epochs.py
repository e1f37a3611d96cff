"""In which order the rows of an epoch come, and which rank takes which of them.

    steps, seed, epoch --epoch_order--> parts       rows of one training step (column `step`), shuffled among each other
    parts, world       --rounds-------> [R, world]  one row per rank and round

    world 2, rows by step   5 5 5 | 6 6      ranks 0 1
                                             round 5 5
                                                   5 .     . is -1, a row of padding: every rank computes as many rows
                                                   6 6     as another, and no round mixes two training steps

Everything is a function of its arguments: the same epoch has the same order on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treepack.trajectory import Int64


def epoch_order(steps: Sequence[int | None], rows: Sequence[int] | Int64, *, seed: int, epoch: int) -> list[Int64]:
    """The `rows` of an epoch in random order, a part per training step, in the order of the steps.

    Args:
        steps: training step of every row of the dataset; rows without one come first.
        rows: indices of the rows that take part, ascending.
        seed: not negative.
        epoch: counted from 0; each has an order of its own.
    """
    by_step: dict[tuple[bool, int], list[int]] = {}
    for row in np.asarray(rows, np.int64).tolist():
        step = steps[row]
        by_step.setdefault((step is not None, step or 0), []).append(row)
    generator = np.random.default_rng([seed, epoch])
    return [generator.permutation(np.array(part, np.int64)) for _, part in sorted(by_step.items())]


def file_order(steps: Sequence[int | None]) -> list[Int64]:
    """All rows as they lie in the files, a part wherever rows side by side have one training step."""
    cuts = [row for row in range(1, len(steps)) if steps[row] != steps[row - 1]]
    return np.split(np.arange(len(steps)), cuts)


def rounds(parts: Sequence[Int64], world: int, *, done: int = 0) -> Int64:
    """The rows of every rank, int64 [R, world]; -1 fills up the last round of a part.

    Args:
        parts: as `epoch_order` gives them.
        world: number of ranks.
        done: how many rows, from the first on, are left out because they have been taken.
    """
    found = [np.empty((0, world), np.int64)]
    for part in parts:
        left = part[done:]
        done = max(0, done - len(part))
        filled = np.concatenate([left, np.full(-len(left) % world, -1, np.int64)])
        found.append(filled.reshape(-1, world))
    return np.concatenate(found)
