"""Schedules of layers with windows or chunks: the lists of the whole row, without the granules before all windows.

A query block or tile [t0, t1) sees a granule of keys [k0, k1) with subtree ends low ... high, if

    high > t0                                                     some key is an ancestor of some query, and
    k1 - 1 >= the smallest start of the queries t0 ... high - 1   its last key is inside the window of one of them

Subtrees nest, so the queries that have the granule among their ancestors come first in the tile. The second line leaves
out the queries after them, which may belong to a branch whose window starts much earlier. The tile is full, and needs
no mask, if all ends are past it (low >= t1) and all windows start at the granule or before it (k0 >= the largest
start).

In a rectangle, query blocks and tiles are numbered from token `first` on.

For dk and dv, key blocks are 4 consecutive granules, because about the same queries see neighbouring granules. Each
block gets a list of query tiles of 64: those under a mask, then the full ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.attention.schedule import GRANULE, KEY_BLOCK, QUERY_BLOCK, QUERY_TILE, Schedule, longest_first

_PER_KEY_BLOCK = KEY_BLOCK // GRANULE
_PER_QUERY_BLOCK = QUERY_BLOCK // GRANULE
_TILES = QUERY_BLOCK // QUERY_TILE  # query tiles of a query block


def narrow(whole: Schedule, start: Tensor) -> Schedule:
    """Return the schedule in which token q sees nothing before start[q], int [B, T], on the device of `whole`."""
    # The tokens that pad the row see only themselves: T = 300 -> start 300, 301, ... 383
    batch, padded = whole.end.shape
    tail = torch.arange(whole.length, padded, dtype=torch.int32, device=whole.end.device)
    start = torch.cat([start.to(torch.int32).to(whole.end.device), tail.expand(batch, -1)], dim=1)
    of_queries = start[:, whole.first :].contiguous()
    queries, granule = _listed_pairs(whole, of_queries)
    is_visible, is_full = _test_pairs(queries, granule, whole.end, of_queries, QUERY_BLOCK)
    queries, granule = queries[is_visible], granule[is_visible]
    granules, offsets, partial = _query_lists(queries, granule, is_full[is_visible], batch, of_queries.shape[1])
    key_tiles, key_ranges = _key_lists(queries, granule, whole, of_queries)
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
        shares=None,
    )


def _listed_pairs(whole: Schedule, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return query blocks, counted over all rows, and granules, both int64 [n]: all visible pairs and some others.

    They are in the order of the lists. A full section has its granules in ascending order, so the granules inside the
    window of some query are its last ones. A binary search finds the first of them; the others, most of the list of a
    long path, are never read.
    """
    begin, last = whole.query_offsets[:, :-1].flatten().long(), whole.query_offsets[:, 1:].flatten().long()
    middle = begin + whole.query_partial.flatten()
    # The granule of the smallest start: windows that start at 70 ... 197 -> granule 2
    lowest = start.view(-1, QUERY_BLOCK).amin(dim=1) // GRANULE
    low, high = middle, last
    for _ in range(int((last - middle).max()).bit_length()):
        # [B nq]; after the end of a search, low = high and both stay
        probe = (low + high) // 2
        is_before = (low < high) & (whole.granules[probe.clamp(max=len(whole.granules) - 1)] < lowest)
        low, high = torch.where(is_before, probe + 1, low), torch.where(is_before, high, probe)
    # partial section 8 9 10 11 | full section 12 ... 19, first visible one 17 -> places 8 9 10 11 17 18 19
    num_partial = middle - begin
    sizes = num_partial + last - low
    total = int(sizes.sum())
    queries = torch.repeat_interleave(sizes, output_size=total)
    rank = torch.arange(total, device=begin.device) - _offsets(sizes)[queries]
    places = rank + torch.where(rank < num_partial[queries], begin[queries], (low - num_partial)[queries])
    granule = whole.granules[places].long()
    real = granule >= 0
    return queries[real], granule[real]


