"""Tree attention with the instructions of Hopper GPUs (wgmma, TMA, warp specialisation), written in Gluon.

The same passes over the same lists as `portable`, in and out alike, about 1.5 times as fast; bfloat16 and float16,
head dimensions 64 and 128; `kernel.backend` sends everything else to `portable`.

One difference in memory: lse and delta have T_pad places per head, so that whole tiles of them can be copied.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treepack.attention.hopper.forward import forward_kernel
from treepack.attention.hopper.key_backward import key_kernel
from treepack.attention.hopper.query_backward import query_kernel
from treepack.attention.portable.forward import LOG2E, token_major
from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE, Schedule

# Key granules per tile and stages per ring: the fastest on an H200 of what fits beside 128 rows of queries into 227 KB
# of shared memory. The forward needs 4 granules, the whole diagonal in its first tile; for dq two at a time are faster
# than four (head dimension 64: 3.7 ms against 5.8), and a third stage of queries gains dk and dv nothing.
FORWARD = {"GRANULES": 4, "STAGES": 2}
QUERY = {"GRANULES": 2, "STAGES": 3}
KEY = {"STAGES": 2}

# 12 warps of 168 registers start; the producer hands most of its own to the consumers, which then have 240.
LAUNCH = {"num_warps": 4, "maxnreg": 168}

# Keys and values of the heads that run at one time should stay in the L2 cache.
CACHE_BYTES = 32_000_000


def forward(query: Tensor, key: Tensor, value: Tensor, schedule: Schedule, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] in the dtype of `query` and base-2 log-sum-exp, float32 [B, H, T_pad]."""
    batch, heads, length, _ = query.shape
    padded, blocks = schedule.end.shape[1], schedule.query_order.shape[1]
    group = heads // key.shape[1]
    out = token_major(query)
    lse = torch.empty((batch, heads, padded), dtype=torch.float32, device=query.device)
    q, q_at = _described(query, QUERY_BLOCK)
    k, k_at = _described(key, GRANULE)
    v, v_at = _described(value, GRANULE)
    forward_kernel[(batch * heads * blocks,)](
        q,
        k,
        v,
        q_at,
        k_at,
        v_at,
        out,
        out.stride()[:3],
        lse,
        schedule.end,
        schedule.granules,
        schedule.query_offsets,
        schedule.query_partial,
        schedule.query_order,
        length,
        padded,
        batch,
        heads,
        blocks,
        _section(key, 1) * group,
        scale * LOG2E,
        GROUP=group,
        **FORWARD,
        **LAUNCH,
    )
    return out, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    schedule: Schedule,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their shapes and dtypes and in memory [B, T, H, D].

    Args:
        out, lse: what `forward` returned for the same query, key, value, schedule and scale.
        grad: [B, H, T, D], the gradient of `out`.
    """
    delta = torch.empty_like(lse)
    batch, heads, length, width = query.shape
    padded = lse.shape[-1]
    _delta_kernel[(batch * heads * padded // QUERY_TILE,)](
        out, grad, delta, out.stride()[:3], grad.stride()[:3], length, padded, heads, D=width, BLOCK=QUERY_TILE
    )
    dq = _query_gradient(query, key, value, grad, lse, delta, schedule, scale)
    dk, dv = _key_gradients(query, key, value, grad, lse, delta, schedule, scale)
    return dq, dk, dv


def _query_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    schedule: Schedule,
    scale: float,
) -> Tensor:
    batch, heads, length, _ = query.shape
    group, blocks = heads // key.shape[1], schedule.query_order.shape[1]
    dq = token_major(query)
    q, q_at = _described(query, QUERY_BLOCK)
    do, do_at = _described(grad, QUERY_BLOCK)
    k, k_at = _described(key, GRANULE)
    v, v_at = _described(value, GRANULE)
    query_kernel[(batch * heads * blocks,)](
        q,
        do,
        k,
        v,
        q_at,
        do_at,
        k_at,
        v_at,
        lse,
        delta,
        dq,
        dq.stride()[:3],
        schedule.end,
        schedule.granules,
        schedule.query_offsets,
        schedule.query_partial,
        schedule.query_order,
        length,
        lse.shape[-1],
        batch,
        heads,
        blocks,
        _section(key, 1) * group,
        scale * LOG2E,
        scale,
        GROUP=group,
        **QUERY,
        **LAUNCH,
    )
    return dq


def _key_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    schedule: Schedule,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, groups, length, _ = key.shape
    group, blocks = query.shape[1] // groups, schedule.key_order.shape[1]
    dk, dv = token_major(key), token_major(value)
    q, q_at = _described(query, QUERY_TILE)
    do, do_at = _described(grad, QUERY_TILE)
    k, k_at = _described(key, GRANULE)
    v, v_at = _described(value, GRANULE)
    key_kernel[(batch * groups * blocks,)](
        q,
        do,
        k,
        v,
        q_at,
        do_at,
        k_at,
        v_at,
        lse,
        delta,
        dk,
        dk.stride()[:3],
        dv,
        dv.stride()[:3],
        schedule.end,
        schedule.key_granules,
        schedule.key_ranges,
        schedule.key_order,
        length,
        lse.shape[-1],
        batch,
        groups,
        blocks,
        _section(key, group),
        scale * LOG2E,
        scale,
        GROUP=group,
        **KEY,
        **LAUNCH,
    )
    return dk, dv


def _described(x: Tensor, rows: int) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """A descriptor that copies `rows` tokens of a head of x [B, H, T, D] at a time, and how heads lie under it.

    The copy engine sees a matrix, beyond whose edges it reads zeros: tokens below one another, and heads either below
    one another too or side by side. Token t of head h of batch row b begins at row b * batch + h * head + t and at
    column h * column, where (batch, head, column) is the second result. Tensors that are neither are copied.
    """
    batch, heads, length, width = x.shape
    of_batch, of_head, of_token, step = x.stride()
    aligned = x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:3])
    rows_apart = step == 1 and of_token >= width and aligned
    below = of_head == length * of_token and (batch == 1 or of_batch == heads * of_head)
    beside = (heads - 1) * of_head + width <= of_token and (batch == 1 or of_batch == length * of_token)
    if rows_apart and below:
        shape, at = [batch * heads * length, width], (heads * length, length, 0)
    elif rows_apart and beside:
        shape, at = [batch * length, (heads - 1) * of_head + width], (length if batch > 1 else 0, 0, of_head)
    else:
        return _described(torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x), rows)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, shape, [of_token, 1], [rows, width], layout), at


@functools.cache
def _divisor(number: int, most: int) -> int:
    """The greatest divisor of `number` that is at most `most`, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and (n == 1 or n <= most))


