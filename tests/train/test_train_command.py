"""`treepack train` as a user runs it: resumed, over two processes of torchrun, with curves and TensorBoard."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from treepack.files.lock import lock

TREEPACK = Path(sys.executable).parent / "treepack"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return the arguments of a run of eight steps: a tiny model on trajectories that share prompts."""
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(12)]
    packed = packed_directory(tmp_path / "packed", rollouts, capacity=40)
    config = tiny_config(tmp_path / "tiny.json")
    options = ["--model", str(config), "--device", "cpu", "--steps", "8", "--rows-per-step", "3", "--lr", "0.01"]
    return ["train", str(packed), *options, "--out", str(tmp_path / "out")]


def test_tensorboard_shows_every_step(treepack: Run, arguments: list[str], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = treepack(*arguments, "--report-to", "tensorboard")
    assert done.status == 0
    assert "time spent waiting for rows" in done.out
    board = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    board.Reload()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [event.step for event in board.Scalars("train/loss")] == [line["step"] for line in lines] == [*range(1, 9)]


def test_a_complete_run_is_left_as_it_is(treepack: Run, arguments: list[str], tmp_path: Path) -> None:
    assert treepack(*arguments).status == 0
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    done = treepack(*arguments, "--resume")
    assert done.status == 0
    assert "is already finished, with 8 steps" in done.err
    assert "importing torch" not in done.err
    assert f"written {tmp_path / 'out'}" in done.err
    fewer = treepack(*arguments, "--steps", "5", "--resume")
    assert fewer.status == 1
    assert "importing torch" not in fewer.err
    assert "out: 8 steps are done and this run has 5; give --steps of at least 8" in fewer.err
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"), [("num_steps", "8"), ("last_step", None), ("options", None), ("options", {})]
)
def test_a_finished_run_with_a_damaged_record_is_refused_in_a_sentence(
    treepack: Run, arguments: list[str], tmp_path: Path, name: str, value: object
) -> None:
    out = tmp_path / "out"
    assert treepack(*arguments, "--steps", "1").status == 0
    record = json.loads((out / "train.json").read_text())
    (out / "train.json").write_text(json.dumps(record | {name: value}))
    done = treepack(*arguments, "--steps", "1", "--resume")
    assert done.status == 1
    assert done.err == f"treepack: {out}/train.json: is damaged (no record of a run); remove it and resume the run\n"
    (out / "train.json").replace(out / "run.json")
    done = treepack(*arguments, "--steps", "2", "--resume")
    assert done.err == f"treepack: {out}/run.json: is damaged (no record of a run); remove {out} and start again\n"


def test_a_run_with_more_steps_opens_its_rows_once(treepack: Run, arguments: list[str]) -> None:
    assert treepack(*arguments).status == 0
    done = treepack(*arguments, "--steps", "9", "--resume")
    assert done.status == 0, done.err
    assert "resumed after step 8 of 9" in done.err
    assert done.err.count("] opening ") == 1


def test_the_help_has_every_option_in_a_section(treepack: Run) -> None:
    done = treepack("train", "--help")
    assert done.status == 0
    first, heading, _ = done.out.partition("\nHeld-out rows and checkpoints:\n  --eval-every")
    assert heading
    assert len(re.findall(r"^  --", first, re.MULTILINE)) == 31
    assert "Other options" not in done.out


def test_held_out_rows_are_in_the_line_of_their_step_and_in_the_summary(
    treepack: Run, arguments: list[str], tmp_path: Path
) -> None:
    done = treepack(*arguments, "--eval", arguments[1], "--eval-every", "4", "--patience", "3")
    assert done.status == 0, done.err
    steps = [line for line in done.err.splitlines() if line.startswith("training: step ")]
    assert ["held-out loss" in line for line in steps] == [False, False, False, True] * 2
    assert re.search(r"lowest held-out loss +\d\.\d{4} at step [48]\n", done.out)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--patience", "3"], "--patience counts evaluations; give held-out rows with --eval"),
        (["--mix", "0.5,half"], "'0.5,half' is not a list of numbers such as 0.7,0.3"),
        (["--resume", "--dry-run"], "--dry-run shows the plan of a new run; omit it or --resume."),
        (["--resume", "--overwrite"], "give one of them"),
    ],
)
def test_options_that_mean_nothing_or_exclude_each_other_are_wrong_usage(
    treepack: Run, arguments: list[str], options: list[str], complaint: str
) -> None:
    done = treepack(*arguments, *options)
    assert (done.status, done.out) == (2, "")
    assert complaint in done.err


@pytest.mark.parametrize(("rewards", "noted"), [((1.0, 0.0), True), ((1.0, 1.0), False)])
def test_supervised_training_of_good_and_bad_rollouts_is_noted(
    treepack: Run, arguments: list[str], tmp_path: Path, rewards: tuple[float, float], noted: bool
) -> None:
    rollouts = [make(f"t{i}", [5, 6, 7 + i], reward=reward) for i, reward in enumerate(rewards)]
    arguments[1] = str(packed_directory(tmp_path / "rewarded", rollouts, capacity=40))
    done = treepack(*arguments, "--quiet")
    assert done.status == 0, done.err
    assert ("which --loss sft does not use: it trains good and bad rollouts alike" in done.err) is noted


def test_only_a_run_is_continued(treepack: Run, arguments: list[str], tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "packed", tmp_path / "out")
    done = treepack(*arguments, "--resume")
    assert done.err == f"treepack: {tmp_path / 'out'} has no run to continue; choose another --out\n"