def _test_pairs(queries: Tensor, granule: Tensor, end: Tensor, start: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return two masks of query tiles and granules: some of their pairs are visible, and all of them are.

    Args:
        queries: numbers of query tiles, counted over all rows.
        granule: numbers of granules in their row; the two shapes broadcast.
        end: [B, T_pad].
        start: [B, T_pad - first], of the queries.
        size: tokens of a query tile.

    Returns:
        two bool tensors of the broadcast shape.
    """
    padded, span = end.shape[1], start.shape[1]
    # [B, T_pad - first] -> one row per tile
    of_tile = start.view(-1, size)
    # starts 5 7 3 9 -> smallest up to each query 5 5 3 3, largest 9
    smallest, largest = of_tile.cummin(dim=1).values.flatten(), of_tile.amax(dim=1)
    low, high = end.view(-1, GRANULE).aminmax(dim=1)
    row, tile = queries // (span // size), queries % (span // size)
    at = row * (padded // GRANULE) + granule
    # T_pad 512 and 384 queries: tile 1 of 64 begins at token 192
    begin, key = padded - span + tile * size, granule * GRANULE
    # The queries before the end of the granule's last subtree are the first `inside` ones of the tile.
    inside = (high[at] - begin).clamp(max=size)
    is_visible = (inside > 0) & (key < begin + size)
    is_visible &= key + GRANULE > smallest[queries * size + inside.clamp(min=1) - 1]
    is_full = (key + GRANULE <= begin) & (low[at] >= begin + size) & (key >= largest[queries])
    return is_visible, is_full


def _sections(owner: Tensor, is_full: Tensor, owners: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Place entries in two sections of each owner: its partial ones and its full ones, each in the given order.

    Args:
        owner: [n], ascending numbers below `owners`.
        is_full: bool [n].
        owners: number of owners.
        multiple: the length of each section is rounded up to a multiple of this number.

    Returns:
        the place of each entry, [n], and the place where each section begins, [2 owners + 1].
    """
    # owner 0 0 0 1, is_full 1 0 1 0, multiple 1 -> section 1 0 1 2, counts 1 2 1 0, begin 0 1 3 4 4
    section = owner * 2 + is_full
    counts = torch.bincount(section, minlength=2 * owners)
    begin = _offsets((counts + (multiple - 1)) // multiple * multiple)
    # The number of earlier entries of the same kind, 0 0 1 1, minus entries of earlier owners, 0 0 0 1 -> rank 0 0 1 0
    by_kind = counts.view(-1, 2)
    earlier = (by_kind.cumsum(0) - by_kind).flatten()
    num_full = is_full.cumsum(0) - is_full.long()
    rank = torch.where(is_full, num_full, torch.arange(len(owner), device=owner.device) - num_full) - earlier[section]
    return begin[section] + rank, begin


def _query_lists(
    queries: Tensor, granule: Tensor, is_full: Tensor, batch: int, span: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return granules, query_offsets and query_partial of a `Schedule`, from visible pairs in the order of queries.

    `span` is the number of queries of a row with its padding.
    """
    blocks = batch * span // QUERY_BLOCK
    # The full section has whole groups of 4; up to 3 full granules are computed under the mask.
    # full 1 1 1 0 1 1 in one block -> numbers 1 2 3 3 4 5, of which 4 count
    number = is_full.cumsum(0)
    before = _offsets(torch.bincount(queries[is_full], minlength=blocks))
    is_full = is_full & (number - before[queries] <= (before.diff() // 4 * 4)[queries])
    # Sections keep their order, so the own granules of a block stay first in its partial section.
    places, begin = _sections(queries, is_full, blocks, 4)
    granules = torch.full((int(begin[-1]),), -1, dtype=torch.int32, device=queries.device)
    granules[places] = granule.int()
    per_row = blocks // batch
    offsets = torch.cat([begin[:-1].view(batch, -1)[:, ::2], begin[2 * per_row :: 2 * per_row, None]], dim=1).int()
    return granules, offsets, begin.diff().view(batch, per_row, 2)[..., 0].int()


def _key_lists(queries: Tensor, granule: Tensor, whole: Schedule, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return key_tiles and key_ranges of a `Schedule`, from the visible pairs of query blocks and granules."""
    batch, span = start.shape
    tiles, blocks = span // QUERY_TILE, -(-whole.length // KEY_BLOCK)
    per_row = span // QUERY_BLOCK
    # A key block and a query block as one number. Most granules of a key block follow one another in the lists, so that
    # few of the numbers have to be sorted: 7 7 7 7 9 9 9 7 -> 7 9 7 -> 7 9
    joint = (queries // per_row * blocks + granule // _PER_KEY_BLOCK) * per_row + queries % per_row
    joint = torch.unique(torch.unique_consecutive(joint[granule < blocks * _PER_KEY_BLOCK]))
    # Query block 5 is the tiles 10 and 11, which see nothing that the block does not see: [n] -> [2 n]
    block = (joint // per_row).repeat_interleave(_TILES)
    tile = ((joint % per_row)[:, None] * _TILES + torch.arange(_TILES, device=joint.device)).flatten()
    # [2 n, 4], the granules of the key blocks; neither keys nor queries of the padding
    number = (block % blocks)[:, None] * _PER_KEY_BLOCK + torch.arange(_PER_KEY_BLOCK, device=block.device)
    is_visible, is_full = _test_pairs((block // blocks * tiles + tile)[:, None], number, whole.end, start, QUERY_TILE)
    token = whole.first + tile * QUERY_TILE
    is_visible = (is_visible & (number * GRANULE < whole.length)).any(1) & (token < whole.length)
    block, token, is_full = block[is_visible], token[is_visible], is_full.all(1)[is_visible]
    places, begin = _sections(block, is_full, batch * blocks, 1)
    key_tiles = torch.empty(len(token), dtype=torch.int32, device=token.device)
    key_tiles[places] = token.int()
    first, full_begin, last = begin[:-1:2], begin[1::2], begin[2::2]
    return key_tiles, torch.stack([first, full_begin, last, last], dim=1).view(batch, blocks, 4).int()


def _consecutive(whole: Schedule) -> Tensor:
    """Return key_granules for blocks of consecutive granules: 0 1 2 3 | 4 5 6 -1, the same for every row."""
    count = -(-whole.length // GRANULE)
    numbers = torch.arange(-(-count // _PER_KEY_BLOCK) * _PER_KEY_BLOCK, dtype=torch.int32, device=whole.end.device)
    numbers = torch.where(numbers < count, numbers, -1)
    return numbers.view(1, -1, _PER_KEY_BLOCK).repeat(len(whole.end), 1, 1)


def _offsets(counts: Tensor) -> Tensor:
    # [4 8 4] -> [0 4 12 16]
    return pad(counts.cumsum(0), (1, 0))
