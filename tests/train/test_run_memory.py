"""A run that measures itself, on a simulated GPU: one plan for all options that are "auto", and a line for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.oracle_model import packed_directory, tiny_config
from support.simulated_device import SimulatedDevice, simulated
from support.strategies import make
from treepack.errors import TreepackError
from treepack.fit import climb, measure
from treepack.fit.climb import RunRoom
from treepack.fit.pass_memory import ModelProbe, PeakBytes
from treepack.fit.rung import RunPlan
from treepack.memory.shortage import gib
from treepack.model.layers import adapted_layers, has_compiled_layers
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.setup import probe_record, run_memory
from treepack.train.setup.choice_lines import choice_lines, expectation
from treepack.train.setup.compute import choose_compute
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.probe_record import keep_probes, known_probes, pays
from treepack.train.setup.run_data import open_data
from treepack.train.setup.run_memory import MemoryChoices, choose_memory, coming_bytes
from treepack.train.setup.run_model import check_fit, load_run_model

OPTIONS = TrainOptions(device="cpu", rows_per_step=2, compile=False, loss_chunk=64)
PEAK = PeakBytes(1000, 200.0, 100.0)
PLAIN = ModelProbe(False, 4, 12, 256, PEAK, PEAK, 1e-4)
FUSED = replace(PLAIN, compiled=True, seconds_kept=0.5e-4)
Plan = Callable[..., tuple[MemoryChoices, MemoryInput]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a function that plans a run of two rows of about 1,500 tokens on a device."""
    monkeypatch.setattr(measure, "LENGTHS", (16, 64, 128, 256))
    monkeypatch.setattr(run_memory, "SMALLEST_PIECE", 128)
    monkeypatch.setattr(climb, "SMALLEST_PIECE", 128)
    monkeypatch.setattr(climb, "PREFERRED", 512)
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i, *generator.integers(6, 24, 700).tolist()]) for i in range(4)]
    packed = packed_directory(tmp_path / "packed", rollouts, capacity=1500)
    config = tiny_config(tmp_path / "tiny.json", num_hidden_layers=4)

    def go(device: SimulatedDevice, **changes: Any) -> tuple[MemoryChoices, MemoryInput]:
        options = replace(OPTIONS, **changes)
        compute, ranks = choose_compute(options), Ranks()
        data = open_data(packed, options, ranks)
        loaded = load_run_model(config, options, compute, ranks)
        check_fit(data, loaded, options)
        given = MemoryInput(data, None, loaded, options, compute, ranks, device.meter)
        with simulated(device, loaded.causal):
            return choose_memory(given), given

    return go


def device_for(layers: int, **changes: Any) -> SimulatedDevice:
    """Return a device on which a row of 1,408 tokens fits if `layers` of 4 layers are recomputed."""
    device = SimulatedDevice(free=0, launch=1e-4, **changes)
    per_token = device.kept + layers / 4 * (device.recomputed - device.kept)
    weights = 8 * 20_000  # more than the states of AdamW
    return replace(device, free=int(device.fixed + 1410 * per_token) + weights)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_as_few_layers_are_recomputed_as_memory_demands(plan: Plan, layers: int) -> None:
    choices, given = plan(device_for(layers), carry=None)
    assert choices.plan.checkpoint_layers == layers
    adapted = adapted_layers(given.loaded.causal)
    assert adapted is not None
    assert adapted.recomputed == layers
    assert all(parameter.grad is None for parameter in given.loaded.model.parameters())
    assert not given.loaded.model.training
    about = {line.split()[0].rstrip(":"): line for line in choices.lines}
    assert set(about) == {"checkpoint-layers", "pass-tokens", "if", "expected"}
    assert about["if"].startswith(f"if memory runs out: {layers + -(-(4 - layers) // 2)} layer")
    assert f"checkpoint-layers {layers} of 4: a token needs 2 KiB if layers keep" in about["checkpoint-layers"]
    assert "tokens/s in fp32" in about["expected"]


def test_what_waits_in_host_memory_has_a_line_each(plan: Plan) -> None:
    choices, given = plan(device_for(3), carry=None)
    moved = replace(choices.plan, offload_checkpoints=True, offload_optimizer=True)
    lines = choice_lines(moved, PLAIN, given.rows(), RunRoom(1 << 20), given, "")
    assert " about " in lines[-1]
    assert "offload-checkpoints on: no whole row fits without it" in lines
    moments = gib(8 * sum(p.numel() for p in given.loaded.model.parameters()))
    assert f"offload-optimizer on: the moments of AdamW, {moments}, leave room for a faster plan" in lines


def test_moments_leave_a_gpu_that_has_no_room_beside_them(plan: Plan) -> None:
    tight = replace(device_for(4), free=device_for(4).free - 120_000)  # moments have 76,000 bytes
    choices, given = plan(tight, carry=None, offload_checkpoints=False)
    assert choices.plan.offload_optimizer
    assert choices.memory is not None
    # The next step counts gradients, and no moments.
    options = replace(given.options, **choices.plan.options)
    assert coming_bytes(given.loaded, options) == 4 * sum(p.numel() for p in given.loaded.model.parameters())
    with pytest.raises(TreepackError, match="a row of 1,408 tokens needs at least"):
        plan(tight, carry=None, offload_checkpoints=False, offload_optimizer=False)


