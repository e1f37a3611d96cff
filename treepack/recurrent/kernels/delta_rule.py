"""Delta rule inside chunks in Triton: the triangular solve of every chunk and head, and its gradients.

With a = the sum of g inside the chunk, and A[i, j] = beta_i exp(a_i - a_j) (k_i k_j) for the pairs j < i that are seen:

    inverse   T = (1 + A)^-1
    products  U = T (beta v)        W = T (beta exp(a) k)
    backward  dT = dU (beta v)' + dW (beta exp(a) k)'        dA = -T' dT T'

In: k [N, Hk, K], v [N, H, V] in bfloat16, float16 or float32, K and V at most 256; beta, a float32 [N, H]; all
contiguous and on one device; `TokenChunks` of at most 64 tokens. Head h of v has key head h // (H / Hk). T is stored as
[N, H, 64] in the dtype of k: a row for each token, a column for each place of its chunk, 0 at places without a token.

One program computes one chunk of one head, and nothing else writes its tokens: two runs agree in every bit.

The left matrix of a product of 64 tokens is loaded from memory and is never the result of a product; the header of
`outputs` gives the reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.kernel_launch import LOG2E, KernelLaunch, is_on_hopper, padded_width
from treepack.recurrent.chunks import CHUNK, TokenChunks
from treepack.recurrent.kernels.inverse import (
    chunk_place,
    inverse_kernel,
    load_columns,
    load_ends,
    pair_decays,
    store_columns,
)

_LOG2E = tl.constexpr(LOG2E)


class _DeltaRuleConfig(NamedTuple):
    """Shape of one kernel: columns of k and v per step of its loops (tile), warps, pipeline stages."""

    tile: int
    num_warps: int
    num_stages: int


class DeltaRuleConfigs(NamedTuple):
    """Shapes of the three kernels."""

    inverse: _DeltaRuleConfig
    products: _DeltaRuleConfig
    backward: _DeltaRuleConfig


# Not measured. In half precision no thread spills more than 16 bytes. One warp computes an inverse, because a block of
# 16 x 16 has no more than 8 numbers for each of its threads.
HOPPER = DeltaRuleConfigs(_DeltaRuleConfig(32, 1, 2), _DeltaRuleConfig(64, 4, 2), _DeltaRuleConfig(64, 4, 2))
PORTABLE = DeltaRuleConfigs(_DeltaRuleConfig(32, 1, 2), _DeltaRuleConfig(64, 4, 2), _DeltaRuleConfig(32, 4, 2))
# For float32, whose exact products the matrix units do not compute. The backward spills 732 bytes a thread.
FLOAT32 = DeltaRuleConfigs(_DeltaRuleConfig(32, 2, 1), _DeltaRuleConfig(32, 4, 1), _DeltaRuleConfig(16, 8, 1))


def _delta_rule_configs(k: Tensor) -> DeltaRuleConfigs:
    """Return the shapes of the kernels for the dtype and device of `k`."""
    if k.dtype == torch.float32:
        return FLOAT32
    return HOPPER if is_on_hopper(k) else PORTABLE


class DeltaRuleOperands(NamedTuple):
    """Tensors that all kernels read; the header gives their shapes."""

    k: Tensor
    v: Tensor
    beta: Tensor
    a: Tensor
    chunks: TokenChunks


class DeltaRuleGradients(NamedTuple):
    """Tensors of the backward: it reads dw and du, and writes the others."""

    dw: Tensor
    du: Tensor
    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    da: Tensor


@triton.jit
def _products_kernel(
    k, v, beta, a, inverse, w, u, begins, lengths,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_h, first, length = chunk_place(begins, lengths, H)
    row = first * H + i_h
    # [64]
    o = tl.arange(0, 64)
    b_beta = tl.load(beta + row + o * H, mask=o < length, other=0.0)
    b_rate = b_beta * tl.exp2(tl.load(a + row + o * H, mask=o < length, other=0.0) * _LOG2E)
    # [64, 64]
    b_t = load_columns(inverse + row * 64, o, length, H * 64, 0, 64, 64)
    for start in range(0, V, TILE_V):
        b_v = load_columns(v + row * V, o, length, H * V, start, V, TILE_V)
        # [64, 64] @ [64, TILE_V] -> [64, TILE_V]
        b_u = tl.dot(b_t, (b_v * b_beta[:, None]).to(b_v.dtype), input_precision=PRECISION)
        store_columns(u + row * V, o, length, H * V, start, V, TILE_V, b_u)
    p_k = k + (first * (H // GROUP) + i_h // GROUP) * K
    for start in range(0, K, TILE_K):
        b_k = load_columns(p_k, o, length, H // GROUP * K, start, K, TILE_K)
        # [64, 64] @ [64, TILE_K] -> [64, TILE_K]
        b_w = tl.dot(b_t, (b_k * b_rate[:, None]).to(b_k.dtype), input_precision=PRECISION)
        store_columns(w + row * K, o, length, H * K, start, K, TILE_K, b_w)


@triton.jit
def _backward_kernel(
    k, v, beta, a, inverse, dw, du, dk, dv, dbeta, da, begins, lengths, ends,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_h, first, length = chunk_place(begins, lengths, H)
    row = first * H + i_h
    # [64]
    o = tl.arange(0, 64)
    b_beta = tl.load(beta + row + o * H, mask=o < length, other=0.0)
    b_a = tl.load(a + row + o * H, mask=o < length, other=0.0)
    b_decay = tl.exp2(b_a * _LOG2E)
    b_dbeta = tl.zeros([64], dtype=tl.float32)
    # T and dT, [64, 64]
    p_t = inverse + row * 64
    b_t = load_columns(p_t, o, length, H * 64, 0, 64, 64)
    b_dt = tl.zeros([64, 64], dtype=tl.float32)
    for start in range(0, V, TILE_V):
        # [64, TILE_V]
        b_v = load_columns(v + row * V, o, length, H * V, start, V, TILE_V)
        b_du = load_columns(du + row * V, o, length, H * V, start, V, TILE_V)
        # [64, TILE_V] @ [TILE_V, 64] -> [64, 64]
        b_dt = tl.dot(b_du, tl.trans((b_v * b_beta[:, None]).to(b_v.dtype)), b_dt, input_precision=PRECISION)
        if k.dtype.element_ty == tl.float32:
            # Products without matrix units would keep T in registers through the loop, and spill.
            b_t = load_columns(p_t, o, length, H * 64, 0, 64, 64)
        # [64, 64] @ [64, TILE_V] -> [64, TILE_V], the gradient of beta v
        b_dvb = tl.dot(tl.trans(b_t), b_du, input_precision=PRECISION)
        b_dbeta += tl.sum(b_dvb * b_v, 1)
        store_columns(dv + row * V, o, length, H * V, start, V, TILE_V, b_dvb * b_beta[:, None])

    p_k = k + (first * (H // GROUP) + i_h // GROUP) * K
    # [64]; k k', [64, 64]
    b_sum = tl.zeros([64], dtype=tl.float32)
    b_s = tl.zeros([64, 64], dtype=tl.float32)
    for start in range(0, K, TILE_K):
        # [64, TILE_K]
        b_k = load_columns(p_k, o, length, H // GROUP * K, start, K, TILE_K)
        b_dw = load_columns(dw + row * K, o, length, H * K, start, K, TILE_K)
        # [64, TILE_K] @ [TILE_K, 64] -> [64, 64]
        b_s = tl.dot(b_k, tl.trans(b_k), b_s, input_precision=PRECISION)
        b_kb = (b_k * (b_beta * b_decay)[:, None]).to(b_k.dtype)
        b_dt = tl.dot(b_dw, tl.trans(b_kb), b_dt, input_precision=PRECISION)
        # [64, 64] @ [64, TILE_K] -> [64, TILE_K], the gradient of beta exp(a) k
        b_sum += tl.sum(tl.dot(tl.trans(b_t), b_dw, input_precision=PRECISION) * b_k, 1)
    b_sum *= b_decay
    b_dbeta += b_sum

    # [64, 64] @ [64, 64], twice: dA' = -T (T' dT)'. From here on element [j, i] belongs to the pair i, j.
    b_x = tl.dot(tl.trans(b_t), b_dt.to(b_t.dtype), input_precision=PRECISION)
    b_x = tl.dot(b_t, tl.trans(b_x.to(b_t.dtype)), input_precision=PRECISION)
    b_end = load_ends(ends, first, length, o)
    b_x *= -pair_decays(o[None, :], o[:, None], b_a[None, :], b_a[:, None], b_end[:, None])
    # A[i, j] = beta_i S[i, j] exp(a_i - a_j): sums over j go to dbeta_i and da_i, sums over i to -da_j
    b_s *= b_x
    b_dbeta += tl.sum(b_s, 0)
    b_s *= b_beta[None, :]
    b_da = b_sum * b_beta + tl.sum(b_s, 0) - tl.sum(b_s, 1)
    # S = k k' has each key on both sides: dk = (M + M') k with M = beta dA exp(a_i - a_j)
    b_x *= b_beta[None, :]
    b_m = (b_x + tl.trans(b_x)).to(b_t.dtype)
    for start in range(0, K, TILE_K):
        # [64, TILE_K] -> [TILE_K, 64]
        b_kt = tl.trans(load_columns(p_k, o, length, H // GROUP * K, start, K, TILE_K))
        b_dwt = tl.trans(load_columns(dw + row * K, o, length, H * K, start, K, TILE_K))
        if k.dtype.element_ty == tl.float32:
            b_t = load_columns(p_t, o, length, H * 64, 0, 64, 64)
        # [TILE_K, 64] @ [64, 64] -> [TILE_K, 64], twice; the first one is the gradient of beta exp(a) k
        b_dk = tl.dot(b_dwt, b_t, input_precision=PRECISION) * (b_beta * b_decay)[None, :]
        b_dk = tl.dot(b_kt, b_m, b_dk, input_precision=PRECISION)
        store_columns(dk + row * K, o, length, H * K, start, K, TILE_K, tl.trans(b_dk))
    tl.store(dbeta + row + o * H, b_dbeta, mask=o < length)
    tl.store(da + row + o * H, b_da, mask=o < length)


def solve_forward(k: Tensor, v: Tensor, beta: Tensor, a: Tensor, chunks: TokenChunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return W [N, H, K], U [N, H, V] and the inverse T [N, H, 64], in the dtype of k.

    Args:
        k, v, beta, a, chunks: as in the header.
    """
    assert chunks.size <= CHUNK, "a chunk has at most 64 tokens"
    operands = DeltaRuleOperands(k, v, beta, a, chunks)
    inverse = torch.empty((*beta.shape, CHUNK), dtype=k.dtype, device=k.device)
    inverse_launch(operands, inverse, _delta_rule_configs(k).inverse).run()
    return (*multiply_inverse(k, v, beta, a, inverse, chunks), inverse)


