"""Costs of models: against torch's own count for tiny models, and against the published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.refusal import refusal
from treepack.costs.model_cost import FlopCount, operations, read_shape, shape_of
from treepack.costs.presets import PRESETS
from treepack.errors import TreepackError

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 16},
    "llama": {**SIZES, "num_key_value_heads": 2},
    "gpt_neox": SIZES,
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **SIZES,
        **EXPERTS,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 6,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        **SIZES,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 12,
        "q_lora_rank": 10,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
    },
}
# Fields that only deepseek_v3 has.
del CONFIGS["qwen3_moe"]["first_k_dense_replace"], CONFIGS["qwen3_moe"]["n_shared_experts"]
BILLIONS = {  # as published; for the mixture of experts, the active ones
    "qwen3-0.6b": 0.60,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 3.35,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
    "qwen3.5-35b-a3b": 3.45,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.76,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "gpt-oss-20b": 4.19,  # active, and the embeddings
    "gpt-oss-120b": 5.71,
    "gemma-3-4b": 3.88,  # of the text
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.01,
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_forward_operations_equal_the_count_of_torch(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    length, fields = 24, CONFIGS[model_type]
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in fields else {}
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.arange(length)[None])
    shape = shape_of({**fields, "model_type": model_type}, name=model_type)
    # Eager attention computes the scores of all pairs and masks them afterwards, so there are length squared of them.
    every_pair = FlopCount(tokens=length, pairs=length * length, targets=length)
    # torch counted the forward pass alone, a third of the operations.
    assert counter.get_total_flops() == operations(shape, every_pair) / 3


def test_every_preset_has_its_published_size() -> None:
    sizes = {}
    for name, config in PRESETS.items():
        shape = read_shape(name)
        # Tied embeddings are the weights of the output layer; others are as many again.
        sizes[name] = (shape.weights + shape.output * (1 if config["tie_word_embeddings"] else 2)) / 1e9
    assert sizes == pytest.approx(BILLIONS, rel=0.01)


def test_a_model_is_a_preset_a_hub_name_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-8b"]))
    shapes = [read_shape(name) for name in ("Qwen/Qwen3-8B-Base", str(tmp_path), str(tmp_path / "config.json"))]
    # 80 heads of 128: 32 each for q and o, 8 each for k and v. Scores: 32 heads, 128 for q k and 128 for p v.
    assert [(shape.weights, shape.output, shape.scores) for shape in shapes] == [
        (36 * 4096 * (80 * 128 + 3 * 12_288), 4096 * 151_936, 36 * 32 * 256)
    ] * 3


def test_a_model_with_vision_is_its_language_model() -> None:
    inner = shape_of(CONFIGS["llama"], name="m")
    assert shape_of({"model_type": "seen", "text_config": CONFIGS["llama"]}, name="m") == inner


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "m: has no num_hidden_layers"),
        ({**SIZES, "hidden_size": "wide"}, "m: has 'wide' hidden_size"),
        ({**SIZES, "layer_types": ["full_attention", "linear_attention", "conv"]}, "m: layer 1 is 'linear_attention'"),
        (
            {**SIZES, "linear_num_key_heads": 16, "full_attention_interval": 4},
            "m: has linear_num_key_heads; a forecast",
        ),
        ({**SIZES, "attn_layer_period": 8, "mamba_d_state": 16}, "m: has mamba_d_state; a forecast"),
        ({**SIZES, "attn_type_list": [0, 1]}, "m: has attn_type_list; a forecast"),
        ({**SIZES, "is_encoder_decoder": True}, "m: has an encoder"),
        ({**SIZES, "architectures": ["BertForMaskedLM"]}, "m: has an encoder"),
        ({"text_config": [1]}, "m: has no num_hidden_layers"),
    ],
)
def test_a_config_without_softmax_attention_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        shape_of(config, name="m")


def test_a_model_that_is_not_there_is_refused_with_the_presets() -> None:
    assert "qwen3-9b: no such config.json; give its path or one of qwen3-0.6b, " in refusal(read_shape, "qwen3-9b")


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    assert "is not a JSON object" in refusal(read_shape, str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refusal(read_shape, str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, {}),
        ({"sliding_window": 10}, {10: 3}),
        ({"sliding_window": 10, "use_sliding_window": False}, {}),
        ({"sliding_window": 10, "use_sliding_window": True, "max_window_layers": 2}, {10: 1}),
        ({"sliding_window": 10, "sliding_window_pattern": 3}, {10: 2}),
        ({"sliding_window": 10, "model_type": "gemma2"}, {10: 2}),
        ({"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, {10: 1}),
        ({"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 2 + ["full_attention"]}, {8: 2}),
    ],
)
def test_a_layer_with_a_window_has_at_most_its_window_of_pairs_for_each_token(
    fields: dict[str, Any], windows: dict[int, int]
) -> None:
    plain, shape = shape_of(SIZES, name="m"), shape_of({**SIZES, **fields}, name="m")
    each = plain.scores // 3  # of one layer
    assert dict(shape.windows) == {size: count * each for size, count in windows.items()}
    assert shape.scores == each * (3 - sum(windows.values()))
    # Two paths of 4 tokens have 20 pairs, one of 100 has 5050.
    for work in (FlopCount(8, 20, 0), FlopCount(100, 5050, 0)):
        inside = sum(count * min(work.pairs, size * work.tokens) for size, count in windows.items())
        pairs = (3 - sum(windows.values())) * work.pairs + inside
        assert operations(shape, work) == 6.0 * (shape.weights * work.tokens + each * pairs)
