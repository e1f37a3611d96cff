"""The table of supported models: one line for each family, with a checkpoint as an example.

    Family --tiny_family_config--> a small configuration of its type, in which windows are shorter than paths
           --attention kinds of the checkpoint--> the kernels that serve it (docs/models.md)

`tests/model/test_families.py` proves every line: an accepted family has the gradients of its trajectories
alone, and a refused one is refused for the reason that the table gives. `docs/generate.py` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from treepack.attention.interface import AttentionKind
from treepack.attention.reach import KeyReach

# Windows and chunks of the tiny configurations, in tokens: shorter than the paths of the test.
SIZE = 4


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: the usual name of the family.
        example: a checkpoint on the hub; "" for refused families.
        kind: its model_type in transformers: that of the text half if the checkpoint has vision.
        attention: the kinds of attention of the example's layers.
        options: of the tiny configuration, on top of the small defaults of `tiny_families.family_config`.
        refusal: part of the error's sentence if the family is refused, else "".
        note: a condition or remark for the table.
        recurrent: what layers compute besides attention: a scan of `recurrent.interface`, "short convolution" for
            layers with a convolution alone, or "".
    """

    name: str
    example: str
    kind: str
    attention: tuple[AttentionKind, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    note: str = ""
    recurrent: str = ""


def full(width: int, value: int | None = None, **options: Any) -> AttentionKind:
    """Layers in which a token sees all of its ancestors, of head dimension `width`, or `value` for the values."""
    return AttentionKind((width, width if value is None else value), **options)


def window(width: int, value: int | None = None, **options: Any) -> AttentionKind:
    """Layers with a window; its size makes no difference to the kernels, so it is that of the tiny configurations."""
    return full(width, value, reach=KeyReach("window", SIZE), **options)


_WINDOW = {"sliding_window": SIZE}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], **_WINDOW}
_CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": SIZE}

# Three layers, so that a state reaches attention, and attention reaches a state.
_RECURRENT = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_CONVOLVED = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_DELTA, _KIMI, _MAMBA = "gated delta rule", "Kimi delta attention", "Mamba-2 scan"
_SHORT = "short convolution"

