"""States of a tree of chunks in Triton: the recursion over chunks, forward, and backward for its gradient.

    forward    new = u - w h              h' = exp(a_last) h + k' (exp(a_last - a) new)
    backward   du = du_local + exp(a_last - a) (k G)      dh = exp(a_last) G + q' (exp(a) do) - w' du

h is the state before a chunk, h' the state after it, G the gradient of h'. One launch computes the runs of one stage of
`TokenChunks`, and one program computes a run for one head and BLOCK_V of its V columns; columns do not depend on each
other. The program keeps its part of the state in registers, float32 [K, BLOCK_V], and goes from chunk to chunk:

    run 0:  chunk 0 - 1 - 2 - 3           forward: after chunk 1 the state is saved, because run 1 begins from it
    run 1:          `- 4 - 5              backward: G after chunk 1 = dh of chunk 2 + dh of chunk 4, in this order

The gradient of the state that a run begins from goes to a buffer, one entry per run. All runs that begin from one state
are in one stage, the next one after that of the state. Backward, stages come in reverse; after each, `_sum_kernel` adds
the entries of every state, in ascending order, into the entry of the state's first run, where the run that saved the
state finds the sum. Runs of the first stage begin at roots, from 0, and have no entry.

Sums are in float32 and in one order, so two runs of the program agree in every bit. States and gradients are stored in
the dtype of k, and in float32 at branchings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treepack.attention.kernel_launch import KernelLaunch, padded_width
from treepack.recurrent.chunks import RunStage, TokenChunks
from treepack.recurrent.kernels.state_shapes import StateConfig, choose_shape, state_configs

_PART = 128  # rows of a state in one block; K has at most two such parts
_SUM_BLOCK = 2048  # elements of a state per program


@triton.jit
def _load(p_rows, o_rows, m_rows, stride, o_columns, width):
    """Return the tile [rows, columns] of a matrix with `width` columns, 0 outside of it."""
    p_tile = p_rows + o_rows[:, None] * stride + o_columns[None, :]
    return tl.load(p_tile, mask=m_rows[:, None] & (o_columns < width)[None, :], other=0.0)


@triton.jit
def _load_state(p_state, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Return the tile [BLOCK_K, BLOCK_V] of a state [K, V], 0 outside of it."""
    return _load(p_state, o_k, o_k < K, V, o_v, V)


