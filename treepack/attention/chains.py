"""Rows in which no token has two children: whole rollouts one after another, for which causal attention is enough.

    subtree_end   4 4 4 4 7 7 7 8        offsets   0 4 7 8        three chains

Such a row needs no tree attention, so torch's own FlashAttention for sequences of different lengths computes it.
`find_chains` runs once, when the schedule of a row is prepared; no layer repeats it.

In: query [B, H, T, D], key and value [B, H_kv, T, D], bfloat16 or float16 on a GPU. Under
`torch.use_deterministic_algorithms` the backward is deterministic and slower; otherwise it sums dq in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_TILE = 128  # queries of one program of FlashAttention
_MAX_LAUNCHES_PER_TILE = 4  # a program without work ends at once, so a few of them cost less than the tree kernel


@dataclass(frozen=True)
class ChainRows:
    """B rows of T tokens as sequences, one after another.

    rows       B
    length     T
    offsets    int32 [num_chains + 1], index of the first token of each chain among the B * T tokens, then B * T
    longest    tokens of the longest chain
    """

    rows: int
    length: int
    offsets: Tensor
    longest: int

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ChainRows:
        """Return the same chains with their offsets on `device`."""
        return replace(self, offsets=self.offsets.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ChainRows:
        """Return the same chains in pinned memory, from which `to` does not need to block."""
        return replace(self, offsets=self.offsets.pin_memory())


def find_chains(subtree_end: Tensor) -> ChainRows | None:
    """Return the chains of B rows, or None if some token branches or the chain lengths are too uneven for one launch.

    Args:
        subtree_end: int [B, T]; pass it on the CPU, because a tensor on a GPU makes the CPU wait for the result.
    """
    rows, length = subtree_end.shape
    # In a chain, a token either is the last of its subtree or has the same end as the token after it.
    #     4 4 4 4 7 7 7 8 -> last 0 0 0 1 0 0 1 1, inside 1 1 1 0 1 1 0 0
    #     5 3 3 5 5       -> last 0 0 1 0 1,       inside 0 1 0 1 1: token 0 has two children
    last = subtree_end == torch.arange(1, length + 1, device=subtree_end.device)
    inside = subtree_end == subtree_end.roll(-1, dims=1)
    inside[:, -1] = False
    if not bool((last | inside).all()):
        return None
    ends = last.flatten().nonzero().squeeze(-1) + 1
    # last 0 0 0 1 0 0 1 1 -> ends 4 7 8 -> offsets 0 4 7 8
    offsets = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    lengths = offsets.diff()
    longest = int(lengths.max())
    # For every chain, the kernel launches as many programs as the longest chain has tiles. Programs past the end of a
    # chain return at once, but 10,000 one-token chains beside a long one would launch 10,000 times too many.
    launched, needed = len(lengths) * -(-longest // _TILE), int(((lengths + _TILE - 1) // _TILE).sum())
    return ChainRows(rows, length, offsets, longest) if launched <= _MAX_LAUNCHES_PER_TILE * needed else None


def chain_attention(
    query: Tensor, key: Tensor, value: Tensor, chains: ChainRows, *, scale: float | None = None
) -> Tensor:
    """Compute causal softmax attention inside every chain: [B, H, T, D], a view of [B, T, H, D] in memory."""
    # [B, H, T, D] -> [B * T, H, D]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    offsets, longest = chains.offsets, chains.longest
    # The operator that torch.nn.attention.varlen calls; the arguments of varlen itself change from release to release.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *rows, offsets, offsets, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out.reshape(chains.rows, chains.length, *out.shape[1:]).transpose(1, 2)
