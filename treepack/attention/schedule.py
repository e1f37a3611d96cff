"""What the kernels of tree attention do for one row and in which order: O(entries) integers, made once per row.

Queries go in blocks of 128 tokens, keys in granules of 32, for the visible keys of a query block are its ancestors,
in scattered pieces. A key tile of a kernel gathers any 1, 2 or 4 granules. Over the keys of a granule let `low` and
`high` be the least and the greatest subtree_end. Below the diagonal, to a query block that starts at q0,

    high <= q0          no pair is visible       not listed
    low >= q0 + 128     every pair is visible    full: computed without a mask
    else                some may be              partial: computed under the mask

           granules
    block  0 1 2 3  4 5 6 7  8 9 ...      in the list of block 2, each section a multiple of 4 long:
      0    d d d d                        partial  8 9 10 11 | 5 -1 2 3      the diagonal first, -1 is no granule
      1    f f f f  d d d d               full     0 1 4 6                   (2 and 3: 6 full ones are no multiple)
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

_DIAGONAL, _PARTIAL, _PADDING, _FULL = range(4)  # order of the pieces of a list
_PER_KEY_BLOCK = KEY_BLOCK // GRANULE
_PER_QUERY_BLOCK = QUERY_BLOCK // GRANULE
_NEVER = 1 << 29  # more than any work, and twice it is an int32


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
        subtree_end: int [B, T], T >= 1; one past the last token of each token's subtree.
    """
    length = subtree_end.shape[-1]
    tail = torch.arange(length + 1, length + 1 + -length % QUERY_BLOCK, dtype=torch.int32, device=subtree_end.device)
    end = torch.cat([subtree_end.to(torch.int32), tail.expand(len(subtree_end), -1)], dim=1)
    low, high = end.view(len(end), -1, GRANULE).aminmax(dim=-1)
    lists = _QueryLists(low, high)
    granules_of, ranges, count = _key_blocks(low, high, length)
    *sizes, most = torch.stack([*lists.sizes, count.amax()]).tolist()
    granules_of, ranges = granules_of[:, :most].contiguous(), ranges[:, :most].contiguous()
    return Schedule(
        length=length,
        end=end,
        granules=lists.entries(*sizes),
        query_offsets=lists.offsets,
        query_partial=lists.partial,
        query_order=_longest_first(lists.offsets.diff(dim=1)),
        key_granules=granules_of,
        key_ranges=ranges,
        key_order=_longest_first(ranges[..., 3] - ranges[..., 0]),
    )


def _longest_first(work: Tensor) -> Tensor:
    return work.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


@dataclass(frozen=True)
class _Pieces:
    """For each of some granules [B, n], the query blocks [first, last) for whose list it is a piece of some kind."""

    first: Tensor
    last: Tensor

    def counts(self) -> Tensor:
        return (self.last - self.first).clamp(min=0)

    def per_block(self, blocks: int) -> Tensor:
        """How many of them each query block has: int32 [B, blocks]."""
        changes = torch.zeros(len(self.first), blocks + 1, dtype=torch.int32, device=self.first.device)
        first, last = self.first.minimum(self.last).long(), self.last.long()
        ones = torch.ones_like(self.first)
        changes.scatter_add_(1, first, ones).scatter_add_(1, last, -ones)
        return changes[:, :-1].cumsum(dim=1, dtype=torch.int32)

    def keys(self, granule: Tensor, kind: int, total: int, blocks: int, bits: int) -> Tensor:
        """One sorting key per piece: query block (over all rows), kind, granule; int64 [total]."""
        counts = self.counts()
        row = torch.arange(len(counts), device=counts.device)[:, None] * blocks
        flat = counts.flatten()
        begin = (row + self.first).flatten() - (flat.cumsum(0) - flat)  # block of a piece minus its number
        base = ((begin * 4 + kind) << bits) + granule.expand_as(counts).flatten()
        number = torch.arange(total, device=counts.device) << (bits + 2)
        return number + base.repeat_interleave(flat, output_size=total)