def _section(key: Tensor, width: int) -> int:
    """How many key heads run at one time: as many as leave room in the cache for `width` pairs like k and v."""
    batch, groups, length, size = key.shape
    return _divisor(groups, CACHE_BYTES // (2 * width * batch * length * size * key.element_size()))


@triton.jit(do_not_specialize=["length"])
def _delta_kernel(o, do, delta, o_strides, do_strides, length, padded, heads, D: tl.constexpr, BLOCK: tl.constexpr):
    """Delta = sum over d of o * do, and 0 for the tokens that pad the row."""
    blocks = padded // BLOCK
    i_t = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    i_h = (tl.program_id(0) // blocks % heads).to(tl.int64)
    i_b = (tl.program_id(0) // (blocks * heads)).to(tl.int64)
    o_d = tl.arange(0, D)[None, :]
    inside = (i_t < length)[:, None]
    rows = i_t.to(tl.int64)[:, None]
    b_o = tl.load(o + i_b * o_strides[0] + i_h * o_strides[1] + rows * o_strides[2] + o_d, mask=inside, other=0.0)
    b_do = tl.load(do + i_b * do_strides[0] + i_h * do_strides[1] + rows * do_strides[2] + o_d, mask=inside, other=0.0)
    tl.store(delta + (i_b * heads + i_h) * padded + i_t, tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1))
