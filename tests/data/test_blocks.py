"""Blocks and tables of a machine: every row once, neighbouring rows, tables computed once."""

from __future__ import annotations

import json
import multiprocessing
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.oracle_model import write_rows
from support.refusal import refusal
from support.strategies import make
from treepack.data import machine_tables
from treepack.data.blocks import cut_blocks, interleave, turns
from treepack.data.dataset import PackedDataset
from treepack.data.epochs import block_of_rows, epoch_order, epoch_rounds, file_order
from treepack.data.machine_tables import MachineTables
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest, write_manifest

STEPS = st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=40)


@given(steps=STEPS, seed=st.integers(0, 9), epoch=st.integers(0, 3), data=st.data())
def test_one_block_is_a_shuffle_of_each_training_step(
    steps: list[int | None], seed: int, epoch: int, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.sampled_from(range(len(steps))), unique=True).map(sorted)) if steps else []
    generator, expected = np.random.default_rng([seed, epoch]), []
    for step in sorted({steps[row] for row in rows}, key=lambda step: (step is not None, step or 0)):
        expected.append(generator.permutation(np.array([row for row in rows if steps[row] == step], np.int64)))
    order = epoch_order(steps, rows, seed=seed, epoch=epoch)
    assert [part.tolist() for part in order] == [part.tolist() for part in expected]


