"""The probe of a model: straight lines through the peaks of short passes, and no pass that a rank has no room for."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.oracle_model import Sample, make_row, tiny_config
from support.simulated_device import LayerBytes, SimulatedDevice, simulated
from treepack.data.batch import Batch, make_batch
from treepack.fit import measure
from treepack.fit.measure import TrialPasses, cast_bytes, chains, probe_compiled, probe_model
from treepack.fit.pass_memory import ModelProbe
from treepack.model.layers import adapt_layers, adapted_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

LAYERS = 3


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    model = load_model(tiny_config(tmp_path / "tiny.json", num_hidden_layers=LAYERS))
    adapt_layers(model.causal, checkpointing=True, compiled=False, recomputed=1)
    return model


def batch() -> Batch:
    return make_batch(make_row([Sample(tuple(range(20)), (0.0, *[1.0] * 19))]), multiple=8)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the passes short."""
    monkeypatch.setattr(measure, "LENGTHS", (16, 64, 128, 256))
    monkeypatch.setattr(measure, "_LONG", 0.0256)  # 256 tokens in SimulatedDevice.seconds
    monkeypatch.setattr(measure, "_FEW", measure._FEW)  # some tests set it


def passes(loaded: LoadedModel, device: SimulatedDevice, **changes: Any) -> TrialPasses:
    return replace(TrialPasses(loaded, batch(), 16, nullcontext, device.meter), **changes)


def probe(loaded: LoadedModel, device: SimulatedDevice, **changes: Any) -> ModelProbe:
    with simulated(device, loaded.causal):
        return probe_model(passes(loaded, device, **changes))


def compiled(loaded: LoadedModel, device: SimulatedDevice, plain: ModelProbe, count: int, casts: int = 0) -> ModelProbe:
    with simulated(device, loaded.causal):
        return probe_compiled(passes(loaded, device), plain, count, casts=casts)


@pytest.mark.parametrize("few", [1, 2, 8])
def test_peaks_and_times_give_the_bytes_and_seconds_of_a_token(loaded: LoadedModel, few: int) -> None:
    measure._FEW = few  # layers that keep their activations in a pass: the others follow
    device = SimulatedDevice(free=10**9, launch=0.001)
    state = torch.get_rng_state()
    weights = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    result = probe(loaded, device)
    peak = {
        "fixed": device.fixed,
        "kept": pytest.approx(device.kept, rel=1e-4),
        "recomputed": pytest.approx(device.recomputed),
    }
    logits = 12 * loaded.causal.config.vocab_size
    assert asdict(result) == {
        "compiled": False,
        "num_layers": LAYERS,
        "logits": logits,
        "tokens": 128,  # 256 of recomputed layers take more than _LONG
        "forward": {**peak, "fixed": device.fixed - 16 * logits},
        "backward": peak,
        "seconds_kept": pytest.approx(device.seconds),
        "casts": 0,
    }
    assert result.seconds(LAYERS) == pytest.approx(1.25 * device.seconds)
    assert device.passes == 5
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


