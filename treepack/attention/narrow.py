"""Schedules of layers with windows or chunks: the lists of the whole row, without what lies before every window.

A query block or tile [t0, t1) sees a granule of keys [k0, k1) with subtree ends low ... high, if

    high > t0                                                     some key is an ancestor of some query, and
    k1 - 1 >= the smallest start of the queries t0 ... high - 1   its last key is inside the window of one of them

Subtrees nest, so the queries that have the granule among their ancestors come first in the tile. The second line leaves
out the queries after them, which may belong to a branch whose window begins much earlier. The tile is full, and needs
no mask, if all ends lie past it (low >= t1) and all windows begin at the granule or before it (k0 >= the largest
start).

For dk and dv, key blocks are 4 consecutive granules, because the queries that see neighbours are about the same. Each
block gets a list of query tiles of 64: those under a mask, then the full ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.attention.schedule import GRANULE, KEY_BLOCK, QUERY_BLOCK, QUERY_TILE, Schedule, longest_first

_PER_KEY_BLOCK = KEY_BLOCK // GRANULE
_PER_QUERY_BLOCK = QUERY_BLOCK // GRANULE
_TILES = QUERY_BLOCK // QUERY_TILE  # query tiles of a query block


class _Pairs(NamedTuple):
    """Granules of keys and the query blocks or tiles that see some of them, [n] each.

    queries   number of the block or tile, counted over all rows
    granule   number of the granule in its row
    is_full   whether every pair is visible
    """

    queries: Tensor
    granule: Tensor
    is_full: Tensor


def narrow(whole: Schedule, start: Tensor) -> Schedule:
    """Return the schedule in which token q sees nothing before start[q], int [B, T], on the device of `whole`."""
    # The tokens that pad the row see only themselves: T = 300 -> start 300, 301, ... 383
    batch, padded = whole.end.shape
    tail = torch.arange(whole.length, padded, dtype=torch.int32, device=whole.end.device)
    start = torch.cat([start.to(torch.int32).to(whole.end.device), tail.expand(batch, -1)], dim=1)
    listed = _listed_pairs(whole)
    granules, offsets, partial = _query_lists(_test_pairs(listed, whole.end, start, QUERY_BLOCK), batch, padded)
    # Query block 5 is the tiles 10 and 11.
    tiles = torch.cat([listed.queries * _TILES + half for half in range(_TILES)])
    again = _Pairs(tiles, listed.granule.repeat(_TILES), listed.is_full.repeat(_TILES))
    key_tiles, key_ranges = _key_lists(_test_pairs(again, whole.end, start, QUERY_TILE), whole)
    return replace(
        whole,
        granules=granules,
        query_offsets=offsets,
        query_partial=partial,
        query_order=longest_first(offsets.diff(dim=1)),
        key_granules=_consecutive(whole),
        key_ranges=key_ranges,
        key_order=longest_first(key_ranges[..., 3] - key_ranges[..., 0]),
        start=start,
        key_tiles=key_tiles,
    )


def _listed_pairs(whole: Schedule) -> _Pairs:
    """Return the pairs of the lists of all query blocks, in their order; `is_full` is not set."""
    sizes = whole.query_offsets.diff(dim=1).flatten().long()
    queries = torch.repeat_interleave(sizes, output_size=len(whole.granules))
    real = whole.granules >= 0
    return _Pairs(queries[real], whole.granules[real].long(), real[real])


def _test_pairs(pairs: _Pairs, end: Tensor, start: Tensor, size: int) -> _Pairs:
    """Return the visible ones of some pairs of granules and query tiles of `size` tokens; see the header."""
    padded = end.shape[1]
    # [B, T_pad] -> one row per tile
    first = start.reshape(-1, size)
    least, most = first.cummin(dim=1).values, first.amax(dim=1)
    low, high = end.view(-1, GRANULE).aminmax(dim=1)
    row, tile = pairs.queries // (padded // size), pairs.queries % (padded // size)
    at = row * (padded // GRANULE) + pairs.granule
    begin, key = tile * size, pairs.granule * GRANULE
    # The queries before the end of the granule's last subtree are the first `inside` ones of the tile.
    inside = (high[at] - begin).clamp(max=size)
    is_visible = (inside > 0) & (key < begin + size)
    is_visible &= key + GRANULE > least[pairs.queries, inside.clamp(min=1) - 1]
    is_full = (key + GRANULE <= begin) & (low[at] >= begin + size) & (key >= most[pairs.queries])
    return _Pairs(pairs.queries[is_visible], pairs.granule[is_visible], is_full[is_visible])


def _query_lists(pairs: _Pairs, batch: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return granules, query_offsets and query_partial of a `Schedule`, from pairs that are ordered by query block."""
    blocks = batch * padded // QUERY_BLOCK
    # The full section has whole groups of 4; up to 3 full granules are computed under the mask.
    # full 1 1 1 0 1 1 in one block -> numbers 1 2 3 3 4 5, of which 4 count
    number = pairs.is_full.cumsum(0)
    before = _offsets(torch.bincount(pairs.queries[pairs.is_full], minlength=blocks))
    is_full = pairs.is_full & (number - before[pairs.queries] <= (before.diff() // 4 * 4)[pairs.queries])
    # Sections in the order partial of block 0, full of block 0, partial of block 1, ...; the sort is stable, so the own
    # granules of a block stay first in its partial section.
    section, order = (pairs.queries * 2 + is_full).sort(stable=True)
    counts = torch.bincount(section, minlength=2 * blocks)
    padded_counts = (counts + 3) // 4 * 4
    places = _offsets(padded_counts)
    rank = torch.arange(len(section), device=section.device) - _offsets(counts)[section]
    granules = torch.full((int(places[-1]),), -1, dtype=torch.int32, device=section.device)
    granules[places[section] + rank] = pairs.granule[order].int()
    per_row = blocks // batch
    begin = places[:-1].view(batch, -1)[:, ::2]  # of the partial sections
    offsets = torch.cat([begin, places[2 * per_row :: 2 * per_row, None]], dim=1).int()
    return granules, offsets, padded_counts.view(batch, per_row, 2)[..., 0].int()


def _key_lists(pairs: _Pairs, whole: Schedule) -> tuple[Tensor, Tensor]:
    """Return key_tiles and key_ranges of a `Schedule`, from pairs of granules and query tiles."""
    batch, padded = whole.end.shape
    tiles, blocks = padded // QUERY_TILE, -(-whole.length // KEY_BLOCK)
    row, tile = pairs.queries // tiles, pairs.queries % tiles
    # Neither keys nor queries of the padding
    real = (pairs.granule * GRANULE < whole.length) & (tile * QUERY_TILE < whole.length)
    block = row * blocks + pairs.granule // _PER_KEY_BLOCK
    # A block and a tile as one number; four granules may give it four times. It is full if all four are.
    joint, index = torch.unique((block * tiles + tile)[real], return_inverse=True)
    num_full = torch.bincount(index[pairs.is_full[real]], minlength=len(joint))
    block, tile, is_full = joint // tiles, joint % tiles, num_full == _PER_KEY_BLOCK
    section, order = (block * 2 + is_full).sort(stable=True)
    counts = torch.bincount(section, minlength=2 * batch * blocks)
    begin, full_begin = _offsets(counts)[:-1].view(-1, 2).unbind(1)
    last = begin + counts.view(-1, 2).sum(1)
    ranges = torch.stack([begin, full_begin, last, last], dim=1).view(batch, blocks, 4)
    return (tile[order] * QUERY_TILE).int(), ranges.int()


def _consecutive(whole: Schedule) -> Tensor:
    """Return key_granules for blocks of consecutive granules: 0 1 2 3 | 4 5 6 -1, the same for every row."""
    count = -(-whole.length // GRANULE)
    numbers = torch.arange(-(-count // _PER_KEY_BLOCK) * _PER_KEY_BLOCK, dtype=torch.int32, device=whole.end.device)
    numbers = torch.where(numbers < count, numbers, -1)
    return numbers.view(1, -1, _PER_KEY_BLOCK).repeat(len(whole.end), 1, 1)


def _offsets(counts: Tensor) -> Tensor:
    # [4 8 4] -> [0 4 12 16]
    return pad(counts.cumsum(0), (1, 0))
