"""Lists of tiles for the attention kernels: the values that `build_schedule` makes and all kernels read.

`build_schedule` explains the lists with a picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

GRANULE = 32  # at the start and end of a branch, parts of 32 keys instead of 128 are computed without use
QUERY_BLOCK = 128  # two wgmma products of 64 rows
KEY_BLOCK = 128  # four granules, the keys of one program of dk and dv
QUERY_TILE = 64  # the query ranges of key blocks begin and end at multiples of it


@dataclass(frozen=True)
class KeyShares:
    """Shares of the key blocks of all rows; tensors are int32.

    shares    [n, 8]    row, key block, and first, full_begin, full_end and last as in `Schedule.key_ranges`, the place
                        of its sums or -1 for a whole block, and 0; the longest share first
    joined    [m, 4]    row and key block of each block with several shares, its first place of sums, and its shares
    num_sums  places of sums
    """

    shares: Tensor
    joined: Tensor
    num_sums: int

    def map(self, change: Callable[[Tensor], Tensor]) -> KeyShares:
        """Return the same shares with changed tensors, for example moved to a GPU."""
        return KeyShares(change(self.shares), change(self.joined), self.num_sums)


@dataclass(frozen=True)
class Schedule:
    """Lists of tiles for B rows of T tokens; every tensor is int32.

    T_pad is T rounded up to whole query blocks; the added tokens see only themselves. There are nq query blocks, which
    are numbered from 0 and begin at token `first`, and nk key blocks.

    length          T
    end             [B, T_pad]    subtree_end of the padded row
    granules        [entries]     the partial section of each query block, then its full section; -1: none
    query_offsets   [B, nq + 1]   index in `granules` of the first entry of each query block, then of the end
    query_partial   [B, nq]       entries of the partial section, which starts with the block's own granules
    query_order     [B, nq]       query blocks, longest list first
    key_granules    [B, nk, 4]    granules of each key block; every granule that has a token occurs once; -1 is none
    key_ranges      [B, nk, 4]    query tokens first, full_begin, full_end, last; multiples of 64; all equal for a block
                                  that no query sees. With key_tiles: indices in it instead, and full_end is last.
    key_order       [B, nk]       key blocks, longest range first
    start           [B, T_pad]    the first token that each token sees; None if it sees all of its ancestors
    key_tiles       [tiles]       query tiles of each key block as their first tokens, the masked ones first; None if
                                  start is None
    first           the token of the first query, a multiple of 128
    shares          key blocks divided between programs; None if start is not None

    The length of every section of `granules` is a multiple of 4, so kernels may take 1, 2 or 4 granules at a time.
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
    start: Tensor | None = None
    key_tiles: Tensor | None = None
    first: int = 0
    shares: KeyShares | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Schedule:
        """Return the same schedule on `device`."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Schedule:
        """Return the same schedule in pinned memory, from which `to` does not need to block."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Schedule:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: change(x) if isinstance(x, Tensor) else x for name, x in values.items()}
        if self.shares is not None:
            moved["shares"] = self.shares.map(change)
        return Schedule(**moved)


def longest_first(work: Tensor) -> Tensor:
    """Return the indices of the numbers [..., n] in descending order, int32; equal ones keep their order."""
    # [4, 8, 12] -> [2, 1, 0]; stable, so equal work keeps its order on every device
    return work.argsort(dim=-1, descending=True, stable=True).int()
