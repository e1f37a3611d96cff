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
from treepack.fit.limit import CarryCosts
from treepack.fit.pass_memory import ModelProbe, PeakBytes
from treepack.fit.rung import RunPlan
from treepack.memory.shortage import gib
from treepack.model.layers import adapted_layers, has_compiled_layers
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.setup import model_probe, probe_record, run_memory
from treepack.train.setup.choice_lines import choice_lines, expectation
from treepack.train.setup.compute import choose_compute
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.probe_record import ProbeRecord, keep_probes, known_probes, pays
from treepack.train.setup.run_data import open_data
from treepack.train.setup.run_memory import MemoryChoices, choose_memory, coming_bytes
from treepack.train.setup.run_model import check_fit, load_run_model
from treepack.train.setup.run_plan import PlanInput, RowCut, RunRoom

OPTIONS = TrainOptions(device="cpu", rows_per_step=2, compile=False, loss_chunk=64)
PEAK = PeakBytes(1000, 200.0, 100.0)
PLAIN = ModelProbe(False, 4, 12, PEAK, PEAK, 1e-4, 1.25e-4, 1e-3)
FUSED = replace(PLAIN, compiled=True, seconds_kept=0.5e-4)
Plan = Callable[..., tuple[MemoryChoices, MemoryInput]]
_rows = MemoryInput.rows


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a function that plans a run of two rows of about 1,500 tokens on a device."""
    monkeypatch.setattr(run_memory, "probe_model", _short_probe)
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


def _short_probe(*arguments: Any, **options: Any) -> Any:
    return model_probe.probe_model(*arguments, **options, lengths=(16, 64, 128, 256))


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
    assert set(about) == {"checkpoint-layers", "pass-tokens", "expected"}
    assert f"checkpoint-layers {layers} of 4: a token needs 2 KiB if layers keep" in about["checkpoint-layers"]
    assert "tokens/s in fp32" in about["expected"]


def test_what_waits_in_host_memory_has_a_line_each(plan: Plan) -> None:
    choices, given = plan(device_for(3), carry=None)
    moved = replace(choices.plan, offload_checkpoints=True, offload_optimizer=True)
    lines = choice_lines(moved, PlanInput([PLAIN], given.rows(), given.options), RunRoom(1 << 20), given, "")
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


def test_half_of_the_margin_is_taken_for_a_faster_plan_that_recomputes_all_layers(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A margin of 1,600,000: half of it leaves room for the row if all layers run again. Pieces fit beside all of it.
    monkeypatch.setattr(run_memory, "pieces_may_win", lambda *_: True)
    monkeypatch.setattr(run_memory, "measured_pieces", lambda *_: CarryCosts(4, 1000, 730, 8, 8, 4, 1))
    tight = device_for(4, total=20_000_000, again=4.0)  # 1.5 times as long as a row whose layers keep their activations
    tight = replace(tight, free=tight.free + 800_000)
    for forward, pieces in ((3 * 1408, False), (0, True)):  # pieces that take 2 times as long, and as long
        cut = RowCut(((forward, False), (1408, True)))
        monkeypatch.setattr(MemoryInput, "rows", lambda given, cut=cut: replace(_rows(given), cut=lambda _: cut))
        choices, _ = plan(tight, offload_checkpoints=False)
        assert (choices.plan.carry is not None) == pieces
        assert pieces or choices.plan.checkpoint_layers == 4
    # Layers that keep their activations have all of the margin beside them.
    roomy = device_for(0, total=20_000_000)
    roomy = replace(roomy, free=roomy.free + 800_000, again=4.0)
    choices, _ = plan(roomy, carry=None, offload_checkpoints=False, offload_optimizer=False)
    assert choices.plan.checkpoint_layers == 2


def test_compilation_that_pays_is_tried_and_measured(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    record: ProbeRecord | None = None

    def keep(_: MemoryInput, chunk: int, measured: ProbeRecord) -> None:
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
    # A run with recomputed layers needs a graph that was not measured.
    assert record is not None
    assert record.only == 0
    device.free = device_for(2).free
    fewer, _ = plan(device, compile="auto", carry=None)
    assert fewer.plan.checkpoint_layers == 2
    assert record.only is None


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
    record = ProbeRecord(PLAIN, FUSED, only=4, pieces={0: CarryCosts(4, 1000, 20, 8, 8, 4, 1)})
    keep_probes(given, 64, record)
    assert known_probes(given, 64) is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert known_probes(given, 64) is None
    keep_probes(given, 64, record)
    assert known_probes(given, 64) == record
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
    for broken in ("[]", "{", '{"plain": {}, "fused": null, "only": null}'):
        path.write_text(broken)
        assert known_probes(given, 64) is None


@pytest.mark.parametrize(
    ("seconds", "record", "expected"),
    [
        (probe_record.COLD / probe_record.USUAL_SAVING + 1, ProbeRecord(PLAIN), True),
        (probe_record.COLD / probe_record.USUAL_SAVING - 1, ProbeRecord(PLAIN), False),
        (probe_record.WARM / 0.5 + 1, ProbeRecord(PLAIN, FUSED), True),
        (probe_record.WARM / 0.5 - 1, ProbeRecord(PLAIN, FUSED), False),
        (1e9, ProbeRecord(FUSED, PLAIN), False),
    ],
)
def test_compilation_pays_if_the_run_is_long_enough(seconds: float, record: ProbeRecord, expected: bool) -> None:
    assert pays(seconds, record) == expected