def multiply_inverse(
    k: Tensor, v: Tensor, beta: Tensor, a: Tensor, inverse: Tensor, chunks: TokenChunks
) -> tuple[Tensor, Tensor]:
    """Return W and U with the bits of the `solve_forward` that returned `inverse`."""
    operands = DeltaRuleOperands(k, v, beta, a, chunks)
    w = torch.empty((*beta.shape, k.shape[-1]), dtype=k.dtype, device=k.device)
    u = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    delta_products_launch(operands, inverse, w, u, _delta_rule_configs(k).products).run()
    return w, u


def solve_backward(
    k: Tensor, v: Tensor, beta: Tensor, a: Tensor, inverse: Tensor, *, dw: Tensor, du: Tensor, chunks: TokenChunks
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dk [N, H, K], one for each head of v, dv [N, H, V], and dbeta and da, float32 [N, H].

    Args:
        k, v, beta, a, chunks: as in the header.
        inverse: the third result of `solve_forward` for them.
        dw, du: the gradients of its other results, contiguous and in the dtype of k.
    """
    operands = DeltaRuleOperands(k, v, beta, a, chunks)
    new = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (dw, v, beta, a)]
    gradients = DeltaRuleGradients(dw, du, *new)
    gradient_launch(operands, inverse, gradients, _delta_rule_configs(k).backward).run()
    return gradients.dk, gradients.dv, gradients.dbeta, gradients.da


def inverse_launch(operands: DeltaRuleOperands, inverse: Tensor, config: _DeltaRuleConfig) -> KernelLaunch:
    """Describe the launch that writes `inverse`."""
    k, _, beta, a, chunks = operands
    # Three products of parts of float32 numbers have the errors of float32, and need fewer registers than exact ones.
    merge = "ieee" if k.dtype == torch.float32 or torch.version.hip is not None else "tf32x3"
    arguments = {"k": k, "beta": beta, "a": a, "inverse": inverse, "ends": chunks.end}
    constants = {"K": k.shape[-1], "TILE": _tile(k.shape[-1], config), "MERGE": merge}
    return _launch(inverse_kernel, operands, arguments, constants, config)


def delta_products_launch(
    operands: DeltaRuleOperands, inverse: Tensor, w: Tensor, u: Tensor, config: _DeltaRuleConfig
) -> KernelLaunch:
    """Describe the launch that writes `w` and `u`."""
    arguments = {**_inputs(operands), "inverse": inverse, "w": w, "u": u}
    return _launch(_products_kernel, operands, arguments, _widths(operands, config), config)


def gradient_launch(
    operands: DeltaRuleOperands, inverse: Tensor, gradients: DeltaRuleGradients, config: _DeltaRuleConfig
) -> KernelLaunch:
    """Describe the launch that writes the gradients of k, v, beta and a."""
    arguments = {**_inputs(operands), "inverse": inverse, **gradients._asdict(), "ends": operands.chunks.end}
    return _launch(_backward_kernel, operands, arguments, _widths(operands, config), config)


def _inputs(operands: DeltaRuleOperands) -> dict[str, Any]:
    return {name: getattr(operands, name) for name in ("k", "v", "beta", "a")}


def _widths(operands: DeltaRuleOperands, config: _DeltaRuleConfig) -> dict[str, Any]:
    width_k, width_v = operands.k.shape[-1], operands.v.shape[-1]
    return {"K": width_k, "V": width_v, "TILE_K": _tile(width_k, config), "TILE_V": _tile(width_v, config)}


def _tile(width: int, config: _DeltaRuleConfig) -> int:
    """Return the columns per step of a loop over `width` columns."""
    return min(config.tile, padded_width(width))


def _launch(
    kernel: Any,
    operands: DeltaRuleOperands,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    config: _DeltaRuleConfig,
) -> KernelLaunch:
    chunks, heads = operands.chunks, operands.beta.shape[1]
    return KernelLaunch(
        kernel,
        len(chunks.begin) * heads,
        {**arguments, "begins": chunks.begin, "lengths": chunks.length},
        {"H": heads, "GROUP": heads // operands.k.shape[1], "PRECISION": "ieee", **constants},
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
