"""Adapters of experts: low-rank products beside the products of the stacked weights.

    y[s] = W[e] x[s] + scale * B[e] (A[e] x[s])        e is the expert of the pair s

PEFT keeps the adapter of a stacked weight (`target_parameters`) as two linear layers, and adds scale * B A to the whole
stack whenever the layer runs. Here the stack stays as it is, and the names and shapes in memory and on disk are PEFT's:

    lora_A.weight [E r, in]     A[e] is rows e r to (e + 1) r
    lora_B.weight [out, r E]    B[e] is columns e, e + E, e + 2 E, ...

With experts of another implementation (float64 runs "eager") PEFT's own sum is used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from treepack.errors import TreepackError
from treepack.model.experts.products import grouped_linear

# Attribute of an experts module: PEFT's wrapper of each of its parameters that has an adapter.
_WRAPPERS = "_treepack_wrappers"
_OURS = "treepack"  # interface.NAME; that file imports this one
_ALIGNMENT = 8  # ranks that torch's grouped product can read in 16 bits


def takes_adapters(module: nn.Module) -> bool:
    """Return True for experts that run in an implementation of transformers' interface, such as this one."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "num_experts")


def runs_ours(experts: Any) -> bool:
    """Return True for experts of a model whose implementation of experts is treepack's."""
    return takes_adapters(experts) and experts.config._experts_implementation == _OURS


def stacked_names(causal: nn.Module) -> list[str]:
    """Return the names of the stacked weights [E, N, K] of experts that may get an adapter."""
    return [
        f"{name}.{own}"
        for name, module in causal.named_modules()
        if takes_adapters(module)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def follow_adapters(model: nn.Module) -> None:
    """Let `compute_experts` compute the adapters of experts in a PeftModel, in place of PEFT.

    Raises:
        TreepackError: this version of PEFT keeps A and B of experts in another order.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for name, wrapper in model.named_modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        experts = wrapper.get_base_layer()
        if not takes_adapters(experts):
            raise TreepackError(f"{name}: its experts run in code of their own; train an adapter without them")
        if not hasattr(wrapper, "_did_swap_in_out_features"):
            raise TreepackError("adapters of experts need a later version of PEFT; pip install -U peft")
        experts.__dict__.setdefault(_WRAPPERS, {})[wrapper.parameter_name] = wrapper
        wrapper.forward = _forward(wrapper, experts)


def _forward(wrapper: Any, experts: Any) -> Any:
    plain = wrapper.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        return (wrapper.base_layer if runs_ours(experts) else plain)(*arguments, **options)

    return forward


def has_adapter(experts: Any) -> bool:
    """Return True if the products of experts have an adapter that is in use."""
    return any(_active(wrapper) for wrapper in getattr(experts, _WRAPPERS, {}).values())


def _active(wrapper: Any) -> list[str]:
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def adapter_part(experts: Any, name: str, x: Tensor, ends: Tensor, first: int = 0) -> Tensor | None:
    """Return scale * B[e] (A[e] x[s]) of the weight `name`, [S, out]; None without an adapter.

    Args:
        experts: the module.
        name: its parameter.
        x: [S, in] in the dtype of the products.
        ends: int32, one past the last row of each expert, from the expert `first` on.
        first: the first expert that has rows here.
    """
    wrapper: Any = getattr(experts, _WRAPPERS, {}).get(name)
    total: Tensor | None = None
    if wrapper is None:
        return total
    for adapter in _active(wrapper):
        a, b, num = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, wrapper.num_experts
        # [E r, in] -> [E, r, in], and [out, r E] -> [E, out, r]
        a = a.view(num, -1, a.shape[1])[first : first + len(ends)]
        b = b.view(len(b), -1, num).permute(2, 0, 1)[first : first + len(ends)].contiguous()
        if x.is_cuda and (rest := -a.shape[1] % _ALIGNMENT):
            a, b = pad(a, (0, 0, 0, rest)), pad(b, (0, rest))
        low = grouped_linear(x, a, ends, transposed=False)
        part = grouped_linear(low, b, ends, transposed=False) * wrapper.scaling[adapter]
        total = part if total is None else total + part
    return total
