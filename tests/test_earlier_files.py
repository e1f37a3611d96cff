"""Directories that treepack 0.2.0 wrote, in tests/earlier: each is read, and has the same result as in that version.

trie      four rollouts with values in every column        packed    its rows
run       two steps of grpo on these rows, from random weights of model.json; without its checkpoints
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.paths import ROOT
from treepack.columns import COLUMNS
from treepack.files.manifest import Provenance, read_manifest
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.trie import trajectories_of

EARLIER = ROOT / "tests" / "earlier"


def parts_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_a_trie_is_read_and_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    trie = read_trie(EARLIER / "trie")
    check_trie(trie)
    write_trie(build_trie(trajectories_of(trie)), tmp_path)
    assert parts_of(tmp_path) == parts_of(EARLIER / "trie")
    assert len(parts_of(tmp_path)) == 2


def test_rows_are_checked_and_packed_again_with_the_same_columns(tmp_path: Path) -> None:
    trie, manifest = read_trie(EARLIER / "trie"), read_manifest(EARLIER / "packed", "treepack-packed")
    rows = list(read_rows(EARLIER / "packed"))
    check_packed(rows, manifest, trie)
    (row,) = rows
    assert [column.name for column in COLUMNS if getattr(row.terms, column.name) is None] == ["entropy"]
    again = pack_rows(trie, plan_rows(trie, capacity=16))
    write_packed(again, tmp_path, capacity=16, provenance=Provenance(options=manifest["options"]))
    new, old = (pq.read_table(folder / "part-00000.parquet") for folder in (tmp_path, EARLIER / "packed"))
    # Numbers of rollouts are newer; the denominator that needs them refuses rows without them.
    assert new.drop_columns("trajectory_rollout_numbers").equals(old)
    (numbers,) = new["trajectory_rollout_numbers"].to_pylist()
    assert [numbers.index(each) for each in numbers] == old["trajectory_rollouts"].to_pylist()[0]


def test_rows_train_as_they_did(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from treepack.objectives.objective import choose_objective
    from treepack.train.loop import train
    from treepack.train.options import TrainOptions
    from treepack.train.setup.opening import open_run

    shutil.copytree(EARLIER / "packed", tmp_path / "packed")
    shutil.copy(EARLIER / "model.json", tmp_path)
    options = TrainOptions(objective=choose_objective("grpo"), steps=2, rows_per_step=1)
    run = open_run(tmp_path / "packed", tmp_path / "model.json", options)
    assert len(list(train(run, tmp_path / "run"))) == 2
    found, expected = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "run", EARLIER / "run")
    )
    for name in ("loss", "grad_norm", "ratio"):
        values = [each[name] for each in expected]
        assert [each[name] for each in found] == pytest.approx(values, rel=1e-5), name


def test_the_model_of_a_run_is_loaded() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from treepack.model.load import load_model

    model = load_model(str(EARLIER / "run")).model
    stored = load_file(EARLIER / "run" / "model.safetensors")
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], values) for name, values in stored.items())
    assert len(stored) > 5
