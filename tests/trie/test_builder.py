"""Directories built by several workers: the bytes of one process, whatever the runs, ranges and parts."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.refusal import refusal
from treepack import BuildOptions, build_trie_directory
from treepack.files import parts as file_parts
from treepack.files.input_files import ranges
from treepack.ingest import stream
from treepack.ingest.read_log import ReadLog
from treepack.trie.builders import builder
from treepack.trie.builders import trie_parts as parts
from treepack.trie.builders.out_of_core import RUN_BYTES, run_size
from treepack.trie.store import trie_files


def rollouts(count: int) -> list[dict[str, Any]]:
    """Rollouts with shared beginnings, equal tokens, equal ids, steps, and some that are skipped."""
    rng = random.Random(0)
    made: list[dict[str, Any]] = []
    for i in range(count):
        start = rng.choice(made)["input_ids"] if made and rng.random() < 0.7 else []
        ids = start[: rng.randrange(len(start) + 1)] + [rng.randrange(40) for _ in range(rng.randrange(1, 300))]
        if made and i % 11 == 0:
            ids = rng.choice(made)["input_ids"]
        mask = [0] * len(ids) if i % 13 == 0 else [0] + [1] * (len(ids) - 1)
        step = rng.choice([None, 1, 2])
        made.append({"id": f"r{i % 100}", "input_ids": ids, "loss_mask": mask, "group_id": f"g{i % 9}", "step": step})
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    made = rollouts(900)
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made[:450]))
    pq.write_table(pa.Table.from_pylist(made[450:]), folder / "b.parquet", row_group_size=50)
    (folder / "c.json").write_text(json.dumps(made[:20]))
    return folder


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranges, runs and parts. All of them are planned in the first process, so its values count."""
    for module, name, value in (
        (ranges, "GROUP_BYTES", 1),
        (stream, "MIN_BYTES", 1),
        (builder, "RUN_BYTES", 100_000),
        (builder, "MIN_RUN_BYTES", 20_000),
        (file_parts, "PART_TOKENS", 20_000),
        (parts, "PART_TOKENS", 20_000),
        (trie_files, "PART_TOKENS", 20_000),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("share", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_workers_write_the_bytes_of_one_process(
    tmp_path: Path, inputs: Path, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(name: str, workers: int) -> ReadLog:
        return build_trie_directory([inputs], tmp_path / name, BuildOptions(share=share, workers=workers)).log

    logs = [build("workers", 2), build("runs", 1)]
    monkeypatch.setattr(builder, "RUN_BYTES", 1 << 27)
    logs.append(build("memory", 1))
    assert len(contents(tmp_path / "memory")) > 6
    assert contents(tmp_path / "memory") == contents(tmp_path / "runs") == contents(tmp_path / "workers")
    assert logs[0] == logs[1] == logs[2]
    assert logs[0].num_skipped > 10


@pytest.mark.usefixtures("small_sizes")
def test_the_first_error_in_order_is_raised_and_nothing_is_left(tmp_path: Path, inputs: Path) -> None:
    lines = (inputs / "a.jsonl").read_text().splitlines(keepends=True)
    lines[400] = '{"input_ids": [1, 2], "loss_mask": [1, 1, 1]}\n'
    lines[420] = "{broken\n"
    (inputs / "a.jsonl").write_text("".join(lines))
    assert "a.jsonl:401: loss_mask has 3 values for 2 tokens" in refusal(
        build_trie_directory, [inputs], tmp_path / "out" / "trie", BuildOptions(workers=2)
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small_sizes")
def test_a_worker_that_dies_in_the_merge_is_one_sentence_and_nothing_is_left(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_merge", die)
    assert "a worker process died" in refusal(
        build_trie_directory, [inputs], tmp_path / "out" / "trie", BuildOptions(workers=2)
    )
    assert not (tmp_path / "out").exists()


def die(worker: object, task: object) -> None:
    os._exit(1)


@pytest.mark.usefixtures("small_sizes")
def test_the_trie_does_not_depend_on_the_memory(tmp_path: Path, inputs: Path) -> None:
    for memory in (200_000, 1 << 40):
        build_trie_directory([inputs], tmp_path / str(memory), memory=memory)
    assert contents(tmp_path / "200000") == contents(tmp_path / str(1 << 40))


def test_runs_are_smaller_with_less_memory_and_have_a_maximum() -> None:
    assert [run_size(memory) for memory in (None, 1 << 40, 80, 1)] == [RUN_BYTES, RUN_BYTES, 10, 1]
