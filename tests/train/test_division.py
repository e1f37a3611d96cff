"""Rows of a run in blocks: each machine computes its own, and the number of blocks stays when the machines change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.command_line import Run
from support.oracle_model import tiny_config, write_rows
from support.passes import rows_alone
from support.rank_processes import Case, train_over
from support.strategies import make
from treepack.data.blocks import interleave
from treepack.data.epochs import block_of_rows
from treepack.data.mixture import open_packed
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest, write_manifest
from treepack.train.division import Division, choose_blocks, divide_rows
from treepack.train.options import TrainOptions
from treepack.train.passes import deal
from treepack.train.ranks import Ranks, num_machines
from treepack.train.saving.choices import with_recorded
from treepack.train.schedule import plan_steps

OPTIONS = TrainOptions(rows_per_step=4, epochs=2)
ROWS = np.arange(12)


@given(
    machines=st.sampled_from([1, 2, 3, 4, 6]),
    local=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    rows_per_step=st.integers(1, 30),
    data=st.data(),
)
def test_a_machine_computes_rows_of_its_blocks_in_as_many_micro_batches_as_without_blocks(
    machines: int, local: int, sizes: list[int], rows_per_step: int, data: st.DataObject
) -> None:
    blocks = data.draw(st.sampled_from([machines, 8] if machines in (1, 2, 4) else [machines]))
    steps: list[int | None] = [step for step, size in enumerate(sizes) for _ in range(size)]
    rows = np.array(data.draw(st.lists(st.sampled_from(range(len(steps))), unique=True)) if steps else [], np.int64)
    rows.sort()
    division = Division(machines, blocks, block_of_rows(steps, rows, blocks=blocks))
    costs, size = np.random.default_rng(0).uniform(1, 2, len(steps)), machines * local
    seen = []
    for part in [rows[[steps[row] == step for row in rows.tolist()]] for step in range(len(sizes))]:
        if len(part) == 0:
            continue
        order = interleave(part, blocks, None, np.random.default_rng(1)).tolist()
        for start in range(0, len(order), rows_per_step):
            step_rows = order[start : start + rows_per_step]
            shares = deal(step_rows, costs, size, rows_alone(len(steps)), division)
            assert {len(share) for share in shares} == {-(-len(step_rows) // size)}
            for rank, share in enumerate(shares):
                own = [row for each in share for row in each]
                seen += own
                # The machine reads no row of a different block.
                assert set(own) <= set(division.rows_of(rank // local).tolist())
    assert sorted(seen) == rows.tolist()


@given(
    owners=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    machines=st.integers(1, 4),
    local=st.integers(1, 3),
    blocks=st.integers(1, 6),
)
def test_any_rows_are_dealt_once_in_equally_many_micro_batches(
    owners: list[int], machines: int, local: int, blocks: int
) -> None:
    division = Division(machines, blocks, np.array(owners) % blocks)
    joining = rows_alone(len(owners))
    shares = deal(range(len(owners)), np.ones(len(owners)), machines * local, joining, division)
    assert {len(share) for share in shares} == {-(-len(owners) // (machines * local))}
    assert sorted(row for share in shares for own in share for row in own) == [*range(len(owners))]


def test_the_machines_of_a_block_are_its_part_of_all_machines() -> None:
    division = Division(4, 2, np.array([0, 1, 1, 0, -1]))
    assert [division.rows_of(machine).tolist() for machine in range(4)] == [[0, 3], [0, 3], [1, 2], [1, 2]]
    assert division.divide([0, 1, 2, 3], 1) == [[0], [3], [1], [2]]


def test_torchrun_tells_the_number_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for local in ("2", "8", "3", "", "0"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        numbers.append(num_machines(8))
    assert numbers == [4, 1, None, None, None]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Twelve rows without a training step."""
    return write_rows(tmp_path / "twelve", [make(f"t{i}", [i, *range(8 + i % 3)]) for i in range(12)], range(12))