_QWEN4 = {
    **{"layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1},
    **{"indexer_head_dim": 8, "indexer_budget": 64, "indexer_compress_ratio": 4, "ple_layer_ids": [1]},
    **{"ngram_vocab_size_base": 20, "ple_embed_dim": 32, "eos_token_id": 0},
}

_STATE = "carries a state from token to token in a way that this version of transformers offers no function for"
_SCAN = "its layers compute a selective scan, which has no form on trees here"
_KWARGS = "does not pass subtree_end on to its attention"

ACCEPTED = (
    Family("Qwen 2.5", "Qwen/Qwen2.5-7B", "qwen2", (full(128),)),
    Family("Qwen 3", "Qwen/Qwen3-8B", "qwen3", (full(128),)),
    Family("Qwen 3 MoE", "Qwen/Qwen3-30B-A3B", "qwen3_moe", (full(128),)),
    Family("Qwen 3.5, 3.6", "Qwen/Qwen3.5-27B", "qwen3_5_text", (full(256),), _RECURRENT, recurrent=_DELTA),
    Family("Qwen 3.5, 3.6 MoE", "Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", (full(256),), _RECURRENT, recurrent=_DELTA),
    Family("Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", (full(256),), _RECURRENT, recurrent=_DELTA),
    Family("Qwen 1.5 MoE", "Qwen/Qwen1.5-MoE-A2.7B", "qwen2_moe", (full(128),)),
    Family("Llama 3", "meta-llama/Llama-3.1-8B", "llama", (full(128),)),
    Family(
        "Llama 4",
        "meta-llama/Llama-4-Scout-17B-16E",
        "llama4_text",
        (full(128), full(128, reach=KeyReach("chunk", SIZE))),
        _CHUNKS,
    ),
    Family("Mistral 7B v0.1", "mistralai/Mistral-7B-v0.1", "mistral", (window(128),), _WINDOW),
    Family("Mistral", "mistralai/Mistral-7B-v0.3", "mistral", (full(128),), {"sliding_window": None}),
    Family("Ministral 8B", "mistralai/Ministral-8B-Instruct-2410", "ministral", (window(128),), _WINDOW),
    Family("Ministral 3", "mistralai/Ministral-3-8B-Base-2512", "ministral3", (full(128),)),
    Family("Mixtral", "mistralai/Mixtral-8x7B-v0.1", "mixtral", (full(128),)),
    Family("Phi 2", "microsoft/phi-2", "phi", (full(80),)),
    Family("Phi 3 mini", "microsoft/Phi-3-mini-4k-instruct", "phi3", (window(96),), _WINDOW),
    Family("Phi 4", "microsoft/phi-4", "phi3", (full(128),), {"sliding_window": None}),
    Family("Phi 3.5 MoE", "microsoft/Phi-3.5-MoE-instruct", "phimoe", (window(128),), _WINDOW),
    Family("Gemma", "google/gemma-7b", "gemma", (full(256),)),
    Family("Gemma 2", "google/gemma-2-9b", "gemma2", (full(256, softcap=50.0), window(256, softcap=50.0)), _MIXED),
    Family("Gemma 3", "google/gemma-3-4b-pt", "gemma3_text", (full(256), window(256)), _MIXED),
    Family("Gemma 3n", "google/gemma-3n-E4B", "gemma3n_text", (full(256), window(256)), _MIXED),
    Family("Gemma 4", "google/gemma-4-e2b-it", "gemma4_text", (full(512), window(256)), _MIXED),
    Family("OLMo 2", "allenai/OLMo-2-1124-7B", "olmo2", (full(128),)),
    Family("OLMo 3", "allenai/Olmo-3-7B-Instruct", "olmo3", (full(128), window(128)), _MIXED),
    Family("OLMo Hybrid", "allenai/Olmo-Hybrid-7B", "olmo_hybrid", (full(128),), _RECURRENT, recurrent=_DELTA),
    Family("OLMoE", "allenai/OLMoE-1B-7B-0924", "olmoe", (full(128),)),
    Family("FlexOlmo", "allenai/FlexOlmo-7x7B-1T", "flex_olmo", (full(128),)),
    Family("Command R", "CohereLabs/c4ai-command-r-v01", "cohere", (full(128),), {"logit_scale": 0.06}),
    Family("Command R7B", "CohereLabs/c4ai-command-r7b-12-2024", "cohere2", (full(128), window(128)), _MIXED),
    Family("EXAONE 4", "LGAI-EXAONE/EXAONE-4.0-32B", "exaone4", (full(128), window(128)), _MIXED),
    Family("K-EXAONE", "LGAI-EXAONE/K-EXAONE-236B-A23B", "exaone_moe", (full(128), window(128)), _MIXED),
    Family(
        "gpt-oss",
        "openai/gpt-oss-20b",
        "gpt_oss",
        (full(64, has_sinks=True), window(64, has_sinks=True)),
        _MIXED,
    ),
    Family(
        "MiMo-V2-Flash",
        "XiaomiMiMo/MiMo-V2-Flash",
        "mimo_v2_flash",
        (full(192, 128), window(192, 128, has_sinks=True)),
        _MIXED,
    ),
    Family("GLM-4", "zai-org/GLM-4-9B-0414", "glm4", (full(128),)),
    Family("GLM-4.5, 4.6, 4.7", "zai-org/GLM-4.5-Air", "glm4_moe", (full(128),)),
    Family("GLM-4.7-Flash", "zai-org/GLM-4.7-Flash", "glm4_moe_lite", (full(256),)),
    Family("DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", (full(192, 128),)),
    Family("DeepSeek-V3, R1, Kimi K2", "deepseek-ai/DeepSeek-V3", "deepseek_v3", (full(192, 128),)),
    Family(
        "Kimi Linear",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "kimi_linear",
        (full(192, 128),),
        {**_RECURRENT, **_SPARSE},
        recurrent=_KIMI,
    ),
    Family(
        "Ling 3",
        "inclusionAI/Ling-3.0-Flash",
        "bailing_hybrid",
        (full(192, 128),),
        {**_RECURRENT, **_SPARSE},
        recurrent=_KIMI,
    ),
    Family(
        "DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp", "deepseek_v32", (full(192, 128),), note="paths of up to 2,048"
    ),
    Family("GLM-5", "zai-org/GLM-5", "glm_moe_dsa", (full(256),), note="paths of up to 2,048"),
    Family("MiniMax-M2", "MiniMaxAI/MiniMax-M2", "minimax_m2", (full(128),)),
    Family("SmolLM 3", "HuggingFaceTB/SmolLM3-3B", "smollm3", (full(128),)),
    Family("Seed-OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss", (full(128),)),
    Family("ERNIE 4.5", "baidu/ERNIE-4.5-0.3B-PT", "ernie4_5", (full(128),)),
    Family("ERNIE 4.5 MoE", "baidu/ERNIE-4.5-21B-A3B-PT", "ernie4_5_moe", (full(128),)),
    Family("Hunyuan", "tencent/Hunyuan-7B-Instruct", "hunyuan_v1_dense", (full(128),)),
    Family("Hunyuan MoE", "tencent/Hunyuan-A13B-Instruct", "hunyuan_v1_moe", (full(128),)),
    Family("Apertus", "swiss-ai/Apertus-8B-2509", "apertus", (full(128),)),
    Family("Arcee", "arcee-ai/AFM-4.5B", "arcee", (full(128),)),
    Family("Trinity", "arcee-ai/Trinity-Mini", "afmoe", (full(128), window(128)), _MIXED),
    Family("InternLM 3", "internlm/internlm3-8b-instruct", "internlm3", (full(128),)),
    Family("StarCoder 2", "bigcode/starcoder2-7b", "starcoder2", (window(128),), _WINDOW),
    Family("Granite 3", "ibm-granite/granite-3.3-8b-base", "granite", (full(128),), {"logits_scaling": 8.0}),
    Family(
        "Granite 3 MoE", "ibm-granite/granite-3.1-3b-a800m-base", "granitemoe", (full(64),), {"logits_scaling": 8.0}
    ),
    Family(
        "Granite 4",
        "ibm-granite/granite-4.0-h-small",
        "granitemoehybrid",
        (full(128),),
        {**_RECURRENT, "logits_scaling": 8.0},
        recurrent=_MAMBA,
    ),
    Family(
        "Bamba",
        "ibm-ai-platform/Bamba-9B-v2",
        "bamba",
        (full(128),),
        {"num_hidden_layers": 3, "attn_layer_indices": [1]},
        recurrent=_MAMBA,
    ),
    Family(
        "Nemotron-H, Nemotron 3",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nemotron_h",
        (full(128),),
        {
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        },
        recurrent=_MAMBA,
    ),
    Family("Falcon-H1", "tiiuae/Falcon-H1-7B-Instruct", "falcon_h1", (full(128),), recurrent=_MAMBA),
    Family(
        "Zamba 2",
        "Zyphra/Zamba2-7B",
        "zamba2",
        (full(224),),
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "hybrid_layer_ids": [1, 3],
            "num_mem_blocks": 2,
        },
        recurrent=_MAMBA,
    ),
    Family("LFM2", "LiquidAI/LFM2-1.2B", "lfm2", (full(64),), _CONVOLVED, recurrent=_SHORT),
    Family("LFM2 MoE", "LiquidAI/LFM2-8B-A1B", "lfm2_moe", (full(64),), _CONVOLVED, recurrent=_SHORT),
    Family(
        "LFM3",
        "LiquidAI/LFM3-1.7B",
        "lfm3",
        (full(128), window(128)),
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], **_WINDOW},
        recurrent=_SHORT,
    ),
    Family("dots.llm1", "rednote-hilab/dots.llm1.base", "dots1", (full(128),)),
    Family("MiniCPM 3", "openbmb/MiniCPM3-4B", "minicpm3", (full(96, 64),)),
    Family("GPT-2", "openai-community/gpt2", "gpt2", (full(64),), note="positions are a learned table"),
    Family("Pythia", "EleutherAI/pythia-6.9b", "gpt_neox", (full(128),)),
    Family("OPT", "facebook/opt-6.7b", "opt", (full(128),), note="positions are a learned table"),
)

