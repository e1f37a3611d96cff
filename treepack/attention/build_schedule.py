"""Tiles of work for the attention kernels, one schedule per row: O(entries) integers, made once and used by all layers.

Queries form blocks of 128 tokens and keys form granules of 32, because the visible keys of a query block are its
ancestors, which are scattered over the row. A key tile of a kernel gathers any 1, 2 or 4 granules. Let `low` and `high`
be the smallest and the largest subtree_end in a granule. Below the diagonal, the query block that starts at token q0
sees the granule as

    high <= q0          not visible: no pair is, so it is not listed
    low >= q0 + 128     full: every pair is visible, computed without a mask
    else                partial: some pairs may be visible, computed under the mask

           granules
    block  0 1 2 3  4 5 6 7  8 9 ...      in the list of block 2, each section a multiple of 4 long:
      0    d d d d                        partial  8 9 10 11 | 5 -1 0 1      the diagonal first, -1: none
      1    f f f f  d d d d               full     2 3 4 6                   (0 and 1: 6 is not a multiple of 4)
      2    f f f f  f p f .  d d d d

This row has 384 tokens: subtree_end = [384] * 176 + [192] * 16 + [384] * 32 + [256] * 32 + [384] * 128. The worked
vectors below refer to it.

For dk and dv, granules whose last visible query is about the same form key blocks of 4. Each key block has one range of
queries:

    first ... full_begin ... full_end ... last        masked, not masked, masked

With windows or chunks (`reach`), the queries that see a key block are not a range: they are parts of its branches. Then
`narrow` makes the same lists shorter, and gives each key block a list of query tiles.

A rectangle has queries from token `first` on, a multiple of 128, and keys from token 0 on. Its schedule has the lists
of the query blocks from `first` on, as the square has them, and the ranges of all key blocks, cut off before `first`.

In: subtree_end int [B, T] on any device. Out: a `Schedule` on that device. Nothing here has size T x T, and no Python
loop runs over tokens, blocks or granules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.attention.key_shares import count_shares, key_shares
from treepack.attention.narrow import narrow
from treepack.attention.schedule import GRANULE, KEY_BLOCK, QUERY_BLOCK, QUERY_TILE, Schedule, longest_first
from treepack.errors import TreepackError

# Granules that straddle nodes get key blocks of their own if at least this many (4 blocks of them) end together.
_MIN_STRADDLING = 16

_PER_KEY_BLOCK = KEY_BLOCK // GRANULE
_PER_QUERY_BLOCK = QUERY_BLOCK // GRANULE


@torch.no_grad()
def build_schedule(subtree_end: Tensor, start: Tensor | None = None, *, first: int = 0) -> Schedule:
    """Return the schedule of B rows, on the device of `subtree_end`; a GPU is synchronised once, or more with `start`.

    Args:
        subtree_end: int [B, T], T >= 1; one past the last token of each token's subtree. Subtrees nest.
        start: int [B, T], the first token that each token sees, from `reach.first_visible`.
        first: the token of the first query, a multiple of 128 below T.

    Raises:
        TreepackError: if `first` is another number.
    """
    if first % QUERY_BLOCK or not 0 <= first < subtree_end.shape[-1]:
        raise TreepackError(
            f"attention: the schedule of {subtree_end.shape[-1]} tokens begins at query {first}; "
            f"pass a multiple of {QUERY_BLOCK} below the number of tokens"
        )
    # T = 300 -> 84 more tokens, with subtree_end 301, 302, ... 384
    length = subtree_end.shape[-1]
    tail = torch.arange(length + 1, length + 1 + -length % QUERY_BLOCK, dtype=torch.int32, device=subtree_end.device)
    end = torch.cat([subtree_end.to(torch.int32), tail.expand(len(subtree_end), -1)], dim=1)
    extremes = torch.stack(end.view(len(end), -1, GRANULE).aminmax(dim=-1)).long()
    lists = _plan_lists(extremes, first // QUERY_BLOCK)
    granules, ranges, max_blocks = _key_blocks(extremes, length, first // QUERY_TILE)
    counts = count_shares(granules, ranges)
    divided = counts > 1
    shared = torch.stack([counts.sum(), divided.sum(), (counts * divided).sum()])
    # The only wait for the device: every size that depends on the data, in one transfer.
    sizes = torch.cat([lists.totals, lists.offsets[-1:, -1], max_blocks, shared]).tolist()
    *totals, num_entries, num_blocks, num_shares, num_joined, num_sums = sizes
    ranges = ranges[:, :num_blocks].int()
    counts = counts[:, :num_blocks]
    whole = Schedule(
        length=length,
        end=end,
        granules=_list_entries(lists, totals, num_entries),
        query_offsets=lists.offsets,
        query_partial=lists.partial,
        query_order=longest_first(lists.offsets.diff(dim=1)),
        key_granules=granules[:, :num_blocks].int(),
        key_ranges=ranges,
        key_order=longest_first(ranges[..., 3] - ranges[..., 0]),
        first=first,
        shares=key_shares(ranges, counts, num_shares=num_shares, num_joined=num_joined, num_sums=num_sums),
    )
    return whole if start is None else narrow(whole, start)


# Kinds of listings, in their order: see `_ListPlan`.
_OWN, _OUTLIVING, _ENDING, _RUN_BEGIN, _RUN_END, _RUN_AT_DIAGONAL = range(6)


@dataclass(frozen=True)
class _ListPlan:
    """Plan of the lists of all query blocks; blocks are numbered over all rows.

    The list of query block b by its definition, with the ends of the tokens of each granule g:

        own     = the granules of b
        visible = [g for g before own if max(ends of g) > b * QUERY_BLOCK]
        full    = [g for g in visible if min(ends of g) >= (b + 1) * QUERY_BLOCK]      none of its tokens ends in b
        list    = own + [g for g in visible if g not in full] + padding + full         a multiple of 4 entries

    A listing is one granule in the lists of consecutive query blocks. In each of these lists it has the same rank,
    which counts from the start of its section. There are six kinds of listings. Three are partial: the block's own
    granule (_OWN), a granule that outlives the block (_OUTLIVING), and one that ends in it (_ENDING). The other three
    mark runs of full neighbours: the first granule of a run, the last one, and the last one before the diagonal
    (_RUN_BEGIN, _RUN_END, _RUN_AT_DIAGONAL).

    offsets   [B, nq + 1]   as in `Schedule`
    partial   [B, nq]       as in `Schedule`
    sections  [2 B nq]      entry of each block's first partial granule, then of each block's first full granule
    listings  [3, n]        granule, rank, and (index in `sections` of its first block) - (number of earlier entries)
    counts    [n]           query blocks of each listing
    totals    [6]           entries of the listings up to the end of each kind
    """

    offsets: Tensor
    partial: Tensor
    sections: Tensor
    listings: Tensor
    counts: Tensor
    totals: Tensor


def _granule_stages(extremes: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the query blocks at which the stages of each granule begin, masked, ending and over [B, granules].

    For later query blocks (from `past` on), a granule passes through three stages: it is full, then it is partial and
    outlives the block (from `masked` on), then it ends in a block (`ending` up to `over`).
    """
    # Vectors of the picture's row, granules 0 ... 11 or blocks 0 ... 2. Granule 5 holds ends of 192 and 384.
    # past [1 1 1 1 2 2 2 2 3 3 3 3], masked [3 3 3 3 3 2 3 2 3 3 3 3], ending and over [3 3 3 3 3 3 3 2 3 3 3 3];
    # 3 is after the last block.
    masked, ending = (extremes // QUERY_BLOCK).maximum(past)
    over = ((extremes[1] + (QUERY_BLOCK - 1)) // QUERY_BLOCK).maximum(past)
    return masked, ending, over


def _granule_ranks(
    extremes: Tensor, past: Tensor, stages: tuple[Tensor, Tensor, Tensor], number: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ranks of granules in the lists, and the granules that are full and visible to each query block.

    Because subtrees nest, every earlier granule that is still visible at a granule stays visible as long as this one
    does; if none of its tokens has ended, it stays full. The rank of a granule is therefore the same in all blocks of a
    stage, and nothing is sorted.

    Returns:
        the rank in a full section [B, granules], the number of earlier granules of which no token has ended; the rank
        in a partial section [2, B, granules], outliving and ending, the number of earlier visible granules, minus the
        full ones at the first block of the stage; and the granules before each block that are full to it, and visible
        to it, [B, blocks + 1] each.
    """
    masked, ending, over = stages
    batch, count = past.shape
    # passed[0, g] granules have a token that ends by granule g, passed[1, g] have only such tokens:
    # [0 0 0 0 0 0 1 1 2 2 2 2] and [0 0 0 0 0 0 0 0 1 1 1 1]; passed[2:] count the same for block b.
    events = torch.cat([extremes // GRANULE, masked[None], over[None]])
    passed = events.new_zeros(4, batch, count + 1).scatter_add_(2, events, torch.ones_like(events))
    passed = passed.cumsum(2, dtype=torch.int32)
    full, visible = number - passed[:2, :, :-1]

    # Of the granules before each block, the full ones [0 4 6] and the visible ones [0 4 7].
    born = torch.arange(0, count + 1, _PER_QUERY_BLOCK, dtype=torch.int32, device=number.device)
    num_full, num_visible = born - passed[2:, :, : len(born)]
    full_before = num_full.expand(2, -1, -1).gather(2, torch.stack([masked, ending]))
    up_to = (masked > past).cumsum(1, dtype=torch.int32).view(batch, -1, _PER_QUERY_BLOCK)
    # Among the granules full to that block, only granules of the same query block can follow this one: not counted.
    # Granule 5: num_full 6, less granule 6 -> 5; rank = 5 visible before it + 4 on the diagonal - 5 full = 4.
    full_before[0].sub_((up_to[..., -1:] - up_to).view_as(past) * (masked == past))
    return full, visible + _PER_QUERY_BLOCK - full_before, num_full, num_visible


def _plan_lists(extremes: Tensor, first_block: int) -> _ListPlan:
    """Plan the lists of the query blocks from `first_block` on.

    `extremes` [2, B, granules] has the smallest and the largest subtree_end of each granule.
    """
    _, batch, count = extremes.shape
    number = torch.arange(count + 1, device=extremes.device)
    # The first block after a granule's own, and after that of the next granule: [1 1 1 1 2 ...] and [1 1 1 2 2 ...]
    past = (number // _PER_QUERY_BLOCK + 1).expand(batch, -1)
    number, past, past_next = number[:-1], past[:, :-1], past[:, 1:]
    stages = _granule_stages(extremes, past)
    masked, ending, over = stages
    rank_full, rank_partial, num_full, num_visible = _granule_ranks(extremes, past, stages, number)
    num_full, num_visible = num_full[:, first_block:-1], num_visible[:, first_block:-1]
    # visible [0 4 7], full [0 4 6] -> sizes [4 8 12], partial [4 4 8], offsets [0 4 12 24]
    sizes = (num_visible + (_PER_QUERY_BLOCK + 3)) // 4 * 4
    partial = sizes - num_full // 4 * 4
    ends = sizes.flatten().cumsum(0, dtype=torch.int32).view_as(sizes)
    offsets = torch.cat([ends[:, :1] - sizes[:, :1], ends], dim=1)

    # By kind, a granule is listed in the blocks first <= b < last. A run of full granules begins at g if g - 1 is
    # masked in that block, and ends at g if g + 1 is masked or on the diagonal.
    around = torch.cat([past[:, :1], masked, past[:, -1:]], dim=1)
    first = torch.stack([past - 1, masked, ending, past.maximum(around[:, :-2]), around[:, 2:], past])
    last = torch.stack([past, ending, over, masked, masked, masked.minimum(past_next)])
    # Ranks do not depend on the block, so without the first blocks a granule has the same ranks in the other lists.
    # From block 1 on: first [0 1], last [1 3] -> first [1 1], last [1 3] -> first [0 0], last [0 2]
    first, last = first.clamp_(min=first_block).sub_(first_block), last.sub_(first_block)
    counts = (last - first).clamp_(min=0).flatten()
    steps = counts.cumsum(0)
    # counts [1 0 2] -> steps [1 1 3]; entries are numbered 0 | 1 2, and base + number is the index of the block
    sections = torch.arange(0, 2 * ends.numel(), sizes.shape[1], device=number.device).view(2, 1, batch, 1)
    base = (first.flatten() - steps + counts).view(2, 3, batch, count) + sections
    # Own granules come first in the partial section: [0 1 2 3 0 1 2 3 0 1 2 3]
    rank_own = (number % _PER_QUERY_BLOCK).expand(1, batch, -1)
    rank = torch.cat([rank_own, rank_partial, rank_full.expand(3, -1, -1)])
    return _ListPlan(
        offsets=offsets,
        partial=partial,
        sections=torch.cat([offsets[:, :-1].flatten(), (ends - num_full).flatten()]),
        listings=torch.stack([number.expand_as(rank), rank, base.view_as(rank)]).flatten(1),
        counts=counts,
        totals=steps.view(6, -1)[:, -1],
    )


def _list_entries(lists: _ListPlan, totals: list[int], num_entries: int) -> Tensor:
    """Return the lists of all query blocks, int32 [num_entries]; `totals` is `lists.totals` as integers."""
    num_partial, num_all = totals[_ENDING], totals[_RUN_AT_DIAGONAL]
    num_runs = totals[_RUN_BEGIN] - num_partial
    device = lists.counts.device
    # One element per entry: listing 17 in 1 block, listing 36 in 2 -> index [... 17 36 36 ...]
    index = torch.repeat_interleave(lists.counts, output_size=num_all)
    granule, rank, base = lists.listings.gather(1, index.expand(3, -1))
    entry = lists.sections.gather(0, base + torch.arange(num_all, device=device)) + rank
    # In a run of full granules, each one is 1 more than the last, so the sum of `steps` up to an entry is its granule.
    # Run 0 1 2 3 4 in the entries 18 ... 22: steps[18] += 0 - 19 and steps[23] -= 4 - 23.
    after = entry[num_partial:] + 1
    shift = (granule[num_partial:] - after).int()
    steps = torch.ones(num_entries + 1, dtype=torch.int32, device=device)
    steps.scatter_add_(0, entry[num_partial : num_partial + num_runs], shift[:num_runs])
    steps.scatter_add_(0, after[num_runs:], -shift[num_runs:])
    entries = steps.cumsum_(0)[:-1]
    # The three entries before the full granules are padding, unless a partial granule overwrites them. Block 2 starts
    # at entry 12: ? ? ? -1 | -1 -1 0 1 | 2 3 4 6 -> 8 9 10 11 | 5 -1 0 1 | 2 3 4 6
    padding = lists.sections.view(2, -1, 1)[1] - torch.arange(1, 4, device=device)
    entries.index_fill_(0, padding.flatten(), -1)
    return entries.scatter_(0, entry[:num_partial], granule[:num_partial].int())


def _key_blocks(extremes: Tensor, length: int, first_tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group granules into key blocks.

    Granules are sorted by their last query. A granule that straddles two nodes spoils the full range of its block: if
    many of them end together, they come after the others, in blocks of their own. The sorted order is cut wherever a
    granule starts more than a tile after the middle of the next granule's range, because the two overlap too little.
    Each part is cut into blocks of 4. The work is less than 1 % above that of the best cut if nodes are longer than a
    few tiles, and about 5 % if they are shorter than one tile.

    Args:
        extremes: smallest and largest subtree_end of each granule, [2, B, granules].
        length: T.
        first_tile: query tile that the ranges begin at, or after it.

    Returns:
        granules [B, n, 4], ranges [B, n, 4] and the maximum number of blocks of a row, [1]; n is the number of granules
        with tokens, and everything after the last block is empty.
    """
    count = -(-length // GRANULE)
    # In tiles: full to query tiles before `full_last`, visible to query tiles before `last`.
    full_last = (extremes[0, :, :count] // QUERY_TILE).clamp_(min=first_tile)
    last = ((extremes[1, :, :count] + (QUERY_TILE - 1)) // QUERY_TILE).clamp_(min=first_tile)
    straddles = (last - full_last > 1).long()
    alike = last.new_zeros(len(last), count + 1).scatter_add_(1, last, straddles).gather(1, last)
    # last [6 6 4 6], the second granule one of many that straddle -> keys [12 11 8 12] -> order [0 3 1 2]
    order = (2 * last - straddles * (alike >= _MIN_STRADDLING)).argsort(dim=1, descending=True, stable=True)
    # The range of a granule begins at the granule, or at first_tile if that is later.
    begin = order.clamp(min=first_tile * (QUERY_TILE // GRANULE))
    first = begin // (QUERY_TILE // GRANULE)
    full_last, last = torch.stack([full_last, last]).gather(2, order.expand(2, -1, -1))

    number = torch.arange(count, device=last.device)
    middle = first[:, 1:] + last[:, 1:]  # (first + last) / 2 tiles, in granules, of which a tile has two
    is_cut = pad(begin[:, :-1] > middle + 2, (1, 0))
    # order [0 1 2 3 4 5 6 8 9 10 11 7], cut before 7, whose range has its middle at granule 7, more than 2 before 11:
    # slot [0 1 2 3 0 1 2 3 0 1 2 0], block [0 0 0 0 1 1 1 1 2 2 2 3]
    slot = (number - (number * is_cut).cummax(dim=1).values) % _PER_KEY_BLOCK
    block = (slot == 0).cumsum(dim=1) - 1
    granules = last.new_full((len(last), count * _PER_KEY_BLOCK), -1)
    granules = granules.scatter_(1, block * _PER_KEY_BLOCK + slot, order).view(len(last), count, _PER_KEY_BLOCK)

    # A granule is full from the tile after it, or from first_tile on. A block takes the minima of first and full_end,
    # the maxima of full_begin and last. Granules [4 5 6 8] in tiles: first 2 2 3 4, full_end 6 3 6 6,
    # last 6 6 6 6 -> first 2, full_begin 5, full_end 3 (raised to 5, because nothing is full), last 6
    own = order // (QUERY_TILE // GRANULE)
    lows, highs = torch.stack([first, full_last]), torch.stack([first.maximum(own + 1), last])
    to = block.expand(2, -1, -1)
    first, full_end = torch.zeros_like(lows).scatter_reduce_(2, to, lows, "amin", include_self=False)
    full_begin, last = torch.zeros_like(lows).scatter_reduce_(2, to, highs, "amax", include_self=False)
    ranges = torch.stack([first, full_begin, full_begin.maximum(full_end), last], dim=-1)
    return granules, ranges * QUERY_TILE, block.amax().view(1) + 1
