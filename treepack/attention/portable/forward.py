"""Tree attention in Triton for any GPU: the forward kernel, and what it shares with `portable_backward`.

One program computes one block of queries of one head, as `tiles.forward` does: first the partial section of the
block's list, under the mask, then the full one, without. A tile of keys is gathered from 1, 2 or 4 granules:

    key token = granules[entry + i // 32] * 32 + i % 32        i = 0 ... tile - 1; negative where there is no granule

In: query [B, H, T, D], key and value [B, H_kv, T, D] in bfloat16, float16 or float32, D <= 256, any strides but 1 for
the last dimension; a `Schedule` on their device; scale > 0. Out: output [B, H, T, D] in memory [B, T, H, D], and the
float32 base-2 log-sum-exp [B, H, T] of the scores times scale. Tokens past T are never read.

Programs start in the order of their work, the longest first, and a section of the heads at a time: as many as have
keys and values that fit into the cache. Arguments that differ from row to row are not specialised on, so that rows of
other lengths have nothing compiled anew. Sums are in float32 and in one order: two runs agree in every bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.schedule import QUERY_BLOCK, Schedule

LOG2E = math.log2(math.e)
CACHE_BYTES = 32 << 20  # keys and values that one section of heads may have


class Config(NamedTuple):
    """One kernel's shape: tokens that a program owns and that a step of its loop takes, warps, pipeline stages."""

    block: int
    tile: int
    num_warps: int
    num_stages: int


class Configs(NamedTuple):
    """The shapes of the three kernels with a loop."""

    forward: Config
    query: Config
    key: Config


