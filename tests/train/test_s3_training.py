"""Training from and to an S3 server: the results of local runs, through kills, outages and damage."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet as pq
from torch.utils.data import DataLoader

from support.command_line import Run
from support.fresh_processes import PROCESSES, run_command
from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.s3 import CUT, Store
from support.strategies import make
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.files import parts
from treepack.files.remote import retries as patience
from treepack.files.remote.address import as_path
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.saving.run_record import is_finished
from treepack.train.setup.opening import open_run
from treepack.train.step import StepMetrics

pytestmark = pytest.mark.s3

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, epochs=3, checkpoint_every=2, warmup_steps=2)
TIMES = ("seconds", "wait_seconds", "slowest_pass", "eval_seconds", "tokens_per_second", "tokens_flat_per_second")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: Store) -> Path:
    """A packed directory of several parts, which is also at s3.address("packed")."""
    monkeypatch.setattr(parts, "PART_TOKENS", 40)
    monkeypatch.setattr("treepack.pack.files.GROUP_TOKENS", 20)
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()]) for i in range(15)]
    path = packed_directory(tmp_path / "packed", rollouts, capacity=40)
    assert len([*path.glob("part-*")]) > 2
    s3.upload(path, "packed")
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json")


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_FIRST_PAUSE", 0.1)
    monkeypatch.setattr(patience, "_LONGEST_PAUSE", 0.2)


def go(
    packed: Path | str, model: Path | str, out: Path | str, *, until: int | None = None, **changes: Any
) -> tuple[list[StepMetrics], list[str]]:
    """Start or resume a run like a new process, up to step `until`; return its steps and notes."""
    run = open_run(packed, model, replace(OPTIONS, **changes))
    steps: list[StepMetrics] = []
    notes: list[str] = []
    stop = lambda: until is not None and len(steps) + 1 >= until  # noqa: E731
    for metrics in train(run, out, resume=True, stop=stop, note=notes.append):
        steps.append(metrics)
        torch.rand(3)
    return steps, notes


def lines(content: bytes) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without times and rates."""
    records = [json.loads(line) for line in content.splitlines()]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def assert_equal_runs(s3: Store, name: str, whole: Path) -> None:
    """Check that the remote run has the files of the local one, weights with the same bits, and equal metrics."""
    assert s3.read(f"{name}/model.safetensors") == (whole / "model.safetensors").read_bytes()
    assert lines(s3.read(f"{name}/metrics.jsonl")) == lines((whole / "metrics.jsonl").read_bytes())
    local = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    remote = {key.removeprefix(f"{name}/") for key in s3.names(f"{name}/")}
    assert remote == local


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait at most a minute until `holds` returns True."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    pytest.fail("it did not become true within a minute")


def checkpoints(s3: Store, name: str) -> list[str]:
    """Return the names of the complete checkpoints of a run."""
    return [key.split("/")[-2] for key in s3.names(f"{name}/checkpoints/") if key.endswith("/checkpoint.json")]


def in_cache(name: str) -> list[Path]:
    return [path for path in (Path(os.environ["TREEPACK_CACHE"]) / name).rglob("*") if path.is_file()]


def test_a_remote_run_is_the_local_one(packed: Path, config: Path, tmp_path: Path, s3: Store) -> None:
    whole, _ = go(packed, config, tmp_path / "whole")
    steps, notes = go(s3.address("packed"), config, s3.address("run"))
    assert (len(steps), notes) == (len(whole), [])
    assert_equal_runs(s3, "run", tmp_path / "whole")
    record, local = (
        json.loads(text) for text in (s3.read("run/train.json"), (tmp_path / "whole/train.json").read_text())
    )
    assert record == local | {"packed": s3.address("packed")}
    # Each object that others depend on comes after them.
    puts = [path.split("?")[0].split("/run/")[1] for method, path in s3.requests if method == "PUT" and "/run/" in path]
    assert puts[0] == "run.json"
    assert puts[-1] == "train.json"
    first, last = (f"checkpoints/step-00000002/{name}" for name in ("rank-00000-000.safetensors", "checkpoint.json"))
    assert puts.index(first) < puts.index(last)
    assert in_cache("runs") == []
    assert len(in_cache("parts")) == len([*packed.glob("part-*")])


