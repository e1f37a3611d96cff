"""Fields of config.json of published models, by short names, for costs of a model that is not on this machine."""

from __future__ import annotations

from treepack.costs.model_fields import Config

_QWEN3: Config = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "model_type": "qwen3"}
_QWEN2: Config = {"vocab_size": 152064, "model_type": "qwen2"}
_LLAMA3: Config = {"vocab_size": 128256, "num_key_value_heads": 8, "model_type": "llama"}
# Three recurrent layers, then one with attention.
_QWEN35: Config = {
    "vocab_size": 248320,
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


# The public config.json of each model has these fields.
def _sizes(layers: int, hidden: int, intermediate: int, heads: int) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        **_sizes(layers, 2880, 2880, 64),
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "tie_word_embeddings": False,
    }


def _gemma3(layers: int, hidden: int, heads: int, groups: int, head_dim: int) -> Config:
    return {
        **_sizes(layers, hidden, 4 * hidden, heads),
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "head_dim": head_dim,
        "num_key_value_heads": groups,
        "sliding_window": 1024,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "tie_word_embeddings": True,
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
    "qwen3.5-4b": {**_QWEN35, **_sizes(32, 2560, 9216, 16), "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3.5-9b": {**_QWEN35, **_sizes(32, 4096, 12288, 16), "num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen3.5-35b-a3b": {
        **_QWEN35,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {**_QWEN2, **_sizes(28, 3584, 18944, 28), "num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen2.5-32b": {**_QWEN2, **_sizes(64, 5120, 27648, 40), "num_key_value_heads": 8, "tie_word_embeddings": False},
    "llama-3.1-8b": {**_LLAMA3, **_sizes(32, 4096, 14336, 32), "tie_word_embeddings": False},
    "llama-3.1-70b": {**_LLAMA3, **_sizes(80, 8192, 28672, 64), "tie_word_embeddings": False},
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4, 256),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8, 256),
    "gemma-3-27b": _gemma3(62, 5376, 32, 16, 128),
}
