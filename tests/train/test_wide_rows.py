"""The benchmark of wide rows: its rows, and a dry run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import wide_rows
from workloads import star

from support.oracle_model import Sample, make_row


def test_copies_of_a_tree_do_not_see_each_other() -> None:
    tree = star("star", 3, 2, 4)
    (end,) = {tuple(each) for each in wide_rows.copies_of(tree, 3).subtree_end.reshape(3, -1) - [[0], [11], [22]]}
    assert end == tuple(tree.subtree_end)
    # The same row from three prefixes of its own: each copy begins with another token.
    samples = [Sample((copy, 1, 2, branch, 5, 6, 7), (0.0,) * 7) for copy in range(3) for branch in (3, 4)]
    assert np.array_equal(wide_rows.copies_of(tree, 3).subtree_end, make_row(samples).subtree_end)


@pytest.mark.slow
def test_a_dry_run_has_equal_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide_rows.main(["--dry-run", "--repeats", "1", "--json", str(tmp_path / "rows.json")])  # raises if losses differ
    records = json.loads((tmp_path / "rows.json").read_text())
    assert [record["way"] for record in records] == ["checkpointed", "auto", "offloaded", "wide"]
    assert records[3]["tokens"] == 4 * records[0]["tokens"]
    assert [record["pinned"] > 0 for record in records] == [False, False, True, True]
    assert "2 of 2 free in the end" in capsys.readouterr().out
