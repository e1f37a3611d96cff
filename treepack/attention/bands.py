"""Work of a backward that multiplies five times: key blocks cut at bands of queries, and tiles of score gradients.

    Schedule --with_bands--> Schedule with `bands`: pieces of key blocks, and the tiles that each query block multiplies

The gradient of the scores, dS, is needed twice: dk = dS' Q, and dq = dS K. Programs for key blocks compute dk and dv
and store each tile of dS (128 gathered keys x 64 queries) in global memory. Programs for query blocks read the tiles of
a block and multiply them by their keys. Memory for the tiles of a whole row would be many gigabytes, so queries are cut
into bands, which pass through the same memory one after another. A piece is the part of a key block whose queries are
in one band. Its tiles are next to each other in memory, from its place on. Place 0 is a tile of zeros.

One chain of 512 tokens has 4 query blocks and 4 key blocks. In bands of 2 query blocks, which are 4 query tiles:

              query tiles                pieces of band 0     places      pieces of band 1     places
    block 0   0 1 2 3 | 4 5 6 7          block 0, 0 1 2 3     1 2 3 4     block 0, 4 5 6 7     1 2 3 4
    block 1       2 3 | 4 5 6 7          block 1, 2 3         5 6         block 1, 4 5 6 7     5 6 7 8
    block 2           | 4 5 6 7                                           block 2, 4 5 6 7     9 10 11 12
    block 3           |     6 7                                           block 3, 6 7         13 14

    query block 1, tiles 2 3, reads places 3 4 of block 0, and 5 6 of block 1

Sums have one order, so two runs agree in every bit: a program adds up dk and dv of a piece, starting from the sums of
the block's piece in the band before, and dq of a query block adds its key blocks in the order of the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.attention.schedule import QUERY_BLOCK, QUERY_TILE, Bands, Schedule
from treepack.errors import TreepackError

TILES_PER_BLOCK = QUERY_BLOCK // QUERY_TILE

# Limits of a band: query blocks, and tiles of one head, 16 KB each. With 4 query heads per key head, the tiles of one
# key head fill at most 1 GiB.
BAND_BLOCKS = 16
BAND_TILES = 16_384
# In shorter bands, reading and writing sums of dk and dv costs more than two products save.
MIN_BAND_BLOCKS = 4


@torch.no_grad()
def with_bands(schedule: Schedule, *, blocks: int = BAND_BLOCKS, tiles: int = BAND_TILES) -> Schedule:
    """Return the schedule with `bands`, on the same device; a GPU is synchronised twice.

    The schedule is returned without bands if so many keys are visible that bands would be too short to be of use.

    Args:
        schedule: of rows without windows.
        blocks: query blocks of a band, at most; at least 1.
        tiles: tiles of a band and head, at most; bands are shortened by halves until they fit.

    Raises:
        TreepackError: if the schedule has windows, or `blocks` is below 1.
    """
    if schedule.start is not None:
        raise TreepackError("attention: stored score gradients have no windows and chunks; use the schedule as it is")
    if blocks < 1:
        raise TreepackError(f"attention: a band has {blocks} query blocks; expected at least 1")
    batch, num_blocks, _ = schedule.key_granules.shape
    per_row = TILES_PER_BLOCK * schedule.query_order.shape[1]
    # [B * nk], in query tiles over all rows; rows of 6 tiles, first query 128: tokens 128 ... 256 of row 1 -> 6 ... 8
    row = torch.arange(batch, device=schedule.end.device).repeat_interleave(num_blocks)
    # Blocks without granules, which fill up rows with fewer blocks, have ranges of zeros.
    ranges = (schedule.key_ranges.flatten(0, 1)[:, [0, 3]].long() - schedule.first).clamp(min=0) // QUERY_TILE
    begin, end = (ranges + (row * per_row)[:, None]).unbind(1)
    band = _band_blocks(begin, end, batch * per_row, blocks, tiles)
    if band < min(MIN_BAND_BLOCKS, blocks):
        return schedule
    pieces, at = _cut(schedule, row, begin, end, TILES_PER_BLOCK * band)
    num_bands = -(-batch * per_row // (TILES_PER_BLOCK * band))
    lengths = pieces.end - pieces.begin
    # Exclusive sums within a band: bands 0 0 1 1, lengths 4 2 4 4 -> places 1 5 1 5
    before = lengths.cumsum(0) - lengths
    opening = torch.searchsorted(at, at)
    places = before - before[opening] + 1
    counts = torch.zeros(2, num_bands, dtype=torch.int64, device=at.device)
    counts.scatter_add_(1, at.expand(2, -1), torch.stack([torch.ones_like(at), lengths]))
    entries, offsets = _entries(pieces, places, at, band, batch * per_row // TILES_PER_BLOCK, num_blocks)
    *sizes, most_sums = torch.cat([counts.flatten(), pieces.columns[:, 8].amax()[None]]).tolist()
    num_pieces, num_tiles = sizes[:num_bands], sizes[num_bands:]
    bands = Bands(
        pieces=torch.cat([pieces.columns, places[:, None]], dim=1).int(),
        entries=entries.int(),
        entry_offsets=offsets.int(),
        table=torch.stack([counts[0].cumsum(0) - counts[0], *counts], dim=1).int(),
        num_pieces=tuple(num_pieces),
        num_places=tuple(number + 1 for number in num_tiles),
        num_sums=most_sums + 1,
        blocks=band,
    )
    return replace(schedule, bands=bands)


def _band_blocks(begin: Tensor, end: Tensor, num_tiles: int, blocks: int, tiles: int) -> int:
    """Return the query blocks of a band: `blocks`, halved until the tiles of every band fit into `tiles`."""
    # Key blocks that each query tile sees: ranges 0 ... 2 and 1 ... 2 -> steps 1 1 -2 -> 1 2
    steps = torch.zeros(num_tiles + 1, dtype=torch.int64, device=begin.device)
    ones = torch.ones_like(begin)
    steps.scatter_add_(0, begin, ones).scatter_add_(0, end, -ones)
    most = int(steps.cumsum(0).amax())
    while blocks > 1 and TILES_PER_BLOCK * blocks * most > tiles:
        blocks //= 2
    return blocks


@dataclass(frozen=True)
class _Pieces:
    """Pieces in the order of `Bands.pieces`; `begin` and `end` in query tiles over all rows, `columns` without places.

    `begin`, `end` and `block` (row * nk + key block) are [n], `columns` is [n, 9].
    """

    begin: Tensor
    end: Tensor
    block: Tensor
    columns: Tensor


def _cut(schedule: Schedule, row: Tensor, begin: Tensor, end: Tensor, band: int) -> tuple[_Pieces, Tensor]:
    """Cut key blocks at bands of `band` query tiles; return the pieces, and the band of each, [n]."""
    granules = schedule.key_granules.flatten(0, 1)
    first_band = begin // band
    # begin 2, end 8, band 4 -> bands 0 1, 2 pieces; an empty range has 1 piece, which stores zeros
    counts = ((end - 1).maximum(begin) // band - first_band + 1) * (granules[:, 0] >= 0)
    whole = torch.repeat_interleave(torch.arange(len(row), device=row.device), counts)
    # counts 2 1 -> whole 0 0 1, within 0 1 0
    within = torch.arange(len(whole), device=row.device) - (counts.cumsum(0) - counts)[whole]
    # An empty range after the last tile belongs to the last band.
    at = (first_band[whole] + within).clamp(max=(schedule.query_order.numel() * TILES_PER_BLOCK - 1) // band)
    first, last = begin[whole].maximum(at * band), end[whole].minimum((at + 1) * band)
    # The longest piece of a band first; equal ones keep the order of blocks.
    order = (at * (band + 1) + band - (last - first)).argsort(stable=True)
    whole, within, at, first, last = (x[order] for x in (whole, within, at, first, last))
    # Back to tokens of the row
    shift = schedule.first - row[whole] * (QUERY_TILE * TILES_PER_BLOCK * schedule.query_order.shape[1])
    # Blocks with several pieces have places for sums: counts 1 3 2 -> sums 0 0 1
    sums = ((counts > 1).cumsum(0) - (counts > 1).long())[whole]
    full_begin, full_end = schedule.key_ranges.flatten(0, 1)[whole][:, 1:3].long().unbind(1)
    # Where a granule is missing, every tile is masked: it would be multiplied by the keys of granule 0.
    full_end = torch.where(granules[whole, -1] >= 0, full_end, full_begin)
    tokens = [first * QUERY_TILE + shift, last * QUERY_TILE + shift]
    blocks = whole % schedule.key_order.shape[1]
    later = counts[whole] - 1 - within
    columns = torch.stack([row[whole], blocks, *tokens, full_begin, full_end, within, later, sums], dim=1)
    return _Pieces(first, last, whole, columns), at


def _entries(
    pieces: _Pieces, places: Tensor, at: Tensor, band: int, num_blocks: int, num_key_blocks: int
) -> tuple[Tensor, Tensor]:
    """Return `entries` and `entry_offsets` of `Bands`; `places` and `at` are the first place and the band of pieces."""
    # [n, band], the query blocks of the band of each piece that see it
    block = at[:, None] * band + torch.arange(band, device=at.device)
    seen = (pieces.begin[:, None] < (block + 1) * TILES_PER_BLOCK) & (block * TILES_PER_BLOCK < pieces.end[:, None])
    # Earlier pieces of the same band at the same query block: seen [1 0] [1 1] [0 1] -> ranks [0 0] [1 0] [2 1]
    ranks = seen.cumsum(0) - seen.long()
    ranks -= ranks[torch.searchsorted(at, at)]
    which, column = seen.nonzero(as_tuple=True)
    block = block[which, column]
    sizes = torch.zeros(num_blocks, dtype=torch.int64, device=at.device).scatter_add_(0, block, torch.ones_like(block))
    # sizes 1 2 -> offsets 0 1 3
    offsets = pad(sizes.cumsum(0), (1, 0))
    result = offsets.new_zeros(len(which), 4)
    # Two query tiles of each entry, [m, 2]
    tile = block[:, None] * TILES_PER_BLOCK + torch.arange(TILES_PER_BLOCK, device=at.device)
    begin, end = pieces.begin[which, None], pieces.end[which, None]
    place = torch.where((begin <= tile) & (tile < end), places[which, None] + tile - begin, 0)
    values = torch.cat([pieces.block[which, None], place, torch.zeros_like(pieces.block)[which, None]], dim=1)
    return result.index_copy_(0, offsets[block] + ranks[which, column], values), offsets
