"""Multiplications of a model for each token, score pair and target, so floating-point operations, without the model.

    preset | config.json | folder --read_shape--> ModelShape
    ModelShape, FlopCount(tokens, pairs, targets) --operations--> floating-point operations of forward and backward

A product with a weight is 2 operations forward and 4 backward. Recomputation does not count, nor do norms, rotations,
softmax and embedding look-ups, which are not matrix products. The output layer runs over the trained targets only, as
in `token_loss.weighted_nll`. Only active experts count. A layer with a window or chunks of W tokens has at most W pairs
for each token; the first W tokens of a path have fewer, which makes this a few per cent too high. A recurrent layer has
no score pairs: its cost is a number for each token (`recurrent_cost`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.costs.limits import MAX_TOKEN_PAIRS
from treepack.costs.model_fields import (
    FEED_FORWARD,
    RECURRENT,
    SOFTMAX,
    Config,
    check_fields,
    list_layers,
    read_field,
)
from treepack.costs.presets import PRESETS
from treepack.costs.recurrent_cost import FAMILIES, count_scans, recurrent_part
from treepack.errors import TreepackError, quoted_value

_Count = Any  # an integer, or an array of them

# "meta-llama-3.1-8b-instruct" and "qwen3-8b-base" -> groups 2 "llama-3.1-8b" and "qwen3-8b"
_VARIANT = re.compile(r"^(meta-)?(.*?)(-(base|instruct|thinking|it|pt))?(-\d{4})?$")
# Fields of models with layers other than softmax attention, for models that do not list the kinds of their layers.
_OTHER_LAYERS = (
    "mamba_d_state ssm_state_size state_size hybrid_override_pattern "
    "linear_num_key_heads linear_attn_config attn_layer_period lru_width"
).split()
# Model types whose feed-forward layers have no gate, so two matrices instead of three.
_TWO_MATRICES = frozenset("gpt2 gpt_neox gptj opt phi starcoder2 nemotron falcon bloom nemotron_h".split())
# Model types whose attention has a gate as wide as its queries: q_proj is twice as wide.
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Multiplications of one forward pass.

    weights: for each token, in the linear layers except the output layer, active experts only.
    output: for each target, in the output layer.
    scores: for each score pair, of queries with keys and of probabilities with values, over all heads and all layers
        that see whole paths.
    windows: the layers with a window or chunks, as the tokens of the window and the multiplications for each pair.
    scans: for each token, with the states of recurrent layers.

    `layers` is the number of layers.
    """

    name: str
    weights: int
    output: int
    scores: int
    windows: tuple[tuple[int, int], ...] = ()
    scans: int = 0
    layers: int = 0

    @property
    def per_token(self) -> int:
        """Multiplications for each token: with weights and with states."""
        return self.weights + self.scans

    def attention(self, tokens: _Count, pairs: _Count) -> _Count:
        """Return the multiplications of attention for some tokens and score pairs: two numbers, or arrays of them."""
        # In float64, because 10^9 tokens times a million multiplications are too many for int64.
        inside = sum(each * np.minimum(pairs, size * tokens, dtype=np.float64) for size, each in self.windows)
        return self.scores * pairs + inside


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The work of a training pass: tokens, attention score pairs, and trained targets of the output layer."""

    tokens: int
    pairs: int
    targets: int

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(self.tokens + other.tokens, self.pairs + other.pairs, self.targets + other.targets)


def operations(shape: ModelShape, work: FlopCount) -> float:
    """Return the floating-point operations of forward and backward over `work`."""
    # 6 = 2 + 4: a product and its addition forward, and the same again for the gradient of each factor.
    attention = shape.attention(work.tokens, work.pairs)
    return 6.0 * float(shape.per_token * work.tokens + shape.output * work.targets + attention)


def pairs_of_token(shape: ModelShape) -> int:
    """Return the score pairs that take as many operations as one token, for `PackOptions.token_pairs`.

    The output layer is left out, because it runs over trained tokens only. A layer with a window counts as full.
    """
    tokens = shape.per_token + sum(size * each for size, each in shape.windows)
    # If every layer has a window, nothing depends on pairs, so a token costs as much as the maximum.
    return min(MAX_TOKEN_PAIRS, round(tokens / shape.scores)) if shape.scores else MAX_TOKEN_PAIRS


def read_shape(model: str) -> ModelShape:
    """Return the shape of a preset, a Hub name that ends in one (Qwen/Qwen3-8B-Base), a config.json or its folder.

    Raises:
        TreepackError: the model does not exist, a size is missing, or the cost of a layer is not known.
    """
    config, name = read_model_fields(model)
    return shape_of(config, name=name)


def read_model_fields(model: str) -> tuple[Config, str]:
    """Return the fields of a preset or of a config.json, see `read_shape`, and the name of the model.

    Raises:
        TreepackError: the model does not exist, or its config.json is not a JSON object.
    """
    match = _VARIANT.match(model.rpartition("/")[2].lower())
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if match and match[2] in PRESETS:
            return PRESETS[match[2]], match[2]
        raise TreepackError(f"{model}: no such config.json; give its path or one of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TreepackError(f"{path}: is not JSON ({error}); expected the config.json of a language model") from error
    if not isinstance(config, dict):
        raise TreepackError(f"{path}: is not a JSON object; expected the config.json of a language model")
    return config, model


def shape_of(config: Config, *, name: str) -> ModelShape:
    """Return the shape that the fields of a config.json give; `name` is for errors and reports.

    Raises:
        TreepackError: a field is missing or not a positive integer, or the cost of a layer is not known.
    """
    config = language_model(config)
    check_fields(config, name)
    _check_decoder(config, name)
    kinds = list_layers(config, name)
    _check_layers(config, kinds, name)
    hidden, heads = (read_field(config, key, name) for key in ("hidden_size", "num_attention_heads"))
    attention, scores = _attention(config, hidden, heads, name)
    num_recurrent = sum(kind in RECURRENT for kind in kinds)
    recurrent = recurrent_part(config, name).weights if num_recurrent else 0
    num_attention = sum(kind in SOFTMAX or kind == "hybrid" for kind in kinds)
    windows = _windows(config, kinds, name)
    return ModelShape(
        name=name,
        weights=num_attention * attention + num_recurrent * recurrent + feed_forward(config, kinds, name),
        output=hidden * read_field(config, "vocab_size", name),
        scores=(num_attention - sum(windows.values())) * scores,
        windows=tuple((size, count * scores) for size, count in windows.items()),
        scans=count_scans(config, name),
        layers=len(kinds),
    )


def language_model(config: Config) -> Config:
    """Return the fields of the language model: a model with vision has it in text_config."""
    return inner if isinstance(inner := config.get("text_config"), dict) and inner else config


def _windows(config: Config, kinds: list[str], name: str) -> dict[int, int]:
    """Return the number of layers for each size of window or chunk."""
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    windows: dict[int, int] = {}
    for kind in kinds:
        if kind in sizes and config.get(sizes[kind]) is not None:
            size = read_field(config, sizes[kind], name)
            windows[size] = windows.get(size, 0) + 1
    return windows


_COUNTED = f"a forecast counts softmax attention and the recurrent layers of {', '.join(FAMILIES)}"


def _check_decoder(config: Config, name: str) -> None:
    """Raise a TreepackError unless the model is a decoder whose layers have known costs, judged by its fields."""
    heads = config.get("architectures") or []
    if config.get("is_encoder_decoder") or any(str(head).endswith(("ForMaskedLM", "ForPreTraining")) for head in heads):
        raise TreepackError(f"{name}: has an encoder; a forecast needs a decoder, as treepack trains them")
    listed = config.get("layer_types") or config.get("layers_block_type")
    known = listed or config.get("model_type") in FAMILIES
    other = [key for key in _OTHER_LAYERS if not known and config.get(key) is not None]
    if 0 in (config.get("attn_type_list") or []):  # MiniMax: linear attention
        other.append("attn_type_list")
    if other:
        raise TreepackError(f"{name}: has {other[0]}; {_COUNTED}")


def _check_layers(config: Config, kinds: list[str], name: str) -> None:
    """Raise a TreepackError if the cost of a kind of layer is not known."""
    model_type = config.get("model_type")
    known = {*SOFTMAX, *FEED_FORWARD, *(RECURRENT if model_type in FAMILIES else ())}
    for layer, kind in enumerate(kinds):
        if kind not in known:
            of_type = f" of type {quoted_value(model_type)}" if model_type else ""
            raise TreepackError(f"{name}: layer {layer} is {quoted_value(kind)}{of_type}; {_COUNTED}")


def _attention(config: Config, hidden: int, heads: int, name: str) -> tuple[int, int]:
    """Return the weights of the projections of one layer, and the multiplications for each of its score pairs."""
    gate = hidden * heads if _has_head_gates(config) else 0
    if config.get("kv_lora_rank") is not None:  # latent attention, as in DeepSeek-V3
        rotated, plain = (read_field(config, key, name) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
        value, latent = read_field(config, "v_head_dim", name), read_field(config, "kv_lora_rank", name)
        rank = config.get("q_lora_rank")
        query = heads * (rotated + plain)
        # Queries through a low rank: hidden -> rank -> query. Keys and values: hidden -> latent -> heads.
        queries = hidden * query if rank is None else (hidden + query) * rank
        keys = hidden * (latent + rotated) + latent * heads * (plain + value)
        return queries + keys + heads * value * hidden + gate, query + heads * value
    size = read_field(config, "head_dim", name, hidden // heads)
    groups = read_field(config, "num_key_value_heads", name, heads)
    gates = heads if str(config.get("model_type")).startswith(_GATED_ATTENTION) else 0
    # q, gate and o: hidden x heads * size each; k and v: hidden x groups * size each. q k and p v: size for each head.
    return hidden * size * (2 * heads + gates + 2 * groups) + gate, 2 * heads * size


def _has_head_gates(config: Config) -> bool:
    """Return True if a projection computes one gate for each head of the attention."""
    model_type = config.get("model_type")
    return model_type == "bailing_hybrid" or (model_type == "lfm3" and config.get("use_attention_gate", True))


def feed_forward(config: Config, kinds: list[str], name: str) -> int:
    """Return the weights that a token uses in the feed-forward networks of all layers."""
    sparse = [is_sparse(config, layer) for layer in range(len(kinds))]
    if config.get("model_type") == "nemotron_h" or set(FEED_FORWARD).intersection(kinds):
        # Layers have one part each, so a feed-forward network is a separate layer.
        sparse = [kind == "moe" for kind in kinds if kind in FEED_FORWARD]
    experts = sum(sparse)
    total = experts * _experts(config, name) if experts else 0
    return total + (len(sparse) - experts) * _dense(config, name) if experts < len(sparse) else total


def _dense(config: Config, name: str) -> int:
    """Return the weights of a feed-forward network without experts."""
    hidden = read_field(config, "hidden_size", name)
    if config.get("model_type") == "granitemoehybrid":
        return 3 * hidden * read_field(config, "shared_intermediate_size", name)
    size = read_field(config, "intermediate_size", name, 4 * hidden)
    if config.get("model_type") == "lfm2":
        size = config.get("block_ff_dim") or size
        if config.get("block_auto_adjust_ff_dim", True):
            # 12288 -> 2/3 of it, 8192, times a factor, rounded up to a multiple of 256
            factor, multiple = config.get("block_ffn_dim_multiplier"), config.get("block_multiple_of", 256)
            size = int((1.0 if factor is None else factor) * int(2 * size / 3))
            size = -(-size // multiple) * multiple
    return _matrices(config) * hidden * size


def _matrices(config: Config) -> int:
    return 2 if config.get("model_type") in _TWO_MATRICES else 3


def num_experts(config: Config) -> int:
    """Return the routed experts of a layer, 0 for a dense model."""
    named = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next((int(value) for value in named if value), 0)


def is_sparse(config: Config, layer: int) -> bool:
    """Return True if a feed-forward layer consists of experts."""
    if not num_experts(config) or layer in (config.get("mlp_only_layers") or ()):
        return False
    if config.get("mlp_layer_types"):
        return bool(config["mlp_layer_types"][layer] == "sparse")
    if layer < (config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _experts(config: Config, name: str) -> int:
    """Return the weights that a token uses in a layer of experts: its chosen experts, shared ones and the router."""
    hidden = read_field(config, "hidden_size", name)
    size = config.get("moe_intermediate_size") or read_field(config, "intermediate_size", name)
    chosen = read_field(config, "num_experts_per_tok", name, config.get("num_experts_per_token"))
    # Nemotron 3 projects to a smaller size before its routed experts, and back after them.
    latent = config.get("moe_latent_size") or 0
    routed = _matrices(config) * (latent or hidden) * size * chosen + 2 * hidden * latent
    shared = _matrices(config) * hidden * _shared_size(config, size)
    # The shared expert of Qwen has a gate of one number.
    is_qwen = str(config.get("model_type")).startswith("qwen")
    gate = hidden if config.get("shared_expert_intermediate_size") and is_qwen else 0
    return routed + shared + gate + hidden * num_experts(config)


def _shared_size(config: Config, size: int) -> int:
    """Return the intermediate size of the experts that every token uses, together."""
    names = ["moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"]
    if str(config.get("model_type")).startswith("granitemoe"):
        names.append("shared_intermediate_size")
    own = next((int(config[key]) for key in names if config.get(key)), 0)
    return own or size * int(config.get("n_shared_experts") or config.get("num_shared_experts") or 0)
