"""Outputs of recurrent layers inside chunks in Triton, and the gradients that leave the tree of chunks.

With h = the state before a chunk, u = its new values, a = the sum of g inside it, and for the pairs that are seen, j <=
i < end[j], S[i, j] = exp(a_i - a_j) and P[i, j] = S[i, j] (q_i k_j):

    outputs   o_i = exp(a_i) q_i h + sum_j P[i, j] u_j
    local     du_j = sum_i P[i, j] do_i, the part of the gradient of u_j that stays in the chunk
    products  dq, dk, dw and da, once `dh` (gradient of the state after the chunk) and `du` (whole gradient) are known

With dS[i, j] = S[i, j] (do_i u_j), z_j = exp(a_last - a_j) dh u_j and t = the last token of the chunk:

    dq_i = exp(a_i) h do_i + sum_j dS[i, j] k_j              dw_i = -h du_i
    dk_j = z_j + sum_i dS[i, j] q_i                          da_i = q_i dq_i - k_i dk_i
                                                             da_t += sum_j k_j z_j + exp(a_t) <h, dh>

In: q, k [N, Hk, K], u, do, du [N, H, V], h, dh [C, H, K, V] in bfloat16, float16 or float32, K and V at most 256; a
float32 [N, H]; all contiguous and on one device; `TokenChunks` of at most 64 tokens. Head h of u has key head h // (H /
Hk). One program computes a chunk of one head, or a tile of V of it, and nothing else writes its tokens: two runs agree
in every bit.

Every product is computed transposed, as o' = h' q' + u' P':

    [V, K] @ [K, i]      tiles of tensors on the left, read from shared memory
    [V, j] @ [j, i]      P on the right

P and dS are results of a product. On the right they pass through shared memory. On the left they would stay in
registers, which ptxas before CUDA 13.3 may overwrite while an asynchronous product of a Hopper GPU still reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.kernel_launch import LOG2E, KernelLaunch, is_on_hopper, padded_width
from treepack.recurrent.chunks import TokenChunks
from treepack.recurrent.kernels.inverse import load_columns, load_ends, store_columns

_LOG2E = tl.constexpr(LOG2E)


class OutputConfig(NamedTuple):
    """Shape of one kernel: columns of keys and of values per step of its loops, warps, pipeline stages."""

    tile_k: int
    tile_v: int
    num_warps: int
    num_stages: int


class OutputConfigs(NamedTuple):
    """Shapes of the three kernels."""

    outputs: OutputConfig
    local: OutputConfig
    products: OutputConfig


# Not measured. With triton 3.6 and 3.9, no thread spills for sm_90 with K of 128 and 256 and V of 64, 128 and 256. One
# warpgroup (4 warps) per program: Triton 3.6 does not synchronise two of them after an asynchronous product. Two
# programs fit on one multiprocessor, because a thread of `products` has 255 registers.
HOPPER = OutputConfigs(OutputConfig(64, 128, 4, 2), OutputConfig(64, 64, 4, 2), OutputConfig(64, 64, 4, 2))
# For other GPUs, not measured: no spills on sm_80 and sm_120 with K and V of 128, and 29 KB of shared memory at most.
PORTABLE = OutputConfigs(OutputConfig(64, 64, 4, 2), OutputConfig(64, 64, 4, 2), OutputConfig(32, 32, 4, 2))
# For float32, whose exact products the matrix units do not compute. `products` spills 112 bytes a thread.
FLOAT32 = OutputConfigs(OutputConfig(32, 32, 8, 1), OutputConfig(32, 32, 8, 1), OutputConfig(16, 16, 8, 1))


class OutputOperands(NamedTuple):
    """Tensors that all kernels read; the header gives their shapes."""

    q: Tensor
    k: Tensor
    a: Tensor
    chunks: TokenChunks


@triton.jit
def _load_state(p_h, k, v, K: tl.constexpr, V: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr):
    """Return the tile of a state [K, V] that begins at row k and column v, [TILE_K, TILE_V]; 0 outside of it."""
    o_k, o_v = k + tl.arange(0, TILE_K), v + tl.arange(0, TILE_V)
    # [TILE_K, TILE_V]
    p_tile = p_h + o_k[:, None] * V + o_v[None, :]
    if K % TILE_K == 0 and V % TILE_V == 0:
        b_h = tl.load(p_tile)
    else:
        b_h = tl.load(p_tile, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0)
    return b_h


@triton.jit
def _decays(o_i, o_j, b_a_i, b_a_j, b_end_j):
    """Return S for the pairs j <= i that are seen, 0 for the others; i or j is the first dimension."""
    # Pairs that are not seen may have exponents above 0, which would overflow: they are set to -inf first.
    seen = (o_j <= o_i) & (o_i < b_end_j)
    return tl.exp2(tl.where(seen, (b_a_i - b_a_j) * _LOG2E, float("-inf")))


@triton.jit
def _outputs_kernel(
    q, k, new, h, a, out, begins, lengths, ends,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PLACES: tl.constexpr,
    TILE_K: tl.constexpr, TILE_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs of the same chunk follow each other, so that q and k of a group stay in the cache.
    TILES: tl.constexpr = (V + TILE_V - 1) // TILE_V
    v, i_h, i_c = tl.program_id(0) % TILES * TILE_V, tl.program_id(0) // TILES % H, tl.program_id(0) // (TILES * H)
    first, length = tl.load(begins + i_c).to(tl.int64), tl.load(lengths + i_c)
    # [PLACES]
    o = tl.arange(0, PLACES)
    b_end = load_ends(ends, first, length, o)
    p_key = (first * (H // GROUP) + i_h // GROUP) * K
    p_value, p_state = (first * H + i_h) * V, (i_c.to(tl.int64) * H + i_h) * (K * V)
    # [j, i] and [V, i]
    b_p = tl.zeros([PLACES, PLACES], dtype=tl.float32)
    b_o = tl.zeros([TILE_V, PLACES], dtype=tl.float32)
    for start in tl.range(0, K, TILE_K):
        # [PLACES, TILE_K] twice, [TILE_K, TILE_V]
        b_q = load_columns(q + p_key, o, length, H // GROUP * K, start, K, TILE_K)
        b_k = load_columns(k + p_key, o, length, H // GROUP * K, start, K, TILE_K)
        b_h = _load_state(h + p_state, start, v, K, V, TILE_K, TILE_V).to(b_q.dtype)
        # [j, TILE_K] @ [TILE_K, i] -> [j, i]
        b_p = tl.dot(b_k, tl.trans(b_q), b_p, input_precision=PRECISION)
        # [TILE_V, TILE_K] @ [TILE_K, i] -> [TILE_V, i]
        b_o = tl.dot(tl.trans(b_h), tl.trans(b_q), b_o, input_precision=PRECISION)
    b_new = load_columns(new + p_value, o, length, H * V, v, V, TILE_V)
    # [PLACES]
    b_a = tl.load(a + first * H + i_h + o * H, mask=o < length, other=0.0)
    b_p *= _decays(o[None, :], o[:, None], b_a[None, :], b_a[:, None], b_end[:, None])
    b_o *= tl.exp2(b_a * _LOG2E)[None, :]
    # [TILE_V, j] @ [j, i] -> [TILE_V, i]
    b_o = tl.dot(tl.trans(b_new), b_p.to(b_new.dtype), b_o, input_precision=PRECISION)
    store_columns(out + p_value, o, length, H * V, v, V, TILE_V, tl.trans(b_o))


@triton.jit
def _local_kernel(
    q, k, a, do, du, begins, lengths, ends,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PLACES: tl.constexpr,
    TILE_K: tl.constexpr, TILE_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_h, i_c = tl.program_id(0) % H, tl.program_id(0) // H
    first, length = tl.load(begins + i_c).to(tl.int64), tl.load(lengths + i_c)
    # [PLACES]
    o = tl.arange(0, PLACES)
    b_end = load_ends(ends, first, length, o)
    p_key, p_value = (first * (H // GROUP) + i_h // GROUP) * K, (first * H + i_h) * V
    # [i, j]
    b_p = tl.zeros([PLACES, PLACES], dtype=tl.float32)
    for start in tl.range(0, K, TILE_K):
        # [PLACES, TILE_K]
        b_q = load_columns(q + p_key, o, length, H // GROUP * K, start, K, TILE_K)
        b_k = load_columns(k + p_key, o, length, H // GROUP * K, start, K, TILE_K)
        # [i, TILE_K] @ [TILE_K, j] -> [i, j]
        b_p = tl.dot(b_q, tl.trans(b_k), b_p, input_precision=PRECISION)
    # [PLACES]
    b_a = tl.load(a + first * H + i_h + o * H, mask=o < length, other=0.0)
    b_p = (b_p * _decays(o[:, None], o[None, :], b_a[:, None], b_a[None, :], b_end[None, :])).to(q.dtype.element_ty)
    for start in tl.range(0, V, TILE_V):
        # [PLACES, TILE_V]
        b_do = load_columns(do + p_value, o, length, H * V, start, V, TILE_V)
        # [TILE_V, i] @ [i, j] -> [TILE_V, j]
        b_du = tl.dot(tl.trans(b_do), b_p, input_precision=PRECISION)
        store_columns(du + p_value, o, length, H * V, start, V, TILE_V, tl.trans(b_du))


@triton.jit
def _products_kernel(
    q, k, new, h, a, do, dh, du, dq, dk, dw, da, begins, lengths, ends,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PLACES: tl.constexpr,
    TILE_K: tl.constexpr, TILE_V: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs of the same chunk follow each other, so that their common tensors stay in the cache.
    TILES: tl.constexpr = (K + TILE_K - 1) // TILE_K
    i_k, i_h, i_c = tl.program_id(0) % TILES, tl.program_id(0) // TILES % H, tl.program_id(0) // (TILES * H)
    start = i_k * TILE_K
    first, length = tl.load(begins + i_c).to(tl.int64), tl.load(lengths + i_c)
    # [PLACES]
    o = tl.arange(0, PLACES)
    b_end = load_ends(ends, first, length, o)
    p_key = (first * (H // GROUP) + i_h // GROUP) * K
    p_value, p_state = (first * H + i_h) * V, (i_c.to(tl.int64) * H + i_h) * (K * V)
    p_out = (first * H + i_h) * K
    # [PLACES], and a of the last token
    p_a = a + first * H + i_h
    b_a = tl.load(p_a + o * H, mask=o < length, other=0.0)
    last = tl.load(p_a + (length - 1) * H)

    # dk: [i, j] and [TILE_K, j]
    b_ds = tl.zeros([PLACES, PLACES], dtype=tl.float32)
    b_dk = tl.zeros([TILE_K, PLACES], dtype=tl.float32)
    hdh = 0.0
    for v in tl.range(0, V, TILE_V):
        # [PLACES, TILE_V] twice, [TILE_K, TILE_V] twice
        b_do = load_columns(do + p_value, o, length, H * V, v, V, TILE_V)
        b_new = load_columns(new + p_value, o, length, H * V, v, V, TILE_V)
        b_h = _load_state(h + p_state, start, v, K, V, TILE_K, TILE_V)
        b_dh = _load_state(dh + p_state, start, v, K, V, TILE_K, TILE_V)
        hdh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32))
        # [i, TILE_V] @ [TILE_V, j] -> [i, j]
        b_ds = tl.dot(b_do, tl.trans(b_new), b_ds, input_precision=PRECISION)
        # [TILE_K, TILE_V] @ [TILE_V, j] -> [TILE_K, j]
        b_dk = tl.dot(b_dh.to(b_new.dtype), tl.trans(b_new), b_dk, input_precision=PRECISION)
    b_ds *= _decays(o[:, None], o[None, :], b_a[:, None], b_a[None, :], b_end[None, :])
    # [PLACES, TILE_K] -> [TILE_K, PLACES]
    b_q = tl.trans(load_columns(q + p_key, o, length, H // GROUP * K, start, K, TILE_K))
    b_k = tl.trans(load_columns(k + p_key, o, length, H // GROUP * K, start, K, TILE_K))
    b_dk *= tl.exp2((last - b_a) * _LOG2E)[None, :]
    of_last = tl.sum(b_k.to(tl.float32) * b_dk) + tl.exp2(last * _LOG2E) * hdh
    # [TILE_K, i] @ [i, j] -> [TILE_K, j]
    b_dk = tl.dot(b_q, b_ds.to(b_q.dtype), b_dk, input_precision=PRECISION)
    b_da = tl.where(o == length - 1, of_last, 0.0) - tl.sum(b_k.to(tl.float32) * b_dk, 0)
    store_columns(dk + p_out, o, length, H * K, start, K, TILE_K, tl.trans(b_dk))

    # dq and dw: [j, i], which is b_ds transposed, but computed again: a second product costs less than registers that
    # hold it until here; and [TILE_K, i] twice
    b_dst = tl.zeros([PLACES, PLACES], dtype=tl.float32)
    b_dq = tl.zeros([TILE_K, PLACES], dtype=tl.float32)
    b_dw = tl.zeros([TILE_K, PLACES], dtype=tl.float32)
    for v in tl.range(0, V, TILE_V):
        # [PLACES, TILE_V] twice, [TILE_K, TILE_V]
        b_do = load_columns(do + p_value, o, length, H * V, v, V, TILE_V)
        b_new = load_columns(new + p_value, o, length, H * V, v, V, TILE_V)
        b_h = _load_state(h + p_state, start, v, K, V, TILE_K, TILE_V).to(b_do.dtype)
        # [j, TILE_V] @ [TILE_V, i] -> [j, i]
        b_dst = tl.dot(b_new, tl.trans(b_do), b_dst, input_precision=PRECISION)
        # [TILE_K, TILE_V] @ [TILE_V, i] -> [TILE_K, i]
        b_dq = tl.dot(b_h, tl.trans(b_do), b_dq, input_precision=PRECISION)
        if DELTA:
            b_du = load_columns(du + p_value, o, length, H * V, v, V, TILE_V)
            b_dw = tl.dot(b_h, tl.trans(b_du), b_dw, input_precision=PRECISION)
    if DELTA:
        store_columns(dw + p_out, o, length, H * K, start, K, TILE_K, tl.trans(-b_dw))
    b_dst *= _decays(o[None, :], o[:, None], b_a[None, :], b_a[:, None], b_end[:, None])
    # [TILE_K, j] @ [j, i] -> [TILE_K, i]
    b_dq = tl.dot(b_k, b_dst.to(b_k.dtype), b_dq * tl.exp2(b_a * _LOG2E)[None, :], input_precision=PRECISION)
    b_da += tl.sum(b_q.to(tl.float32) * b_dq, 0)
    store_columns(dq + p_out, o, length, H * K, start, K, TILE_K, tl.trans(b_dq))
    # da [N, H, TILES], of which each program writes one
    p_da = da + (first * H + i_h) * TILES + i_k
    tl.store(p_da + o * (H * TILES), b_da, mask=o < length)


def outputs_forward(q: Tensor, k: Tensor, new: Tensor, h: Tensor, a: Tensor, chunks: TokenChunks) -> Tensor:
    """Return the outputs o [N, H, V], in the dtype of `new`.

    Args:
        q, k: [N, Hk, K].
        new: values that the states receive, [N, H, V].
        h: states before the chunks, [C, H, K, V].
        a: sums of g inside the chunks, float32 [N, H].
        chunks: of the N tokens, on their device.
    """
    o = torch.empty(new.shape, dtype=new.dtype, device=new.device)
    outputs_launch(OutputOperands(q, k, a, chunks), new, h, o, _output_configs(q).outputs).run()
    return o


def local_backward(q: Tensor, k: Tensor, a: Tensor, do: Tensor, chunks: TokenChunks) -> Tensor:
    """Return the part of the gradient of the new values that stays in their chunks: P' do, [N, H, V] as `do`.

    Args:
        q, k, a, chunks: as in `outputs_forward`.
        do: gradient of the outputs, [N, H, V].
    """
    du = torch.empty(do.shape, dtype=do.dtype, device=do.device)
    local_launch(OutputOperands(q, k, a, chunks), do, du, _output_configs(q).local).run()
    return du


def products_backward(
    q: Tensor, k: Tensor, new: Tensor, h: Tensor, a: Tensor, *, do: Tensor, dh: Tensor, du: Tensor, chunks: TokenChunks,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return dq, dk [N, H, K], dw [N, H, K] and da float32 [N, H].

    Each head of `new` has a dq and a dk of its own, in the dtype of q; the caller adds the heads that share a key head.
    da comes through P, exp(a) q h, exp(a_last - a) k and exp(a_last).

    Args:
        q, k, new, h, a, chunks: as in `outputs_forward`.
        do: gradient of the outputs, [N, H, V].
        dh: gradient of the states after the chunks, [C, H, K, V].
        du: whole gradient of the new values, [N, H, V].
        delta: True for the delta rule; otherwise dw is None.
    """
    shape = (*new.shape[:2], q.shape[-1])
    dq, dk = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(2))
    dw = torch.empty(shape, dtype=q.dtype, device=q.device) if delta else None
    config = _output_configs(q).products
    da = torch.empty((*a.shape, _count_key_tiles(q.shape[-1], config)), dtype=torch.float32, device=a.device)
    incoming, results = {"do": do, "dh": dh, "du": du}, {"dq": dq, "dk": dk, "dw": dq if dw is None else dw, "da": da}
    gradient_products_launch(OutputOperands(q, k, a, chunks), new, h, incoming, results, config, delta=delta).run()
    return dq, dk, dw, da.sum(-1)