@triton.jit
def _store_state(p_state, b_state, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Write the tile [BLOCK_K, BLOCK_V] of a state [K, V]."""
    p_tile = p_state + o_k[:, None] * V + o_v[None, :]
    tl.store(p_tile, b_state.to(p_state.dtype.element_ty), mask=(o_k < K)[:, None] & (o_v < V)[None, :])


@triton.jit
def _place(begins, first_run, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Return run, head and tile of columns of this program, and the range of its run in the stage's list of chunks."""
    # 2 heads, 2 tiles: programs 0 1 2 3 | 4 ... -> tiles 0 1 0 1 | 0 ..., heads 0 0 1 1 | 0 ..., runs 0 0 0 0 | 1 ...
    program = tl.program_id(0)
    i_r = program // (HEADS * TILES)
    first, last = tl.load(begins + i_r), tl.load(begins + i_r + 1)
    return (first_run + i_r).to(tl.int64), (program // TILES % HEADS).to(tl.int64), program % TILES, first, last


@triton.jit(do_not_specialize=["first_run"])
def _forward_kernel(
    k, u, w, a, h, new, states, chunks, begins, begin, length, saved, run_state, first_run,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, REST_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one run for one head and BLOCK_V columns. K has two parts: BLOCK_K rows, and REST_K more if not 0."""
    i_r, i_h, i_v, first, last = _place(begins, first_run, HEADS, (V + BLOCK_V - 1) // BLOCK_V)
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    p_k, p_w = k + i_h // GROUP * K, w + i_h * K
    p_u, p_new = u + i_h * V, new + i_h * V
    # [SIZE], [BLOCK_K], [BLOCK_V]
    o_i = tl.arange(0, SIZE)
    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    # [BLOCK_K, BLOCK_V]
    b_h = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if REST_K:
        # [REST_K], [REST_K, BLOCK_V]
        o_r = BLOCK_K + tl.arange(0, REST_K)
        b_r = tl.zeros([REST_K, BLOCK_V], dtype=tl.float32)
    state = tl.load(run_state + i_r).to(tl.int64)
    if state >= 0:
        p_state = states + (state * HEADS + i_h) * K * V
        b_h = _load_state(p_state, o_k, o_v, K, V)
        if REST_K:
            b_r = _load_state(p_state, o_r, o_v, K, V)
    for i in range(first, last):
        i_c = tl.load(chunks + i).to(tl.int64)
        start, count = tl.load(begin + i_c).to(tl.int64), tl.load(length + i_c)
        o_t, m_t = start + o_i, o_i < count
        p_h = h + (i_c * HEADS + i_h) * K * V
        _store_state(p_h, b_h, o_k, o_v, K, V)
        if REST_K:
            _store_state(p_h, b_r, o_r, o_v, K, V)
        # [SIZE, BLOCK_V]
        b_u = _load(p_u, o_t, m_t, HEADS * V, o_v, V).to(tl.float32)
        if DELTA:
            # [SIZE, BLOCK_K] @ [BLOCK_K, BLOCK_V] -> [SIZE, BLOCK_V]
            b_w = _load(p_w, o_t, m_t, HEADS * K, o_k, K)
            b_wh = tl.dot(b_w, b_h.to(b_w.dtype), input_precision=PRECISION)
            if REST_K:
                b_w = _load(p_w, o_t, m_t, HEADS * K, o_r, K)
                b_wh = tl.dot(b_w, b_r.to(b_w.dtype), b_wh, input_precision=PRECISION)
            b_u -= b_wh
            m_u = m_t[:, None] & (o_v < V)[None, :]
            tl.store(p_new + o_t[:, None] * (HEADS * V) + o_v[None, :], b_u.to(new.dtype.element_ty), mask=m_u)
        # [SIZE]; past the last token the exponent would be that of a sum of 0
        b_a = tl.load(a + o_t * HEADS + i_h, mask=m_t, other=0.0)
        a_last = tl.load(a + (start + count - 1) * HEADS + i_h)
        b_u *= tl.where(m_t, tl.exp(a_last - b_a), 0.0)[:, None]
        decay = tl.exp(a_last)
        # [BLOCK_K, SIZE] @ [SIZE, BLOCK_V] -> [BLOCK_K, BLOCK_V]
        b_k = _load(p_k, o_t, m_t, KEY_HEADS * K, o_k, K)
        b_h = tl.dot(tl.trans(b_k), b_u.to(b_k.dtype), b_h * decay, input_precision=PRECISION)
        if REST_K:
            b_k = _load(p_k, o_t, m_t, KEY_HEADS * K, o_r, K)
            b_r = tl.dot(tl.trans(b_k), b_u.to(b_k.dtype), b_r * decay, input_precision=PRECISION)
        i_s = tl.load(saved + i_c).to(tl.int64)
        if i_s >= 0:
            p_state = states + (i_s * HEADS + i_h) * K * V
            _store_state(p_state, b_h, o_k, o_v, K, V)
            if REST_K:
                _store_state(p_state, b_r, o_r, o_v, K, V)


@triton.jit(do_not_specialize=["first_run", "num_roots"])
def _backward_kernel(
    q, k, w, a, do, du_local, dh, du, d_states, chunks, begins, begin, length, saved, run_state, state_begins,
    state_runs, first_run, num_roots,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, REST_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one run for one head and BLOCK_V columns, from its last chunk to its first."""
    i_r, i_h, i_v, first, last = _place(begins, first_run, HEADS, (V + BLOCK_V - 1) // BLOCK_V)
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    p_q, p_k, p_w = q + i_h // GROUP * K, k + i_h // GROUP * K, w + i_h * K
    p_do, p_local, p_du = do + i_h * V, du_local + i_h * V, du + i_h * V
    # [SIZE], [BLOCK_K], [BLOCK_V]
    o_i = tl.arange(0, SIZE)
    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    # [BLOCK_K, BLOCK_V]: the gradient of the state after a chunk
    b_g = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if REST_K:
        # [REST_K], [REST_K, BLOCK_V]
        o_r = BLOCK_K + tl.arange(0, REST_K)
        b_r = tl.zeros([REST_K, BLOCK_V], dtype=tl.float32)
    # 3 chunks at 5, 6, 7 of the list: i = 0, 1, 2 -> 7, 6, 5
    for i in range(0, last - first):
        i_c = tl.load(chunks + last - 1 - i).to(tl.int64)
        start, count = tl.load(begin + i_c).to(tl.int64), tl.load(length + i_c)
        o_t, m_t = start + o_i, o_i < count
        i_s = tl.load(saved + i_c)
        # A loop over the runs in here would keep Triton from pipelining the loop over chunks.
        if i_s >= 0:
            entry = tl.load(state_runs + tl.load(state_begins + i_s)).to(tl.int64) - num_roots
            p_state = d_states + (entry * HEADS + i_h) * K * V
            b_g += _load_state(p_state, o_k, o_v, K, V)
            if REST_K:
                b_r += _load_state(p_state, o_r, o_v, K, V)
        p_h = dh + (i_c * HEADS + i_h) * K * V
        _store_state(p_h, b_g, o_k, o_v, K, V)
        if REST_K:
            _store_state(p_h, b_r, o_r, o_v, K, V)
        # [SIZE]; past the last token the exponent would be that of a sum of 0
        b_a = tl.load(a + o_t * HEADS + i_h, mask=m_t, other=0.0)
        a_last = tl.load(a + (start + count - 1) * HEADS + i_h)
        # [SIZE, BLOCK_K] @ [BLOCK_K, BLOCK_V] -> [SIZE, BLOCK_V]
        b_k = _load(p_k, o_t, m_t, KEY_HEADS * K, o_k, K)
        b_du = tl.dot(b_k, b_g.to(b_k.dtype), input_precision=PRECISION)
        if REST_K:
            b_k = _load(p_k, o_t, m_t, KEY_HEADS * K, o_r, K)
            b_du = tl.dot(b_k, b_r.to(b_k.dtype), b_du, input_precision=PRECISION)
        b_du *= tl.where(m_t, tl.exp(a_last - b_a), 0.0)[:, None]
        b_du += _load(p_local, o_t, m_t, HEADS * V, o_v, V)
        m_u = m_t[:, None] & (o_v < V)[None, :]
        tl.store(p_du + o_t[:, None] * (HEADS * V) + o_v[None, :], b_du.to(du.dtype.element_ty), mask=m_u)
        # [SIZE, BLOCK_V], in which tokens past the last one are 0
        b_du = (-b_du).to(b_k.dtype)
        b_do = (_load(p_do, o_t, m_t, HEADS * V, o_v, V) * tl.exp(b_a)[:, None]).to(b_k.dtype)
        decay = tl.exp(a_last)
        # [BLOCK_K, SIZE] @ [SIZE, BLOCK_V] -> [BLOCK_K, BLOCK_V]
        b_q = _load(p_q, o_t, m_t, KEY_HEADS * K, o_k, K)
        b_g = tl.dot(tl.trans(b_q), b_do, b_g * decay, input_precision=PRECISION)
        if DELTA:
            b_w = _load(p_w, o_t, m_t, HEADS * K, o_k, K)
            b_g = tl.dot(tl.trans(b_w), b_du, b_g, input_precision=PRECISION)
        if REST_K:
            b_q = _load(p_q, o_t, m_t, KEY_HEADS * K, o_r, K)
            b_r = tl.dot(tl.trans(b_q), b_do, b_r * decay, input_precision=PRECISION)
            if DELTA:
                b_w = _load(p_w, o_t, m_t, HEADS * K, o_r, K)
                b_r = tl.dot(tl.trans(b_w), b_du, b_r, input_precision=PRECISION)
    if tl.load(run_state + i_r) >= 0:
        p_state = d_states + ((i_r - num_roots) * HEADS + i_h) * K * V
        _store_state(p_state, b_g, o_k, o_v, K, V)
        if REST_K:
            _store_state(p_state, b_r, o_r, o_v, K, V)


@triton.jit(do_not_specialize=["first_run", "num_roots"])
def _sum_kernel(
    d_states, run_state, state_begins, state_runs, first_run, num_roots,
    ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the entries of all runs that begin from the state of this program's run, if it is the first of them."""
    TILES: tl.constexpr = (ELEMENTS + BLOCK - 1) // BLOCK
    run = first_run + tl.program_id(0) // TILES
    i_s = tl.load(run_state + run)
    first, last = tl.load(state_begins + i_s), tl.load(state_begins + i_s + 1)
    if (tl.load(state_runs + first) == run) & (last > first + 1):
        # [BLOCK]
        o_x = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
        p_sum = d_states + (run - num_roots).to(tl.int64) * ELEMENTS + o_x
        b_sum = tl.load(p_sum, mask=o_x < ELEMENTS, other=0.0)
        for j in range(first + 1, last):
            entry = (tl.load(state_runs + j) - num_roots).to(tl.int64)
            b_sum += tl.load(d_states + entry * ELEMENTS + o_x, mask=o_x < ELEMENTS, other=0.0)
        tl.store(p_sum, b_sum, mask=o_x < ELEMENTS)


class ForwardOperands(NamedTuple):
    """Operands of the forward recursion; `h`, `new` and `states` [S, H, K, V] are written. Shapes as in the header."""

    k: Tensor
    u: Tensor
    w: Tensor | None
    a: Tensor
    h: Tensor
    new: Tensor
    states: Tensor


class BackwardOperands(NamedTuple):
    """Operands of the backward recursion; `dh`, `du` and `d_states` are written."""

    q: Tensor
    k: Tensor
    w: Tensor | None
    a: Tensor
    do: Tensor
    du_local: Tensor
    dh: Tensor
    du: Tensor
    d_states: Tensor


def run_forward_launch(
    tensors: ForwardOperands, chunks: TokenChunks, stage: RunStage, config: StateConfig
) -> KernelLaunch:
    """Return the launch that computes the runs of a stage."""
    arguments = {**tensors._asdict(), **_table(chunks, stage)}
    return _launch(_forward_kernel, arguments, tensors.h, chunks, config)


def run_backward_launch(
    tensors: BackwardOperands, chunks: TokenChunks, stage: RunStage, config: StateConfig
) -> KernelLaunch:
    """Return the launch that computes the gradients of the runs of a stage."""
    arguments = {**tensors._asdict(), **_table(chunks, stage), **_followers(chunks)}
    return _launch(_backward_kernel, arguments, tensors.dh, chunks, config)


def run_sum_launch(d_states: Tensor, chunks: TokenChunks, stage: RunStage) -> KernelLaunch:
    """Return the launch that adds the entries of the runs of a stage, any but the first."""
    elements = d_states[0].numel()
    arguments = {"d_states": d_states, "run_state": chunks.run_state, "first_run": stage.first, **_followers(chunks)}
    constants = {"ELEMENTS": elements, "BLOCK": _SUM_BLOCK}
    programs = (len(stage.begins) - 1) * triton.cdiv(elements, _SUM_BLOCK)
    return KernelLaunch(_sum_kernel, programs, arguments, constants, {"num_warps": 4, "num_stages": 2})


def _table(chunks: TokenChunks, stage: RunStage) -> dict[str, Any]:
    """Return the arguments of both kernels about chunks and runs."""
    return {
        "chunks": stage.chunks,
        "begins": stage.begins,
        "begin": chunks.begin,
        "length": chunks.length,
        "saved": chunks.saved,
        "run_state": chunks.run_state,
        "first_run": stage.first,
    }


def _followers(chunks: TokenChunks) -> dict[str, Any]:
    """Return the arguments about the runs that begin from saved states."""
    return {"state_begins": chunks.state_begins, "state_runs": chunks.state_runs, "num_roots": _count_roots(chunks)}


def _launch(
    kernel: Any, arguments: dict[str, Any], h: Tensor, chunks: TokenChunks, config: StateConfig
) -> KernelLaunch:
    k, w = arguments["k"], arguments["w"]
    heads, keys, values = h.shape[1:]
    part = min(keys, _PART)
    constants = {
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "K": keys,
        "V": values,
        "SIZE": padded_width(chunks.size),
        "BLOCK_K": padded_width(part),
        "REST_K": padded_width(keys - part) if keys > part else 0,
        "BLOCK_V": min(config.block_v, padded_width(values)),
        "DELTA": w is not None,
        "PRECISION": "ieee" if k.dtype == torch.float32 else "tf32",
    }
    arguments["w"] = k if w is None else w  # not read without the delta rule
    programs = (len(arguments["begins"]) - 1) * heads * triton.cdiv(values, constants["BLOCK_V"])
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return KernelLaunch(kernel, programs, arguments, constants, options)


def _count_roots(chunks: TokenChunks) -> int:
    """Return the number of runs that begin at roots, which are the runs of the first stage."""
    return len(chunks.stages[0].begins) - 1 if chunks.stages else 0


def states_forward(k: Tensor, u: Tensor, w: Tensor | None, a: Tensor, chunks: TokenChunks) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, h [C, H, K, V] in the dtype of `k`, and the new values [N, H, V].

    Args:
        k: [N, Hk, K] in bfloat16, float16 or float32, K <= 256; Hk divides H. All tensors are contiguous.
        u: values inside chunks, [N, H, V].
        w: keys inside chunks, [N, H, K]; None without the delta rule, and then the new values are `u`.
        a: sums of decays, float32 [N, H].
        chunks: of the same tokens, on their device.
    """
    heads, values = u.shape[1:]
    saved = len(chunks.state_begins) - 1
    h = torch.empty((len(chunks.begin), heads, k.shape[2], values), dtype=k.dtype, device=k.device)
    states = torch.empty((saved, *h.shape[1:]), dtype=torch.float32, device=k.device)
    new = u if w is None else torch.empty_like(u)
    tensors = ForwardOperands(k, u, w, a, h, new, states)
    for stage in chunks.stages:
        run_forward_launch(
            tensors, chunks, stage, choose_shape(state_configs(k).forward, len(stage.begins) - 1, h)
        ).run()
    return h, new


def states_backward(
    q: Tensor, k: Tensor, w: Tensor | None, a: Tensor, do: Tensor, du_local: Tensor, *, chunks: TokenChunks
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the state after each chunk, dh [C, H, K, V], and that of the new values, du [N, H, V].

    Args:
        q, k: [N, Hk, K] in one dtype; `q` includes its scale.
        w: [N, H, K], or None without the delta rule.
        a: sums of decays, float32 [N, H].
        do: gradient of the outputs, [N, H, V].
        du_local: part of the gradient of the new values that comes from outputs of the same chunk, [N, H, V].
        chunks: of the same tokens, on their device.
    """
    heads, values = do.shape[1:]
    dh = torch.empty((len(chunks.begin), heads, k.shape[2], values), dtype=k.dtype, device=k.device)
    d_states = torch.empty((len(chunks.state_runs), *dh.shape[1:]), dtype=torch.float32, device=k.device)
    du = torch.empty_like(du_local)
    tensors = BackwardOperands(q, k, w, a, do, du_local, dh, du, d_states)
    # A state that only one run begins from has nothing to add.
    has_sums = len(chunks.state_runs) > len(chunks.state_begins) - 1
    for stage in reversed(chunks.stages):
        run_backward_launch(
            tensors, chunks, stage, choose_shape(state_configs(k).backward, len(stage.begins) - 1, dh)
        ).run()
        if stage.first and has_sums:
            run_sum_launch(d_states, chunks, stage).run()
    return dh, du
