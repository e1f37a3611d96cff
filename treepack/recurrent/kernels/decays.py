"""Sums of decays inside chunks in Triton: forward from the first token of a chunk, backward from the last.

    g float32 [N, H]   --decays-->           a [N, H]    a[i] = sum of g[j] over the tokens j <= i of i's chunk
    da float32 [N, H]  --decays_backward-->  dg [N, H]   dg[j] = sum of da[i] over the tokens i >= j of j's chunk

    two chunks of 3 and 2 tokens:  g -1 -2 -4 | -8 -1   ->   a -1 -3 -7 | -8 -9

Each chunk starts its sums again, so that small sums of a late chunk are not differences of large ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.chunks import TokenChunks

_MAX_HEADS = 32  # per program


@triton.jit
def _sum_kernel(x, out, begin, length, heads, blocks, SIZE: tl.constexpr, BLOCK_H: tl.constexpr, REVERSE: tl.constexpr):
    # int64: N * H may exceed 2**31
    i_c = (tl.program_id(0) // blocks).to(tl.int64)
    first, count = tl.load(begin + i_c).to(tl.int64), tl.load(length + i_c)
    # [SIZE], [BLOCK_H]
    o_t = tl.arange(0, SIZE)
    o_h = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    # [SIZE, BLOCK_H]
    m_x = (o_t < count)[:, None] & (o_h < heads)[None, :]
    o_x = (first + o_t)[:, None] * heads + o_h[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0)
    tl.store(out + o_x, tl.cumsum(b_x, 0, reverse=REVERSE), mask=m_x)


def decay_sum_launch(x: Tensor, out: Tensor, chunks: TokenChunks, *, reverse: bool) -> KernelLaunch:
    """Return the launch that writes the sums of `x` [N, H] inside each chunk to `out`."""
    heads = x.shape[1]
    block = min(_MAX_HEADS, int(triton.next_power_of_2(heads)))
    blocks = triton.cdiv(heads, block)
    arguments = {
        "x": x,
        "out": out,
        "begin": chunks.begin,
        "length": chunks.length,
        "heads": heads,
        "blocks": blocks,
    }
    constants = {"SIZE": max(16, int(triton.next_power_of_2(chunks.size))), "BLOCK_H": block, "REVERSE": reverse}
    return KernelLaunch(
        _sum_kernel, len(chunks.begin) * blocks, arguments, constants, {"num_warps": 4, "num_stages": 1}
    )


def decays(g: Tensor, chunks: TokenChunks) -> Tensor:
    """Return the sum of the logarithms of decays from the first token of each chunk on, float32 [N, H].

    Args:
        g: [N, H] in any floating dtype; computed in float32.
        chunks: of the same tokens, on their device.
    """
    return _sum(g, chunks, reverse=False)


def decays_backward(da: Tensor, chunks: TokenChunks) -> Tensor:
    """Return the gradient of `g`, float32 [N, H], from the gradient of the sums."""
    return _sum(da, chunks, reverse=True)


def _sum(x: Tensor, chunks: TokenChunks, *, reverse: bool) -> Tensor:
    x = x.float().contiguous()
    out = torch.empty_like(x)
    if len(chunks.begin):
        decay_sum_launch(x, out, chunks, reverse=reverse).run()
    return out
