"""The inverse of 1 + A in Triton, for `delta_rule`, and the functions for rows and pairs that its kernels share.

A [n, n] is strictly lower triangular, n <= 64. Forward substitution inverts the four blocks of 16 tokens on the
diagonal, in float32. Products make the blocks below, row after row, from X_ij = T_ii A_ij:

    T_00                              T_10 = -X_10 T_00        T_20 = -X_20 T_00 - X_21 T_10
    T_10 T_11                         T_21 = -X_21 T_11        T_30 = -X_30 T_00 - X_31 T_10 - X_32 T_20
    T_20 T_21 T_22                    T_32 = -X_32 T_22        T_31 = -X_31 T_11 - X_32 T_21
    T_30 T_31 T_32 T_33

This is as accurate as a triangular solve, even if keys are equal and powers of A are large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treepack.attention.kernel_launch import LOG2E

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def chunk_place(begins, lengths, H: tl.constexpr):
    """Return the head of a program, and the first token (int64) and the number of tokens of its chunk."""
    i_c = tl.program_id(0) // H
    return tl.program_id(0) % H, tl.load(begins + i_c).to(tl.int64), tl.load(lengths + i_c)


@triton.jit
def load_ends(ends, first, length, o):
    """Return one past the last place that sees each place `o` of the chunk, 0 for places without a token."""
    # chunk of tokens 5 6 7, whose subtrees end before 6 7 8 (padding), o 0 ... 3 -> 1 2 3 0
    b_end = tl.load(ends + first + o, mask=o < length, other=0) - first.to(tl.int32)
    return tl.where(o < length, tl.minimum(b_end, length), 0)


@triton.jit
def load_columns(p_x, o, length, stride, start, X: tl.constexpr, TILE: tl.constexpr):
    """Return TILE columns of places `o` [len(o), TILE], the first of them `start`; 0 beyond the chunk and X columns."""
    # [TILE], [len(o), 1]
    o_x = start + tl.arange(0, TILE)
    mask = (o < length)[:, None]
    if X % TILE != 0:
        mask = mask & (o_x < X)[None, :]
    return tl.load(p_x + o[:, None] * stride + o_x[None, :], mask=mask, other=0.0)


@triton.jit
def store_columns(p_x, o, length, stride, start, X: tl.constexpr, TILE: tl.constexpr, b_x):
    """Write b_x [len(o), TILE] to the columns of `load_columns`."""
    # [TILE], [len(o), 1]
    o_x = start + tl.arange(0, TILE)
    mask = (o < length)[:, None]
    if X % TILE != 0:
        mask = mask & (o_x < X)[None, :]
    tl.store(p_x + o[:, None] * stride + o_x[None, :], b_x.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def _store_blocks(p_t, o, length, H: tl.constexpr, t0, t1, t2, t3):
    """Write the four blocks [16, 16] of the rows `o` of T."""
    store_columns(p_t, o, length, H * 64, 0, 64, 16, t0)
    store_columns(p_t, o, length, H * 64, 16, 64, 16, t1)
    store_columns(p_t, o, length, H * 64, 32, 64, 16, t2)
    store_columns(p_t, o, length, H * 64, 48, 64, 16, t3)


@triton.jit
def pair_decays(o_i, o_j, b_a_i, b_a_j, b_end_j):
    """Return exp(a_i - a_j) for the pairs j < i that are seen, 0 for the others; i or j is the first dimension."""
    # Pairs that are not seen may have exponents above 0, which would overflow: they are set to -inf first.
    seen = (o_j < o_i) & (o_i < b_end_j)
    return tl.exp2(tl.where(seen, (b_a_i - b_a_j) * _LOG2E, float("-inf")))


@triton.jit
def _weigh(b_s, o_i, o_j, b_beta, b_a_i, b_a_j, b_end_j):
    """Return the block of A of places o_i and o_j, [16, 16], from that of k k'."""
    b_decays = pair_decays(o_i[:, None], o_j[None, :], b_a_i[:, None], b_a_j[None, :], b_end_j[None, :])
    return b_s * b_beta[:, None] * b_decays


@triton.jit
def _eliminate(b_t, b_s, step):
    """Subtract row `step` of b_t, times the element of b_s in column `step`, from every row below it."""
    o = tl.arange(0, 16)
    # [16], [16]; elements of b_s on the diagonal and above are 0
    b_row = tl.sum(tl.where(o[:, None] == step, b_t, 0.0), 0)
    b_column = tl.sum(tl.where(o[None, :] == step, b_s, 0.0), 1)
    return b_t - b_column[:, None] * b_row[None, :]