@given(blocks=st.integers(1, 9), sizes=st.lists(st.integers(0, 20), max_size=3), seed=st.integers(0, 9))
def test_consecutive_rows_of_the_order_are_one_of_each_block(blocks: int, sizes: list[int], seed: int) -> None:
    owners = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.arange(len(owners)) * 3
    block_of = cut_blocks(blocks, owners)
    for owner in range(len(sizes)):  # neighbouring rows of each directory, in nearly equal numbers
        own = block_of[owners == owner]
        assert (np.diff(own) >= 0).all()
        counts = np.bincount(own, minlength=blocks)
        assert counts.max(initial=0) - counts.min(initial=len(own)) <= 1
    order = interleave(rows, blocks, owners, np.random.default_rng(seed))
    assert sorted(order) == rows.tolist()
    visited = block_of[order // 3]
    for start in range(len(rows)):
        window = visited[start : start + blocks].tolist()
        assert len(set(window)) == len(window)


@pytest.mark.parametrize(("machines", "blocks"), [(1, 8), (2, 8), (4, 8), (8, 8), (2, 2), (3, 3), (6, 6)])
def test_blocks_that_take_turns_are_those_of_different_machines(machines: int, blocks: int) -> None:
    places = turns(blocks) * machines // blocks  # the machine of each turn
    assert sorted(turns(blocks)) == [*range(blocks)]
    for start in range(0, blocks, machines):
        assert sorted(places[start : start + machines]) == [*range(machines)]


@given(steps=STEPS, machines=st.integers(1, 4), local=st.integers(1, 3), double=st.booleans(), shuffle=st.booleans())
def test_the_ranks_of_a_machine_take_rows_of_its_blocks_only(
    steps: list[int | None], machines: int, local: int, double: bool, shuffle: bool
) -> None:
    steps = sorted(steps, key=lambda step: (step is not None, step or 0))
    blocks, world = machines * (2 if double and machines in (1, 2, 4) else 1), machines * local
    parts = epoch_order(steps, range(len(steps)), seed=1, epoch=0, blocks=blocks) if shuffle else None
    table = epoch_rounds(parts or file_order(steps, blocks=blocks), world, blocks=blocks)
    assert sorted(table[table >= 0]) == [*range(len(steps))]
    block_of = block_of_rows(steps, range(len(steps)), blocks=blocks)
    for rank in range(world):
        own = table[:, rank]
        assert set(block_of[own[own >= 0]] * machines // blocks) <= {rank // local}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Eleven rows of the training steps 0 (six rows) and 1."""
    return write_rows(tmp_path / "eleven", [make(f"t{i}", [i, 1, 2], step=i // 6) for i in range(11)], range(11))


def in_order(ranks: list[PackedDataset], num_rounds: int | None = None) -> list[set[int]]:
    """Return the rows of each round of the epoch."""
    iterators = [islice(iter(rank), num_rounds) for rank in ranks]
    return [{batch.row_id for batch in batches} - {-1} for batches in zip(*iterators, strict=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_in_blocks_continues_with_other_ranks_and_machines(packed: Path, shuffle: bool) -> None:
    def open_ranks(world: int, blocks: int) -> list[PackedDataset]:
        return [
            PackedDataset(packed, shuffle=shuffle, seed=3, rank=rank, world=world, blocks=blocks)
            for rank in range(world)
        ]

    (whole,) = open_ranks(1, 2)
    order = [batch.row_id for batch in whole]
    assert sorted(order) == [*range(11)]
    assert order != [batch.row_id for batch in open_ranks(1, 1)[0]]
    for num_rounds in range(4):
        before = open_ranks(4, 2)
        first = in_order(before, num_rounds)
        states = [json.dumps(rank.state_dict()) for rank in before]
        assert len(set(states)) == 1
        # Ranks get the rows of a round in another order, but the rows of each round are those of one process.
        rows = [row for rows in first for row in sorted(rows, key=order.index)]
        assert rows == order[: len(rows)]
        for world, blocks in ((3, 3), (1, 1)):
            after = open_ranks(world, blocks)
            for rank in after:
                rank.load_state_dict(json.loads(states[0]))
            rest = in_order(after)
            assert [row for rows in rest for row in sorted(rows, key=order.index)] == order[len(rows) :]
            assert after[0].blocks == 2


def test_a_state_without_blocks_is_one_of_an_order_without_them(packed: Path) -> None:
    plain = PackedDataset(packed, shuffle=True)
    assert "blocks" not in plain.state_dict()
    other = PackedDataset(packed, shuffle=True, blocks=2)
    other.load_state_dict(plain.state_dict())
    assert [batch.row_id for batch in other] == [batch.row_id for batch in plain]


def test_rows_of_a_balanced_plan_are_not_parted(packed: Path) -> None:
    assert "blocks is 0; expected at least 1" in refusal(PackedDataset, packed, blocks=0)
    manifest = read_manifest(packed)
    manifest["options"]["balance"] = 2
    write_manifest(packed, manifest)
    assert len(PackedDataset(packed, world=2)) == 11
    with pytest.raises(TreepackError, match=r"eleven: was packed with --balance, .*; give blocks=1, or pack without"):
        PackedDataset(packed, blocks=2)


TABLE = pa.table({"row_id": pa.array(range(1000)), "step": pa.array([None, 7] * 500, pa.int64())})


NOTED = TABLE.replace_schema_metadata({"columns": "[]"})


def never() -> pa.Table:
    pytest.fail("computed a table that is there")


def test_a_table_is_computed_once_for_each_name_and_content(tmp_path: Path) -> None:
    assert MachineTables(tmp_path / "tables", "one").get("rows", lambda: NOTED).equals(NOTED)
    table = MachineTables(tmp_path / "tables", "one").get("rows", never)
    assert table.equals(NOTED)
    assert table.schema.metadata == NOTED.schema.metadata
    assert MachineTables(tmp_path / "tables", "one").get("other", lambda: TABLE[:3]).num_rows == 3
    assert MachineTables(tmp_path / "tables", "two").get("rows", lambda: TABLE[:4]).num_rows == 4
    assert MachineTables(None, "one").get("rows", lambda: TABLE[:5]).num_rows == 5


@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_damaged_table_is_computed_again(tmp_path: Path, place: int) -> None:
    tables = MachineTables(tmp_path, "one")
    tables.get("rows", lambda: TABLE)
    (path,) = tmp_path.glob("*.arrow")
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    for damaged in (content, content[:-1], content[:7], b""):
        path.write_bytes(bytes(damaged))
        assert tables.get("rows", lambda: TABLE).equals(TABLE)
        assert tables.get("rows", never).equals(TABLE)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tables = MachineTables(tmp_path / "file" / "tables", "one")
    assert tables.get("rows", lambda: TABLE).equals(TABLE)
    assert tables.get("rows", lambda: TABLE[:1]).num_rows == 1


def test_what_a_killed_process_left_and_old_tables_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_tables, "_MAX_TABLES", 2)
    (tmp_path / "a-rows.1234.partial").write_text("half")
    for key in "abc":
        MachineTables(tmp_path, key).get("rows", lambda: TABLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{key}-rows.{suffix}" for key in "bc" for suffix in ("arrow", "lock")
    ]


def _compute(folder: Path, barrier: Any, results: Any) -> None:
    computed: list[int] = []

    def compute() -> pa.Table:
        computed.append(1)
        time.sleep(0.1)  # all others wait meanwhile
        return TABLE

    barrier.wait()
    table = MachineTables(folder, "one").get("rows", compute)
    results.put((len(computed), table.equals(TABLE)))


def test_of_several_processes_one_computes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_compute, args=(tmp_path, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == [(0, True)] * 3 + [(1, True)]
    for process in processes:
        process.join()