# By the greatest head dimension.
# HOPPER: the fastest on an H200 (32 query and 8 key heads, an agent tree of 32,000 tokens) of about twenty each: with
# 4 warps a program owns fewer rows than with 8 and two fit a multiprocessor, so that one multiplies while the other
# takes exponentials (128: forward 6.7 ms against 8.3, dq 7.8 against 9.9, dk and dv 13.7 against 15.0). 256 is not
# measured: no entry spills more than 16 bytes a thread.
HOPPER = {
    64: Configs(Config(128, 64, 8, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    128: Configs(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
    256: Configs(Config(128, 32, 8, 3), Config(128, 32, 8, 2), Config(32, 64, 8, 2)),
}
# Other GPUs, not measured: chosen so that sm_80 spills at most 28 bytes a thread and 99 KiB of shared memory, which is
# what small GPUs have, suffice.
PORTABLE = {
    64: Configs(Config(128, 64, 4, 3), Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
    128: Configs(Config(128, 32, 8, 3), Config(64, 32, 4, 2), Config(64, 32, 4, 2)),
    256: Configs(Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(32, 32, 8, 1)),
}
# Products of float32 are made one by one, not by matrix units; these sizes spill at most 24 bytes a thread.
FLOAT32 = {
    64: Configs(Config(64, 32, 8, 1), Config(64, 32, 8, 1), Config(32, 32, 8, 1)),
    128: Configs(Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
    256: Configs(Config(32, 32, 8, 1), Config(16, 32, 8, 1), Config(32, 16, 8, 1)),
}


def configs_of(query: Tensor) -> Configs:
    """The kernels' shapes for tensors like `query`, on its device."""
    if query.dtype == torch.float32:
        table = FLOAT32
    else:
        nvidia = query.is_cuda and torch.version.hip is None
        hopper = nvidia and torch.cuda.get_device_capability(query.device)[0] == 9
        table = HOPPER if hopper else PORTABLE
    return next(configs for limit, configs in table.items() if query.shape[-1] <= limit)


@triton.jit
def place(program, heads, batch, blocks):
    """Head, row and rank in the row's order of a program: sections of `heads` heads, ranks, rows, heads."""
    places = batch * blocks
    section, rest = program // (places * heads), program % (places * heads)
    rank = rest // heads
    return section * heads + rest % heads, rank % batch, rank // batch


@triton.jit
def key_tokens(p_granules, entry, TILE: tl.constexpr):
    """The tokens of the granules from `entry` on; negative where there is no granule.

    One scalar load for each granule: loaded as one vector, Triton 3.6 pipelines the granules instead of the keys, and
    reads wrong ones.
    """
    o_tile = tl.arange(0, TILE)
    # [TILE]
    b_granule = tl.full([TILE], 0, dtype=tl.int32) + tl.load(p_granules + entry)
    for i in tl.static_range(1, TILE // 32):
        b_granule = tl.where(o_tile // 32 == i, tl.load(p_granules + entry + i), b_granule)
    return b_granule * 32 + o_tile % 32


@triton.jit
def load_rows(p_rows, o_rows, m_rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_D] of tokens `o_rows`; zero past D, and where `m_rows` is false if MASKED."""
    o_d = tl.arange(0, BLOCK_D)
    p_tile = p_rows + o_rows.to(tl.int64)[:, None] * stride + o_d[None, :]
    if MASKED:
        if D == BLOCK_D:
            b_rows = tl.load(p_tile, mask=m_rows[:, None], other=0.0)
        else:
            b_rows = tl.load(p_tile, mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        if D == BLOCK_D:
            b_rows = tl.load(p_tile)
        else:
            b_rows = tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)
    return b_rows


@triton.jit
def store_rows(p_rows, o_rows, m_rows, stride, b_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write `b_rows` [rows, BLOCK_D] to the tokens `o_rows` for which `m_rows` is true."""
    o_d = tl.arange(0, BLOCK_D)
    p_tile = p_rows + o_rows.to(tl.int64)[:, None] * stride + o_d[None, :]
    if D == BLOCK_D:
        tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_rows[:, None])
    else:
        tl.store(p_tile, b_rows.to(p_rows.dtype.element_ty), mask=m_rows[:, None] & (o_d < D)[None, :])


@triton.jit
def load_key_tile(
    p_k, p_v, p_end, p_granules, entry, k_stride, v_stride, length,
    TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A gathered tile: tokens, their subtree_end (0 where there is no granule), keys and values; see `load_rows`."""
    o_k = key_tokens(p_granules, entry, TILE)
    m_k = (o_k >= 0) & (o_k < length)
    b_end = o_k
    if MASKED:
        # [TILE]
        b_end = tl.load(p_end + o_k, mask=o_k >= 0, other=0)
    # [TILE, BLOCK_D]
    b_k = load_rows(p_k, o_k, m_k, k_stride, D, BLOCK_D, MASKED)
    b_v = load_rows(p_v, o_k, m_k, v_stride, D, BLOCK_D, MASKED)
    return o_k, b_end, b_k, b_v


@triton.jit
def _forward_section(
    b_acc, b_max, b_sum, b_q, o_q, p_k, p_v, p_end, p_granules, first, last, k_stride, v_stride, length, scale,
    TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the tiles [first, last) of a list into the running output, maximum and sum."""
    STAGES: tl.constexpr = 1 if MASKED else None  # one: Triton 3.6 pipelines the loads of `end` wrongly
    for entry in tl.range(first, last, TILE // 32, num_stages=STAGES):
        o_k, b_end, b_k, b_v = load_key_tile(
            p_k, p_v, p_end, p_granules, entry, k_stride, v_stride, length, TILE, D, BLOCK_D, MASKED
        )
        # [BLOCK, TILE]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if MASKED:
            m_s = (o_k[None, :] <= o_q[:, None]) & (o_q[:, None] < b_end[None, :])
            b_s = tl.where(m_s, b_s, float("-inf"))
        # [BLOCK]
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
        b_safe = b_new
        if MASKED:
            # A tile smaller than the diagonal may show a query nothing yet.
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * scale - b_safe[:, None])
        b_decay = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        # [BLOCK, BLOCK_D]
        b_acc = b_acc * b_decay[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["length", "blocks", "section"])
def _forward_kernel(
    q, k, v, o, lse, end, granules, offsets, partial, order, q_strides, k_strides, v_strides, o_strides,
    length, padded, batch, heads, section, blocks, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 128 // BLOCK
    i_h, i_b, rank = place(tl.program_id(0), section, batch, blocks * PARTS)
    i_q = tl.load(order + i_b * blocks + rank // PARTS)
    p_offset = offsets + i_b * (blocks + 1) + i_q
    first, last = tl.load(p_offset), tl.load(p_offset + 1)
    middle = first + tl.load(partial + i_b * blocks + i_q)

    row, head = i_b.to(tl.int64), i_h.to(tl.int64)
    p_k = k + row * k_strides[0] + (head // GROUP) * k_strides[1]
    p_v = v + row * v_strides[0] + (head // GROUP) * v_strides[1]
    p_end = end + row * padded
    # [BLOCK]
    o_q = i_q * 128 + (rank % PARTS) * BLOCK + tl.arange(0, BLOCK)
    m_q = o_q < length
    # [BLOCK, BLOCK_D]
    b_q = load_rows(q + row * q_strides[0] + head * q_strides[1], o_q, m_q, q_strides[2], D, BLOCK_D, True)
    b_acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    # [BLOCK]
    b_max = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    b_acc, b_max, b_sum = _forward_section(
        b_acc, b_max, b_sum, b_q, o_q, p_k, p_v, p_end, granules, first, middle, k_strides[2], v_strides[2], length,
        scale, TILE, D, BLOCK_D, True, PRECISION,
    )  # fmt: skip
    b_acc, b_max, b_sum = _forward_section(
        b_acc, b_max, b_sum, b_q, o_q, p_k, p_v, p_end, granules, middle, last, k_strides[2], v_strides[2], length,
        scale, TILE, D, BLOCK_D, False, PRECISION,
    )  # fmt: skip
    p_o = o + row * o_strides[0] + head * o_strides[1]
    store_rows(p_o, o_q, m_q, o_strides[2], b_acc / b_sum[:, None], D, BLOCK_D)
    tl.store(lse + (row * heads + head) * length + o_q, b_max + tl.log2(b_sum), mask=m_q)


def heads_at_a_time(key: Tensor) -> int:
    """How many key heads a section has: the most that divide them all and fit into the cache."""
    batch, heads, length, width = key.shape
    fit = CACHE_BYTES // (2 * batch * length * width * key.element_size())
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n <= fit))


def token_major(like: Tensor) -> Tensor:
    """An uninitialised tensor of the shape [B, H, T, D] and the dtype of `like`, in memory [B, T, H, D]."""
    batch, heads, length, width = like.shape
    return torch.empty((batch, length, heads, width), dtype=like.dtype, device=like.device).transpose(1, 2)


def common_options(query: Tensor, key: Tensor) -> dict[str, object]:
    """The compile-time arguments that all kernels with a loop share."""
    width = query.shape[-1]
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "D": width,
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def forward(query: Tensor, key: Tensor, value: Tensor, schedule: Schedule, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, D] in the dtype of `query` and base-2 log-sum-exp, float32 [B, H, T]; see the file's header."""
    batch, heads, length, _ = query.shape
    out = token_major(query)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)
    config = configs_of(query).forward
    blocks = schedule.query_order.shape[1]
    _forward_kernel[(batch * heads * blocks * (QUERY_BLOCK // config.block),)](
        query,
        key,
        value,
        out,
        lse,
        schedule.end,
        schedule.granules,
        schedule.query_offsets,
        schedule.query_partial,
        schedule.query_order,
        query.stride()[:3],
        key.stride()[:3],
        value.stride()[:3],
        out.stride()[:3],
        length,
        schedule.end.shape[1],
        batch,
        heads,
        heads_at_a_time(key) * (heads // key.shape[1]),
        blocks,
        scale * LOG2E,
        BLOCK=config.block,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **common_options(query, key),
    )
    return out, lse
