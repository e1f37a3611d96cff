"""Blocks of neighbouring rows, so that a machine reads few parts of a directory instead of all of them.

    rows of a training step, in the order of the files --cut_blocks--> block of each row
    block of each row --interleave--> an order in which any consecutive rows are spread over all blocks

    8 rows, 2 blocks      files    0 1 2 3 | 4 5 6 7
                          order    0 4 1 5 2 6 3 7         without a shuffle within each block
                          rounds   0 1 | 4 5,  2 3 | 6 7   4 ranks: 2 on machine 0, 2 on machine 1

The blocks take turns in an order that halves the range again and again: 8 blocks have the turns 0 4 2 6 1 5 3 7. So
each machine has its own blocks if there are as many machines as blocks, or if both numbers are powers of two. Other
numbers of machines share some blocks.

    2 machines, one row each    0 | 4, then 2 | 6, 1 | 5, 3 | 7
    4 machines, one row each    0 | 2 | 4 | 6, then 1 | 3 | 5 | 7

`data.epochs` and `train.schedule` make the order of an epoch of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from treepack.trajectory import Int64

BALANCED = "was packed with --balance, and blocks would part the neighbouring rows whose score pairs it made even"


def is_balanced(manifest: Mapping[str, Any]) -> bool:
    """Return True if consecutive rows of the directory have even score pairs, which blocks would part."""
    balance: int = manifest["options"].get("balance", 1)
    return balance > 1


def turns(blocks: int) -> Int64:
    """Return the order in which `blocks` blocks give a row each, int64 [blocks]."""
    # Read the bits of 0, 1, 2, ... in reverse. 6 blocks have 3 bits: 000 001 010 011 100 101 110 111 become
    # 0 4 2 6 1 5 3 7, and without 6 and 7: [0, 4, 2, 1, 5, 3].
    bits = (blocks - 1).bit_length()
    numbers = np.arange(1 << bits)
    reverse = sum(((numbers >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)) + np.zeros_like(numbers)
    return reverse[reverse < blocks]


def cut_blocks(blocks: int, owners: Int64) -> Int64:
    """Return the block of each row of a training step, int64 [n]; blocks differ by at most one row.

    Args:
        blocks: number of blocks.
        owners: int64 [n], ascending: the directory of each row. Each directory is cut alone, so that a block has
            its share of each of them.
    """
    order, used, parts = turns(blocks), 0, [np.zeros(0, np.int64)]
    for num_rows in np.unique(owners, return_counts=True)[1].tolist():
        # 3 blocks with the turns [0, 2, 1] and directories of 4 and 4 rows: the sizes are [2, 1, 1], and then
        # [1, 1, 2], because block 0 had the first turn. In total [3, 2, 3]: the last turn has one row less.
        sizes = np.full(blocks, num_rows // blocks)
        sizes[order[(used + np.arange(num_rows % blocks)) % blocks]] += 1
        used += num_rows % blocks
        parts.append(np.repeat(np.arange(blocks), sizes))
    return np.concatenate(parts)


def interleave(
    rows: Int64, blocks: int, owners: Int64 | None = None, generator: np.random.Generator | None = None
) -> Int64:
    """Return the rows of a training step in the order in which blocks take turns.

    Args:
        rows: int64 [n], ascending.
        blocks: number of blocks.
        owners: the directory of each row, see `cut_blocks`; None for one directory.
        generator: shuffles each block; None keeps the order of the files within a block.
    """
    block_of = cut_blocks(blocks, np.zeros(len(rows), np.int64) if owners is None else owners)
    order = np.empty_like(rows)
    for place, block in enumerate(turns(blocks).tolist()):
        own = rows[block_of == block]
        # 3 blocks, 8 rows: turn 0 has the places 0, 3, 6, turn 1 the places 1, 4, 7 and turn 2 the places 2, 5.
        order[place::blocks] = own if generator is None else generator.permutation(own)
    return order


def by_block(places: Int64, blocks: int) -> Int64:
    """Return the order that sorts the places of each round by block; places and result are int64 [R, world].

    Args:
        places: of the rows of each round in the result of `interleave`, ascending.
        blocks: number of blocks.
    """
    # 2 blocks, 4 ranks: the places [0, 1, 2, 3] have the blocks [0, 1, 0, 1], so the order is [0, 2, 1, 3].
    order: Int64 = np.argsort(turns(blocks)[places % blocks], axis=1, kind="stable")
    return order
