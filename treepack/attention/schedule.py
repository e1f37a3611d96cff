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
MASKED = 0.25  # what a mask adds to the work of a tile

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
    pieces = _find_pieces(low, high)
    padding, partial, offsets = _place_lists(pieces)
    granules, ranges, count = _key_blocks(low, high, length)
    totals = pieces.counts[:3].sum(dim=(1, 2))
    num_partial, num_runs, _, num_entries, most = torch.cat([totals, offsets[-1:, -1], count.amax()[None]]).tolist()
    granules, ranges = granules[:, :most].contiguous(), ranges[:, :most].contiguous()
    return Schedule(
        length=length,
        end=end,
        granules=_list_entries(pieces, padding, num_partial + num_runs, num_entries),
        query_offsets=offsets,
        query_partial=partial,
        query_order=_longest_first(offsets.diff(dim=1)),
        key_granules=granules,
        key_ranges=ranges,
        key_order=_longest_first(ranges[..., 3] - ranges[..., 0]),
    )


def _longest_first(work: Tensor) -> Tensor:
    return work.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


@dataclass(frozen=True)
class _Pieces:
    """Of which query blocks' lists each granule begins and ends a run of neighbours.

    Five kinds of pieces [5, B, granules]: where partial and full runs begin; where full ones end, where they end at the
    diagonal, and where partial ones end. Granules are such pieces of blocks [first, last); counts = last - first, or 0.
    """

    full_first: Tensor
    full_last: Tensor
    first: Tensor
    last: Tensor
    counts: Tensor