REFUSED = (
    Family(
        "Qwen 4 (preview)",
        "",
        "qwen4_exp_text",
        options=_QWEN4,
        refusal="its embeddings of n-grams hash neighbouring tokens of the row",
    ),
    Family("MiniMax-M1", "", "minimax", refusal=_STATE),
    Family("ZAYA1", "", "zaya", refusal=_STATE),
    Family("RecurrentGemma", "", "recurrent_gemma", refusal=_STATE),
    Family("Jamba", "", "jamba", refusal=_SCAN),
    Family("Zamba", "", "zamba", refusal=_SCAN),
    Family("Mamba", "", "mamba", refusal=_SCAN),
    Family("Falcon Mamba", "", "falcon_mamba", refusal=_SCAN),
    Family("Mamba 2 without attention", "", "mamba2", refusal="does not pass subtree_end on to its recurrent layers"),
    Family("RWKV 4", "", "rwkv", refusal="it carries a state from token to token in code of its own"),
    Family("DeepSeek-V4", "", "deepseek_v4", refusal="compresses runs of tokens to keys"),
    Family("Nemotron 4", "", "nemotron", refusal=_KWARGS),
    Family("StableLM", "", "stablelm", refusal=_KWARGS),
    Family("BLOOM", "", "bloom", refusal="does not use transformers' attention interface"),
    Family("MPT", "", "mpt", refusal="fails on a packed row"),
)

# Families by name, whose saved copies other programs read differently; tests/train/test_served_copies.py proves it.
LACKED_BY_OLDER = frozenset(
    (
        "DeepSeek-V3.2|GLM-4.7-Flash|GLM-5|Gemma 4|Granite 4|InternLM 3|K-EXAONE|Kimi Linear|LFM2 MoE|LFM3|Ling 3|"
        "MiMo-V2-Flash|MiniCPM 3|MiniMax-M2|Ministral 3|Nemotron-H, Nemotron 3|OLMo Hybrid|Qwen 3.5, 3.6|"
        "Qwen 3.5, 3.6 MoE|Trinity|Zamba 2"
    ).split("|")
)
# A source of 4.57 that transformers 5.24 cannot read, with other shapes or another class.
UNREAD_FROM_OLDER = frozenset({"DeepSeek-V3, R1, Kimi K2", "Gemma 3n"})
# The source, untrained, gives other log-probabilities in 4.57 than in 5.24.
CHANGED_SINCE_OLDER = frozenset({"Apertus", "Bamba", "OLMo 3"})
# Families that vLLM's CPU build reads in tests/train/test_vllm_copies.py.
READ_BY_VLLM = (
    "Qwen 2.5",
    "Qwen 3",
    "Qwen 3 MoE",
    "Llama 3",
    "Mistral",
    "Mixtral",
    "Phi 3 mini",
    "Gemma 2",
    "Gemma 3",
    "OLMo 2",
    "GLM-4",
    "SmolLM 3",
)
