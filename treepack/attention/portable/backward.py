"""Backward of `portable_forward`: three kernels, one for each line below.

delta       sum(o * do) per query, which the other two kernels read
dq          one program per block of queries and head, over the same list of key tiles as the forward
dk and dv   one program per block of keys and key head, over the query heads of its group and its range of queries

The dk and dv kernel computes the transposed tile s' = k q'. Its rows are the keys that the program sums for, so p' and
ds' enter the second product from registers. Its block is 4 gathered granules, or a part of them. It passes over a range
of queries, both ends of it under the mask, or with windows over a list of tiles, the masked ones first. The program
sums over the heads of a group itself: no atomics, one order, equal bits.

A sink is part of lse and of the output, so these kernels need no change for it. With a cap, ds is multiplied by the
derivative of the cap.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.delta import compute_delta
from treepack.attention.kernel_launch import (
    AttentionInputs,
    BackwardInputs,
    InputGradients,
    KernelLaunch,
    key_arguments,
    query_arguments,
    sink_gradient,
    token_major,
)
from treepack.attention.portable.forward import (
    PortableConfig,
    bend,
    cap_of,
    configs_of,
    constants_of,
    heads_at_a_time,
    key_tokens,
    load_key_tile,
    load_portable_rows,
    options_of,
    portable_place,
    store_portable_rows,
)
from treepack.attention.schedule import KEY_BLOCK, QUERY_BLOCK


@triton.jit
def _query_section(
    b_dq, b_q, b_do, b_lse, b_delta, o_q, b_start, p_k, p_v, p_end, p_granules, first, last, k_stride, v_stride,
    length, factor, cap,
    TILE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tiles [first, last) of a list to dq."""
    # With more than one stage, Triton 3.6 pipelines the masked loads of `ends` wrongly.
    STAGES: tl.constexpr = 1 if MASKED else None
    for entry in tl.range(first, last, TILE // 32, num_stages=STAGES):
        o_k, b_end, b_k, b_v = load_key_tile(
            p_k, p_v, p_end, p_granules, entry, k_stride, v_stride, length, TILE, D, D_V, BLOCK_D, BLOCK_V, MASKED
        )
        # [BLOCK, BLOCK_D] @ [BLOCK_D, TILE] -> [BLOCK, TILE]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        unit = factor
        if CAPPED:
            # [BLOCK, TILE]
            b_s = bend(b_s, factor, cap)
            unit = cap
        # [BLOCK, TILE]
        b_p = tl.exp2(b_s * unit - b_lse[:, None])
        if MASKED:
            # [1, TILE] <= [BLOCK, 1] and [BLOCK, 1] < [1, TILE] -> [BLOCK, TILE]
            m_s = (o_k[None, :] <= o_q[:, None]) & (o_q[:, None] < b_end[None, :])
            if WINDOWED:
                m_s = m_s & (b_start[:, None] <= o_k[None, :])
            b_p = tl.where(m_s, b_p, 0.0)
        # [BLOCK, BLOCK_V] @ [BLOCK_V, TILE] -> [BLOCK, TILE]
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        # [BLOCK, TILE] * ([BLOCK, TILE] - [BLOCK, 1])
        b_ds = b_p * (b_dp - b_delta[:, None])
        if CAPPED:
            b_ds *= 1.0 - b_s * b_s
        # [BLOCK, TILE] @ [TILE, BLOCK_D] -> [BLOCK, BLOCK_D]
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq


@triton.jit(do_not_specialize=["length", "blocks", "section"])
def _query_kernel(
    q, k, v, do, lse, delta, dq, ends, starts, granules, query_offsets, query_partial, query_order,
    q_strides, k_strides, v_strides, do_strides, dq_strides,
    length, origin, padded, batch, heads, section, blocks, scale, factor, cap,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 128 // BLOCK  # programs that share one query block and its list
    i_h, i_b, rank = portable_place(tl.program_id(0), section, batch, blocks * PARTS)
    i_q = tl.load(query_order + i_b * blocks + rank // PARTS)
    p_offset = query_offsets + i_b * (blocks + 1) + i_q
    first, last = tl.load(p_offset), tl.load(p_offset + 1)
    middle = first + tl.load(query_partial + i_b * blocks + i_q)

    row, head = i_b.to(tl.int64), i_h.to(tl.int64)
    p_k = k + row * k_strides[0] + (head // GROUP) * k_strides[1]
    p_v = v + row * v_strides[0] + (head // GROUP) * v_strides[1]
    p_end = ends + row * padded
    # [BLOCK]
    o_row = i_q * 128 + (rank % PARTS) * BLOCK + tl.arange(0, BLOCK)
    o_q = origin + o_row
    m_q = o_q < length
    b_start = o_q
    if WINDOWED:
        b_start = tl.load(starts + row * padded + o_q)
    at = (row * heads + head) * (length - origin)
    b_lse = tl.load(lse + at + o_row, mask=m_q, other=0.0)
    b_delta = tl.load(delta + at + o_row, mask=m_q, other=0.0)
    # [BLOCK, BLOCK_D] and [BLOCK, BLOCK_V]
    b_q = load_portable_rows(q + row * q_strides[0] + head * q_strides[1], o_row, m_q, q_strides[2], D, BLOCK_D, True)
    b_do = load_portable_rows(
        do + row * do_strides[0] + head * do_strides[1], o_row, m_q, do_strides[2], D_V, BLOCK_V, True
    )
    b_dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    b_dq = _query_section(
        b_dq, b_q, b_do, b_lse, b_delta, o_q, b_start, p_k, p_v, p_end, granules, first, middle, k_strides[2],
        v_strides[2], length, factor, cap, TILE, D, D_V, BLOCK_D, BLOCK_V, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    b_dq = _query_section(
        b_dq, b_q, b_do, b_lse, b_delta, o_q, b_start, p_k, p_v, p_end, granules, middle, last, k_strides[2],
        v_strides[2], length, factor, cap, TILE, D, D_V, BLOCK_D, BLOCK_V, False, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    p_dq = dq + row * dq_strides[0] + head * dq_strides[1]
    # [BLOCK, BLOCK_D]
    store_portable_rows(p_dq, o_row, m_q, dq_strides[2], b_dq * scale, D, BLOCK_D)


@triton.jit
def _key_section(
    b_dk, b_dv, b_k, b_v, o_k, b_end, p_q, p_do, p_lse, p_delta, p_start, p_tiles, first, skip_from, skip, tiles,
    q_strides, do_strides, length, origin, num_queries, factor, cap,
    GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add `tiles` tiles of queries, of every head of the group, to dk and dv.

    Without windows, the tiles start at token `first` and leave out the `skip` queries that start at `skip_from`. With
    windows, they are parts of the tiles of 64 queries whose first tokens `p_tiles` lists from its entry `first` on. One
    loop runs over heads and tiles, so short ranges and lists fill the pipeline too.
    """
    # TILE 64, first 128, skip_from 192, skip 256, tiles 3 -> starts 128, 448, 512, and the same for the next head
    # WINDOWED, TILE 32, p_tiles 128 512, tiles 4          -> starts 128, 160, 512, 544, and the same
    PER_ENTRY: tl.constexpr = 64 // TILE
    for i in tl.range(0, tiles * GROUP):
        head = (i // tiles).to(tl.int64)
        if WINDOWED:
            start = tl.load(p_tiles + first + i % tiles // PER_ENTRY) + i % PER_ENTRY * TILE
        else:
            start = first + (i % tiles) * TILE
            if MASKED:
                start += tl.where(start >= skip_from, skip, 0)
        # [TILE]
        o_q = start + tl.arange(0, TILE)
        o_row = o_q - origin
        m_q = o_q < length
        # [TILE, BLOCK_D] and [TILE, BLOCK_V]
        b_q = load_portable_rows(p_q + head * q_strides[1], o_row, m_q, q_strides[2], D, BLOCK_D, MASKED)
        b_do = load_portable_rows(p_do + head * do_strides[1], o_row, m_q, do_strides[2], D_V, BLOCK_V, MASKED)
        # [TILE]
        at = head * num_queries
        if MASKED:
            b_lse = tl.load(p_lse + at + o_row, mask=m_q, other=0.0)
            b_delta = tl.load(p_delta + at + o_row, mask=m_q, other=0.0)
        else:
            b_lse = tl.load(p_lse + at + o_row)
            b_delta = tl.load(p_delta + at + o_row)
        # [BLOCK, BLOCK_D] @ [BLOCK_D, TILE] -> [BLOCK, TILE], keys by queries
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        unit = factor
        if CAPPED:
            # [BLOCK, TILE]
            b_s = bend(b_s, factor, cap)
            unit = cap
        # [BLOCK, TILE]
        b_p = tl.exp2(b_s * unit - b_lse[None, :])
        if MASKED:
            # [BLOCK, 1] <= [1, TILE] and [1, TILE] < [BLOCK, 1] -> [BLOCK, TILE]
            m_s = (o_k[:, None] <= o_q[None, :]) & (o_q[None, :] < b_end[:, None])
            if WINDOWED:
                # [TILE]
                b_start = tl.load(p_start + o_q)
                m_s = m_s & (b_start[None, :] <= o_k[:, None])
            b_p = tl.where(m_s, b_p, 0.0)
        # [BLOCK, TILE] @ [TILE, BLOCK_V] -> [BLOCK, BLOCK_V]
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        # [BLOCK, BLOCK_V] @ [BLOCK_V, TILE] -> [BLOCK, TILE]
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        # [BLOCK, TILE] * ([BLOCK, TILE] - [1, TILE])
        b_ds = b_p * (b_dp - b_delta[None, :])
        if CAPPED:
            b_ds *= 1.0 - b_s * b_s
        # [BLOCK, TILE] @ [TILE, BLOCK_D] -> [BLOCK, BLOCK_D]
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["length", "blocks", "section"])
def _key_kernel(
    q, k, v, do, lse, delta, dk, dv, ends, starts, key_tiles, key_granules, key_ranges, key_order,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    length, origin, padded, batch, kv_heads, section, blocks, scale, factor, cap,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 128 // BLOCK  # programs that share one key block and its range
    i_h, i_b, rank = portable_place(tl.program_id(0), section, batch, blocks * PARTS)
    i_k = i_b * blocks + tl.load(key_order + i_b * blocks + rank // PARTS)
    p_range = key_ranges + i_k * 4
    first, full_begin, full_end, last = (
        tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3)
    )  # fmt: skip

    row, head = i_b.to(tl.int64), i_h.to(tl.int64)
    # [BLOCK]
    o_k = key_tokens(key_granules, i_k * 4 + (rank % PARTS) * (BLOCK // 32), BLOCK)
    m_k = (o_k >= 0) & (o_k < length)
    b_end = tl.load(ends + row * padded + o_k, mask=o_k >= 0, other=0)
    # [BLOCK, BLOCK_D] and [BLOCK, BLOCK_V]
    b_k = load_portable_rows(k + row * k_strides[0] + head * k_strides[1], o_k, m_k, k_strides[2], D, BLOCK_D, True)
    b_v = load_portable_rows(v + row * v_strides[0] + head * v_strides[1], o_k, m_k, v_strides[2], D_V, BLOCK_V, True)
    b_dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)

    num_queries = length - origin
    p_q = q + row * q_strides[0] + head * GROUP * q_strides[1]
    p_do = do + row * do_strides[0] + head * GROUP * do_strides[1]
    at = (row * kv_heads * GROUP + head * GROUP) * num_queries
    p_start = starts + row * padded
    # First both masked ends of the range as if they were one, then the full middle:
    #     first ... full_begin | full_begin ... full_end | full_end ... last
    #     masked                 `bare` queries            masked
    # The list of a windowed layer counts entries of 64 queries, and ends with the full ones: full_end is last.
    PER_UNIT: tl.constexpr = 64 // TILE if WINDOWED else 1
    UNIT: tl.constexpr = 1 if WINDOWED else TILE
    bare = full_end - full_begin
    b_dk, b_dv = _key_section(
        b_dk, b_dv, b_k, b_v, o_k, b_end, p_q, p_do, lse + at, delta + at, p_start, key_tiles, first, full_begin, bare,
        (last - first - bare) // UNIT * PER_UNIT, q_strides, do_strides, length, origin, num_queries, factor, cap,
        GROUP, TILE, D, D_V, BLOCK_D, BLOCK_V, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    b_dk, b_dv = _key_section(
        b_dk, b_dv, b_k, b_v, o_k, b_end, p_q, p_do, lse + at, delta + at, p_start, key_tiles, full_begin, 0, 0,
        bare // UNIT * PER_UNIT, q_strides, do_strides, length, origin, num_queries, factor, cap,
        GROUP, TILE, D, D_V, BLOCK_D, BLOCK_V, False, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    # [BLOCK, BLOCK_D] and [BLOCK, BLOCK_V]
    store_portable_rows(
        dk + row * dk_strides[0] + head * dk_strides[1], o_k, m_k, dk_strides[2], b_dk * scale, D, BLOCK_D
    )
    store_portable_rows(dv + row * dv_strides[0] + head * dv_strides[1], o_k, m_k, dv_strides[2], b_dv, D_V, BLOCK_V)


def portable_backward(inputs: AttentionInputs, out: Tensor, lse: Tensor, grad: Tensor) -> InputGradients:
    """Return the gradients of query, key, value and sinks, the first three in their dtypes and in memory [B, T, H, D].

    Args:
        inputs: the operands.
        out, lse: the results of `portable_forward` for the same operands.
        grad: the gradient of `out`; stride 1 in the last dimension and any other strides.
    """
    query, key, value = inputs[:3]
    incoming = BackwardInputs(grad, lse, compute_delta(out, grad, lse))
    dq, dk, dv = token_major(query), token_major(key), token_major(value)
    configs = configs_of(query, value)
    query_launch(inputs, incoming, dq, configs.query).run()
    key_launch(inputs, incoming, dk, dv, configs.key).run()
    return dq, dk, dv, sink_gradient(inputs, incoming)


def query_launch(inputs: AttentionInputs, incoming: BackwardInputs, dq: Tensor, config: PortableConfig) -> KernelLaunch:
    """Describe the launch that writes `dq` [B, H, T - first, D]."""
    batch, heads = inputs.query.shape[:2]
    arguments = {
        "dq": dq,
        "dq_strides": dq.stride()[:3],
        **_tensor_arguments(inputs, incoming),
        **query_arguments(inputs, heads_at_a_time(inputs.key) * inputs.group),
    }
    programs = batch * heads * inputs.schedule.query_order.shape[1] * (QUERY_BLOCK // config.block)
    return KernelLaunch(_query_kernel, programs, arguments, constants_of(inputs, config), options_of(config))


def key_launch(
    inputs: AttentionInputs, incoming: BackwardInputs, dk: Tensor, dv: Tensor, config: PortableConfig
) -> KernelLaunch:
    """Describe the launch that writes `dk` [B, H_kv, T, D] and `dv` [B, H_kv, T, D_v]."""
    batch, kv_heads = inputs.key.shape[:2]
    arguments = {
        "dk": dk,
        "dv": dv,
        "dk_strides": dk.stride()[:3],
        "dv_strides": dv.stride()[:3],
        **_tensor_arguments(inputs, incoming),
        **key_arguments(inputs, heads_at_a_time(inputs.key)),
    }
    programs = batch * kv_heads * inputs.schedule.key_order.shape[1] * (KEY_BLOCK // config.block)
    return KernelLaunch(_key_kernel, programs, arguments, constants_of(inputs, config), options_of(config))


def _tensor_arguments(inputs: AttentionInputs, incoming: BackwardInputs) -> dict[str, Any]:
    """Return what both kernels with a loop read, beside their lists."""
    tensors = {"q": inputs.query, "k": inputs.key, "v": inputs.value, "do": incoming.grad}
    return {
        **tensors,
        **{f"{name}_strides": tensor.stride()[:3] for name, tensor in tensors.items()},
        "lse": incoming.lse,
        "delta": incoming.delta,
        "scale": inputs.scale,
        "cap": cap_of(inputs),
    }
