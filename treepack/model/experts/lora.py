"""Adapters of experts: low-rank products beside the products of the stacked weights.

    y[s] = W[e] x[s] + scale * B[e] (A[e] x[s])        e is the expert of the pair s

PEFT keeps the adapter of a stacked weight (`target_parameters`) as two linear layers, and adds scale * B A to the whole
stack whenever the layer runs. Here the stack stays as it is, and the names and shapes in memory and on disk are PEFT's:

    lora_A.weight [E r, in]     A[e] is rows e r to (e + 1) r
    lora_B.weight [out, r E]    B[e] is columns e, e + E, e + 2 E, ...

    wrapper of PEFT --adapter_of--> ExpertAdapter, for the kernels of `gated`, or for `adapter_part` in torch

With experts of another implementation (float64 runs "eager") PEFT's own sum is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from treepack.errors import TreepackError
from treepack.model.experts.products import grouped_linear

# Attribute of an experts module: PEFT's wrapper of each of its parameters that has an adapter.
_WRAPPERS = "_treepack_wrappers"
_OURS = "treepack"  # interface.NAME; that file imports this one
_ALIGNMENT = 16  # ranks that the kernels can multiply; torch's grouped product can read multiples of 8


def _takes_adapters(module: nn.Module) -> bool:
    """Return True for experts that run in an implementation of transformers' interface, such as this one."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "num_experts")


def runs_ours(experts: Any) -> bool:
    """Return True for experts of a model whose implementation of experts is treepack's."""
    return _takes_adapters(experts) and experts.config._experts_implementation == _OURS


def stacked_names(causal: nn.Module) -> list[str]:
    """Return the names of the stacked weights [E, N, K] of experts that may get an adapter."""
    return [
        f"{name}.{own}"
        for name, module in causal.named_modules()
        if _takes_adapters(module)
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
        if not _takes_adapters(experts):
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


class ExpertAdapter(NamedTuple):
    """Low-rank parts of all experts of a weight, which become W[e] + B[e] A[e]; the scale is in A.

    a  [E, R, in], R a multiple of 16: rows after the rank are 0
    b  [E, out, R]
    """

    a: Tensor
    b: Tensor


def adapter_of(experts: Any, name: str, *, first: int = 0, count: int | None = None) -> ExpertAdapter | None:
    """Return the adapters in use of the weight `name`, one after another, or None.

    Args:
        experts: the module.
        name: its parameter.
        first: the first expert of this rank.
        count: experts of this rank; None for all from `first` on.
    """
    wrapper: Any = getattr(experts, _WRAPPERS, {}).get(name)
    if wrapper is None or wrapper.disable_adapters or wrapper.merged:
        return None
    num, parts = wrapper.num_experts, list[tuple[Tensor, Tensor]]()
    own = slice(first, None if count is None else first + count)
    for adapter in wrapper.active_adapters:
        if adapter in wrapper.lora_A:
            a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
            # [E r, in] -> [E, r, in], and [out, r E] -> [E, out, r]
            a = a.view(num, -1, a.shape[1])[own] * wrapper.scaling[adapter]
            parts.append((a, b.view(len(b), -1, num).permute(2, 0, 1)[own]))
    if not parts:
        return None
    a, b = torch.cat([a for a, _ in parts], 1), torch.cat([b for _, b in parts], 2)
    rest = -a.shape[1] % _ALIGNMENT
    return ExpertAdapter(pad(a, (0, 0, 0, rest)), pad(b, (0, rest)).contiguous())


def adapter_part(adapter: ExpertAdapter, x: Tensor, ends: Tensor) -> Tensor:
    """Return B[e] (A[e] x[s]) in torch: [S, in], int32 ends [E] -> [S, out] in the dtype of `x`."""
    low = grouped_linear(x, adapter.a, ends, transposed=False)
    return grouped_linear(low, adapter.b, ends, transposed=False)
