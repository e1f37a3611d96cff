"""Memory of models: parameters against published sizes, and estimated peaks against measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.costs.model_fields import Config
from treepack.costs.presets import PRESETS
from treepack.memory.model_memory import PARAMETER_BYTES, ModelMemory, NoPieces, memory_of, read_memory

GIB = 1 << 30
# As published, with all experts.
BILLIONS = {"qwen3-0.6b": 0.6, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.53, "llama-3.1-70b": 70.55, "qwen2.5-7b": 7.62}


def memory(name: str) -> ModelMemory:
    found = read_memory(name)
    assert isinstance(found, ModelMemory)
    return found


def test_every_parameter_has_its_weight_gradient_and_two_moments() -> None:
    sizes = {name: memory(name).state / PARAMETER_BYTES / 1e9 for name in BILLIONS}
    assert sizes == pytest.approx(BILLIONS, rel=0.01)


def test_carried_tokens_have_keys_values_their_gradients_and_outputs() -> None:
    small = memory("qwen3-1.7b")
    # 28 layers, 8 heads of 128 for keys and for values, in 2 bytes. Outputs: 16 heads of 128, and a float32 for each.
    assert small.keys_values == 28 * 2 * 8 * 128 * 2
    assert small.outputs == 28 * (16 * 128 * 2 + 16 * 4)
    # On the GPU are two of 28 layers, with gradients of keys and values in float32, and the float32 of each head.
    assert small.staged == 2 * 3 * small.keys_values // 28 + 28 * 16 * 4


def test_estimates_of_long_rows_agree_with_measured_peaks() -> None:
    # Peaks of one H200 beyond weights and optimiser, compiled layers. Gradients were made after the peak.
    small, large = memory("qwen3-1.7b"), memory("qwen3-8b")
    estimates = [
        small.in_rows(65_536, small.num_layers) - small.state,
        small.in_rows(66_218, small.num_layers) - small.state,
        large.in_rows(66_218, large.num_layers) - large.state,
        small.in_rows(32_768, 0) - small.state,
    ]
    assert [estimate / GIB for estimate in estimates] == pytest.approx([27.8, 28.2, 67.7, 73.2], rel=0.03)


@given(tokens=st.integers(1, 10**6), limit=st.floats(0, 1e13))
def test_as_few_layers_are_recomputed_as_memory_demands(tokens: int, limit: float) -> None:
    model = memory("qwen3-1.7b")
    fewest = model.fewest_recomputed(tokens, limit)
    # A byte a token for rounding.
    if fewest < model.num_layers:
        assert model.in_rows(tokens, fewest) <= limit + tokens
    if fewest > 0:
        assert model.in_rows(tokens, fewest - 1) > limit - tokens


def test_a_row_that_is_one_piece_is_a_row_without_recomputation() -> None:
    model = memory("qwen3-8b")
    assert model.in_pieces(5000, 8192, 0) == model.in_rows(5000, 0)
    # Rows of any greater length need the memory of one piece and of the path.
    assert model.in_pieces(10**5, 8192, 3000) == model.in_pieces(10**9, 8192, 3000)


def test_experts_have_weights_when_idle_and_activations_when_chosen() -> None:
    config = PRESETS["qwen3-30b-a3b"]
    once, twice = (memory_of(config | {"num_experts": count}, name="m") for count in (128, 256))
    assert isinstance(once, ModelMemory)
    assert isinstance(twice, ModelMemory)
    assert twice.state > 1.8 * once.state
    # Only the logits of the router grow: 2 bytes for each of 128 more experts in 48 layers.
    assert twice.layers - once.layers == 2 * 128 * 48


def test_latent_attention_has_keys_and_values_of_every_head() -> None:
    latent = {
        **PRESETS["qwen3-0.6b"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 96,
    }
    model = memory_of(latent, name="m")
    assert isinstance(model, ModelMemory)
    assert model.keys_values == 28 * 2 * 16 * (64 + 128 + 96)


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-35b-a3b"])
def test_states_of_recurrent_layers_are_not_forecast(name: str, tmp_path: Path) -> None:
    refused = NoPieces("layer 0 is recurrent, and the memory of its states depends on the branches of a row")
    assert read_memory(name) == refused
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": PRESETS[name]}))
    assert read_memory(str(tmp_path)) == refused


def test_states_of_short_convolutions_are_not_forecast() -> None:
    kinds = ["full_attention", "conv"]
    convolution = {**PRESETS["qwen3-0.6b"], "model_type": "lfm2", "num_hidden_layers": 2, "layer_types": kinds}
    assert memory_of(convolution | {"conv_L_cache": 3}, name="m") == NoPieces(
        "layer 1 is a short convolution, and the memory of its states depends on the branches of a row"
    )


@pytest.mark.parametrize("config", [PRESETS["qwen3-30b-a3b"], PRESETS["qwen3-0.6b"] | {"index_topk": 2048}])
def test_mixtures_and_indexers_have_a_forecast(config: Config) -> None:
    assert isinstance(memory_of(config, name="m"), ModelMemory)
