"""Grouped products of gated experts in Triton; `gated` calls them.

    gate_up    x [T, D] gathered, W1 [E, 2I, D]     --> gate and up [S, 2I], weight * silu(gate) * up [S, I]
    product    x [S, K], or [T, K] gathered, W [E, N, K] or [E, K, N]   --> [S, N]
    gate_back  the gradient [S, I] of the last      --> gradients of gate and up [S, 2I] and of the router's weights [S]
    outer      a [S, M], b [S, N]                   --> [E, M, N], the sum over the rows of each expert
    combine    x [S, D]                             --> [T, D], the sum over the k pairs of each token

`gate_up` and `product` take a low-rank term: `low` [S, R] times `b` [E, N, R] or [E, R, N] is added to the sums.

A program of the first two computes one tile: BLOCK_M pairs of one expert times BLOCK_N columns. The last tile of an
expert is cut off by its end, so pairs of two experts never share a tile:

    ends [300, 300, 420], BLOCK_M 128  ->  tiles  expert  0   0   0   2      expert 1 has no pairs
                                                  first   0 128 256 300      first pair of the tile

In: bfloat16 or float16 (float32 under the interpreter), stride 1 in the last dimension, sizes that are multiples of the
blocks. Sums are in float32 and in one order, so two runs agree in every bit. Every element of a result is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.model.experts.routing import ExpertRouting

BLOCK_M = 128  # pairs per tile, and rows of a result of `outer`
BLOCK_K = 64  # elements per step of a sum
NUM_WARPS = 8  # of the products
_ROW_BLOCK = 2048  # elements of a row per step of `combine` and `gate_back`


class _ExpertConfig(NamedTuple):
    """Largest BLOCK_N and pipeline stages of each kernel."""

    gate_up: tuple[int, int]
    product: tuple[int, int]
    outer: tuple[int, int]


# HOPPER holds the fastest of three or four shapes for each kernel, measured on an H200 with 128 experts of 2,048 x 768
# and 258,000 pairs: 540, 530 to 640 and 510 to 530 TFLOP/s. They need 147 to 197 KB of shared memory.
HOPPER = _ExpertConfig((128, 3), (256, 4), (256, 4))
# For other GPUs, not measured: at most 99 KB of shared memory, because small GPUs have no more.
PORTABLE = _ExpertConfig((64, 3), (128, 3), (128, 3))


def _config(x: Tensor) -> _ExpertConfig:
    large = x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    return HOPPER if large else PORTABLE


class ExpertTiles(NamedTuple):
    """The tiles of a row's pairs, more than there are: the number that exists is known only on the GPU.

    expert  int32 [count], the expert of each tile; E for a tile that does not exist
    first   int32 [count], the first pair of each tile
    """

    expert: Tensor
    first: Tensor

    @classmethod
    def of(cls, routing: ExpertRouting) -> ExpertTiles:
        """Return the tiles of a routing; their number is an upper bound, so that nothing waits for the GPU."""
        ends, num_experts = routing.ends, len(routing.ends)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        # ends [300, 300, 420] -> tiles of each expert [3, 0, 1] -> one past the last tile [3, 3, 4]
        last = ((ends - starts + BLOCK_M - 1) // BLOCK_M).cumsum(0, dtype=torch.int32)
        number = torch.arange(len(routing.order) // BLOCK_M + num_experts, device=ends.device, dtype=torch.int32)
        expert = torch.searchsorted(last, number, right=True, out_int32=True)
        known = expert.clamp(max=num_experts - 1)
        # tile 3 is number 0 of expert 2, whose tiles begin at 3: first pair 300 + 128 * 0
        before = torch.cat([last.new_zeros(1), last[:-1]])
        return cls(expert, starts[known] + (number - before[known]) * BLOCK_M)


@triton.jit
def _tile_rows(firsts, ends, i_tile, expert, BLOCK_M: tl.constexpr):
    # The first pair of the tile, the distances [BLOCK_M] of its pairs from it, and which of them exist. The others
    # repeat the last one, so loads need no mask. Distances are int32: tiles of int64 addresses would spill registers.
    first = tl.load(firsts + i_tile)
    count = tl.load(ends + expert) - first
    o_row = tl.arange(0, BLOCK_M)
    return first.to(tl.int64), tl.minimum(o_row, count - 1), o_row < count


@triton.jit
def _add_low_rank(
    b_out, low, b, first, o_row, expert, o_n, width, TRANSPOSED: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr
):
    # low [S, R]; b is [E, width, R], or [E, R, width] if TRANSPOSED
    o_r = tl.arange(0, BLOCK_R)
    # [BLOCK_M, BLOCK_R], [BLOCK_R, BLOCK_N]
    p_low = low + first * RANK + (o_row * RANK)[:, None] + o_r[None, :]
    p_b = b + expert.to(tl.int64) * RANK * width
    if TRANSPOSED:
        p_b = p_b + o_r[:, None] * width + o_n[None, :]
    else:
        p_b = p_b + o_n[None, :] * RANK + o_r[:, None]
    # One stage: the loop before it has filled the shared memory with its stages.
    for _ in tl.range(0, RANK, BLOCK_R, num_stages=1):
        b_out = tl.dot(tl.load(p_low), tl.load(p_b), b_out, input_precision="ieee")
        p_low += BLOCK_R
        p_b += BLOCK_R * width if TRANSPOSED else BLOCK_R
    return b_out


@triton.jit
def _gate_up_kernel(
    x,
    tokens,
    w,
    weights,
    low,
    b,
    gate_up,
    out,
    experts,
    firsts,
    ends,
    num_experts,
    size,
    width,
    RANK: tl.constexpr,
    NUM_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # size D, width I; the gate of unit n is row n of W1, its up row n + I
    i_tile, i_n = tl.program_id(0) // NUM_N, tl.program_id(0) % NUM_N
    expert = tl.load(experts + i_tile)
    if expert < num_experts:
        first, o_row, m_row = _tile_rows(firsts, ends, i_tile, expert, BLOCK_M)
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        # [BLOCK_M, BLOCK_K], [BLOCK_K, BLOCK_N] twice
        p_x = x + tl.load(tokens + first + o_row)[:, None] * size + o_k[None, :]
        p_gate = w + (expert.to(tl.int64) * 2 * width + o_n)[None, :] * size + o_k[:, None]
        p_up = p_gate + width.to(tl.int64) * size
        b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for _ in range(0, size, BLOCK_K):
            b_x = tl.load(p_x)
            b_gate = tl.dot(b_x, tl.load(p_gate), b_gate, input_precision="ieee")
            b_up = tl.dot(b_x, tl.load(p_up), b_up, input_precision="ieee")
            p_x += BLOCK_K
            p_gate += BLOCK_K
            p_up += BLOCK_K
        if RANK:
            b_gate = _add_low_rank(b_gate, low, b, first, o_row, expert, o_n, 2 * width, False, RANK, BLOCK_R)
            b_up = _add_low_rank(b_up, low, b, first, o_row, expert, o_n + width, 2 * width, False, RANK, BLOCK_R)
        # Rounded first: the backward pass computes the activation again from the stored, rounded numbers.
        gate, up = b_gate.to(x.dtype.element_ty), b_up.to(x.dtype.element_ty)
        p_gate_up = gate_up + first * 2 * width + (o_row * 2 * width)[:, None] + o_n[None, :]
        tl.store(p_gate_up, gate, mask=m_row[:, None])
        tl.store(p_gate_up + width, up, mask=m_row[:, None])
        b_gate, b_up = gate.to(tl.float32), up.to(tl.float32)
        b_out = b_gate / (1 + tl.exp(-b_gate)) * b_up * tl.load(weights + first + o_row)[:, None]
        p_out = out + first * width + (o_row * width)[:, None] + o_n[None, :]
        tl.store(p_out, b_out.to(x.dtype.element_ty), mask=m_row[:, None])


@triton.jit
def _product_kernel(
    x,
    tokens,
    w,
    low,
    b,
    out,
    experts,
    firsts,
    ends,
    num_experts,
    size,
    width,
    RANK: tl.constexpr,
    NUM_N: tl.constexpr,
    GATHER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # size K, width N; w is [E, N, K], or [E, K, N] if TRANSPOSED
    i_tile, i_n = tl.program_id(0) // NUM_N, tl.program_id(0) % NUM_N
    expert = tl.load(experts + i_tile)
    if expert < num_experts:
        first, o_row, m_row = _tile_rows(firsts, ends, i_tile, expert, BLOCK_M)
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        # [BLOCK_M, BLOCK_K], [BLOCK_K, BLOCK_N]
        if GATHER:
            p_x = x + tl.load(tokens + first + o_row)[:, None] * size + o_k[None, :]
        else:
            p_x = x + first * size + (o_row * size)[:, None] + o_k[None, :]
        p_w = w + expert.to(tl.int64) * size * width
        if TRANSPOSED:
            p_w = p_w + o_k[:, None] * width + o_n[None, :]
        else:
            p_w = p_w + o_n[None, :] * size + o_k[:, None]
        b_out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for _ in range(0, size, BLOCK_K):
            b_out = tl.dot(tl.load(p_x), tl.load(p_w), b_out, input_precision="ieee")
            p_x += BLOCK_K
            p_w += BLOCK_K * width if TRANSPOSED else BLOCK_K
        if RANK:
            b_out = _add_low_rank(b_out, low, b, first, o_row, expert, o_n, width, TRANSPOSED, RANK, BLOCK_R)
        p_out = out + first * width + (o_row * width)[:, None] + o_n[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_row[:, None])


@triton.jit
def _gate_back_kernel(c, weights, gate_up, gate_up_grad, out, weights_grad, width, BLOCK: tl.constexpr):
    # With h = silu(gate) * up, and c the gradient of weight * h: d weight = c . h, d h = weight * c.
    i_pair = tl.program_id(0).to(tl.int64)
    p_gate, p_gate_grad = gate_up + i_pair * 2 * width, gate_up_grad + i_pair * 2 * width
    weight = tl.load(weights + i_pair)
    weight_grad = tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        # [BLOCK]
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < width
        b_c = tl.load(c + i_pair * width + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_gate = tl.load(p_gate + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_up = tl.load(p_gate + width + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_sigmoid = 1 / (1 + tl.exp(-b_gate))
        b_silu = b_gate * b_sigmoid
        weight_grad += tl.sum(b_c * b_silu * b_up, 0)
        tl.store(out + i_pair * width + o_n, (b_silu * b_up * weight).to(out.dtype.element_ty), mask=m_n)
        b_c = b_c * weight
        # d silu / d gate = sigmoid * (1 + gate * (1 - sigmoid))
        b_gate_grad = b_c * b_up * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))
        tl.store(p_gate_grad + o_n, b_gate_grad.to(out.dtype.element_ty), mask=m_n)
        tl.store(p_gate_grad + width + o_n, (b_c * b_silu).to(out.dtype.element_ty), mask=m_n)
    tl.store(weights_grad + i_pair, weight_grad)


@triton.jit
def _outer_kernel(
    a,
    b,
    out,
    ends,
    height,
    width,
    NUM_M: tl.constexpr,
    NUM_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # height M, width N; the tiles of an expert follow each other, so that its rows stay in the cache
    expert, i_tile = tl.program_id(0) // (NUM_M * NUM_N), tl.program_id(0) % (NUM_M * NUM_N)
    o_m = i_tile // NUM_N * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_tile % NUM_N * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    b_out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_K):
        o_row = first + tl.arange(0, BLOCK_K)
        m_row = (o_row < end)[:, None]
        # [BLOCK_K, BLOCK_M], [BLOCK_K, BLOCK_N]
        b_a = tl.load(a + (o_row.to(tl.int64) * height)[:, None] + o_m[None, :], mask=m_row, other=0.0)
        b_b = tl.load(b + (o_row.to(tl.int64) * width)[:, None] + o_n[None, :], mask=m_row, other=0.0)
        b_out = tl.dot(tl.trans(b_a), b_b, b_out, input_precision="ieee")
    p_out = out + expert.to(tl.int64) * height * width + (o_m * width)[:, None] + o_n[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty))


@triton.jit
def _combine_kernel(x, places, out, size, num_pairs, NUM: tl.constexpr, BLOCK: tl.constexpr):
    i_token = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < size
    # [BLOCK], from the first expert of the token to the last
    b_out = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(NUM):
        place = tl.load(places + i_token * NUM + j)
        # Nothing from a place after the last pair: the expert of this slot is on another rank.
        m_slot = o_d < tl.where(place < num_pairs, size, 0)
        b_out += tl.load(x + place * size + o_d, mask=m_slot, other=0.0).to(tl.float32)
    tl.store(out + i_token * size + o_d, b_out.to(out.dtype.element_ty), mask=m_d)


class LowRankTerm(NamedTuple):
    """The term that an adapter adds to a product: low [S, R] times b [E, N, R] or [E, R, N], R a multiple of 16."""

    low: Tensor
    b: Tensor


def _block(size: int, largest: int) -> int:
    # 768, 256 -> 256; 1408, 256 -> 128; 192, 128 -> 64; ranks 48, 32 -> 16
    return next(block for block in (256, 128, 64, 32, 16) if block <= largest and size % block == 0)


def _low_rank_of(term: LowRankTerm | None, x: Tensor) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Return the tensors and the constants of a low-rank term for a kernel; `x` twice if `term` is None."""
    low, b = term or (x, x)
    rank = 0 if term is None else low.shape[1]
    return low, b, {"RANK": rank, "BLOCK_R": _block(rank, 32)}


