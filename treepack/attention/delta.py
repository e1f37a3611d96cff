"""Delta: the sum of output * gradient over the head dimension, which all kernels of the backward subtract.

out, grad [B, H, T, D_v], lse [B, H, T_pad] --compute_delta--> delta, float32 [B, H, T_pad], 0 after the row

In a rectangle T and T_pad count queries; this kernel does not need their tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.schedule import QUERY_TILE


def compute_delta(out: Tensor, grad: Tensor, lse: Tensor) -> Tensor:
    """Return delta, the sum of out * grad over the head dimension, in the shape of `lse`."""
    batch, heads, length, width = out.shape
    padded = lse.shape[-1]
    delta = torch.empty_like(lse)
    _delta_kernel[(batch * heads * triton.cdiv(padded, QUERY_TILE),)](
        out,
        grad,
        delta,
        out.stride()[:3],
        grad.stride()[:3],
        length,
        padded,
        heads,
        WIDTH=width,
        D=triton.next_power_of_2(width),
        BLOCK=QUERY_TILE,  # not tuned: the kernel reads both tensors once and has no product
    )
    return delta


@triton.jit(do_not_specialize=["length", "padded"])
def _delta_kernel(
    o,
    do,
    delta,
    o_strides,
    do_strides,
    length,
    padded,
    heads,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write delta of BLOCK consecutive tokens of one head, and 0 for the tokens that pad the row."""
    # T_pad is T itself, or T rounded up to a multiple of BLOCK. D is WIDTH rounded up to a power of two.
    blocks = tl.cdiv(padded, BLOCK)
    # [BLOCK]
    i_t = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    i_h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    i_b = (tl.program_id(0) // (blocks * heads)).to(tl.int64)
    # [1, D]
    o_d = tl.arange(0, D)[None, :]
    # [BLOCK, D]
    inside = (i_t < length)[:, None] & (o_d < WIDTH)
    rows = i_t.to(tl.int64)[:, None]
    b_o = tl.load(o + i_b * o_strides[0] + i_h * o_strides[1] + rows * o_strides[2] + o_d, mask=inside, other=0.0)
    b_do = tl.load(do + i_b * do_strides[0] + i_h * do_strides[1] + rows * do_strides[2] + o_d, mask=inside, other=0.0)
    # [BLOCK, D] -> [BLOCK]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(delta + (i_b * heads + i_h) * padded + i_t, b_delta, mask=i_t < padded)
