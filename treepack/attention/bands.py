"""Work of a backward in one pass: key blocks cut at bands of query tiles, and the order in which programs add to dq.

    Schedule --with_bands--> Schedule with `pieces` of key blocks in launch order, and the `turns` of each piece

One program takes a piece: the keys of one key block, and the query tiles of one band that see some of them. It adds to
dq of its query tiles, and to dk and dv of its keys. Floating-point sums depend on their order, so both have one:

- At a query tile, pieces add in launch order. Turn 0 stores instead of adding.
- At a key block, the piece of the first band is first, and stores instead of adding.

One chain of 512 tokens has 8 query tiles and 4 key blocks. In bands of 4 tiles:

              query tiles               pieces in launch order       turns at their tiles
    block 0   0 1 2 3 | 4 5 6 7         block 1, tiles 2 3           0 0
    block 1       2 3 | 4 5 6 7         block 0, tiles 0 1 2 3       0 0 1 1
    block 2           | 4 5 6 7         block 3, tiles 6 7           0 0
    block 3           |     6 7         block 0, tiles 4 5 6 7       0 0 1 1
                                        block 1, tiles 4 5 6 7       1 1 2 2
                                        block 2, tiles 4 5 6 7       2 2 3 3

A program visits its tiles from the last one back. It waits only for programs before it in launch order, which is also
the order in which programs start, so the earliest unfinished program never waits: nothing deadlocks, with any number of
programs at a time. Waits are rare for two reasons. In a band, the pieces with the fewest tiles come first, and finish
soon. The first piece of a key block is its shortest one, so the next one does not wait for it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from treepack.attention.schedule import QUERY_TILE, Schedule
from treepack.errors import TreepackError

# Query tiles. In a model of 132 programs, with 2.4 us a step and 1.5 us an addition, the row of an agent (32,239
# tokens) takes 1.06 times as long as its steps alone, with 32 tiles as with 64, and 1.3 times if blocks are not cut.
BAND = 64


@torch.no_grad()
def with_bands(schedule: Schedule, *, band: int = BAND) -> Schedule:
    """Return the schedule with the work of a backward in one pass, on the same device; a GPU is synchronised once.

    pieces   int32 [n, 5]      row, key block, first and last query token (multiples of 64; equal if no query sees the
                               block), and the number of pieces of this block that add to dk and dv before
    turns    int32 [n, band]   number of pieces that add to dq before, for each query tile of the piece's band; tile i
                               has the place i % band. Places outside the piece have no meaning.

    Args:
        schedule: of rows without windows.
        band: query tiles of a band, at least 1.

    Raises:
        TreepackError: if the schedule has windows, or `band` is below 1.
    """
    if schedule.start is not None:
        raise TreepackError("attention: the backward in one pass has no windows and chunks; use the one in two passes")
    if band < 1:
        raise TreepackError(f"attention: band is {band}; expected at least 1 query tile")
    row, block, at, begin, end, piece = _cut(schedule, band)
    batch = len(schedule.end)
    # First band first, rows side by side, then the pieces with the fewest tiles; equal ones keep the order of blocks.
    group = at * batch + row
    order = (group * (band + 1) + end - begin).argsort(stable=True)
    pieces = torch.stack([row, block, begin * QUERY_TILE, end * QUERY_TILE, piece], dim=1)[order]
    begin, end, at, group = begin[order], end[order], at[order], group[order]

    # [n, band]; seen [1 0] [1 1] [0 1] in one group -> before [0 0] [1 0] [2 1]
    place = at[:, None] * band + torch.arange(band, device=at.device)
    seen = (begin[:, None] <= place) & (place < end[:, None])
    before = seen.cumsum(0) - seen.long()
    # [n], the first piece of each group: groups 0 0 0 2 2 -> 0 0 0 3 3
    opening = torch.searchsorted(group, group)
    return replace(schedule, pieces=pieces.int(), turns=(before - before[opening]).int())


def _cut(schedule: Schedule, band: int) -> Tensor:
    """Cut key blocks at bands; return row, block, band, first and last query tile, and number of each piece, [6, n]."""
    batch, blocks, _ = schedule.key_granules.shape
    # [B * blocks], in query tiles; a row with fewer blocks than others ends with blocks without granules
    ranges = schedule.key_ranges.flatten(0, 1).long() // QUERY_TILE
    first, last = ranges[:, 0], ranges[:, 3]
    first_band = first // band
    # first 2, last 8, band 4 -> bands 0 1, 2 pieces; an empty range has 1 piece, which stores zeros
    counts = ((last - 1).maximum(first) // band - first_band + 1) * (schedule.key_granules.flatten(0, 1)[:, 0] >= 0)
    whole = torch.repeat_interleave(torch.arange(batch * blocks, device=ranges.device), counts)
    # counts 2 1 -> whole 0 0 1, within 0 1 0
    within = torch.arange(len(whole), device=ranges.device) - (counts.cumsum(0) - counts)[whole]
    at = first_band[whole] + within
    begin, end = first[whole].maximum(at * band), last[whole].minimum((at + 1) * band)
    return torch.stack([whole // blocks, whole % blocks, at, begin, end, within])
