"""Launches of the Hopper kernels (wgmma, TMA, warp specialisation; written in Gluon).

Forward and backward make the same passes over the same lists as `portable`, with the same inputs and outputs, about 1.5
times as fast. They take bfloat16 and float16, head dimensions 64 and 128, windows, chunks and sinks, but no caps of
scores. `wide_launch` has other head dimensions, and `autograd.backend` gives everything else to `portable`.

One difference in memory: lse and delta have T_pad places per head, so that the copy engine can read whole tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treepack.attention.hopper.forward import forward_kernel
from treepack.attention.hopper.key_backward import key_kernel
from treepack.attention.hopper.query_backward import query_kernel
from treepack.attention.kernel_launch import (
    Incoming,
    Inputs,
    Launch,
    key_arguments,
    key_heads_per_section,
    key_window,
    query_arguments,
    query_window,
    sink_gradient,
    token_major,
)
from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE, Schedule

# Key granules per tile and stages per ring: the fastest values on an H200 that fit into 227 KB of shared memory beside
# 128 rows of queries. The forward needs 4 granules, because its first tile must hold the whole diagonal. For dq, 2
# granules are faster than 4 (head dimension 64: 3.7 ms against 5.8). For dk and dv, a third stage gains nothing.
FORWARD = {"GRANULES": 4, "STAGES": 2}
QUERY = {"GRANULES": 2, "STAGES": 3}
KEY = {"STAGES": 2}

# A program starts with 12 warps of 168 registers. The producer keeps 24 and gives the others to the consumers, which
# then have 240 each: 4 * 24 + 8 * 240 <= 12 * 168.
OPTIONS = {"num_warps": 4, "maxnreg": 168}

# Keys and values of the heads that run at one time should stay in the L2 cache, which has 50 MB (H100) or 60 MB (H200).
CACHE_BYTES = 32_000_000


def forward(
    query: Tensor, key: Tensor, value: Tensor, schedule: Schedule, scale: float, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T, D] in the dtype of `query` and base-2 log-sum-exp, float32 [B, H, T_pad].

    Args:
        query, key, value, schedule, scale: as in `portable.forward`.
        sinks: float32 [H], one more score per head, without a value.
    """
    out = token_major(query)
    places = (*query.shape[:2], schedule.end.shape[1])
    lse = torch.empty(places, dtype=torch.float32, device=query.device)
    forward_launch(Inputs(query, key, value, schedule, scale, sinks), out, lse).run()
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
    *,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and sinks, the first three in their dtypes and in memory [B, T, H, D].

    Args:
        query, key, value, schedule, scale, sinks: as in `forward`.
        out, lse: the results of `forward` for the same arguments.
        grad: [B, H, T, D], the gradient of `out`.
    """
    inputs = Inputs(query, key, value, schedule, scale, sinks)
    incoming = Incoming(grad, lse, compute_delta(out, grad, lse))
    dq, dk, dv = token_major(query), token_major(key), token_major(value)
    query_launch(inputs, incoming, dq).run()
    key_launch(inputs, incoming, dk, dv).run()
    # The weights of the sinks come from lse, so that the two kernels do not see them.
    dsinks = None if sinks is None else sink_gradient(sinks, lse, incoming.delta, schedule.length)
    return dq, dk, dv, dsinks


def forward_launch(inputs: Inputs, out: Tensor, lse: Tensor) -> Launch:
    """Describe the launch that writes `out` [B, H, T, D] and `lse` [B, H, T_pad]."""
    arguments = {
        **_matrix("q", inputs.query, QUERY_BLOCK),
        **_matrix("k", inputs.key, GRANULE),
        **_matrix("v", inputs.value, GRANULE),
        "o_pointer": out,
        "o_strides": out.stride()[:3],
        "lse_pointer": lse,
        "sinks": lse if inputs.sinks is None else inputs.sinks,
        **query_window(inputs),
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    sinks = inputs.sinks is not None
    constants = {"GROUP": inputs.group, **FORWARD, "WINDOWED": inputs.is_windowed, "SINKS": sinks}
    return Launch(forward_kernel, _query_programs(inputs), arguments, constants, OPTIONS)


def query_launch(inputs: Inputs, incoming: Incoming, dq: Tensor) -> Launch:
    """Describe the launch that writes `dq` [B, H, T, D]."""
    arguments = {
        **_matrix("q", inputs.query, QUERY_BLOCK),
        **_matrix("do", incoming.grad, QUERY_BLOCK),
        **_matrix("k", inputs.key, GRANULE),
        **_matrix("v", inputs.value, GRANULE),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dq_pointer": dq,
        "dq_strides": dq.stride()[:3],
        "scale": inputs.scale,
        **query_window(inputs),
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    constants = {"GROUP": inputs.group, **QUERY, "WINDOWED": inputs.is_windowed}
    return Launch(query_kernel, _query_programs(inputs), arguments, constants, OPTIONS)


def key_launch(inputs: Inputs, incoming: Incoming, dk: Tensor, dv: Tensor) -> Launch:
    """Describe the launch that writes `dk` and `dv`, both [B, H_kv, T, D]."""
    batch, kv_heads = inputs.key.shape[:2]
    arguments = {
        **_matrix("q", inputs.query, QUERY_TILE),
        **_matrix("do", incoming.grad, QUERY_TILE),
        **_matrix("k", inputs.key, GRANULE),
        **_matrix("v", inputs.value, GRANULE),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dk_pointer": dk,
        "dk_strides": dk.stride()[:3],
        "dv_pointer": dv,
        "dv_strides": dv.stride()[:3],
        "scale": inputs.scale,
        **key_window(inputs),
        **key_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES, pairs=inputs.group)),
    }
    programs = batch * kv_heads * inputs.schedule.key_order.shape[1]
    constants = {"GROUP": inputs.group, **KEY, "WINDOWED": inputs.is_windowed}
    return Launch(key_kernel, programs, arguments, constants, OPTIONS)


def _query_programs(inputs: Inputs) -> int:
    batch, heads = inputs.query.shape[:2]
    return int(batch * heads * inputs.schedule.query_order.shape[1])


def _matrix(name: str, x: Tensor, rows: int) -> dict[str, Any]:
    """Return the two arguments that a kernel needs to copy `rows` tokens of a head of `x` at a time."""
    descriptor, steps = _describe(x, rows)
    return {f"{name}_descriptor": descriptor, f"{name}_at": steps}


def _describe(x: Tensor, rows: int) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """Return a descriptor that copies `rows` tokens of one head of x [B, H, T, D], and the steps of `as_matrix`."""
    x, shape, at = as_matrix(x)
    width = x.shape[-1]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, shape, [x.stride(2), 1], [rows, width], layout), at


def as_matrix(x: Tensor) -> tuple[Tensor, list[int], tuple[int, int, int]]:
    """Return x [B, H, T, D], the shape of the matrix that it is to the copy engine, and the steps between heads.

    The copy engine reads a matrix, and zeros beyond its edges. The rows of the matrix are tokens; the heads follow one
    another either as rows or as columns. Token t of head h of batch row b starts at row b * batch + h * head + t and at
    column h * column, with (batch, head, column) the third result. A tensor that has neither form is copied first.
    """
    # [B, H, T, D] in memory, 2 x 3 x 100 x 64: heads are rows,    matrix [600, 64],  steps (300, 100, 0)
    # [B, T, H, D] in memory, 2 x 100 x 3 x 64: heads are columns, matrix [200, 192], steps (100, 0, 64)
    batch, heads, length, width = x.shape
    of_batch, of_head, of_token, step = x.stride()
    aligned = x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:3])
    rows_apart = step == 1 and of_token >= width and aligned
    below = of_head == length * of_token and (batch == 1 or of_batch == heads * of_head)
    beside = (heads - 1) * of_head + width <= of_token and (batch == 1 or of_batch == length * of_token)
    if rows_apart and below:
        return x, [batch * heads * length, width], (heads * length, length, 0)
    if rows_apart and beside:
        shape = [batch * length, (heads - 1) * of_head + width]
        return x, shape, (length if batch > 1 else 0, 0, of_head)
    return as_matrix(torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x))


def compute_delta(out: Tensor, grad: Tensor, lse: Tensor) -> Tensor:
    """Return delta, the sum of out * grad over the head dimension, in the shape of `lse`."""
    batch, heads, length, width = out.shape
    padded = lse.shape[-1]
    delta = torch.empty_like(lse)
    _delta_kernel[(batch * heads * padded // QUERY_TILE,)](
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
        BLOCK=QUERY_TILE,
    )
    return delta


@triton.jit(do_not_specialize=["length"])
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
    # T_pad is a multiple of BLOCK, so only `inside` masks tokens; D is WIDTH rounded up to a power of two.
    blocks = padded // BLOCK
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
    tl.store(delta + (i_b * heads + i_h) * padded + i_t, tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1))
