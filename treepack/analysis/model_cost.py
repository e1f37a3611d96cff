"""Multiplications of a model for each token, score pair and target, so floating-point operations, without the model.

    preset | config.json | folder --read_shape--> ModelShape
    ModelShape, FlopCount(tokens, pairs, targets) --operations--> floating-point operations of forward and backward

A product with a weight is 2 operations forward and 4 backward. Recomputation does not count, nor do norms, rotations,
softmax and embedding look-ups, which are no matrix products. The output layer runs over the trained targets only, as in
`loss.weighted_nll`. Only the active experts count. A layer with a window or chunks of W tokens has at most W pairs for
each token; the first W tokens of a path have fewer, which makes this a few per cent too high.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError

Config = dict[str, Any]
Count = Any  # an integer, or an array of them

_QWEN3: Config = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "model_type": "qwen3"}
_QWEN2: Config = {"vocab_size": 152064, "model_type": "qwen2"}
_LLAMA3: Config = {"vocab_size": 128256, "num_key_value_heads": 8, "model_type": "llama"}


# The public config.json of each model has these fields.
def _sizes(layers: int, hidden: int, intermediate: int, heads: int) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


PRESETS: dict[str, Config] = {
    "qwen3-0.6b": {**_QWEN3, **_sizes(28, 1024, 3072, 16), "tie_word_embeddings": True},
    "qwen3-1.7b": {**_QWEN3, **_sizes(28, 2048, 6144, 16), "tie_word_embeddings": True},
    "qwen3-4b": {**_QWEN3, **_sizes(36, 2560, 9728, 32), "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, **_sizes(36, 4096, 12288, 32), "tie_word_embeddings": False},
    "qwen3-14b": {**_QWEN3, **_sizes(40, 5120, 17408, 40), "tie_word_embeddings": False},
    "qwen3-32b": {**_QWEN3, **_sizes(64, 5120, 25600, 64), "tie_word_embeddings": False},
    "qwen3-30b-a3b": {
        **_QWEN3,
        **_sizes(48, 2048, 6144, 32),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {**_QWEN2, **_sizes(28, 3584, 18944, 28), "num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen2.5-32b": {**_QWEN2, **_sizes(64, 5120, 27648, 40), "num_key_value_heads": 8, "tie_word_embeddings": False},
    "llama-3.1-8b": {**_LLAMA3, **_sizes(32, 4096, 14336, 32), "tie_word_embeddings": False},
    "llama-3.1-70b": {**_LLAMA3, **_sizes(80, 8192, 28672, 64), "tie_word_embeddings": False},
}

# "meta-llama-3.1-8b-instruct" and "qwen3-8b-base" -> groups 2 "llama-3.1-8b" and "qwen3-8b"
_VARIANT = re.compile(r"^(meta-)?(.*?)(-(base|instruct|thinking))?(-\d{4})?$")
_SOFTMAX = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention")
# Fields of models with layers other than softmax attention, for models that do not list their layers in `layer_types`.
_OTHER_LAYERS = (
    "mamba_d_state ssm_state_size state_size hybrid_override_pattern "
    "linear_num_key_heads linear_attn_config attn_layer_period"
).split()
# Model types whose feed-forward layers have no gate, so two matrices instead of three.
_TWO_MATRICES = frozenset("gpt2 gpt_neox gptj opt phi starcoder2 nemotron falcon bloom".split())


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Multiplications of one forward pass.

    weights: for each token, in the linear layers except the output layer, active experts only.
    output: for each target, in the output layer.
    scores: for each score pair, of queries with keys and of probabilities with values, over all heads and all layers
        that see whole paths.
    windows: the layers with a window or chunks, as the tokens of the window and the multiplications for each pair.
    """

    name: str
    weights: int
    output: int
    scores: int
    windows: tuple[tuple[int, int], ...] = ()

    def attention(self, tokens: Count, pairs: Count) -> Count:
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
    return 6.0 * float(shape.weights * work.tokens + shape.output * work.targets + attention)


