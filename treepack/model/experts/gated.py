"""Forward and backward of gated experts, with or without adapters, by the kernels of `kernels`.

    out[t] = sum over the pairs s of token t of (weight[s] * silu(gate[s]) * up[s]) @ W2[e].T
             [gate, up][s] = x[token of s] @ W1[e].T

The router's weight is multiplied before the down product, so that neither the outputs of the pairs nor the spread
gradients [S, D] are kept: with c[s] = grad[token of s] @ W2[e],

    d weight[s] = c[s] . silu(gate[s]) up[s]      d W2[e] = sum grad[token of s] outer weight[s] silu(gate[s]) up[s]

Only gate and up [S, 2I] are saved, besides the inputs. An adapter replaces W[e] by W[e] + B[e] A[e], which no kernel
adds up: with low[s] = x[s] @ A[e].T and back[s] = grad[s] @ B[e],

    product              x[s] @ W[e].T + low[s] @ B[e].T        d B[e] = sum grad[s] outer low[s]
    gradient of x[s]     grad[s] @ W[e] + back[s] @ A[e]        d A[e] = sum back[s] outer x[s]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treepack.model.experts import kernels
from treepack.model.experts.kernels import ExpertTiles, LowRankTerm
from treepack.model.experts.lora import ExpertAdapter
from treepack.model.experts.routing import ExpertRouting, with_none
from treepack.model.experts.weights import cast_weight


def gated_experts(
    hidden: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: ExpertRouting,
    dtype: torch.dtype,
    adapters: tuple[ExpertAdapter | None, ExpertAdapter | None] = (None, None),
) -> Tensor:
    """Return the weighted sum of the experts of each token, [T, D] in the dtype of `hidden`.

    Args:
        hidden: [T, D].
        top_k_weights: [T, k].
        gate_up: W1 [E, 2I, D], the gates before the ups; D and I multiples of 64.
        down: W2 [E, D, I].
        routing: of these tokens.
        dtype: dtype of the products.
        adapters: of gate_up and of down, or None.
    """
    apply: Any = _GatedExperts.apply
    low_rank = [part for adapter in adapters for part in adapter or (None, None)]
    out: Tensor = apply(hidden, top_k_weights, gate_up, down, routing, dtype, *low_rank)
    return out


class _GatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        top_k_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        routing: ExpertRouting,
        dtype: torch.dtype,
        *low_rank: Tensor | None,
    ) -> Tensor:
        tiles = ExpertTiles.of(routing)
        a1, b1, a2, b2 = low_rank
        x = hidden.to(dtype).contiguous()
        weights = top_k_weights.flatten().float()[routing.order]
        low1 = _narrow(x, a1, routing, tiles, gather=True)
        both, act = kernels.gate_up(x, cast_weight(gate_up, dtype), weights, routing, tiles, _term(low1, b1))
        term = _term(_narrow(act, a2, routing, tiles), b2)
        pairs = kernels.product(
            act, cast_weight(down, dtype), routing, tiles, gather=False, transposed=False, term=term
        )
        # The weights are saved, not their casts: a sharded weight is freed after the layer and gathered for backward.
        ctx.save_for_backward(x, weights, gate_up, down, both, low1, *low_rank, *tiles, *routing)
        ctx.dtypes = hidden.dtype, top_k_weights.dtype
        return kernels.combine(pairs, routing, hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, both, low1, a1, b1, a2, b2, expert, first, *rest = ctx.saved_tensors
        routing, tiles = ExpertRouting(*rest), ExpertTiles(expert, first)
        hidden_dtype, weights_dtype = ctx.dtypes
        need_hidden, _, need_gate_up, need_down, *_ = ctx.needs_input_grad
        grad = grad.to(x.dtype).contiguous()
        back2 = _narrow(grad, b2, routing, tiles, gather=True, transposed=True)
        c = kernels.product(
            grad, cast_weight(down, x.dtype), routing, tiles, gather=True, transposed=True, term=_term(back2, a2)
        )
        both_grad, act, weights_grad = kernels.gate_back(c, weights, both)
        del c
        # In the dtype of the weights: the gradients of float32 weights are not rounded to the dtype of the products.
        down_grad = gate_up_grad = hidden_grad = a1_grad = b1_grad = a2_grad = b2_grad = None
        if need_down or a2 is not None:
            spread = grad.index_select(0, routing.token)
            down_grad = kernels.outer(spread, act, routing, down.dtype) if need_down else None
            b2_grad = _outer(spread, _narrow(act, a2, routing, tiles), routing, b2)
            a2_grad = _outer(back2, act, routing, a2)
            del spread
        del act
        back1 = _narrow(both_grad, b1, routing, tiles, transposed=True)
        if need_gate_up or a1 is not None:
            spread = x.index_select(0, routing.token)
            gate_up_grad = kernels.outer(both_grad, spread, routing, gate_up.dtype) if need_gate_up else None
            b1_grad, a1_grad = _outer(both_grad, low1, routing, b1), _outer(back1, spread, routing, a1)
            del spread
        if need_hidden:
            w = cast_weight(gate_up, x.dtype)
            term = _term(back1, a1)
            pairs = kernels.product(both_grad, w, routing, tiles, gather=False, transposed=True, term=term)
            hidden_grad = kernels.combine(pairs, routing, hidden_dtype)
        weights_grad = with_none(weights_grad, routing.place)[routing.place].to(weights_dtype)
        return hidden_grad, weights_grad, gate_up_grad, down_grad, None, None, a1_grad, b1_grad, a2_grad, b2_grad


def _narrow(
    x: Tensor,
    w: Tensor | None,
    routing: ExpertRouting,
    tiles: ExpertTiles,
    *,
    gather: bool = False,
    transposed: bool = False,
) -> Tensor | None:
    """Return the rows of the pairs times A, or with `transposed` times B: [S, R]; None without an adapter."""
    if w is None:
        return None
    return kernels.product(x, cast_weight(w, x.dtype), routing, tiles, gather=gather, transposed=transposed)


def _term(low: Tensor | None, w: Tensor | None) -> LowRankTerm | None:
    return None if low is None or w is None else LowRankTerm(low, cast_weight(w, low.dtype))


def _outer(a: Tensor | None, b: Tensor | None, routing: ExpertRouting, w: Tensor | None) -> Tensor | None:
    return None if a is None or b is None or w is None else kernels.outer(a, b, routing, w.dtype)
