"""Count the weights that one token uses in a model: of stacked experts, only the chosen ones."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from treepack.model.layers import find_decoder

# Names of the number of experts that a token has, in configurations of transformers.
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")

# Attribute of a sharded parameter of 4 bits: the number of its weights.
ROUNDED = "_treepack_num_weights"

_STACKED = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def num_active_weights(causal: Any) -> float:
    """Return the weights of all layers and the embedding of a model of transformers, active experts only.

    Experts that are stacked in one parameter [E, ...] count k / E of their weights.
    """
    chosen = _num_chosen(causal.config.get_text_config())
    total = 0.0
    for module in find_decoder(causal).modules():
        experts = getattr(module, "num_experts", 0)
        for parameter in module.parameters(recurse=False):
            # [E, N, K]; the router's own weights are [E, D]
            stacked = chosen and parameter.ndim == 3 and len(parameter) == experts
            total += num_weights(parameter) * (chosen / experts if stacked else 1.0)
    return total


def experts_per_token(config: Any) -> int | None:
    """Return the experts that a token has in each layer of a model with this text config; None if they are not known.

    Layers may have other numbers: then they are not known either.
    """
    value = _value(config)
    return value if isinstance(value, int) and value else None


def stacked_experts(config: Any) -> int:
    """Return the experts of a layer of a model with this text config, 0 if it has none or they are not known."""
    return next((value for name in _STACKED if isinstance(value := getattr(config, name, None), int)), 0)


def _num_chosen(config: Any) -> int:
    value = _value(config)
    return int(value if isinstance(value, int) else max(value))  # Hunyuan may have a list with one for each layer


def _value(config: Any) -> Any:
    return next((value for name in _CHOSEN if (value := getattr(config, name, None))), 0)


def num_weights(parameter: Tensor) -> int:
    """Return the number of weights in a parameter, which may be rounded to 4 bits."""
    # bitsandbytes packs two weights into a byte and remembers the shape: [16, 16] is uint8 [128, 1]
    state = getattr(parameter, "quant_state", None)
    return int(getattr(parameter, ROUNDED, parameter.numel()) if state is None else math.prod(state.shape))
