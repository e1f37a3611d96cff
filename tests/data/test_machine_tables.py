"""Tables that the processes of a machine share: computed once, whole or absent, and equal for all of them."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from treepack.data import machine_tables
from treepack.data.machine_tables import MachineTables

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