def gate_up(
    x: Tensor, w: Tensor, weights: Tensor, routing: ExpertRouting, tiles: ExpertTiles, term: LowRankTerm | None = None
) -> tuple[Tensor, Tensor]:
    """Return gate and up [S, 2I] of the pairs, and weight * silu(gate) * up [S, I]; x [T, D], weights float32 [S]."""
    (num_experts, width, size), pairs = w.shape, len(routing.order)
    width //= 2
    both, out = x.new_empty(pairs, 2 * width), x.new_empty(pairs, width)
    largest, stages = _config(x).gate_up
    block = _block(width, largest)
    num = width // block
    low, b, constants = _low_rank_of(term, x)
    _gate_up_kernel[(len(tiles.expert) * num,)](
        x, routing.token, w, weights, low, b, both, out, *tiles, routing.ends, num_experts, size, width,
        **constants, NUM_N=num, BLOCK_M=BLOCK_M, BLOCK_N=block, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS, num_stages=stages,
    )  # fmt: skip
    return both, out


def product(
    x: Tensor,
    w: Tensor,
    routing: ExpertRouting,
    tiles: ExpertTiles,
    *,
    gather: bool,
    transposed: bool,
    term: LowRankTerm | None = None,
) -> Tensor:
    """Return the rows of the pairs times the weights of their experts: [S, N].

    Args:
        x: a row for each pair [S, K], or with `gather` for each token [T, K].
        w: [E, N, K], or with `transposed` [E, K, N].
        routing: of the tokens.
        tiles: of the routing.
        gather: True if `x` has a row for each token.
        transposed: True if `w` is [E, K, N].
        term: added to the result.
    """
    num_experts, width = len(w), w.shape[2 if transposed else 1]
    out = x.new_empty(len(routing.order), width)
    largest, stages = _config(x).product
    block = _block(width, largest)
    num = width // block
    low, b, constants = _low_rank_of(term, x)
    _product_kernel[(len(tiles.expert) * num,)](
        x, routing.token, w, low, b, out, *tiles, routing.ends, num_experts, x.shape[1], width,
        **constants, NUM_N=num, GATHER=gather, TRANSPOSED=transposed,
        BLOCK_M=BLOCK_M, BLOCK_N=block, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS, num_stages=stages,
    )  # fmt: skip
    return out


