"""Signals that stop a run: the first ends its step and writes a checkpoint, a second Ctrl-C aborts; on every rank."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from support.torchrun import free_port
from treepack.train.saving import long_parts
from treepack.train.saving.checkpoint import latest
from treepack.train.saving.run_record import is_finished

STEPS = 400
NOTE = "note: the run ends after this step, with a checkpoint; Ctrl-C again aborts it"
# A save that takes longer than any test, as that of a large model takes minutes.
SLOW_SAVE = """
import time
from treepack.train.saving import checkpoint
write = checkpoint.Checkpoints._write_files
def slow(*arguments):
    print("saving", flush=True)
    time.sleep(300)
checkpoint.Checkpoints._write_files = slow
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, 20 + i % 4, 21]) for i in range(6)]
    return packed_directory(tmp_path_factory.mktemp("rows") / "packed", rollouts, capacity=40)


@pytest.fixture
def arguments(packed: Path, tmp_path: Path) -> list[str]:
    config = tiny_config(tmp_path / "tiny.json")
    words = f"--steps {STEPS} --rows-per-step 1 --device cpu --checkpoint-every {STEPS}"
    return ["train", str(packed), "--model", str(config), "--out", str(tmp_path / "out"), *words.split()]


Started = subprocess.Popen[str]


def start(arguments: list[str], *, first: str = "", **environment: object) -> Started:
    """Start `treepack` in a process group of its own, after the program `first`."""
    program = f"{first}\nfrom treepack_cli import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: str(value) for name, value in environment.items()},
        start_new_session=True,
    )


def steps_of(out: Path) -> list[int]:
    log = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def wait_until(condition: Callable[[], bool], *processes: Started) -> None:
    while not condition():
        assert all(process.poll() is None for process in processes), [each.communicate() for each in processes]
        time.sleep(0.01)


def checkpoint_step(out: Path) -> int | None:
    newest, _ = latest(out / "checkpoints")
    return None if newest is None else newest.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, True)]
)
def test_the_first_signal_ends_the_step_and_names_resume(
    arguments: list[str], tmp_path: Path, number: signal.Signals, whole_group: bool
) -> None:
    out = tmp_path / "out"
    process = start(arguments)
    wait_until(lambda: len(steps_of(out)) >= 2, process)
    # A terminal sends Ctrl-C to all processes of the group, `kill` sends a signal to one.
    (os.killpg if whole_group else os.kill)(process.pid, number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    done = steps_of(out)[-1]
    assert done < STEPS
    assert re.search(rf"stopped\s+after step {done} of {STEPS}; continue with --resume", stdout)
    assert checkpoint_step(out) == done
    assert not is_finished(out)
    assert (NOTE in stderr) == (number == signal.SIGINT)
    assert f"writing the checkpoint of step {done}" in stderr
    assert "Aborted" not in stderr
    assert "next: the same command with --resume" in stderr
    resumed = start([*arguments, "--resume", "--steps", str(done + 1)])
    _, stderr = resumed.communicate(timeout=120)
    assert resumed.returncode == 0
    assert f"resumed after step {done}" in stderr
    assert is_finished(out)


@pytest.mark.slow
def test_a_second_ctrl_c_aborts_even_while_a_checkpoint_is_written(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(arguments, first=SLOW_SAVE)
    wait_until(lambda: len(steps_of(out)) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    assert stderr.endswith("Aborted!\n")
    assert "Traceback" not in stderr
    assert checkpoint_step(out) is None
    again = start([*arguments, "--resume", "--steps", "2"])
    again.communicate(timeout=120)
    assert again.returncode == 0
    assert is_finished(out)
    assert not [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_aborts_at_once(arguments: list[str], tmp_path: Path) -> None:
    process = start(arguments)
    assert process.stderr is not None
    assert "importing torch" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.endswith("Aborted!\n")
    assert steps_of(tmp_path / "out") == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_every_rank_ends_with_the_status_of_a_stopped_run(
    arguments: list[str], tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    out = tmp_path / "out"
    place: dict[str, Any] = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    ranks = [start(arguments, RANK=rank, LOCAL_RANK=rank, **place) for rank in range(2)]
    wait_until(lambda: len(steps_of(out)) >= 2, *ranks)
    for rank in ranks[not to_all :]:  # all of them, or the second alone
        os.kill(rank.pid, number)
    ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3], ends
    assert checkpoint_step(out) == steps_of(out)[-1] < STEPS
    assert "continue with --resume" in ends[0][0]
    assert ends[1] == ("", "")


@pytest.mark.slow
def test_torchrun_passes_the_signal_on_and_both_ranks_write_the_checkpoint(
    arguments: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher = subprocess.Popen(
        [*launch, "-m", "treepack", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: len(steps_of(out)) >= 2, launcher)
    os.killpg(launcher.pid, signal.SIGTERM)
    stdout, stderr = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert re.search(rf"stopped\s+after step \d+ of {STEPS}; continue with --resume", stdout), stderr
    assert checkpoint_step(out) == steps_of(out)[-1] < STEPS


def test_signals_are_handled_as_before_after_the_steps_and_sigterm_not_after_an_error() -> None:
    signals = import_module("treepack_cli.stop_signals").StopSignals
    ended: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: ended.append(number)) for number in numbers}
    try:
        with pytest.raises(ConnectionError), signals(leads=False).handled():
            raise ConnectionError
        for number in numbers:  # as torchrun does if a rank is lost
            os.kill(os.getpid(), number)
        assert ended == [signal.SIGINT]
        signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
        for number in numbers:
            stop = signals(leads=False)
            with stop.handled():
                assert not stop.received()
                os.kill(os.getpid(), number)
                assert stop.received()
            os.kill(os.getpid(), number)
            assert ended.pop() == number
        assert ended == [signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_long_part_has_a_line_again_and_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "treepack")
    with long_parts.long_part("a short part", at_start=False):
        pass
    assert caplog.messages == []
    monkeypatch.setattr(long_parts, "INTERVAL", 0.01)
    enough = threading.Event()
    with long_parts.long_part("writing the checkpoint of step 7"):
        while len(caplog.messages) < 3:
            enough.wait(0.01)
    number = len(caplog.messages)
    assert caplog.messages[0] == "writing the checkpoint of step 7"
    assert all(re.fullmatch(r"writing the checkpoint of step 7: \d+ s so far", line) for line in caplog.messages[1:])
    enough.wait(0.05)
    assert len(caplog.messages) == number
