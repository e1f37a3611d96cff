"""A step whose memory runs out runs again with a smaller plan, and the run computes what an undisturbed one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from treepack.errors import TreepackError
from treepack.fit import rung
from treepack.fit.climb import PlanForecast, RunRows
from treepack.fit.pass_memory import ModelProbe, PeakBytes
from treepack.memory.device_memory import MemoryMeter, StepMemory
from treepack.model.layers import adapted_layers
from treepack.objectives.objective import choose_objective
from treepack.train.loop import train
from treepack.train.optimiser import make_optimiser
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.retry import FittingRun
from treepack.train.run import TrainingRun
from treepack.train.saving.choices import recorded_memory, with_recorded
from treepack.train.saving.run_directory import begin, record_plan
from treepack.train.setup.opening import open_run, resume_run
from treepack.train.step import StepMetrics

LAYERS = 2
OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=3, checkpoint_every=0, eval_every=2)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [
        make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()], advantage=1.0) for i in range(12)
    ]
    return packed_directory(tmp_path / "packed", rollouts, capacity=40)


@pytest.fixture
def opened(packed: Path, tmp_path: Path) -> Callable[..., TrainingRun]:
    config = tiny_config(tmp_path / "tiny.json", num_hidden_layers=LAYERS)
    held_out = packed_directory(
        tmp_path / "held-out", [make("e", [1, *range(9), 5, 21, 22], advantage=1.0)], capacity=40
    )
    return lambda **changes: open_run(packed, config, replace(OPTIONS, **changes), held_out=held_out)


class Failing:
    """Raises an error of memory at its `number`-th to `last`-th calls, counted from 1."""

    def __init__(self, number: int, last: int | None = None) -> None:
        self.calls, self.number, self.last = 0, number, last or number

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.number <= self.calls <= self.last:
            raise torch.OutOfMemoryError("no memory")


def go(run: TrainingRun, out: Path, notes: list[str]) -> list[StepMetrics]:
    return list(train(run, out, note=notes.append))


def assert_equal_runs(first: tuple[list[StepMetrics], Path], second: tuple[list[StepMetrics], Path]) -> None:
    for a, b in zip(first[0], second[0], strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert a.evaluation.get("eval_loss", 0) == pytest.approx(b.evaluation.get("eval_loss", 0), rel=1e-6)
        assert (a.step, a.lr, a.tokens, a.skipped_rows) == (b.step, b.lr, b.tokens, b.skipped_rows)
    weights = [torch.load(out, weights_only=True) for _, out in (first, second)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-6)


def in_forward(run: TrainingRun, failing: Failing) -> None:
    run.loaded.model.base_model.layers[1].register_forward_hook(failing)


def in_backward(run: TrainingRun, failing: Failing) -> None:
    run.loaded.model.base_model.layers[0].mlp.down_proj.weight.register_hook(failing)


def saved(run: TrainingRun, path: Path) -> Path:
    torch.save(run.loaded.model.state_dict(), path)
    return path


@pytest.mark.parametrize("place", [in_forward, in_backward])
@pytest.mark.parametrize("number", [1, 4])
def test_a_step_that_fails_runs_again_with_more_recomputed_layers(
    opened: Callable[..., TrainingRun], tmp_path: Path, place: Callable[[TrainingRun, Failing], None], number: int
) -> None:
    calm = opened()
    undisturbed = go(calm, tmp_path / "calm", []), saved(calm, tmp_path / "calm.pt")
    run, notes = opened(), list[str]()
    place(run, Failing(number))
    steps = go(run, tmp_path / "out", notes)
    assert_equal_runs((steps, saved(run, tmp_path / "out.pt")), undisturbed)
    (note,) = notes
    assert note.startswith("out of memory in row")
    assert "it runs again with a smaller plan: 1 layer recomputed, whole rows" in note
    adapted = adapted_layers(run.loaded.causal)
    assert adapted is not None
    assert adapted.recomputed == 1
    record = json.loads((tmp_path / "out" / "run.json").read_text())["chosen"]
    assert record["checkpoint_layers"] == 1
    assert record["why"] == [
        "a smaller plan, because memory ran out: 1 layer recomputed, whole rows, not joined, logits of 2,048 targets"
    ]
    assert json.loads((tmp_path / "out" / "train.json").read_text())["options"]["checkpoint_layers"] == 1


def test_every_kind_of_smaller_plan_computes_the_same(
    opened: Callable[..., TrainingRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of 40 tokens in pieces of down to 8, one after passes of 80 tokens and chunks of 2,048.
    monkeypatch.setattr(rung, "SMALLEST_PIECE", 1)
    monkeypatch.setattr(rung, "smaller_piece", lambda tokens: tokens // 2 if tokens >= 16 else 0)
    calm = opened()
    undisturbed = go(calm, tmp_path / "calm", []), saved(calm, tmp_path / "calm.pt")
    run, notes = opened(pass_tokens=80), list[str]()
    in_forward(run, Failing(2, last=12))
    steps = go(run, tmp_path / "out", notes)
    assert_equal_runs((steps, saved(run, tmp_path / "out.pt")), undisturbed)
    plans = [note.partition("plan: ")[2] for note in notes]
    assert plans[1].startswith("2 layers recomputed, whole rows, passes of 80 tokens")
    assert "passes of 40 tokens" in plans[2]
    assert any("pieces of " in plan for plan in plans)
    assert any("logits of 256 targets" in plan for plan in plans)
    assert len(plans) == 11


def test_an_update_that_fails_leaves_weights_and_moments_untouched(
    opened: Callable[..., TrainingRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = opened()
    undisturbed = go(calm, tmp_path / "calm", []), saved(calm, tmp_path / "calm.pt")
    # The third tensor of the moments does not fit, at the first update.
    zeros, failing = torch.zeros_like, Failing(3)

    def failing_zeros(*arguments: Any, **options: Any) -> Any:
        if "memory_format" in options:
            failing()
        return zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros_like", failing_zeros)
    run, notes = opened(), list[str]()
    steps = go(run, tmp_path / "out", notes)
    assert_equal_runs((steps, saved(run, tmp_path / "out.pt")), undisturbed)
    (note,) = notes
    assert note.startswith("out of memory in the update of the weights; it runs again")


def test_a_step_whose_teacher_lacks_memory_runs_again(opened: Callable[..., TrainingRun], tmp_path: Path) -> None:
    teacher = tiny_config(tmp_path / "teacher.json", num_hidden_layers=LAYERS)
    objective = choose_objective("distill", teacher=str(teacher))
    calm = opened(objective=objective)
    undisturbed = go(calm, tmp_path / "calm", []), saved(calm, tmp_path / "calm.pt")
    run, notes = opened(objective=objective), list[str]()
    assert run.teacher is not None
    run.teacher.model.base_model.layers[1].register_forward_hook(Failing(2))
    steps = go(run, tmp_path / "out", notes)
    assert_equal_runs((steps, saved(run, tmp_path / "out.pt")), undisturbed)
    (note,) = notes
    assert note.startswith("out of memory in row")
    assert "it runs again with a smaller plan: 1 layer recomputed" in note


def test_held_out_rows_are_evaluated_again(opened: Callable[..., TrainingRun], tmp_path: Path) -> None:
    calm = opened()
    undisturbed = go(calm, tmp_path / "calm", []), saved(calm, tmp_path / "calm.pt")
    run, notes, failing = opened(), list[str](), Failing(1)

    def fails_without_gradients(*arguments: Any) -> None:
        if not torch.is_grad_enabled():
            failing(*arguments)

    run.loaded.model.base_model.layers[1].register_forward_hook(fails_without_gradients)
    steps = go(run, tmp_path / "out", notes)
    assert_equal_runs((steps, saved(run, tmp_path / "out.pt")), undisturbed)
    (note,) = notes
    assert note.endswith("it runs again with a smaller plan: whole rows, not joined, logits of 1,024 targets")
    adapted = adapted_layers(run.loaded.causal)
    assert adapted is not None
    assert adapted.recomputed == 0  # the plan of training stays


def test_other_errors_are_not_tried_again(opened: Callable[..., TrainingRun], tmp_path: Path) -> None:
    run, notes = opened(), list[str]()

    def fails(*_: Any) -> None:
        raise RuntimeError("another reason")

    run.loaded.model.base_model.layers[1].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="another reason"):
        go(run, tmp_path / "out", notes)
    assert notes == []


@dataclass
class Device:
    """Memory of which other processes take bytes; `used` is the peak of every step."""

    free: int
    used: int = 0

    @property
    def meter(self) -> MemoryMeter:
        return MemoryMeter(lambda: 0, lambda: self.used, lambda: None, lambda: self.free, total=80 << 30)


def measured(run: TrainingRun, device: Device, *, kept: float, recomputed: float) -> TrainingRun:
    """Return the run as if passes over its longest row had been measured: GiB with and without activations."""
    longest = 128  # rows are padded
    kept, recomputed = kept * 2**30 / longest, recomputed * 2**30 / longest
    peak = PeakBytes(0, kept, recomputed)
    probe = ModelProbe(False, LAYERS, 0, longest, peak, peak, 1.0)
    forecast = PlanForecast(probe, RunRows(longest, longest, step_tokens=longest), moved=0)
    memory = StepMemory(device.meter, int(kept * longest), record=forecast.as_record(), forecast=forecast.num_bytes)
    return replace(run, memory=memory)


@pytest.mark.parametrize(("taken", "layers"), [(9, 0), (20, 1), (60, 2)])
def test_a_step_whose_memory_was_taken_starts_with_a_plan_that_fits(
    opened: Callable[..., TrainingRun], tmp_path: Path, taken: int, layers: int
) -> None:
    calm = opened()
    undisturbed = go(calm, tmp_path / "calm", []), saved(calm, tmp_path / "calm.pt")
    device, notes, steps = Device(free=70 << 30), list[str](), []
    run = measured(opened(), device, kept=60.0, recomputed=20.0)
    for metrics in train(run, tmp_path / "out", note=notes.append):
        steps.append(metrics)
        if metrics.step == 2:
            device.free -= taken << 30
    assert_equal_runs((steps, saved(run, tmp_path / "out.pt")), undisturbed)
    chosen = json.loads((tmp_path / "out" / "run.json").read_text())["chosen"]
    # Two layers, of which one is in its backward pass: recomputing the first one is as good as both.
    assert chosen["checkpoint_layers"] == layers
    assert [note.partition(":")[0] for note in notes] == (
        []
        if not layers
        else [
            f"step 3 lacks memory on a rank, which has room for {70 - taken - 6.4:.1f} GiB; it runs with a smaller plan"
        ]
    )


def test_measured_steps_correct_the_forecast(opened: Callable[..., TrainingRun], tmp_path: Path) -> None:
    device, notes = Device(free=70 << 30, used=65 << 30), list[str]()
    run = measured(opened(), device, kept=60.0, recomputed=20.0)
    for metrics in train(run, tmp_path / "out", note=notes.append):
        if metrics.step == 2:
            device.free = 63 << 30  # more than the forecast, less than step 2 took
    (note,) = notes
    assert note.startswith("step 3 lacks memory on a rank")


def test_a_resumed_run_has_the_forecast_of_its_first_step(
    opened: Callable[..., TrainingRun], packed: Path, tmp_path: Path
) -> None:
    device, out, notes, done = Device(free=70 << 30, used=65 << 30), tmp_path / "out", list[str](), list[int]()
    run = measured(opened(checkpoint_every=1), device, kept=60.0, recomputed=20.0)
    for metrics in train(run, out, stop=lambda: len(done) == 1):
        done.append(metrics.step)
    assert done == [1, 2]
    assert json.loads((out / "run.json").read_text())["chosen"]["memory"]["excess"] == pytest.approx(5 << 30, rel=1e-4)
    device.free = 63 << 30
    options = replace(OPTIONS, checkpoint_every=1)
    again = resume_run(
        packed, tmp_path / "tiny.json", options, out, Ranks(), held_out=tmp_path / "held-out", meter=device.meter
    )
    assert again is not None
    assert [metrics.step for metrics in train(again, out, resume=True, note=notes.append)] == [3]
    assert notes[1].startswith("step 3 lacks memory on a rank, which has room for ")
    changed = recorded_memory(replace(again.options, pass_tokens=7), out, Ranks())
    assert changed == {}


def test_a_rank_that_others_wait_for_leaves_a_smaller_plan(opened: Callable[..., TrainingRun], tmp_path: Path) -> None:
    run, out = opened(), tmp_path / "out"
    begin(run, out, overwrite=False, resume=False)
    in_forward(run, Failing(2))
    second = replace(run, ranks=Ranks(rank=1, size=2))  # of a group that no other process has joined
    fitting = FittingRun(second, make_optimiser(run), note=print, record=partial(record_plan, out=out))
    with closing(fitting), pytest.raises(TreepackError, match=r"^out of memory in row") as caught:
        [fitting.step(number) for number in range(3)]
    assert "so continue with --resume, which takes the smaller plan in run.json: 1 layer recomputed" in str(
        caught.value
    )
    assert with_recorded(OPTIONS, out, Ranks()).checkpoint_layers == 1
    assert with_recorded(replace(OPTIONS, checkpoint_layers=0), out, Ranks()).checkpoint_layers == 0
