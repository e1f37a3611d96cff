"""Fields of a config.json: sizes by name, and the kind of each layer.

    config.json --read_field--> a positive integer
    config.json --list_layers--> ["linear_attention", "linear_attention", "linear_attention", "full_attention", ...]

Newer configurations list the kinds of their layers. Older ones have a pattern, an interval or the indices of the layers
with attention, each family in its own way; `list_layers` reads them as transformers does.
"""

from __future__ import annotations

from typing import Any

from treepack.errors import MODELS_HINT, TreepackError, quoted_value

Config = dict[str, Any]

# Kinds of layers. "hybrid" layers have attention and a recurrent part side by side. Layers of Nemotron-H have one part
# each, so some consist of a feed-forward network alone: "mlp" or "moe".
SOFTMAX = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
RECURRENT = ("linear_attention", "conv", "hybrid")
FEED_FORWARD = ("mlp", "moe")
_SELECTIVE_SCANS = ("mamba", "falcon_mamba", "jamba", "zamba")  # types of models with the layers of Mamba 1
# Names that older configurations use.
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# GPT-2 and its relatives use these names.
_OLD_NAMES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}

_LISTS: dict[str, type] = {
    **dict.fromkeys(("layer_types", "layers_block_type", "mlp_layer_types", "architectures"), str),
    **dict.fromkeys(("mlp_only_layers", "attn_layer_indices", "full_attn_idxs", "attn_type_list"), int),
}
_MAX_SIZE = 1 << 40  # of any number of a configuration, and of layers, which are listed one by one
_MAX_LAYERS = 1 << 16
# Sizes and numbers that a configuration may leave out or set to 0.
_OPTIONAL = (
    "num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts moe_intermediate_size "
    "moe_latent_size shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "first_k_dense_replace num_dense_layers decoder_sparse_step q_lora_rank mamba_d_ssm full_attention_interval "
    "layer_group_size max_window_layers block_ff_dim block_multiple_of"
).split()


def check_scans(source: str, model_type: object) -> None:
    """Refuse a model whose type has layers that cannot be computed on trees.

    Raises:
        TreepackError: naming what these layers compute.
    """
    if model_type in _SELECTIVE_SCANS:
        raise TreepackError(
            f"{source}: its layers compute a selective scan, which has no form on trees here; {MODELS_HINT}"
        )


def check_fields(config: Config, name: str) -> None:
    """Check the types of lists and of optional numbers; `read_field` checks the others.

    Raises:
        TreepackError: a field has another type, or a number is negative.
    """
    for key, of in _LISTS.items():
        value = config.get(key)
        if value is not None and not (isinstance(value, list) and all(type(each) is of for each in value)):
            raise TreepackError(
                f"{name}: has {key} {quoted_value(value)}; expected a list of {of.__name__} in config.json"
            )
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        raise TreepackError(f"{name}: has model_type {quoted_value(model_type)}; expected a text in config.json")
    for key in _OPTIONAL:
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= _MAX_SIZE):
            raise TreepackError(
                f"{name}: has {key} {quoted_value(value)}; expected an integer from 0 to {_MAX_SIZE} in config.json"
            )


def read_field(config: Config, key: str, name: str, default: int | None = None) -> int:
    """Return a size of a model.

    Raises:
        TreepackError: the field, or its default, is not a positive integer; `name` is the model in the message.
    """
    value = config.get(key)
    value = config.get(_OLD_NAMES.get(key, ""), default) if value is None else value
    if type(value) is not int or not 1 <= value <= _MAX_SIZE:
        actual = "no" if value is None else quoted_value(value)
        raise TreepackError(f"{name}: has {actual} {key}; expected the config.json of a language model")
    return value


def list_layers(config: Config, name: str) -> list[str]:
    """Return the kind of each layer.

    Raises:
        TreepackError: the number of layers is missing, or is not the number of kinds that are listed.
    """
    pattern = config.get("hybrid_override_pattern")
    listed = config.get("layer_types") or config.get("layers_block_type")
    if not listed and isinstance(pattern, str):
        listed = [_NEMOTRON_KINDS.get(each, each) for each in pattern]
    if listed and config.get("model_type") == "nemotron_h":
        return [_OLD_KINDS.get(kind, kind) for kind in listed]  # transformers ignores num_hidden_layers here
    layers = read_field(config, "num_hidden_layers", name)
    if layers > _MAX_LAYERS:
        raise TreepackError(f"{name}: has {layers} layers; expected at most {_MAX_LAYERS}")
    if not listed:
        return _unlisted_layers(config, layers)
    if len(listed) != layers:
        raise TreepackError(f"{name}: has kinds of {len(listed)} layers and {layers} layers; correct its config.json")
    return [_OLD_KINDS.get(kind, kind) for kind in listed]


def _unlisted_layers(config: Config, layers: int) -> list[str]:
    """Return the kind of each layer of a model that does not list them."""
    model_type = str(config.get("model_type"))
    if model_type == "falcon_h1":
        return ["hybrid"] * layers
    if model_type.startswith(("qwen3_next", "qwen3_5", "olmo_hybrid")):
        # interval 4: three recurrent layers, then one with attention
        interval = config.get("full_attention_interval") or 4
        return _mix("linear_attention", [layer for layer in range(layers) if (layer + 1) % interval == 0], layers)
    if model_type in ("bamba", "granitemoehybrid"):
        return _mix("linear_attention", config.get("attn_layer_indices") or [], layers)
    if model_type == "kimi_linear":
        # The numbers of layers begin with 1 here.
        numbers = (config.get("linear_attn_config") or {}).get("full_attn_layers") or []
        return _mix("linear_attention", [number - 1 for number in numbers], layers)
    if model_type == "bailing_hybrid":
        size = config.get("layer_group_size") or 6
        return _mix("linear_attention", [layer for layer in range(layers) if (layer + 1) % size == 0], layers)
    if model_type == "lfm2" and config.get("full_attn_idxs") is not None:
        return _mix("conv", config["full_attn_idxs"], layers)
    return _with_windows(config, layers)


def _mix(kind: str, attention: list[int], layers: int) -> list[str]:
    return ["full_attention" if layer in attention else kind for layer in range(layers)]


def _with_windows(config: Config, layers: int) -> list[str]:
    if not config.get("use_sliding_window", True):
        return ["full_attention"] * layers
    # Gemma: pattern 6 -> five layers with a window, then one without. Qwen 2: the first max_window_layers have none.
    pattern = config.get("sliding_window_pattern") or (2 if config.get("model_type") == "gemma2" else layers + 1)
    first = config.get("max_window_layers") or 0
    slides = [layer >= first and (layer + 1) % pattern != 0 for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in slides]
