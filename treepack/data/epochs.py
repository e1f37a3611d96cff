"""The order of rows in an epoch, and the share of each rank.

    steps, seed, epoch --epoch_order---> parts       one part per training step (column `step`), shuffled within it
    parts, world       --epoch_rounds--> [R, world]  one row per rank and round

    world 2, rows by step   5 5 5 | 6 6      ranks 0 1
                                             round 5 5
                                                   5 .     . is -1, a row of padding
                                                   6 6

Every rank computes the same number of rows, and no round mixes two training steps. Everything is a function of its
arguments: the same epoch has the same order on every rank and in every run.

With several blocks (`data.blocks`) the rows of a step are shuffled within each block, and the ranks of a machine take
rows of its own block. The order of the rows does not depend on the number of ranks or machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treepack.data.blocks import by_block, cut_blocks, interleave
from treepack.trajectory import Int64


def epoch_order(
    steps: Sequence[int | None],
    rows: Sequence[int] | Int64,
    *,
    seed: int,
    epoch: int,
    blocks: int = 1,
    owners: Int64 | None = None,
) -> list[Int64]:
    """Shuffle the `rows` of an epoch within each training step; return one part per step, in the order of the steps.

    Args:
        steps: training step of every row of the dataset; rows without a step come first.
        rows: indices of the rows to order, ascending.
        seed: not negative.
        epoch: counted from 0; each epoch has a different order.
        blocks: number of blocks into which the rows of each step are cut; each is shuffled alone.
        owners: the directory of every row of the dataset, ascending; None for one directory.
    """
    generator = np.random.default_rng([seed, epoch])
    parts = steps_of_rows(steps, rows)
    if blocks == 1:
        return [generator.permutation(part) for part in parts]
    return [interleave(part, blocks, None if owners is None else owners[part], generator) for part in parts]


def steps_of_rows(steps: Sequence[int | None], rows: Sequence[int] | Int64) -> list[Int64]:
    """Return the `rows` of each training step, ascending, in the order of the steps; arguments as in `epoch_order`."""
    indices = np.asarray(rows, np.int64)
    # steps [None, 7, 7, None, 3] -> known [0, 1, 1, 0, 1], numbers [0, 7, 7, 0, 3] -> sorted [0, 3], [4], [1, 2].
    known = np.array([step is not None for step in steps], bool)[indices]
    numbers = np.array([step or 0 for step in steps], np.int64)[indices]
    order = np.lexsort((numbers, known))  # stable
    cuts = np.flatnonzero((np.diff(known[order]) != 0) | (np.diff(numbers[order]) != 0)) + 1
    return np.split(indices[order], cuts) if len(indices) else []


def block_of_rows(
    steps: Sequence[int | None], rows: Sequence[int] | Int64, *, blocks: int, owners: Int64 | None = None
) -> Int64:
    """Return the block of every row of the dataset, int64 [num_rows], -1 for others than `rows`.

    For the arguments see `epoch_order`. A row has the same block in every epoch.
    """
    block_of = np.full(len(steps), -1, np.int64)
    for part in steps_of_rows(steps, rows):
        block_of[part] = cut_blocks(blocks, np.zeros(len(part), np.int64) if owners is None else owners[part])
    return block_of


def file_order(steps: Sequence[int | None], *, blocks: int = 1) -> list[Int64]:
    """Return all rows in the order of the files, cut whenever the training step changes; blocks take turns."""
    # steps [0, 0, 1, 0] -> cuts [2, 3] -> parts [0, 1], [2], [3]: a step that comes back starts another part.
    cuts = [row for row in range(1, len(steps)) if steps[row] != steps[row - 1]]
    return [interleave(part, blocks) for part in np.split(np.arange(len(steps)), cuts)]


def epoch_rounds(parts: Sequence[Int64], world: int, *, done: int = 0, blocks: int = 1) -> Int64:
    """Return the rows of every rank, int64 [R, world]; -1 completes the last round of a part.

    Args:
        parts: the result of `epoch_order` or `file_order`.
        world: number of ranks; they are numbered machine by machine.
        done: number of rows to skip at the start, because ranks already took them.
        blocks: number of blocks of the parts. If it divides `world`, the ranks of block 0 come first, then the ranks of
            block 1, and so on; each takes rows of its block only.
    """
    # parts [3, 1, 2], [0, 4] and world 2: done 0 -> [[3, 1], [2, -1], [0, 4]], done 4 -> [[4, -1]]
    tables = [np.empty((0, world), np.int64)]  # keeps the shape if no row is left
    for part in parts:
        first = min(done, len(part))
        done -= first
        remaining = part[first:]
        padding = np.full(-len(remaining) % world, -1, np.int64)
        table = np.concatenate([remaining, padding]).reshape(-1, world)
        if blocks > 1:
            # Padding is sorted too, at the places of the missing rows, so that it takes no rank of other blocks.
            places = first + np.arange(table.size).reshape(-1, world)
            table = np.take_along_axis(table, by_block(places, blocks), axis=1)
        tables.append(table)
    return np.concatenate(tables)
