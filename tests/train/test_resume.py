"""An interrupted run continues as if it were not interrupted: stopped, killed, killed in a save, with damaged files."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.fresh_processes import PROCESSES, run_command
from support.oracle_model import packed_directory, tiny_config
from support.refusal import refusal
from support.strategies import make
from support.torchrun import free_port, pid_of_rank
from treepack.errors import TreepackError
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.saving.checkpoint import Checkpoints, latest
from treepack.train.saving.run_record import is_finished
from treepack.train.setup.opening import open_run
from treepack.train.step import StepMetrics

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, epochs=3, checkpoint_every=2, warmup_steps=2)
TIMES = ("seconds", "wait_seconds", "slowest_pass", "tokens_per_second", "tokens_flat_per_second")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(15)]
    return packed_directory(tmp_path_factory.mktemp("rows") / "packed", rollouts, capacity=40)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json")


@pytest.fixture(scope="module")
def whole(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    go(packed, tiny_config(folder / "tiny.json"), folder / "out")
    return folder / "out"


def go(
    packed: Path, config: Path, out: Path, *, until: int | None = None, **changes: Any
) -> tuple[list[StepMetrics], list[str]]:
    """Start or resume a run like a new process, up to step `until`; return its steps and notes."""
    run = open_run(packed, config, replace(OPTIONS, **changes))
    steps: list[StepMetrics] = []
    notes: list[str] = []
    iterator = train(
        run, out, resume=True, stop=lambda: until is not None and len(steps) + 1 >= until, note=notes.append
    )
    for metrics in iterator:
        steps.append(metrics)
        torch.rand(3)  # the caller may draw random numbers between steps, and a resumed run continues the sequence
    return steps, notes


def lines(out: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without times and rates."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def assert_equal_runs(out: Path, whole: Path) -> None:
    """Check that weights have the same bits and every line of the metrics is equal."""
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert lines(out) == lines(whole)


def test_a_stopped_run_goes_on_bit_for_bit(packed: Path, config: Path, whole: Path, tmp_path: Path) -> None:
    num_steps = len(lines(whole))
    parts: list[StepMetrics] = []
    for until in (3, 4, None):  # steps 1 to 3, step 4, and the rest
        steps, notes = go(packed, config, tmp_path / "parts", until=until)
        assert notes == ([f"resumed after step {len(parts)} of {num_steps}"] if parts else [])
        parts += steps
        assert is_finished(tmp_path / "parts") is (until is None)
    assert [metrics.step for metrics in parts] == list(range(1, num_steps + 1))
    assert_equal_runs(tmp_path / "parts", whole)


def test_a_closed_iterator_loses_at_most_the_steps_since_the_last_checkpoint(
    packed: Path, config: Path, whole: Path, tmp_path: Path
) -> None:
    steps = train(open_run(packed, config, OPTIONS), tmp_path / "out")
    for _ in range(5):  # checkpoint_every is 2: the last checkpoint is step 4
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert len(lines(tmp_path / "out")) == 5
    _, notes = go(packed, config, tmp_path / "out")
    assert notes[0].startswith("resumed after step 4 of")
    assert_equal_runs(tmp_path / "out", whole)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    packed: Path, config: Path, whole: Path, tmp_path: Path
) -> None:
    go(packed, config, tmp_path / "out", until=6)
    newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    data = next(newest.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    _, notes = go(packed, config, tmp_path / "out")
    assert len(notes) == 2
    assert "step-00000006 is damaged" in notes[0]
    assert notes[1].startswith("resumed after step 4 of")
    assert_equal_runs(tmp_path / "out", whole)


def test_lines_that_the_metrics_lost_are_noted(packed: Path, config: Path, whole: Path, tmp_path: Path) -> None:
    num_steps = len(lines(whole))
    go(packed, config, tmp_path / "parts", until=4)
    metrics = tmp_path / "parts" / "metrics.jsonl"
    kept = metrics.read_bytes().splitlines(keepends=True)[:2]
    metrics.write_bytes(b"".join(kept))
    _, notes = go(packed, config, tmp_path / "parts")
    assert notes == [
        f"resumed after step 4 of {num_steps}",
        "metrics.jsonl lacks 2 of the 4 steps before; the weights are whole",
    ]
    assert [line["step"] for line in lines(tmp_path / "parts")] == [1, 2, *range(5, num_steps + 1)]
    weights = [(out / "model.safetensors").read_bytes() for out in (whole, tmp_path / "parts")]
    assert weights[0] == weights[1]


def test_the_count_of_skipped_steps_outlives_the_process(packed: Path, config: Path, tmp_path: Path) -> None:
    def poison(out: Path, until: int | None) -> None:
        run = open_run(packed, config, replace(OPTIONS, max_skipped=3))
        run.loaded.model.base_model.norm.weight.register_hook(lambda gradient: gradient * torch.nan)
        seen: list[int] = []
        seen.extend(metrics.step for metrics in train(run, out, resume=True, stop=lambda: until is not None))

    # One skipped step in each process, which stops after it; the third process fails at its second step.
    poison(tmp_path / "out", 1)
    poison(tmp_path / "out", 1)
    assert "of 4 steps in a row was not finite" in refusal(poison, tmp_path / "out", None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"lr": 0.5}, "cannot resume: --lr was 0.01 when the run started and is 0.5 now"),
        ({"rows_per_step": 4}, "--rows-per-step was 2 when"),
        ({"dtype": "bf16"}, "--dtype was 'fp32' when"),
    ],
)
def test_another_run_is_not_resumed(
    packed: Path, config: Path, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    go(packed, config, tmp_path / "out", until=3)
    before = lines(tmp_path / "out")
    with pytest.raises(TreepackError, match=complaint):
        go(packed, config, tmp_path / "out", **changes)
    other = packed_directory(tmp_path / "other", [make("t", [1, 2, 3])], capacity=40)
    assert "cannot resume: PACKED has a different content" in refusal(go, other, config, tmp_path / "out")
    assert lines(tmp_path / "out") == before


def test_how_a_run_is_carried_out_may_change(packed: Path, config: Path, tmp_path: Path) -> None:
    go(packed, config, tmp_path / "out", until=3)
    _, notes = go(packed, config, tmp_path / "out", checkpoint_every=0, keep=1, checkpoint_layers="all")
    assert notes[0].startswith("resumed after step 3 of")


def test_an_unfinished_run_is_neither_overwritten_nor_resumed_unasked(
    packed: Path, config: Path, tmp_path: Path
) -> None:
    go(packed, config, tmp_path / "out", until=3)
    assert "is not complete; continue it with --resume or replace it with --overwrite" in refusal(
        list, train(open_run(packed, config, OPTIONS), tmp_path / "out")
    )
    steps = train(open_run(packed, config, OPTIONS), tmp_path / "out", overwrite=True)
    assert next(steps).step == 1


def test_a_model_that_could_not_be_written_is_written_by_resume(
    packed: Path, config: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = open_run(packed, config, OPTIONS), tmp_path / "out"

    def full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if path.match("*/.weights.partial/*") and "w" in mode:
            raise OSError(28, "No space left on device")
        return opened(path, mode, *args, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(TreepackError, match=r"No space left on device.*free disk space and continue with --resume"):
        list(train(run, out))
    monkeypatch.undo()
    assert not is_finished(out)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "metrics.jsonl", "run.json"]
    steps, notes = go(packed, config, out)
    num_steps = len(lines(whole))
    assert (steps, notes) == ([], [f"resumed after step {num_steps} of {num_steps}"])
    assert_equal_runs(out, whole)


def test_the_last_checkpoint_and_the_model_are_whole_without_each_other(
    packed: Path, config: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "model.safetensors").unlink()
    steps, _ = go(packed, config, out, epochs=4)
    assert [metrics.step for metrics in steps] == [10, 11, 12]
    shutil.rmtree(out / "checkpoints")
    assert load_file(out / "model.safetensors").keys() == load_file(whole / "model.safetensors").keys()


def test_a_run_killed_after_its_last_checkpoint_writes_the_model_without_training(
    packed: Path, config: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("treepack.train.loop.stage_model", die)
        with pytest.raises(KeyboardInterrupt):
            go(packed, config, out)
    assert not is_finished(out)
    assert go(packed, config, out)[0] == []
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    assert_equal_runs(out, whole)


def test_a_last_checkpoint_that_fails_is_noted_and_the_model_is_finished(
    packed: Path, config: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TreepackError("the disk is full")

    monkeypatch.setattr(Checkpoints, "save", fail)
    _, notes = go(packed, config, tmp_path / "out", checkpoint_every=99)
    assert notes == ["the disk is full"]
    assert is_finished(tmp_path / "out")
    assert_equal_runs(tmp_path / "out", whole)


def test_another_configuration_of_the_model_is_not_resumed(packed: Path, config: Path, tmp_path: Path) -> None:
    go(packed, config, tmp_path / "out", until=3)
    moved = config.rename(tmp_path / "elsewhere.json")
    go(packed, moved, tmp_path / "out", until=1)  # another path to the same configuration is accepted
    tiny_config(config, rms_norm_eps=0.5)
    assert "cannot resume: the config of --model has a different content" in refusal(
        go, packed, config, tmp_path / "out"
    )


def test_the_output_may_be_a_link_and_what_it_held_is_gone(
    packed: Path, config: Path, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "there")
    out = tmp_path / "link"
    out.symlink_to(tmp_path / "there", target_is_directory=True)
    (out / "foreign").mkdir()
    list(train(open_run(packed, config, replace(OPTIONS, epochs=1)), out, overwrite=True))
    assert out.is_symlink()
    assert is_finished(tmp_path / "there")
    assert not (out / "foreign").exists()
    assert [line["step"] for line in lines(out)] == [1, 2, 3]


def command(packed: Path, config: Path, out: Path) -> list[str]:
    """Return the command of a run of small steps, each with a checkpoint: about half of the kills hit a save."""
    options = {"--model": config, "--out": out, "--steps": 60, "--lr": 1e-2, "--rows-per-step": 2}
    words = [str(word) for pair in options.items() for word in pair]
    return ["train", str(packed), *words, "--device", "cpu", "--checkpoint-every", "1", "--resume"]


def start(arguments: list[str], folder: Path, **environment: object) -> BaseProcess:
    process = PROCESSES.Process(target=run_command, args=(arguments, folder, environment), daemon=True)
    process.start()
    return process


def wait_for_lines(out: Path, count: int, runs: Callable[[], bool]) -> None:
    """Wait until the run has written that many lines, or ends."""
    log = out / "metrics.jsonl"
    while runs() and not (log.exists() and log.read_bytes().count(b"\n") >= count):
        time.sleep(0.002)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_and_stopped_by_sigterm_ends_bit_for_bit(
    packed: Path, config: Path, tmp_path: Path
) -> None:
    generator = random.Random(0)
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_to_its_end = start(command(packed, config, whole), tmp_path)
    run_to_its_end.join()
    assert run_to_its_end.exitcode == 0
    for sign in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before = len(lines(out)) if out.exists() else 0
        process = start(command(packed, config, out), tmp_path)  # the same command each time, always with --resume
        wait_for_lines(out, before + generator.randint(3, 8), process.is_alive)
        time.sleep(generator.random() * 0.05)
        assert process.pid is not None
        os.kill(process.pid, sign)
        process.join()
        # SIGTERM ends a run in order, after its step, with status 3; a killed process has the signal as its exit code.
        assert process.exitcode == (3 if sign == signal.SIGTERM else -sign)
        assert not is_finished(out)
        if sign == signal.SIGTERM:
            assert "of 60; continue with --resume" in (tmp_path / "stdout").read_text()
    last = start(command(packed, config, out), tmp_path)
    last.join()
    assert last.exitcode == 0
    assert "resumed after step" in (tmp_path / "stderr").read_text()
    assert_equal_runs(out, whole)
    assert not [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]


def lose_a_rank(arguments: list[str], out: Path, victim: int) -> str:
    """Train over two ranks of torchrun, kill one after step 3 and the checkpoint of step 2; return stderr."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "treepack", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for_lines(out, 3, lambda: launcher.poll() is None)
        while launcher.poll() is None and not (out / "checkpoints" / "step-00000002").exists():
            time.sleep(0.002)  # step 4 saves the next one, and waits for this one before
        os.kill(pid_of_rank(victim, launcher.pid), signal.SIGKILL)
        try:
            _, errors = launcher.communicate(timeout=60)
        finally:
            launcher.terminate()  # if it has not ended, because a rank waits for the lost one; torchrun ends its ranks
        assert launcher.returncode == 1
    return errors


