"""Gated delta rule and Mamba-2 on trees by treepack's kernels, as a function that torch differentiates.

    g                    --decays-->      a            sums of decays inside chunks
    k, v, beta, a        --delta_rule-->  w, u         values inside chunks; without the delta rule u is v
    k, u, w, a           --states-->      h, new       along the tree; the other steps do not depend on it
    q, k, new, h, a      --outputs-->     o

Between forward and backward only q, k, v, a, beta and the inverses of the delta rule are in memory. The backward pass
computes w, u, h and new again, as flash-linear-attention does: h alone has K * V / 64 elements per token and head.

Triton launches on the current GPU even if the tensors are on another one, so their GPU becomes the current one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treepack.recurrent.chunks import TokenChunks
from treepack.recurrent.kernels.decays import decays, decays_backward
from treepack.recurrent.kernels.delta_rule import multiply_inverse, solve_backward, solve_forward
from treepack.recurrent.kernels.outputs import local_backward, outputs_forward, products_backward
from treepack.recurrent.kernels.states import states_backward, states_forward


def triton_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chunks: TokenChunks) -> Tensor:
    """Return the outputs o [N, H, V] of the tokens of a tree, in the dtype of `v`.

    Args:
        q, k: [N, Hk, K] in any floating dtype, rounded to that of `v`; Hk divides H. `q` includes its scale.
        v: [N, H, V] in bfloat16, float16 or float32; K and V are at most 256.
        g: logarithm of the decay, [N, H], at most 0.
        beta: [N, H], or None for no delta rule.
        chunks: of the same tokens, on their device, with at most 64 tokens each.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    g, beta = g.float(), None if beta is None else beta.float()
    out: Tensor = _TreeScan.apply(q, k, v, g, beta, chunks)
    return out


class _TreeScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chunks: TokenChunks
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        beta = None if beta is None else beta.contiguous()
        if not len(v):
            out = torch.empty_like(v)
            a, inverse = g, None
        else:
            with torch.cuda.device_of(v):
                a = decays(g, chunks)
                w, u, inverse = (None, v, None) if beta is None else solve_forward(k, v, beta, a, chunks)
                h, new = states_forward(k, u, w, a, chunks)
                out = outputs_forward(q, k, new, h, a, chunks)
        ctx.save_for_backward(q, k, v, a, beta, inverse)
        ctx.chunks = chunks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, a, beta, inverse = ctx.saved_tensors
        (do,) = (x.contiguous() for x in gradients)
        if not len(v):
            return (*(None if x is None else torch.zeros_like(x) for x in (q, k, v, a, beta)), None)
        with torch.cuda.device_of(v):
            return (*_backward(q, k, v, a, beta, do, inverse=inverse, chunks=ctx.chunks), None)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor | None, do: Tensor, *, inverse: Tensor | None,
    chunks: TokenChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v, g and beta."""
    w, u = (None, v) if beta is None or inverse is None else multiply_inverse(k, v, beta, a, inverse, chunks)
    h, new = states_forward(k, u, w, a, chunks)
    dh, du = states_backward(q, k, w, a, do, local_backward(q, k, a, do, chunks), chunks=chunks)
    dq, dk, dw, da = products_backward(q, k, new, h, a, do=do, dh=dh, du=du, chunks=chunks, delta=w is not None)
    del w, u, h, new, dh
    key_heads = k.shape[1]
    dq, dk = _sum_heads(dq, key_heads).to(q.dtype), _sum_heads(dk, key_heads)
    if beta is None or inverse is None or dw is None:
        return dq, dk.to(k.dtype), du, decays_backward(da, chunks), None
    # The parts that come through w and u.
    dk_solve, dv, dbeta, da_solve = solve_backward(k, v, beta, a, inverse, dw=dw, du=du, chunks=chunks)
    dk = (dk + _sum_heads(dk_solve, key_heads)).to(k.dtype)
    return dq, dk, dv, decays_backward(da + da_solve, chunks), dbeta


def _sum_heads(x: Tensor, key_heads: int) -> Tensor:
    """Return the sum over the heads that share a key head: float32 [N, Hk, K] of x [N, H, K]."""
    # 4 heads, 2 key heads: heads 0 1 | 2 3
    return x.view(len(x), key_heads, -1, x.shape[2]).sum(2, dtype=torch.float32)