def test_the_best_model_of_a_remote_run_is_that_of_the_local_one(
    packed: Path, config: Path, tmp_path: Path, s3: Store
) -> None:
    changes = replace(OPTIONS, epochs=9, lr=1.0, eval_every=1, patience=2, keep=1, warmup_steps=0)
    notes: list[str] = []
    for rows, out in ((packed, tmp_path / "whole"), (s3.address("packed"), s3.address("run"))):
        list(train(open_run(rows, config, changes, held_out=rows), out, note=notes.append))
    assert_equal_runs(s3, "run", tmp_path / "whole")
    record = json.loads(s3.read("run/train.json"))
    best, last = (f"step-{record[name]:08d}" for name in ("best_step", "last_step"))
    assert sorted(checkpoints(s3, "run")) == [best, last]
    assert len(notes) == 4
    assert notes[:2] == notes[2:]  # the end, and the step of the model


def test_a_stopped_run_continues_and_may_be_extended(packed: Path, config: Path, s3: Store) -> None:
    out = s3.address("run")
    for until in (3, 4):
        _, notes = go(s3.address("packed"), config, out, until=until)
        assert not is_finished(as_path(out))
    assert notes == ["resumed after step 3 of 9"]
    assert checkpoints(s3, "run") == ["step-00000006", "step-00000007"]
    steps, notes = go(packed, config, out)
    assert notes == ["resumed after step 7 of 9"]
    assert is_finished(as_path(out))
    steps, notes = go(packed, config, out)
    assert steps == []
    assert "is already finished, with 9 steps" in notes[0]
    steps, notes = go(s3.address("packed"), config, out, epochs=4)
    assert [metrics.step for metrics in steps] == [10, 11, 12]
    assert notes[0] == "resumed after step 9 of 12"
    assert json.loads(s3.read("run/train.json"))["num_steps"] == 12
    assert [record["step"] for record in lines(s3.read("run/metrics.jsonl"))] == list(range(1, 13))


def test_ids_of_an_unfinished_run_are_refused(packed: Path, config: Path, s3: Store, treepack: Run) -> None:
    out = s3.address("run")
    go(packed, config, out, until=3)
    with pytest.raises(TreepackError, match=r"s3://.*/run contains a run that is not complete; continue it with"):
        list(train(open_run(packed, config, OPTIONS), out))
    with pytest.raises(TreepackError, match=r"s3://.*/run: cannot resume: --lr was 0.01 when the run started"):
        go(packed, config, out, lr=0.5)
    steps = list(train(open_run(packed, config, OPTIONS), out, overwrite=True))
    assert steps[0].step == 1
    with pytest.raises(TreepackError, match=r"s3://.*/run exists; choose another --out or give --overwrite"):
        list(train(open_run(packed, config, OPTIONS), out))
    s3.write("other/notes.txt", b"mine")
    with pytest.raises(TreepackError, match=r"s3://.*/other exists and was not written by treepack"):
        list(train(open_run(packed, config, OPTIONS), s3.address("other"), overwrite=True))
    assert s3.names("other/") == ["other/notes.txt"]


