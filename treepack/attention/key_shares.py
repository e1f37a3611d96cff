"""Shares of key blocks: the queries of a long key block are divided between programs that run at the same time.

    ranges of key blocks --count_shares--> number of shares of each block --key_shares--> KeyShares

One program computes dk and dv of a key block. A prompt that many short answers share has few key blocks with very many
queries, so their programs would still run when all others are done. A block with more than 1 / 32 of the query tiles of
all blocks is divided into equal shares. Each share adds up its part of dk and dv in float32, and then the parts of a
block are added in the order of its shares, so two runs agree in every bit.

A prompt of 128 tokens and 40 answers of 128 have 41 blocks and 162 tiles, 82 of the prompt. Above 16 tiles:

    block 0   tiles 0 ... 81   -> 6 shares: 0 ... 13, 14 ... 27, ..., 70 ... 81     sums 0 1 2 3 4 5
    block 1   tiles 2 3        -> 1 share                                            no sums
"""

from __future__ import annotations

import torch
from torch import Tensor

from treepack.attention.schedule import QUERY_TILE, KeyShares

# With 8 key heads, the work of one of 132 multiprocessors is 1 / 16.5 of the tiles of one head.
PARTS_OF_A_ROW = 32
MIN_TILES = 16  # of a block that is divided: a share takes much longer than reading and writing its sums


def count_shares(granules: Tensor, ranges: Tensor) -> Tensor:
    """Return the number of shares of every key block, int64 [B, nk]; 0 for a place without a block.

    Args:
        granules, ranges: `key_granules` and `key_ranges` of a schedule without windows, of any integer dtype.
    """
    tiles = (ranges[..., 3] - ranges[..., 0]).long() // QUERY_TILE
    limit = (tiles.sum() // PARTS_OF_A_ROW).clamp(min=MIN_TILES)
    # 82 tiles, limit 16 -> 6 shares; a block that no query sees has one, which stores zeros
    return (-(-tiles // limit)).clamp(min=1) * (granules[..., 0] >= 0)


def key_shares(ranges: Tensor, counts: Tensor, *, num_shares: int, num_joined: int, num_sums: int) -> KeyShares:
    """Return the shares of all key blocks, on the device of `ranges`.

    Args:
        ranges: int [B, nk, 4], `key_ranges` of a schedule without windows.
        counts: int64 [B, nk], the result of `count_shares`.
        num_shares, num_joined, num_sums: the sum of `counts`, the number of counts above 1, and their sum; given, so
            that a GPU need not be waited for.
    """
    num_blocks = ranges.shape[1]
    counts, ranges = counts.flatten(), ranges.flatten(0, 1).long()
    number = torch.arange(len(counts), device=counts.device)
    whole = torch.repeat_interleave(number, counts, output_size=num_shares)
    # counts 2 1 -> whole 0 0 1, within 0 1 0
    within = torch.arange(num_shares, device=counts.device) - (counts.cumsum(0) - counts)[whole]
    # counts 2 1 3 -> sums of the divided blocks 2 0 3 -> first places 0 2 2
    sums = torch.where(counts > 1, counts, 0)
    places = sums.cumsum(0) - sums
    first, last = ranges[whole, 0], ranges[whole, 3]
    # Tiles of a share, rounded up: 82 tiles in 6 shares -> 14 each, and 12 in the last one
    length = -(-(last - first) // (QUERY_TILE * counts[whole])) * QUERY_TILE
    begin = torch.minimum(first + within * length, last)
    end = torch.minimum(begin + length, last)
    place = torch.where(counts[whole] > 1, places[whole] + within, -1)
    columns = [whole // num_blocks, whole % num_blocks, begin, ranges[whole, 1], ranges[whole, 2], end, place]
    shares = torch.stack([*columns, torch.zeros_like(place)], dim=1)
    order = (end - begin).argsort(descending=True, stable=True)
    divided = (counts > 1).nonzero_static(size=num_joined)[:, 0]
    joined = torch.stack([divided // num_blocks, divided % num_blocks, places[divided], counts[divided]], dim=1)
    return KeyShares(shares[order].int(), joined.int(), num_sums)