def gate_back(c: Tensor, weights: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up [S, 2I], weight * silu(gate) * up [S, I], and the gradients of weights [S].

    c [S, I] is the gradient of weight * silu(gate) * up, weights is float32 [S], both [S, 2I] is from `gate_up`.
    """
    both_grad, out, weights_grad = torch.empty_like(both), torch.empty_like(c), torch.empty_like(weights)
    block = min(_ROW_BLOCK, triton.next_power_of_2(c.shape[1]))
    arguments: Any = (c, weights, both, both_grad, out, weights_grad, c.shape[1])
    _gate_back_kernel[(len(c),)](*arguments, BLOCK=block, num_warps=4)
    return both_grad, out, weights_grad


def outer(a: Tensor, b: Tensor, routing: ExpertRouting, dtype: torch.dtype) -> Tensor:
    """Return the sum over each expert's rows of a[s] outer b[s]: [S, M], [S, N] -> [E, M, N] in `dtype`."""
    height, width = a.shape[1], b.shape[1]
    out = a.new_empty(len(routing.ends), height, width, dtype=dtype)
    largest, stages = _config(a).outer
    m, n = _block(height, BLOCK_M), _block(width, largest)
    grid = len(routing.ends) * (height // m) * (width // n)
    _outer_kernel[(grid,)](
        a, b, out, routing.ends, height, width, NUM_M=height // m, NUM_N=width // n,
        BLOCK_M=m, BLOCK_N=n, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS, num_stages=stages,
    )  # fmt: skip
    return out


def combine(x: Tensor, routing: ExpertRouting, dtype: torch.dtype) -> Tensor:
    """Return [T, D] in `dtype`: the sum of each token's pairs among the rows of x [S, D], first expert first."""
    tokens, num = routing.place.shape
    out = x.new_empty(tokens, x.shape[1], dtype=dtype)
    block = min(_ROW_BLOCK, triton.next_power_of_2(x.shape[1]))
    arguments: Any = (x, routing.place, out, x.shape[1], len(x))
    _combine_kernel[(tokens, triton.cdiv(x.shape[1], block))](*arguments, NUM=num, BLOCK=block, num_warps=4)
    return out
