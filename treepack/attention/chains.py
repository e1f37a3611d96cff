"""Rows in which no token has two children: whole rollouts side by side, for which causal attention is enough.

    subtree_end   4 4 4 4 7 7 7 8        offsets   0 4 7 8        three chains

Such a row needs no tree, so torch's own FlashAttention for sequences of different lengths takes it. Whether a row is
one is found once, when its schedule is prepared, and never asked in a layer.

In: query [B, H, T, D], key and value [B, H_kv, T, D], bfloat16 or float16 on a GPU. Under
`torch.use_deterministic_algorithms` the backward is deterministic and slower; else it sums dq in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_TILE = 128


@dataclass(frozen=True)
class Chains:
    """B rows of T tokens as sequences end to end.

    rows       B
    length     T
    offsets    int32 [num_chains + 1], the first token of each chain in the B * T tokens, then B * T
    longest    tokens of the longest chain
    """

    rows: int
    length: int
    offsets: Tensor
    longest: int

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Chains:
        """The same chains with their offsets on `device`."""
        return replace(self, offsets=self.offsets.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Chains:
        """The same chains in pinned memory, from where `to` need not block."""
        return replace(self, offsets=self.offsets.pin_memory())


def find_chains(subtree_end: Tensor) -> Chains | None:
    """The chains of B rows, or None if some token branches or the chains are too uneven for one launch.

    Args:
        subtree_end: int [B, T]. On a GPU the answer waits for it, so the CPU is the place to ask.
    """
    rows, length = subtree_end.shape
    last = subtree_end == torch.arange(1, length + 1, device=subtree_end.device)
    inside = subtree_end == subtree_end.roll(-1, dims=1)
    inside[:, -1] = False
    if not bool((last | inside).all()):
        return None
    ends = last.flatten().nonzero().squeeze(-1) + 1
    offsets = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    lengths = offsets.diff()
    longest = int(lengths.max())
    # The kernel launches as many query tiles for every chain as the longest one has. Those beyond a chain's end leave
    # at once, yet 10,000 one-token chains beside a long one would launch 10,000 times too many.
    launched, needed = len(lengths) * -(-longest // _TILE), int(((lengths + _TILE - 1) // _TILE).sum())
    return Chains(rows, length, offsets, longest) if launched <= 4 * needed else None


def chain_attention(query: Tensor, key: Tensor, value: Tensor, chains: Chains, *, scale: float | None = None) -> Tensor:
    """Causal softmax attention inside every chain: [B, H, T, D], a view of [B, T, H, D] in memory."""
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    offsets, longest = chains.offsets, chains.longest
    # The operator behind torch.nn.attention.varlen, whose own arguments change from release to release.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *rows, offsets, offsets, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out.reshape(chains.rows, chains.length, *out.shape[1:]).transpose(1, 2)
