"""Forward and backward of gated experts by the kernels of `kernels`.

    out[t] = sum over the pairs s of token t of (weight[s] * silu(gate[s]) * up[s]) @ W2[e].T
             [gate, up][s] = x[token of s] @ W1[e].T

The router's weight is multiplied before the down product, so that neither the outputs of the pairs nor the spread
gradients [S, D] are kept: with c[s] = grad[token of s] @ W2[e],

    d weight[s] = c[s] . silu(gate[s]) up[s]      d W2[e] = sum grad[token of s] outer weight[s] silu(gate[s]) up[s]

Only gate and up [S, 2I] are saved, besides the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treepack.model.experts import kernels
from treepack.model.experts.kernels import ExpertTiles
from treepack.model.experts.routing import ExpertRouting, with_none
from treepack.model.experts.weights import cast_weight


def gated_experts(
    hidden: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor, routing: ExpertRouting, dtype: torch.dtype
) -> Tensor:
    """Return the weighted sum of the experts of each token, [T, D] in the dtype of `hidden`.

    Args:
        hidden: [T, D].
        top_k_weights: [T, k].
        gate_up: W1 [E, 2I, D], the gates before the ups; D and I multiples of 64.
        down: W2 [E, D, I].
        routing: of these tokens.
        dtype: dtype of the products.
    """
    apply: Any = _GatedExperts.apply
    out: Tensor = apply(hidden, top_k_weights, gate_up, down, routing, dtype)
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
    ) -> Tensor:
        tiles = ExpertTiles.of(routing)
        x = hidden.to(dtype).contiguous()
        weights = top_k_weights.flatten().float()[routing.order]
        both, act = kernels.gate_up(x, cast_weight(gate_up, dtype), weights, routing, tiles)
        pairs = kernels.product(act, cast_weight(down, dtype), routing, tiles, gather=False, transposed=False)
        # The weights are saved, not their casts: a sharded weight is freed after the layer and gathered for backward.
        ctx.save_for_backward(x, weights, gate_up, down, both, *tiles, *routing)
        ctx.dtypes = hidden.dtype, top_k_weights.dtype
        return kernels.combine(pairs, routing, hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, both, expert, first, *rest = ctx.saved_tensors
        routing, tiles = ExpertRouting(*rest), ExpertTiles(expert, first)
        hidden_dtype, weights_dtype = ctx.dtypes
        need_hidden, _, need_gate_up, need_down, *_ = ctx.needs_input_grad
        grad = grad.to(x.dtype).contiguous()
        c = kernels.product(grad, cast_weight(down, x.dtype), routing, tiles, gather=True, transposed=True)
        both_grad, act, weights_grad = kernels.gate_back(c, weights, both)
        del c
        # In the dtype of the weights: the gradients of float32 weights are not rounded to the dtype of the products.
        down_grad = gate_up_grad = hidden_grad = None
        if need_down:
            down_grad = kernels.outer(grad.index_select(0, routing.token), act, routing, down.dtype)
        del act
        if need_gate_up:
            gate_up_grad = kernels.outer(both_grad, x.index_select(0, routing.token), routing, gate_up.dtype)
        if need_hidden:
            pairs = kernels.product(
                both_grad, cast_weight(gate_up, x.dtype), routing, tiles, gather=False, transposed=True
            )
            hidden_grad = kernels.combine(pairs, routing, hidden_dtype)
        weights_grad = with_none(weights_grad, routing.place)[routing.place]
        return hidden_grad, weights_grad.to(weights_dtype), gate_up_grad, down_grad, None, None