def _train_command(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # of the server, which started after the process that forks this one
    run_command(arguments, folder)


def start_command(folder: Path, *arguments: object) -> BaseProcess:
    """Start `treepack` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "TREEPACK_"))}
    process = PROCESSES.Process(target=_train_command, args=([*map(str, arguments)], folder, environment))
    process.start()
    return process


def wait_for(condition: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 120
        time.sleep(0.02)


TRAIN = "--lr 1e-2 --rows-per-step 2 --epochs 3 --checkpoint-every 2 --warmup-steps 2 --device cpu --quiet".split()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_is_resumed_from_the_store_alone(
    packed: Path, config: Path, tmp_path: Path, s3: Store, treepack: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    go(packed, config, tmp_path / "whole")
    # The upload of the second checkpoint takes long, so the process is killed in the middle of it.
    reached, killed = Event(), Event()

    def fault(method: str, path: str) -> None:
        if method == "PUT" and "step-00000004/rank-" in path and not killed.is_set():
            reached.set()
            killed.wait(120)

    s3.fault = fault
    arguments = ["train", s3.address("packed"), "--model", config, "--out", s3.address("run"), *TRAIN]
    process = start_command(tmp_path, *arguments)
    wait_for(reached.is_set)
    result = treepack(*arguments, "--resume")
    assert result.status == 1
    assert f"{s3.address('run')}: is being written by process {process.pid}" in result.err
    os.kill(process.pid or 0, number)
    time.sleep(1)
    killed.set()
    process.join(60)
    assert process.exitcode == (-number if number == signal.SIGKILL else 3)
    if number == signal.SIGINT:
        assert lines(s3.read("run/metrics.jsonl"))[-1]["step"] >= 4
    # Another machine: nothing of this one's cache is left.
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "other"))
    result = treepack(*arguments, "--resume")
    assert result.status == 0, result.err
    assert "resumed after step" in result.err
    assert s3.read("run/model.safetensors") == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert lines(s3.read("run/metrics.jsonl")) == lines((tmp_path / "whole" / "metrics.jsonl").read_bytes())
    assert checkpoints(s3, "run") == ["step-00000008", "step-00000009"]
    assert in_cache("runs") == []


def test_the_server_is_away_in_the_middle_of_an_epoch_and_of_an_upload(
    packed: Path, config: Path, tmp_path: Path, s3: Store, quick_retries: None
) -> None:
    go(packed, config, tmp_path / "whole")
    refused: dict[str, list[str]] = {"GET": [], "PUT": []}

    def fault(method: str, path: str) -> int | None:
        """Cut the first connections for a part, and for files of the checkpoint of step 4."""
        wanted = {"GET": "/packed/part-00001", "PUT": "/step-00000004/"}.get(method)
        if trained and wanted and wanted in path and len(refused[method]) < 12:
            refused[method].append(path)
            return CUT
        return None

    trained: list[StepMetrics] = []
    s3.fault = fault
    run = open_run(s3.address("packed"), config, OPTIONS)
    assert isinstance(run.dataset, PackedDataset)
    run.dataset._reader._files.clear()
    for metrics in train(run, s3.address("run")):
        trained.append(metrics)
        torch.rand(3)
    assert len(refused["PUT"]) == 12
    assert_equal_runs(s3, "run", tmp_path / "whole")


def test_an_outage_that_lasts_is_one_sentence_and_the_files_stay(
    packed: Path, config: Path, tmp_path: Path, s3: Store, quick_retries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "OUTAGE_SECONDS", 0.5)
    go(packed, config, tmp_path / "whole")
    s3.fault = lambda method, path: CUT if method == "PUT" and "/step-00000004/" in path else None
    with pytest.raises(
        TreepackError, match=r"step-00000004: the checkpoint could not be uploaded .* kept in (.*), and"
    ) as caught:
        go(packed, config, s3.address("run"))
    assert "\n" not in str(caught.value)
    kept = Path(re.search(r"kept in (.*), and", str(caught.value))[1])  # type: ignore[index]
    assert [*kept.glob("checkpoints/.step-00000004.partial-*/rank-00000-000.safetensors")]
    s3.fault = lambda method, path: CUT if method == "PUT" and "/run/model.safetensors" in path else None
    with pytest.raises(
        TreepackError, match=r"model\.safetensors: cannot be written.* is kept in .*, and --resume"
    ) as caught:
        go(packed, config, s3.address("run"))
    kept_model = Path(re.search(r"kept in (.*), and", str(caught.value))[1])  # type: ignore[index]
    assert [*kept_model.glob(".weights.partial/model.safetensors")]
    assert not is_finished(as_path(s3.address("run")))
    s3.fault = lambda method, path: None
    _, notes = go(packed, config, s3.address("run"))
    assert notes == ["resumed after step 9 of 9"]
    assert kept.exists()
    assert s3.read("run/model.safetensors") == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_damage_in_the_store_is_found(packed: Path, config: Path, tmp_path: Path, s3: Store) -> None:
    go(packed, config, tmp_path / "whole")
    go(packed, config, s3.address("run"), until=6)
    (data,) = (name for name in s3.names("run/checkpoints/step-00000006/") if name.endswith(".safetensors"))
    content = s3.read(data)
    s3.write(data, content[:100] + bytes([content[100] ^ 1]) + content[101:])
    _, notes = go(packed, config, s3.address("run"))
    assert notes == [
        "checkpoints/step-00000006 is damaged (rank-00000-000.safetensors was altered); step-00000004 is used",
        "resumed after step 4 of 9",
    ]
    assert_equal_runs(s3, "run", tmp_path / "whole")
    # A byte in the middle of input_ids of a part of which there is no copy.
    name = PackedDataset(packed).manifest["files"][-1]["name"]
    column = pq.ParquetFile(packed / name).metadata.row_group(0).column(5)
    middle = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size // 2
    content = s3.read(f"packed/{name}")
    s3.write(f"packed/{name}", content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert not in_cache("parts")
    with pytest.raises(TreepackError, match=r"s3://.*part-.*\.parquet: .*altered"):
        go(s3.address("packed"), config, s3.address("run2"))


def test_a_cache_smaller_than_the_data_gives_the_same_run(
    packed: Path, config: Path, tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sorted(path.stat().st_size for path in packed.glob("part-*"))
    monkeypatch.setenv("TREEPACK_CACHE_SIZE", str(sizes[-1] * 2))
    go(packed, config, tmp_path / "whole")
    go(s3.address("packed"), config, s3.address("run"))
    assert_equal_runs(s3, "run", tmp_path / "whole")
    assert sum(path.stat().st_size for path in in_cache("parts")) <= sizes[-1] * 2


def test_ranks_share_the_copies_and_upload_their_shards(packed: Path, config: Path, tmp_path: Path, s3: Store) -> None:
    changes = {"epochs": 2, "checkpoint_every": 2, "keep": 2}
    cases = [
        Case("whole", packed, config, changes),
        Case("first", s3.address("packed"), config, changes, out=s3.address("run"), until=3),
        Case("rest", s3.address("packed"), config, changes, out=s3.address("run")),
    ]
    outcomes = train_over(2, tmp_path, cases)
    files = s3.names(f"run/checkpoints/{checkpoints(s3, 'run')[-1]}/")
    assert [name.rpartition("/")[2] for name in files] == [
        "checkpoint.json",
        "rank-00000-000.safetensors",
        "rank-00001-000.safetensors",
    ]
    steps = [record["step"] for name in ("first", "rest") for record in outcomes[name]["records"]]
    assert steps == [record["step"] for record in outcomes["whole"]["records"]]
    assert s3.read("run/model.safetensors") == (outcomes["whole"]["out"] / "model.safetensors").read_bytes()
    whole = (outcomes["whole"]["out"] / "metrics.jsonl").read_bytes()
    assert lines(s3.read("run/metrics.jsonl")) == lines(whole)
    assert in_cache("runs") == []
    assert len([path for path in in_cache("parts") if path.suffix == ".parquet"]) == len([*packed.glob("part-*")])


def test_of_two_processes_the_newest_owns_the_run(
    packed: Path, config: Path, tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = s3.address("run")
    first = train(open_run(packed, config, OPTIONS), out)
    for _ in range(3):
        next(first)
    wait_until(lambda: checkpoints(s3, "run") == ["step-00000002"])  # training does not wait for its upload
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "another machine"))
    _, notes = go(packed, config, out)
    assert notes == ["resumed after step 2 of 9"]
    assert "has continued or replaced this run; let only one process train there" in refusal(list, first)
    assert is_finished(as_path(out))
    go(packed, config, tmp_path / "whole")
    assert lines(s3.read("run/metrics.jsonl")) == lines((tmp_path / "whole" / "metrics.jsonl").read_bytes())


def test_a_model_is_loaded_from_an_address_and_events_are_uploaded(
    packed: Path, config: Path, tmp_path: Path, s3: Store, treepack: Run
) -> None:
    result = treepack(
        "train",
        s3.address("packed"),
        "--model",
        config,
        "--out",
        s3.address("run"),
        *TRAIN[:-1],  # not --quiet: the note with the address is expected
        "--report-to",
        "tensorboard",
    )
    assert result.status == 0, result.err
    assert f"written {s3.address('run')}\n" in result.err
    assert any(name.startswith("run/tensorboard/events") for name in s3.names("run/"))
    assert "run/owner.json" not in s3.names("run/")
    s3.write("tiny.json", config.read_bytes())
    steps, _ = go(packed, s3.address("run"), tmp_path / "continued", epochs=1)
    local = tmp_path / "copy"
    local.mkdir()
    for name in ("config.json", "model.safetensors"):
        (local / name).write_bytes(s3.read(f"run/{name}"))
    expected, _ = go(packed, local, tmp_path / "expected", epochs=1)
    assert [metrics.loss for metrics in steps] == [metrics.loss for metrics in expected]
    assert json.loads((tmp_path / "continued/run.json").read_text())["model"] == s3.address("run")
    assert not [path for path in in_cache("objects") if "checkpoints" in path.parts]
    result = treepack("train", s3.address("packed"), "--model", s3.address("tiny.json"), "--verify", "--device", "cpu")
    assert result.status == 0, result.err
    result = treepack(
        "train", packed, "--model", s3.address("nowhere"), "--out", tmp_path / "x", "--device", "cpu", "--quiet"
    )
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert f"{s3.address('nowhere')}: contains no model" in result.err


def test_two_epochs_of_a_remote_dataset_need_each_part_once(packed: Path, s3: Store) -> None:
    dataset = PackedDataset(s3.address("packed"), shuffle=True)
    s3.requests.clear()
    rows = [batch.row_id for _ in range(2) for batch in dataset]
    local = PackedDataset(packed, shuffle=True)
    assert rows == [batch.row_id for _ in range(2) for batch in local]
    loader = DataLoader(PackedDataset(s3.address("packed")), batch_size=None, num_workers=2)
    assert [batch.row_id for batch in loader] == [batch.row_id for batch in PackedDataset(packed)]