def test_rows_on_this_machine_and_rows_of_one_machine_have_one_block(packed: Path) -> None:
    dataset, several = open_packed(packed), Ranks(1, 4, machines=2)
    assert choose_blocks(dataset, ROWS, OPTIONS, several) == (1, ())
    assert choose_blocks(dataset, ROWS, replace(OPTIONS, blocks=3), several) == (3, ())
    dataset.is_local = False  # type: ignore[union-attr]  # as for an address, without a store
    blocks, notes = choose_blocks(dataset, ROWS, OPTIONS, several)
    assert blocks == 2
    assert notes == ("the rows are divided into 2 blocks, and each machine reads its own",)
    assert choose_blocks(dataset, ROWS, OPTIONS, Ranks(1, 4, machines=1)) == (1, ())
    assert choose_blocks(dataset, ROWS, OPTIONS, Ranks(1, 4)) == (1, ())
    assert divide_rows(dataset, ROWS, 1, several) is None
    for rank, rows in ((0, range(6)), (1, range(6)), (2, range(6, 12)), (3, range(6, 12))):
        division = divide_rows(dataset, ROWS, 2, Ranks(rank, 4))  # each block has a machine
        assert division is not None
        assert division.rows_of(rank // 2).tolist() == [*rows]


def test_balanced_rows_have_no_blocks(packed: Path) -> None:
    manifest = read_manifest(packed)
    manifest["options"]["balance"] = 4
    write_manifest(packed, manifest)
    dataset = open_packed(packed)
    with pytest.raises(TreepackError, match=r"twelve: was packed with --balance, .*; omit --blocks or give --blocks 1"):
        choose_blocks(dataset, ROWS, replace(OPTIONS, blocks=2), Ranks())
    dataset.is_local = False  # type: ignore[union-attr]
    blocks, notes = choose_blocks(dataset, ROWS, OPTIONS, Ranks(0, 2, machines=2))
    assert blocks == 1
    assert "each machine may read all parts: " in notes[0]


def test_blocks_have_the_shares_of_the_directories(tmp_path: Path, packed: Path) -> None:
    other = write_rows(tmp_path / "three", [make(f"u{i}", [i, 1]) for i in range(3)], range(3))
    dataset, mixed = open_packed([packed, other]), replace(OPTIONS, mix=(1.0, 1.0))
    with pytest.raises(TreepackError, match=r"three: has 3 rows .*, too few for shares in each of 4 blocks; omit"):
        choose_blocks(dataset, np.arange(15), replace(mixed, blocks=4), Ranks())
    assert choose_blocks(dataset, np.arange(15), replace(OPTIONS, blocks=4), Ranks()) == (4, ())
    options = replace(mixed, blocks=3, rows_per_step=6, epochs=4)
    assert choose_blocks(dataset, np.arange(15), options, Ranks()) == (3, ())
    division = divide_rows(dataset, np.arange(15), 3, Ranks(0, 3))
    assert division is not None
    full = [step for step in plan_steps(dataset, options) if len(step.rows) == 6]
    assert len(full) == 8
    for step in full:
        assert 2 <= sum(row < 12 for row in step.rows) <= 4
        for machine, share in enumerate(deal(step.rows, np.ones(15), 3, rows_alone(15), division)):
            assert {row for own in share for row in own} <= set(division.rows_of(machine).tolist())


def test_a_run_without_blocks_has_the_record_and_the_order_of_one_that_names_none(packed: Path) -> None:
    assert "blocks" not in OPTIONS.as_record()
    assert "blocks" not in replace(OPTIONS, blocks=1).as_record()
    assert replace(OPTIONS, blocks=2).as_record()["blocks"] == 2
    dataset = open_packed(packed)
    assert plan_steps(dataset, OPTIONS) == plan_steps(dataset, replace(OPTIONS, blocks=1))
    schedule = plan_steps(dataset, replace(OPTIONS, blocks=4))
    assert schedule != plan_steps(dataset, OPTIONS)
    for step in schedule:  # of each quarter of the files one row
        assert sorted(row // 3 for row in step.rows) == [0, 1, 2, 3]


@pytest.mark.slow
def test_losses_and_gradients_of_blocks_do_not_depend_on_the_number_of_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    rollouts = [
        make(f"t{i}", [i, *generator.integers(20, 24, 4 + i).tolist()], group=f"g{i // 3}", advantage=i % 3 - 1.0)
        for i in range(11)
    ]
    packed, config = write_rows(tmp_path / "eleven", rollouts, range(11)), tiny_config(tmp_path / "tiny.json")
    changes = {"blocks": 2, "rows_per_step": 4, "epochs": 2, "eval_every": 2}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    cases = [Case(loss, packed, config, changes, loss, held_out=packed) for loss in ("sft", "grpo")]
    one, two = (train_over(size, tmp_path, cases) for size in (0, 2))
    for case in cases:
        for name in ("loss", "grad_norm", "eval_loss", "total_weight", "tokens"):
            expected = [record[name] for record in one[case.name]["records"] if name in record]
            assert len(expected) >= 3
            assert [record[name] for record in two[case.name]["records"] if name in record] == pytest.approx(
                expected, rel=2e-5, abs=1e-6
            )
        for name, gradient in one[case.name]["gradients"].items():
            torch.testing.assert_close(two[case.name]["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_keeps_its_blocks(treepack: Run, tmp_path: Path, packed: Path) -> None:
    config, out = tiny_config(tmp_path / "tiny.json"), tmp_path / "out"
    arguments = ["train", str(packed), "--model", str(config), "--rows-per-step", "4", "--min-lr-ratio", "1"]
    arguments += ["--lr", "0.01", "--device", "cpu", "--quiet"]
    assert with_recorded(OPTIONS, out, Ranks()).blocks is None
    done = treepack(*arguments, "--blocks", "3", "--steps", "2", "--out", str(out))
    assert done.status == 0, done.err
    assert with_recorded(OPTIONS, out, Ranks()).blocks == 3
    assert json.loads((out / "run.json").read_text())["options"]["blocks"] == 3
    done = treepack(*arguments, "--resume", "--blocks", "2", "--steps", "4", "--out", str(out))
    assert done.status == 1
    assert "cannot resume: --blocks was 3 when the run started and is 2 now" in done.err
    done = treepack(*arguments, "--resume", "--steps", "4", "--out", str(out))
    assert done.status == 0, done.err
    whole = treepack(*arguments, "--blocks", "3", "--steps", "4", "--out", str(tmp_path / "whole"))
    assert whole.status == 0, whole.err
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