def test_an_unfinished_run_is_named_as_such_before_anything_is_loaded(
    treepack: Run, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    # run.json without train.json is an unfinished run, whatever it contains.
    (tmp_path / "out" / "run.json").write_text('{"format": "treepack-train"}')
    done = treepack(*arguments)
    assert (done.status, done.out) == (1, "")
    assert "contains a run that is not complete; continue it with --resume or replace it with --overwrite" in done.err


def test_a_job_can_always_be_started_with_resume(treepack: Run, arguments: list[str], tmp_path: Path) -> None:
    assert treepack(*arguments, "--resume").status == 0
    assert (tmp_path / "out" / "train.json").exists()


def test_rows_are_read_from_any_filesystem(treepack: Run, arguments: list[str], tmp_path: Path) -> None:
    assert treepack(*arguments).status == 0
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    arguments[1] = Path(arguments[1]).as_uri()  # file:///...
    done = treepack(*arguments, "--overwrite")
    assert done.status == 0, done.err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
    done = treepack("train", "nosuch://bucket/packed", *arguments[2:], "--overwrite")
    assert (done.status, done.out) == (1, "")
    assert "nosuch" in done.err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected


@pytest.mark.slow
def test_two_processes_print_their_common_refusal_once(arguments: list[str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run([*launch, str(TREEPACK), *arguments, "--mix", "1,1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("treepack: --mix has 2 of 1 shares") == 1
    # Wrong usage has lines of its own.
    done = subprocess.run([*launch, str(TREEPACK), *arguments, "--lora-rank", "0"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("Error: Invalid value for '--lora-rank'")) == (1, 1)


@pytest.mark.parametrize(
    ("rank", "sentence", "waits"),
    [
        (0, "mix has 2 shares", []),
        (1, "mix has 2 shares", [3.0]),
        (0, "m: another rank refused the model; see the error of that rank", [6.0]),
        (1, "this is not one run, because rank 1 and rank 0 differ: lr is 1 and 2", [3.0]),
    ],
)
def test_a_rank_waits_for_those_that_have_the_same_error_or_its_cause(
    rank: int, sentence: str, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    import_module("treepack_cli.launch").wait_for_first_rank(sentence)
    assert waited == waits


def test_what_one_process_does_is_refused_in_several(
    treepack: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    done = treepack(*arguments, "--verify")
    assert (done.status, done.out) == (1, "")
    assert "--verify runs in one process; start it without torchrun" in done.err
    packed, model = arguments[1], arguments[3]
    done = treepack("logprobs", packed, "--model", model, "--out", "scored")
    assert (done.status, done.out) == (1, "")
    assert "treepack logprobs runs in one process" in done.err


def test_a_world_size_that_is_not_a_number_is_one_sentence(
    treepack: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "x")
    sentence = "WORLD_SIZE is 'x'; expected the number of ranks, so start them with torchrun"
    assert treepack(*arguments) == (1, "", f"treepack: {sentence}\n")
    assert treepack(*arguments, "--verify").err == "treepack: --verify runs in one process; start it without torchrun\n"


def test_every_part_and_every_step_has_a_line_off_a_terminal_unless_quiet(treepack: Run, arguments: list[str]) -> None:
    lines = treepack(*arguments).err.splitlines()
    stages = [line.partition("] ")[2] for line in lines if line.startswith("[")]
    # The choice of attention is named once in a process.
    assert [stage.split()[0] for stage in stages if not stage.startswith("attention:")] == [
        *("importing", "opening", "loading", "probing", "plan:", "step", "writing", "writing")
    ]
    steps = [line for line in lines if line.startswith("training: step ")]
    assert [int(line.split()[2]) for line in steps] == [*range(1, 9)]
    assert all(re.search(r"of 8, loss \d.*, lr .*, grad norm .*, tok/s ", line) for line in steps)
    assert treepack(*arguments, "--overwrite", "--quiet").err == ""


def test_a_run_that_another_process_trains_is_refused_before_the_model_is_loaded(
    treepack: Run, arguments: list[str], tmp_path: Path
) -> None:
    start, end = threading.Event(), threading.Event()

    def train_elsewhere() -> None:
        with lock(tmp_path / "out"):
            start.set()
            end.wait()

    # Another thread, because a lock is shared within a thread.
    thread = threading.Thread(target=train_elsewhere)
    thread.start()
    start.wait()
    for more in ([], ["--resume"]):
        done = treepack(*arguments, *more)
        assert (done.status, done.out) == (1, "")
        assert "is being written by process" in done.err
        assert "loading the weights" not in done.err
    end.set()
    thread.join()
    assert treepack(*arguments).status == 0


def test_an_attention_that_cannot_run_is_refused_before_the_model_is_loaded(
    treepack: Run, arguments: list[str]
) -> None:
    done = treepack(*arguments, "--attention", "flash")
    assert (done.status, done.out) == (1, "")
    assert "flash needs a Hopper or Blackwell GPU" in done.err
    assert "loading" not in done.err


def test_compiled_code_is_kept_in_the_home_directory(
    treepack: Run, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert treepack(*arguments).status == 0
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "treepack" / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert treepack(*arguments, "--resume").status == 0
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_a_dry_run_prints_the_plan_and_writes_nothing(treepack: Run, arguments: list[str], tmp_path: Path) -> None:
    place = arguments.index("--out")
    out = Path(arguments[place + 1])
    done = treepack(*arguments[:place], *arguments[place + 2 :], "--dry-run", "--checkpoint-layers", "all")
    assert done.status == 0
    shown = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in done.out.splitlines())
    assert shown["steps"] == "8"
    assert (shown["carry"], shown["compile"], shown["pass tokens"]) == ("off", "False", "each row alone")
    assert int(shown["checkpoint layers"]) > 0
    assert shown["memory and time"].startswith("no forecast: torch counts no memory on a CPU")
    assert not out.exists()
    given = treepack(*arguments, "--dry-run")
    assert given.status == 0
    assert not out.exists()
