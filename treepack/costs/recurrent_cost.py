"""Multiplications of recurrent layers and short convolutions for each token.

    config.json --recurrent_part--> _RecurrentPart    of one layer; the number does not depend on the length of the path
    config.json --count_scans--> multiplications of the scans of all layers

The scan of a layer has a state h [K, V] for each head. One token costs K V multiplications for each product of a vector
with the state, so its count for each head is

    delta rule    k h, k' u and q h    3 K V
    Mamba-2       k' v and q h         2 K V

The decay multiplies number by number, like a norm, and is not a matrix product. This is the recurrent form, the
smallest count. Kernels compute chunks of L tokens instead (`recurrent.twin`).
They have 3 K V for W h, q h and K' u, and in addition
2 L K for q k' and k k', L (K + V) / 2 for the triangular solve, and L V for P u: 1.7 times as many for L = 64 and
K = V = 128. These products depend on L, which is a choice of the kernels and not of the model, so they do not count,
just as recomputation does not. So the MFU of a run is lower than with a count of its chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from treepack.costs.model_fields import RECURRENT, Config, list_layers, read_field


class _RecurrentPart(NamedTuple):
    """The recurrent part of one layer.

    weights: multiplications for each token in its projections and the taps of its convolution.
    products: products of a vector with the state for each token and head, 0 without a state.
    heads, key_size, value_size: H, K and V of the state.
    """

    weights: int
    products: int = 0
    heads: int = 0
    key_size: int = 0
    value_size: int = 0

    @property
    def scan(self) -> int:
        """Multiplications with the state for each token."""
        return self.products * self.heads * self.key_size * self.value_size


def recurrent_part(config: Config, name: str) -> _RecurrentPart:
    """Return the cost of the recurrent part of a layer of a model whose type is one of `FAMILIES`.

    Raises:
        TreepackError: a size is missing or not a positive integer.
    """
    return FAMILIES[config["model_type"]](config, read_field(config, "hidden_size", name), name)


def count_scans(config: Config, name: str) -> int:
    """Return the multiplications of the scans of all layers for each token; 0 if the type is none of `FAMILIES`.

    Raises:
        TreepackError: a size is missing or not a positive integer.
    """
    if config.get("model_type") not in FAMILIES:
        return 0
    return recurrent_part(config, name).scan * sum(kind in RECURRENT for kind in list_layers(config, name))


def _delta_rule(config: Config, hidden: int, name: str) -> _RecurrentPart:
    heads, value_size = (read_field(config, f"linear_{key}", name) for key in ("num_value_heads", "value_head_dim"))
    key_heads, key_size = (read_field(config, f"linear_{key}", name) for key in ("num_key_heads", "key_head_dim"))
    taps = read_field(config, "linear_conv_kernel_dim", name)
    keys, values = key_heads * key_size, heads * value_size
    # In: q, k, v, the gate of the output, decay and rate of each head. Out: o.
    projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    return _RecurrentPart(projections + taps * (2 * keys + values), 3, heads, key_size, value_size)


def _kimi_delta(config: Config, hidden: int, name: str) -> _RecurrentPart:
    inner = config.get("linear_attn_config") or {}
    names = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
    names["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    heads, size, taps = (read_field(config, key, name, inner.get(old)) for key, old in names.items())
    width = heads * size
    # q, k, v and o; decay and gate of the output, each through a low rank of one head's size; the rate of each head.
    projections = 4 * hidden * width + 2 * (hidden + width) * size + hidden * heads
    return _RecurrentPart(projections + taps * 3 * width, 3, heads, size, size)


def _ling(config: Config, hidden: int, name: str) -> _RecurrentPart:
    # transformers writes the sizes as linear_*, and reads them from the fields on the right.
    names = {"linear_num_heads": "num_attention_heads", "linear_head_dim": "head_dim"}
    names["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    heads, size, taps = (read_field(config, key, name, config.get(old)) for key, old in names.items())
    width = heads * size
    # q, k, v, o, decay and gate of the output, all as wide; the rate of each head.
    projections = 6 * hidden * width + hidden * heads
    return _RecurrentPart(projections + taps * 3 * width, 3, heads, size, size)


def _nemotron(config: Config, hidden: int, name: str) -> _RecurrentPart:
    heads, size = (read_field(config, key, name) for key in ("mamba_num_heads", "mamba_head_dim"))
    groups, state, taps = (read_field(config, key, name) for key in ("n_groups", "ssm_state_size", "conv_kernel"))
    return _mamba(hidden, heads * size, heads, groups, taps, state=state)


def _mamba_of_expansion(config: Config, hidden: int, name: str) -> _RecurrentPart:
    heads, groups, state, taps = (
        read_field(config, f"mamba_{key}", name) for key in ("n_heads", "n_groups", "d_state", "d_conv")
    )
    inner = config.get("mamba_d_ssm") or hidden * read_field(config, "mamba_expand", name)
    return _mamba(hidden, inner, heads, groups, taps, state=state)


def _mamba(hidden: int, inner: int, heads: int, groups: int, taps: int, *, state: int) -> _RecurrentPart:
    # In: the gate of the output, x, B, C and the time step of each head. Out: y. `inner` is H V, and `state` is K.
    channels = inner + 2 * groups * state
    projections = hidden * (inner + channels + heads) + inner * hidden
    return _RecurrentPart(projections + taps * channels, 2, heads, state, inner // heads)


def _short_convolution(config: Config, hidden: int, name: str) -> _RecurrentPart:
    # In: two gates and x. Out: y. No state.
    return _RecurrentPart(4 * hidden * hidden + read_field(config, "conv_L_cache", name) * hidden)


# The types of models whose recurrent layers are counted, as in the field model_type.
FAMILIES: dict[str, Callable[[Config, int, str], _RecurrentPart]] = {
    **dict.fromkeys("qwen3_next qwen3_5_text qwen3_5_moe_text qwen3_5 qwen3_5_moe olmo_hybrid".split(), _delta_rule),
    "kimi_linear": _kimi_delta,
    "bailing_hybrid": _ling,
    "nemotron_h": _nemotron,
    **dict.fromkeys("granitemoehybrid bamba falcon_h1".split(), _mamba_of_expansion),
    **dict.fromkeys("lfm2 lfm2_moe lfm3".split(), _short_convolution),
}
