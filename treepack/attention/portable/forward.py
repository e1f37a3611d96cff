"""Tree attention in Triton for any GPU: the forward kernel, and the functions that it shares with `backward`.

One program computes one block of queries of one head, as `naive_forward` does: first the partial section of the block's
list, under the mask, then the full section, without a mask. A tile of keys is gathered from 1, 2 or 4 granules:

    key token = granules[entry + i // 32] * 32 + i % 32        i = 0 ... tile - 1; negative for granule -1
    visible   = start[query] <= key <= query < end[key]        without windows, only the part after start

A rectangle has queries from the token `origin` on, `Schedule.first`: in tensors of queries, token t is row t - origin.

In: query [B, H, T - origin, D], key [B, H_kv, T, D] and value [B, H_kv, T, D_v] in bfloat16, float16 or float32, D and
D_v <= 512, stride 1 in the last dimension and any other strides; a `Schedule` on their device; scale > 0; sinks float32
[H] or None; softcap > 0 or None. Out: output [B, H, T - origin, D_v], in memory tokens before heads, and the float32
base-2 log-sum-exp [B, H, T - origin] of the scores times scale, after the cap and with the sink. Tokens past T and
queries before `origin` are never read.

Programs start in the order of their work, the longest first, and one section of the heads at a time: as many heads as
have keys and values that fit into the cache. Triton does not specialise on arguments that differ from row to row, so
rows of other lengths compile nothing again. Sums are in float32 and in one order, so two runs agree in every bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.kernel_launch import (
    LOG2E,
    AttentionInputs,
    KernelLaunch,
    is_on_hopper,
    key_heads_per_section,
    padded_width,
    query_arguments,
    sink_argument,
    token_major,
)
from treepack.attention.schedule import QUERY_BLOCK

# Keys and values that one section of heads may have. The L2 cache of a large GPU has 40 to 50 MB (A100, H100), and
# queries and outputs pass through it too.
CACHE_BYTES = 32 << 20


class PortableConfig(NamedTuple):
    """Shape of one kernel: tokens per program (block) and per step of its loop (tile), warps, pipeline stages."""

    block: int
    tile: int
    num_warps: int
    num_stages: int


class LoopConfigs(NamedTuple):
    """Shapes of the three kernels that have a loop: forward, dq, and dk with dv."""

    forward: PortableConfig
    query: PortableConfig
    key: PortableConfig


# Each key of a table is the largest head dimension that its entry takes.
#
# HOPPER holds the fastest of about twenty shapes per kernel, measured on an H200 with 32 query and 8 key heads and an
# agent tree of 32,000 tokens. With 4 warps a program owns fewer rows than with 8, so two programs fit on one
# multiprocessor, and one multiplies while the other computes exponentials (head dimension 128: forward 6.7 ms against
# 8.3, dq 7.8 against 9.9, dk and dv 13.7 against 15.0). Entry 256 is not measured; no thread spills more than 16 bytes.
# Entry 512, with 8 query and 4 key heads: forward 37.1 ms, backward 149. A forward with 64 queries a program took 22.6
# ms, but only its time was measured, not its errors.
HOPPER = {
    64: LoopConfigs(PortableConfig(128, 64, 8, 3), PortableConfig(64, 64, 4, 3), PortableConfig(64, 64, 4, 3)),
    128: LoopConfigs(PortableConfig(128, 64, 4, 3), PortableConfig(64, 64, 4, 3), PortableConfig(64, 64, 4, 2)),
    256: LoopConfigs(PortableConfig(128, 32, 8, 3), PortableConfig(128, 32, 8, 2), PortableConfig(32, 64, 8, 2)),
    512: LoopConfigs(PortableConfig(32, 32, 8, 2), PortableConfig(32, 32, 8, 2), PortableConfig(32, 16, 8, 2)),
}
# For other GPUs, not measured. These shapes spill at most 36 bytes a thread on sm_80. Up to 256 they need at most 99 KB
# of shared memory, because small GPUs have no more; 512 needs 112 KB, and 194 in float32, which `dispatch` checks.
PORTABLE = {
    64: LoopConfigs(PortableConfig(128, 64, 4, 3), PortableConfig(128, 64, 8, 2), PortableConfig(128, 32, 8, 2)),
    128: LoopConfigs(PortableConfig(128, 32, 8, 3), PortableConfig(64, 32, 4, 2), PortableConfig(64, 32, 4, 2)),
    256: LoopConfigs(PortableConfig(64, 32, 8, 2), PortableConfig(64, 32, 8, 1), PortableConfig(32, 32, 8, 1)),
    512: LoopConfigs(PortableConfig(32, 32, 8, 2), PortableConfig(16, 32, 8, 1), PortableConfig(32, 16, 8, 1)),
}
# For float32, whose exact products the matrix units do not compute. Up to 256 these shapes spill at most 24 bytes a
# thread. At 512, dk and dv spill 1,440 bytes, because a program has at least 32 keys.
FLOAT32 = {
    64: LoopConfigs(PortableConfig(64, 32, 8, 1), PortableConfig(64, 32, 8, 1), PortableConfig(32, 32, 8, 1)),
    128: LoopConfigs(PortableConfig(32, 32, 8, 1), PortableConfig(32, 32, 8, 1), PortableConfig(32, 16, 8, 1)),
    256: LoopConfigs(PortableConfig(32, 32, 8, 1), PortableConfig(16, 32, 8, 1), PortableConfig(32, 16, 8, 1)),
    512: LoopConfigs(PortableConfig(16, 32, 8, 1), PortableConfig(16, 32, 8, 1), PortableConfig(32, 16, 16, 1)),
}


def configs_of(query: Tensor, value: Tensor) -> LoopConfigs:
    """Return the shapes of the kernels for the dtype, head dimensions and device of `query` and `value`."""
    if query.dtype == torch.float32:
        table = FLOAT32
    else:
        table = HOPPER if is_on_hopper(query) else PORTABLE
    width = max(query.shape[-1], value.shape[-1])
    return next(configs for limit, configs in table.items() if width <= limit)


@triton.jit
def portable_place(program, heads, batch, blocks):
    """Return head, row and rank (index in the row's order of blocks) of a program; `heads` is the size of a section.

    Sections vary slowest, then ranks, then rows, and the heads of a section vary fastest.
    """
    # 2 heads per section, 1 row, 3 blocks: programs 0 1 2 3 4 5 | 6 7 ... -> heads 0 1 0 1 0 1 | 2 3 ...
    #                                                                         ranks 0 0 1 1 2 2 | 0 0 ...
    places = batch * blocks
    section, rest = program // (places * heads), program % (places * heads)
    rank = rest // heads
    return section * heads + rest % heads, rank % batch, rank // batch


@triton.jit
def bend(b_s, factor, cap):
    """Return tanh(b_s * factor / cap): the share of the cap that a score reaches."""
    # tanh(x) = 1 - 2 / (1 + e**(2 x)); a large |x| gives e**(2 x) = inf or 0, and 1 or -1. 2 * log2(e) = 2.885...
    return 1.0 - 2.0 / (1.0 + tl.exp2(b_s * (factor / cap * 2.8853900817779268)))


@triton.jit
def key_tokens(p_granules, entry, TILE: tl.constexpr):
    """Return the TILE tokens of the granules that start at `entry`; negative for granule -1, which means none.

    Each granule is a scalar load. If they were loaded as one vector, Triton 3.6 would pipeline the granules instead of
    the keys, and read wrong keys.
    """
    # granules 9 -1 (TILE = 64) -> tokens 288 ... 319, -32 ... -1
    # [TILE]
    o_tile = tl.arange(0, TILE)
    b_granule = tl.full([TILE], 0, dtype=tl.int32) + tl.load(p_granules + entry)
    for i in tl.static_range(1, TILE // 32):
        b_granule = tl.where(o_tile // 32 == i, tl.load(p_granules + entry + i), b_granule)
    return b_granule * 32 + o_tile % 32


@triton.jit
def load_portable_rows(p_rows, o_rows, m_rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Return [rows, BLOCK_D] of the tokens `o_rows`: zero past D and, if MASKED, in rows whose `m_rows` is false."""
    # [BLOCK_D]
    o_d = tl.arange(0, BLOCK_D)
    # [rows, 1] + [1, BLOCK_D] -> [rows, BLOCK_D], in int64: 2**20 tokens of 32 heads of 128 are 2**32 elements
    p_tile = p_rows + o_rows.to(tl.int64)[:, None] * stride + o_d[None, :]
    # Masks cost registers and instructions, so full tiles and head dimensions equal to BLOCK_D have none.
    if MASKED:
        # [rows, BLOCK_D]
        if D == BLOCK_D:
            b_rows = tl.load(p_tile, mask=m_rows[:, None], other=0.0)
        else:
            b_rows = tl.load(p_tile, mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        # [rows, BLOCK_D]
        if D == BLOCK_D:
            b_rows = tl.load(p_tile)
        else:
            b_rows = tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)
    return b_rows


@triton.jit
def store_portable_rows(p_rows, o_rows, m_rows, stride, b_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write `b_rows` [rows, BLOCK_D] to the tokens `o_rows` for which `m_rows` is true."""
    # [BLOCK_D]
    o_d = tl.arange(0, BLOCK_D)
    # [rows, BLOCK_D]
    p_tile = p_rows + o_rows.to(tl.int64)[:, None] * stride + o_d[None, :]
    if D == BLOCK_D:
        tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_rows[:, None])
    else:
        tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_rows[:, None] & (o_d < D)[None, :])


@triton.jit
def load_key_tile(
    p_k, p_v, p_end, p_granules, entry, k_stride, v_stride, length,
    TILE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return one gathered tile: tokens, their subtree_end (0 for tokens of granule -1), keys and values."""
    # [TILE]
    o_k = key_tokens(p_granules, entry, TILE)
    m_k = (o_k >= 0) & (o_k < length)
    b_end = o_k
    if MASKED:
        # [TILE]
        b_end = tl.load(p_end + o_k, mask=o_k >= 0, other=0)
    # [TILE, BLOCK_D] and [TILE, BLOCK_V]
    b_k = load_portable_rows(p_k, o_k, m_k, k_stride, D, BLOCK_D, MASKED)
    b_v = load_portable_rows(p_v, o_k, m_k, v_stride, D_V, BLOCK_V, MASKED)
    return o_k, b_end, b_k, b_v


@triton.jit
def _forward_section(
    b_acc, b_max, b_sum, b_q, o_q, b_start, p_k, p_v, p_end, p_granules, first, last, k_stride, v_stride, length,
    factor, cap,
    TILE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tiles [first, last) of a list to the running output, maximum and sum."""
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
        if MASKED:
            # [1, TILE] <= [BLOCK, 1] and [BLOCK, 1] < [1, TILE] -> [BLOCK, TILE]
            m_s = (o_k[None, :] <= o_q[:, None]) & (o_q[:, None] < b_end[None, :])
            if WINDOWED:
                m_s = m_s & (b_start[:, None] <= o_k[None, :])
            b_s = tl.where(m_s, b_s, float("-inf"))
        # [BLOCK]
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * unit)
        b_safe = b_new
        if MASKED:
            # If tiles are smaller than the diagonal, a query may have seen nothing yet: -inf - (-inf) would be NaN.
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        # [BLOCK, TILE]
        b_p = tl.exp2(b_s * unit - b_safe[:, None])
        # [BLOCK]
        b_decay = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        # [BLOCK, BLOCK_V]
        b_acc = b_acc * b_decay[:, None]
        # [BLOCK, TILE] @ [TILE, BLOCK_V] -> [BLOCK, BLOCK_V]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["length", "blocks", "section"])
def _forward_kernel(
    q, k, v, o, lse, sinks, ends, starts, granules, query_offsets, query_partial, query_order, q_strides, k_strides,
    v_strides, o_strides, length, origin, padded, batch, heads, section, blocks, factor, cap,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
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
    # [BLOCK, BLOCK_D]
    b_q = load_portable_rows(q + row * q_strides[0] + head * q_strides[1], o_row, m_q, q_strides[2], D, BLOCK_D, True)
    # [BLOCK, BLOCK_V]
    b_acc = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)
    # [BLOCK]
    b_max = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    b_acc, b_max, b_sum = _forward_section(
        b_acc, b_max, b_sum, b_q, o_q, b_start, p_k, p_v, p_end, granules, first, middle, k_strides[2], v_strides[2],
        length, factor, cap, TILE, D, D_V, BLOCK_D, BLOCK_V, True, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    b_acc, b_max, b_sum = _forward_section(
        b_acc, b_max, b_sum, b_q, o_q, b_start, p_k, p_v, p_end, granules, middle, last, k_strides[2], v_strides[2],
        length, factor, cap, TILE, D, D_V, BLOCK_D, BLOCK_V, False, WINDOWED, CAPPED, PRECISION,
    )  # fmt: skip
    if SINKS:
        # One more score, without a value, in powers of two: log2(e) = 1.442...
        sink = tl.load(sinks + head) * 1.4426950408889634
        # [BLOCK]
        b_new = tl.maximum(b_max, sink)
        b_decay = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_decay + tl.exp2(sink - b_new)
        # [BLOCK, BLOCK_V]
        b_acc = b_acc * b_decay[:, None]
        b_max = b_new
    p_o = o + row * o_strides[0] + head * o_strides[1]
    # [BLOCK, BLOCK_V] / [BLOCK, 1] -> [BLOCK, BLOCK_V]
    store_portable_rows(p_o, o_row, m_q, o_strides[2], b_acc / b_sum[:, None], D_V, BLOCK_V)
    # [BLOCK]
    tl.store(lse + (row * heads + head) * (length - origin) + o_row, b_max + tl.log2(b_sum), mask=m_q)


def portable_forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T - first, D_v] in the dtype of `query`, and lse, float32 [B, H, T - first]."""
    query, value = inputs.query, inputs.value
    out = token_major(query, value.shape[-1])
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    forward_launch(inputs, out, lse, configs_of(query, value).forward).run()
    return out, lse


def forward_launch(inputs: AttentionInputs, out: Tensor, lse: Tensor, config: PortableConfig) -> KernelLaunch:
    """Describe the launch that writes `out` [B, H, T - first, D_v] and `lse` [B, H, T - first]."""
    query, key, value, schedule = inputs[:4]
    batch, heads = query.shape[:2]
    arguments = {
        "q": query,
        "k": key,
        "v": value,
        "o": out,
        "lse": lse,
        "sinks": sink_argument(inputs, lse),
        "q_strides": query.stride()[:3],
        "k_strides": key.stride()[:3],
        "v_strides": value.stride()[:3],
        "o_strides": out.stride()[:3],
        "cap": cap_of(inputs),
        **query_arguments(inputs, heads_at_a_time(key) * inputs.group),
    }
    constants = {**constants_of(inputs, config), "SINKS": inputs.sinks is not None}
    programs = batch * heads * schedule.query_order.shape[1] * (QUERY_BLOCK // config.block)
    return KernelLaunch(_forward_kernel, programs, arguments, constants, options_of(config))


def heads_at_a_time(key: Tensor) -> int:
    """Return how many key heads a section has; see `key_heads_per_section`."""
    return key_heads_per_section(key, CACHE_BYTES)


def constants_of(inputs: AttentionInputs, config: PortableConfig) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel with a loop."""
    width, value_width = inputs.query.shape[-1], inputs.value.shape[-1]
    return {
        "GROUP": inputs.group,
        "BLOCK": config.block,
        "TILE": config.tile,
        "D": width,
        "D_V": value_width,
        "BLOCK_D": padded_width(width),
        "BLOCK_V": padded_width(value_width),
        "WINDOWED": inputs.is_windowed,
        "CAPPED": inputs.softcap is not None,
        "PRECISION": "ieee" if inputs.query.dtype == torch.float32 else "tf32",
    }


def cap_of(inputs: AttentionInputs) -> float:
    """Return the cap of scores in powers of two; kernels do not read it without a cap."""
    return 0.0 if inputs.softcap is None else inputs.softcap * LOG2E


def options_of(config: PortableConfig) -> dict[str, int]:
    """Return the compiler options of a shape."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}