def run_in_ranks(arguments: list[str], folder: Path, size: int) -> None:
    """Run the command in so many processes with the environment that torchrun gives them; 1: alone, without it."""
    port, ranks = free_port(), []
    for rank in range(size):
        own = folder / f"{size}-{rank}"
        own.mkdir()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(start(arguments, own, **(place | meeting if size > 1 else {})))
    for process in ranks:
        process.join()
    errors = [(folder / f"{size}-{rank}" / "stderr").read_text() for rank in range(size)]
    assert [process.exitcode for process in ranks] == [0] * size, errors
    assert "resumed after step" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "victim"), [("--sequence-ranks", 0), ("--expert-ranks", 1)])
def test_a_run_that_lost_a_rank_goes_on_alone_and_over_four_ranks(
    packed: Path, tmp_path: Path, option: str, victim: int
) -> None:
    fields: dict[str, Any] = {}
    if option == "--expert-ranks":
        fields = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = tiny_config(tmp_path / "tiny.json", **fields)
    whole, alone, shared = (tmp_path / name for name in ("whole", "alone", "shared"))

    def arguments(out: Path, *more: str) -> list[str]:
        steps = ["--steps", "6", "--checkpoint-every", "2", "--rows-per-step", "2", "--lr", "0.01"]
        return ["train", str(packed), "--model", str(config), "--device", "cpu", *steps, "--out", str(out), *more]

    undisturbed = start(arguments(whole), tmp_path)
    undisturbed.join()
    assert undisturbed.exitcode == 0
    errors = lose_a_rank(arguments(alone, option, "2"), alone, victim)
    assert "Signal 9 (SIGKILL) received" in errors
    assert "stopped by a fault of its own" not in errors  # the other rank has no fault to report
    assert not is_finished(alone)
    newest, damaged = latest(alone / "checkpoints")
    assert newest is not None
    assert (newest.world_size, damaged) == (2, ())
    shutil.copytree(alone, shared)
    run_in_ranks(arguments(alone, "--resume"), tmp_path, 1)
    run_in_ranks(arguments(shared, "--resume", option, "2"), tmp_path, 4)
    for out in (alone, shared):
        for record, reference in zip(lines(out), lines(whole), strict=True):
            assert record.keys() == reference.keys()
            for name, value in reference.items():
                assert record[name] == pytest.approx(value, rel=2e-5, abs=1e-6), (out, name)
        assert all(path.name.startswith("step-") for path in (out / "checkpoints").iterdir())
