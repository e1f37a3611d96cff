"""Costs of hybrid models: against torch's own count and the calls of tiny models, and what follows for a forecast."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import SAMPLE_DATA
from support.refusal import refusal
from support.tiny_families import DELTA_RULE
from treepack.analysis.capacities import forecast_lines, plan_capacities
from treepack.costs.model_cost import FlopCount, ModelShape, operations, read_shape, shape_of
from treepack.costs.presets import PRESETS
from treepack.errors import TreepackError
from treepack.ingest.options import BuildOptions
from treepack.trie.directory import read_to_trie

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 3, "mamba_expand": 2}
NEMOTRON = {
    **SIZES,
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 7,
    "conv_kernel": 3,
    "head_dim": 16,
}
NEMOTRON_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
KIMI = {
    **SIZES,
    **LATENT,
    "num_key_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
    },
}
# Named as in the config.json of released checkpoints, some of which list no kinds of layers.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "qwen3_next",
        {
            **SIZES,
            **DELTA_RULE,
            **EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": ("qwen3_5_text", {**SIZES, **DELTA_RULE, "head_dim": 16, "full_attention_interval": 2}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**SIZES, **DELTA_RULE, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 24},
    ),
    "olmo_hybrid": ("olmo_hybrid", {**SIZES, **DELTA_RULE, "num_key_value_heads": 4}),
    "kimi_linear": ("kimi_linear", KIMI),
    "ling 3": (
        "bailing_hybrid",
        {
            **SIZES,
            **LATENT,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "short_conv_kernel_size": 3,
            "layer_group_size": 2,
        },
    ),
    "lfm3": (
        "lfm3",
        {**SIZES, "head_dim": 16, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    ),
    "nemotron_h": ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M-M*-"}),
    "nemotron_h with experts": (
        "nemotron_h",
        {**NEMOTRON, **NEMOTRON_EXPERTS, "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    ),
    "nemotron_h with latent experts": (
        "nemotron_h",
        {**NEMOTRON, **NEMOTRON_EXPERTS, "moe_latent_size": 12, "hybrid_override_pattern": "ME*E"},
    ),
    "granite 4": (
        "granitemoehybrid",
        {
            **SIZES,
            **MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 28,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
        },
    ),
    "granite 4 without experts": (
        "granitemoehybrid",
        {
            **SIZES,
            **MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 28,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
        },
    ),
    "bamba": ("bamba", {**SIZES, **MAMBA, "attn_layer_indices": [2]}),
    "falcon_h1": ("falcon_h1", {**SIZES, **MAMBA, "mamba_d_ssm": 24, "head_dim": 16}),
    "falcon_h1 of an expansion": ("falcon_h1", {**SIZES, **MAMBA, "mamba_d_ssm": None}),
    "lfm2": ("lfm2", {**SIZES, "block_ff_dim": 70, "block_multiple_of": 8, "conv_L_cache": 3, "full_attn_idxs": [2]}),
    "lfm2 as it is": (
        "lfm2",
        {
            **SIZES,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **SIZES,
            **EXPERTS,
            "num_dense_layers": 1,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
}
LENGTH = 24


def count_forward(config: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the multiplications of a forward pass: those that torch counts, and those of recurrent layers.

    Scans and convolutions are replaced by functions that compute nothing, and count from the sizes of their arguments.
    """
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    per_token: list[int] = []

    def convolve(x: Any, weight: Any, *_: Any, **__: Any) -> Any:
        per_token.append(weight.numel())  # [channels, taps]
        return x

    def scan_delta(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        # [B, T, H, V]; k h, k' u and q h
        per_token.append(3 * v.shape[2] * v.shape[3] * k.shape[3])
        return torch.zeros_like(v), None

    def scan_mamba(x: Any, dt: Any, a: Any, b: Any, *_: Any, **__: Any) -> Any:
        per_token.append(2 * x.shape[2] * x.shape[3] * b.shape[3])
        return torch.zeros_like(x)

    module = importlib.import_module(type(model).__module__)
    functions = {
        "causal_conv1d_fn": convolve,
        "torch_chunk_gated_delta_rule": scan_delta,
        "chunk_kimi_delta_attention": scan_delta,
        "mamba2_chunk_scan": scan_mamba,
        "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
    }
    for name in functions.keys() & vars(module).keys():
        monkeypatch.setattr(module, name, functions[name])
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(torch.arange(LENGTH)[None], use_cache=False)
    assert per_token, "the model called none of its recurrent functions"
    return float(counter.get_total_flops()) / 2 + sum(per_token) * LENGTH


@pytest.mark.parametrize("name", CONFIGS)
def test_multiplications_of_a_hybrid_equal_the_count_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model_type, fields = CONFIGS[name]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # some defaults are beyond the small vocabulary
    config = transformers.AutoConfig.for_model(model_type, **fields, **tokens)
    expected = count_forward(config, monkeypatch)
    # Eager attention computes the scores of all pairs and masks them afterwards.
    work = FlopCount(tokens=LENGTH, pairs=LENGTH * LENGTH, targets=LENGTH)
    # The fields of a released checkpoint, and those that transformers writes after it has read them.
    for written in ({**fields, "model_type": model_type}, json.loads(config.to_json_string())):
        shape = shape_of(written, name=name)
        # 6 = 2 for each multiplication forward and 4 backward
        assert operations(shape, work) == 6 * expected


def test_one_attention_layer_in_four_has_a_quarter_of_the_pairs() -> None:
    fields = CONFIGS["qwen3_next"][1]
    hybrid, attention = (
        shape_of({**fields, "model_type": "qwen3_next", "layer_types": kinds}, name="m")
        for kinds in (["linear_attention"] * 3 + ["full_attention"], ["full_attention"] * 4)
    )
    assert (4 * hybrid.scores, attention.scans) == (attention.scores, 0)
    # Three layers with 4 heads of a state of 8 x 6, and three products with it.
    assert hybrid.scans == 3 * 3 * 4 * 8 * 6


BILLIONS = {  # as published; all experts, and those that one token uses
    "qwen3.5-4b": (4.21, 4.21),
    "qwen3.5-9b": (8.95, 8.95),
    "qwen3.5-35b-a3b": (34.66, 3.45),
}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_hybrid_preset_has_the_weights_of_its_model_in_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = PRESETS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    total, active = (1e9 * each for each in BILLIONS[name])
    weights = {key: each.numel() for key, each in model.named_parameters() if each.ndim > 1}
    assert sum(weights.values()) == pytest.approx(total, rel=0.002)
    # Of the experts, stacked in one parameter, 8 of 256 are active.
    used = sum(count // 32 if ".experts." in key else count for key, count in weights.items())
    shape = read_shape(name)
    embedding = shape.output * (1 if config["tie_word_embeddings"] else 2)
    assert shape.weights + embedding == used == pytest.approx(active, rel=0.002)


def test_a_preset_is_a_hub_name_too() -> None:
    assert read_shape("Qwen/Qwen3.5-35B-A3B-Base") == read_shape("qwen3.5-35b-a3b")


@given(
    tokens=st.integers(1, 1 << 17),
    pairs=st.integers(1, 1 << 34),
    shared=st.floats(0.0, 0.9),
    kept=st.floats(0.0, 1.0),
)
def test_the_gain_of_a_hybrid_is_between_those_of_its_tokens_and_of_its_pairs(
    tokens: int, pairs: int, shared: float, kept: float
) -> None:
    hybrid = ModelShape("hybrid", weights=100, output=10, scores=1, scans=7)
    flat = FlopCount(tokens, max(pairs, tokens), 0)
    tree = FlopCount(max(1, int(tokens * (1 - shared))), max(1, int(flat.pairs * (1 - shared * kept))), 0)
    gain = operations(hybrid, flat) / operations(hybrid, tree)
    ratios = sorted((flat.tokens / tree.tokens, flat.pairs / tree.pairs))
    assert ratios[0] * (1 - 1e-9) <= gain <= ratios[1] * (1 + 1e-9)


def test_recurrent_layers_bring_the_gain_on_sample_data_closer_to_the_ratio_of_tokens() -> None:
    hybrid = read_shape("qwen3.5-4b")
    attention = shape_of({**PRESETS["qwen3.5-4b"], "full_attention_interval": 1}, name="attention in every layer")
    trie, _ = read_to_trie([str(SAMPLE_DATA / "tokens.jsonl")], BuildOptions())
    planned = list(plan_capacities(trie, [16_384], method="contiguous", too_long="error"))
    for line in forecast_lines(trie, planned, method="contiguous"):
        gains = [operations(shape, line.flat) / operations(shape, line.packed) for shape in (attention, hybrid)]
        assert gains[0] < gains[1] < line.flat.tokens / line.packed.tokens


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SIZES, "model_type": "jamba", "layers_block_type": ["mamba"] * 4}, "layer 0 is 'linear_attention' of type"),
        ({**SIZES, "model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16}, "m: has mamba_d_state; a fore"),
        ({**SIZES, "model_type": "minimax", "attn_type_list": [0, 1, 0, 1]}, "m: has attn_type_list; a forecast"),
        (
            {**SIZES, "model_type": "zamba2", "layers_block_type": ["hybrid"] * 4},
            "layer 0 is 'hybrid' of type 'zamba2'",
        ),
        ({**SIZES, "model_type": "recurrent_gemma", "lru_width": 32}, "m: has lru_width; a forecast"),
        ({**SIZES, "model_type": "falcon_mamba", "state_size": 16}, "m: has state_size; a forecast"),
        ({**SIZES, "model_type": "lfm2", "layer_types": ["conv"] * 4}, "m: has no conv_L_cache"),
        ({**SIZES, "layer_types": ["full_attention"] * 3}, "m: has kinds of 3 layers and 4 layers"),
        ({**NEMOTRON, "model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, r"m: layer 1 is '\?' of type"),
    ],
)
def test_layers_of_unknown_cost_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        shape_of(config, name="m")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", -1),
        ("layer_types", [["conv"]]),
        ("mlp_only_layers", 3),
        ("attn_layer_indices", ["1"]),
        ("num_experts", "x"),
        ("moe_latent_size", float("nan")),
        ("shared_expert_intermediate_size", [1]),
        ("num_dense_layers", -1),
        ("q_lora_rank", True),
    ],
)
def test_fields_of_another_type_are_refused_by_name(field: str, value: Any) -> None:
    assert f"m: has {field} " in refusal(shape_of, {**SIZES, field: value}, name="m")