def _find_pieces(low: Tensor, high: Tensor) -> _Pieces:
    """From the least and greatest subtree_end of each granule [B, granules].

    A granule g is full to the blocks in (g // 4, low[g] // 128), so a run of full granules begins at g in those of
    them from low[g - 1] // 128 on, and ends with g in those from low[g + 1] // 128 on, or at the diagonal. Partial
    granules are runs of one.
    """
    number = torch.arange(1, low.shape[1] + 2, dtype=torch.int32, device=low.device)
    # The first block that lies past the diagonal of a granule.
    below = ((number + (_PER_QUERY_BLOCK - 1)) // _PER_QUERY_BLOCK).expand(len(low), -1)
    below, below_next = below[:, :-1], below[:, 1:]
    full_last = low // QUERY_BLOCK
    around = pad(full_last, (1, 1))
    partial = below.maximum(full_last), (high + (QUERY_BLOCK - 1)) // QUERY_BLOCK
    begins = below.maximum(around[:, :-2]), full_last
    ends = below_next.maximum(around[:, 2:]), full_last
    ends_at_diagonal = below, full_last.minimum(below_next)
    first, last = (torch.stack(x) for x in zip(partial, begins, ends, ends_at_diagonal, partial, strict=True))
    return _Pieces(below, full_last, first, last, (last - first).clamp_(min=0))


def _place_lists(pieces: _Pieces) -> tuple[Tensor, Tensor, Tensor]:
    """Padding entries and entries of the partial section [B, nq], and offsets [B, nq + 1] of the lists."""
    # How many granules are partial and full to each block: they come at `first` and go at `last`.
    first = torch.stack([pieces.first[0], pieces.full_first])
    last = torch.stack([pieces.last[0], pieces.full_last]).maximum(first)
    changes = first.new_zeros(*first.shape[:2], first.shape[2] // _PER_QUERY_BLOCK + 1)
    ones = torch.ones_like(first)
    changes.scatter_add_(2, first.long(), ones).scatter_add_(2, last.long(), -ones)
    num_partial, num_full = changes[..., :-1].cumsum(dim=2, dtype=torch.int32)

    left_over = num_full % 4
    listed = _PER_QUERY_BLOCK + num_partial + left_over
    partial = (listed + 3) // 4 * 4
    sizes = partial + num_full - left_over
    ends = sizes.flatten().cumsum(0, dtype=torch.int32).view_as(sizes)
    return partial - listed, partial, torch.cat([ends[:, :1] - sizes[:, :1], ends], dim=1)


def _list_entries(pieces: _Pieces, padding: Tensor, num_pieces: int, num_entries: int) -> Tensor:
    """The lists of all query blocks, int32 [num_entries].

    Each run has two sorting keys of query block (over all rows), kind and granule, one where it begins and one past
    its end. Runs of one kind in one block lie apart, so that the n-th beginning belongs to the n-th end.
    """
    device = padding.device
    _, batch, count = pieces.counts.shape
    bits = (count + 1).bit_length()
    piece = torch.arange(len(pieces.counts), device=device)[:, None, None]
    kind, after = torch.where(piece % 4 == 0, _PARTIAL, _FULL), piece > 1
    row = torch.arange(batch, device=device)[:, None] * padding.shape[1]
    counts = pieces.counts.flatten()
    block = (row + pieces.first).flatten() - (counts.cumsum(0) - counts)  # of a piece, less its number
    granule = torch.arange(count, device=device) + (kind << bits) + after
    base = (block << (bits + 2)) + granule.expand(-1, batch, -1).flatten()
    number = torch.arange(2 * num_pieces, device=device) << (bits + 2)
    runs = (number + base.repeat_interleave(counts, output_size=2 * num_pieces)).view(2, -1)

    blocks = torch.arange(padding.numel(), device=device)
    own = (blocks << (bits + 2)) + (_DIAGONAL << bits) + blocks % padding.shape[1] * _PER_QUERY_BLOCK
    gap = (blocks << (bits + 2)) + (_PADDING << bits)
    every = torch.stack([torch.cat([own, gap]), torch.cat([own + _PER_QUERY_BLOCK, gap + padding.flatten()])])
    begin, end = torch.cat([every, runs], dim=1).sort(dim=1).values
    size = end - begin
    is_padding = (begin >> bits) % 4 == _PADDING
    place = size.cumsum(0) - size
    shift = (begin & ((1 << bits) - 1)).masked_fill_(is_padding, -_NEVER) - place
    # An entry is its place plus the shift of its run, which changes where runs begin; empty ones may begin at the end.
    steps = torch.ones(num_entries + 1, dtype=torch.int32, device=device)
    steps.scatter_add_(0, place, (shift - pad(shift, (1, 0), value=1)[:-1]).int())
    return steps.cumsum_(0)[:-1].clamp_(min=-1)


def _key_blocks(low: Tensor, high: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Granules grouped into key blocks: granules [B, n, 4], ranges [B, n, 4], and how many blocks there are [B].

    n is the number of granules; what follows the last block is empty. Granules are sorted by how long they live, and
    their order is cut where the work is least. Of those that live equally long, the ones that straddle two nodes spoil
    the full range of a block; they go by place like all others, or last, whichever is less work for the row.
    """
    count = -(-length // GRANULE)
    start = torch.arange(count, dtype=torch.int32, device=low.device) * GRANULE
    first = (start // QUERY_TILE).expand(len(low), -1)
    full_first = ((start + (GRANULE + QUERY_TILE - 2)) // QUERY_TILE).expand(len(low), -1)
    full_last = low[:, :count] // QUERY_TILE
    last = (high[:, :count].clamp(max=length) + (QUERY_TILE - 1)) // QUERY_TILE
    straddles = (last - full_last > 1).int()
    orders = torch.cat([2 * last, 2 * last - straddles]).argsort(dim=1, descending=True, stable=True)
    columns = (first, full_first, full_last, last)
    ends, work = _cheapest_cuts(*(x.repeat(2, 1).gather(1, orders) for x in columns))
    by_place = (work[: len(low)] <= work[len(low) :])[:, None]
    is_end, order = (torch.where(by_place, x[: len(low)], x[len(low) :]) for x in (ends, orders))

    number = torch.arange(count, device=low.device)
    is_start = pad(is_end, (1, 0), value=True)[:, :-1]
    slot = number - (number * is_start).cummax(dim=1).values
    block = is_start.cumsum(dim=1) - 1
    members = torch.full((len(low), count * _PER_KEY_BLOCK), -1, device=low.device)
    members = members.scatter_(1, block * _PER_KEY_BLOCK + slot, order).view(len(low), -1, _PER_KEY_BLOCK)
    # A missing member changes no range: the block's first one stands in for it.
    present = torch.where(members < 0, members[..., :1], members).clamp(min=0).flatten(1)
    first, full_first, full_last, last = (x.gather(1, present).view_as(members) for x in columns)
    full_begin = full_first.amax(-1)
    ranges = torch.stack([first.amin(-1), full_begin, full_last.amin(-1).maximum(full_begin), last.amax(-1)], dim=-1)
    return members.int(), ranges.masked_fill(members[..., :1] < 0, 0) * QUERY_TILE, is_end.sum(dim=1)


def _cheapest_cuts(first: Tensor, full_first: Tensor, full_last: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Where blocks of at most 4 neighbours end, bool [B, n], such that their work is least in total, and that [B].

    `last` is descending. The work of a block is its range and `MASKED` of what of it is masked. The least total of the
    first i + 1 granules, over the size of the block that ends with i, is

        best[i] = min over size of best[i - size] + cost[size, i]

    which is linear in the algebra of (min, +): best[i - 3 ... i] is a 4 x 4 matrix times best[i - 4 ... i - 1], and
    products of matrices double in length from step to step. The way back is a composition of maps, doubled likewise.
    """
    batch, count = first.shape
    # Floats for their infinity; exact to 2**22 tiles, and past that any choice is a valid one.
    cost = first.new_full((_PER_KEY_BLOCK, batch, count), torch.inf, dtype=torch.float32)
    begin, full_begin, full_end = first, full_first, full_last  # of the blocks of one size, by where they end
    for size in range(min(_PER_KEY_BLOCK, count)):
        others = count - size
        if size:
            begin = begin[:, 1:].minimum(first[:, :others])
            full_begin = full_begin[:, 1:].maximum(full_first[:, :others])
            full_end = full_end[:, 1:].minimum(full_last[:, :others])
        full = (full_end - full_begin).clamp_(min=0)
        cost[size, :, size:] = (1 + MASKED) * (last[:, :others] - begin) - MASKED * full
    product = cost.new_full((_PER_KEY_BLOCK, _PER_KEY_BLOCK, batch, count), torch.inf)
    product[0] = cost
    product.diagonal(-1, 0, 1).zero_()
    span = 1
    while span < count:
        longer = product[:, :, None, :, span:] + product[None, :, :, :, :-span]
        torch.amin(longer, dim=1, out=product[..., span:])
        span *= 2
    before = pad(product[0, 0], (_PER_KEY_BLOCK, 0), value=torch.inf)  # best[i] is at i + 4
    before[:, _PER_KEY_BLOCK - 1] = 0
    totals = torch.stack([before[:, 3 - size : 3 - size + count] + cost[size] for size in range(_PER_KEY_BLOCK)])

    # remaining[r, i]: having r granules left to take to the left of i + 1, how many are left at i; 0 ends a block at i.
    # Past the row nothing changes, for as long as all spans together.
    spans = [1 << step for step in range((count - 1).bit_length())]
    remaining = torch.arange(_PER_KEY_BLOCK, device=first.device)[:, None, None].repeat(1, batch, count + sum(spans))
    remaining[..., :count] -= 1
    remaining[0, :, :count] = totals.argmin(dim=0)
    for span in spans:
        remaining = remaining[..., :-span].gather(0, remaining[..., span:])
    return pad(remaining[0], (0, 1))[:, 1:] == 0, product[0, 0, :, -1]