def read_shape(model: str) -> ModelShape:
    """Return the shape of a preset, a Hub name that ends in one (Qwen/Qwen3-8B-Base), a config.json or its folder.

    Raises:
        TreepackError: there is no such model, a size is missing, or a layer is not softmax attention.
    """
    match = _VARIANT.match(model.rpartition("/")[2].lower())
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        if match and match[2] in PRESETS:
            return shape_of(PRESETS[match[2]], name=match[2])
        raise TreepackError(f"{model}: no such config.json; give its path or one of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TreepackError(f"{path}: is not JSON ({error}); expected the config.json of a language model") from error
    if not isinstance(config, dict):
        raise TreepackError(f"{path}: is not a JSON object; expected the config.json of a language model")
    return shape_of(config, name=model)


def shape_of(config: Config, *, name: str) -> ModelShape:
    """Return the shape that the fields of a config.json give; `name` is for errors and reports.

    Raises:
        TreepackError: a field is missing or not a positive integer, or a layer is not softmax attention.
    """
    # A model with vision has its language model in text_config.
    config = inner if isinstance(inner := config.get("text_config"), dict) and inner else config
    _check_decoder(config, name)
    layers, hidden, heads = (_field(config, key, name) for key in _MAIN)
    attention, scores = _attention(config, hidden, heads, name)
    experts = sum(_is_sparse(config, layer) for layer in range(layers))
    feed_forward = experts * _experts(config, hidden, name) if experts else 0
    if experts < layers:
        feed_forward += (layers - experts) * _dense(
            config, hidden, _field(config, "intermediate_size", name, 4 * hidden)
        )
    windows = _windows(config, layers, name)
    return ModelShape(
        name=name,
        weights=layers * attention + feed_forward,
        output=hidden * _field(config, "vocab_size", name),
        scores=(layers - sum(windows.values())) * scores,
        windows=tuple((size, count * scores) for size, count in windows.items()),
    )


def _windows(config: Config, layers: int, name: str) -> dict[int, int]:
    """Return the number of layers for each size of window or chunk."""
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    windows: dict[int, int] = {}
    for kind in config.get("layer_types") or _unlisted_kinds(config, layers):
        if kind in sizes and config.get(sizes[kind]) is not None:
            size = _field(config, sizes[kind], name)
            windows[size] = windows.get(size, 0) + 1
    return windows


def _unlisted_kinds(config: Config, layers: int) -> list[str]:
    """Return the kind of each layer of a model that does not list them, from older fields of its configuration."""
    if not config.get("use_sliding_window", True):
        return []
    # Gemma: pattern 6 -> five layers with a window, then one without. Qwen 2: the first max_window_layers have none.
    pattern = config.get("sliding_window_pattern") or (2 if config.get("model_type") == "gemma2" else layers + 1)
    first = config.get("max_window_layers") or 0
    slides = [layer >= first and (layer + 1) % pattern != 0 for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _check_decoder(config: Config, name: str) -> None:
    """Raise a TreepackError unless the model is a decoder of softmax attention."""
    heads = config.get("architectures") or []
    if config.get("is_encoder_decoder") or any(str(head).endswith(("ForMaskedLM", "ForPreTraining")) for head in heads):
        raise TreepackError(f"{name}: has an encoder; a forecast needs a decoder, as treepack trains them")
    layers = config.get("layer_types") or config.get("layers_block_type")
    for layer, kind in enumerate(layers or []):
        if kind not in _SOFTMAX:
            raise TreepackError(f"{name}: layer {layer} is {kind!r}; a forecast needs layers of softmax attention")
    other = [key for key in _OTHER_LAYERS if not layers and config.get(key) is not None]
    if 0 in (config.get("attn_type_list") or []):  # MiniMax: linear attention
        other.append("attn_type_list")
    if other:
        raise TreepackError(f"{name}: has {other[0]}; a forecast needs layers of softmax attention")


_MAIN = ("num_hidden_layers", "hidden_size", "num_attention_heads")
# GPT-2 and its relatives use these names.
_OLD_NAMES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}


def _field(config: Config, key: str, name: str, default: int | None = None) -> int:
    value = config.get(key)
    value = config.get(_OLD_NAMES.get(key, ""), default) if value is None else value
    if type(value) is not int or value < 1:
        actual = "no" if value is None else repr(value)
        raise TreepackError(f"{name}: has {actual} {key}; expected the config.json of a language model")
    return value


def _attention(config: Config, hidden: int, heads: int, name: str) -> tuple[int, int]:
    """Return the weights of the projections of one layer, and the multiplications for each of its score pairs."""
    if config.get("kv_lora_rank") is not None:  # latent attention, as in DeepSeek-V3
        rotated, plain = (_field(config, key, name) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
        value, latent = _field(config, "v_head_dim", name), _field(config, "kv_lora_rank", name)
        rank = config.get("q_lora_rank")
        query = heads * (rotated + plain)
        # Queries through a low rank: hidden -> rank -> query. Keys and values: hidden -> latent -> heads.
        queries = hidden * query if rank is None else (hidden + query) * rank
        keys = hidden * (latent + rotated) + latent * heads * (plain + value)
        return queries + keys + heads * value * hidden, query + heads * value
    size = _field(config, "head_dim", name, hidden // heads)
    groups = _field(config, "num_key_value_heads", name, heads)
    # q and o: hidden x heads * size each; k and v: hidden x groups * size each. q k and p v: size for each head.
    return hidden * size * (2 * heads + 2 * groups), 2 * heads * size


def _dense(config: Config, hidden: int, intermediate: int) -> int:
    matrices = 2 if config.get("model_type") in _TWO_MATRICES else 3
    return matrices * hidden * intermediate


def _num_experts(config: Config) -> int:
    named = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next((int(value) for value in named if value), 0)


def _is_sparse(config: Config, layer: int) -> bool:
    """Return whether a feed-forward layer consists of experts."""
    if not _num_experts(config) or layer in (config.get("mlp_only_layers") or ()):
        return False
    if layer < (config.get("first_k_dense_replace") or 0):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _experts(config: Config, hidden: int, name: str) -> int:
    """Return the weights that a token uses in a layer of experts: its chosen experts, shared ones and the router."""
    intermediate = _field(config, "intermediate_size", name)
    size = _field(config, "moe_intermediate_size", name, intermediate)
    chosen = _field(config, "num_experts_per_tok", name)
    shared = config.get("shared_expert_intermediate_size") or size * (config.get("n_shared_experts") or 0)
    return 3 * hidden * (chosen * size + int(shared)) + hidden * _num_experts(config)