def test_moments_that_must_wait_in_host_memory_leave_less_of_it_to_layers(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = 4 * 64 * 1408  # bytes of 4 layers
    monkeypatch.setattr(run_memory, "host_room", lambda: inputs + 70_000)
    options = {"carry": None, "offload_checkpoints": True, "checkpoint_layers": "all", "checkpoint_every": 0}
    assert plan(device_for(3), **options, offload_optimizer=False)[0].plan.checkpoint_layers == 4
    with pytest.raises(TreepackError, match="no plan with these options runs a row"):
        plan(device_for(3), **options, offload_optimizer=True)


def test_host_memory_has_room_for_the_copies_of_a_checkpoint(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = replace(device_for(4), free=device_for(4).free - 120_000)
    options: dict[str, Any] = {"carry": None, "offload_checkpoints": False}
    monkeypatch.setattr(run_memory, "host_room", lambda: 9456 * 19)  # moments take 8 of a weight, and copies 12
    assert plan(tight, checkpoint_every=0, **options)[0].plan.offload_optimizer
    with pytest.raises(TreepackError, match="a row of 1,408 tokens needs at least"):
        plan(tight, checkpoint_every=1, **options)


def test_ranks_that_share_a_row_count_its_tokens_once(plan: Plan) -> None:
    _, given = plan(device_for(0), carry=None)
    four, shared = (replace(given, ranks=Ranks(0, 4, sequence=n)) for n in (1, 2))
    assert shared.tokens == 2 * four.tokens
    assert shared.rows().step_tokens == pytest.approx(2 * four.rows().step_tokens, abs=1)
    rates = [expectation(RunPlan(False, 0, False, None, 1, 64, 0, 1e-3), RunRoom(0), each) for each in (four, shared)]
    assert "about 4,000 tokens/s" in rates[0]
    assert "about 2,000 tokens/s" in rates[1]


def test_a_plan_for_nothing_is_refused_with_what_would_fit(plan: Plan) -> None:
    device = device_for(4)
    with pytest.raises(TreepackError, match=r"^a row of 1,408 tokens needs at least .* beside weights and optimiser"):
        plan(replace(device, free=device.free - 400_000), carry=None)


def test_memory_that_is_too_small_for_the_probe_is_a_sentence(plan: Plan) -> None:
    with pytest.raises(
        TreepackError,
        match=r"^out of memory while the memory of a pass was measured, and [\d.]+ GiB are free; train with a",
    ):
        plan(SimulatedDevice(free=1000))


def test_options_with_values_measure_nothing(plan: Plan) -> None:
    device = SimulatedDevice(free=0)
    changes = {"carry": None, "checkpoint_layers": "all", "offload_checkpoints": False, "pass_tokens": 9}
    choices, given = plan(device, **changes)
    assert device.passes == 0
    assert choices.lines == ()
    values = {**changes, "compile": False, "checkpoint_layers": 4, "loss_chunk": 64, "offload_optimizer": False}
    assert choices.plan.options == {**values, "whole_weights": False}
    adapted = adapted_layers(given.loaded.causal)
    assert adapted is not None
    assert adapted.recomputed == 4


def test_half_of_the_margin_stays_free_if_all_of_it_cannot(plan: Plan) -> None:
    # 3 layers save 1,410,000 bytes beside 1 layer: less than the margin of 1,600,000, and more than half of it.
    choices, _ = plan(device_for(1, total=20_000_000), carry=None, offload_checkpoints=False)
    assert choices.plan.checkpoint_layers == 4


def test_half_of_the_margin_is_taken_if_all_layers_run_again(plan: Plan) -> None:
    # A margin of 1,600,000: half of it leaves room for the row if all layers run again.
    tight = device_for(4, total=20_000_000)
    tight = replace(tight, free=tight.free + 800_000)
    options: dict[str, Any] = {"offload_checkpoints": False, "offload_optimizer": False}
    assert plan(tight, **options)[0].plan.checkpoint_layers == 4
    # Layers that keep their activations have all of the margin beside them.
    roomy = device_for(0, total=20_000_000)
    roomy = replace(roomy, free=roomy.free + 800_000)
    assert plan(roomy, carry=None, **options)[0].plan.checkpoint_layers == 2


@pytest.mark.parametrize("carry", ["auto", 256])
def test_rows_run_in_pieces_if_no_whole_row_fits_or_by_their_option(plan: Plan, carry: int | str) -> None:
    room = device_for(0) if carry == 256 else device_for(4)
    few = replace(room, fixed=0, free=room.free - (0 if carry == 256 else 1_450_000))
    choices, _ = plan(few, carry=carry, offload_checkpoints=False, offload_optimizer=False)
    assert choices.plan.carry == (256 if carry == 256 else 128)
    assert choices.plan.pass_tokens == choices.plan.carry
    lines = [line for line in choices.lines if line.startswith("carry")]
    assert lines == ([] if carry == 256 else ["carry 128: no whole row fits, the longest row has 1,402 tokens"])


def test_compilation_that_pays_is_tried_and_measured(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    record: tuple[ModelProbe, ModelProbe | None] | None = None

    def keep(_: MemoryInput, chunk: int, *measured: Any) -> None:
        nonlocal record
        assert chunk == 64
        record = measured

    monkeypatch.setattr(run_memory, "keep_probes", keep)
    monkeypatch.setattr(run_memory, "known_probes", lambda *_: record)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    short, given = plan(device_for(0), compile="auto", carry=None)
    assert not has_compiled_layers(given.loaded.causal)
    assert any(line.startswith("compile off: it would take longer than the run") for line in short.lines)
    monkeypatch.setattr(run_memory, "pays", lambda *_: True)
    device = device_for(0)
    original = device.run

    def faster(causal: Any, tokens: int) -> None:
        device.seconds = 0.5e-4 if has_compiled_layers(causal) else 1e-4
        original(causal, tokens)

    monkeypatch.setattr(device, "run", faster)
    fused, given = plan(device, compile="auto", carry=None)
    assert fused.plan.compile
    assert has_compiled_layers(given.loaded.causal)
    assert any(line.startswith("compile on: 50.0 us for a token instead of 100.0, after ") for line in fused.lines)
    # With the record of this machine nothing is measured again, also if an option names a part of the plan.
    before = device.passes
    again, _ = plan(device, compile="auto", carry=None)
    assert "compile on: 50.0 us for a token instead of 100.0, in an earlier run" in again.lines
    by_hand, given = plan(device, compile=True, carry=None)
    without, _ = plan(device, compile=False, carry=None)
    assert device.passes == before
    assert again.plan == by_hand.plan == fused.plan
    assert has_compiled_layers(given.loaded.causal)
    assert without.plan.seconds == pytest.approx(2 * fused.plan.seconds)
    device.free = device_for(2).free + 4 * 10_000  # gradients, which no measurement has made
    fewer, _ = plan(device, compile="auto", carry=None)
    assert (fewer.plan.checkpoint_layers, device.passes) == (2, before)


def test_layers_are_as_before_if_the_compiler_fails(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def fails(function: Any, **_: Any) -> Any:
        def run(*_: Any, **__: Any) -> Any:
            raise TorchDynamoException("no compiler")

        return run

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(run_memory, "pays", lambda *_: True)
    choices, given = plan(device_for(0), compile="auto", carry=None)
    assert not choices.plan.compile
    assert not has_compiled_layers(given.loaded.causal)
    assert "compile off: torch.compile failed (no compiler)" in choices.lines


def test_a_machine_remembers_measurements(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, given = plan(device_for(0), carry=None)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    given = replace(given, loaded=replace(given.loaded, device=torch.device("cuda", 0)))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_probes(given, 64, PLAIN, FUSED)
    assert known_probes(given, 64) is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert known_probes(given, 64) is None
    for fused in (None, FUSED):
        keep_probes(given, 64, PLAIN, fused)
        assert known_probes(given, 64) == (PLAIN, fused)
    # Whatever changes bytes or seconds has a record of its own.
    assert known_probes(given, 128) is None
    for others in (
        {"compute": replace(given.compute, dtype="bf16")},
        {"options": replace(given.options, gather_dtype="bf16")},
        {"ranks": Ranks(size=2)},
        {"loaded": replace(given.loaded, attention="flex")},
        {"loaded": replace(given.loaded, device=torch.device("cuda", 1))},  # its name differs here
        {"loaded": replace(given.loaded, device=torch.device("cpu"))},
    ):
        assert known_probes(replace(given, **others), 64) is None
    given.loaded.causal.lm_head.requires_grad_(False)
    assert known_probes(given, 64) is None
    given.loaded.causal.lm_head.requires_grad_(True)
    (path,) = (tmp_path / "treepack").iterdir()
    for broken in ("[]", "{", "{}", "[{}]"):
        path.write_text(broken)
        assert known_probes(given, 64) is None


@pytest.mark.parametrize(
    ("seconds", "probes", "expected"),
    [
        (probe_record.COLD / probe_record.USUAL_SAVING + 1, (PLAIN, None), True),
        (probe_record.COLD / probe_record.USUAL_SAVING - 1, (PLAIN, None), False),
        (probe_record.WARM / 0.5 + 1, (PLAIN, FUSED), True),
        (probe_record.WARM / 0.5 - 1, (PLAIN, FUSED), False),
        (1e9, (FUSED, PLAIN), False),
    ],
)
def test_compilation_pays_if_the_run_is_long_enough(
    seconds: float, probes: tuple[ModelProbe, ModelProbe | None], expected: bool
) -> None:
    assert pays(seconds, *probes) == expected
