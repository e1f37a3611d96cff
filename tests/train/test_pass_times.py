"""The slowest pass of a step is recorded with its rows, in few bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_run
from treepack.train.watch.pass_times import NUM_ROWS, slowest_pass


def test_the_slowest_pass_has_the_tokens_of_all_its_rows_and_the_ids_of_some() -> None:
    assert slowest_pass([0.5, 0.75, 0.75], [9, 5, 4], [7, 8, 3]) == {"seconds": 0.75, "tokens": 9, "rows": [8, 3]}
    many = slowest_pass([1.0] * 20, [2] * 20, [*range(20)])
    assert (many["tokens"], many["rows"]) == (40, [*range(NUM_ROWS)])


def test_a_run_records_the_slowest_pass_of_each_step(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [i, *generator.integers(20, 24, 8).tolist()]) for i in range(6)]
    packed = packed_directory(tmp_path / "packed", rollouts, capacity=12)
    options = TrainOptions(device="cpu", steps=2, rows_per_step=3, pass_tokens=1, checkpoint_every=0)
    run = open_run(packed, tiny_config(tmp_path / "tiny.json"), options)
    list(train(run, tmp_path / "out"))
    for line in (tmp_path / "out" / "metrics.jsonl").read_bytes().splitlines():
        slow = json.loads(line)["slowest_pass"]
        assert 0 < slow["seconds"] <= json.loads(line)["seconds"]
        (row,) = slow["rows"]  # passes of one row
        assert slow["tokens"] == int(run.dataset.num_tokens[run.dataset.row_ids.tolist().index(row)])
        assert len(line) < 600
