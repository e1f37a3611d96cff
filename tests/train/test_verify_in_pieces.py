"""`treepack train --verify --carry N` compares rows that are cut, and refuses to compare none."""

from __future__ import annotations

import re
from pathlib import Path

from support.command_line import Run as Command
from support.oracle_model import tiny_config, write_rows
from support.packed_objectives import as_trajectories, rollouts
from treepack.pack.files import read_rows

ROWS = [0, 0, 0, 0, 0, 0, 0, 1, 1, 2]  # the row of each of ten rollouts


def test_verification_takes_the_shortest_rows_that_are_cut(treepack: Command, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), ROWS)
    short, middle, long = sorted((row.num_tokens, row.row_id) for row in read_rows(packed))
    assert short[0] < middle[0] < long[0]
    common = ("train", packed, "--model", config, "--device", "cpu", "--verify", "--verify-rows", 1)
    done = treepack(*common)
    table = table_of(done.out)
    assert (done.status, table["compared rows"], "pieces" in table) == (0, str(short[1]), False)
    done = treepack(*common, "--carry", short[0], "--loss", "gspo")
    table = table_of(done.out)
    assert (done.status, table["compared rows"]) == (0, str(middle[1]))
    assert table["pieces"] == f"of at most {short[0]} tokens, in 1 of 1 rows"
    assert float(table["largest gradient error"].split()[0]) < 1e-9


def table_of(out: str) -> dict[str, str]:
    """The names and values of a printed table."""
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in out.splitlines())


def test_verification_in_pieces_of_no_row_is_refused(treepack: Command, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), ROWS)
    done = treepack("train", packed, "--model", config, "--device", "cpu", "--verify", "--carry", 500)
    assert done.status == 1
    assert "no compared row has more than" in done.err
    assert "give a smaller number to --carry" in done.err
