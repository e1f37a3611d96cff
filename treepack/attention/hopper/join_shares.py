"""Gradients of the key blocks whose queries were divided: the sums of their shares, added in the order of the shares.

sums of dk and dv, float32 [places, H_kv, 128, D] --join_shares--> rows of dk and dv
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.schedule import GRANULE, KEY_BLOCK, Schedule


def join_shares(sums: tuple[Tensor, Tensor], dk: Tensor, dv: Tensor, schedule: Schedule, scale: float) -> None:
    """Write the rows of `dk` and `dv` [B, H_kv, T, D] of all divided key blocks; dk is multiplied by `scale`."""
    assert schedule.shares is not None, "rows with windows have no shares"
    joined = schedule.shares.joined
    kv_heads, width = dk.shape[1], dk.shape[-1]
    for total, result, factor in zip(sums, (dk, dv), (scale, 1.0), strict=True):
        _join_kernel[(len(joined) * kv_heads * (KEY_BLOCK // GRANULE),)](
            total,
            result,
            result.stride()[:3],
            joined,
            schedule.key_granules,
            schedule.length,
            schedule.key_granules.shape[1],
            kv_heads,
            factor,
            D=width,
            ROWS=GRANULE,
            PARTS=KEY_BLOCK // GRANULE,
        )


@triton.jit(do_not_specialize=["length", "blocks"])
def _join_kernel(
    sums,
    result,
    strides,
    joined,
    granules,
    length,
    blocks,
    kv_heads,
    factor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add up one granule of one key head and block."""
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % kv_heads
    entry = joined + tl.program_id(0) // (PARTS * kv_heads) * 4
    row = tl.load(entry).to(tl.int64)
    granule = tl.load(granules + (row * blocks + tl.load(entry + 1)) * PARTS + part)
    first = tl.load(entry + 2).to(tl.int64)
    # [ROWS, 1] and [1, D]
    o_row = tl.arange(0, ROWS)[:, None]
    o_d = tl.arange(0, D)[None, :]
    p_sums = sums + (first * kv_heads + head) * (PARTS * ROWS * D) + (part * ROWS + o_row) * D + o_d
    # [ROWS, D]
    b_total = tl.zeros((ROWS, D), tl.float32)
    for _ in range(tl.load(entry + 3)):
        b_total += tl.load(p_sums)
        p_sums += kv_heads * (PARTS * ROWS * D)
    # Granule -1 has no token of the row.
    token = tl.where(granule < 0, length, granule * ROWS + o_row)
    p_result = result + row * strides[0] + head * strides[1] + token.to(tl.int64) * strides[2] + o_d
    tl.store(p_result, (b_total * factor).to(result.dtype.element_ty), mask=token < length)
