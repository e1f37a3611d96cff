"""The probe of a model: straight lines through the peaks of short passes, and no pass that a rank has no room for."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from support.oracle_model import Sample, make_row, tiny_config
from support.packed_gradients import packed
from support.simulated_device import LayerBytes, SimulatedDevice, simulated
from treepack.carry.backward import CarryOptions
from treepack.data.batch import Batch, make_batch
from treepack.fit.limit import CarryCosts
from treepack.fit.pass_memory import ModelProbe
from treepack.memory.device_memory import MemoryMeter
from treepack.model.layers import adapt_layers, adapted_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.train.ranks import Ranks
from treepack.train.setup.model_probe import agreed, cast_bytes, chains, probe_model
from treepack.train.setup.piece_probe import measure_costs

LAYERS = 3


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    model = load_model(tiny_config(tmp_path / "tiny.json", num_hidden_layers=LAYERS))
    adapt_layers(model.causal, checkpointing=True, compiled=False, recomputed=1)
    return model


def batch() -> Batch:
    return make_batch(make_row([Sample(tuple(range(20)), (0.0, *[1.0] * 19))]), multiple=8)


def probe(loaded: LoadedModel, device: SimulatedDevice, **changes: Any) -> ModelProbe:
    options: dict[str, Any] = {"compiled": False, "chunk": 16, "fits": lambda size: size <= device.free, **changes}
    with simulated(device, loaded.causal):
        return probe_model(
            loaded, batch(), autocast=nullcontext, meter=device.meter, **{"lengths": (16, 64, 128, 256), **options}
        )


def test_peaks_and_times_give_the_bytes_and_seconds_of_a_token(loaded: LoadedModel) -> None:
    device = SimulatedDevice(free=10**9, launch=0.001)
    state = torch.get_rng_state()
    weights = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    result = probe(loaded, device)
    vocabulary = loaded.causal.config.vocab_size
    peak = {
        "fixed": device.fixed,
        "kept": pytest.approx(device.kept),
        "recomputed": pytest.approx(device.recomputed),
    }
    logits = 12 * vocabulary
    expected = {
        "compiled": False,
        "num_layers": LAYERS,
        "logits": logits,
        "forward": {**peak, "fixed": device.fixed - 16 * logits},
        "backward": peak,
        "seconds_kept": pytest.approx(device.seconds),
        "seconds_recomputed": pytest.approx(1.25 * device.seconds),
        "launch": pytest.approx(max(device.launch, 16 * device.seconds)),
        "casts": 0,
    }
    assert asdict(result) == expected
    # 128 tokens take 12.8 starts. One pass of each kind compiles.
    assert device.passes == 3 * 2 + 2
    # The model is as before, except that gradients exist.
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    assert adapted.recomputed == 1
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, weights[name]) for name, value in loaded.model.state_dict().items())
    assert not loaded.model.training


def test_short_passes_have_their_peak_before_the_layers_run_backward_and_long_ones_after(loaded: LoadedModel) -> None:
    # Per token 3 inputs of 10 bytes, and 100 at the end of the forward pass, or 500 while a layer runs again. The first
    # 200,000 bytes are free again when the layers run backward: of 256 tokens the first peak is 130,000 bytes larger.
    layer = LayerBytes(kept=300, input=10, end=100, again=500)
    device = SimulatedDevice(free=10**9, layer=layer, head=200_000)
    result = probe(loaded, device)
    short, long = (result.pass_bytes(tokens, LAYERS, 16) for tokens in (256, 10_000))
    assert short == pytest.approx(device.fixed + 200_000 + 256 * 130, rel=1e-6)
    assert long == pytest.approx(device.fixed + 10_000 * 530, rel=1e-6)
    # With inputs in host memory, two of three stay.
    assert result.pass_bytes(10_000, LAYERS, 16, moved=10) == pytest.approx(device.fixed + 10_000 * 520, rel=1e-6)


def test_longer_passes_run_until_the_processor_is_not_what_they_wait_for(loaded: LoadedModel) -> None:
    # A start takes 1,000 us and a token 10: passes of 64 tokens or fewer show nothing of the GPU.
    device = SimulatedDevice(free=10**9, launch=0.001, seconds=1e-5)
    result = probe(loaded, device, lengths=(16, 64, 128, 256, 512, 1024))
    assert device.passes == 3 * 2 + 2  # 128 recomputed tokens take 1.6 starts
    assert result.seconds_kept == pytest.approx(device.seconds)
    assert result.launch == pytest.approx(device.launch)


def test_compiled_layers_run_only_the_longest_passes_that_fit(loaded: LoadedModel) -> None:
    plain = probe(loaded, SimulatedDevice(free=10**9))
    # 128 kept tokens fit, and 256 recomputed ones.
    device = SimulatedDevice(free=1_000_000 + 300_000)
    result = probe(loaded, device, compiled=True, plain=plain)
    assert device.passes == 2 + 1 + 2
    assert result.backward.kept == pytest.approx(device.kept)
    assert result.backward.recomputed == pytest.approx(device.recomputed)
    assert result.launch == plain.launch


@pytest.mark.parametrize("count", [0, LAYERS])
def test_compiled_layers_run_one_graph_and_the_other_numbers_follow(loaded: LoadedModel, count: int) -> None:
    plain = probe(loaded, SimulatedDevice(free=10**9))
    device = SimulatedDevice(free=10**9, kept=1_500.0, recomputed=400.0, seconds=0.5e-4)
    result = probe(loaded, device, compiled=True, plain=plain, counts=(count,))
    assert device.passes == 2 + 1
    assert result.backward.fixed == device.fixed
    assert result.backward.kept == pytest.approx(plain.backward.kept if count else device.kept)
    assert result.backward.recomputed == pytest.approx(device.recomputed if count else plain.backward.recomputed)
    assert result.seconds_kept == pytest.approx(device.seconds)
    assert result.seconds_recomputed == pytest.approx(1.25 * device.seconds)


def test_a_pass_that_does_not_fit_by_the_shorter_ones_is_not_run(loaded: LoadedModel) -> None:
    # 128 tokens fit, and 256 only if layers are recomputed; a pass that does not fit would raise an error.
    device = SimulatedDevice(free=1_000_000 + 300_000, launch=0.02)
    result = probe(loaded, device)
    assert device.passes == 4 * 2 - 1 + 2
    assert result.backward.kept == pytest.approx(device.kept)
    assert result.backward.recomputed == pytest.approx(device.recomputed)


def test_memory_that_is_too_small_for_the_first_passes_is_an_error(loaded: LoadedModel) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        probe(loaded, SimulatedDevice(free=1_000_000))
    assert not loaded.model.training


def test_made_up_sequences_use_the_tokens_of_a_row() -> None:
    row = chains(batch(), 130)
    assert row.num_tokens == len(row.input_ids) == 130
    assert row.input_ids.tolist() == [n % 20 for n in range(130)]
    assert row.position_ids[[0, 63, 64, 129]].tolist() == [0, 63, 0, 1]
    assert row.parent[[0, 1, 64, 129]].tolist() == [-1, 0, -1, 128]
    assert row.subtree_end[[0, 63, 64, 128]].tolist() == [64, 64, 128, 130]
    assert row.loss_weight.sum() == 127


class _Two(Ranks):
    """The first of two ranks; the other one has larger numbers."""

    def smallest(self, number: int) -> int:
        return min(number, 2 * number)


def test_ranks_agree_on_the_largest_numbers(loaded: LoadedModel) -> None:
    own = probe(loaded, SimulatedDevice(free=10**9))
    result = agreed(own, _Two())
    for name in ("forward", "backward"):
        peak, mine = getattr(result, name), getattr(own, name)
        assert (peak.fixed, peak.kept, peak.recomputed) == pytest.approx(
            (2 * mine.fixed, 2 * mine.kept, 2 * mine.recomputed)
        )
    assert result.seconds_recomputed == pytest.approx(2 * own.seconds_recomputed)
    assert (result.num_layers, result.logits, result.casts) == (own.num_layers, own.logits, own.casts)


def test_the_weights_of_products_are_cast_to_16_bits(loaded: LoadedModel) -> None:
    layers = loaded.causal.model.layers
    linear = [module.weight.numel() for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    assert cast_bytes(loaded.causal) == 2 * sum(linear) > 0
    layers.to(torch.bfloat16)
    assert cast_bytes(loaded.causal) == 0


def test_casts_are_no_bytes_of_a_token(loaded: LoadedModel) -> None:
    device = SimulatedDevice(free=10**9, launch=0.02)
    plain, fused = probe(loaded, device), probe(loaded, device, casts=128_000)
    assert plain.backward.kept - fused.backward.kept == pytest.approx(128_000 / 256)
    assert fused.pass_bytes(256, 0, 16) == plain.pass_bytes(256, 0, 16)
    alone = probe(loaded, device, plain=plain, counts=(0,), casts=128_000)
    assert alone.pass_bytes(256, 0, 16) == pytest.approx(plain.pass_bytes(256, 0, 16))
    assert fused.pass_bytes(10_000, 0, 16) < plain.pass_bytes(10_000, 0, 16)


def test_costs_of_pieces_are_measured_on_short_ones() -> None:
    loaded = packed("qwen3", "reference")
    peaks = iter([5_000 + 3 * 1024, 5_000 + 3 * 2048])
    meter = MemoryMeter(lambda: 0, peaks.__next__, lambda: None)
    costs = measure_costs(loaded, batch(), CarryOptions(7), meter)
    # float64: two heads of 4 numbers, keys and values
    assert costs == CarryCosts(2, 5_000, 3, keys_values=128, sums=128, output=0)
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
