"""A tiny random model of every type of causal language model that transformers knows.

    "granite" --tiny_family--> the type's own default configuration, with small sizes --> model in float64

The sizes shrink by their names, which most types share. `_OVERRIDES` has the rest. All other options keep their default
values, so a type that scales its logits or needs biases in its attention does so here too. `transformers_types` lists
the types of the installed version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from support.oracle_model import VOCABULARY

_SIZES: dict[str, int] = {
    **dict.fromkeys("hidden_size n_embd d_model dim embedding_size word_embed_proj_dim".split(), 32),
    **dict.fromkeys("intermediate_size ffn_dim n_inner d_ff dff dim_ff decoder_ffn_dim encoder_ffn_dim".split(), 48),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size".split(), 24),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads".split(), 4),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts".split(), 4),
    **dict.fromkeys("num_key_value_heads num_experts_per_tok num_experts_per_token".split(), 2),
    **dict.fromkeys("head_dim qk_nope_head_dim v_head_dim".split(), 8),
    **dict.fromkeys("q_lora_rank kv_lora_rank".split(), 16),
    **dict.fromkeys("max_position_embeddings n_positions max_target_positions max_source_positions".split(), 256),
    **dict.fromkeys("encoder_layers n_group num_expert_group topk_group num_hash_layers".split(), 1),
    **dict.fromkeys("linear_key_head_dim linear_value_head_dim linear_head_dim".split(), 8),
    **dict.fromkeys("mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_head mamba_head_dim".split(), 8),
    **dict.fromkeys("mamba_d_state ssm_state_size mamba_chunk_size".split(), 8),
    **dict.fromkeys("linear_num_value_heads linear_num_heads".split(), 4),
    **dict.fromkeys("linear_num_key_heads n_groups mamba_n_groups mamba_ngroups".split(), 2),
    **dict.fromkeys("shared_intermediate_size moe_shared_expert_intermediate_size".split(), 24),
    "mamba_d_ssm": 64,
    "vocab_size": VOCABULARY,
    "qk_rope_head_dim": 4,
    "num_nextn_predict_layers": 0,
}
# Before 5.11, transformers' own code of these types cannot be compared: it has no MiniCPM3, Nemotron takes no other
# attention, OPT makes masks (and is refused), and the tiny Phi-MoE and DeepSeek-V3 do not run in float64.
IS_OLD = Version(transformers.__version__) < Version("5.11")
# Before 5.22, recurrent layers get no arguments of the caller and are refused; layers have other names too.
HAS_RECURRENT = Version(transformers.__version__) >= Version("5.22")
NOT_COMPARED = frozenset("minicpm3 nemotron opt phimoe deepseek_v3 glm_moe_dsa".split() if IS_OLD else [])

_PER_LAYER = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "attention_layers",
    "num_attention_heads_per_layer",
)
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

_GEMMA3N = {
    "intermediate_size": 48,
    "vocab_size_per_layer_input": VOCABULARY,
    "activation_sparsity_pattern": [0.0, 0.0],
    "num_kv_shared_layers": 0,
}
# Options that a type needs besides, because its sizes depend on each other or one of them has a name of its own.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "longcat_flash": {"zero_expert_num": 2, "moe_topk": 2, "num_layers": 1, "qk_head_dim": 12},
    "gpt_neo": {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4},
    "zamba2": {"mamba_headdim": 8, "attention_head_dim": 16, "num_key_value_heads": 4, "attention_hidden_size": 64},
    "reformer": {"is_decoder": True},
    "xlnet": {"d_head": 8},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "zaya": {"num_experts_per_tok": 1},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 256},
    "xlm": {"emb_dim": 32, "n_words": VOCABULARY},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "blt": {"encoder_hash_byte_group_vocab": 60},
    "roc_bert": {"pronunciation_vocab_size": 60, "shape_vocab_size": 60},
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"vocab_size_per_layer_input": VOCABULARY},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "lfm2_moe": {"layer_types": ["full_attention"] * 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
}

# Sizes of a small gated delta rule.
DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}


def transformers_types() -> list[str]:
    """Return the model types of all causal language models of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_family(kind: str, *, attention: str = "eager", **fields: Any) -> Any:
    """Return a tiny random model of the type `kind`, in float64 and eval mode; equal arguments give equal weights."""
    config = family_config(kind, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float64, experts_implementation="eager"
        ).double()
        spread_weights(model)
    return model.eval()


def save_family(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, **fields: Any) -> None:
    """Save a tiny random model of the type `kind`, whose logits are a few units."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(kind, **fields), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder)


def spread_weights(model: nn.Module) -> None:
    """Draw weights of order one, so that attention is far from uniform and a wrong mask shows."""
    for name, parameter in model.named_parameters():
        # Vectors (norms and biases) move a little from 1 and 0, so that none of them drops out of a comparison. Decays
        # become weak, so that a state reaches the next nodes.
        if name.endswith("A_log"):
            nn.init.uniform_(parameter, -4, -1)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))


def family_config(kind: str, **fields: Any) -> Any:
    """Return the default configuration of the type `kind`, made small, with `fields` on top."""
    default = AutoConfig.for_model(kind).get_text_config()
    small = _shrink(default.to_dict())
    for name in ("model_type", "transformers_version"):
        small.pop(name, None)
    if "qk_rope_head_dim" in small:  # latent attention: keys of every head, and head_dim means the rotary part
        small |= {"num_key_value_heads": 4, "head_dim": 4}
    return type(default)(**{**small, **_OVERRIDES.get(kind, {}), **fields})


def _shrink(options: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config":
            small[name] = _shrink(value)
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = _SIZES[name]
        elif name in _PER_LAYER and isinstance(value, list):
            small[name] = value[:2]
        elif name in _TOKENS and isinstance(value, int):
            small[name] = 0
        elif name != "per_layer_config":
            small[name] = value
    return small


class KeepFloat64(TorchFunctionMode):
    """Inside a `with` block, float64 tensors stay float64: routers, norms and softmax cast to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float and args[0].dtype in (torch.float64, torch.int64):  # int64: positions
            return args[0].double()
        is_double = any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in args)

        def widen(value: Any) -> Any:
            return torch.float64 if is_double and value is torch.float32 else value

        return func(*map(widen, args), **{name: widen(value) for name, value in (kwargs or {}).items()})
