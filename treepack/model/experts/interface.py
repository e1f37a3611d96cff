"""The function that transformers calls for the experts of a layer, and its registration.

    from_config(..., experts_implementation=implementation_of(dtype))     registers the function

`compute_experts` has the signature of the forward of transformers' experts classes and reads their attributes, so it
serves every class with the decorator `use_experts_implementation`: with or without gate, bias or a norm after the
experts, and both layouts of the weights. Gated experts with SiLU run through the kernels of `gated` on a GPU, all
others through torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from treepack.errors import TreepackError
from treepack.model.experts.lora import ExpertAdapter, adapter_of, adapter_part
from treepack.model.experts.over_ranks import compute_over_ranks, expert_weight, share_of
from treepack.model.experts.products import grouped_linear
from treepack.model.experts.routing import ExpertRouting, combine_pairs, sort_pairs, sort_slots, spread_tokens

NAME = "treepack"
_KERNEL_SIZE = 64  # the kernels read rows in blocks of this many elements, without masks
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def implementation_of(dtype: torch.dtype) -> str:
    """Register `compute_experts` with transformers, and return the implementation for weights of `dtype`."""
    if dtype == torch.float64:
        return "eager"  # float64 verifies gradients, so it runs code of transformers instead of treepack
    register_experts()
    return NAME


def register_experts() -> None:
    """Register this implementation of experts with transformers, for models that another program loads.

    `from_pretrained(..., experts_implementation="treepack")` then uses it, and so does `load_model` without asking.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)


# Custom kernels and a sort: a compiled layer breaks its graph here, and its other parts stay compiled.
@_disable_dynamo
def compute_experts(experts: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts of each token.

    Args:
        experts: a module of transformers with stacked weights of E experts.
        hidden: [T, D].
        top_k_index: integers [T, k] in [0, E).
        top_k_weights: [T, k].

    Returns:
        [T, D] in the dtype of `hidden`. Products run in the dtype of autocast, or else of the weights.

    Raises:
        TreepackError: if the experts are spread over ranks by transformers.
    """
    module: Any = experts
    if getattr(module, "_is_expert_parallel", False):
        raise TreepackError(
            f"{type(experts).__name__}: its experts are spread over ranks by transformers; load the model without "
            "expert parallelism"
        )
    share = share_of(module)
    if share is None:
        return _compute_here(module, hidden, top_k_index, top_k_weights, None)
    dtype = _compute_dtype(hidden, module.down_proj)
    return compute_over_ranks(module, share, hidden, top_k_index, top_k_weights, _compute_here, dtype)


def _compute_here(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, num_pairs: int | None
) -> Tensor:
    """Return the weighted sum of the experts that this rank has; `num_pairs` slots have one, None for all."""
    down = expert_weight(module, "down_proj")
    dtype = _compute_dtype(hidden, down)
    routing = sort_pairs(top_k_index, len(down), num_pairs=num_pairs)
    if takes_kernels(module, hidden, dtype):
        from treepack.model.experts.gated import gated_experts  # imports triton

        gate_up = expert_weight(module, "gate_up_proj")
        adapters = _adapter(module, "gate_up_proj", len(down)), _adapter(module, "down_proj", len(down))
        return gated_experts(hidden, top_k_weights, gate_up, down, routing, dtype, adapters)
    pairs = _expert_outputs(module, spread_tokens(hidden.to(dtype), routing), routing)
    return combine_pairs(pairs * sort_slots(top_k_weights, routing)[:, None], routing, hidden.dtype)


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _expert_outputs(module: Any, x: Tensor, routing: ExpertRouting) -> Tensor:
    """Return the output [S, D] of each pair's expert for its row of `x` [S, D], without the router's weight."""
    # Versions of transformers before 5.17 lack some of these attributes, and have only gated experts.
    transposed, has_bias = getattr(module, "is_transposed", False), getattr(module, "has_bias", False)
    has_gate = getattr(module, "has_gate", True)
    dtype = x.dtype

    def linear(x: Tensor, name: str) -> Tensor:
        x = x.to(dtype)
        out = grouped_linear(x, expert_weight(module, name), routing.ends, transposed=transposed)
        adapter = _adapter(module, name, len(routing.ends))
        out = out if adapter is None else out + adapter_part(adapter, x, routing.ends)
        return out + _pair_bias(expert_weight(module, f"{name}_bias"), routing, dtype) if has_bias else out

    x = linear(x, "gate_up_proj" if has_gate else "up_proj")
    x = module._apply_gate(x) if has_gate else module.act_fn(x)
    x = linear(x, "down_proj")
    return module.post_expert_norm(x) if getattr(module, "has_post_expert_norm", False) else x


def _adapter(module: Any, name: str, count: int) -> ExpertAdapter | None:
    """Return the adapter of the experts that this rank has."""
    share = share_of(module)
    return adapter_of(module, name, first=0 if share is None else share.first, count=count)


def _pair_bias(bias: Tensor, routing: ExpertRouting, dtype: torch.dtype) -> Tensor:
    """Return the bias [S, N] of each pair's expert, in `dtype`, of biases [E, N]."""
    pairs = torch.arange(len(routing.order), device=bias.device, dtype=routing.ends.dtype)
    # ends [2, 3, 4], pairs 0 1 2 3 -> experts 0 0 1 2
    experts = torch.searchsorted(routing.ends, pairs, right=True)
    return bias.index_select(0, experts).to(dtype)


def takes_kernels(module: Any, hidden: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the kernels of `gated` can compute these experts, in products of `dtype`."""
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    if not (hidden.is_cuda and dtype in _KERNEL_DTYPES and torch.cuda.get_device_capability(hidden.device) >= (8, 0)):
        return False
    special = "is_transposed has_bias has_post_expert_norm".split()
    if any(getattr(module, name, False) for name in special) or not getattr(module, "has_gate", True):
        return False
    # A class with another gate replaces `_apply_gate`. If transformers has no default gate, no class takes the kernels.
    plain = getattr(type(module), "_apply_gate", None) is getattr(moe, "_default_apply_gate", moe)
    if not (plain and isinstance(module.act_fn, nn.SiLU | SiLUActivation) and getattr(module, "is_concatenated", True)):
        return False
    weights = module.gate_up_proj, module.down_proj
    sizes = {size for weight in weights for size in weight.shape[1:]}
    return all(size % _KERNEL_SIZE == 0 for size in sizes) and all(weight.is_contiguous() for weight in weights)