@given(
    kept=st.integers(100, 3000),
    stays=st.integers(1, 90),
    end=st.integers(0, 3000),
    again=st.floats(1, 3),
    few=st.integers(1, LAYERS),
    tokens=st.integers(1, 300_000),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_best_number_of_layers_follows_from_few_passes(
    loaded: LoadedModel, kept: int, stays: int, end: int, again: float, few: int, tokens: int
) -> None:
    layer = LayerBytes(kept, stays, end, again * kept)
    measure._FEW = few
    result = probe(loaded, SimulatedDevice(free=10**9, layer=layer))
    for count in range(LAYERS + 1):
        needed = 1_000_000 + tokens * layer.peak(count, LAYERS)
        found = result.pass_bytes(tokens, count, 16)
        assert found >= needed * (1 - 1e-3)
        if few == LAYERS:
            assert found <= needed * 1.001 or count, "all of it was measured"


@pytest.mark.parametrize("count", [0, 1, 2, LAYERS])
def test_compiled_layers_run_one_rung_and_the_other_numbers_follow(loaded: LoadedModel, count: int) -> None:
    plain = probe(loaded, SimulatedDevice(free=10**9))
    device = SimulatedDevice(free=10**9, kept=1_500.0, recomputed=500.0, seconds=0.5e-4, launch=1e-3)
    device.recomputed -= 100 * (count == LAYERS)
    result = compiled(loaded, device, plain, count)
    assert device.passes == 4
    assert device.longest == plain.tokens
    assert result.compiled
    assert result.backward.fixed == pytest.approx(device.fixed, rel=1e-5)
    assert result.backward.kept == pytest.approx(plain.backward.kept if count == LAYERS else device.kept, rel=1e-4)
    assert result.backward.recomputed == pytest.approx(device.recomputed)
    assert result.seconds_kept == pytest.approx(device.seconds)


def test_a_pass_that_might_not_fit_is_not_run(loaded: LoadedModel) -> None:
    # Twice the bytes of 64 recomputed tokens are not free; a pass that does not fit would raise an error.
    device = SimulatedDevice(free=2_100_000)
    result = probe(loaded, device)
    assert (result.tokens, device.longest) == (64, 64)
    assert result.backward.kept == pytest.approx(device.kept, rel=1e-4)
    # Of compiled layers, 128 tokens fit by the measurement.
    plain = probe(loaded, SimulatedDevice(free=10**9))
    tight = SimulatedDevice(free=1_100_000, kept=1000)
    compiled(loaded, tight, plain, 0)
    assert tight.longest == 64


@pytest.mark.parametrize("free", [3_000_000, 10**9])
def test_logits_that_need_less_than_assumed_do_not_hide_the_bytes_of_long_rows(loaded: LoadedModel, free: int) -> None:
    # A chunk of 64 targets needs nothing here, and 600 bytes of a target are assumed: more than a token needs.
    device = SimulatedDevice(free=free)
    result = probe(loaded, device, chunk=64)
    assert device.longest >= 128
    for peak in (result.forward, result.backward):
        assert peak.recomputed == pytest.approx(device.recomputed)
    assert result.pass_bytes(32_768, LAYERS, 64) == pytest.approx(device.fixed + 32_768 * device.recomputed, rel=1e-3)
    fused = compiled(loaded, SimulatedDevice(free=free), result, LAYERS)
    assert fused.forward.recomputed == pytest.approx(device.recomputed)


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


def test_ranks_agree_on_the_largest_numbers(loaded: LoadedModel) -> None:
    own = probe(loaded, SimulatedDevice(free=10**9, launch=1e-3))
    result = probe(
        loaded, SimulatedDevice(free=10**9, launch=1e-3), largest=lambda number: 2 * number
    )  # of the other rank
    assert result.seconds_kept == pytest.approx(2 * own.seconds_kept, rel=1e-4)
    assert result.backward.fixed == 2 * own.backward.fixed
    assert result.backward.kept == pytest.approx(2 * own.backward.kept, rel=1e-4)
    assert result.tokens == own.tokens == 128
    # No rank runs a pass that lacks memory on another one.
    assert probe(loaded, SimulatedDevice(free=10**9, launch=1e-3), largest=lambda number: number or 1).tokens == 64


def test_the_weights_of_products_are_cast_to_16_bits(loaded: LoadedModel) -> None:
    layers = loaded.causal.model.layers
    linear = [module.weight.numel() for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    assert cast_bytes(loaded.causal) == 2 * sum(linear) > 0
    layers.to(torch.bfloat16)
    assert cast_bytes(loaded.causal) == 0


@pytest.mark.parametrize("count", [0, 1, LAYERS])
def test_casts_are_no_bytes_of_a_token(loaded: LoadedModel, count: int) -> None:
    device = SimulatedDevice(free=10**9, launch=1e-3)
    plain = probe(loaded, device)
    fused = [compiled(loaded, device, plain, count, casts) for casts in (0, 60_000)]
    assert fused[1].pass_bytes(128, count, 16) == pytest.approx(fused[0].pass_bytes(128, count, 16), rel=1e-6)
    assert fused[1].forward.fixed == fused[0].forward.fixed - 60_000 * (LAYERS - count) // LAYERS