def _output_configs(q: Tensor) -> OutputConfigs:
    """Return the shapes of the kernels for the dtype and the device of `q`."""
    if q.dtype == torch.float32:
        return FLOAT32
    return HOPPER if is_on_hopper(q) else PORTABLE


def outputs_launch(operands: OutputOperands, new: Tensor, h: Tensor, o: Tensor, config: OutputConfig) -> KernelLaunch:
    """Return the launch that computes the outputs `o`."""
    constants, options = _shape(operands, new, config)
    tiles = -(-new.shape[-1] // constants["TILE_V"])
    arguments = {**_arguments(operands), "new": new, "h": h, "out": o}
    return KernelLaunch(_outputs_kernel, tiles * _programs(operands, new), arguments, constants, options)


def local_launch(operands: OutputOperands, do: Tensor, du: Tensor, config: OutputConfig) -> KernelLaunch:
    """Return the launch that computes the local gradient of the new values, `du`."""
    constants, options = _shape(operands, do, config)
    arguments = {**_arguments(operands), "do": do, "du": du}
    return KernelLaunch(_local_kernel, _programs(operands, do), arguments, constants, options)


def gradient_products_launch(
    operands: OutputOperands, new: Tensor, h: Tensor, incoming: dict[str, Tensor], results: dict[str, Tensor],
    config: OutputConfig, *, delta: bool,
) -> KernelLaunch:  # fmt: skip
    """Return the launch that computes dq, dk, dw and da.

    Args:
        operands: q, k, a and the chunks.
        new, h, delta: as in `products_backward`.
        incoming: do, dh and du.
        results: dq, dk, dw (unused without `delta`), and da float32 [N, H, tiles], of which the caller adds the tiles.
        config: shape of the kernel.
    """
    constants, options = _shape(operands, new, config)
    arguments = {**_arguments(operands), "new": new, "h": h, **incoming, **results}
    programs = results["da"].shape[-1] * _programs(operands, new)
    return KernelLaunch(_products_kernel, programs, arguments, {**constants, "DELTA": delta}, options)


def _count_key_tiles(keys: int, config: OutputConfig) -> int:
    """Return the number of programs of `products` for a chunk and head: each has a tile of K, and a share of da."""
    # K 96, tiles of 64 -> 2
    return -(-keys // min(config.tile_k, padded_width(keys)))


def _programs(operands: OutputOperands, values: Tensor) -> int:
    return len(operands.chunks.begin) * values.shape[1]


def _arguments(operands: OutputOperands) -> dict[str, Any]:
    """Return the arguments that all kernels take."""
    chunks = operands.chunks
    tables = {"begins": chunks.begin, "lengths": chunks.length, "ends": chunks.end}
    return {"q": operands.q, "k": operands.k, "a": operands.a, **tables}


def _shape(operands: OutputOperands, values: Tensor, config: OutputConfig) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the constants of a kernel and the options of the compiler."""
    (_, key_heads, keys), (_, heads, width) = operands.q.shape, values.shape
    constants = {
        "H": heads,
        "GROUP": heads // key_heads,
        "K": keys,
        "V": width,
        "PLACES": padded_width(operands.chunks.size),
        "TILE_K": min(config.tile_k, padded_width(keys)),
        "TILE_V": min(config.tile_v, padded_width(width)),
        "PRECISION": "ieee",
    }
    # Rows with a remainder of 16 bytes are not copied asynchronously, and Triton 3.7 pipelines their tails wrongly.
    aligned = all(x * operands.q.element_size() % 16 == 0 for x in (keys, width))
    return constants, {"num_warps": config.num_warps, "num_stages": config.num_stages if aligned else 1}
