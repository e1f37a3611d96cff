"""The linear layers and stacked weights of experts that get an adapter.

causal, "auto" | "all-linear" | "q_proj,down_proj" --find_targets--> names for PEFT's target_modules, target_parameters
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from treepack.errors import TreepackError
from treepack.model.experts.lora import stacked_names
from treepack.model.layers import find_layers
from treepack.model.text_half import is_text_half

# Linear layers that choose experts, which "auto" leaves as they are: their result is a choice, no feature of a token.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Types whose out_proj PEFT refuses, because a fused kernel of mamba-ssm reads its weights past the adapter.
_FUSED_OUT_PROJ = frozenset({"falcon_h1", "nemotron_h"})


class _AdapterTargets(NamedTuple):
    """Names of linear layers, a list or a regular expression, and of stacked weights of experts."""

    modules: list[str] | str
    parameters: list[str]


def find_targets(causal: Any, targets: str, source: str) -> _AdapterTargets:
    """Return the names for PEFT: the last parts of names if they mean the chosen layers only.

    Of a text half it is a regular expression of whole names, because the towers have layers with the same last parts.

    Raises:
        TreepackError: a name is that of no linear layer or stacked weight, or that of the output layer.
    """
    head, kinds = causal.get_output_embeddings(), nn.Linear | conv1d_class()
    linear = [name for name, module in causal.named_modules() if isinstance(module, kinds) and module is not head]
    stacked = stacked_names(causal)
    unusual = _unusual_names(causal.config.model_type)
    if targets == "all-linear":
        chosen = {name for name in linear if name.rpartition(".")[2] not in unusual} | set(stacked)
    elif targets == "auto":
        layers = set(find_layers(causal))
        inside = [f"{name}." for name, module in causal.named_modules() if module in layers]
        left_out = ROUTERS | unusual
        chosen = {n for n in linear if n.rpartition(".")[2] not in left_out and n.startswith(tuple(inside))}
        chosen |= set(stacked)
    else:
        names = [name.strip() for name in targets.split(",")]
        chosen = {match for name in names for match in _matches(causal, name, [*linear, *stacked], source)}
    if not chosen:
        raise TreepackError(f"{source}: has no linear layers for an adapter; train it without LoRA")
    return _AdapterTargets(_module_names(causal, chosen - set(stacked)), _parameter_names(stacked, chosen))


def _module_names(causal: Any, chosen: set[str]) -> list[str] | str:
    # q_proj of every layer -> "q_proj", which other programs that read adapters expect
    last = {name.rpartition(".")[2] for name in chosen}
    if is_text_half(causal) and chosen:
        decoder = next(name for name, module in causal.named_modules() if module is causal.get_decoder())
        pattern = rf"{re.escape(decoder)}\..*\.({'|'.join(sorted(last))})"
        exact = {name for name, _ in causal.named_modules() if re.fullmatch(pattern, name)} == chosen
        return pattern if exact else "|".join(re.escape(name) for name in sorted(chosen))
    alike = {name for name, _ in causal.named_modules() if name.rpartition(".")[2] in last}
    return sorted(last if alike == chosen else chosen)


def _parameter_names(stacked: list[str], chosen: set[str]) -> list[str]:
    # model.layers.0.mlp.experts.gate_up_proj of every layer -> "experts.gate_up_proj"
    found = chosen & set(stacked)
    short = {".".join(name.split(".")[-2:]) for name in found}
    alike = {name for name in stacked if ".".join(name.split(".")[-2:]) in short}
    return sorted(short if alike == found else found)


def _unusual_names(model_type: str) -> frozenset[str]:
    """Return last parts of names that PEFT refuses for models of a type, or takes for the names of experts."""
    if model_type in _FUSED_OUT_PROJ:
        return frozenset({"out_proj"})
    try:  # names of PEFT's own, which some versions lack, as they lack this conversion
        from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
    except ImportError:
        return frozenset()
    # Qwen3-Next: gate_proj of a shared expert -> the fused parameter gate_up_proj of all experts
    return frozenset(_MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(model_type), ()))


def _matches(causal: Any, target: str, linear: list[str], source: str) -> list[str]:
    matches = [name for name in linear if name == target or name.endswith(f".{target}")]
    if matches:
        return matches
    head = causal.get_output_embeddings()
    if any(module is head and name.endswith(target) for name, module in causal.named_modules()):
        raise TreepackError(f"{source}: {target} is the output layer, which must have no adapter; leave it out")
    names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    raise TreepackError(f"{source}: no linear layer or expert is named {target!r}; its names are {names}")


def conv1d_class() -> Any:
    """Return the class of GPT-2's linear layers, whose weights are transposed: [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D