class _QueryLists:
    """The granules of every query block, as runs of neighbours: where runs begin and end is sorted, not the granules.

    A granule g is full to the blocks in (g // 4, low[g] // 128), so a run of full granules begins at g in those of
    them from low[g - 1] // 128 on, and ends before g in those of g - 1 from low[g] // 128 on, or at the diagonal.
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        count = low.shape[1]
        self.blocks = count // _PER_QUERY_BLOCK
        self.granule = torch.arange(count, dtype=torch.int32, device=low.device)
        below = self.granule // _PER_QUERY_BLOCK + 1  # the first block of which it is below the diagonal
        full_last = low // QUERY_BLOCK
        full = _Pieces(below.expand_as(low), full_last)
        self.partials = _Pieces(below.maximum(full_last), (high + (QUERY_BLOCK - 1)) // QUERY_BLOCK)
        self.begins = _Pieces(below.maximum(pad(full_last, (1, 0))[:, :-1]), full_last)
        # Past the last granule nothing is full.
        after, below_after = pad(full_last, (0, 1))[:, 1:], pad(below, (0, 1), value=self.blocks)[1:]
        inside = _Pieces(below_after.maximum(after), full_last)
        at_diagonal = _Pieces(below.expand_as(low), full_last.minimum(below_after))
        self.ends = _Pieces(*(torch.cat(x, dim=1) for x in zip(*map(_both, (inside, at_diagonal)), strict=True)))

        num_full, num_partial = full.per_block(self.blocks), self.partials.per_block(self.blocks)
        left_over = num_full % 4
        listed = _PER_QUERY_BLOCK + num_partial + left_over
        self.padding = -listed % 4
        self.partial = listed + self.padding
        sizes = self.partial + num_full - left_over
        ends = sizes.flatten().cumsum(0, dtype=torch.int32).view_as(sizes)
        self.offsets = torch.cat([ends[:, :1] - sizes[:, :1], ends], dim=1)

    @property
    def sizes(self) -> list[Tensor]:
        """How many partial pieces, runs and entries there are, for `entries`."""
        return [self.partials.counts().sum(), self.begins.counts().sum(), self.offsets[-1, -1]]

    def entries(self, num_partial: int, num_runs: int, num_entries: int) -> Tensor:
        bits = (len(self.granule) + 1).bit_length()
        block = torch.arange(self.padding.numel(), device=self.granule.device)
        own = self.granule[::_PER_QUERY_BLOCK].repeat(len(self.padding))
        own_key, padding_key = ((block * 4 + kind) << bits for kind in (_DIAGONAL, _PADDING))
        sides = []
        for after, full, total in ((0, self.begins, num_runs), (1, self.ends, num_runs)):
            granule = (self.granule + after).repeat(1 + after)
            single = self.partials.keys(self.granule + after, _PARTIAL, num_partial, self.blocks, bits)
            padding = padding_key + self.padding.flatten() * after
            runs = full.keys(granule, _FULL, total, self.blocks, bits)
            sides.append(torch.cat([own_key + own + _PER_QUERY_BLOCK * after, single, padding, runs]).sort().values)
        # Pieces of one kind in one block lie apart, so that the n-th beginning belongs to the n-th end.
        begin, end = sides
        size = end - begin
        is_padding = (begin >> bits) % 4 == _PADDING
        shift = (begin & ((1 << bits) - 1)).masked_fill(is_padding, -_NEVER) - (size.cumsum(0) - size)
        number = torch.arange(num_entries, dtype=torch.int32, device=size.device)
        return number.add_(shift.int().repeat_interleave(size, output_size=num_entries)).clamp_(min=-1)


def _both(pieces: _Pieces) -> tuple[Tensor, Tensor]:
    return pieces.first, pieces.last


def _key_blocks(low: Tensor, high: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Granules grouped into key blocks: granules [B, n, 4], ranges [B, n, 4], and how many blocks there are [B].

    n is the number of granules; what follows the last block is empty. Granules are sorted by how long they live, and
    their order is cut where the ranges are shortest in total.
    """
    count = -(-length // GRANULE)
    start = torch.arange(count, dtype=torch.int32, device=low.device) * GRANULE
    first = (start // QUERY_TILE).expand(len(low), -1)
    full_first = ((start + (GRANULE + QUERY_TILE - 2)) // QUERY_TILE).expand(len(low), -1)
    full_last = low[:, :count] // QUERY_TILE
    last = (high[:, :count].clamp(max=length) + (QUERY_TILE - 1)) // QUERY_TILE
    order = last.argsort(dim=1, descending=True, stable=True)
    is_end = _cheapest_cuts(first.gather(1, order), last.gather(1, order))

    number = torch.arange(count, device=low.device)
    is_start = pad(is_end, (1, 0), value=True)[:, :-1]
    slot = number - (number * is_start).cummax(dim=1).values
    block = is_start.cumsum(dim=1) - 1
    members = torch.full((len(low), count * _PER_KEY_BLOCK), -1, device=low.device)
    members = members.scatter_(1, block * _PER_KEY_BLOCK + slot, order).view(len(low), -1, _PER_KEY_BLOCK)
    # A missing member changes no range: the block's first one stands in for it.
    present = torch.where(members < 0, members[..., :1], members).clamp(min=0).flatten(1)
    first, full_first, full_last, last = (
        x.gather(1, present).view_as(members) for x in (first, full_first, full_last, last)
    )
    full_begin = full_first.amax(-1)
    ranges = torch.stack([first.amin(-1), full_begin, full_last.amin(-1).maximum(full_begin), last.amax(-1)], dim=-1)
    return members.int(), ranges.masked_fill(members[..., :1] < 0, 0) * QUERY_TILE, is_end.sum(dim=1)


def _cheapest_cuts(first: Tensor, last: Tensor) -> Tensor:
    """Where blocks of at most 4 neighbours end, bool [B, n], such that their hulls are shortest in total.

    `last` [B, n] is descending. The least total of the first i + 1, over the size of the block that ends at i, is

        best[i] = min over size of best[i - size] + cost[size, i]

    which is linear in the algebra of (min, +): best[i - 3 ... i] is a 4 x 4 matrix times best[i - 4 ... i - 1], and
    products of matrices double in length from step to step. The way back is a composition of maps, doubled likewise.
    """
    batch, count = first.shape
    cost = first.new_full((_PER_KEY_BLOCK, batch, count), _NEVER)
    hull = first
    for size in range(_PER_KEY_BLOCK):
        cost[size, :, size:] = last[:, : count - size] - hull[:, size:]
        hull = hull.minimum(pad(hull, (1, 0), value=_NEVER)[:, :-1])
    product = first.new_full((_PER_KEY_BLOCK, _PER_KEY_BLOCK, batch, count), _NEVER)
    product[0] = cost
    for size in range(1, _PER_KEY_BLOCK):
        product[size, size - 1] = 0
    span = 1
    while span < count:
        longer = (product[:, :, None, :, span:] + product[None, :, :, :, :-span]).amin(dim=1).clamp_(max=_NEVER)
        product[..., span:] = longer
        span *= 2
    before = pad(product[0, 0], (_PER_KEY_BLOCK, 0), value=_NEVER)  # best[i] is at i + 4
    before[:, _PER_KEY_BLOCK - 1] = 0
    totals = torch.stack([before[:, 3 - size : 3 - size + count] + cost[size] for size in range(_PER_KEY_BLOCK)])

    # remaining[r, i]: having r granules left to take to the left of i + 1, how many are left at i; 0 ends a block at i.
    remaining = torch.arange(-1, 3, device=first.device)[:, None, None].repeat(1, batch, count)
    remaining[0] = totals.argmin(dim=0)
    span = 1
    while span < count:
        remaining[..., :-span] = remaining[..., :-span].gather(0, remaining[..., span:])
        span *= 2
    return pad(remaining[0], (0, 1))[:, 1:] == 0