@triton.jit
def inverse_kernel(
    k, beta, a, inverse, begins, lengths, ends,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    i_h, first, length = chunk_place(begins, lengths, H)
    o0 = tl.arange(0, 16)
    o1, o2, o3 = o0 + 16, o0 + 32, o0 + 48
    p_k = k + (first * (H // GROUP) + i_h // GROUP) * K
    # s10 is the block of rows 16 ... 31 and columns 0 ... 15 of k k', then of A
    s00 = tl.zeros([16, 16], dtype=tl.float32)
    s10, s11, s20, s21, s22, s30, s31, s32, s33 = s00, s00, s00, s00, s00, s00, s00, s00, s00
    for start in range(0, K, TILE):
        # [16, TILE]
        k0 = load_columns(p_k, o0, length, H // GROUP * K, start, K, TILE)
        k1 = load_columns(p_k, o1, length, H // GROUP * K, start, K, TILE)
        k2 = load_columns(p_k, o2, length, H // GROUP * K, start, K, TILE)
        k3 = load_columns(p_k, o3, length, H // GROUP * K, start, K, TILE)
        # [16, TILE] @ [TILE, 16] -> [16, 16]
        s00 = tl.dot(k0, tl.trans(k0), s00, input_precision=PRECISION)
        s10 = tl.dot(k1, tl.trans(k0), s10, input_precision=PRECISION)
        s11 = tl.dot(k1, tl.trans(k1), s11, input_precision=PRECISION)
        s20 = tl.dot(k2, tl.trans(k0), s20, input_precision=PRECISION)
        s21 = tl.dot(k2, tl.trans(k1), s21, input_precision=PRECISION)
        s22 = tl.dot(k2, tl.trans(k2), s22, input_precision=PRECISION)
        s30 = tl.dot(k3, tl.trans(k0), s30, input_precision=PRECISION)
        s31 = tl.dot(k3, tl.trans(k1), s31, input_precision=PRECISION)
        s32 = tl.dot(k3, tl.trans(k2), s32, input_precision=PRECISION)
        s33 = tl.dot(k3, tl.trans(k3), s33, input_precision=PRECISION)
    # [16]
    p_a, p_beta = a + first * H + i_h, beta + first * H + i_h
    a0, a1 = tl.load(p_a + o0 * H, o0 < length, 0.0), tl.load(p_a + o1 * H, o1 < length, 0.0)
    a2, a3 = tl.load(p_a + o2 * H, o2 < length, 0.0), tl.load(p_a + o3 * H, o3 < length, 0.0)
    e0, e1 = load_ends(ends, first, length, o0), load_ends(ends, first, length, o1)
    e2, e3 = load_ends(ends, first, length, o2), load_ends(ends, first, length, o3)
    beta0, beta1 = tl.load(p_beta + o0 * H, o0 < length, 0.0), tl.load(p_beta + o1 * H, o1 < length, 0.0)
    beta2, beta3 = tl.load(p_beta + o2 * H, o2 < length, 0.0), tl.load(p_beta + o3 * H, o3 < length, 0.0)
    # [16, 16]
    s00 = _weigh(s00, o0, o0, beta0, a0, a0, e0)
    s10 = _weigh(s10, o1, o0, beta1, a1, a0, e0)
    s11 = _weigh(s11, o1, o1, beta1, a1, a1, e1)
    s20 = _weigh(s20, o2, o0, beta2, a2, a0, e0)
    s21 = _weigh(s21, o2, o1, beta2, a2, a1, e1)
    s22 = _weigh(s22, o2, o2, beta2, a2, a2, e2)
    s30 = _weigh(s30, o3, o0, beta3, a3, a0, e0)
    s31 = _weigh(s31, o3, o1, beta3, a3, a1, e1)
    s32 = _weigh(s32, o3, o2, beta3, a3, a2, e2)
    s33 = _weigh(s33, o3, o3, beta3, a3, a3, e3)

    t00 = tl.where(o0[:, None] == o0[None, :], 1.0, 0.0)
    t11, t22, t33 = t00, t00, t00
    for step in range(0, tl.minimum(length, 16) - 1):
        t00, t11 = _eliminate(t00, s00, step), _eliminate(t11, s11, step)
        t22, t33 = _eliminate(t22, s22, step), _eliminate(t33, s33, step)
    # From here on s10 is X_10. Every row is stored with its zeros.
    p_t = inverse + (first * H + i_h) * 64
    zero = tl.zeros([16, 16], dtype=tl.float32)
    _store_blocks(p_t, o0, length, H, t00, zero, zero, zero)
    s10 = tl.dot(t11, s10, input_precision=MERGE)
    t10 = -tl.dot(s10, t00, input_precision=MERGE)
    _store_blocks(p_t, o1, length, H, t10, t11, zero, zero)
    s20 = tl.dot(t22, s20, input_precision=MERGE)
    s21 = tl.dot(t22, s21, input_precision=MERGE)
    t20 = -tl.dot(s21, t10, tl.dot(s20, t00, input_precision=MERGE), input_precision=MERGE)
    t21 = -tl.dot(s21, t11, input_precision=MERGE)
    _store_blocks(p_t, o2, length, H, t20, t21, t22, zero)
    s30 = tl.dot(t33, s30, input_precision=MERGE)
    s31 = tl.dot(t33, s31, input_precision=MERGE)
    s32 = tl.dot(t33, s32, input_precision=MERGE)
    b_sum = tl.dot(s31, t10, tl.dot(s30, t00, input_precision=MERGE), input_precision=MERGE)
    t30 = -tl.dot(s32, t20, b_sum, input_precision=MERGE)
    t31 = -tl.dot(s32, t21, tl.dot(s31, t11, input_precision=MERGE), input_precision=MERGE)
    t32 = -tl.dot(s32, t22, input_precision=MERGE)
    _store_blocks(p_t, o3, length, H, t30, t31, t32, t33)
