"""What the kernels of tree attention do for one row and in which order: O(entries) integers, made once per row.

Queries go in blocks of 128 tokens, keys in granules of 32, for the visible keys of a query block are its ancestors,
in scattered pieces. A key tile of a kernel gathers any 1, 2 or 4 granules. Over the keys of a granule let `low` and
`high` be the least and the greatest subtree_end. Below the diagonal, to a query block that starts at q0,

    high <= q0          no pair is visible       not listed
    low >= q0 + 128     every pair is visible    full: computed without a mask
    else                some may be              partial: computed under the mask

           granules
    block  0 1 2 3  4 5 6 7  8 9 ...      in the list of block 2, each section a multiple of 4 long:
      0    d d d d                        partial  8 9 10 11 | 5 -1 0 1      the diagonal first, -1 is no granule
      1    f f f f  d d d d               full     2 3 4 6                   (0 and 1: 6 full ones are no multiple)
      2    f f f f  f p f .  d d d d

From the side of the keys (dk and dv), blocks of 4 granules that live about equally long are put together, and each
has one range of queries:

    first ... full_begin ... full_end ... last        masked, not masked, masked

In: subtree_end int [B, T] on any device. Out: a `Schedule` on that device. Nothing here is T x T or loops in Python
over tokens, blocks or granules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

GRANULE = 32
QUERY_BLOCK = 128
KEY_BLOCK = 128
QUERY_TILE = 64  # ranges of queries begin and end at multiples of it
MANY = 16  # granules that straddle nodes and end alike, from which on they get key blocks of their own

_DIAGONAL, _PARTIAL, _PADDING, _FULL = range(4)  # order of the pieces of a list
_PER_KEY_BLOCK = KEY_BLOCK // GRANULE
_PER_QUERY_BLOCK = QUERY_BLOCK // GRANULE


@dataclass(frozen=True)
class Schedule:
    """Lists of tiles of B rows of T tokens; every tensor is int32.

    T_pad is T rounded up to whole query blocks, by tokens that see only themselves.

    length          T
    end             [B, T_pad]    subtree_end of the padded row
    granules        [entries]     of each query block the partial section, then the full one; -1 is no granule
    query_offsets   [B, nq + 1]   where in `granules` a query block's entries begin; the last entry is where they end
    query_partial   [B, nq]       entries of the partial section, which starts with the block's own granules
    query_order     [B, nq]       query blocks, longest list first
    key_granules    [B, nk, 4]    granules of each key block, each one that holds a token once; -1 is no granule
    key_ranges      [B, nk, 4]    query tokens first, full_begin, full_end, last; multiples of 64; all 0 for a block
                                  without granules
    key_order       [B, nk]       key blocks, longest range first

    Every section of `granules` is a multiple of 4 long, so that kernels may take 1, 2 or 4 granules at a time.
    """

    length: int
    end: Tensor
    granules: Tensor
    query_offsets: Tensor
    query_partial: Tensor
    query_order: Tensor
    key_granules: Tensor
    key_ranges: Tensor
    key_order: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Schedule:
        """The same schedule on `device`."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Schedule:
        """The same schedule in pinned memory, from where `to` need not block."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Schedule:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: change(x) if isinstance(x, Tensor) else x for name, x in values.items()}
        return Schedule(**moved)


@torch.no_grad()
def build_schedule(subtree_end: Tensor) -> Schedule:
    """The schedule of B rows, on the device of `subtree_end`, which it makes wait once.

    Args:
        subtree_end: int [B, T], T >= 1; one past the last token of each token's subtree. Subtrees nest.
    """
    length = subtree_end.shape[-1]
    tail = torch.arange(length + 1, length + 1 + -length % QUERY_BLOCK, dtype=torch.int32, device=subtree_end.device)
    end = torch.cat([subtree_end.to(torch.int32), tail.expand(len(subtree_end), -1)], dim=1)
    extremes = torch.stack(end.view(len(end), -1, GRANULE).aminmax(dim=-1)).long()
    lists = _place_lists(extremes)
    granules, ranges, most = _key_blocks(extremes, length)
    *pieces, num_entries, num_blocks = torch.cat([lists.totals, lists.offsets[-1:, -1], most]).tolist()
    ranges = ranges[:, :num_blocks].int()
    return Schedule(
        length=length,
        end=end,
        granules=_list_entries(lists, pieces, num_entries),
        query_offsets=lists.offsets,
        query_partial=lists.partial,
        query_order=_longest_first(lists.offsets.diff(dim=1)),
        key_granules=granules[:, :num_blocks].int(),
        key_ranges=ranges,
        key_order=_longest_first(ranges[..., 3] - ranges[..., 0]),
    )


def _longest_first(work: Tensor) -> Tensor:
    return work.argsort(dim=-1, descending=True, stable=True).int()


@dataclass(frozen=True)
class _Lists:
    """Where entries go in the lists of query blocks; blocks are numbered over all rows.

    A piece is a granule in the lists of consecutive query blocks: in each, `rank` after where the section begins. Of
    six kinds the first three are partial: own, surviving the block, and ending in it. The others are where runs of full
    neighbours begin, where they end, and where they end at the diagonal.

    offsets   [B, nq + 1]   as in `Schedule`
    partial   [B, nq]       as in `Schedule`
    sections  [2 B nq]      where each block's partial granules begin, then where its full ones do
    pieces    [3, n]        granule, rank, and the index in `sections` of its first block, less its number
    counts    [n]           query blocks of each piece
    totals    [6]           query blocks of the pieces up to the end of each kind
    """

    offsets: Tensor
    partial: Tensor
    sections: Tensor
    pieces: Tensor
    counts: Tensor
    totals: Tensor


def _place_lists(extremes: Tensor) -> _Lists:
    """From the least and greatest subtree_end of each granule, [2, B, granules].

    To query blocks past its own, a granule is first full, then partial and survives them, then ends in one. For
    subtrees nest, what of the granules before it has not ended by the next one is visible wherever it is itself, and
    what has no ended token is full wherever it is. So its rank in a stage is the same in all blocks and needs no sort:

        full      the granules before it of which no token has ended
        partial   the visible ones before it, less those full to the first block of the stage
    """
    _, batch, count = extremes.shape
    number = torch.arange(count + 1, device=extremes.device)
    past = (number // _PER_QUERY_BLOCK + 1).expand(batch, -1)  # the first block past the diagonal
    number, past, past_next = number[:-1], past[:, :-1], past[:, 1:]
    masked, ending = (extremes // QUERY_BLOCK).maximum(past)
    over = ((extremes[1] + (QUERY_BLOCK - 1)) // QUERY_BLOCK).maximum(past)
    events = torch.cat([extremes // GRANULE, masked[None], over[None]])
    passed = events.new_zeros(4, batch, count + 1).scatter_add_(2, events, torch.ones_like(events))
    passed = passed.cumsum(2, dtype=torch.int32)
    rank_full, rank_visible = number - passed[:2, :, :-1]

    born = torch.arange(0, count + 1, _PER_QUERY_BLOCK, dtype=torch.int32, device=number.device)
    num_full, num_visible = born - passed[2:, :, : len(born)]
    full_before = num_full.expand(2, -1, -1).gather(2, torch.stack([masked, ending]))
    is_full = masked > past
    up_to = is_full.cumsum(1, dtype=torch.int32).view(batch, -1, _PER_QUERY_BLOCK)
    # Full to that block and behind the granule are at most those of its own query block.
    full_before[0].sub_((up_to[..., -1:] - up_to).view_as(past) * (masked == past))
    rank_partial = rank_visible + _PER_QUERY_BLOCK - full_before

    num_full, num_visible = num_full[:, :-1], num_visible[:, :-1]
    sizes = (num_visible + (_PER_QUERY_BLOCK + 3)) // 4 * 4
    partial = sizes - num_full // 4 * 4
    ends = sizes.flatten().cumsum(0, dtype=torch.int32).view_as(sizes)
    offsets = torch.cat([ends[:, :1] - sizes[:, :1], ends], dim=1)

    around = torch.cat([past[:, :1], masked, past[:, -1:]], dim=1)
    first = torch.stack([past - 1, masked, ending, past.maximum(around[:, :-2]), around[:, 2:], past])
    last = torch.stack([past, ending, over, masked, masked, masked.minimum(past_next)])
    counts = (last - first).clamp_(min=0).flatten()
    steps = counts.cumsum(0)
    sections = torch.arange(0, 2 * ends.numel(), sizes.shape[1], device=number.device).view(2, 1, batch, 1)
    base = (first.flatten() - steps + counts).view(2, 3, batch, count) + sections
    rank_own = (number % _PER_QUERY_BLOCK).expand(1, batch, -1)
    rank = torch.cat([rank_own, rank_partial, rank_full.expand(3, -1, -1)])
    return _Lists(
        offsets=offsets,
        partial=partial,
        sections=torch.cat([offsets[:, :-1].flatten(), (ends - num_full).flatten()]),
        pieces=torch.stack([number.expand_as(rank), rank, base.view_as(rank)]).flatten(1),
        counts=counts,
        totals=steps.view(6, -1)[:, -1],
    )


def _list_entries(lists: _Lists, totals: list[int], num_entries: int) -> Tensor:
    """The lists of all query blocks, int32 [num_entries]; `totals` are those of `lists`."""
    num_partial, num_runs, num_all = totals[2], totals[3] - totals[2], totals[5]
    device = lists.counts.device
    index = torch.repeat_interleave(lists.counts, output_size=num_all)
    granule, rank, base = lists.pieces.gather(1, index.expand(3, -1))
    place = lists.sections.gather(0, base + torch.arange(num_all, device=device)) + rank
    # In a run of full granules an entry is its place and a shift: steps of one but where runs begin and end.
    after = place[num_partial:] + 1
    shift = (granule[num_partial:] - after).int()
    steps = torch.ones(num_entries + 1, dtype=torch.int32, device=device)
    steps.scatter_add_(0, place[num_partial : num_partial + num_runs], shift[:num_runs])
    steps.scatter_add_(0, after[num_runs:], -shift[num_runs:])
    entries = steps.cumsum_(0)[:-1]
    # Three places before the full ones are padding where nothing partial comes to lie.
    padding = lists.sections.view(2, -1, 1)[1] - torch.arange(1, 4, device=device)
    entries.index_fill_(0, padding.flatten(), -1)
    return entries.scatter_(0, place[:num_partial], granule[:num_partial].int())


def _key_blocks(extremes: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Granules grouped into key blocks: granules [B, n, 4], ranges [B, n, 4], and the most blocks of a row [1].

    n is the number of granules; what follows the last block is empty. Granules are sorted by how long they live. Those
    that straddle two nodes spoil the full range of a block: of granules that live equally long they come last, if they
    are many enough for blocks of their own. The order is cut where a granule starts more than a tile past the middle of
    its successor's range, for they overlap too little, and into blocks of 4 from there. That is less than 1 % from the
    cheapest cut where nodes are longer than a few tiles, and some 5 % where they are shorter than one.
    """
    count = -(-length // GRANULE)
    full_last = extremes[0, :, :count] // QUERY_TILE
    last = (extremes[1, :, :count] + (QUERY_TILE - 1)) // QUERY_TILE
    straddles = (last - full_last > 1).long()
    alike = last.new_zeros(len(last), count + 1).scatter_add_(1, last, straddles).gather(1, last)
    order = (2 * last - straddles * (alike >= MANY)).argsort(dim=1, descending=True, stable=True)
    first = order // (QUERY_TILE // GRANULE)
    full_last, last = torch.stack([full_last, last]).gather(2, order.expand(2, -1, -1))

    number = torch.arange(count, device=last.device)
    middle = first[:, 1:] + last[:, 1:]  # in granules, of which a tile is two
    is_cut = pad(order[:, :-1] > middle + 2, (1, 0))
    slot = (number - (number * is_cut).cummax(dim=1).values) % _PER_KEY_BLOCK
    block = (slot == 0).cumsum(dim=1) - 1
    granules = last.new_full((len(last), count * _PER_KEY_BLOCK), -1)
    granules = granules.scatter_(1, block * _PER_KEY_BLOCK + slot, order).view(len(last), count, _PER_KEY_BLOCK)

    # Every granule is full from the tile after its first one on.
    least, greatest = torch.stack([first, full_last]), torch.stack([first + 1, last])
    to = block.expand(2, -1, -1)
    first, full_end = torch.zeros_like(least).scatter_reduce_(2, to, least, "amin", include_self=False)
    full_begin, last = torch.zeros_like(least).scatter_reduce_(2, to, greatest, "amax", include_self=False)
    ranges = torch.stack([first, full_begin, full_begin.maximum(full_end), last], dim=-1)
    return granules, ranges * QUERY_TILE, block.amax().view(1) + 1
