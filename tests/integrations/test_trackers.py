"""`treepack train --report-to wandb --report-to trackio`, offline, with the packages themselves."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make

pytestmark = pytest.mark.integrations


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a run that reports to both, without a network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    rollouts = [make(f"t{i}", [1, 2, 3 + i, 4]) for i in range(4)]
    packed = packed_directory(tmp_path / "packed", rollouts, capacity=8)
    config = tiny_config(tmp_path / "tiny.json")
    options = ["--model", str(config), "--rows-per-step", "1", "--out", str(tmp_path / "out"), "--project", "trees"]
    return ["train", str(packed), *options, "--report-to", "wandb", "--report-to", "trackio"]


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after a header of 7 bytes."""
    # Blocks of 32 KiB. A record has a header (checksum, length, type) and parts of types 2, 3, 4, or one of type 1.
    place, record = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # a header does not fit into the block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def wandb_steps(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, loss) of every offline file, by the id of its run in wandb."""
    from wandb.proto import wandb_internal_pb2

    steps: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((out / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                pair = (record.history.step.num, json.loads(values["train/loss"]))
                steps.setdefault(path.stem.removeprefix("run-"), []).append(pair)
    return steps


def trackio_steps(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, loss) by the name of the run in trackio's database."""
    steps: dict[str, list[tuple[int, float]]] = {}
    with sqlite3.connect(folder / "trees.db") as connection:
        for name, step, metrics in connection.execute("select run_name, step, metrics from metrics order by step"):
            values: dict[str, Any] = json.loads(metrics)
            if "train/loss" in values:
                steps.setdefault(name, []).append((step, values["train/loss"]))
    return steps


def test_trackers_get_every_step_and_a_resumed_run_continues_there(arguments: list[str], tmp_path: Path) -> None:
    for options in (["--steps", "2", "--min-lr-ratio", "1"], ["--steps", "4", "--min-lr-ratio", "1", "--resume"]):
        # A process of its own: trackio chooses its folder when it is imported, and other tests may have imported it.
        command = [sys.executable, "-c", "from treepack_cli import main; main()", *arguments, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "gets no more metrics" not in done.stderr
        assert "rackio" not in done.stdout  # stdout has the summary only
    run_id = json.loads((tmp_path / "out" / "tracker.json").read_text())["run_id"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    expected = [(line["step"], line["loss"]) for line in lines]
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    assert wandb_steps(tmp_path / "out") == {run_id: expected}
    assert trackio_steps(tmp_path / "TRACKIO_DIR") == {f"out-{run_id[:4]}": expected}
